package router

import (
	"math"
	"testing"
	"time"
)

func TestWaiting(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	stream := func(u float64) *Decision { return &Decision{uncached: u, streams: true} }
	whole := func(u float64) *Decision { return &Decision{uncached: u} }
	f := func(name string, a *account, seconds, want float64) {
		t.Helper()
		if got := a.waiting(at(seconds), prefillRate); math.Abs(got-want) > 0.01 {
			t.Errorf("%s: W = %.1f, want %.1f", name, got, want)
		}
	}

	var a account
	f("nothing sent", &a, 0, 0)
	first, second := stream(7200), stream(14400)
	a.sent(first, at(0))
	a.sent(second, at(0))
	f("just sent", &a, 0, 21600)
	f("worked off at 0.9 of the rate", &a, 1, 14400)
	f("a fifth stays until the first events", &a, 60, 4320)
	a.first(first, at(2))
	f("the first event starts the clock again", &a, 2, 14400)
	f("", &a, 3, 7200)
	a.gone(second)
	f("a request that is gone waits no more", &a, 3, 0)

	var b account
	for range 3 {
		b.sent(whole(7200), at(0))
	}
	f("whole answers: just sent", &b, 0, 21600)
	f("whole answers: no floor", &b, 1.5, 10800)
	f("whole answers: the rest goes on", &b, 2.5, 3600)
	f("whole answers: worked off", &b, 3, 0)
	if len(b.pending) != 0 {
		t.Errorf("%d whole answers still pending", len(b.pending))
	}

	var c account
	early, late := whole(7200), stream(7200)
	c.sent(early, at(0))
	c.sent(late, at(0))
	c.first(late, at(0.5))
	f("a first event ends what was sent before it", &c, 0.5, 0)
}

func TestAnAverageIsOfUseFromTheFirstValueAndDriftsLater(t *testing.T) {
	var a average
	for range 50 {
		a.add(10)
		a.add(30)
	}
	if math.Abs(a.value-20) > 1e-9 {
		t.Errorf("the mean of a hundred values is %.2f, want 20", a.value)
	}
	for range 100 {
		a.add(120)
	}
	if want := 120 - 100*math.Pow(0.99, 100); math.Abs(a.value-want) > 1e-9 {
		t.Errorf("after a hundred more: %.2f, want %.2f", a.value, want)
	}
	prior := average{250, 10}
	prior.add(30)
	if prior.value != 230 {
		t.Errorf("a prior worth ten values and one of 30: %.1f, want 230", prior.value)
	}
}

func TestCountsOfRequestsAndOfUnstartedTokens(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	f := func(when string, requests int, unstarted float64) {
		t.Helper()
		if a := &r.accounts[0]; a.requests != requests || a.unstarted != unstarted {
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
