package prompt

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

const (
	alikeHead = `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1763700000,"model":"m","choices":[{"index":0,"delta":{"content":"`
	alikeTail = `"},"logprobs":null,"finish_reason":null,"token_ids":null}]`
)

// TestEventsAlikeAreCompared looks at which events are not read to their end again.
func TestEventsAlikeAreCompared(t *testing.T) {
	p, _ := blocksOf(t, Chat, []byte(`{"messages":[{"role":"user","content":"q"}]}`), 64)
	f := func(name, first, second string, want bool) {
		t.Helper()
		var r Reply
		r.Begin(p)
		r.Event([]byte(first))
		if got := r.again([]byte(second)); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	hello := alikeHead + "hello" + alikeTail + "}"
	f("another text", hello, alikeHead+`\"w\u00f6rld\"`+alikeTail+"}", true)
	f("something behind the choices", hello, alikeHead+"a"+alikeTail+`,"usage":{"prompt_tokens":1}}`, true)
	f("a fault behind the choices", hello, alikeHead+"a"+alikeTail+`,]`, true)
	f("another beginning", hello, strings.Replace(hello, "0000", "0001", 1), false)
	f("another end", hello, strings.Replace(hello, `reason":null`, `reason":"stop"`, 1), false)
	f("a broken text", hello, alikeHead+"a\n"+alikeTail+"}", false)
	f("cut off", hello, alikeHead+`a`, false)
	f("two texts", strings.Replace(hello, "}]", `},{"delta":{"content":"x"}}]`, 1), strings.Replace(hello, "}]", `},{"delta":{"content":"x"}}]`, 1), false)
	calls := strings.Replace(hello, `"content"`, `"tool_calls":[{"index":0,"function":{"name":"f"}}],"content"`, 1)
	f("calls beside the text", calls, calls, false)
	long := strings.Replace(hello, `"m"`, `"`+strings.Repeat("m", mostAlike)+`"`, 1)
	f("too long to keep", long, long, false)

	var r Reply
	r.Begin(p)
	r.Event([]byte(hello))
	if r.Begin(p); r.again([]byte(hello)) {
		t.Error("the next answer's events are compared with this one's")
	}
}

// FuzzEventsAlike holds a Reply against one that reads every event to its end.
func FuzzEventsAlike(f *testing.F) {
	f.Add(alikeHead, alikeTail, "}", "hello", `w\u00f6rld\ud83d`, ` "\`)
	f.Add(alikeHead, alikeTail, `,"usage":{},"choices":[{"delta":{"content":"b"}}]}`, "a", "\n", "")
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
		events := []string{head + a + tail + end, head + b + tail + end, head + c + tail + "}", head + a + end, head + a + tail + end, head + b + tail, head + c + tail + end}
		for _, p := range prompts {
			quick, slow := new(Reply), new(Reply)
			quick.Begin(p)
			slow.Begin(p)
			for i, e := range events {
				slow.alike.before = 0
				quick.Event([]byte(e))
				slow.Event([]byte(e))
				if got, want := state(quick), state(slow); got != want || !slices.Equal(quick.blocks, slow.blocks) || !bytes.Equal(quick.text, slow.text) {
					t.Fatalf("after event %d, %q: %s, text %q; read to its end: %s, text %q", i, e, got, quick.text, want, slow.text)
				}
			}
			if !slices.Equal(quick.End(), slow.End()) {
				t.Fatal("other blocks in the end")
			}
		}
	})
}

func state(r *Reply) string {
	return fmt.Sprintf("format %d, hash %x, call %d %q %q, usage %v", r.format, r.hash, r.call.number, r.call.name, r.call.args, r.usage != nil)
}
