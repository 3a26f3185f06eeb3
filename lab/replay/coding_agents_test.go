package replay

import (
	"math"
	"testing"
	"time"
)

func TestCodingAgents(t *testing.T) {
	r := mustMake(t, CodingAgents{Conversations: 3000, BeginWithin: time.Hour}, 8)
	if r.Next != nil || len(r.Open) != r.Total {
		t.Fatalf("%d of %d requests are in the open loop", len(r.Open), r.Total)
	}
	var first, growth, outputs, pauses, turns []float64
	single, long := 0.0, 0.0
	last := map[uint64]*Job{}
	count := map[uint64]float64{}
	for i, j := range r.Open {
		if i > 0 && j.At < r.Open[i-1].At {
			t.Fatalf("request %d at %v after one at %v", i, j.At, r.Open[i-1].At)
		}
		outputs = append(outputs, float64(j.Output))
		if before := last[j.Conversation]; before == nil {
			first = append(first, float64(j.Prompt))
		} else {
			growth = append(growth, float64(j.Prompt-before.Prompt))
			if pause := j.At - before.At; pause == agentsMaxPause {
				long++
			} else {
				pauses = append(pauses, pause.Seconds())
			}
			if n := len(before.Blocks); j.Blocks[n-1] != before.Blocks[n-1] {
				t.Fatal("a turn does not begin with the one before it")
			}
		}
		last[j.Conversation] = j
		count[j.Conversation]++
	}
	for _, n := range count {
		if n == 1 {
			single++
		} else {
			turns = append(turns, n)
		}
	}
	near(t, "median of first prompts", median(first), 43_600, 0.05)
	near(t, "median growth", median(growth), 771, 0.03)
	near(t, "median of outputs", median(outputs), 267, 0.03)
	near(t, "median pause", median(pauses), 17.4, 0.03)
	near(t, "share of long pauses", long/float64(len(growth)), agentsLongPause, 0.15)
	near(t, "median of turns", median(turns), 24, 0.1)
	// One of a log-normal length counts as well, and one that is too long for a second turn.
	near(t, "share of single turns", single/3000, agentsSingleTurn, 0.15)
}

func TestCodingAgentsClosedLoop(t *testing.T) {
	r := mustMake(t, CodingAgents{Conversations: 50, Concurrency: 8, MaxTurns: 5}, 8)
	if len(r.Open) != 8 || r.Sessions != 50 {
		t.Errorf("%d of %d conversations begin by themselves, want 8 of 50", len(r.Open), r.Sessions)
	}
	n, shared := 0, 0
	heads := map[uint64]bool{}
	for j := range r.all() {
		n++
		if head := uint64(j.Blocks[agentsHeadBlocks-1]); j.session.(*agenticSession).done == 1 {
			if heads[head] {
				shared++
			}
			heads[head] = true
		}
	}
	if n != r.Total || n > 250 || shared < 25 || shared > 40 {
		t.Errorf("%d requests, announced were %d, of at most 5 turns; %d conversations share their beginning with an earlier one", n, r.Total,
			shared)
	}
}

func TestPublishedHardware(t *testing.T) {
	for _, h := range publishedHardware() {
		if err := h.times.ValidateShares(); err != nil || h.times.PrefillRate < 1000 || h.times.StepTime < time.Millisecond ||
			h.times.ContextTime == 0 {
			t.Errorf("%s: %+v; %v", h.name, h.times, err)
		}
	}
	measured := publishedHardware()[0].times
	h200 := model{parameters: 8.03e9, layers: 32, hidden: 4096, kvHeads: 8}
	derived := h200.stepTimes(0.7*989e12, 4.8e12)
	for name, ratio := range map[string]float64{
		"base": float64(derived.StepTime) / float64(measured.StepTime), "rate": derived.PrefillRate / measured.PrefillRate,
		"attention": derived.QuadraticDepth / measured.QuadraticDepth, "context": float64(derived.ContextTime) / float64(measured.ContextTime),
	} {
		if math.Abs(ratio-1) > 0.25 {
			t.Errorf("%s: derived over measured is %.2f", name, ratio)
		}
	}
}
