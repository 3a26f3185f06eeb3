package replay

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/router"
)

// revisits are prompts of 4,096 tokens, each sent eight times with pauses that
// differ widely: what a cache that is a little larger or smaller holds differs.
func revisits(prompts int, span time.Duration) jobs {
	draw := rand.New(rand.NewPCG(5, 5))
	var w jobs
	for id := range uint64(prompts) {
		at := time.Duration(draw.Float64() * float64(span))
		for range 8 {
			w = append(w, asks(at, 4096+20, 20, id+1))
			at += time.Duration(25 * lognormal(draw, 0, 0.8) * float64(time.Second))
		}
	}
	slices.SortStableFunc(w, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	return w
}

// An index that was told a wrong size finds out the right one, by what answers
// say of cached tokens, and by the replicas' counters where they say nothing.
func TestLearningWinsBackWhatAWrongSizeCosts(t *testing.T) {
	workload := revisits(500, 10*time.Minute)
	play := func(learning, usage bool, change func(*Scenario)) float64 {
		s := &Scenario{
			Backends: 4, KVTokens: 200_000, Policy: "prefix", Workload: workload, Seed: 1,
			Hold:       router.QueueSettings{Requests: 1000, Timeout: time.Minute},
			NoLearning: !learning, NoUsage: !usage,
		}
		change(s)
		_, sum := mustPlay(t, s)
		return sum.TTFTMean
	}
	right := play(false, true, func(*Scenario) {})
	for _, c := range []struct {
		name  string
		wrong func(*Scenario)
		best  func(*Scenario) // what could be had
	}{
		{"half the true size", func(s *Scenario) { s.IndexFactor = 0.5 }, func(*Scenario) {}},
		{"double the true size", func(s *Scenario) { s.IndexFactor = 2 }, func(*Scenario) {}},
		{"evictions twice as fast", func(s *Scenario) { s.Evictions = 1 }, func(s *Scenario) { s.Evictions, s.IndexFactor = 1, 0.5 }},
	} {
		best, cost := play(false, true, c.best), play(false, true, c.wrong)
		if cost < 1.1*best {
			t.Errorf("%s: mean TTFT %.3f s, with the right size %.3f: too little to win back", c.name, cost, best)
		}
		for _, usage := range []bool{true, false} {
			if got := play(true, usage, c.wrong); got > (best+cost)/2 {
				t.Errorf("%s, usage %v: learning brings the mean TTFT from %.3f s to %.3f, the right size to %.3f", c.name, usage, cost, got, best)
			}
		}
	}
	for _, usage := range []bool{true, false} {
		if got := play(true, usage, func(*Scenario) {}); got > 1.01*right {
			t.Errorf("the right size, usage %v: mean TTFT %.3f s with learning, %.3f without", usage, got, right)
		}
	}
}
