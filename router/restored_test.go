package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/index"
)

// newRestoredFleet returns a router whose second backend holds prompts of ten blocks with the keys from 0 to 19, restored.
func newRestoredFleet(t *testing.T, change ...func(*Options)) (*Router, []*backends.Backend, *clock) {
	t.Helper()
	r, fleet, c := newFleet(t, 2, "prefix", change...)
	for _, b := range fleet {
		observe(r, b, c.now, 0, 0, 0)
	}
	var restored []index.ImportedBlock
	for key := range 20 {
		for i, b := range ask(fleet, key, 10).Blocks {
			block := index.ImportedBlock{Block: b, First: i == 0}
			if i > 0 {
				block.Parent = restored[len(restored)-1].Block
			}
			restored = append(restored, block)
		}
	}
	if n := r.Import(fleet[1], exportEstimates(r, fleet[1]), restored); n != 200 {
		t.Fatalf("%d blocks were restored", n)
	}
	return r, fleet, c
}

// exportEstimates returns what was learned of a backend, as a snapshot has it.
func exportEstimates(r *Router, b *backends.Backend) []byte {
	estimates, _ := r.Export(b, nil, nil)
	return estimates
}

// observe records a poll that reports requests, and tokens of prompts and of their hits.
func observe(r *Router, b *backends.Backend, now time.Time, running, waiting int, hits float64) {
	l := &backends.Load{
		QueuesKnown: true, Running: running, Waiting: waiting, OwnInFlight: b.KnownInFlight(), CacheTokens: 100_000, HitAlignment: 16,
		PrefixKnown: true, PrefixQueries: 1000, PrefixHits: hits, PolledAt: now,
	}
	b.SetLoad(l)
	r.ObserveLoad(b, l)
}

// matchedTokens returns how many tokens of a prompt the second backend is thought to hold.
func matchedTokens(r *Router, fleet []*backends.Backend, key int) float64 {
	return r.Explain(*ask(fleet, key, 10)).Backends[1].MatchedTokens
}

func TestRestoredBlocksAreAGuess(t *testing.T) {
	const all = 10 * tokensPerBlock
	var resets []*backends.Backend
	r, fleet, _ := newRestoredFleet(t, func(o *Options) { o.OnCacheReset = func(b *backends.Backend) { resets = append(resets, b) } })
	check := func(what string, key int, want float64) {
		t.Helper()
		if got := matchedTokens(r, fleet, key); math.Abs(got-want) > 1 {
			t.Errorf("%s: %.0f matched tokens, want %.0f", what, got, want)
		}
	}
	respond := func(key, cached int) {
		t.Helper()
		mustPick(t, r, ask(fleet[1:], key, 10)).Release(usage(all, cached))
	}
	check("restored", 0, all)
	respond(0, 0)
	check("after a miss", 1, all/4)
	check("computed since", 0, all)
	respond(1, all-16)
	check("after a hit", 2, all)
	for key := 5; key < 8; key++ {
		respond(key, 0)
	}
	check("after three misses", 10, 0)
	check("computed since", 7, all)
	if len(resets) != 1 || resets[0] != fleet[1] {
		t.Errorf("cache resets of %v were reported", resets)
	}
}

// A poll shows the miss of a request whose prefill is not over.
func TestRestoredBlocksMissedByCounters(t *testing.T) {
	const all = 10 * tokensPerBlock
	r, fleet, c := newRestoredFleet(t)
	first, second := mustPick(t, r, ask(fleet[1:], 0, 10)), mustPick(t, r, ask(fleet[1:], 1, 10))
	c.advance(time.Second)
	observe(r, fleet[1], c.now, 1, 1, 0)
	if got := matchedTokens(r, fleet, 2); math.Abs(got-all/4) > 1 {
		t.Errorf("%.0f matched tokens after a poll at which one of two requests has started and nothing was hit, want %d", got, all/4)
	}
	first.RecordFirstEvent()
	c.advance(time.Second)
	observe(r, fleet[1], c.now, 2, 0, 0)
	if got := matchedTokens(r, fleet, 2); math.Abs(got-all/16) > 1 {
		t.Errorf("%.0f matched tokens after the second one has started too, want %d", got, all/16)
	}
	for _, d := range []*Reservation{first, second} {
		d.Release(Outcome{End: Completed})
	}
}

// What the index holds of requests before the start is a guess, however it was learned.
func TestSetIndexRestored(t *testing.T) {
	const all = 10 * tokensPerBlock
	r, fleet, c := newFleet(t, 2, "prefix")
	observe(r, fleet[1], c.now, 0, 0, 0)
	for key := range 3 {
		r.IndexPlacement(ask(fleet, key, 10), fleet[1])
	}
	r.SetIndexRestored()
	mustPick(t, r, ask(fleet[1:], 0, 10)).Release(usage(all, 0))
	if got := matchedTokens(r, fleet, 1); math.Abs(got-all/4) > 1 {
		t.Errorf("%.0f matched tokens after a miss, want %d", got, all/4)
	}
}
