package prompt

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// blocksOf are the blocks of a body.
func blocksOf(t testing.TB, kind Kind, body []byte, blockBytes int) (*Prompt, []Block) {
	t.Helper()
	p := parse(t, kind, string(body))
	return p, p.Blocks(nil, "m", blockBytes)
}

// inEvents are the events of an answer of that text, cut anywhere between two
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
		choice := fields{{"index", 0}, {"logprobs", nil}, {"delta", fields{{"content", part}, {"tool_calls", []any{}}, {"reasoning", nil}}}, {"finish_reason", nil}}
		if completion {
			choice = fields{{"index", 0}, {"text", part}, {"finish_reason", nil}}
		}
		events = append(events, spell(r, fields{{"id", words(r)}, {"choices", []any{choice}}, {"created", 1}}))
	}
	return append(events, spell(r, fields{{"choices", []any{}}, {"usage", object{{"prompt_tokens", 1}}}}))
}

func TestPropertyTheNextTurnBeginsWithTheReply(t *testing.T) {
	var reply Reply
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		blockBytes := []int{64, 256}[r.IntN(2)]
		messages := []any{fields{{"role", "system"}, {"content", content(r)}}}
		for range r.IntN(4) {
			messages = append(messages, turn(r, false)...)
		}
		messages = append(messages, fields{{"role", "user"}, {"content", content(r)}})
		tools := r.IntN(2) == 0
		answer := ""
		for range r.IntN(30) {
			answer += words(r)
		}
		p, first := blocksOf(t, Chat, spell(r, chatOf(messages, tools)), blockBytes)
		_, next := blocksOf(t, Chat, spell(r, chatOf(append(messages,
			fields{{"role", "assistant"}, {"content", answer}}, fields{{"role", "user"}, {"content", content(r)}}), tools)), blockBytes)
		f := func(how string, take func()) {
			t.Helper()
			if !reply.Begin(p) {
				t.Fatalf("seed %d: a plain chat whose answer can have no blocks", seed)
			}
			take()
			all := append(slices.Clone(first), reply.End()...)
			// What the answer fills of the next turn's text, whole blocks only.
			want := (len(p.Text) + len("\xffassistant\xfd"+answer)) / blockBytes
			if len(all) != want || !slices.Equal(all, next[:min(want, len(next))]) {
				t.Fatalf("seed %d, %s: %d blocks of prompt and reply, want the next turn's first %d", seed, how, len(all), want)
			}
		}
		f("streamed", func() {
			for _, e := range inEvents(r, answer, false) {
				reply.Event(e)
			}
		})
		f("whole", func() {
			reply.Whole(spell(r, fields{{"choices", []any{fields{{"index", 0}, {"message", fields{{"role", "assistant"}, {"content", answer},
				{"tool_calls", []any{}}, {"refusal", nil}, {"reasoning", nil}}}}}}}))
		})
	}
}

// callsOf makes tool calls as an answer holds them, with arguments in any spelling.
func callsOf(r *rand.Rand) (calls []any, arguments []string) {
	for n := range 1 + r.IntN(3) {
		object := spell(r, object{{"q", words(r)}, {words(r), []any{1, nil, object{{"x", words(r)}}}}})
		arguments = append(arguments, string(object))
		calls = append(calls, fields{{"id", fmt.Sprint(n)}, {"type", "function"}, {"function", fields{{"name", "f" + fmt.Sprint(n)}, {"arguments", string(object)}}}})
	}
	return calls, arguments
}

func TestPropertyTheNextTurnBeginsWithTheReplysCalls(t *testing.T) {
	var reply Reply
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 6))
		messages := []any{fields{{"role", "user"}, {"content", content(r)}}}
		p, first := blocksOf(t, Chat, spell(r, chatOf(messages, true)), 64)
		answer := words(r)
		calls, arguments := callsOf(r)
		said := object{{"role", "assistant"}, {"content", answer}, {"tool_calls", calls}}
		_, next := blocksOf(t, Chat, spell(r, chatOf(append(messages, said), true)), 64)

		reply.Begin(p)
		for _, e := range inEvents(r, answer, false) {
			reply.Event(e)
		}
		for n, a := range arguments {
			part := func(function fields) {
				calls := []any{fields{{"index", n}, {"function", function}}}
				reply.Event(spell(r, fields{{"choices", []any{fields{{"index", 0}, {"delta", fields{{"tool_calls", calls}, {"content", nil}}}}}}}))
			}
			part(fields{{"name", "f" + fmt.Sprint(n)}, {"arguments", ""}})
			for rest := []rune(a); len(rest) > 0; {
				k := min(1+r.IntN(20), len(rest))
				part(fields{{"arguments", string(rest[:k])}})
				rest = rest[k:]
			}
		}
		if all := append(slices.Clone(first), reply.End()...); !slices.Equal(all, next) {
			t.Fatalf("seed %d, streamed: %d blocks of prompt and reply, want the next turn's %d", seed, len(all), len(next))
		}

		reply.Begin(p)
		reply.Whole(spell(r, fields{{"choices", []any{fields{{"message", said}}}}}))
		if all := append(slices.Clone(first), reply.End()...); !slices.Equal(all, next) {
			t.Fatalf("seed %d, whole: %d blocks of prompt and reply, want the next turn's %d", seed, len(all), len(next))
		}
	}
}

func TestPropertyTheNextCompletionBeginsWithTheReply(t *testing.T) {
	var reply Reply
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 5))
		question, answer := words(r)+"q", strings.Repeat(words(r), 5)
		p, first := blocksOf(t, Completion, spell(r, fields{{"prompt", question}}), 64)
		_, next := blocksOf(t, Completion, spell(r, fields{{"prompt", question + answer + "and then"}}), 64)
		reply.Begin(p)
		for _, e := range inEvents(r, answer, true) {
			reply.Event(e)
		}
		all := append(slices.Clone(first), reply.End()...)
		if want := len(question+answer) / 64; len(all) != want || !slices.Equal(all, next[:want]) {
			t.Fatalf("seed %d: %d blocks of prompt and reply, want the next prompt's first %d", seed, len(all), want)
		}
	}
}

func TestAnswersWithoutBlocks(t *testing.T) {
	long := strings.Repeat("word ", 200)
	delta := func(member string) string {
		return fmt.Sprintf(`{"choices":[{"index":0,"delta":{"content":%q,%s}}]}`, long, member)
	}
	const ask = `{"messages":[{"role":"user","content":"q"}]}`
	cases := []struct{ name, body, event string }{
		{"reasoning", ask, delta(`"reasoning":"hm"`)},
		{"reasoning of old", ask, delta(`"reasoning_content":"hm"`)},
		{"text behind a tool call", ask, `{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}},` + delta(`"role":"assistant"`)[len(`{"choices":[`):]},
		{"parts of calls out of order", ask, delta(`"tool_calls":[{"index":0},{"index":1},{"index":0}]`)},
		{"calls that skip one", ask, delta(`"tool_calls":[{"index":1,"function":{"name":"f"}}]`)},
		{"more calls than any model makes", ask, delta(`"tool_calls":[{"index":100,"function":{"name":"f"}}]`)},
		{"a tool call that is none", ask, delta(`"tool_calls":[1]`)},
		{"tool calls that are no list", ask, delta(`"tool_calls":{}`)},
		{"a tool call too long to keep", ask, delta(`"tool_calls":[{"index":0,"function":{"arguments":"` + strings.Repeat("x", mostCallBytes+1) + `"}}]`)},
		{"a field not known", ask, delta(`"audio":{"id":"x"}`)},
		{"content in parts", ask, `{"choices":[{"delta":{"content":[{"text":"a"}]}}]}`},
		{"no JSON", ask, delta(`"role":"assistant"`)[:100]},
		{"no object", ask, `[1]`},
		{"a choice that is none", ask, `{"choices":[1]}`},
		{"several choices", `{"n":2,"messages":[{"role":"user","content":"q"}]}`, delta(`"role":"assistant"`)},
		{"an answer that goes on with the last message", `{"messages":[{"role":"assistant","content":"q"}]}`, delta(`"role":"assistant"`)},
		{"reasoning that the next turn drops", `{"messages":[{"role":"user","content":"q"},{"role":"assistant","reasoning":"r"},{"role":"tool","content":"t"}]}`,
			delta(`"role":"assistant"`)},
		{"a prompt that is not cached", `{"truncate_prompt_tokens":5,"messages":[]}`, delta(`"role":"assistant"`)},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p, _ := blocksOf(t, Chat, []byte(c.body), 64)
			var reply Reply
			reply.Begin(p)
			reply.Event([]byte(c.event))
			if n := len(reply.End()); n != 0 {
				t.Errorf("%d blocks", n)
			}
		})
	}
	for _, body := range []string{`{"prompt":[1,2,3]}`, `{"prompt":"a","echo":true}`, `{"prompt":["a","b"]}`} {
		p, _ := blocksOf(t, Completion, []byte(body), 64)
		if new(Reply).Begin(p) {
			t.Errorf("the answer to %s has blocks", body)
		}
	}
	p, _ := blocksOf(t, Chat, []byte(ask), 64)
	var reply Reply
	reply.Begin(p)
	reply.Event([]byte(delta(`"role":"assistant"`)))
	if reply.Lost(); len(reply.End()) != 0 {
		t.Error("an answer of which a part was not seen has blocks")
	}
}

func TestALongReplyIsBounded(t *testing.T) {
	p, _ := blocksOf(t, Chat, []byte(`{"messages":[{"role":"user","content":"q"}]}`), 64)
	event, _ := json.Marshal(map[string]any{"choices": []any{map[string]any{"delta": map[string]any{"content": strings.Repeat("word ", 1000)}}}})
	var reply Reply
	reply.Begin(p)
	for range 100 {
		reply.Event(event)
	}
	if n := len(reply.End()); n != mostReplyBlocks {
		t.Errorf("%d blocks, want %d", n, mostReplyBlocks)
	}
	for range 3 {
		if reply.Begin(p); cap(reply.text) > keepReplyBytes {
			t.Errorf("a buffer of %d bytes is kept", cap(reply.text))
		}
	}
}

// BenchmarkReply is one event of a stream.
func BenchmarkReply(b *testing.B) {
	p, _ := blocksOf(b, Chat, []byte(`{"messages":[{"role":"user","content":"q"}]}`), 256)
	event := []byte(`{"id":"chatcmpl-7c9e1f0f5a3e4d1c","object":"chat.completion.chunk","created":1790000000,"model":"m","choices":[{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`)
	var reply Reply
	reply.Begin(p)
	b.ReportAllocs()
	for b.Loop() {
		if reply.Event(event); len(reply.blocks) > 1000 {
			reply.Begin(p)
		}
	}
}

// TestWholeReturnsUsage has the account of an answer found on the way, as it stands there.
func TestWholeReturnsUsage(t *testing.T) {
	p := new(Prompt)
	if err := p.Parse(Chat, []byte(`{"model":"m","messages":[{"role":"user","content":"Hi"}]}`)); err != nil {
		t.Fatal(err)
	}
	p.Blocks(nil, "m", 16)
	reply := new(Reply)
	for body, want := range map[string]string{
		`{"choices":[{"message":{"role":"assistant","content":"Hello"}}],"usage":{"a":1}}`: `{"a":1}`,
		`{ "usage" : {"a": [1, "}"]} , "choices":[{"message":{"content":"\"usage\":2"}}]}`: `{"a": [1, "}"]}`,
		`{"usage":1,"usage":2}`: `1`,
		`{"us\u0061ge":3}`:      `3`,
		`{"choices":[{"usage":4,"message":{"content":"\"usage\":5"}}]}`: ``,
		`{"usage":`: ``,
		`[]`:        ``,
	} {
		reply.Begin(p)
		if got := string(reply.Whole([]byte(body))); got != want {
			t.Errorf("%s: %q, not %q", body, got, want)
		}
		if reply.Begin(p); reply.Whole([]byte(`{}`)) != nil {
			t.Errorf("%s: its account is the next answer's", body)
		}
	}
}
