package router

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// guest is a backend with a slot that nobody in the fleet of newFleet has, or
// that one there has left.
func guest(name string, slot int) *backends.Backend {
	b := &backends.Backend{Name: name, URL: &url.URL{}, Slot: slot}
	b.SetState(backends.Ready)
	return b
}

// only makes a request that b alone may take.
func only(b *backends.Backend, key, n int) *Request { return ask([]*backends.Backend{b}, key, n) }

func TestABackendIsSentNothingBeforeItJoinsAndAfterItLeft(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	b := guest("guest", 1)
	refuses := func(when string) {
		t.Helper()
		if _, err := r.Pick(t.Context(), ask([]*backends.Backend{b}, 1, 4)); err != ErrNoneReady {
			t.Errorf("%s: %v", when, err)
		}
	}
	refuses("before")
	r.AddBackend(b)
	mustPick(t, r, only(b, 1, 4)).Release(Outcome{End: Completed})
	r.RemoveBackend(b)
	refuses("after")
	r.RemoveBackend(b) // once more changes nothing
	mustPick(t, r, ask(fleet, 1, 4)).Release(Outcome{End: Completed})
}

func TestASlotsNextOwnerBeginsWithNothing(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	first := fleet[1]
	r.ObserveLoad(first, &backends.Load{CacheTokens: 4000, ScrapedAt: c.now, TokensKnown: true, QueuesKnown: true})
	for key := range 30 {
		d := mustPick(t, r, only(first, key, 40))
		c.advance(500 * time.Millisecond)
		d.RecordFirstEvent()
		d.Release(Outcome{End: Completed, AnswerTokens: 900, PromptTokens: 1280, CachedTokens: 0, CachedKnown: true})
	}
	open := mustPick(t, r, only(first, 99, 400))
	fresh := r.Estimates()[0]
	if taught := r.Estimates()[1]; taught.AnswerTokens == fresh.AnswerTokens || taught.BytesPerToken == fresh.BytesPerToken {
		t.Fatalf("nothing was learned: %+v", taught)
	}
	r.RemoveBackend(first)
	next := guest("next", 1)
	r.AddBackend(next)
	got, want := r.Estimates()[1], fresh
	want.Backend = next
	want.PrefillRate = got.PrefillRate // the fleet's
	if got != want {
		t.Errorf("what is known of the next owner: %+v, want %+v", got, want)
	}
	parts, _ := r.IndexStats()
	if p := parts[1]; p.Backend != next || p.Blocks != 0 || p.Evictions != 0 || p.Capacity != parts[0].Capacity {
		t.Errorf("its part of the index: %+v", p)
	}
	d := mustPick(t, r, only(next, 5, 40))
	if d.MatchedBlocks != 0 {
		t.Errorf("%d blocks matched that its predecessor held", d.MatchedBlocks)
	}
	// What the first owner had in flight ends, and is none of the next one's.
	before, blocks := r.states[1].load, r.index.Pinned(1)
	open.RecordOutput()
	open.RecordFirstEvent()
	open.Commit()
	open.Release(Outcome{End: Completed, AnswerTokens: 1})
	if after := r.states[1].load; after.requests != before.requests || after.tokens != before.tokens || r.index.Pinned(1) != blocks {
		t.Errorf("the account was %+v, and is %+v", before, after)
	}
	if first.InFlight.Load() != 0 || next.InFlight.Load() != 1 {
		t.Errorf("in flight: %d and %d", first.InFlight.Load(), next.InFlight.Load())
	}
	if r.states[1].health.output.Load() != 0 {
		t.Error("output of the first owner counts for the next one")
	}
	d.Release(Outcome{End: Completed, AnswerTokens: 1})
}

// A Release that comes after the same backend left and joined again is not for
// the account that was begun since.
func TestABackendThatLeftAndJoinedAgainIsANewOne(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	open := mustPick(t, r, ask(fleet, 1, 40))
	r.RemoveBackend(fleet[0])
	r.AddBackend(fleet[0])
	open.Release(Outcome{End: Completed})
	if a := r.states[0].load; a.requests != 0 || a.tokens != 0 || fleet[0].InFlight.Load() != 0 {
		t.Errorf("%+v, %d in flight", a, fleet[0].InFlight.Load())
	}
}

func TestAFleetGrowsBeyond64(t *testing.T) {
	r, _, _ := newFleet(t, 1, "prefix")
	for slot := 1; slot < 200; slot++ {
		b := guest(fmt.Sprint("g", slot), slot)
		r.AddBackend(b)
		mustPick(t, r, only(b, slot, 4)).Release(Outcome{End: Completed})
		if d := mustPick(t, r, only(b, slot, 4)); d.MatchedBlocks != 4 {
			t.Fatalf("slot %d: %d blocks matched, want 4", slot, d.MatchedBlocks)
		}
	}
}

func TestPoliciesForgetABackendThatLeft(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "hashtrie")
	first := mustPick(t, r, ask(fleet, 1, 8)).Backend
	r.RemoveBackend(first)
	next := guest("next", first.Slot)
	r.AddBackend(next)
	now := slices.Clone(fleet)
	now[first.Slot] = next
	elsewhere := false
	for range 50 { // it would go back to the slot that has it, each time
		if mustPick(t, r, ask(now, 1, 8)).Backend != next {
			elsewhere = true
			break
		}
		r.RemoveBackend(next)
		r.AddBackend(next)
	}
	if !elsewhere {
		t.Error("a prompt goes to the next owner of the slot that it was sent to before")
	}
}

// Backends come and go at random between the events of random requests. At the
// end all accounts are empty and nothing is in flight anywhere.
func TestAccountsSurviveAFleetInFlux(t *testing.T) {
	for seed := range uint64(60) {
		fluxOnce(t, seed)
	}
}

func fluxOnce(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	first := named("first", backends.Ready)
	r, registry, c := following(t, first)
	all := []*backends.Backend{first}
	var open []*Decision
	var held []*waiter
	for step := range 400 {
		c.advance(time.Duration(rng.IntN(300)) * time.Millisecond)
		switch rng.IntN(8) {
		case 0:
			b := named(fmt.Sprint("b", step), backends.Ready)
			joins(t, r, registry, b)
			all = append(all, b)
		case 1:
			there := registry.All()
			if b := there[rng.IntN(len(there))]; len(there) > 1 {
				r.RemoveBackend(b)
				registry.Remove(b)
			}
		case 2:
			reconfigured(t, r, func(o *Options) { o.Policy = policy.Names()[rng.IntN(len(policy.Names()))] })
		case 3:
			there := registry.All()
			r.ObserveLoad(there[rng.IntN(len(there))], &backends.Load{CacheTokens: 50_000, QueuesKnown: true, TokensKnown: true, ScrapedAt: c.now})
		case 4, 5:
			held = append(held, submit(r, request(registry, rng.IntN(20), 1+rng.IntN(200))))
		default:
			if len(open) > 0 {
				at := rng.IntN(len(open))
				if rng.IntN(2) == 0 {
					open[at].RecordFirstEvent()
				}
				open[at].Release(Outcome{End: End(rng.IntN(4)), AnswerTokens: rng.IntN(100)})
				open = slices.Delete(open, at, at+1)
			}
		}
		held = slices.DeleteFunc(held, func(w *waiter) bool {
			if w.d != nil {
				open = append(open, w.d)
			}
			return !w.waits()
		})
	}
	reconfigured(t, r, func(o *Options) { o.Policy = "random" }) // which holds nothing
	for _, w := range held {
		open = append(open, sent(t, fmt.Sprint("seed ", seed), w))
	}
	for _, d := range open {
		d.Release(Outcome{End: Completed})
	}
	for _, b := range all {
		if n := b.InFlight.Load(); n != 0 {
			t.Fatalf("seed %d: %s has %d in flight", seed, b.Name, n)
		}
	}
	for slot := range r.states {
		if a := &r.states[slot].load; a.requests != 0 || a.tokens != 0 || a.unseen != 0 || len(a.pending) != 0 || r.index.Pinned(slot) != 0 || r.states[slot].kv.answering != 0 || r.states[slot].kv.unindexed != 0 {
			t.Fatalf("seed %d, slot %d: account %+v, cache %+v, %d blocks in use", seed, slot, a, r.states[slot].kv, r.index.Pinned(slot))
		}
	}
}
