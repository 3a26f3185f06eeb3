package router

import (
	"fmt"
	"math"
	"testing"
	"time"

	"warmroute/backends"
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
	a.addRequest(first, at(0))
	a.addRequest(second, at(0))
	f("just sent", &a, 0, 21600)
	f("worked off at 0.9 of the rate", &a, 1, 14400)
	f("a fifth stays until the first events", &a, 60, 4320)
	a.dropPrefilledUpTo(first, at(2))
	f("the first event starts the clock again", &a, 2, 14400)
	f("", &a, 3, 7200)
	a.removePending(second)
	f("a request that is gone waits no more", &a, 3, 0)

	var b load
	for range 3 {
		b.addRequest(whole(7200), at(0))
	}
	f("whole answers: just sent", &b, 0, 21600)
	f("whole answers: no floor", &b, 1.5, 10800)
	f("non-streaming: the others continue", &b, 2.5, 3600)
	f("whole answers: worked off", &b, 3, 0)
	if len(b.pending) != 0 {
		t.Errorf("%d whole answers still pending", len(b.pending))
	}

	var c load
	early, late := whole(7200), stream(7200)
	c.addRequest(early, at(0))
	c.addRequest(late, at(0))
	c.dropPrefilledUpTo(late, at(0.5))
	f("a first event ends what was sent before it", &c, 0.5, 0)
}

func TestLoadCounts(t *testing.T) {
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

func TestExternalLoad(t *testing.T) {
	r, _, c := newFleet(t, 1, "prefix")
	r.estimates.RecordUncached("", 1)
	f := func(name string, age time.Duration, l backends.Load, requests, queued float64) {
		t.Helper()
		l.PolledAt = c.now
		a, b := r.externalLoad(&l, c.now.Add(age))
		if math.Abs(a-requests) > 1e-9 || math.Abs(b-queued) > 1e-9 {
			t.Errorf("%s: %.3f requests, %.3f of them waiting; want %.3f, %.3f", name, a, b, requests, queued)
		}
	}
	f("all are ours", 0, backends.Load{QueuesKnown: true, Running: 3, Waiting: 2, OwnInFlight: 5}, 0, 0)
	f("ours are on their way", 0, backends.Load{QueuesKnown: true, Running: 3, OwnInFlight: 5}, 0, 0)
	f("some are not", 0, backends.Load{QueuesKnown: true, Running: 7, Waiting: 3, OwnInFlight: 4}, 6, 3)
	f("more requests wait than are external", 0, backends.Load{QueuesKnown: true, Running: 7, Waiting: 3, OwnInFlight: 9}, 1, 1)
	f("not known", 0, backends.Load{Running: 7, Waiting: 3}, 0, 0)
	others := backends.Load{QueuesKnown: true, Running: 8, Waiting: 2}
	f("after two intervals", 2*time.Second, others, 10/math.E, 2/math.E)
	f("after three missed polls", 3001*time.Millisecond, others, 0, 0)
	if a, b := r.externalLoad(nil, c.now); a != 0 || b != 0 {
		t.Errorf("no scrape: %.3f, %.3f", a, b)
	}
}

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
	// Each costs 160 tokens of decoding and stalls: 16·(1+0.6) + 160·2 against 640, then 5 of them.
	f("two others decode", 2, 0, holder.Backend)
	f("five others decode", 5, 0, other)
	f("one waits: 640 tokens more", 1, 1, other)
	c.advance(4 * time.Second)
	d := mustPick(t, r, ask(fleet, 1, 10))
	if d.Backend != holder.Backend {
		t.Error("external load lasts longer than three missed polls")
	}
}

func TestLongPromptBesideExternalLoad(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	running := sent(t, "", submit(r, ask(fleet, 1, 160)))
	long := submit(r, ask(fleet, 2, 160)) // 10,240 tokens: more than a step
	poll := func() {
		l := &backends.Load{QueuesKnown: true, Running: 40, Waiting: 1, PolledAt: c.now, OwnInFlight: 1}
		fleet[0].SetLoad(l)
		r.ObserveLoad(fleet[0], l)
	}
	poll()
	waits(t, "10,240 tokens of ours are pending", long)
	running.RecordFirstEvent()
	sent(t, "none of ours are", long)
}

func TestAnswerGrowthIsBounded(t *testing.T) {
	for name, c := range map[string]struct{ sequences, most, want int }{
		"nothing said":   {1, 0, maxMeanOutputs * defaultOutputTokens},
		"two sequences":  {2, 0, 2 * maxMeanOutputs * defaultOutputTokens},
		"fewer allowed":  {1, 16, 16},
		"more than ever": {1, 1 << 20, maxMeanOutputs * defaultOutputTokens},
	} {
		r, fleet, clock := newFleet(t, 1, "prefix")
		req := ask(fleet, 1, 10)
		req.Sequences, req.MaxOutputTokens = c.sequences, c.most
		d := mustPick(t, r, req)
		d.RecordFirstEvent()
		before := r.ownKVTokens(0, clock.now)
		clock.advance(time.Hour)
		if got := int(r.ownKVTokens(0, clock.now) - before); got != c.want {
			t.Errorf("%s: grown to %d tokens in an hour, want %d", name, got, c.want)
		}
		d.Release(Outcome{End: ClientDisconnected})
		if got := r.ownKVTokens(0, clock.now); got != 0 {
			t.Errorf("%s: %.0f tokens left at the end", name, got)
		}
	}
}

// reading is a fleet of one backend with so many streams, of 640 tokens each,
// whose engine has long put out all of them.
func reading(t *testing.T, streams int) (*Router, *backends.Backend, *clock) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	for key := range streams {
		mustPick(t, r, ask(fleet, key, 10)).RecordFirstEvent()
	}
	for range 10 {
		c.advance(time.Second)
		scraped(r, fleet[0], c, 0, 0)
	}
	return r, fleet[0], c
}

// scraped lets a poll find so many requests and such a share of the cache in use.
func scraped(r *Router, b *backends.Backend, c *clock, running int, usage float64) {
	l := &backends.Load{
		CacheTokens: 10_000, KVKnown: true, KVCacheUsage: usage, QueuesKnown: true, Running: running,
		TokensKnown: true, PromptTokens: 1, GenerationTokens: 1, OwnInFlight: b.InFlight.Load(), PolledAt: c.now,
	}
	b.SetLoad(l)
	r.ObserveLoad(b, l)
}

func TestSlowReadersKVUse(t *testing.T) {
	r, b, c := reading(t, 14) // 8,960 of 10,000 tokens, and what they were answered
	next := ask([]*backends.Backend{b}, 99, 10)
	d := sent(t, "the cache is empty", submit(r, next))
	c.advance(time.Second)
	scraped(r, b, c, 1, 0) // it waits for its first step
	large := submit(r, ask([]*backends.Backend{b}, 100, 140))
	waits(t, "640 tokens are still to come into the cache, and 8,960 would fill it", large)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	sent(t, "nothing is to come", large)
}

func TestSlowReadersAreNotStalled(t *testing.T) {
	r, b, c := reading(t, 3)
	if times, now := r.Stalls(b); times > 0 || now {
		t.Errorf("stalled %d times (now: %v), and its engine has nothing to do", times, now)
	}
	mustPick(t, r, ask([]*backends.Backend{b}, 99, 1))
	for s := range 10 {
		c.advance(time.Second)
		scraped(r, b, c, 1, 0)
		if _, now := r.Stalls(b); now != (s >= 3) { // 3 s, and a few milliseconds of prefill
			t.Errorf("%d s after another was sent, and nothing came of it: stalled %v", s+1, now)
		}
	}
}

func TestIsExpectedLoad(t *testing.T) {
	expected := func() backends.Load {
		return backends.Load{
			QueuesKnown: true, Running: 8, Waiting: 2, OwnInFlight: 10, CacheTokens: 10_000, KVKnown: true, KVCacheUsage: 0.4, TokensKnown: true,
		}
	}
	for name, c := range map[string]struct {
		change func(l *backends.Load)
		own    float64 // KV tokens
		unseen float64
		want   bool
	}{
		"what is ours":                       {func(*backends.Load) {}, 4000, 0, true},
		"idle":                               {func(l *backends.Load) { *l = backends.Load{QueuesKnown: true, CacheTokens: 10_000, KVKnown: true} }, 0, 0, true},
		"one of another client":              {func(l *backends.Load) { l.Running++ }, 4000, 0, false},
		"one of another client, idle for us": {func(l *backends.Load) { *l = backends.Load{QueuesKnown: true, Running: 1} }, 0, 0, false},
		"two of ours being tokenized":        {func(l *backends.Load) { l.Waiting = 0 }, 4000, 0, true},
		"three of ours finished":             {func(l *backends.Load) { l.Running, l.Waiting = 7, 0 }, 4000, 0, false},
		"a tenth of many":                    {func(l *backends.Load) { l.Running, l.Waiting, l.OwnInFlight = 90, 0, 100 }, 4000, 0, true},
		"more than a tenth of many":          {func(l *backends.Load) { l.Running, l.Waiting, l.OwnInFlight = 89, 0, 100 }, 4000, 0, false},
		"waiting for room":                   {func(l *backends.Load) { l.WaitingForCapacity = 2 }, 4000, 0, false},
		"more KV cache than ours":            {func(*backends.Load) {}, 2900, 0, false},
		"little more KV cache than ours":     {func(*backends.Load) {}, 3100, 0, true},
		"less KV cache than ours":            {func(*backends.Load) {}, 5100, 0, false},
		"less, but prompts are to come":      {func(*backends.Load) {}, 5100, 1000, true},
		"almost no room left":                {func(l *backends.Load) { l.KVCacheUsage = 0.8 }, 8000, 0, false},
		"KV cache unknown":                   {func(l *backends.Load) { l.KVKnown = false }, 9000, 0, true},
		"size of the KV cache unknown":       {func(l *backends.Load) { l.CacheTokens = 0 }, 9000, 0, true},
		"queues unknown":                     {func(l *backends.Load) { l.QueuesKnown = false }, 4000, 0, false},
		"asleep":                             {func(l *backends.Load) { *l = backends.Load{QueuesKnown: true, Asleep: true} }, 0, 0, false},
	} {
		l := expected()
		c.change(&l)
		if got := isExpectedLoad(&l, c.own, c.unseen); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// The next scrape of a backend that shows no work must not be late: it may be stalled.
func TestLoadWithoutProgressIsNotExpected(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	b := fleet[0]
	expect := func(what string, want bool) {
		t.Helper()
		if got := r.IsLoadExpected(b); got != want {
			t.Errorf("%s: expected %v, want %v", what, got, want)
		}
	}
	expect("before the first scrape", false)
	scraped(r, b, c, 0, 0)
	expect("idle", true)
	d := mustPick(t, r, ask(fleet, 1, 1))
	for i, usage := range []float64{0.01, 0.02, 0.02, 0.03} {
		c.advance(time.Second)
		scraped(r, b, c, 1, usage)
		expect(fmt.Sprint("scrape ", i, " of a request"), i != 2)
	}
	d.Release(Outcome{End: Completed})
	c.advance(time.Second)
	scraped(r, b, c, 0, 0)
	expect("idle again", true)
}

func TestPolicyByMetricsExpectsNoLoad(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "weighted")
	scraped(r, fleet[0], c, 0, 0)
	if r.IsLoadExpected(fleet[0]) {
		t.Error("the policy decides by scrapes, and they may be late")
	}
}

// What a scrape showed of other clients counts until three that should have followed are
// missing, also where they were to follow later.
func TestPollAgeWithBackoff(t *testing.T) {
	for name, tc := range map[string]struct {
		usage  float64
		recent time.Duration
	}{
		"not expected": {0.5, 3 * time.Second},
		"expected":     {0.05, 15 * time.Second},
	} {
		r, fleet, c := newFleet(t, 1, "prefix")
		scraped(r, fleet[0], c, 0, tc.usage)
		for _, wait := range []time.Duration{tc.recent, time.Millisecond} {
			c.advance(wait)
			if used := r.usedKVTokens(0, c.now); (used > 0) != (wait == tc.recent) {
				t.Errorf("%s: %.0f tokens in use after %v", name, used, c.now.Sub(time.Unix(1000, 0)))
			}
		}
	}
}
