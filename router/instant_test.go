package router

import (
	"testing"

	"warmroute/backends"
)

func TestWhatNoEngineWorksOnIsNeitherHeldNorCounted(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	fresh := backends.Load{CacheTokens: 10_000, KVKnown: true, ScrapedAt: c.now}
	r.ObserveLoad(fleet[0], &fresh)
	long := sent(t, "", submit(r, ask(fleet, 1, 100)))
	waits(t, "behind 6,400 tokens", submit(r, ask(fleet, 2, 100)))
	tokenize := &Request{Backends: fleet, Sequences: 1, NoEngine: true, Tenant: 1}
	pending, kv, mean := r.states[0].load, r.kvTokens(0, c.now), r.meanUncached.Value
	d := sent(t, "nothing to wait for", submit(r, tokenize))
	if a := r.states[0].load; a.tokens != pending.tokens || a.requests != 1 || len(a.pending) != 1 || r.kvTokens(0, c.now) != kv ||
		r.meanUncached.Value != mean || fleet[0].InFlight.Load() != 1 {
		t.Error("it counts in the load")
	}
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, AnswerTokens: 1000})
	if r.states[0].load.tokens != pending.tokens || r.Estimates()[0].AnswerTokens != defaultAnswerTokens || fleet[0].InFlight.Load() != 1 {
		t.Error("its end counts in the load")
	}
	if n := r.WaitingRequests(); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
	long.Release(Outcome{End: Completed})
	fleet[0].SetState(backends.Down)
	if w := submit(r, tokenize); w.err != ErrNoneReady {
		t.Errorf("with nobody ready: %v, want ErrNoneReady at once", w.err)
	}
}
