package router

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/prompt"
)

const defaultAnswerTokens = 250 // of estimate

// clock is a wall clock that stands still until a test moves it.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

func (c *clock) advance(d time.Duration) { c.now = c.now.Add(d) }

func newFleet(t testing.TB, n int, name string, change ...func(*Options)) (*Router, []*backends.Backend, *clock) {
	t.Helper()
	var fleet []*backends.Backend
	for i := range n {
		b := &backends.Backend{Name: fmt.Sprintf("b%d", i), URL: &url.URL{}, Slot: i}
		b.SetState(backends.Ready)
		fleet = append(fleet, b)
	}
	c := &clock{time.Unix(1000, 0)}
	o := Options{
		Settings: Settings{Policy: name, PollInterval: time.Second}, Backends: fleet, BlockBytes: 256, IndexMaxBytes: 1 << 26,
		Now: c.read, Rand: rand.New(rand.NewPCG(1, 1)),
	}
	for _, f := range change {
		f(&o)
	}
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return r, fleet, c
}

// ask makes a streamed request of n blocks, all of them different for each key.
func ask(fleet []*backends.Backend, key, n int) *Request {
	blocks := make([]prompt.Block, n)
	for i := range blocks {
		blocks[i] = prompt.Block(uint64(key)<<32 | uint64(i) + 1)
	}
	return &Request{Backends: fleet, Blocks: blocks, Bytes: n * 256, Sequences: 1, Streams: true}
}

func mustPick(t testing.TB, r *Router, req *Request, tried ...*backends.Backend) *Decision {
	t.Helper()
	d, err := r.Pick(context.Background(), req, tried...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestABurstOfColdPromptsSpreads(t *testing.T) {
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

func TestAPromptGoesBackToWhoHoldsIt(t *testing.T) {
	r, fleet, c := newFleet(t, 8, "prefix")
	for key := range 20 {
		first := mustPick(t, r, ask(fleet, key, 20))
		if first.Reason != ReasonCold {
			t.Errorf("prompt %d: reason %q, want %q", key, first.Reason, ReasonCold)
		}
		first.RecordFirstEvent()
		first.Release(Outcome{End: Completed, AnswerTokens: 100})
		c.advance(time.Second)
		again := mustPick(t, r, ask(fleet, key, 25))
		if again.Backend != first.Backend || again.MatchedBlocks != 20 || again.TotalBlocks != 25 || again.Reason != ReasonPrefix {
			t.Errorf("prompt %d went to %s first, then to %s with %d of %d blocks matched (%s)",
				key, first.Backend.Name, again.Backend.Name, again.MatchedBlocks, again.TotalBlocks, again.Reason)
		}
		again.Release(Outcome{End: Completed, AnswerTokens: 100})
	}
}

func TestASpillIsNamedAndLearned(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	held := mustPick(t, r, ask(fleet, 1, 10))
	for {
		d := mustPick(t, r, ask(fleet, 1, 10))
		if d.Backend != held.Backend {
			if d.Reason != ReasonSpill {
				t.Errorf("reason %q, want %q", d.Reason, ReasonSpill)
			}
			break
		}
		if held.Backend.InFlight.Load() > 100 {
			t.Fatal("one backend got a hundred requests while the other idled")
		}
	}
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.MatchedBlocks != 10 {
		t.Errorf("after the spill only %d of 10 blocks matched", d.MatchedBlocks)
	}
}

func TestOnlyReadyAwakeUntriedBackends(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix")
	fleet[0].SetState(backends.Down)
	fleet[1].SetState(backends.Draining)
	fleet[2].SetLoad(&backends.Load{Asleep: true, ScrapedAt: c.now})
	d := mustPick(t, r, ask(fleet, 1, 10))
	if d.Backend != fleet[3] || d.Reason != ReasonOnly {
		t.Errorf("picked %s (%s), want b3 (only)", d.Backend.Name, d.Reason)
	}
	if _, err := r.Pick(context.Background(), ask(fleet, 1, 10), fleet[3]); err != ErrNoneReady {
		t.Errorf("got %v, want ErrNoneReady", err)
	}
}

func TestAFailedAttemptTakesBackItsBlocks(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	mustPick(t, r, ask(fleet, 1, 10)).Release(Outcome{End: NotProcessed})
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.MatchedBlocks != 0 {
		t.Errorf("%d blocks matched of a prompt that no engine saw", d.MatchedBlocks)
	}
}

func TestAClientThatLeftTakesBackWhatTimeDidNotAllow(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 100)) // 6,400 tokens: 0.8 s
	c.advance(400 * time.Millisecond)
	d.Release(Outcome{End: ClientDisconnected})
	if d := mustPick(t, r, ask(fleet, 1, 100)); d.MatchedBlocks != 50 {
		t.Errorf("%d blocks matched, want the 50 that 0.4 s of prefill reach", d.MatchedBlocks)
	}
}

func TestAClientThatLeftAfterTheFirstEventTakesNothingBack(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 100))
	d.RecordFirstEvent()
	d.Release(Outcome{End: ClientDisconnected, AnswerTokens: 3})
	if d := mustPick(t, r, ask(fleet, 1, 100)); d.MatchedBlocks != 100 {
		t.Errorf("%d of 100 blocks matched", d.MatchedBlocks)
	}
}

func TestCapacityFollowsTheReplica(t *testing.T) {
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

func TestALostCacheIsForgotten(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 10))
	r.ForgetCache(fleet[0])
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, AnswerTokens: 10})
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.MatchedBlocks != 0 {
		t.Errorf("%d blocks matched after the replica lost its cache", d.MatchedBlocks)
	}
}

func TestReleasedTwicePanics(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 10))
	d.Release(Outcome{End: Completed, AnswerTokens: 1})
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
		if n := fleet[0].InFlight.Load(); n != 0 {
			t.Errorf("%d in flight", n)
		}
	}()
	d.Release(Outcome{End: Completed, AnswerTokens: 1})
}

func TestOneRequestCannotFillAnAccount(t *testing.T) {
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
	r, fleet, _ := newFleet(t, 5, "prefix")
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 9))
			var open []*Decision
			for range 2000 {
				req := ask(fleet, rng.IntN(50), 1+rng.IntN(40))
				req.Streams, req.Sequences = rng.IntN(2) == 0, 1+rng.IntN(3)
				open = append(open, mustPick(t, r, req))
				if len(open) > 20 {
					i := rng.IntN(len(open))
					if rng.IntN(2) == 0 {
						open[i].RecordFirstEvent()
					}
					open[i].Release(Outcome{End: End(rng.IntN(4)), AnswerTokens: rng.IntN(300)})
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
		if a := &r.states[i].load; len(a.pending) != 0 || a.tokens != 0 || a.streams != 0 {
			t.Errorf("%s: %d pending, %.1f tokens", b.Name, len(a.pending), a.tokens)
		}
	}
}
