// Each simulation is one goroutine, in which the race detector would find nothing, in ten
// times the time.

package replay

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/lab/sim/engine"
	"warmroute/router"
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
func TestBusyReplicaIsNotStalled(t *testing.T) {
	deep := engine.Config{QuadraticDepth: 1.9e-5, StepTokens: 2048}
	for name, s := range map[string]*Scenario{
		"100k-token prompts, whole responses": {Backends: 2, Engine: deep, NonStreaming: 1, Workload: coldPrompts(12, 100_000, 20*time.Second)},
		"100k-token prompts, streamed":        {Backends: 2, Engine: deep, Workload: coldPrompts(12, 100_000, 20*time.Second)},
		"… on half-speed replicas": {Backends: 2, Engine: deep, Speeds: []float64{0.5, 0.5},
			Workload: coldPrompts(12, 100_000, 40*time.Second)},
		"documents, whole responses":  {Backends: 4, NonStreaming: 1, NoUsage: true, Workload: Documents{Load: 1.5, For: 3 * time.Minute}},
		"one a time, whole responses": {Backends: 2, NonStreaming: 1, Workload: coldPrompts(20, 600, 9*time.Second)},
		"small caches, polled every 5 s": {Backends: 4, PollInterval: 5 * time.Second, PollLag: time.Second, NonStreaming: 0.5,
			Workload: ChatsOnSmallCaches()},
		"beside a client with long prompts": {Backends: 2, Workload: coldPrompts(100, 600, time.Second),
			External: []ExternalLoad{{Backends: []int{0, 1}, Rate: 0.1, Prompt: 20_000, Output: 400}}},
	} {
		t.Run(name, func(t *testing.T) {
			s.Policy = "prefix"
			r, sum := mustPlay(t, s)
			for _, b := range r.all {
				if times := r.router.Status(b).Stalls; times > 0 {
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
func TestExternalLoadIsAvoided(t *testing.T) {
	_, sum := mustPlay(t, &Scenario{
		Backends: 4, Engine: linear, Policy: "prefix",
		Workload: SharedPrompts{Prompts: 40, PromptTokens: 1536, Zipf: 0.8, OwnTokens: 200, Output: 100, Rate: 6, For: 2 * time.Minute},
		External: []ExternalLoad{{Backends: []int{0, 1}, Rate: 2, Prompt: 6000, Output: 300}},
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

// Documents of 20,000 tokens on caches of 60,000: which requests fit beside each
// other is all that matters. Sent at once, they wait in engines' queues for
// room, behind whoever came first, and push out the documents that others are
// to be routed about.
func TestQueueKeepsLongPromptsFromBlockingCaches(t *testing.T) {
	mean := func(queue router.QueueSettings) float64 {
		s := Scenario{
			Backends: 4, Engine: linear, KVTokens: 60_000, Policy: "prefix", Queue: queue, Seed: 1,
			Workload: Documents{Load: 0.9 * linear.PrefillRate / nominalRate},
		}
		got, err := s.Run(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if got.Lost > 0 {
			t.Errorf("%d requests lost", got.Lost)
		}
		return got.TTFTMean
	}
	queued, sent := mean(router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Hour, BusyTimeout: time.Hour}),
		mean(router.QueueSettings{})
	t.Logf("mean TTFT %.1f s, without an admission queue %.1f s", queued, sent)
	if queued > 0.8*sent {
		t.Errorf("mean TTFT %.1f s with an admission queue and %.1f s without", queued, sent)
	}
}

// revisits are prompts of 4,096 tokens, each sent eight times with pauses that
// differ widely: what a cache that is a little larger or smaller holds differs.
func revisits(prompts int, span time.Duration) jobs {
	draw := rand.New(rand.NewPCG(5, 5))
	var w jobs
	for id := range uint64(prompts) {
		at := time.Duration(draw.Float64() * float64(span))
		for range 8 {
			w = append(w, asks(at, 4096+20, 20, id+1))
			at += time.Duration(25 * drawLognormal(draw, 0, 0.8) * float64(time.Second))
		}
	}
	slices.SortStableFunc(w, func(a, b *Job) int { return cmp.Compare(a.At, b.At) })
	return w
}

// An index with a wrong reported size learns the right one, from what responses
// say of cached tokens, and by the replicas' counters where they say nothing.
func TestLearningOfWrongCacheSize(t *testing.T) {
	workload := revisits(500, 10*time.Minute)
	play := func(learning, usage bool, change func(*Scenario)) float64 {
		s := &Scenario{
			Backends: 4, Engine: linear, KVTokens: 200_000, Policy: "prefix", Workload: workload, Seed: 1,
			Queue:      router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute},
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

// Conversations that need six times the KV cache of their replicas find their prefixes in host
// memory, which holds eight times as much. The router learns that, from usage or from the
// replicas' counters, and sends their turns to where they are.
func TestHostTierIsLearned(t *testing.T) {
	const kvTokens, backends = 100_000, 4
	workload := Conversations{
		Sessions: 96, Groups: 96, PromptTokens: 12_000, MeanTurns: 20, Said: 400, Output: 200, OutputSigma: 0.5, Pause: 15 * time.Second,
	}
	requests, err := workload.Requests(backends, 1)
	if err != nil {
		t.Fatal(err)
	}
	var size workloadSize
	size.add(requests)
	if times := size.tokens / (backends * kvTokens); times < 5.5 || times > 6.5 {
		t.Fatalf("the conversations are %.1f times as long as the KV caches together, want about 6", times)
	}
	withHostTier := func(tokens int) engine.Config {
		c := linear
		c.HostKVTokens = tokens
		return c
	}
	for _, c := range []struct {
		name       string
		hostTimes  int
		noUsage    bool
		minHits    float64
		factor     [2]float64
		maxMissing float64 // predicted and not hit, share of all tokens
	}{
		{"usage", 8, false, 0.9, [2]float64{4, 16}, 0.02},
		{"counters", 8, true, 0.8, [2]float64{3, 16}, 0.02},
		{"no host tier", 0, false, 0, [2]float64{0.5, 1.2}, 0.02},
		{"no host tier, counters", 0, true, 0, [2]float64{0.5, 1.2}, 0.03},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, sum := mustPlay(t, &Scenario{
				Backends: backends, KVTokens: kvTokens, Policy: "prefix", Workload: workload, Seed: 1, NoUsage: c.noUsage,
				Queue:  router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Hour, BusyTimeout: time.Hour},
				Engine: withHostTier(c.hostTimes * kvTokens),
			})
			t.Logf("mean TTFT %.2f s, E2E %.2f s, %.3f hit, %.3f predicted", sum.TTFTMean, sum.E2EMean, sum.HitRatio, sum.PredictedHitRatio)
			if sum.HitRatio < c.minHits || sum.PredictedHitRatio > sum.HitRatio+c.maxMissing {
				t.Errorf("%.3f of the prompts' tokens hit, %.3f predicted, want at least %.2f hit and %.2f more predicted at most",
					sum.HitRatio, sum.PredictedHitRatio, c.minHits, c.maxMissing)
			}
			for _, e := range r.router.Estimates() {
				if e.CapacityFactor < c.factor[0] || e.CapacityFactor > c.factor[1] {
					t.Errorf("a capacity factor of %.2f, want %v", e.CapacityFactor, c.factor)
				}
			}
		})
	}
}
