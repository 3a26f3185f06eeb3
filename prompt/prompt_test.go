package prompt

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// parse reads body with a fresh Prompt.
func parse(t testing.TB, kind Kind, body string) *Prompt {
	t.Helper()
	p := new(Prompt)
	if err := p.Parse(kind, []byte(body)); err != nil {
		t.Fatalf("%v\n%s", err, body)
	}
	p.ApplyLayout(DefaultLayout)
	return p
}

func TestCanonicalBytes(t *testing.T) {
	p := parse(t, Chat, `{
		"tools": [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "look", "strict": true}}],
		"messages": [
			{"role": "system", "content": "Be \"brief\"."},
			{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Zo\u00e9", "role": "user"},
			{"role": "assistant", "reasoning": "hm", "content": null, "tool_calls": [
				{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"x\"}"}}]},
			{"role": "tool", "tool_call_id": "1", "content": "seen"}
		]}`)
	want := "\xffsystem\xfdBe \"brief\"." +
		"\xf8type:function,function:name:\xf7look\xf7,description:,parameters:{\xf7type\xf7:\xf7object\xf7}\xfe\xf7strict\xf7true" +
		"\xffuser\xfeZoé\xfda\nb" +
		"\xffassistant\xfbhm\xfd\xfalook\xf9{\xf7at\xf7:\xf7x\xf7}" +
		"\xfftool\xfdseen"
	if string(p.Text) != want {
		t.Errorf("canonical prompt\n%q, want\n%q", p.Text, want)
	}
}

func TestReasoningDroppedAtUserMessage(t *testing.T) {
	turn := func(role, text, reasoning string) string {
		if reasoning == "" {
			return fmt.Sprintf(`{"role":%q,"content":%q}`, role, text)
		}
		return fmt.Sprintf(`{"role":%q,"content":%q,"reasoning_content":%q}`, role, text, reasoning)
	}
	chat := func(turns ...string) string {
		return string(parse(t, Chat, `{"messages":[`+strings.Join(turns, ",")+`]}`).Text)
	}
	open := chat(turn("user", "q", ""), turn("assistant", "a", "first"), turn("tool", "t", ""), turn("assistant", "b", "second"))
	for _, reasoning := range []string{"first", "second"} {
		if !strings.Contains(open, reasoning) {
			t.Errorf("reasoning %q after the last user turn is missing: %q", reasoning, open)
		}
	}
	closed := chat(turn("user", "q", ""), turn("assistant", "a", "first"), turn("tool", "t", ""), turn("assistant", "b", "second"),
		turn("user", "r", ""))
	bare := chat(turn("user", "q", ""), turn("assistant", "a", ""), turn("tool", "t", ""), turn("assistant", "b", ""), turn("user", "r", ""))
	if closed != bare {
		t.Errorf("reasoning before a user turn is left in:\n%q, want\n%q", closed, bare)
	}
	if asked := chat(turn("user", "q", "thought")); strings.Contains(asked, "thought") {
		t.Errorf("reasoning of a user counts: %q", asked)
	}
}

func TestCommonFields(t *testing.T) {
	const m = `"messages":[]`
	for _, c := range []struct {
		kind Kind
		body string
		want Prompt
	}{
		{Chat, `{` + m + `}`, Prompt{Sequences: 1, Cacheable: true}},
		{Chat, `{"model":null,"stream":null,"n":null,"max_tokens":null,"stream_options":null,"prompt_logprobs":null,` + m + `}`,
			Prompt{Sequences: 1, Cacheable: true}},
		{Chat, `{"mod\u0065l":"t\u00efny","stream":true,"stream_options":{"include_usage":true},"n":3,"max_tokens":7,` + m + `}`,
			Prompt{Model: "tïny", Stream: true, MaxTokens: 7, Sequences: 3, Cacheable: true}},
		{Chat, `{"stream":1,"n":"2","max_tokens":5,"max_completion_tokens":9.0,"logprobs":true,"echo":true,` + m + `}`,
			Prompt{Stream: true, MaxTokens: 9, Sequences: 2, Cacheable: true}},
		{Chat, `{"stream":"false","n":-1,"max_tokens":"many",` + m + `}`, Prompt{Sequences: 1, Cacheable: true}},
		{Chat, `{"n":1e300,"best_of":2,` + m + `}`, Prompt{Sequences: 1<<31 - 1, Cacheable: true}},
		{Chat, `{"prompt_logprobs":0,` + m + `}`, Prompt{Sequences: 1}},
		{Chat, `{"truncate_prompt_tokens":-1,` + m + `}`, Prompt{Sequences: 1}},
		{Chat, "\xef\xbb\xbf {" + m + "} \n", Prompt{Sequences: 1, Cacheable: true}},
		{Completion, `{"prompt":"a","n":2,"best_of":4,"max_tokens":16}`, Prompt{MaxTokens: 16, Sequences: 4, Cacheable: true}},
		{Completion, `{"prompt":["a","b","c"],"n":2}`, Prompt{Sequences: 6, Cacheable: true, ExtraBytes: 2}},
		{Completion, `{"prompt":"a","echo":true,"logprobs":1}`, Prompt{Sequences: 1}},
		{Completion, `{"prompt":"a","echo":true,"logprobs":null}`, Prompt{Sequences: 1, Cacheable: true}},
		{Completion, `{"prompt_embeds":"AAAA"}`, Prompt{Sequences: 1}},
		{Other, `{"model":"e","stream":true,"input":["a","b"],"messages":3,"prompt":{},"n":4}`, Prompt{Model: "e", Stream: true, Sequences: 1,
			Cacheable: true}},
		{Other, `{"max_tokens":6}`, Prompt{MaxTokens: 6, Sequences: 1, Cacheable: true}},
		{Messages, `{"model":"m",` + m + `,"max_tokens":6,"stream":true,"n":3}`, Prompt{Model: "m", Stream: true, MaxTokens: 6, Sequences: 1,
			Cacheable: true}},
		{Responses, `{"input":[],"max_output_tokens":5}`, Prompt{MaxTokens: 5, Sequences: 1, Cacheable: true}},
		{Responses, `{"input":[],"previous_response_id":null}`, Prompt{Sequences: 1, Cacheable: true}},
		{Responses, `{"input":[],"previous_response_id":"resp_1"}`, Prompt{Sequences: 1, PreviousResponse: "resp_1"}},
		{Responses, `{"input":[],"previous_response_id":"resp\u005f1","request_id":"mine","store":false}`,
			Prompt{Sequences: 1, PreviousResponse: "resp_1", ResponseID: "mine", NoStore: true}},
		{Responses, `{"input":[],"request_id":null,"store":true}`, Prompt{Sequences: 1, Cacheable: true}},
		{Chat, `{` + m + `,"previous_response_id":"resp_1","request_id":"mine","store":false}`, Prompt{Sequences: 1, Cacheable: true}},
	} {
		p := parse(t, c.kind, c.body)
		if c.kind == Other {
			c.want.ExtraBytes = len(c.body)
		}
		if got, want := head(p), head(&c.want); got != want {
			t.Errorf("%s\ngot  %s\nwant %s", c.body, got, want)
		}
	}
}

func TestTruncates(t *testing.T) {
	for _, c := range []struct {
		kind Kind
		body string
		want bool
	}{
		{Chat, `{"messages":[],"truncate_prompt_tokens":5}`, true},
		{Chat, `{"messages":[],"truncate_prompt_tokens":null}`, false},
		{Chat, `{"messages":[]}`, false},
		{Completion, `{"prompt":"a","truncate_prompt_tokens":-1}`, true},
		{Other, `{"input":"a","truncate_prompt_tokens":-1}`, true},
		{Other, `{"input":"a"}`, false},
		{Responses, `{"input":"a","truncation":"auto"}`, true},
		{Responses, `{"input":"a","truncation":"disabled"}`, false},
		{Responses, `{"input":"a","truncation":null}`, false},
		{Messages, `{"messages":[],"truncation":"auto"}`, false},
	} {
		if p := parse(t, c.kind, c.body); p.Truncates != c.want {
			t.Errorf("%s: truncates %v, want %v", c.body, p.Truncates, c.want)
		}
	}
}

func TestMediaInOtherBodies(t *testing.T) {
	image := strings.Repeat("iVBORw0KGgo/AAA+", 1<<17) // 2 MB
	text := strings.Repeat("four words of text. ", 1<<17)
	for _, c := range []struct {
		name, before, long, after string
		counts                    int
	}{
		{"a data URL", `{"input":[{"content":[{"type":"input_image","image_url":"data:image/png;base64,`, image, `"}]}]}`, MediaBytes},
		{"base64 alone", `{"messages":[{"role":"user","content":[{"source":{"type":"base64","data":"`, image, `"}}]}]}`, MediaBytes},
		{"escaped slashes", `{"input":"`, strings.ReplaceAll(image, "/", `\/`), `"}`, MediaBytes},
		{"short base64", `{"input":"`, image[:1000], `"}`, 1000},
		{"text", `{"input":"`, text, `"}`, len(text)},
		{"text behind base64", `{"input":"`, image + " and now?", `"}`, len(image) + 9},
		{"text in a data URL", `{"input":"data:`, text, `"}`, len(text)},
	} {
		p := parse(t, Other, c.before+c.long+c.after)
		if got, want := p.ExtraBytes, len(c.before)+c.counts+len(c.after); got < want-40 || got > want+40 {
			t.Errorf("%s: %d bytes count, want about %d", c.name, got, want)
		}
	}
}

// head writes what a Prompt says beside its text.
func head(p *Prompt) string {
	return fmt.Sprintf("model %q stream %v previous %q id %q unstored %v most %d sequences %d cacheable %v extra %d session %q %x",
		p.Model, p.Stream, p.PreviousResponse, p.ResponseID, p.NoStore, p.MaxTokens, p.Sequences, p.Cacheable, p.ExtraBytes, p.ConversationField,
		p.Conversation)
}

func TestTurnKind(t *testing.T) {
	const user, response = `{"role":"user","content":"a"}`, `{"role":"assistant","content":"b"}`
	for body, c := range map[string]struct {
		kind Kind
		want TurnKind
	}{
		`{"messages":[{"role":"system","content":"s"},` + user + `]}`: {Chat, TurnFirst},
		`{"messages":[` + user + `,` + response + `,` + user + `]}`:   {Chat, TurnLater},
		`{"system":"s","max_tokens":1,"messages":[` + user + `]}`:     {Messages, TurnFirst},
		`{"max_tokens":1,"messages":[` + user + `,` + response + `]}`: {Messages, TurnLater},
		`{"input":"a"}`:            {Responses, TurnFirst},
		`{"input":[` + user + `]}`: {Responses, TurnFirst},
		`{"input":[` + user + `,` + response + `,` + user + `]}`:                                                {Responses, TurnLater},
		`{"input":[` + user + `,{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}]}`:           {Responses, TurnLater},
		`{"input":[` + user + `,{"type":"reasoning","id":"r","summary":[{"type":"summary_text","text":"t"}]}]}`: {Responses, TurnLater},
		`{"input":"a","previous_response_id":"resp_1"}`:                                                         {Responses, TurnLater},
		`{"prompt":"a"}`: {Completion, TurnUnknown},
	} {
		if got := parse(t, c.kind, body).TurnKind(); got != c.want {
			t.Errorf("%s: turn %d, want %d", body, got, c.want)
		}
	}
}

func TestFirstMessageHash(t *testing.T) {
	f := func(kind Kind, body string) uint64 { return parse(t, kind, body).FirstMessageHash }
	long := strings.Repeat("é", maxHashedChars)
	chat := func(before, text string) uint64 {
		return f(Chat, `{"messages":[`+before+`{"role":"user","content":"`+text+
			`"},{"role":"assistant","content":"a"},{"role":"user","content":"b"}]}`)
	}
	want := chat("", long)
	if want == 0 || chat(`{"role":"system","content":"s"},`, long) != want || chat("", long+"more") != want {
		t.Error("what stands before and after the beginning of the first user message counts")
	}
	if chat("", "x") == want || chat("", long[2:]) == want {
		t.Error("the beginning of the first user message does not count")
	}
	if f(Completion, `{"prompt":"`+long+`more"}`) != want {
		t.Error("a completion's beginning is another")
	}
	if f(Chat, `{"messages":[{"role":"system","content":"s"}]}`) != 0 || f(Completion, `{"prompt_embeds":"x"}`) != 0 ||
		f(Other, `{"input":"x"}`) != 0 {
		t.Error("an opening without a user's text")
	}
}

func TestRejectedBodies(t *testing.T) {
	const m = `"messages":[{"role":"user","content":"x"}]`
	for _, c := range []struct {
		name, body, param, message string
		kind                       Kind
	}{
		{name: "empty", body: "", message: "is empty"},
		{name: "only space", body: " \n", message: "is empty"},
		{name: "not JSON", body: "hello", message: "'h' at byte 0"},
		{name: "a list", body: "[]", message: "must be a JSON object"},
		{name: "null", body: "null", message: "must be a JSON object"},
		{name: "cut short in a string", body: `{"model":"ti`, message: "it ends at byte 12"},
		{name: "cut short behind a key", body: `{"messages":`, message: "it ends at byte 12"},
		{name: "cut short in a list", body: `{"messages":[{"role":"user"},`, message: "it ends at byte 29"},
		{name: "trailing", body: `{` + m + `} {}`, message: "'{' at byte"},
		{name: "newline in a string", body: "{\"a\":\"b\nc\"}", message: `'\n' at byte 7`},
		{name: "newline in a key", body: "{\"\n:1}", message: `'\n' at byte 2`},
		{name: "escape", body: `{"a":"\x"}`, message: "'x' at byte 7"},
		{name: "hexadecimal digits", body: `{"a":"\u00g0"}`, message: "'g' at byte 10"},
		{name: "number", body: `{"a":01}`, message: "'1' at byte 6"},
		{name: "NaN", body: `{"temperature":NaN,` + m + `}`, message: "'N' at byte 15"},
		{name: "invalid UTF-8", body: "{\"a\":\"b\xff\"}", message: "byte 7 is 0xff"},
		{name: "a surrogate in UTF-8", body: "{\"a\":\"\xed\xa0\x80\"}", message: "byte 6 is 0xed"},
		{name: "depth", body: `{"a":` + strings.Repeat("[", 512) + strings.Repeat("]", 512) + `}`, message: "deeper than 512"},
		{name: "model twice", body: `{"model":"a","mod\u0065l":"b",` + m + `}`, param: "model", message: "given twice"},
		{name: "messages twice", body: `{` + m + `,` + m + `}`, param: "messages", message: "given twice"},
		{name: "model twice, other", kind: Other, body: `{"model":"a","model":"a"}`, param: "model", message: "given twice"},
		{name: "model a number", body: `{"model":3,` + m + `}`, param: "model", message: "must be a string"},
		{name: "no messages", body: `{"model":"a"}`, param: "messages", message: "is missing"},
		{name: "messages a string", body: `{"messages":"hi"}`, param: "messages", message: "must be a list"},
		{name: "messages null", body: `{"messages":null}`, param: "messages", message: "must be a list"},
		{name: "a message a string", body: `{"messages":[{},"hi"]}`, param: "messages", message: "messages[1] must be an object"},
		{name: "no prompt", kind: Completion, body: `{"model":"a"}`, param: "prompt", message: "is missing"},
		{name: "prompt null", kind: Completion, body: `{"prompt":null}`, param: "prompt", message: "is missing"},
		{name: "prompt a number", kind: Completion, body: `{"prompt":5}`, param: "prompt", message: "must be a string or a list"},
		{name: "prompt an object", kind: Completion, body: `{"prompt":{"a":1}}`, param: "prompt", message: "must be a string or a list"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := new(Prompt).Parse(c.kind, []byte(c.body))
			var refused *Error
			if !errors.As(err, &refused) {
				t.Fatalf("got %v, want an *Error", err)
			}
			if refused.Param != c.param || !strings.Contains(refused.Message, c.message) {
				t.Errorf("got %q about %q, want %q about %q", refused.Message, refused.Param, c.message, c.param)
			}
		})
	}
}

// What vLLM may take, or refuses in better words than ours, is passed on.
func TestAcceptedBodies(t *testing.T) {
	for _, body := range []string{
		`{"messages":[]}`,
		`{"messages":[{}]}`,
		`{"messages":[{"role":1,"content":5,"name":2,"tool_calls":"x"}]}`,
		`{"messages":[{"role":"user","content":["a",1,{"type":"what"},{"type":"text"},{"type":"text","text":null}]}]}`,
		`{"messages":[{"role":"assistant","tool_calls":[1,{},{"function":1},{"function":{}},{"function":{"name":1,"arguments":"["}}]}]}`,
		`{"messages":[{"role":"user","content":"\ud800 \udc00\ud800 \ud800\u0041"}]}`,
		`{"messages":[],"tools":{},"stream_options":[]}`,
		`{"messages":[],"tools":[1,{},{"function":null},{"function":{"name":null}}]}`,
		`{"messages":[],"user":"a","user":"b"}`,
		`{"messages":[],"a":` + strings.Repeat("[", 511) + strings.Repeat("]", 511) + `}`,
	} {
		parse(t, Chat, body)
	}
	for _, body := range []string{`{"prompt":[]}`, `{"prompt":""}`, `{"prompt":[1,"a",[2],{}]}`, `{"prompt":[-1,2.5,99999999999999999999]}`} {
		parse(t, Completion, body)
	}
}

func TestRejectionMemory(t *testing.T) {
	for _, unit := range []string{"[", `{"a":`, `{"messages":[`} {
		body := []byte(strings.Repeat(unit, (64<<20)/len(unit)))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := new(Prompt).Parse(Chat, body)
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("64 MiB of %s are accepted", unit)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 1<<20 {
			t.Errorf("64 MiB of %s: %d bytes allocated", unit, grown)
		}
	}
}

func TestMediaLimit(t *testing.T) {
	parts := strings.TrimSuffix(strings.Repeat(`{"type":"image_url"},`, 10*maxMedia), ",")
	p := parse(t, Chat, `{"messages":[{"role":"user","content":[`+parts+`]}]}`)
	if most := maxMedia*(MediaBytes+1) + 10*maxMedia*20; len(p.Text) > most {
		t.Errorf("%d bytes of prompt, more than %d", len(p.Text), most)
	}
	if want := 9 * maxMedia * MediaBytes; p.ExtraBytes != want {
		t.Errorf("%d extra bytes, want %d", p.ExtraBytes, want)
	}
	if media := p.AppendMediaPositions(nil); len(media) != maxMedia || media[maxMedia-1].Counts != (MediaCounts{maxMedia}) {
		t.Errorf("%d media items, want %d", len(media), maxMedia)
	}
}

func TestAppendMediaPositions(t *testing.T) {
	const image, audio, video = `{"type":"image_url","image_url":{"url":"a"}}`, `{"type":"input_audio","input_audio":{"data":"AA"}}`,
		`{"type":"video_url","video_url":null,"uuid":"u"}`
	user := func(parts ...string) string {
		return `{"messages":[{"role":"user","content":[` + strings.Join(parts, ",") + `]}]}`
	}
	const head = 1 + 4 + 1 // "user" between two marks
	for _, c := range []struct {
		name string
		kind Kind
		body string
		want []MediaPosition
	}{
		{"none", Chat, user(`"text"`), nil},
		{"one", Chat, user(image), []MediaPosition{{head + 1, Image, MediaCounts{1}}}},
		{"each kind", Chat, user(image, audio, `"text"`, video), []MediaPosition{
			{head + 1, Image, MediaCounts{1}}, {head + MediaBytes + 2, Audio, MediaCounts{1, 1}},
			{head + 2*MediaBytes + 2 + 4 + 1, Video, MediaCounts{1, 1, 1}},
		}},
		{"result of a tool", Messages, user(`{"type":"tool_result","content":[{"type":"image","source":{"type":"base64","data":"AA"}}]}`),
			[]MediaPosition{{1 + 4 + 1 + head + 1, Image, MediaCounts{1}}}},
		{"replaced content", Chat, `{"messages":[{"role":"user","content":[` + image + `],"content":"text"}]}`, nil},
		{"token ids", Generate, `{"token_ids":[252,252],"features":{"mm_hashes":{"image":["a"]}}}`, nil},
	} {
		if got := parse(t, c.kind, c.body).AppendMediaPositions(nil); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestBlocks(t *testing.T) {
	p := parse(t, Completion, `{"prompt":"0123456789abcdef0123456789abcdef01"}`)
	blocks := p.AppendBlocks(nil, "m", 16)
	if len(blocks) != 2 {
		t.Fatalf("%d blocks of 34 bytes, want 2 full ones", len(blocks))
	}
	if blocks[0] == blocks[1] {
		t.Error("equal spans in different places have one hash: the chain is broken")
	}
	if again := p.AppendBlocks(blocks[:1:1], "m", 16); again[0] != blocks[0] || again[1] != blocks[0] {
		t.Error("blocks are not appended, or not the same twice")
	}
	p = parse(t, Completion, `{"prompt":"0123456789abcdef","prompt_logprobs":1}`)
	if blocks := p.AppendBlocks(nil, "m", 16); len(blocks) != 0 {
		t.Errorf("%d blocks of a prompt that is not cacheable", len(blocks))
	}
}

func TestReuse(t *testing.T) {
	bodies := []struct {
		kind Kind
		body []byte
	}{
		{Chat, chatBody(t, 4<<10, english)},
		{Completion, []byte(`{"prompt":["a","b"],"model":"x","n":3}`)},
		{Chat, []byte(`{"messages":[{"role":"user","content":[{"type":"image_url"}]},{"role":"assistant","reasoning":"r"}],"tools":[{}]}`)},
		{Chat, []byte(`{"messages":[{"role":"sys`)},
		{Chat, toolsBody(t, 4<<10)},
		{Other, []byte(`{"previous_response_id":"r"}`)},
		{Chat, toolsBody(t, 4<<10)},
		{Chat, bytes.Replace(toolsBody(t, 4<<10), []byte("tool_700"), []byte("tool_701"), 1)},
	}
	var used Prompt
	for round := range 2 {
		for i, b := range bodies {
			var fresh Prompt
			want, got := fresh.Parse(b.kind, b.body), used.Parse(b.kind, b.body)
			fresh.ApplyLayout(DefaultLayout)
			used.ApplyLayout(DefaultLayout)
			if (want == nil) != (got == nil) {
				t.Fatalf("body %d, round %d: %v, and fresh %v", i, round, got, want)
			}
			if want == nil && (head(&used) != head(&fresh) || !bytes.Equal(used.Text, fresh.Text) || used.seed != fresh.seed) {
				t.Errorf("body %d, round %d differs from a fresh one:\n%s\n%s", i, round, head(&used), head(&fresh))
			}
		}
	}
}

func TestAllocations(t *testing.T) {
	for _, body := range [][]byte{chatBody(t, 32<<10, english), toolsBody(t, 32<<10)} {
		var p Prompt
		var blocks []Block
		n := testing.AllocsPerRun(20, func() {
			if err := p.Parse(Chat, body); err != nil {
				t.Fatal(err)
			}
			p.ApplyLayout(DefaultLayout)
			blocks = p.AppendBlocks(blocks[:0], p.Model, 256)
		})
		if n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}
