package replay

import (
	"testing"
	"time"

	"warmroute/sim/engine"
)

// coldPrompts are prompts of so many tokens that have nothing in common, one
// every so often.
func coldPrompts(n, tokens int, every time.Duration) jobs {
	var all jobs
	for i := range n {
		all = append(all, asks(time.Duration(i)*every, tokens, 50, uint64(i+1)))
	}
	return all
}

// A replica that is at work must not be taken for one that has stopped, however
// little of its work can be seen.
func TestNoReplicaAtWorkIsTakenForStalled(t *testing.T) {
	deep := engine.Config{QuadraticDepth: 1.9e-5, StepTokens: 2048}
	for name, s := range map[string]*Scenario{
		"100k-token prompts, whole answers": {Backends: 2, Engine: deep, NonStreaming: 1, Workload: coldPrompts(12, 100_000, 20*time.Second)},
		"100k-token prompts, streamed":      {Backends: 2, Engine: deep, Workload: coldPrompts(12, 100_000, 20*time.Second)},
		"… on half-speed replicas":          {Backends: 2, Engine: deep, Speeds: []float64{0.5, 0.5}, Workload: coldPrompts(12, 100_000, 40*time.Second)},
		"documents, whole answers":          {Backends: 4, NonStreaming: 1, NoUsage: true, Workload: Documents{Load: 1.5, For: 3 * time.Minute}},
		"one a time, whole answers":         {Backends: 2, NonStreaming: 1, Workload: coldPrompts(20, 600, 9*time.Second)},
		"small caches, polled every 5 s": {Backends: 4, PollInterval: 5 * time.Second, PollLag: time.Second, NonStreaming: 0.5,
			Workload: OpenChats()},
		"beside a client with long prompts": {Backends: 2, Workload: coldPrompts(100, 600, time.Second),
			Foreign: []Foreign{{Backends: []int{0, 1}, Rate: 0.1, Prompt: 20_000, Answer: 400}}},
	} {
		t.Run(name, func(t *testing.T) {
			s.Policy = "prefix"
			r, sum := mustPlay(t, s)
			for _, b := range r.all {
				if times, _ := r.router.Stalls(b); times > 0 {
					t.Errorf("%s was taken for stalled %d times", b.Name, times)
				}
			}
			if sum.Lost > 0 {
				t.Errorf("%d requests were lost: %v", sum.Lost, sum.Errors)
			}
		})
	}
}

// Another client keeps half of the fleet busy. Counted in, it gets little of
// what the router sends; without it, those replicas would have two thirds of it,
// since what they have takes longer.
func TestForeignLoadIsAvoided(t *testing.T) {
	_, sum := mustPlay(t, &Scenario{
		Backends: 4, Policy: "prefix",
		Workload: SharedPrompts{Prompts: 40, PromptTokens: 1536, Zipf: 0.8, OwnTokens: 200, Answer: 100, Rate: 6, For: 2 * time.Minute},
		Foreign:  []Foreign{{Backends: []int{0, 1}, Rate: 2, Prompt: 6000, Answer: 300}},
	})
	busy, all := 0.0, 0.0
	for b, inFlight := range sum.Timeline.InFlight {
		for _, n := range inFlight {
			if all += n; b < 2 {
				busy += n
			}
		}
	}
	if busy > 0.4*all {
		t.Errorf("the replicas that others use have %.2f of what is in flight", busy/all)
	}
}
