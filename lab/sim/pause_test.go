package sim

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"warmroute/lab/sim/engine"
)

// getBody returns the body of a GET.
func getBody(t *testing.T, s *Server, path string) string {
	t.Helper()
	resp, err := http.Get(s.URL() + path)
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

// postOK posts without a body and wants a 200 with a part in its body.
func postOK(t *testing.T, s *Server, path, want string) {
	t.Helper()
	if status, body := post(t, s, path, ""); status != http.StatusOK || !strings.Contains(body, want) {
		t.Errorf("%s: status %d, %s, want %s", path, status, body, want)
	}
}

func TestPauseAndSleep(t *testing.T) {
	const request = `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":200,"ignore_eos":true}`
	for _, c := range []struct {
		stop       string
		start      []string
		aborts     bool
		keepsCache bool
		sleepState string // of the metric, that is 1; empty: none
	}{
		{"/pause?mode=keep&clear_cache=False", []string{"/resume"}, false, true, "awake"},
		{"/pause?mode=keep", []string{"/resume"}, false, false, "awake"},
		{"/pause", []string{"/wake_up"}, true, false, "awake"},
		{"/sleep?level=0&mode=keep", []string{"/wake_up"}, false, true, ""},
		{"/sleep?mode=keep", []string{"/wake_up?tags=weights", "/wake_up?tags=kv_cache"}, false, false, "weights_offloaded"},
		{"/sleep?level=2", []string{"/wake_up"}, true, false, "discard_all"},
	} {
		t.Run(c.stop, func(t *testing.T) {
			s := start(t, Config{Ranks: 2, Engine: engine.Config{Speed: 5}})
			responses := make(chan response, 3)
			send := func() { go func() { responses <- ask(t, s, request) }() }
			send()
			send()
			until(t, "both engines run", func() bool { return s.Stats().Running == 2 })
			postOK(t, s, c.stop, `"status":`)

			before := s.Stats()
			send()
			until(t, "the third request stays at the API server", func() bool { return s.Stats().Arriving == 1 })
			if now := s.Stats(); now.GenerationTokens != before.GenerationTokens || (now.KVUsage > 0) != c.keepsCache {
				t.Errorf("stopped, the engines went from %+v to %+v", before, now)
			}
			for _, state := range []string{"awake", "weights_offloaded", "discard_all"} {
				want := `sleep_state="` + state + `"} 0.0`
				if state == c.sleepState {
					want = `sleep_state="` + state + `"} 1.0`
				}
				if metrics := string(s.formatMetrics()); strings.Count(metrics, want) != 2 {
					t.Errorf("not twice %s in the metrics", want)
				}
			}
			for _, path := range c.start {
				if got := getBody(t, s, "/is_sleeping"); !strings.Contains(got, "true") {
					t.Errorf("before %s: %s", path, got)
				}
				if got := getBody(t, s, "/is_paused"); !strings.Contains(got, "true") {
					t.Errorf("before %s: %s", path, got)
				}
				postOK(t, s, path, `"status":`)
			}
			aborted := 0
			for range 3 {
				a := <-responses
				switch reason := a.Choices[0].FinishReason; {
				case reason == "abort":
					aborted++
				case a.Usage.CompletionTokens != 200:
					t.Errorf("a response of %d tokens ended with %q, want 200", a.Usage.CompletionTokens, reason)
				}
			}
			if want := map[bool]int{true: 2}[c.aborts]; aborted != want {
				t.Errorf("%d requests were aborted, want %d", aborted, want)
			}
			if got := getBody(t, s, "/is_sleeping") + getBody(t, s, "/is_paused"); strings.Contains(got, "true") {
				t.Errorf("in the end %s", got)
			}
		})
	}
}

// The request in flight ends, and one that comes meanwhile waits for the end of the sleep.
func TestSleepWaitsForRequests(t *testing.T) {
	s := start(t, Config{Engine: engine.Config{Speed: 5}})
	done := make(chan response, 2)
	send := func() {
		done <- ask(t, s, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":100,"ignore_eos":true}`)
	}
	go send()
	until(t, "the request runs", func() bool { return s.Stats().Running == 1 })
	go func() {
		until(t, "it is about to sleep", func() bool { return strings.Contains(getBody(t, s, "/is_paused"), "true") })
		send()
	}()
	postOK(t, s, "/sleep?mode=wait", `"level":1`)
	if a := <-done; a.Usage.CompletionTokens != 100 {
		t.Errorf("the request got %d tokens, want 100", a.Usage.CompletionTokens)
	}
	until(t, "the other request waits", func() bool { return s.Stats().Waiting == 1 })
	if st := s.Stats(); st.Running != 0 || st.GenerationTokens != 100 {
		t.Errorf("it sleeps with %+v", st)
	}
	postOK(t, s, "/wake_up?tags=weights", `{"status":"sleeping","tags":["weights"]}`)
	postOK(t, s, "/wake_up", `{"status":"awake","tags":null}`)
	if a := <-done; a.Usage.CompletionTokens != 100 {
		t.Errorf("the request got %d tokens, want 100", a.Usage.CompletionTokens)
	}
}

func TestCacheResetOfRunningRequest(t *testing.T) {
	s := start(t, Config{Engine: engine.Config{Speed: 5}})
	done := make(chan response, 1)
	go func() {
		done <- ask(t, s, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":100,"ignore_eos":true}`)
	}()
	until(t, "the request runs", func() bool { return s.Stats().Running == 1 })
	postOK(t, s, "/reset_prefix_cache", `{"success":false}`)
	postOK(t, s, "/reset_prefix_cache?reset_running_requests=true", `{"success":true}`)
	if a := <-done; a.Usage.CompletionTokens != 100 || s.Stats().Preemptions != 1 {
		t.Errorf("the request got %d tokens, want 100", a.Usage.CompletionTokens)
	}
}

func TestInvalidPause(t *testing.T) {
	s := start(t, Config{Engine: fast})
	for _, path := range []string{"/pause?mode=guess", "/sleep?mode=", "/sleep?level=3", "/sleep?level=x"} {
		if status, body := post(t, s, path, ""); status != http.StatusBadRequest {
			t.Errorf("%s: status %d, %s", path, status, body)
		}
	}
	if state := s.pauseState(); state.stopsEngines() {
		t.Errorf("it stopped: %+v", state)
	}
}

// TestControlResponses compares the control API with what vLLM 0.32 responds, call after call.
func TestControlResponses(t *testing.T) {
	s := start(t, Config{Model: "tiny", Engine: fast})
	for _, c := range []struct {
		path, body string
		status     int
		want       string // of the response, exactly
	}{
		{"/reset_prefix_cache", "", 200, `{"success":true}`},
		{"/pause?mode=keep", "", 200, `{"status":"paused"}`},
		{"/resume", "", 200, `{"status":"resumed"}`},
		{"/sleep", "", 200, `{"status":"sleeping","level":1}`},
		{"/sleep", "", 200, `{"status":"sleeping","level":1}`},
		{"/wake_up?tags=weights", "", 200, `{"status":"sleeping","tags":["weights"]}`},
		{"/wake_up?tags=kv_cache", "", 200, `{"status":"awake","tags":["kv_cache"]}`},
		{"/wake_up", "", 200, `{"status":"awake","tags":null}`},
		{"/sleep?level=0", "", 200, `{"status":"sleeping","level":0}`},
		{"/wake_up", "", 200, `{"status":"awake","tags":null}`},
		{"/v1/load_lora_adapter", `{"lora_name":"sql","lora_path":"/a"}`, 200, `Success: LoRA adapter 'sql' added successfully.`},
		{"/v1/load_lora_adapter", `{"lora_name":"sql","lora_path":"/a"}`, 400,
			`{"error":{"message":"The lora adapter 'sql' has already been loaded. ` +
				`If you want to load the adapter in place, set 'load_inplace' to True.","type":"InvalidUserInput","param":null,"code":400}}`},
		{"/v1/load_lora_adapter", `{"lora_name":"sql","lora_path":"/a","load_inplace":true}`, 200,
			`Success: LoRA adapter 'sql' added successfully.`},
		{"/v1/load_lora_adapter", `{"lora_name":"tiny","lora_path":"/a"}`, 400,
			`{"error":{"message":"The lora adapter 'tiny' conflicts with a served base model.","type":"InvalidUserInput","param":null,"code":400}}`},
		{"/v1/unload_lora_adapter", `{"lora_name":"none"}`, 404,
			`{"error":{"message":"The lora adapter 'none' cannot be found.","type":"NotFoundError","param":null,"code":404}}`},
		{"/v1/unload_lora_adapter", `{"lora_name":"sql"}`, 200, `Success: LoRA adapter 'sql' removed successfully.`},
	} {
		if status, body := post(t, s, c.path, c.body); status != c.status || body != c.want {
			t.Errorf("%s %s: status %d, %s, want %d, %s", c.path, c.body, status, body, c.status, c.want)
		}
	}
}
