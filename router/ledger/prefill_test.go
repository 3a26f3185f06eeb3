package ledger

import (
	"fmt"
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
)

// pendingEntry is a request with so many uncached tokens.
func pendingEntry(uncached float64, streams bool) *Entry {
	return &Entry{Streams: streams, Prediction: estimate.Prediction{Uncached: uncached}}
}

func TestQueuedTokens(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	stream := func(u float64) *Entry { return pendingEntry(u, true) }
	whole := func(u float64) *Entry { return pendingEntry(u, false) }
	// The figures do not depend on whether what is worked off was removed.
	check := func(name string, p *requestAccount, seconds, want float64, wantPending int) {
		t.Helper()
		for _, removed := range []string{"before", "after"} {
			if got, pending := p.queuedTokens(at(seconds), 8000); math.Abs(got-want) > 0.01 || pending != wantPending {
				t.Errorf("%s, %s removeWorkedOff: %.1f tokens of %d requests, want %.1f of %d", name, removed, got, pending, want, wantPending)
			}
			p.removeWorkedOff(at(seconds), 8000)
		}
		if len(p.pending) != wantPending {
			t.Errorf("%s: %d requests are kept, want %d", name, len(p.pending), wantPending)
		}
	}

	var a requestAccount
	check("nothing sent", &a, 0, 0, 0)
	first, second := stream(7200), stream(14400)
	a.add(first, at(0))
	a.add(second, at(0))
	check("just sent", &a, 0, 21600, 2)
	check("worked off at 0.9 of the rate", &a, 1, 14400, 2)
	check("a fifth stays until the first events", &a, 60, 4320, 2)
	a.recordPrefilled(first, at(2))
	check("the first event starts the clock again", &a, 2, 14400, 1)
	check("a second later", &a, 3, 7200, 1)
	a.removePending(second)
	check("a removed request is not counted", &a, 3, 0, 0)

	var b requestAccount
	for range 3 {
		b.add(whole(7200), at(0))
	}
	check("whole responses: just sent", &b, 0, 21600, 3)
	check("whole responses: no minimum", &b, 1.5, 10800, 2)
	check("whole responses: the others continue", &b, 2.5, 3600, 1)
	check("whole responses: worked off", &b, 3, 0, 0)

	var c requestAccount
	early, late := whole(7200), stream(7200)
	c.add(early, at(0))
	c.add(late, at(0))
	c.recordPrefilled(late, at(0.5))
	check("a first event ends what was sent before it", &c, 0.5, 0, 0)
	c.recordPrefilled(early, at(0.6))
	check("the end of one that was assumed to be prefilled", &c, 0.6, 0, 0)
}

func TestAdapterAccount(t *testing.T) {
	var p requestAccount
	send := func(adapter string) *Entry {
		e := &Entry{Adapter: adapter}
		p.add(e, time.Time{})
		return e
	}
	check := func(name, adapter string, load *backends.Load, want float64) {
		t.Helper()
		if got := p.adapterCost(adapter, load); got != want {
			t.Errorf("%s: cost %.0f, want %.0f", name, got, want)
		}
	}
	check("no adapter", "", nil, 0)
	check("not polled", "a", nil, adapterLoadSeconds)
	check("running", "a", &backends.Load{RunningAdapters: []string{"a"}, MaxAdapters: 1}, 0)
	check("a free place", "a", &backends.Load{RunningAdapters: []string{"b"}, MaxAdapters: 2}, adapterLoadSeconds)
	check("all places are taken", "a", &backends.Load{RunningAdapters: []string{"b"}, MaxAdapters: 1}, adapterWaitSeconds)
	check("the number of places is unknown", "a", &backends.Load{RunningAdapters: []string{"b"}}, adapterLoadSeconds)
	first, second := send("a"), send("a")
	check("just sent", "a", &backends.Load{RunningAdapters: []string{"b"}, MaxAdapters: 1}, 0)
	p.removeRequest(first)
	check("one of two ended", "a", nil, 0)
	p.removeRequest(second)
	check("both ended", "a", nil, adapterLoadSeconds)

	var sent []*Entry
	for key := range 2 * maxAdapters {
		sent = append(sent, send(fmt.Sprint(key)))
	}
	if n := len(p.adapters); n != maxAdapters {
		t.Errorf("%d adapters are kept apart, want %d", n, maxAdapters)
	}
	check("within the bound", "0", nil, 0)
	check("beyond the bound", fmt.Sprint(maxAdapters), nil, adapterLoadSeconds)
	sent = append(sent, send("0"))
	if n := p.adapters["0"]; n != 2 {
		t.Errorf("%d requests of an adapter that was kept at the bound, want 2", n)
	}
	for _, e := range sent {
		p.removeRequest(e)
	}
	if n := len(p.adapters); n != 0 {
		t.Errorf("%d adapters are left at the end", n)
	}
}
