package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// TestConversationsInAllAPIs sends conversations of four turns over each API, streamed and
// not. Each turn has to reach the replica of the one before, and to be expected to find
// there what the replica reports as cached.
func TestConversationsInAllAPIs(t *testing.T) {
	fleet := startSimFleet(t, 3, 400_000)
	proxy, _ := startServer(t, fleet.urls...)
	base := "http://" + proxy.Addr().String()
	for _, api := range []struct {
		path, messages, system, maxTokens string
		text, usage, cached               string // of a whole response
	}{
		{"/v1/chat/completions", "messages", "", "max_tokens", "choices.0.message.content", "usage", "prompt_tokens_details.cached_tokens"},
		{"/v1/messages", "messages", "system", "max_tokens", "content.0.text", "usage", "cache_read_input_tokens"},
		{"/v1/responses", "input", "instructions", "max_output_tokens", "output.0.content.0.text", "usage", "input_tokens_details.cached_tokens"},
	} {
		t.Run(api.path, func(t *testing.T) {
			var messages []any
			add := func(role, text string) { messages = append(messages, map[string]any{"role": role, "content": text}) }
			body := map[string]any{"model": "sim", api.maxTokens: 60}
			system := strings.Repeat("You answer requests sent over "+api.path+". ", 100)
			if api.system != "" {
				body[api.system] = system
			} else {
				add("system", system)
			}
			var first string
			for turn := range 4 {
				add("user", fmt.Sprint("Question ", turn, ": ", strings.Repeat("what does the prefix cache hold? ", 40)))
				body[api.messages] = messages
				b, err := json.Marshal(body)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := http.Post(base+api.path, "application/json", bytes.NewReader(b))
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusOK {
					t.Fatalf("turn %d: status %d, %v: %s", turn, resp.StatusCode, err, got)
				}
				backend, match := resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Predicted-Tokens")
				if turn == 0 {
					first = backend
				} else if backend != first {
					t.Errorf("turn %d went to %s, the ones before to %s", turn, backend, first)
				}
				var matched, prompt int
				fmt.Sscanf(match, "%d/%d", &matched, &prompt)
				cached := int(gjson.GetBytes(got, api.usage+"."+api.cached).Int())
				// A block of the proxy has 64 tokens, one of the replica 16.
				if turn > 0 && (cached < 900 || matched < cached-64-16 || matched > cached+64) {
					t.Errorf("turn %d: %s was expected, the replica had %d in its cache", turn, match, cached)
				}
				text := gjson.GetBytes(got, api.text)
				if text.Str == "" {
					t.Fatalf("no text in %s", got)
				}
				add("assistant", text.Str)
			}
		})
	}
}
