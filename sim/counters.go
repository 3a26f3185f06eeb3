package sim

import (
	"time"

	"warmroute/sim/engine"
)

// histogram counts values in buckets, as Prometheus does.
type histogram struct {
	bounds []float64 // upper, ascending
	counts []int64   // one more than bounds, for what is above all of them
	sum    float64
}

func newHistogram(bounds ...float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]int64, len(bounds)+1)}
}

// observe counts n values v.
func (h *histogram) observe(v float64, n int) {
	i := 0
	for i < len(h.bounds) && v > h.bounds[i] {
		i++
	}
	h.counts[i] += int64(n)
	h.sum += v * float64(n)
}

// counters are what /metrics shows beside the engine's own. Guarded by Server.engineMu.
type counters struct {
	success [killed]int64 // ends, by reason

	promptTokens, generationTokens, uncachedTokens *histogram
	ttft, itl, tpot, e2e                           *histogram // seconds, as all below
	queue, prefill, decode, inference              *histogram

	lastStep time.Duration // end of the step before
}

func newCounters() *counters {
	tokens := func() *histogram {
		return newHistogram(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
	}
	perToken := func() *histogram {
		return newHistogram(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
	}
	phase := func() *histogram {
		return newHistogram(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
	}
	return &counters{
		promptTokens: tokens(), generationTokens: tokens(), uncachedTokens: tokens(),
		ttft: newHistogram(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
		itl:  perToken(), tpot: perToken(),
		e2e: phase(), queue: phase(), prefill: phase(), decode: phase(), inference: phase(),
	}
}

// step counts the outputs of a step. Requests decode in every step, so the gap
// before each of its tokens but the first ones is the time since the last step.
func (c *counters) step(s engine.StepResult) {
	if s.Decoded > 0 {
		c.itl.observe((s.End - c.lastStep).Seconds(), s.Decoded)
	}
	c.lastStep = s.End
	for _, r := range s.First {
		c.ttft.observe(elapsed(r.Arrived, r.FirstToken), 1)
	}
	for _, r := range s.Finished {
		c.promptTokens.observe(float64(r.Prompt), 1)
		c.generationTokens.observe(float64(r.Answer), 1)
		c.uncachedTokens.observe(float64(r.Prompt-r.Cached), 1)
		c.e2e.observe(elapsed(r.Arrived, r.Finished), 1)
		c.queue.observe(elapsed(r.Arrived, r.Started), 1)
		c.prefill.observe(elapsed(r.Started, r.FirstToken), 1)
		c.decode.observe(elapsed(r.FirstToken, r.Finished), 1)
		c.inference.observe(elapsed(r.Started, r.Finished), 1)
		if r.Answer > 1 {
			c.tpot.observe(elapsed(r.FirstToken, r.Finished)/float64(r.Answer-1), 1)
		}
	}
}

// elapsed is in seconds. A request that arrives while the engine catches up
// with the wall clock can seem to start a little before it came.
func elapsed(from, to time.Duration) float64 { return max(0, to-from).Seconds() }
