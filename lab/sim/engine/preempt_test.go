package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// stepUntilPreemption steps e until it has preempted a request and returns the time.
func stepUntilPreemption(t *testing.T, e *Engine, now time.Duration) time.Duration {
	t.Helper()
	for range 1000 {
		now = e.Step(now).End
		if e.Stats().Preemptions > 0 {
			return now
		}
	}
	t.Fatal("no request was preempted")
	return 0
}

func TestPreemption(t *testing.T) {
	e := newEngine(Config{KVTokens: 160}) // 10 blocks
	first := add(t, e, 60, 60, blocks(1, 7), 0)
	second := add(t, e, 60, 40, blocks(2, 6), 0)
	third := add(t, e, 40, 1, nil, 0) // needs 3 blocks, where 2 are free
	now := stepUntilPreemption(t, e, 0)
	// Each has computed 80 tokens, five blocks, and the first needs a sixth one.
	if a, b := first.Generated(e), second.Generated(e); a != 22 || b != 21 {
		t.Errorf("%d and %d tokens generated, want 22 and 21", a, b)
	}
	if st := e.Stats(); st.Running != 1 || st.Waiting != 2 || st.KVUsage != 0.6 {
		t.Errorf("%+v: want one running, two waiting and 6 of 10 blocks in use", st)
	}
	if got := e.CachedTokens(100, blocks(2, 6)); got != 64 {
		t.Errorf("%d tokens of the preempted request are cached, want 64: the first took its last block", got)
	}
	now = finish(t, e, first, now)
	if third.Started != 0 {
		t.Error("a waiting request overtook one that was preempted")
	}
	// The first took two blocks more, so 32 of the second's 81 tokens are left.
	step := e.Step(now)
	if !slices.Equal(step.Resumed, []*Request{second}) || !slices.Equal(step.First, []*Request{third}) || step.Decoded != 1 ||
		step.Prefilled != 81-32+40 {
		t.Errorf("%+v: want the second resumed, the first token of the third, and 89 tokens computed", step)
	}
	finish(t, e, second, step.End)
	if st := e.Stats(); st.PrefixQueries != 160 || st.PrefixHits != 0 || st.PromptTokens != 160 || st.GenerationTokens != 101 ||
		st.Preemptions != 1 {
		t.Errorf("%+v: want each prompt and each generated token counted once", st)
	}
	if second.Cached != 0 || second.FirstToken != first.FirstToken {
		t.Errorf("resuming changed the hits to %d or the time of the first token to %v", second.Cached, second.FirstToken)
	}
}

func TestPreemptingStepAdmitsNobody(t *testing.T) {
	e := newEngine(Config{KVTokens: 160, PriorityScheduling: true})
	add(t, e, 79, 30, nil, 0)
	add(t, e, 79, 30, nil, 0)
	now := e.Step(0).End
	now = e.Step(now).End // both have filled five blocks
	urgent := &Request{Prompt: 5, Output: 1, Priority: -1}
	if err := e.Add(urgent, now); err != nil {
		t.Fatal(err)
	}
	for preemptions := range 2 {
		step := e.Step(now)
		now = step.End
		if started := slices.Contains(step.First, urgent); started != (preemptions == 1) || e.Stats().Preemptions != 1 {
			t.Errorf("step %d after the cache was full: the urgent request started: %v; %d preemptions", preemptions, started, e.Stats().Preemptions)
		}
	}
}

func TestPreemptPartialPrompt(t *testing.T) {
	e := newEngine(Config{KVTokens: 160, StepTokens: 32})
	first := add(t, e, 30, 100, nil, 0) // two blocks, of 10
	now := e.Step(0).End
	// It fits into the 8 others. When it needs the last of them, the first has taken a third.
	long := add(t, e, 128, 2, blocks(1, 8), now)
	now = stepUntilPreemption(t, e, now)
	if st := e.Stats(); st.Running != 1 || st.Waiting != 1 || long.Computed() != 0 {
		t.Fatalf("%+v, %d tokens computed: want the partial prompt preempted", st, long.Computed())
	}
	if got := e.CachedTokens(128, blocks(1, 8)); got != 80 {
		t.Errorf("%d of 93 computed tokens are cached, want 80", got)
	}
	finish(t, e, first, now)
	finish(t, e, long, now)
	if long.Cached != 0 {
		t.Errorf("%d tokens that it computed itself count as hits", long.Cached)
	}
}

func TestPreemptionOrder(t *testing.T) {
	for _, c := range []struct {
		name       string
		cfg        Config
		priorities []int
		want       int // index of the request that is preempted
	}{
		{"last admitted", Config{}, []int{0, 5, 5, 1}, 3},
		{"worst priority, latest arrival", Config{PriorityScheduling: true}, []int{0, 5, 5, 1}, 2},
		{"worst priority, first arrival", Config{PriorityScheduling: true}, []int{3, 0, 0, 1}, 0},
	} {
		c.cfg.KVTokens = 192 // 12 blocks
		e := newEngine(c.cfg)
		var requests []*Request
		for _, priority := range c.priorities {
			r := &Request{Prompt: 47, Output: 40, Priority: priority} // three blocks, until token 48
			if err := e.Add(r, 0); err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		stepUntilPreemption(t, e, 0)
		for i, r := range requests {
			if preempted := r.state == waiting; preempted != (i == c.want) {
				t.Errorf("%s: request %d preempted: %v", c.name, i, preempted)
			}
		}
	}
}

// TestSharedCachePreemption fills a cache that two engines share. The request that was admitted
// first of all proceeds, though its own engine has no other to preempt.
func TestSharedCachePreemption(t *testing.T) {
	both := NewWithSharedCache(withRoundTimes(Config{KVTokens: 80}), withRoundTimes(Config{KVTokens: 80}))
	first := add(t, both[0], 79, 30, nil, 0)
	now := both[0].Step(0).End
	second := add(t, both[1], 79, 30, nil, now)
	both[1].Step(now)
	both[1].Step(now)
	for range 2 { // the second one needs a sixth block
		now = both[0].Step(now).End
	}
	if a, b := both[0].Stats(), both[1].Stats(); a.Preemptions != 0 || b.Preemptions != 1 || b.Waiting != 1 || first.state != decoding {
		t.Errorf("%+v and %+v, want the second engine's request preempted", a, b)
	}
	finish(t, both[0], first, now)
	finish(t, both[1], second, now)
}

// TestEveryRequestEnds runs random requests on caches that are too small for them, also on
// engines that share one, with and without a host tier: each request must end, with each of its tokens generated once.
func TestEveryRequestEnds(t *testing.T) {
	for seed := range uint64(60) {
		engines, priorities := int(1+seed%3), seed%2 == 0
		t.Run(fmt.Sprintf("seed %d, %d engines, priorities %v", seed, engines, priorities), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			var cfgs []Config
			for range engines {
				cfgs = append(cfgs, Config{KVTokens: 336 / engines, HostKVTokens: 800 * int(seed%4/3), StepTokens: 40, MaxSeqs: 8,
					PriorityScheduling: priorities})
			}
			all := NewWithSharedCache(cfgs...)
			want, open := int64(0), 0
			for range 60 {
				prompt := 1 + random.IntN(150)
				r := &Request{Prompt: prompt, Output: 1 + random.IntN(300-prompt), Blocks: blocks(random.IntN(5), 18), Priority: random.IntN(3)}
				if err := all[random.IntN(engines)].Add(r, 0); err != nil {
					t.Fatal(err)
				}
				want += int64(r.Output)
				open++
			}
			firsts, generated, preemptions := 0, int64(0), int64(0)
			ends := make([]time.Duration, engines)
			for range 100_000 {
				next := -1 // the engine whose step ends first
				for i, e := range all {
					if !e.Idle() && (next < 0 || ends[i] < ends[next]) {
						next = i
					}
				}
				step := all[next].Step(ends[next])
				ends[next] = step.End
				firsts += len(step.First)
				generated += int64(step.Decoded + len(step.First))
				for _, r := range step.Finished {
					open--
					if n := r.Generated(all[next]); n != r.Output {
						t.Fatalf("a request ended with %d of %d tokens", n, r.Output)
					}
				}
				if open == 0 {
					break
				}
			}
			for _, e := range all {
				preemptions += e.Stats().Preemptions
			}
			if open != 0 || firsts != 60 || generated != want || all[0].Stats().KVUsage != 0 {
				t.Errorf("%d requests open, %d first tokens, %d of %d tokens generated, usage %v", open, firsts, generated, want,
					all[0].Stats().KVUsage)
			}
			if preemptions < 10 {
				t.Errorf("only %d preemptions", preemptions)
			}
		})
	}
}
