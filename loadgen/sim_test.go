package loadgen

import (
	"context"
	"sync"
	"testing"
	"time"

	"warmroute/replay"
	"warmroute/sim"
	"warmroute/sim/engine"
)

// simulated starts a replica a hundred times faster than real, and a player of it.
func simulated(t *testing.T) (*Client, *results) {
	replica := sim.NewServer(sim.Config{Engine: engine.Config{Speed: 100}})
	if err := replica.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := replica.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	client := NewHTTPClient()
	t.Cleanup(client.CloseIdleConnections)
	got := &results{}
	return &Client{URL: replica.URL(), Model: "sim", HTTP: client, Speed: 100, Timeout: failsafe, OnResult: got.add}, got
}

func TestNextTurnHitsTheLastOneAndItsAnswer(t *testing.T) {
	p, got := simulated(t)
	c := testChats()
	c.Sessions, c.Concurrency = 1, 1
	p.RunChats(t.Context(), c)

	want := turns(c.Session(0))
	if len(got.all) != len(want) {
		t.Fatalf("got %d results, want %d", len(got.all), len(want))
	}
	for i, r := range got.all {
		if r.Err != "" || r.CompletionTokens != want[i].AnswerTokens || r.TTFT < 8*time.Millisecond || r.E2E < r.TTFT {
			t.Errorf("turn %d: %+v", i, r)
		}
		if i == 0 {
			continue
		}
		before := got.all[i-1]
		// All but a block of 16 tokens that was not full, and the answer's last token.
		if least := before.PromptTokens + before.CompletionTokens - 17; r.CachedTokens < least {
			t.Errorf("turn %d: %d tokens cached, want %d at least", i, r.CachedTokens, least)
		}
	}
}

func TestTraceBlocksAreHit(t *testing.T) {
	p, got := simulated(t)
	for _, r := range []replay.TraceRequest{
		{PromptTokens: 1100, AnswerTokens: 3, Blocks: []uint64{0, 1, 2}},
		{PromptTokens: 1600, AnswerTokens: 3, Blocks: []uint64{0, 1, 3, 4}},
	} {
		p.RunTrace(t.Context(), &replay.Trace{BlockTokens: 512, Requests: []replay.TraceRequest{r}})
	}
	if len(got.all) != 2 || got.all[0].Err != "" || got.all[1].Err != "" {
		t.Fatalf("got %+v", got.all)
	}
	// The two shared blocks of 512; the template's tokens before them move
	// their end by less than one of the replica's blocks.
	if c := got.all[1].CachedTokens; c < 1024-16 || c > 1024+16 {
		t.Errorf("%d tokens cached, want about 1024", c)
	}
}
