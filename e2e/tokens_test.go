package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// TestTokenTurns sends conversations of token ids to simulated replicas.
func TestTokenTurns(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 3, 400_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	p.eventually("all are ready", func() bool { return metricSum(t, p.admin, "warmroute_backend_ready") == 3 })
	testTokenTurns(t, p.url, "sim", 10)
}

// testTokenTurns begins each conversation with token ids in /v1/completions, and continues
// it in /inference/v1/generate, streamed and not, with what was generated. All turns have
// to reach one replica, and what the proxy expects in its cache has to be there, within
// one block.
func testTokenTurns(t *testing.T, url, model string, conversations int) {
	const blockTokens = 64 // of the proxy; the replicas' are smaller
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	r := rand.New(rand.NewPCG(15, 7))
	draw := func(n int) (ids []int) {
		for range n {
			ids = append(ids, 10+r.IntN(400)) // of the smallest vocabulary
		}
		return ids
	}
	// send returns the response, the replica and the tokens that the proxy expected there.
	send := func(path string, body map[string]any) (answer, backend string, matched int) {
		t.Helper()
		body["model"] = model
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Post(url+path, "application/json", bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: status %d, %v: %s", path, resp.StatusCode, err, got)
		}
		fmt.Sscanf(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "%d/", &matched)
		return string(got), resp.Header.Get("X-Warmroute-Backend"), matched
	}
	var worst int64
	for c := range conversations {
		ids := draw(300 + r.IntN(500))
		prompt := any(ids)
		if c%2 == 1 {
			prompt = [][]int{ids}
		}
		_, first, _ := send("/v1/completions", map[string]any{"prompt": prompt, "max_tokens": 1})
		for turn := range 4 {
			ids = append(ids, draw(10+r.IntN(100))...)
			body := map[string]any{"token_ids": ids, "sampling_params": map[string]any{"max_tokens": 70, "ignore_eos": true, "temperature": 0}}
			stream := turn%2 == 1
			if stream {
				body["stream"], body["stream_options"] = true, map[string]any{"include_usage": true}
			}
			answer, backend, matched := send("/inference/v1/generate", body)
			chunks := []string{answer}
			if stream {
				chunks = strings.Split(strings.ReplaceAll(answer, "data: ", ""), "\n\n")
			}
			before, cached := len(ids), int64(-1)
			for _, chunk := range chunks {
				for _, id := range gjson.Get(chunk, "choices.0.token_ids").Array() {
					ids = append(ids, int(id.Int()))
				}
				if details := gjson.Get(chunk, "usage.prompt_tokens_details.cached_tokens"); details.Exists() {
					cached = details.Int()
				}
			}
			if backend != first {
				t.Errorf("conversation %d, turn %d: on %s, begun on %s", c, turn, backend, first)
			}
			off := max(int64(matched)-cached, cached-int64(matched))
			if worst = max(worst, off); off > blockTokens || cached < 200 {
				t.Errorf("conversation %d, turn %d: %d tokens expected, %d cached of %d", c, turn, matched, cached, before)
			}
			if n := len(ids) - before; n != 70 {
				t.Errorf("conversation %d, turn %d: %d tokens generated, want 70", c, turn, n)
			}
		}
	}
	t.Logf("what was expected and what was cached differ by %d tokens at most", worst)
}
