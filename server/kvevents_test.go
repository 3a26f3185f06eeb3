package server

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/router"
)

// publishing is a replica that publishes KV events.
var publishing = sim.Config{Engine: engine.Config{KVTokens: 20_000, Speed: 20}, KVEvents: sim.KVEventsConfig{Endpoint: "0"}}

// startPublishing starts a fleet whose KV events are read.
func startPublishing(t *testing.T, n int, c sim.Config) *guarded {
	g := startGuarded(t, n, c, nil)
	for i := range n {
		g.until("the events are read", func() bool { return g.kvStatus(i) != nil && g.kvStatus(i).Complete })
	}
	return g
}

// kvStatus is what the proxy knows of a replica by its events; nil if it does not read them.
func (g *guarded) kvStatus(replica int) *router.KVStatus {
	parts, _ := g.server.router.IndexStats()
	return parts[replica].KV
}

// chatResult says how much of a chat's prompt was expected to be cached, and how much was.
type chatResult struct {
	replica           int // -1: another client's
	predicted, cached int
	output            string
}

// chat sends messages of alternating roles to the proxy, or to a replica itself.
func (g *guarded) chat(base string, contents ...string) (r chatResult) {
	g.t.Helper()
	return g.chatWith("sim", base, contents...)
}

func (g *guarded) chatWith(model, base string, contents ...string) (r chatResult) {
	g.t.Helper()
	messages := make([]map[string]string, len(contents))
	for i, c := range contents {
		messages[i] = map[string]string{"role": [2]string{"user", "assistant"}[i%2], "content": c}
	}
	body, _ := json.Marshal(map[string]any{"model": model, "messages": messages, "max_tokens": 40, "ignore_eos": true})
	resp, err := g.client.Post(base+"/v1/chat/completions", "application/json", strings.NewReader(string(body)))
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	var response struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&response); err != nil || resp.StatusCode != http.StatusOK || len(response.Choices) == 0 {
		g.t.Fatalf("status %d, %v", resp.StatusCode, err)
	}
	r = chatResult{replica: -1, cached: response.Usage.Details.Cached, output: response.Choices[0].Message.Content}
	fmt.Sscanf(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "%d/", &r.predicted)
	for i, b := range g.server.registry.All() {
		if b.Name == resp.Header.Get("X-Warmroute-Backend") {
			r.replica = i
		}
	}
	return r
}

// confirmed is how many blocks a replica holds according to its events.
func (g *guarded) confirmed(replica int) int {
	if s := g.kvStatus(replica); s != nil {
		return s.Confirmed
	}
	return 0
}

func (r chatResult) checkPrediction(t *testing.T, what string) {
	t.Helper()
	if difference := r.predicted - r.cached; difference > 16 || difference < -64 {
		t.Errorf("%s: %d tokens expected to be cached, %d were", what, r.predicted, r.cached)
	}
}

func TestKVEventsOfAnotherClient(t *testing.T) {
	startPublishing(t, 2, publishing).checkOtherClient()
}

// checkOtherClient checks that what another client makes two replicas compute and evict is known. It returns the index of the replica
// that has confirmed blocks afterwards.
func (g *guarded) checkOtherClient() (holder int) {
	t := g.t
	t.Helper()
	system := strings.Repeat("You answer in short sentences. ", 200)
	first := g.chat(g.url, system+"one")
	if first.cached != 0 {
		t.Fatalf("%d tokens cached on a fresh replica", first.cached)
	}
	g.until("the first request is settled", func() bool { return g.confirmed(first.replica) > 20 })

	other := 1 - first.replica
	g.chat(g.replicas[other].URL(), system+"one") // another client
	g.until("the other replica has it too", func() bool { return g.confirmed(other) == g.confirmed(first.replica) })

	for i := range 15 {
		g.chat(g.replicas[first.replica].URL(), strings.Repeat(fmt.Sprint("evict", i), 1000))
	}
	g.until("its blocks are evicted", func() bool { return g.confirmed(first.replica) == 0 })
	second := g.chat(g.url, system+"two")
	if second.replica != other || second.cached < 1000 {
		t.Errorf("the request went to replica %d, where %d tokens were cached; replica %d has its prefix", second.replica, second.cached, other)
	}
	second.checkPrediction(t, "after evictions")
	return other
}

func TestKVEventsOfConversation(t *testing.T) {
	g := startPublishing(t, 2, publishing)
	contents := []string{strings.Repeat("A long first message. ", 100)}
	for turn := range 5 {
		r := g.chat(g.url, contents...)
		r.checkPrediction(t, fmt.Sprintf("turn %d", turn))
		blocks := g.confirmed(r.replica)
		g.until("the turn is settled", func() bool { return g.confirmed(r.replica) > blocks })
		contents = append(contents, r.output, fmt.Sprintf("And what of number %d, which comes after the others before it?", turn))
	}
}

func TestKVEventsAfterRestartOfReplica(t *testing.T) {
	g := startPublishing(t, 1, publishing)
	long := strings.Repeat("You answer in short sentences. ", 200)
	g.chat(g.url, long)
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 })
	g.fault(0, sim.Fault{Kind: sim.Restart})
	g.until("nothing is held", func() bool { // while no events are read, blocks count as held until the restart is noticed
		parts, _ := g.server.router.IndexStats()
		return parts[0].KV != nil && parts[0].KV.KVBlocks == 0 && parts[0].Blocks == 0
	})
	r := g.chat(g.url, long)
	r.checkPrediction(t, "after a restart")
	g.until("the request is settled", func() bool { return g.confirmed(0) > 20 })
}

// Events that are lost are replayed; where they cannot be, the proxy's own account counts.
func TestLostKVEvents(t *testing.T) {
	g := startPublishing(t, 1, publishing)
	long := strings.Repeat("You answer in short sentences. ", 200)
	g.fault(0, sim.Fault{Kind: sim.EventsLost, Every: 3})
	for i := range 4 {
		r := g.chat(g.url, fmt.Sprint(i, long))
		blocks := g.confirmed(0)
		g.until("a request with lost events is settled", func() bool { return g.confirmed(0) > blocks+20 })
		r.checkPrediction(t, "with lost events")
	}
	if s := g.kvStatus(0); !s.Complete {
		t.Error("the replayed events leave the account incomplete")
	}

	g.fault(0, sim.Fault{Kind: sim.ReplaySilent})
	g.fault(0, sim.Fault{Kind: sim.EventsGarbled, Requests: 1})
	g.chat(g.url, "another prompt that stores a block or two with its output of forty tokens")
	g.until("the account is incomplete", func() bool { return !g.kvStatus(0).Complete })
	if r := g.chat(g.url, "0"+long); r.cached < 1000 || r.predicted < r.cached-64 {
		t.Errorf("%d tokens expected to be cached by the proxy's own account, %d were", r.predicted, r.cached)
	}
}

// The same prompt for the base model and for an adapter are different KV blocks.
func TestKVEventsOfAdapter(t *testing.T) {
	c := publishing
	c.Adapters = []string{"sql"}
	g := startPublishing(t, 1, c)
	long := strings.Repeat("You answer in short sentences. ", 200)
	for i, model := range []string{"sim", "sql"} {
		first := g.chatWith(model, g.url, long+"one")
		if first.predicted != 0 || first.cached != 0 {
			t.Errorf("%s: %d tokens expected to be cached, %d were, of a new prompt", model, first.predicted, first.cached)
		}
		g.until("it is settled", func() bool { return g.confirmed(0) > 20*(i+1) })
		g.chatWith(model, g.url, long+"two").checkPrediction(t, model)
	}
}

func TestKVEventsOfDataParallelEngines(t *testing.T) {
	c := publishing
	c.Ranks = 2
	g := startGuarded(t, 1, c, nil)
	// ranks returns what is known of each rank by its events, without those whose events are not read yet.
	ranks := func() (known []*router.KVStatus) {
		parts, _ := g.server.router.IndexStats()
		for _, b := range g.server.registry.All() {
			if kv := parts[b.Slot].KV; kv != nil && kv.Complete {
				known = append(known, kv)
			}
		}
		return known
	}
	g.until("the events of both are read", func() bool { return len(ranks()) == 2 })
	for i := range 4 {
		g.chat(g.url, strings.Repeat(fmt.Sprint("prompt", i), 400))
	}
	g.until("all are settled", func() bool {
		confirmed := 0
		for _, kv := range ranks() {
			confirmed += kv.Confirmed
		}
		return confirmed >= 4*10
	})
	if n := metricSum(t, g.admin, "warmroute_kv_event_connected_engines"); n != 2 {
		t.Errorf("events of %v engines are received, want 2", n)
	}
}
