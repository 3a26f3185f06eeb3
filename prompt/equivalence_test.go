package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/shared"
)

// chain returns the blocks of a body, short ones so that every byte tells.
func chain(t testing.TB, kind Kind, body string) []Block {
	t.Helper()
	p := parse(t, kind, body)
	// Eight bytes more, of every value: the last block is full, whatever the length.
	p.Text = append(p.Text, strings.Repeat("\x00", 8-len(p.Text)%8)...)
	return p.AppendBlocks(nil, p.Model, 8)
}

// The same request as SDKs spell it. Text and tools hold what they spell in
// different ways: quotes, newlines, letters beyond ASCII and the BMP, HTML's
// signs, and the line separator.
const (
	// json= of Python's requests: spaces, and everything but ASCII escaped.
	pythonRequests = `{"model": "tiny", "messages": [{"role": "system", "content": "Say \"caf\u00e9\"\n<&>\u2028\ud83d\ude00 a/b"}, ` +
		`{"role": "user", "content": "why?"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function", ` +
		`"function": {"name": "look", "arguments": "{\"q\": \"caf\\u00e9 <\", \"n\": 1}"}}]}, {"role": "tool", "tool_call_id": "call_1", ` +
		`"content": "none"}], ` +
		`"tools": [{"type": "function", "function": {"name": "look", "description": "Look \u00e9 <it> up", "parameters": {"properties": {"q": ` +
		`{"type": "string"}}, "type": "object"}}}]}`
	// httpx, under the openai package: compact, nothing escaped that need not be.
	pythonOpenAI = `{"messages":[{"role":"system","content":"Say \"café\"\n<&>` + "\u2028" + `😀 a/b"},{"role":"user","content":"why?"},` +
		`{"role":"assistant","tool_calls":[{"id":"call_2","function":{"arguments":"{\"q\":\"café <\",\"n\":1}","name":"look"},` +
		`"type":"function"}]},` +
		`{"role":"tool","content":"none","tool_call_id":"call_2"}],"model":"tiny","temperature":0.5,"stream":true,` +
		`"tools":[{"type":"function","function":{"name":"look","description":"Look é <it> up",` +
		`"parameters":{"properties":{"q":{"type":"string"}},"type":"object"}}}]}`
	// JSON.stringify, with another order of keys.
	nodeOpenAI = `{"model":"tiny","tools":[{"function":{"parameters":{"properties":{"q":{"type":"string"}},"type":"object"},` +
		`"description":"Look é <it> up","name":"look"},"type":"function"}],` +
		`"messages":[{"content":[{"type":"text","text":"Say \"café\"\n<&>` + "\u2028" +
		`😀 a/b"}],"role":"system"},{"role":"user","content":"why?"},` +
		`{"role":"assistant","content":"","tool_calls":[{"id":"call_3","type":"function","function":{"name":"look","arguments":"{\"q\":\"café ` +
		`<\",\"n\":1}"}}]},` +
		`{"role":"tool","tool_call_id":"call_3","content":"none"}],"stream":false,"max_completion_tokens":9}`
	// Slashes escaped, as PHP writes them.
	php = `{"model":"tiny","messages":[{"role":"system","content":"Say \"caf\u00E9\"\n<&>\u2028\uD83D\uDE00 a\/b"},{"role":"user",` +
		`"content":"why?"},` +
		`{"role":"assistant","content":null,"tool_calls":[{"id":"call_4","type":"function","function":{"name":"look",` +
		`"arguments":"{\"q\":\"caf\\u00e9 <\",\"n\":1}"}}]},` +
		`{"role":"tool","tool_call_id":"call_4","content":"none"}],` +
		`"tools":[{"type":"function","function":{"name":"look","description":"Look \u00e9 <it> up",` +
		`"parameters":{"properties":{"q":{"type":"string"}},"type":"object"}}}]}`
)

// goOpenAI is that request from the Go SDK.
func goOpenAI(t *testing.T) string {
	assistant := openai.ChatCompletionAssistantMessageParam{ToolCalls: []openai.ChatCompletionMessageToolCallUnionParam{{
		OfFunction: &openai.ChatCompletionMessageFunctionToolCallParam{ID: "call_5",
			Function: openai.ChatCompletionMessageFunctionToolCallFunctionParam{Name: "look", Arguments: `{"q": "café <", "n": 1}`}}}}}
	body, err := openai.ChatCompletionNewParams{
		Model: "tiny",
		Messages: []openai.ChatCompletionMessageParamUnion{
			openai.SystemMessage("Say \"café\"\n<&>\u2028😀 a/b"), openai.UserMessage("why?"),
			{OfAssistant: &assistant}, openai.ToolMessage("none", "call_5"),
		},
		Tools: []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: "look", Description: openai.String("Look é <it> up"),
			Parameters: shared.FunctionParameters{"type": "object", "properties": map[string]any{"q": map[string]any{"type": "string"}}},
		})},
		Seed: openai.Int(4),
	}.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestEquivalentBodies(t *testing.T) {
	user := func(content string) string {
		return `{"model":"m","messages":[{"role":"user","content":` + content + `}]}`
	}
	plain := user(`"one\ntwo"`)
	call := func(arguments string) string {
		return `{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":` + arguments + `}}]}]}`
	}
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	for _, c := range []struct {
		name   string
		bodies []string
	}{
		{"SDKs", []string{pythonRequests, pythonOpenAI, nodeOpenAI, php, goOpenAI(t)}},
		{"text, one part, several parts", []string{plain, user(`[{"type":"text","text":"one\ntwo"}]`),
			user(`[{"type":"text","text":"one"},{"text":"two","type":"text"}]`),
			user(`[{"type":"input_text","text":"one"},{"type":"refusal","refusal":"two"}]`),
			user(`[{"type":"text","text":"one"},{"type":"text","text":null},{"thinking":"two","type":"thinking"}]`),
			user(`[{"type":"text","text":"one","cache_control":{"type":"ephemeral"}},{"type":"output_text","text":"two"}]`), user(`["one","two"]`)}},
		{"no text", []string{user(`null`), user(`""`), user(`[]`), user(`[{"type":"text","text":""}]`),
			`{"model":"m","messages":[{"role":"user"}]}`}},
		{"sampling parameters", []string{plain, strings.Replace(plain, `{"model"`, `{"temperature":1,"top_p":0.5,"stop":["x"],"seed":1,"n":2,`+
			`"user":"u","logprobs":true,"response_format":{"type":"json_object"},"stream":true,"stream_options":{"include_usage":true},`+
			`"max_tokens":3,"model"`, 1)}},
		{"how the prompt ends", []string{plain, strings.Replace(plain, `{"model"`, `{"add_generation_prompt":false,`+
			`"continue_final_message":true,"model"`, 1)}},
		{"key order and escaped keys", []string{plain, `{"m\u0065ssages":[{"\u0063ontent":"one\ntwo","role":"\u0075ser"}],"\u006dodel":"m"}`}},
		{"last of equal keys", []string{plain, `{"model":"m","messages":[{"role":"system","content":"x","role":"user","content":"one\ntwo"}]}`}},
		{"members of a message in any order", []string{`{"messages":[{"role":"assistant","name":"n","reasoning":"r","content":"c"}]}`,
			`{"messages":[{"role":"assistant","content":"c","name":"n","reasoning":"r"}]}`,
			`{"messages":[{"content":"c","reasoning":"r","role":"assistant","name":"n"}]}`,
			`{"messages":[{"role":"user","content":["x"],"content":"y","content":"c","role":"assistant","reasoning":"r","name":"n"}]}`}},
		{"settings that are null", []string{plain, strings.Replace(plain, `{"model"`, `{"cache_salt":null,"chat_template":null,`+
			`"documents":null,"tools":null,"tool_choice":"auto","model"`, 1)}},
		{"spelling of settings", []string{`{"chat_template_kwargs":{"a":"\u00e9"},"cache_salt":"s",` + hi + `}`, `{"cache_salt":"s",` + hi +
			`,"chat_template_kwargs": { "a": "é" } }`}},
		{"arguments", []string{call(`"{\"a\":[1,\"é\"]}"`), call(`"{ \"a\" : [1, \"\\u00e9\"]}\n"`), call(`{"a":[1,"é"]}`)}},
		{"arguments that are no object", []string{call(`"{}"`), call(`""`), call(`null`), call(`"[1]"`), call(`"{\"a\":"`), call(`"{} x"`),
			call(`{}`)}},
		{"function_call of old, which vLLM drops", []string{`{"messages":[{"role":"assistant","content":"a"}]}`,
			`{"messages":[{"role":"assistant","content":"a","function_call":{"name":"f","arguments":"{}"}}]}`}},
		{"tools whose optional fields are null", []string{`{"tools":[{"type":"function","function":{"name":"f"}}],` + hi + `}`,
			`{` + hi + `,"tools":[{"function":{"strict":null,"description":null,"name":"f","parameters":null},"type":"function"}]}`}},
		{"billing line of Claude Code", []string{`{"messages":[{"role":"system","content":"Be brief."}]}`,
			`{"messages":[{"role":"system","content":"x-anthropic-billing-header: cch=1f;\nBe brief."}]}`,
			`{"messages":[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: cch=2e;"},{"type":"text","text":"Be ` +
				`brief."}]}]}`}},
		{"members of an image", []string{user(`[{"type":"image_url","image_url":{"url":"http://a/b"}}]`),
			user(`[{"image_url":{"url":"http:\/\/a/b"}, "type":"image_url","cache_control":{}}]`)}},
		{"an image's uuid", []string{user(`[{"type":"image_url","image_url":{"url":"http://a/b"},"uuid":"u"}]`),
			user(`[{"type":"image_url","image_url":null,"uuid":"u"}]`),
			user(`[{"uuid":"\u0075","image_url":{"url":"data:image/png;base64,AA=="}}]`), user(`[{"type":"image_url","uuid":"u"}]`)}},
		{"a video's uuid", []string{user(`[{"type":"video_url","video_url":{"url":"http://a/b"},"uuid":"u"}]`),
			user(`[{"type":"video_url","video_url":null,"uuid":"u"}]`)}},
		{"reasoning under its old name", []string{`{"messages":[{"role":"assistant","reasoning":"r"}]}`,
			`{"messages":[{"role":"assistant","reasoning_content":"r"}]}`,
			`{"messages":[{"role":"assistant","reasoning":"r","reasoning_content":"s"}]}`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := chain(t, Chat, c.bodies[0])
			for _, body := range c.bodies[1:] {
				if got := chain(t, Chat, body); !slices.Equal(got, want) {
					t.Errorf("%s\n%q, unlike\n%s\n%q", body, parse(t, Chat, body).Text, c.bodies[0], parse(t, Chat, c.bodies[0]).Text)
				}
			}
		})
	}
	text := chain(t, Completion, `{"prompt":"one","model":"m"}`)
	for _, body := range []string{`{"model":"m","prompt":["one"],"max_tokens":4}`, `{"model":"m","prompt":["on\u0065","two"],"suffix":"s"}`} {
		if !slices.Equal(chain(t, Completion, body), text) {
			t.Errorf("%s is unlike the same prompt alone", body)
		}
	}
	ids := chain(t, Completion, `{"prompt":[1,2,70000]}`)
	for _, body := range []string{`{"prompt":[[1, 2, 70000]]}`, `{"prompt":[[1,2,70000],[5]]}`} {
		if !slices.Equal(chain(t, Completion, body), ids) {
			t.Errorf("%s is unlike the same ids alone", body)
		}
	}
}

// No two of these bodies have a block in common: what differs is in the seed,
// or comes before all text.
func TestDifferentSeeds(t *testing.T) {
	const m = `"messages":[{"role":"user","content":"hello there"}]`
	bodies := map[Kind][]string{
		Chat: {
			`{` + m + `}`,
			`{"messages":[{"role":"human","content":"hello there"}]}`,
			`{"messages":[{"role":"u","name":"ser","content":"hello there"}]}`,
			`{"model":"m",` + m + `}`,
			`{"model":"adapter",` + m + `}`,
			`{"cache_salt":"a",` + m + `}`,
			`{"cache_salt":"b",` + m + `}`,
			`{"chat_template":"a",` + m + `}`,
			`{"chat_template_kwargs":{"enable_thinking":true},` + m + `}`,
			`{"chat_template_kwargs":{"enable_thinking":false},` + m + `}`,
			`{"add_special_tokens":true,` + m + `}`,
			`{"mm_processor_kwargs":{"fps":1},` + m + `}`,
			`{"media_io_kwargs":{"fps":1},` + m + `}`,
			`{"documents":[{"text":"hello there"}],` + m + `}`,
			`{"reasoning_effort":"low",` + m + `}`,
			`{"reasoning_effort":"high",` + m + `}`,
			`{"tool_choice":"none",` + m + `}`,
		},
		Completion: {`{"prompt":"hello there"}`, `{"prompt":[1819043176,1948282991,1701996648]}`, `{"prompt":["hullo there","hello there"]}`},
	}
	seen := map[Block]string{}
	for kind, bodies := range bodies {
		for _, body := range bodies {
			for i, block := range chain(t, kind, body) {
				if other, ok := seen[block]; ok {
					t.Errorf("block %d of %s is one of %s", i, body, other)
				}
				seen[block] = body
			}
		}
	}
}

func TestDifferentBodies(t *testing.T) {
	user := func(content string) string { return `{"messages":[{"role":"user","content":` + content + `}]}` }
	tool := func(tools ...string) string {
		for i, name := range tools {
			tools[i] = fmt.Sprintf(`{"type":"function","function":{"name":%q,"parameters":{"type":"object","required":[]}}}`, name)
		}
		return `{"messages":[{"role":"user","content":"x"}],"tools":[` + strings.Join(tools, ",") + `]}`
	}
	assistant := func(fields string) string { return `{"messages":[{"role":"assistant",` + fields + `}]}` }
	call := func(name, arguments string) string {
		return assistant(fmt.Sprintf(`"tool_calls":[{"id":"1","function":{"name":%q,"arguments":%q}}]`, name, arguments))
	}
	bodies := []string{
		user(`"x"`), user(`"y"`), user(`"x\n"`), user(`"\ufffd"`),
		`{"messages":[{"role":"user","name":"a","content":"x"}]}`, `{"messages":[{"role":"user","name":"b","content":"x"}]}`,
		`{"messages":[{"role":"user","content":"x"},{"role":"user","content":""}]}`, `{"messages":[{"role":"system","content":"x"}]}`,
		`{"messages":[{"role":"developer","content":"x","tools":[{"function":{"name":"a"}}]}]}`,
		tool("a"), tool("a", "b"), tool("b", "a"), strings.Replace(tool("a"), `"type":"object","required":[]`, `"required":[],"type":"object"`,
			1),
		strings.Replace(tool("a"), `"name"`, `"strict":true,"name"`, 1), strings.Replace(tool("a"), `"name"`, `"description":"d","name"`, 1),
		call("f", `{"a":1}`), call("f", `{"a":2}`), call("f", `{"a":"1"}`), call("f", `{"a":"1","b":"2"}`), call("f", `{"b":"2","a":"1"}`),
		call("g", `{"a":1}`),
		call("f", `{"a\":1":"b"}`), call("f", `{"a":1,"b":"\"}"}`),
		assistant(`"content":"x"`), assistant(`"reasoning":"x"`), assistant(`"content":"f{}"`), call("f", ""),
		user(`[{"type":"image_url","image_url":{"url":"a"}}]`), user(`[{"type":"image_url","image_url":{"url":"b"}}]`),
		user(`[{"type":"video_url","video_url":{"url":"a"}}]`),
		user(`[{"type":"image_url","image_url":{"url":"a"}},{"type":"text","text":"x"}]`),
		user(`[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"a"}}]`),
		user(`[{"type":"image_url","image_url":{"url":"a"},"uuid":"1"}]`), user(`[{"type":"image_url","image_url":null,"uuid":"2"}]`),
		user(`[{"type":"image_url","image_url":null,"uuid":"a"}]`), user(`[{"type":"audio_url","audio_url":null,"uuid":"a"}]`),
		user(`[{"type":"video_url","video_url":null,"uuid":"a"}]`),
		user(`[{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}}]`),
		user(`[{"type":"input_audio","input_audio":{"data":"AB","format":"wav"}}]`),
	}
	for i, a := range bodies {
		for _, b := range bodies[:i] {
			if slices.Equal(chain(t, Chat, a), chain(t, Chat, b)) {
				t.Errorf("alike, though vLLM renders them differently:\n%s\n%s", a, b)
			}
		}
	}
}

// member is one member of an object; object keeps their order, fields may be
// written in any.
type (
	member struct {
		key   string
		value any
	}
	object []member
	fields []member
)

// spell writes v as JSON in one of its many spellings: white space, escapes and
// the order of fields are left to chance.
func spell(r *rand.Rand, v any) []byte {
	var b []byte
	space := func() { b = append(b, []string{"", "", "", " ", "\n\t", "\r\n  "}[r.IntN(6)]...) }
	row := func(open, end byte, n int, item func(i int)) {
		b = append(b, open)
		for i := range n {
			if i > 0 {
				b = append(b, ',')
			}
			space()
			item(i)
			space()
		}
		b = append(b, end)
	}
	switch v := v.(type) {
	case object:
		row('{', '}', len(v), func(i int) {
			b = append(b, spell(r, v[i].key)...)
			space()
			b = append(b, ':')
			space()
			b = append(b, spell(r, v[i].value)...)
		})
	case fields:
		shuffled := make(object, len(v))
		for i, k := range r.Perm(len(v)) {
			shuffled[i] = v[k]
		}
		return spell(r, shuffled)
	case []any:
		row('[', ']', len(v), func(i int) { b = append(b, spell(r, v[i])...) })
	case nil:
		b = append(b, "null"...)
	case string:
		b = append(b, '"')
		for _, c := range v {
			b = append(b, spellRune(r, c)...)
		}
		b = append(b, '"')
	default:
		b = fmt.Append(b, v)
	}
	return b
}

func spellRune(r *rand.Rand, c rune) string {
	short := map[rune]string{'"': `\"`, '\\': `\\`, '/': `\/`, '\n': `\n`, '\t': `\t`, '\r': `\r`, '\b': `\b`, '\f': `\f`}
	must := c < ' ' || c == '"' || c == '\\'
	switch chance := r.IntN(8); {
	case short[c] != "" && (must && chance < 6 || chance == 0):
		return short[c]
	case !must && chance < 7:
		return string(c)
	}
	if high, low := utf16.EncodeRune(c); high != 0xfffd {
		return fmt.Sprintf(`\u%04x\u%04X`, high, low)
	}
	return fmt.Sprintf(`\u%04x`, c)
}

// words makes a text that JSON spells in several ways and that is at times long.
func words(r *rand.Rand) string {
	all := []string{"the ", "cache", " is\n", "\"warm\"", "é", "前缀", "😀", "a/b\\c", "\t", "\u2028", "<&>", "\x00", "{\"a\": 1}",
		"func f() {\n\treturn\n}\n"}
	var b bytes.Buffer
	for range r.IntN(1 + r.IntN(60)) {
		b.WriteString(all[r.IntN(len(all))])
	}
	return b.String()
}

// content makes a text in one of the forms that messages have it in.
func content(r *rand.Rand) any {
	switch r.IntN(3) {
	case 0:
		return words(r)
	case 1:
		return []any{fields{{"type", "text"}, {"text", words(r)}}}
	}
	parts := []any{}
	for range r.IntN(4) {
		if r.IntN(4) == 0 {
			parts = append(parts, fields{{"type", "image_url"}, {"image_url", object{{"url", words(r)}}}})
		} else {
			parts = append(parts, fields{{"type", "text"}, {"text", words(r)}})
		}
	}
	return parts
}

// turn makes what follows in a conversation: a question, an answer, or a tool
// called and its result.
func turn(r *rand.Rand, reasoning bool) []any {
	message := func(role string, more ...member) any {
		return append(fields{{"role", role}, {"content", content(r)}}, more...)
	}
	var thought []member
	if reasoning {
		thought = []member{{"reasoning", words(r)}}
	}
	switch r.IntN(3) {
	case 0:
		return []any{message("user", member{"name", "u"})}
	case 1:
		return []any{message("assistant", thought...)}
	}
	arguments, _ := json.Marshal(map[string]any{"q": words(r), "n": r.IntN(10)})
	call := fields{{"id", words(r)}, {"type", "function"}, {"function", fields{{"name", "f"}, {"arguments", string(arguments)}}}}
	return []any{message("assistant", append(thought, member{"tool_calls", []any{call}})...), message("tool", member{"tool_call_id", "x"})}
}

// chatOf makes a body of messages; half of the chats have tools.
func chatOf(messages []any, tools bool) fields {
	body := fields{{"model", "m"}, {"messages", messages}, {"temperature", 0.5}}
	if tools {
		body = append(body, member{"tools", []any{fields{{"type", "function"}, {"function", fields{{"name", "f"}, {"description", "d\n"},
			{"parameters", object{{"type", "object"}, {"required", []any{"q"}}}}}}}}})
	}
	return body
}

func canonical(t *testing.T, body []byte) []byte {
	t.Helper()
	return parse(t, Chat, string(body)).Text
}

func TestPropertySpelling(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		messages := []any{fields{{"role", "system"}, {"content", content(r)}}}
		for range r.IntN(6) {
			messages = append(messages, turn(r, r.IntN(2) == 0)...)
		}
		chat := chatOf(messages, r.IntN(2) == 0)
		a, b := spell(r, chat), spell(r, chat)
		if got, want := canonical(t, b), canonical(t, a); !bytes.Equal(got, want) {
			t.Fatalf("seed %d: one chat, two canonical prompts\n%s\n%q\n%s\n%q", seed, a, want, b, got)
		}
	}
}

func TestPropertyMoreTurns(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 2))
		tools := r.IntN(2) == 0
		messages := []any{fields{{"role", "developer"}, {"content", content(r)}}, fields{{"role", "user"}, {"content", content(r)}}}
		before := canonical(t, spell(r, chatOf(messages, tools)))
		for range 8 {
			messages = append(messages, turn(r, false)...)
			after := canonical(t, spell(r, chatOf(messages, tools)))
			if !bytes.HasPrefix(after, before) {
				t.Fatalf("seed %d: %q\nis no prefix of\n%q", seed, before, after)
			}
			before = after
		}
	}
}

// Reasoning is shown until the user speaks: until then, more turns keep the
// prefix, and from then on the chat is as if there had been none.
func TestPropertyReasoningWithinTurn(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		messages := []any{fields{{"role", "user"}, {"content", content(r)}}}
		before := canonical(t, spell(r, chatOf(messages, true)))
		for range 8 {
			next := turn(r, true)
			asks := next[0].(fields)[0].value == "user"
			messages = append(messages, next...)
			after := canonical(t, spell(r, chatOf(messages, true)))
			if asks {
				var bare []any
				for _, m := range messages {
					var kept fields
					for _, f := range m.(fields) {
						if f.key != "reasoning" {
							kept = append(kept, f)
						}
					}
					bare = append(bare, kept)
				}
				before = canonical(t, spell(r, chatOf(bare, true)))
			}
			if !bytes.HasPrefix(after, before) || asks && len(after) != len(before) {
				t.Fatalf("seed %d: %q\nis no prefix of\n%q", seed, before, after)
			}
			before = after
		}
	}
}

// common returns the length of the longest common prefix.
func common[T comparable](a, b []T) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
