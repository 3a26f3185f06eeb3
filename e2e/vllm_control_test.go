//go:build vllm

package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
)

// controlPort is the port of the replica that TestControlOfVLLM starts.
const controlPort = "18120"

// getText returns the body of a GET.
func getText(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// TestControlOfVLLM carries out each action on a real replica under load, and loses no request. On a CPU
// vLLM's sleep stops the engine and drops the cache, but frees no memory.
func TestControlOfVLLM(t *testing.T) {
	adapterDir := makeVLLMAdapter(t)
	up := exec.CommandContext(t.Context(), "scripts/vllm-cpu/up.sh", controlPort, "19120", "--enable-lora", "--max-lora-rank", "8")
	up.Env = append(os.Environ(), "VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
	if out, err := up.CombinedOutput(); err != nil {
		t.Fatalf("up.sh: %v\n%s", err, out)
	}
	t.Cleanup(func() { exec.Command("scripts/vllm-cpu/down.sh", "--kill", controlPort).Run() })
	replica := "http://127.0.0.1:" + controlPort
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", replica)
	t.Setenv("WARMROUTE_ADMIN", strings.TrimPrefix(p.admin, "http://"))
	metric := func(name string) float64 { return metricSum(t, p.admin, "warmroute_"+name) }
	p.eventually("it is ready, and its events are read", func() bool { return metric("backend_ready") == 1 && metric("kv_complete") == 1 })
	run := func(exit int, want, args string) {
		t.Helper()
		got, stdout, stderr := runCommand(t, append([]string{"backends"}, strings.Fields(args)...)...)
		if got != exit || !strings.Contains(stdout+stderr, want) {
			t.Errorf("%s: exit status %d, %s%s", args, got, stdout, stderr)
		}
		t.Logf("%s:\n%s%s", args, stdout, stderr)
	}
	chat := vllmChat{t, p.url, "tiny"}

	// Each request of the load is served, also those that come while the engine is stopped.
	var over atomic.Bool
	var served atomic.Int64
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		for !over.Load() {
			resp, err := http.Post(p.url+"/v1/chat/completions", "application/json",
				strings.NewReader(`{"model":"tiny","max_tokens":60,"ignore_eos":true,"messages":[{"role":"user","content":"Count."}]}`))
			if err != nil {
				t.Error(err)
				return
			}
			var body struct {
				Usage struct {
					Tokens int `json:"completion_tokens"`
				}
			}
			err = json.NewDecoder(resp.Body).Decode(&body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusOK || body.Usage.Tokens != 60 {
				t.Errorf("status %d, %d tokens, %v", resp.StatusCode, body.Usage.Tokens, err)
			}
			served.Add(1)
		}
	}()
	more := func() {
		t.Helper()
		before := served.Load()
		p.eventually("more requests are served", func() bool { return served.Load() >= before+3 })
	}
	more()

	for _, c := range []struct{ stop, path, start string }{
		{"sleep --all", "/is_sleeping", "wake --all"},
		{"sleep --all --level 2", "/is_sleeping", "wake --all"},
		{"sleep --all --level 0", "/is_sleeping", "wake --all"},
		{"pause --all", "/is_paused", "resume --all"},
		{"pause --all --mode keep", "/is_paused", "resume --all"},
		{"pause --all --mode keep --clear-cache", "/is_paused", "resume --all"},
	} {
		run(0, "ok", c.stop)
		if body := getText(t, replica+c.path); !strings.Contains(body, "true") || metric("backend_ready") != 0 {
			t.Errorf("after %s: %s", c.stop, body)
		}
		run(0, "ok", c.start)
		if body := getText(t, replica+c.path); !strings.Contains(body, "false") {
			t.Errorf("after %s: %s", c.start, body)
		}
		more()
	}
	run(0, "ok", "sleep --all")
	run(1, "the engine is asleep", "resume --all")
	run(0, "ok", "wake --all --tags weights")
	run(0, "ok", "wake --all --tags kv_cache")
	more()

	prompt := vllmText("cached", 300)
	chat.ask(prompt)
	if _, _, cached := chat.ask(prompt); cached < 200 {
		t.Errorf("%d tokens are cached", cached)
	}
	run(0, "ok", "reset-cache --all --force")
	run(0, "ok", "reset-cache --all")
	if _, predicted, cached := chat.ask(prompt); predicted > 32 || cached > 32 {
		t.Errorf("after a reset %d tokens are cached, %d predicted", cached, predicted)
	}
	more()

	load := "load-adapter --all --adapter sql --path " + adapterDir
	run(0, "ok", load)
	vllmChat{t, p.url, "sql"}.ask("A request to the adapter.")
	run(1, "already been loaded", load)
	run(0, "ok", load+" --in-place")
	run(1, "No adapter found", "load-adapter --all --adapter none --path /none")
	run(0, "ok", "unload-adapter --all --adapter sql")
	if models := getText(t, p.url+"/v1/models"); strings.Contains(models, `"sql"`) {
		t.Errorf("after the adapter was unloaded: %s", models)
	}
	run(1, "cannot be found", "unload-adapter --all --adapter sql")
	more()
	over.Store(true)
	<-finished
}
