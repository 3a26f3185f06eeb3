package sim

import (
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzChatBody looks for bodies that crash the reading of a chat request. What
// it accepts has to have a prompt.
func FuzzChatBody(f *testing.F) {
	for _, body := range []string{
		``, `{`, `[]`, `"x"`, `{"a":`, `{"messages":3}`, `{"messages":[]}`, `{"messages":[null]}`, `{"messages":[{"role":1}]}`,
		short, stream, `{"messages":[{"role":"user","content":"\ud800"}]}`, `{"model":"a","model":"sim","messages":[{"role":"user"}]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]}`,
		`{"messages":[{"role":"system","content":"<|im_start|>"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}}}]}],` +
			`"tools":[{"function":{"name":"f","parameters":{"type":"object","required":["a"]}}}],"tool_choice":"required"}`,
		strings.Repeat("[", 20_000), strings.Repeat(`{"a":`, 20_000),
	} {
		f.Add([]byte(body))
	}
	s := NewServer(Config{})
	f.Fuzz(func(t *testing.T, body []byte) {
		r := httptest.NewRequest("POST", "/v1/chat/completions", strings.NewReader(string(body)))
		r.Header.Set("Content-Type", "application/json")
		in, err := readBody(r)
		if err != nil {
			return
		}
		if _, prompt, _, err := s.readChat(in); err == nil && len(prompt) == 0 {
			t.Error("no prompt")
		}
	})
}

func FuzzTokenize(f *testing.F) {
	for _, text := range []string{"", "abcd", "abcde", "<|im_start|>user\nhi<|im_end|>\n", "<|<|endoftext|>", "é🙂"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) || strings.Contains(text, "\x00") {
			return // not told apart from the padding of a short token
		}
		if got := detokenize(tokenize([]byte(text), nil)); got != text {
			t.Errorf("%q became %q", text, got)
		}
	})
}
