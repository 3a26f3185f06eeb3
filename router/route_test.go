package router

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

func TestColdBurstSpreads(t *testing.T) {
	r, fleet, _ := newFleet(t, 4, "prefix")
	for i := range 40 {
		mustPick(t, r, ask(fleet, i, 30))
	}
	for _, b := range fleet {
		if n := b.InFlight.Load(); n != 10 {
			t.Errorf("%s has %d in flight of 40 on 4 backends", b.Name, n)
		}
	}
}

func TestPrefixAffinity(t *testing.T) {
	r, fleet, c := newFleet(t, 8, "prefix")
	for key := range 20 {
		first := mustPick(t, r, ask(fleet, key, 20))
		if first.Reason != ReasonNoMatch {
			t.Errorf("prompt %d: reason %q, want %q", key, first.Reason, ReasonNoMatch)
		}
		first.RecordFirstEvent()
		first.Release(Outcome{End: Completed, OutputTokens: 100})
		c.advance(time.Second)
		again := mustPick(t, r, ask(fleet, key, 25))
		if again.Backend != first.Backend || again.MatchedBlocks != 20 || again.TotalBlocks != 25 || again.Reason != ReasonPrefix {
			t.Errorf("prompt %d went to %s first, then to %s with %d of %d blocks matched (%s)",
				key, first.Backend.Name, again.Backend.Name, again.MatchedBlocks, again.TotalBlocks, again.Reason)
		}
		again.Release(Outcome{End: Completed, OutputTokens: 100})
	}
}

func TestMatchedBusy(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	first := mustPick(t, r, ask(fleet, 1, 10))
	for {
		d := mustPick(t, r, ask(fleet, 1, 10))
		if d.Backend != first.Backend {
			if d.Reason != ReasonMatchedBusy {
				t.Errorf("reason %q, want %q", d.Reason, ReasonMatchedBusy)
			}
			break
		}
		if first.Backend.InFlight.Load() > 100 {
			t.Fatal("one backend got a hundred requests while the other idled")
		}
	}
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.MatchedBlocks != 10 {
		t.Errorf("after the busy match only %d of 10 blocks matched", d.MatchedBlocks)
	}
}

func TestMembershipFilters(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix")
	fleet[0].SetState(backends.Down)
	fleet[1].SetState(backends.Draining)
	fleet[2].SetLoad(&backends.Load{Asleep: true, PolledAt: c.now})
	d := mustPick(t, r, ask(fleet, 1, 10))
	if d.Backend != fleet[3] || d.Reason != ReasonOnly {
		t.Errorf("picked %s (%s), want b3 (only)", d.Backend.Name, d.Reason)
	}
	if _, err := r.Pick(context.Background(), ask(fleet, 1, 10), fleet[3]); err != ErrNoneReady {
		t.Errorf("got %v, want ErrNoneReady", err)
	}
}

func TestFailedAttemptRollsBack(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	mustPick(t, r, ask(fleet, 1, 10)).Release(Outcome{End: NotProcessed})
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.MatchedBlocks != 0 {
		t.Errorf("%d blocks matched of a prompt that no engine saw", d.MatchedBlocks)
	}
}

func TestDisconnectRollsBackUncomputed(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	learnPrefillRate(r, testPrefillRate)
	d := mustPick(t, r, ask(fleet, 1, 100)) // 6,400 tokens: 0.8 s
	c.advance(400 * time.Millisecond)
	d.Release(Outcome{End: ClientDisconnected})
	if d := mustPick(t, r, ask(fleet, 1, 100)); d.MatchedBlocks != 50 {
		t.Errorf("%d blocks matched, want the 50 that 0.4 s of prefill reach", d.MatchedBlocks)
	}
}

func TestDisconnectAfterFirstEvent(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 100))
	d.RecordFirstEvent()
	d.Release(Outcome{End: ClientDisconnected, OutputTokens: 3})
	if d := mustPick(t, r, ask(fleet, 1, 100)); d.MatchedBlocks != 100 {
		t.Errorf("%d of 100 blocks matched", d.MatchedBlocks)
	}
}

func TestIndexCapacity(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	f := func(want int) {
		t.Helper()
		parts, _ := r.IndexStats()
		if got := parts[0].Capacity; got != want {
			t.Errorf("capacity %d blocks, want %d", got, want)
		}
	}
	f(7500) // 400,000 tokens × 1.2 / 64
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 16384})
	f(307)
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 16384, PrefixCachingOff: true})
	f(0)
}

func TestForgetCache(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 10))
	r.ForgetCache(fleet[0])
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, OutputTokens: 10})
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.MatchedBlocks != 0 {
		t.Errorf("%d blocks matched after the replica lost its cache", d.MatchedBlocks)
	}
}

func TestReleaseTwicePanics(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 10))
	d.Release(Outcome{End: Completed, OutputTokens: 1})
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
		if n := fleet[0].InFlight.Load(); n != 0 {
			t.Errorf("%d in flight", n)
		}
	}()
	d.Release(Outcome{End: Completed, OutputTokens: 1})
}

// panicking is a policy with a fault.
type panicking struct{}

func (panicking) Choose(*policy.Request, []policy.Candidate) int { panic("fault in a policy") }

func TestPanicReleasesLock(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	working := r.fleet.policy.Policy
	for name, f := range map[string]func(){
		"Pick":    func() { mustPick(t, r, ask(fleet, 1, 10)) },
		"Explain": func() { r.Explain(*ask(fleet, 1, 10)) },
	} {
		r.fleet.policy.Policy = panicking{}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
		r.fleet.policy.Policy = working
		mustPick(t, r, ask(fleet, 1, 10)).Release(Outcome{End: Completed})
	}
}

func TestCallbacksRunWithoutLock(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	busy := mustPick(t, r, ask(fleet, 1, 1000))
	sent := 0
	for key := range 3 {
		r.Submit(ask(fleet, 2+key, 10), func(d *Reservation, err error) {
			sent++
			d.Release(Outcome{End: Completed}) // it takes the lock
		})
	}
	busy.RecordFirstEvent()
	if sent != 3 {
		t.Errorf("%d of 3 queued requests were sent", sent)
	}
}

func TestMaxSequences(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	req := ask(fleet, 1, 10)
	req.Sequences = 1 << 31
	d := mustPick(t, r, req)
	if n := fleet[0].InFlight.Load(); n != maxSequences {
		t.Errorf("%d in flight", n)
	}
	d.Release(Outcome{End: NotProcessed})
	if n := fleet[0].InFlight.Load(); n != 0 {
		t.Errorf("%d in flight after the release", n)
	}
}

// Every way through a request, from many goroutines: the accounts end at zero.
func TestAccountsReturnToZero(t *testing.T) {
	r, fleet, c := newFleet(t, 5, "prefix")
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 9))
			var open []*Reservation
			for range 2000 {
				req := ask(fleet, rng.IntN(50), 1+rng.IntN(40))
				req.Streams, req.Sequences = rng.IntN(2) == 0, 1+rng.IntN(3)
				open = append(open, mustPick(t, r, req))
				if len(open) > 20 {
					i := rng.IntN(len(open))
					if rng.IntN(2) == 0 {
						open[i].RecordFirstEvent()
					}
					open[i].Release(Outcome{End: End(rng.IntN(4)), OutputTokens: rng.IntN(300)})
					open[i] = open[len(open)-1]
					open = open[:len(open)-1]
				}
			}
			for _, d := range open {
				d.Release(Outcome{End: Truncated})
			}
		})
	}
	wg.Wait()
	for i, b := range fleet {
		if n := b.InFlight.Load(); n != 0 {
			t.Errorf("%s: %d in flight", b.Name, n)
		}
		expectEmptyAccount(t, "at the end", r, i, c.now)
	}
}

// Guards are per candidate: prompts go back to those who hold them, however busy
// one other backend is, and only what that one holds is served elsewhere.
func TestHotBackendKeepsOthersAffinity(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix")
	holders := map[int]*backends.Backend{}
	for key := range 40 {
		d := mustPick(t, r, ask(fleet, key, 40))
		d.RecordFirstEvent()
		holders[key] = d.Backend
		defer d.Release(Outcome{End: Completed, OutputTokens: 100}) // all at once at the end, so that they spread
	}
	hot := fleet[0]
	hot.SetLoad(&backends.Load{QueuesKnown: true, Running: 500, Waiting: 200, PolledAt: c.now})
	seen := map[*backends.Backend]int{}
	for key, holder := range holders {
		d := mustPick(t, r, ask(fleet, key, 41))
		switch {
		case holder == hot && d.Backend == hot:
			t.Errorf("prompt %d went to the backend with 700 requests of others", key)
		case holder != hot && d.Backend != holder:
			t.Errorf("prompt %d went to %s, though %s holds it and is not busy", key, d.Backend.Name, holder.Name)
		}
		seen[holder]++
		d.Release(Outcome{End: NotProcessed})
	}
	if len(seen) != 4 {
		t.Fatalf("the prompts are on %d backends only", len(seen))
	}
}

// When everybody shares one system prompt, everybody's requests are spread over
// everybody who may come to hold it.
func TestSharedPromptSpreads(t *testing.T) {
	r, fleet, _ := newFleet(t, 8, "prefix")
	const requests = 160
	for i := range requests {
		req := ask(fleet, 1, 32) // 8 KB shared
		own := ask(fleet, 100+i, 4)
		req.Blocks, req.Bytes = append(req.Blocks, own.Blocks...), req.Bytes+own.Bytes
		mustPick(t, r, req).RecordFirstEvent()
	}
	counts := ""
	for _, b := range fleet {
		n := b.InFlight.Load()
		counts += fmt.Sprint(" ", n)
		if mean := requests / len(fleet); n < int64(mean)/2 || n > int64(mean)*3/2 {
			t.Errorf("%s has %d in flight, the mean is %d", b.Name, n, mean)
		}
	}
	t.Log("in flight:", counts)
}

func TestNoEngineRequests(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	fresh := backends.Load{CacheTokens: 10_000, KVKnown: true, PolledAt: c.now}
	r.ObserveLoad(fleet[0], &fresh)
	long := sent(t, "", submit(r, ask(fleet, 1, 100)))
	waits(t, "behind 6,400 tokens", submit(r, ask(fleet, 2, 100)))
	tokenize := &Request{Backends: fleet, Sequences: 1, NoEngine: true, Tenant: 1}
	before, mean := figuresOf(r, fleet[0], c.now), r.fleet.estimates.MeanUncachedTokensOfAll()
	d := sent(t, "nothing to wait for", submit(r, tokenize))
	if got := figuresOf(r, fleet[0], c.now); got != before || got.Requests != 1 || got.Pending != 1 ||
		r.fleet.estimates.MeanUncachedTokensOfAll() != mean || fleet[0].InFlight.Load() != 1 {
		t.Errorf("it counts in the account: %+v, and %+v before", got, before)
	}
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, OutputTokens: 1000})
	if got := figuresOf(r, fleet[0], c.now); got != before || r.Estimates()[0].OutputTokens != defaultOutputTokens ||
		fleet[0].InFlight.Load() != 1 {
		t.Errorf("its end counts in the account: %+v, and %+v before", got, before)
	}
	if n := r.CountWaiting(); n != 1 {
		t.Errorf("%d queued, want 1", n)
	}
	long.Release(Outcome{End: Completed})
	fleet[0].SetState(backends.Down)
	if w := submit(r, tokenize); w.err != ErrNoneReady {
		t.Errorf("with no backend ready: %v, want ErrNoneReady at once", w.err)
	}
}

// TestElsewhereTokens sends a prompt again while the backend that holds it is draining.
func TestElsewhereTokens(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	tokens := make([]uint16, 640)
	for i := range tokens {
		tokens[i] = uint16(i)
	}
	first := mustPick(t, r, ofTokens(fleet, tokens))
	first.Release(Outcome{End: Completed, PromptTokens: len(tokens)})
	if again := mustPick(t, r, ofTokens(fleet, tokens)); again.Backend != first.Backend || again.ElsewhereTokens != 0 {
		t.Errorf("%d tokens elsewhere on the backend that holds them", again.ElsewhereTokens)
	} else {
		again.Release(Outcome{End: Completed, PromptTokens: len(tokens)})
	}
	first.Backend.SetState(backends.Draining)
	other := mustPick(t, r, ofTokens(fleet, tokens))
	if other.Backend == first.Backend || other.MatchedTokens != 0 ||
		other.ElsewhereTokens < len(tokens)*9/10 || other.ElsewhereTokens > len(tokens) {
		t.Errorf("of %d tokens, %d on %s and %d elsewhere", len(tokens), other.MatchedTokens, other.Backend.Name, other.ElsewhereTokens)
	}
	other.Release(Outcome{End: Completed, PromptTokens: len(tokens)})
}
