package router

import (
	"testing"

	"warmroute/backends"
)

// sized polls a fleet whose caches hold so many tokens each.
func sized(r *Router, fleet []*backends.Backend, c *clock, tokens int) {
	for _, b := range fleet {
		l := &backends.Load{CacheTokens: tokens, KVKnown: true, QueuesKnown: true, ScrapedAt: c.now}
		b.SetLoad(l)
		r.ObserveLoad(b, l)
	}
}

// limited is a request for a model whose prompts may have 10,000 tokens.
func limited(fleet []*backends.Backend, key, blocks int) *Request {
	req := ask(fleet, key, blocks)
	req.MaxPromptTokens = 10_000
	return req
}

func TestAPromptThatIsRefusedTakesNobodysPlace(t *testing.T) {
	f := func(name string, cache int, req func([]*backends.Backend) *Request) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix")
		sized(r, fleet, c, cache)
		for key := range 10 {
			mustPick(t, r, ask(fleet, key, 100)).Release(Outcome{End: Completed})
		}
		before, _ := r.IndexStats()
		mean := r.meanUncached.Value
		d := mustPick(t, r, req(fleet))
		if used := r.kvTokens(0, c.now); used > 1000 {
			t.Errorf("%s: it takes %.0f tokens of the cache", name, used)
		}
		d.Release(Outcome{End: NotProcessed})
		if after, _ := r.IndexStats(); after[0] != before[0] {
			t.Errorf("%s: the index was %+v and is %+v", name, before[0], after[0])
		}
		if r.meanUncached.Value != mean {
			t.Errorf("%s: the mean u was %.0f and is %.0f", name, mean, r.meanUncached.Value)
		}
	}
	f("longer than the model takes", 100_000, func(fleet []*backends.Backend) *Request { return limited(fleet, 99, 400) })
	f("longer than the cache", 80_000, func(fleet []*backends.Backend) *Request { return ask(fleet, 99, 8000) })
}

// Nothing is certain of a prompt that is a little too long by its bytes, of
// images, and of a prompt that is long only with those asked for beside it.
func TestWhatMayBeTakenIsRemembered(t *testing.T) {
	for name, req := range map[string]func([]*backends.Backend) *Request{
		"a little": func(fleet []*backends.Backend) *Request { return limited(fleet, 1, 200) }, // 12,800 tokens
		"images": func(fleet []*backends.Backend) *Request {
			req := limited(fleet, 1, 400)
			req.Media = true
			return req
		},
		"many prompts": func(fleet []*backends.Backend) *Request {
			req := limited(fleet, 1, 100)
			req.Sequences, req.Bytes = 8, 8*req.Bytes
			return req
		},
	} {
		r, fleet, c := newFleet(t, 1, "prefix")
		sized(r, fleet, c, 100_000)
		d := mustPick(t, r, req(fleet))
		d.Release(Outcome{End: Completed})
		if again := mustPick(t, r, req(fleet)); again.MatchedBlocks != d.TotalBlocks {
			t.Errorf("%s: %d blocks are remembered of %d", name, again.MatchedBlocks, d.TotalBlocks)
		}
	}
}

func TestAPromptThatIsRefusedIsNotHeld(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", holding)
	sized(r, fleet, c, 100_000)
	for key := range 2 {
		sent(t, "an idle backend", submit(r, ask(fleet, key, 400)))
	}
	waits(t, "nowhere is room", submit(r, ask(fleet, 2, 300)))
	f := func(name string, req *Request) {
		t.Helper()
		d := sent(t, name, submit(r, req))
		pending := r.states[d.Backend.Slot].load.queuedTokens(c.now, r.estimates.PrefillRate(d.Backend.Slot))
		if pending > 26_000 {
			t.Errorf("%s: %.0f tokens are pending", name, pending)
		}
	}
	f("longer than the model takes", limited(fleet, 3, 400))
	f("longer than the cache", ask(fleet, 4, 8000))
}

// It cannot be told whether such a prompt fits, but that no other's end makes
// room for it.
func TestNobodyWaitsForMoreThanTheWholeCache(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	sized(r, fleet, c, 100_000)
	sent(t, "an idle backend", submit(r, ask(fleet, 1, 10))).RecordFirstEvent()
	sent(t, "110,000 tokens", submit(r, ask(fleet, 2, 110_000/64)))
}

func TestALongPromptGoesToACacheThatHoldsIt(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	sized(r, fleet[:1], c, 100_000)
	sized(r, fleet[1:], c, 1_000_000)
	mustPick(t, r, ask(fleet[1:], 1, 1000)) // so that the other would be cheaper
	if d := mustPick(t, r, ask(fleet, 2, 4000)); d.Backend != fleet[1] {
		t.Errorf("256,000 tokens were sent to %s, whose cache has 100,000", d.Backend.Name)
	}
}

func TestOnlyWhatIsPrefilledCountsInTheMean(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	d := mustPick(t, r, ask(fleet, 1, 10))
	if r.meanUncached.Value != 0 {
		t.Errorf("the mean u is %.0f before anything came back", r.meanUncached.Value)
	}
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	large := &Request{Backends: fleet, Bytes: 1 << 20, Sequences: 1}
	mustPick(t, r, large).Release(Outcome{End: NotProcessed})
	large.NonGenerative = true
	mustPick(t, r, large).Release(Outcome{End: Completed})
	if r.meanUncached.Value != 640 {
		t.Errorf("the mean u is %.0f, want the 640 tokens of the only one that was prefilled", r.meanUncached.Value)
	}
}
