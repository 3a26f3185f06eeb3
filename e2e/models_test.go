//go:build unix

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"warmroute/lab/sim"
)

// Adapters by pattern go to the replicas of their base model, and models that no replica lists wait until the URL of
// wake has started one.
func TestModelsThatAreNotListed(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 2, 200_000)
	called := make(chan string, 10)
	scaler := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		called <- string(body)
	}))
	t.Cleanup(scaler.Close)
	settings := fmt.Sprintf("models: {patterns: {\"sql-*\": sim}}\nstart_hooks: [{model: big, url: %s/start}]\nrouting: {queue: "+
		"{none_ready_timeout: 1s}}\n", scaler.URL)
	file := fleet.configFile(t, settings)
	p := startProgram(t, "--config", file.path)
	ask := func(model string) (status int, text string) {
		body := fmt.Sprintf(`{"model":%q,"max_tokens":2,"messages":[{"role":"user","content":"hello"}]}`, model)
		resp, err := http.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, err.Error()
		}
		return resp.StatusCode, string(all)
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	if status, text := ask("unknown"); status != http.StatusNotFound || !strings.Contains(text, "warmroute") {
		t.Errorf("an unknown model: %d %s", status, text)
	}
	if status, text := ask("sql-a"); status != http.StatusNotFound || strings.Contains(text, "warmroute") || !strings.Contains(text, "sql-a") {
		t.Errorf("an adapter that the replica does not find: %d %s, want the replica's 404", status, text)
	}
	for _, url := range fleet.urls { // as a resolver would at the request
		resp, err := http.Post(url+"/v1/load_lora_adapter", "application/json",
			strings.NewReader(`{"lora_name":"sql-a","lora_path":"/adapters/sql-a"}`))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if status, text := ask("sql-a"); status != http.StatusOK || !strings.Contains(text, `"model":"sql-a"`) {
		t.Errorf("an adapter: %d %s", status, text)
	}
	type response struct {
		status int
		text   string
	}
	done := make(chan response, 1)
	go func() {
		status, text := ask("big")
		done <- response{status, text}
	}()
	if body := <-called; body != `{"model":"big"}` {
		t.Errorf("called with %s", body)
	}
	url, _ := startSimReplica(t, sim.Config{Model: "big"}, "127.0.0.1:0")
	fleet.urls = append(fleet.urls, url)
	file.write(settings)
	p.reloaded("ok", 1)
	if got := <-done; got.status != http.StatusOK || !strings.Contains(got.text, `"model":"big"`) {
		t.Errorf("a model that was woken: %d %s", got.status, got.text)
	}
	if len(called) > 0 {
		t.Error("called again")
	}
}
