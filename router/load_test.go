package router

import (
	"fmt"
	"testing"
	"time"

	"warmroute/backends"
)

func TestExternalLoadShiftsTraffic(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	holder := mustPick(t, r, ask(fleet, 1, 10)) // 640 tokens: the mean u
	holder.RecordFirstEvent()
	holder.Release(Outcome{End: Completed, OutputTokens: 250})
	other := fleet[1-holder.Backend.Slot]
	f := func(name string, running, waiting int, want *backends.Backend) {
		t.Helper()
		holder.Backend.SetLoad(&backends.Load{QueuesKnown: true, Running: running, Waiting: waiting, PolledAt: c.now})
		d := mustPick(t, r, ask(fleet, 1, 10))
		if d.Backend != want {
			t.Errorf("%s: sent to %s", name, d.Backend.Name)
		}
		d.Release(Outcome{End: NotProcessed})
	}
	f("two others decode", 2, 0, holder.Backend)
	f("fifty others decode", 50, 0, other)
	f("one waits: 640 tokens more", 1, 1, other)
	c.advance(4 * time.Second)
	d := mustPick(t, r, ask(fleet, 1, 10))
	if d.Backend != holder.Backend {
		t.Error("external load counts for longer than three missed polls")
	}
}

func TestLongPromptBesideExternalLoad(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	running := sent(t, "", submit(r, ask(fleet, 1, 300)))
	long := submit(r, ask(fleet, 2, 160))
	poll := func() {
		l := &backends.Load{QueuesKnown: true, Running: 40, Waiting: 1, PolledAt: c.now, OwnInFlight: 1}
		fleet[0].SetLoad(l)
		r.ObserveLoad(fleet[0], l)
	}
	poll()
	waits(t, "19,200 tokens of ours are pending", long)
	running.RecordFirstEvent()
	sent(t, "none of ours are", long)
}

func TestOutputGrowthIsBounded(t *testing.T) {
	for name, c := range map[string]struct{ sequences, most, want int }{
		"no maximum":               {1, 0, maxMeanOutputs * defaultOutputTokens},
		"two sequences":            {2, 0, 2 * maxMeanOutputs * defaultOutputTokens},
		"a low maximum":            {1, 16, 16},
		"a maximum of many tokens": {1, 1 << 20, maxMeanOutputs * defaultOutputTokens},
	} {
		r, fleet, clock := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 10)
		req.Sequences, req.MaxOutputTokens = c.sequences, c.most
		d := mustPick(t, r, req)
		d.RecordFirstEvent()
		before := ownKVTokens(r, 0, clock.now)
		clock.advance(time.Hour)
		if got := int(ownKVTokens(r, 0, clock.now) - before); got != c.want {
			t.Errorf("%s: grown to %d tokens in an hour, want %d", name, got, c.want)
		}
		d.Release(Outcome{End: ClientDisconnected})
		if got := ownKVTokens(r, 0, clock.now); got != 0 {
			t.Errorf("%s: %.0f tokens left at the end", name, got)
		}
	}
}

// reading is a fleet of one backend with so many streams, of 640 tokens each,
// whose engine has long generated all of them.
func reading(t *testing.T, streams int) (*Router, *backends.Backend, *clock) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	for key := range streams {
		mustPick(t, r, ask(fleet, key, 10)).RecordFirstEvent()
	}
	for range 10 {
		c.advance(time.Second)
		polled(r, fleet[0], c, 0, 0)
	}
	return r, fleet[0], c
}

// polled lets a poll find so many requests and such a share of the cache in use.
func polled(r *Router, b *backends.Backend, c *clock, running int, usage float64) {
	l := &backends.Load{
		CacheTokens: 10_000, KVKnown: true, KVCacheUsage: usage, QueuesKnown: true, Running: running,
		TokensKnown: true, PromptTokens: 1, GenerationTokens: 1, OwnInFlight: b.InFlight.Load(), PolledAt: c.now,
	}
	b.SetLoad(l)
	r.ObserveLoad(b, l)
}

func TestSlowReadersKVUse(t *testing.T) {
	r, b, c := reading(t, 14) // 8,960 of 10,000 tokens, and their outputs
	next := ask([]*backends.Backend{b}, 99, 10)
	d := sent(t, "the cache is empty", submit(r, next))
	c.advance(time.Second)
	polled(r, b, c, 1, 0) // it waits for its first step
	large := submit(r, ask([]*backends.Backend{b}, 100, 140))
	waits(t, "640 tokens are still to come into the cache, and 8,960 would fill it", large)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	sent(t, "nothing is to come", large)
}

func TestSlowReadersAreNotStalled(t *testing.T) {
	r, b, c := reading(t, 3)
	if times, now := stallsOf(r, b); times > 0 || now {
		t.Errorf("stalled %d times (now: %v), and its engine has nothing to do", times, now)
	}
	mustPick(t, r, ask([]*backends.Backend{b}, 99, 1))
	for s := range 10 {
		c.advance(time.Second)
		polled(r, b, c, 1, 0)
		if _, now := stallsOf(r, b); now != (s >= 3) { // 3 s, and a few milliseconds of prefill
			t.Errorf("%d s after another was sent, without output: stalled %v", s+1, now)
		}
	}
}

// The next poll of a backend that shows no work must not be late: it may be stalled.
func TestLoadWithoutProgressIsNotExpected(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	b := fleet[0]
	expect := func(what string, want bool) {
		t.Helper()
		if got := r.IsLoadExpected(b); got != want {
			t.Errorf("%s: expected %v, want %v", what, got, want)
		}
	}
	expect("before the first poll", false)
	polled(r, b, c, 0, 0)
	expect("idle", true)
	d := mustPick(t, r, ask(fleet, 1, 1))
	for i, usage := range []float64{0.01, 0.02, 0.02, 0.03} {
		c.advance(time.Second)
		polled(r, b, c, 1, usage)
		expect(fmt.Sprint("poll ", i, " of a request"), i != 2)
	}
	d.Release(Outcome{End: Completed})
	c.advance(time.Second)
	polled(r, b, c, 0, 0)
	expect("idle again", true)
}

func TestPolicyByMetricsExpectsNoLoad(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "weighted")
	polled(r, fleet[0], c, 0, 0)
	if r.IsLoadExpected(fleet[0]) {
		t.Error("the policy decides by polls, and they may be late")
	}
}
