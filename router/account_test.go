package router

import (
	"math"
	"testing"
	"time"

	"warmroute/router/estimate"
)

// pendingDecision is a decision for so many uncached tokens.
func pendingDecision(uncached float64, streams bool) *Decision {
	return &Decision{prediction: estimate.Prediction{Uncached: uncached}, request: sentRequest{streams: streams}}
}

func TestQueuedTokens(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	stream := func(u float64) *Decision { return pendingDecision(u, true) }
	whole := func(u float64) *Decision { return pendingDecision(u, false) }
	f := func(name string, a *load, seconds, want float64) {
		t.Helper()
		if got := a.queuedTokens(at(seconds), 8000); math.Abs(got-want) > 0.01 {
			t.Errorf("%s: W = %.1f, want %.1f", name, got, want)
		}
	}

	var a load
	f("nothing sent", &a, 0, 0)
	first, second := stream(7200), stream(14400)
	a.add(first, at(0))
	a.add(second, at(0))
	f("just sent", &a, 0, 21600)
	f("worked off at 0.9 of the rate", &a, 1, 14400)
	f("a fifth stays until the first events", &a, 60, 4320)
	a.recordStart(first, at(2))
	f("the first event starts the clock again", &a, 2, 14400)
	f("", &a, 3, 7200)
	a.remove(second)
	f("a request that is gone waits no more", &a, 3, 0)

	var b load
	for range 3 {
		b.add(whole(7200), at(0))
	}
	f("whole answers: just sent", &b, 0, 21600)
	f("whole answers: no floor", &b, 1.5, 10800)
	f("whole answers: the rest goes on", &b, 2.5, 3600)
	f("whole answers: worked off", &b, 3, 0)
	if len(b.pending) != 0 {
		t.Errorf("%d whole answers still pending", len(b.pending))
	}

	var c load
	early, late := whole(7200), stream(7200)
	c.add(early, at(0))
	c.add(late, at(0))
	c.recordStart(late, at(0.5))
	f("a first event ends what was sent before it", &c, 0.5, 0)
}

func TestCountsOfRequestsAndOfUnstartedTokens(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	f := func(when string, requests int, unstarted float64) {
		t.Helper()
		if a := &r.states[0].load; a.requests != requests || a.unstarted != unstarted {
			t.Errorf("%s: %d requests and %.0f tokens, want %d and %.0f", when, a.requests, a.unstarted, requests, unstarted)
		}
	}
	a, b, d := mustPick(t, r, ask(fleet, 1, 10)), mustPick(t, r, ask(fleet, 2, 20)), mustPick(t, r, ask(fleet, 3, 30))
	f("three sent", 3, 3840) // 640 + 1,280 + 1,920 tokens
	c.advance(time.Hour)
	f("time alone takes nothing off", 3, 3840)
	a.RecordFirstEvent()
	a.RecordFirstEvent()
	f("the first one's first event", 3, 3200)
	b.Release(Outcome{End: ClientDisconnected})
	f("the second one's client left", 2, 1920)
	a.Release(Outcome{End: Completed})
	d.Release(Outcome{End: Completed})
	f("all served", 0, 0)
}
