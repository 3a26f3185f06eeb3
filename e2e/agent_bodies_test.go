package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/tidwall/gjson"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// TestRecordedAgents sends what Claude Code and Codex sent in a task of three turns; the
// replicas give the replies that they gave then. All turns of a task have to reach one replica,
// and to be expected to find there what it reports as cached.
func TestRecordedAgents(t *testing.T) {
	for name, api := range map[string]struct{ path, cached string }{
		"claude-code": {"/v1/messages", "usage.cache_read_input_tokens"},
		"codex":       {"/v1/responses", "response.usage.input_tokens_details.cached_tokens"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := filepath.Join("prompt/testdata/agents", name)
			replies, err := os.Open(filepath.Join(folder, "replies.json"))
			if err != nil {
				t.Fatal(err)
			}
			defer replies.Close()
			script, err := sim.ReadScript(replies)
			if err != nil {
				t.Fatal(err)
			}
			var urls []string
			for range 3 {
				url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}, Script: script}, "127.0.0.1:0")
				urls = append(urls, url)
			}
			proxy, _ := startServer(t, urls...)
			var first string
			for turn := 1; turn <= len(script); turn++ {
				body, err := os.ReadFile(filepath.Join(folder, fmt.Sprintf("turn%d.json", turn)))
				if err != nil {
					t.Fatal(err)
				}
				resp, err := http.Post("http://"+proxy.Addr().String()+api.path, "application/json", bytes.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusOK {
					t.Fatalf("turn %d: status %d, %v: %s", turn, resp.StatusCode, err, got)
				}
				cached := -1
				for line := range bytes.Lines(got) {
					if usage := gjson.GetBytes(bytes.TrimPrefix(line, []byte("data: ")), api.cached); usage.Exists() {
						cached = int(usage.Int())
					}
				}
				backend, match := resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Predicted-Tokens")
				var matched, prompt int
				fmt.Sscanf(match, "%d/%d", &matched, &prompt)
				if turn == 1 {
					first = backend
					continue
				}
				if backend != first {
					t.Errorf("turn %d went to %s, the first to %s", turn, backend, first)
				}
				// A block of the proxy has 64 tokens, one of the replica 16.
				if cached < 5000 || matched < cached-64-16 || matched > cached+64 {
					t.Errorf("turn %d: %s was expected, the replica had %d in its cache", turn, match, cached)
				}
			}
		})
	}
}
