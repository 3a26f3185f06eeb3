package prompt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// endOf returns the end of a prompt.
func endOf(p *Prompt) *ResponseStart {
	end := new(ResponseStart)
	end.SetFrom(p)
	return end
}

// blocksOf are the blocks of a body.
func blocksOf(t testing.TB, kind Kind, body []byte, blockBytes int) (*Prompt, []Block) {
	t.Helper()
	p := parse(t, kind, string(body))
	return p, p.AppendBlocks(nil, "m", blockBytes)
}

// inEvents are the events of a response of that text, cut anywhere between two
// characters.
func inEvents(r *rand.Rand, text string, completion bool) (events [][]byte) {
	first := fields{{"index", 0}, {"delta", fields{{"role", "assistant"}, {"content", ""}}}, {"finish_reason", nil}}
	if !completion {
		events = append(events, spell(r, object{{"id", "x"}, {"choices", []any{first}}}))
	}
	for rest := []rune(text); len(rest) > 0; {
		n := min(1+r.IntN(1+r.IntN(40)), len(rest))
		part := string(rest[:n])
		rest = rest[n:]
		choice := fields{{"index", 0}, {"logprobs", nil}, {"delta", fields{{"content", part}, {"tool_calls", []any{}}, {"reasoning", nil}}},
			{"finish_reason", nil}}
		if completion {
			choice = fields{{"index", 0}, {"text", part}, {"finish_reason", nil}}
		}
		events = append(events, spell(r, fields{{"id", words(r)}, {"choices", []any{choice}}, {"created", 1}}))
	}
	return append(events, spell(r, fields{{"choices", []any{}}, {"usage", object{{"prompt_tokens", 1}}}}))
}

func TestPropertyResponseInNextTurn(t *testing.T) {
	t.Parallel()
	var response Response
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		blockBytes := []int{64, 256}[r.IntN(2)]
		messages := []any{fields{{"role", "system"}, {"content", content(r)}}}
		for range r.IntN(4) {
			messages = append(messages, turn(r, false)...)
		}
		messages = append(messages, fields{{"role", "user"}, {"content", content(r)}})
		tools := r.IntN(2) == 0
		output := ""
		for range r.IntN(30) {
			output += words(r)
		}
		p, first := blocksOf(t, Chat, spell(r, chatOf(messages, tools)), blockBytes)
		_, next := blocksOf(t, Chat, spell(r, chatOf(append(messages,
			fields{{"role", "assistant"}, {"content", output}}, fields{{"role", "user"}, {"content", content(r)}}), tools)), blockBytes)
		f := func(how string, take func()) {
			t.Helper()
			if !response.Reset(endOf(p)) {
				t.Fatalf("seed %d: a plain chat whose output can have no blocks", seed)
			}
			take()
			all := append(slices.Clone(first), response.Finish()...)
			// What the output fills of the next turn's text, whole blocks only.
			want := (len(p.Text) + len("\xffassistant\xfd"+output)) / blockBytes
			if len(all) != want || !slices.Equal(all, next[:min(want, len(next))]) {
				t.Fatalf("seed %d, %s: %d blocks of prompt and response, want the next turn's first %d", seed, how, len(all), want)
			}
		}
		f("streamed", func() {
			for _, e := range inEvents(r, output, false) {
				response.AddEvent(e)
			}
		})
		f("whole", func() {
			response.AddBody(spell(r, fields{{"choices", []any{fields{{"index", 0}, {"message", fields{{"role", "assistant"}, {"content", output},
				{"tool_calls", []any{}}, {"refusal", nil}, {"reasoning", nil}}}}}}}))
		})
	}
}

// callsOf makes tool calls as a response holds them, with arguments in any spelling.
func callsOf(r *rand.Rand) (calls []any, arguments []string) {
	for n := range 1 + r.IntN(3) {
		object := spell(r, object{{"q", words(r)}, {words(r), []any{1, nil, object{{"x", words(r)}}}}})
		arguments = append(arguments, string(object))
		calls = append(calls, fields{{"id", fmt.Sprint(n)}, {"type", "function"},
			{"function", fields{{"name", "f" + fmt.Sprint(n)}, {"arguments", string(object)}}}})
	}
	return calls, arguments
}

func TestPropertyToolCallsInNextTurn(t *testing.T) {
	t.Parallel()
	var response Response
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 6))
		messages := []any{fields{{"role", "user"}, {"content", content(r)}}}
		p, first := blocksOf(t, Chat, spell(r, chatOf(messages, true)), 64)
		output := words(r)
		calls, arguments := callsOf(r)
		said := object{{"role", "assistant"}, {"content", output}, {"tool_calls", calls}}
		_, next := blocksOf(t, Chat, spell(r, chatOf(append(messages, said), true)), 64)

		response.Reset(endOf(p))
		for _, e := range inEvents(r, output, false) {
			response.AddEvent(e)
		}
		for n, a := range arguments {
			part := func(function fields) {
				calls := []any{fields{{"index", n}, {"function", function}}}
				response.AddEvent(spell(r,
					fields{{"choices", []any{fields{{"index", 0}, {"delta", fields{{"tool_calls", calls}, {"content", nil}}}}}}}))
			}
			part(fields{{"name", "f" + fmt.Sprint(n)}, {"arguments", ""}})
			for rest := []rune(a); len(rest) > 0; {
				k := min(1+r.IntN(20), len(rest))
				part(fields{{"arguments", string(rest[:k])}})
				rest = rest[k:]
			}
		}
		if all := append(slices.Clone(first), response.Finish()...); !slices.Equal(all, next) {
			t.Fatalf("seed %d, streamed: %d blocks of prompt and response, want the next turn's %d", seed, len(all), len(next))
		}

		response.Reset(endOf(p))
		response.AddBody(spell(r, fields{{"choices", []any{fields{{"message", said}}}}}))
		if all := append(slices.Clone(first), response.Finish()...); !slices.Equal(all, next) {
			t.Fatalf("seed %d, whole: %d blocks of prompt and response, want the next turn's %d", seed, len(all), len(next))
		}
	}
}

func TestPropertyCompletionInNextPrompt(t *testing.T) {
	t.Parallel()
	var response Response
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 5))
		question, output := words(r)+"q", strings.Repeat(words(r), 5)
		p, first := blocksOf(t, Completion, spell(r, fields{{"prompt", question}}), 64)
		_, next := blocksOf(t, Completion, spell(r, fields{{"prompt", question + output + "and then"}}), 64)
		response.Reset(endOf(p))
		for _, e := range inEvents(r, output, true) {
			response.AddEvent(e)
		}
		all := append(slices.Clone(first), response.Finish()...)
		if want := len(question+output) / 64; len(all) != want || !slices.Equal(all, next[:want]) {
			t.Fatalf("seed %d: %d blocks of prompt and response, want the next prompt's first %d", seed, len(all), want)
		}
	}
}

func TestResponsesWithoutBlocks(t *testing.T) {
	long := strings.Repeat("word ", 200)
	delta := func(member string) string {
		return fmt.Sprintf(`{"choices":[{"index":0,"delta":{"content":%q,%s}}]}`, long, member)
	}
	const ask = `{"messages":[{"role":"user","content":"q"}]}`
	cases := []struct{ name, body, event string }{
		{"reasoning", ask, delta(`"reasoning":"hm"`)},
		{"reasoning of old", ask, delta(`"reasoning_content":"hm"`)},
		{"text behind a tool call", ask, `{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}},` +
			delta(`"role":"assistant"`)[len(`{"choices":[`):]},
		{"parts of calls out of order", ask, delta(`"tool_calls":[{"index":0},{"index":1},{"index":0}]`)},
		{"calls that skip one", ask, delta(`"tool_calls":[{"index":1,"function":{"name":"f"}}]`)},
		{"more calls than any model makes", ask, delta(`"tool_calls":[{"index":100,"function":{"name":"f"}}]`)},
		{"a tool call that is none", ask, delta(`"tool_calls":[1]`)},
		{"tool calls that are no list", ask, delta(`"tool_calls":{}`)},
		{"a tool call too long to keep", ask, delta(`"tool_calls":[{"index":0,"function":{"arguments":"` +
			strings.Repeat("x", maxToolCallBytes+1) + `"}}]`)},
		{"a field not known", ask, delta(`"audio":{"id":"x"}`)},
		{"content in parts", ask, `{"choices":[{"delta":{"content":[{"text":"a"}]}}]}`},
		{"no JSON", ask, delta(`"role":"assistant"`)[:100]},
		{"no object", ask, `[1]`},
		{"a choice that is none", ask, `{"choices":[1]}`},
		{"several choices", `{"n":2,"messages":[{"role":"user","content":"q"}]}`, delta(`"role":"assistant"`)},
		{"a response that continues the last message", `{"messages":[{"role":"assistant","content":"q"}]}`, delta(`"role":"assistant"`)},
		{"reasoning that the next turn drops",
			`{"messages":[{"role":"user","content":"q"},{"role":"assistant","reasoning":"r"},{"role":"tool","content":"t"}]}`,
			delta(`"role":"assistant"`)},
		{"a prompt that is not cached", `{"truncate_prompt_tokens":5,"messages":[]}`, delta(`"role":"assistant"`)},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p, _ := blocksOf(t, Chat, []byte(c.body), 64)
			var response Response
			response.Reset(endOf(p))
			response.AddEvent([]byte(c.event))
			if n := len(response.Finish()); n != 0 {
				t.Errorf("%d blocks", n)
			}
		})
	}
	for _, body := range []string{`{"prompt":[1,2,3],"echo":true}`, `{"prompt":"a","echo":true}`, `{"prompt":["a","b"]}`} {
		p, _ := blocksOf(t, Completion, []byte(body), 64)
		if new(Response).Reset(endOf(p)) {
			t.Errorf("the response to %s has blocks", body)
		}
	}
	p, _ := blocksOf(t, Chat, []byte(ask), 64)
	var response Response
	response.Reset(endOf(p))
	response.AddEvent([]byte(delta(`"role":"assistant"`)))
	if response.Invalidate(); len(response.Finish()) != 0 {
		t.Error("a response of which a part was not seen has blocks")
	}
}

func TestResponseBlockLimit(t *testing.T) {
	p, _ := blocksOf(t, Chat, []byte(`{"messages":[{"role":"user","content":"q"}]}`), 64)
	event, _ := json.Marshal(
		map[string]any{"choices": []any{map[string]any{"delta": map[string]any{"content": strings.Repeat("word ", 1000)}}}})
	var response Response
	response.Reset(endOf(p))
	for range 100 {
		response.AddEvent(event)
	}
	if n := len(response.Finish()); n != maxResponseBlocks {
		t.Errorf("%d blocks, want %d", n, maxResponseBlocks)
	}
	for range 3 {
		if response.Reset(endOf(p)); cap(response.text) > maxPooledResponseBytes {
			t.Errorf("a buffer of %d bytes is kept", cap(response.text))
		}
	}
}

// BenchmarkResponse is one event of a stream.
func BenchmarkResponse(b *testing.B) {
	p, _ := blocksOf(b, Chat, []byte(`{"messages":[{"role":"user","content":"q"}]}`), 256)
	event := []byte(`{"id":"chatcmpl-7c9e1f0f5a3e4d1c","object":"chat.completion.chunk","created":1790000000,"model":"m",` +
		`"choices":[{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`)
	var response Response
	response.Reset(endOf(p))
	b.ReportAllocs()
	for b.Loop() {
		if response.AddEvent(event); len(response.blocks) > 1000 {
			response.Reset(endOf(p))
		}
	}
}

// TestAddBodyReturnsUsage has the account of a response found on the way, as it stands there.
func TestAddBodyReturnsUsage(t *testing.T) {
	p := parse(t, Chat, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`)
	p.AppendBlocks(nil, "m", 16)
	response := new(Response)
	for body, want := range map[string]string{
		`{"choices":[{"message":{"role":"assistant","content":"Hello"}}],"usage":{"a":1}}`: `{"a":1}`,
		`{ "usage" : {"a": [1, "}"]} , "choices":[{"message":{"content":"\"usage\":2"}}]}`: `{"a": [1, "}"]}`,
		`{"usage":1,"usage":2}`: `1`,
		`{"us\u0061ge":3}`:      `3`,
		`{"choices":[{"usage":4,"message":{"content":"\"usage\":5"}}]}`: ``,
		`{"usage":`: ``,
		`[]`:        ``,
	} {
		response.Reset(endOf(p))
		if got := string(response.AddBody([]byte(body))); got != want {
			t.Errorf("%s: %q, not %q", body, got, want)
		}
		if response.Reset(endOf(p)); response.AddBody([]byte(`{}`)) != nil {
			t.Errorf("%s: its account is the next response's", body)
		}
	}
}

const (
	eventHead = `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1763700000,"model":"m","choices":[{"index":0,` +
		`"delta":{"content":"`
	eventTail = `"},"logprobs":null,"finish_reason":null,"token_ids":null}]`
)

// TestEventTemplate looks at which events are not read to their end again.
func TestEventTemplate(t *testing.T) {
	p, _ := blocksOf(t, Chat, []byte(`{"messages":[{"role":"user","content":"q"}]}`), 64)
	f := func(name, first, second string, want bool) {
		t.Helper()
		var r Response
		r.Reset(endOf(p))
		r.AddEvent([]byte(first))
		if got := r.parseByTemplate([]byte(second)); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	hello := eventHead + "hello" + eventTail + "}"
	f("another text", hello, eventHead+`\"w\u00f6rld\"`+eventTail+"}", true)
	f("something behind the choices", hello, eventHead+"a"+eventTail+`,"usage":{"prompt_tokens":1}}`, true)
	f("a fault behind the choices", hello, eventHead+"a"+eventTail+`,]`, true)
	f("another beginning", hello, strings.Replace(hello, "0000", "0001", 1), false)
	f("another end", hello, strings.Replace(hello, `reason":null`, `reason":"stop"`, 1), false)
	f("a broken text", hello, eventHead+"a\n"+eventTail+"}", false)
	f("cut off", hello, eventHead+`a`, false)
	f("two texts", strings.Replace(hello, "}]", `},{"delta":{"content":"x"}}]`, 1),
		strings.Replace(hello, "}]", `},{"delta":{"content":"x"}}]`, 1), false)
	calls := strings.Replace(hello, `"content"`, `"tool_calls":[{"index":0,"function":{"name":"f"}}],"content"`, 1)
	f("calls beside the text", calls, calls, false)
	long := strings.Replace(hello, `"m"`, `"`+strings.Repeat("m", maxTemplateBytes)+`"`, 1)
	f("too long to keep", long, long, false)

	var r Response
	r.Reset(endOf(p))
	r.AddEvent([]byte(hello))
	if r.Reset(endOf(p)); r.parseByTemplate([]byte(hello)) {
		t.Error("the next response's events are compared with this one's")
	}
}

// FuzzEventTemplate holds a Response against one that reads every event to its end.
func FuzzEventTemplate(f *testing.F) {
	f.Add(eventHead, eventTail, "}", "hello", `w\u00f6rld\ud83d`, ` "\`)
	f.Add(eventHead, eventTail, `,"usage":{},"choices":[{"delta":{"content":"b"}}]}`, "a", "\n", "")
	f.Add(`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"`, `"}}],"content":"x"}}]`, "}", "{}", "a", "")
	f.Add(`{"choices":[{"delta":{"content":"y","tool_calls":[{"index":0,"function":{"name":"`, `"}}]}}]`, "}", "f", `g"}}],"x":[{"":{"":"`, "")
	f.Add(`{"choices":[{"text":"`, `"},{"text":"x"}]`, "}", "a", `b"},{"text":"c`, "")
	f.Add(`{"choices":[{"delta":{"c\u006fntent":"`, `","reasoning":""}}]`, ` , "x":[1]} `, "a", `","reasoning":"b`, "")
	f.Add(`{"choices":[],"choices":[{"text":"a"}],"x":"`, `","choices":[{"text":""}]`, "}", "a", "b", "c")
	prompts := make(map[string]*Prompt)
	for kind, body := range map[Kind]string{Chat: `{"messages":[{"role":"user","content":"q"}]}`, Completion: `{"prompt":"q"}`} {
		prompts[body], _ = blocksOf(f, kind, []byte(body), 64)
	}
	f.Fuzz(func(t *testing.T, head, tail, end, a, b, c string) {
		events := []string{head + a + tail + end, head + b + tail + end, head + c + tail + "}", head + a + end, head + a + tail + end,
			head + b + tail, head + c + tail + end}
		for _, p := range prompts {
			quick, slow := new(Response), new(Response)
			quick.Reset(endOf(p))
			slow.Reset(endOf(p))
			for i, e := range events {
				slow.template.before = 0
				quick.AddEvent([]byte(e))
				slow.AddEvent([]byte(e))
				if got, want := state(quick), state(slow); got != want || !slices.Equal(quick.blocks, slow.blocks) ||
					!bytes.Equal(quick.text, slow.text) {
					t.Fatalf("after event %d, %q: %s, text %q; read to its end: %s, text %q", i, e, got, quick.text, want, slow.text)
				}
			}
			if !slices.Equal(quick.Finish(), slow.Finish()) {
				t.Fatal("other blocks in the end")
			}
		}
	})
}

func state(r *Response) string {
	return fmt.Sprintf("format %d, hash %x, call %d %q %q, usage %v", r.format, r.hash, r.call.number, r.call.name, r.call.args,
		r.usage != nil)
}
