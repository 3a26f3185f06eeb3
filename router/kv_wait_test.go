package router

import (
	"math"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/lab/policies"
	"warmroute/router/ledger"
)

// usesKV lets a poll find such a share of a cache of so many tokens in use.
func usesKV(r *Router, b *backends.Backend, c *clock, cacheTokens int, usage float64) {
	l := &backends.Load{CacheTokens: cacheTokens, KVKnown: true, KVCacheUsage: usage, PolledAt: c.now}
	b.SetLoad(l)
	r.ObserveLoad(b, l)
}

// kvWait returns how many seconds a request would wait for room on the first backend, of which
// others have claimed so many tokens.
func kvWait(t *testing.T, r *Router, req *Request, claimed float64, now time.Time) float64 {
	t.Helper()
	d := mustFilterAll(t, r, req, now)
	d.view.Backends[0].Claimed.KV = claimed
	if err := d.view.Filter(d.query, d.candidates); err != nil {
		t.Fatal(err)
	}
	c := d.seen(t, r).candidates[0]
	return c.KVWaitSeconds
}

func TestKVWait(t *testing.T) {
	const capacity, blocks = 10_000, 10
	const prompt = float64(blocks * tokensPerBlock)
	full := func(r *Router, b *backends.Backend, c *clock) { usesKV(r, b, c, capacity, fullKVUsage) }
	claimed := 0.0 // tokens, by requests before it
	for _, tc := range []struct {
		name    string
		setUp   func(*Router, *backends.Backend, *clock)
		missing float64 // tokens
	}{
		{"nothing reported", func(*Router, *backends.Backend, *clock) {}, 0},
		{"size unknown", func(r *Router, b *backends.Backend, c *clock) { usesKV(r, b, c, 0, 1) }, 0},
		{"usage unknown", func(r *Router, b *backends.Backend, c *clock) {
			r.ObserveLoad(b, &backends.Load{CacheTokens: capacity, KVCacheUsage: 1, PolledAt: c.now})
		}, 0},
		{"there is room", func(r *Router, b *backends.Backend, c *clock) { usesKV(r, b, c, capacity, 0.8) }, 0},
		{"not for the prompt", full, prompt},
		{"not for half of it", func(r *Router, b *backends.Backend, c *clock) {
			usesKV(r, b, c, capacity, fullKVUsage-prompt/2/capacity)
		}, prompt / 2},
		{"more in use than requests are sent for", func(r *Router, b *backends.Backend, c *clock) {
			usesKV(r, b, c, capacity, 1)
		}, prompt + (1-fullKVUsage)*capacity},
		{"full with our own requests", func(r *Router, b *backends.Backend, c *clock) {
			usesKV(r, b, c, capacity, 0)
			mustPick(t, r, ask([]*backends.Backend{b}, 2, capacity/tokensPerBlock))
		}, float64(capacity/tokensPerBlock*tokensPerBlock) + prompt - fullKVUsage*capacity},
		{"reported too long ago", func(r *Router, b *backends.Backend, c *clock) {
			full(r, b, c)
			c.advance(maxExternalLoadAge*time.Second + time.Millisecond)
		}, 0},
		{"claimed by a request before it", func(r *Router, b *backends.Backend, c *clock) {
			usesKV(r, b, c, capacity, 0)
			claimed = fullKVUsage * capacity
		}, prompt},
		{"a running request uses most of the prompt", func(r *Router, b *backends.Backend, c *clock) {
			mustPick(t, r, ask([]*backends.Backend{b}, 1, blocks-2))
			full(r, b, c)
		}, 2 * tokensPerBlock},
		{"the cache holds the prompt, and nothing uses it", func(r *Router, b *backends.Backend, c *clock) {
			mustPick(t, r, ask([]*backends.Backend{b}, 1, blocks)).Release(Outcome{End: ClientDisconnected})
			full(r, b, c)
		}, prompt},
	} {
		r, fleet, c := newFleet(t, 1, "prefix")
		claimed = 0
		tc.setUp(r, fleet[0], c)
		response := r.fleet.estimates.OutputTokens(0) / ledger.DefaultDecodeRate // seconds
		if got, want := kvWait(t, r, ask(fleet, 1, blocks), claimed, c.now), tc.missing/capacity*response; math.Abs(got-want) > 1e-6 {
			t.Errorf("%s: %.4f s, want %.4f", tc.name, got, want)
		}
	}
}

// TestKVWaitOfLongOutputs expects that a cache is free again the later the longer outputs take.
func TestKVWaitOfLongOutputs(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix")
	usesKV(r, fleet[0], c, 10_000, 1)
	wait := func() float64 { return kvWait(t, r, ask(fleet, 1, 10), 0, c.now) }
	before := wait()
	for range 1000 {
		r.fleet.estimates.RecordOutputLength(0, 10*defaultOutputTokens, 1)
	}
	if got := wait(); got < 9*before || got > 10.1*before {
		t.Errorf("%.2f s where outputs have about ten times as many tokens, and %.2f before", got, before)
	}
	long := wait()
	for range 1000 {
		d := mustPick(t, r, ask(fleet, 2, 0))
		d.RecordFirstEvent()
		c.advance(10 * defaultOutputTokens * time.Second / (2 * ledger.DefaultDecodeRate))
		d.Release(Outcome{End: Completed, OutputTokens: 10 * defaultOutputTokens})
	}
	usesKV(r, fleet[0], c, 10_000, 1)
	if got := wait(); math.Abs(got/long-0.5) > 0.05 {
		t.Errorf("%.2f s where outputs are generated at twice the rate, and %.2f before", got, long)
	}
}

// TestKVWaitRouting has a prompt, and an idle backend without any of it. The other one holds some
// of the prompt, and its cache has more or less room.
func TestKVWaitRouting(t *testing.T) {
	const (
		kvWaitCost  = 4      // of the policy prefix
		prefillRate = 26_000 // of prompts of 33,000 tokens
	)
	// One missing token costs what half of one costs to prefill.
	r, _, _ := newFleet(t, 1, "prefix")
	capacity := kvWaitCost * r.fleet.estimates.OutputTokens(0) / ledger.DefaultDecodeRate * prefillRate / 0.5
	blocks := int((1 - fullKVUsage) / 2 * capacity / tokensPerBlock)
	for _, tc := range []struct {
		name    string
		matched int // blocks
		usage   float64
		known   bool // capacity and usage
		holder  bool // gets it
	}{
		{"a new prompt, room", 0, 0.5, true, true},
		{"a new prompt, no room", 0, fullKVUsage, true, false},
		{"a short match, room", blocks / 4, 0.5, true, true},
		{"a short match, no room", blocks / 4, fullKVUsage, true, false},
		{"a long match, room", blocks, 0.5, true, true},
		{"a long match, little is missing", blocks, fullKVUsage, true, true},
		{"a long match, much is missing", blocks, 1, true, false},
		{"a short match, unknown", blocks / 4, 1, false, true},
	} {
		r, fleet, c := newFleet(t, 2, "prefix")
		holder := fleet[0]
		if tc.matched == 0 { // where a new prompt goes, with room on both
			holder = mustPick(t, r, ask(fleet, 1, blocks)).Backend
			r, fleet, c = newFleet(t, 2, "prefix")
			holder = fleet[holder.Slot]
		} else {
			mustPick(t, r, ask(fleet[:1], 1, tc.matched)).Release(Outcome{End: Completed})
		}
		if tc.known {
			usesKV(r, holder, c, int(capacity), tc.usage)
		} else {
			holder.SetLoad(&backends.Load{KVCacheUsage: tc.usage, PolledAt: c.now})
			r.ObserveLoad(holder, holder.Load())
		}
		if d := mustPick(t, r, ask(fleet, 1, blocks)); (d.Backend == holder) != tc.holder {
			t.Errorf("%s: sent to the holder: %v, want %v", tc.name, d.Backend == holder, tc.holder)
		}
	}
}

// TestAllCachesFull sends a request although no backend has room: to the one that waits least.
func TestAllCachesFull(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix")
	usesKV(r, fleet[0], c, 10_000, 1)
	usesKV(r, fleet[1], c, 10_000, 0.97)
	d := mustPick(t, r, ask(fleet, 1, 10))
	if d.Backend != fleet[1] {
		t.Errorf("sent to %s, which has the least room", d.Backend.Name)
	}
	d.Release(Outcome{End: NotProcessed})
	fleet[1].SetState(backends.Down)
	if d := mustPick(t, r, ask(fleet, 1, 10)); d.Backend != fleet[0] {
		t.Errorf("sent to %s, which is down", d.Backend.Name)
	}
}

// TestFullCacheIsBetterThanStalled has the choice between a backend without room and a stalled one.
func TestFullCacheIsBetterThanStalled(t *testing.T) {
	s := newStalls(t, 2)
	s.loads[1].KVCacheUsage, s.loads[1].KVKnown, s.loads[1].CacheTokens = 1, true, 1000
	s.send(1, 640, true)
	s.pass(5*time.Second, nil)
	if d := mustPick(t, s.r, ask(s.fleet, 1, 10)); d.Backend != s.fleet[1] {
		t.Error("sent to the stalled one")
	}
}

// Other rules are to do what they do elsewhere.
func TestKVWaitIsOfPolicyPrefix(t *testing.T) {
	for _, name := range policies.All().Names() {
		r, fleet, c := newFleet(t, 2, name)
		usesKV(r, fleet[0], c, 1000, 1)
		d := mustFilterAll(t, r, ask(fleet, 1, 1), c.now)
		candidates := d.seen(t, r).candidates
		full, empty := candidates[0].KVWaitSeconds, candidates[1].KVWaitSeconds
		if full > 0 != (name == "prefix") || empty != 0 {
			t.Errorf("%s: the waits for room are %.0f and %.0f tokens", name, full, empty)
		}
	}
	r, fleet, c := newFleet(t, 2, "round-robin")
	usesKV(r, fleet[0], c, 1000, 1)
	seen := map[*backends.Backend]bool{}
	for range 2 {
		seen[mustPick(t, r, ask(fleet, 1, 1)).Backend] = true
	}
	if len(seen) != 2 {
		t.Error("round-robin left one out")
	}
}
