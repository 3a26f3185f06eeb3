package router

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// waiter is a request that was submitted, and what became of it.
type waiter struct {
	held *Held
	d    *Decision
	err  error
}

func (w *waiter) waits() bool { return w.d == nil && w.err == nil }

func submit(r *Router, req *Request, tried ...*backends.Backend) *waiter {
	w := &waiter{}
	w.held = r.Submit(req, func(d *Decision, err error) { w.d, w.err = d, err }, tried...)
	return w
}

func holding(o *Options) { o.Hold = HoldOptions{Requests: 1000, Bytes: 1 << 28, Time: time.Minute} }

// sent fails the test unless w was sent, and returns its decision.
func sent(t *testing.T, name string, w *waiter) *Decision {
	t.Helper()
	if w.d == nil {
		t.Fatalf("%s: not sent (%v)", name, w.err)
	}
	return w.d
}

func waits(t *testing.T, name string, w *waiter) {
	t.Helper()
	if !w.waits() {
		t.Fatalf("%s: it does not wait (%v)", name, w.err)
	}
}

func TestWhatABackendCanStartSoonIsSent(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	long := sent(t, "an idle backend takes anything", submit(r, ask(fleet, 1, 1000)))
	second := submit(r, ask(fleet, 2, 1))
	waits(t, "64,000 tokens are pending", second)
	if n := r.HeldRequests(); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
	long.FirstEvent()
	if d := sent(t, "its prefill is done", second); d.Held != 0 || r.HeldRequests() != 0 {
		t.Errorf("held for %v, %d still held", d.Held, r.HeldRequests())
	}
}

func TestAStepIsFilled(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	f := func(name string, limit int) {
		t.Helper()
		var open []*Decision
		pending := 0
		for key := 1; ; key++ {
			w := submit(r, ask(fleet, key, 10)) // 640 tokens
			if w.waits() {
				if !w.held.Cancel() {
					t.Errorf("%s: a request that waits cannot be cancelled", name)
				}
				break
			}
			open, pending = append(open, w.d), pending+640
		}
		if pending > limit || pending+640 <= limit {
			t.Errorf("%s: %d tokens pending, want as many as fit into %d", name, pending, limit)
		}
		for _, d := range open {
			d.Release(Outcome{End: Unseen})
		}
	}
	f("until learned", 8192)
	largest := func(tokens int) {
		r.Observe(fleet[0], &backends.Load{StepTokens: tokens, ScrapedAt: c.now})
	}
	step := 1000 // a prompt that nobody holds
	fill := func() {
		step += fullSteps
		for key := range fullSteps {
			d := sent(t, "an idle backend", submit(r, ask(fleet, step+key, 200)))
			d.FirstEvent()
			d.Release(Outcome{End: Broken})
		}
	}
	largest(4096)
	f("its largest step may not have been full", 8192)
	fill()
	largest(4096)
	f("learned", 4096)
	r.Forget(fleet[0])
	largest(128)
	f("a restarted replica that has done little", 8192)
	fill()
	largest(128)
	f("no scheduler's budget", 2048)
	r.Observe(fleet[0], &backends.Load{StepTokens: 1 << 17, ScrapedAt: c.now})
	f("a very large budget", 16384)
	r.holding.StepTokens = 1024
	f("configured", 1024)
}

func TestTimeAloneMakesRoom(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	submit(r, ask(fleet, 1, 200)) // 12,800 tokens
	w := submit(r, ask(fleet, 2, 60))
	r.Tick()
	waits(t, "nothing was worked off", w)
	c.advance(1500 * time.Millisecond)
	r.Tick()
	if d := sent(t, "10,800 tokens were worked off", w); d.Held != 1500*time.Millisecond {
		t.Errorf("held for %v, want 1.5 s", d.Held)
	}
}

func TestACacheIsNotOverfilled(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	observe := func(l backends.Load) {
		l.CacheTokens, l.ScrapedAt = 10_000, c.now
		r.Observe(fleet[0], &l)
	}
	observe(backends.Load{})
	started := func(name string, w *waiter) *Decision {
		t.Helper()
		d := sent(t, name, w)
		d.FirstEvent()
		return d
	}
	first := started("an idle backend ignores the guard", submit(r, ask(fleet, 1, 150))) // 9,600 tokens
	small := submit(r, ask(fleet, 2, 1))
	waits(t, "the cache is full", small)
	shared := ask(fleet, 1, 100)
	copied := submit(r, shared)
	waits(t, "what is shared needs no room, but the guard's share is exceeded by what runs", copied)
	copied.held.Cancel()
	first.Release(Outcome{End: Served})
	started("the cache is free", small).Release(Outcome{End: Served})

	half := started("", submit(r, ask(fleet, 3, 75))) // 4,800 tokens
	for range 20 {
		copied := started("copies of one prompt take its room once", submit(r, ask(fleet, 3, 75)))
		defer copied.Release(Outcome{End: Served})
	}
	waits(t, "another prompt of that length does not fit", submit(r, ask(fleet, 4, 75)))
	c.advance(time.Minute) // answers grow, at 40 tokens a second until learned
	r.Tick()
	waits(t, "the answers have filled the cache", submit(r, ask(fleet, 5, 1)))
	half.Release(Outcome{End: Served})
}

func TestWhatOthersKeepInACacheCounts(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	d := sent(t, "", submit(r, ask(fleet, 1, 10)))
	d.FirstEvent()
	r.Observe(fleet[0], &backends.Load{CacheTokens: 10_000, KVCacheUsage: 0.9, KVKnown: true, ScrapedAt: c.now})
	w := submit(r, ask(fleet, 2, 10))
	waits(t, "640 tokens are ours, and 9,000 are in use", w)
	c.advance(4 * time.Second)
	r.Tick()
	sent(t, "three polls were missed", w)
}

func TestAReplicaWithRequestsWaitingForRoomGetsNoMore(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	starve := func() {
		r.Observe(fleet[0], &backends.Load{WaitingForCapacity: 2, ScrapedAt: c.now})
	}
	a, b := sent(t, "", submit(r, ask(fleet, 1, 1))), sent(t, "", submit(r, ask(fleet, 2, 1)))
	starve()
	w := submit(r, ask(fleet, 3, 1))
	waits(t, "two requests wait for capacity", w)
	a.FirstEvent()
	waits(t, "one of them started", w)
	b.FirstEvent()
	sent(t, "both of them started", w).FirstEvent()
	starve()
	w = submit(r, ask(fleet, 4, 1))
	waits(t, "two others wait", w)
	c.advance(4 * time.Second)
	r.Tick()
	sent(t, "the word is old", w)
}

func TestWhatWaitsIsNotOvertakenOnItsBackend(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	sent(t, "", submit(r, ask(fleet[:1], 1, 64)))   // 4,096 tokens
	sent(t, "", submit(r, ask(fleet[1:], 2, 2000))) // and 128,000 on the other one
	first := ask(fleet, 3, 100)
	first.Priority = -1
	waits(t, "6,400 tokens beside 4,096", submit(r, first))
	waits(t, "it fits, and would overtake", submit(r, ask(fleet, 4, 1)))
	urgent := ask(fleet, 5, 1)
	urgent.Priority = -2
	sent(t, "it is first", submit(r, urgent))
}

func TestWhatWaitsForRoomInACacheIsNotOvertaken(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	r.Observe(fleet[0], &backends.Load{CacheTokens: 10_000, ScrapedAt: c.now})
	running := sent(t, "", submit(r, ask(fleet, 1, 75))) // 4,800 tokens
	running.FirstEvent()
	first := ask(fleet, 2, 80) // 5,120
	first.Priority = -1
	large := submit(r, first)
	waits(t, "4,800 and 5,120 of 9,500 tokens", large)
	waits(t, "it fits, and would overtake", submit(r, ask(fleet, 3, 1)))
	running.Release(Outcome{End: Served})
	sent(t, "the cache is free", large)
}

func TestWhatHasWaitedSettlesForOneBackend(t *testing.T) {
	r, _, c := newFleet(t, 3, "prefix", holding)
	r.candidates = []policy.Candidate{{Slot: 0}, {Slot: 2}}
	f := func(name string, waitsFor int, waited time.Duration, want int) {
		t.Helper()
		h := &Held{waitsFor: waitsFor, arrived: c.now.Add(-waited)}
		if got := r.settled(h, 0, c.now); got != want {
			t.Errorf("%s: it waits for candidate %d, want %d", name, got, want)
		}
	}
	f("the cheapest at first", 2, time.Second, 0)
	f("later the one that it has a claim to", 2, 2*time.Second, 1)
	f("unless that is gone", 1, 2*time.Second, 0)
	f("or it never waited for one", nowhere, 2*time.Second, 0)
}

func TestShortWorkFirstUntilTheLongHasWaited(t *testing.T) {
	f := func(name string, blocks int, later time.Duration, want ...int) {
		t.Helper()
		r, fleet, c := newFleet(t, 1, "prefix", holding)
		busy := sent(t, "", submit(r, ask(fleet, 1, 20_000))) // 1,280,000 tokens
		var got []int
		put := func(key, n int) {
			r.Submit(ask(fleet, key, n), func(*Decision, error) { got = append(got, key) })
		}
		put(2, blocks)
		c.advance(later)
		put(3, 1)
		busy.FirstEvent()
		r.Tick()
		if !slices.Equal(got, want) {
			t.Errorf("%s: sent %v, want %v", name, got, want)
		}
	}
	// 8,192 tokens: a second of work, five of ageing.
	f("the short one first", 128, 4*time.Second, 3)
	f("unless it came too late", 128, 6*time.Second, 2)
	// 96,000 tokens would be 60 s of ageing, which is all the time there is.
	f("before a very long one", 1500, 44*time.Second, 3)
	f("unless it came too late for that", 1500, 46*time.Second, 2)
}

func TestATenantsFloodDoesNotStarveOthers(t *testing.T) {
	const flood, other = 7, 8
	served := func(tenant uint64) int {
		r, fleet, c := newFleet(t, 1, "prefix", holding)
		busy := sent(t, "", submit(r, ask(fleet, 1, 2000)))
		before := 0
		var last *Decision
		put := func(key int, tenant uint64, served func()) {
			req := ask(fleet, key, 120)
			req.Tenant = tenant
			r.Submit(req, func(d *Decision, _ error) { last = d; served() })
		}
		for key := range 100 {
			put(2+key, tenant, func() { before++ })
		}
		c.advance(10 * time.Millisecond)
		done := false
		put(200, other, func() { done = true })
		for busy.Release(Outcome{End: Served}); !done; {
			c.advance(time.Second)
			last.Release(Outcome{End: Served, AnswerTokens: 10})
		}
		return before
	}
	if n := served(flood); n > 3 {
		t.Errorf("%d requests of a tenant that floods the queue went before another's only one", n)
	}
	if n := served(0); n != 100 {
		t.Errorf("%d requests of nobody in particular went before one that came after them, want all 100", n)
	}
}

// An engine that prefills 8,000 tokens a second gets short requests faster than
// it can take them, for minutes; one long one is among them.
func TestAStreamOfShortRequestsDoesNotStarveALongOne(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", func(o *Options) { o.Hold = HoldOptions{Requests: 1 << 20} })
	start := c.now
	var running []*Decision
	deliver := func(d *Decision, _ error) { running = append(running, d) }
	busyUntil := make([]time.Time, 2)
	finishes := map[*Decision]time.Time{}
	var long time.Duration
	key := 1
	for long == 0 && c.now.Sub(start) < 10*time.Minute {
		if c.now.Sub(start) == 10*time.Second {
			r.Submit(ask(fleet, 1<<20, 500), func(d *Decision, err error) { // 32,000 tokens: 4 s
				deliver(d, err)
				long = c.now.Sub(start) - 10*time.Second
			})
		}
		for range 6 { // of 320 tokens, each 20 ms: 96,000 a second
			r.Submit(ask(fleet, key, 5), deliver)
			key++
		}
		c.advance(20 * time.Millisecond)
		var still []*Decision
		due := running
		running = nil
		for _, d := range due {
			at, known := finishes[d]
			if !known {
				slot := d.Backend.Slot
				busyUntil[slot] = maxTime(busyUntil[slot], c.now).Add(time.Duration(d.uncached / 8000 * float64(time.Second)))
				at = busyUntil[slot]
				finishes[d] = at
			}
			if at.After(c.now) {
				still = append(still, d)
				continue
			}
			delete(finishes, d)
			d.FirstEvent()
			d.Release(Outcome{End: Served, AnswerTokens: 1})
		}
		running = append(running, still...)
		r.Tick()
	}
	// It may be overtaken by what comes 4 s / 0.2 after it, of which the fleet
	// serves a sixth as fast as it comes; and what was there before goes first.
	if long == 0 || long > 3*time.Minute {
		t.Errorf("the long request was sent after %v (0: never)", long)
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func TestTheQueueIsBounded(t *testing.T) {
	f := func(name string, hold HoldOptions, bodyBytes int) {
		t.Helper()
		r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.Hold = hold })
		sent(t, name, submit(r, ask(fleet, 1, 2000)))
		var held []*waiter
		for key := range 3 {
			req := ask(fleet, 2+key, 10)
			req.BodyBytes = bodyBytes
			held = append(held, submit(r, req))
		}
		waits(t, name, held[0])
		waits(t, name, held[1])
		if held[2].err != ErrHoldFull || held[2].held != nil {
			t.Errorf("%s: the third got %v, want ErrHoldFull", name, held[2].err)
		}
		held[0].held.Cancel()
		again := ask(fleet, 9, 10)
		again.BodyBytes = bodyBytes
		waits(t, name+": one has left", submit(r, again))
	}
	f("requests", HoldOptions{Requests: 2}, 100)
	f("bytes", HoldOptions{Requests: 100, Bytes: 250}, 100)
}

func TestNobodyIsHeldForever(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", holding)
	fleet[1].SetState(backends.Down)
	sent(t, "", submit(r, ask(fleet[:1], 1, 200_000)))
	busy, down := submit(r, ask(fleet, 2, 10)), submit(r, ask(fleet[1:], 3, 10))
	c.advance(59 * time.Second)
	late := submit(r, ask(fleet, 4, 10))
	r.Tick()
	waits(t, "59 s", busy)
	waits(t, "59 s", down)
	c.advance(time.Second)
	r.Tick()
	if busy.err != ErrHeldTooLong || down.err != ErrNoneReady {
		t.Errorf("after a minute: %v and %v, want ErrHeldTooLong and ErrNoneReady", busy.err, down.err)
	}
	waits(t, "1 s", late)
	if n := r.HeldRequests(); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
}

func TestWhoLeavesIsGoneAtOnce(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	busy := sent(t, "", submit(r, ask(fleet, 1, 2000)))
	if busy := submit(r, ask(fleet, 1, 2000)); busy.held == nil {
		t.Fatal("not held")
	} else if !busy.held.Cancel() || busy.held.Cancel() || r.HeldRequests() != 0 {
		t.Error("a cancelled request is still there, or can be cancelled twice")
	}
	left, stays := submit(r, ask(fleet, 2, 1)), submit(r, ask(fleet, 3, 1))
	left.held.Cancel()
	busy.FirstEvent()
	waits(t, "it left", left)
	sent(t, "it stayed", stays)
	if stays.held.Cancel() {
		t.Error("what was sent can be cancelled")
	}
}

func TestRequestsWaitForABackendToBecomeReady(t *testing.T) {
	for _, name := range []string{"prefix", "least-load"} {
		r, fleet, c := newFleet(t, 2, name, holding)
		fleet[0].SetState(backends.Down)
		fleet[1].SetState(backends.Draining)
		w := submit(r, ask(fleet, 1, 10))
		waits(t, name, w)
		c.advance(5 * time.Second)
		fleet[0].SetState(backends.Ready)
		r.Changed(fleet[0])
		if d := sent(t, name, w); d.Backend != fleet[0] || d.Held != 5*time.Second {
			t.Errorf("%s: sent to %s after %v", name, d.Backend.Name, d.Held)
		}
	}
}

func TestARetryWaitsOnlyForABackendThatHasNotFailedIt(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	if w := submit(r, ask(fleet, 1, 10), fleet...); w.err != ErrNoneReady {
		t.Errorf("all were tried: got %v, want ErrNoneReady at once", w.err)
	}
	fleet[1].SetState(backends.Down)
	w := submit(r, ask(fleet, 1, 10), fleet[0])
	waits(t, "the other may come back", w)
	fleet[1].SetState(backends.Ready)
	r.Tick()
	if d := sent(t, "it is back", w); d.Backend != fleet[1] {
		t.Errorf("sent to %s, which had failed it", d.Backend.Name)
	}
}

func TestOneModelsBacklogIsNotInAnothersWay(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	fleet[0].SetState(backends.Down)
	for key := range 300 {
		waits(t, "its only backend is down", submit(r, ask(fleet[:1], key, 1)))
	}
	sent(t, "another model's", submit(r, ask(fleet[1:], 1000, 500)))
}

func TestWithoutAQueueEverythingIsAnsweredAtOnce(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	for key := range 20 {
		sent(t, "no late binding", submit(r, ask(fleet, key, 500)))
	}
	fleet[0].SetState(backends.Down)
	if w := submit(r, ask(fleet, 1, 1)); w.err != ErrNoneReady {
		t.Errorf("got %v, want ErrNoneReady", w.err)
	}
}

func TestOtherPoliciesSendAtOnce(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "least-load", holding)
	for key := range 20 {
		sent(t, "", submit(r, ask(fleet, key, 500)))
	}
}

func TestRetryAfterIsTheTimeOfTheWorkAhead(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	f := func(name string, want time.Duration) {
		t.Helper()
		if got := r.RetryAfter(); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	f("nothing ahead", time.Second)
	sent(t, "", submit(r, ask(fleet, 1, 500))) // 32,000 tokens
	sent(t, "", submit(r, ask(fleet, 2, 500)))
	waits(t, "", submit(r, ask(fleet, 3, 200))) // 12,800
	f("76,800 tokens for two that compute 7,200 a second", 6*time.Second)
	for key := range 900 {
		waits(t, "", submit(r, ask(fleet, 4+key, 100)))
	}
	f("no longer than", time.Minute)
	fleet[0].SetState(backends.Down)
	fleet[1].SetState(backends.Down)
	f("nobody is ready", 5*time.Second)
}

func TestAFullBackendIsWaitedFor(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	fleet[0].MaxInFlight = 1
	running := sent(t, "", submit(r, ask(fleet, 1, 1)))
	running.FirstEvent()
	w := submit(r, ask(fleet, 2, 1))
	waits(t, "one is all that it may have", w)
	running.Release(Outcome{End: Served})
	sent(t, "it has none", w)
}

func TestPickLeavesTheQueueWithItsContext(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	sent(t, "", submit(r, ask(fleet, 1, 2000)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Pick(ctx, ask(fleet, 2, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
	if n := r.HeldRequests(); n != 0 {
		t.Errorf("%d held", n)
	}
}

func TestAnswersGrowAtTheSpeedThatWasLearned(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	for key := range 400 {
		d := sent(t, "", submit(r, ask(fleet, key, 1)))
		d.FirstEvent()
		c.advance(time.Second)
		d.Release(Outcome{End: Served, AnswerTokens: 100})
	}
	d := sent(t, "", submit(r, ask(fleet, 1, 1)))
	d.FirstEvent()
	before := r.cacheUsed(0, c.now)
	c.advance(10 * time.Second)
	if grown := r.cacheUsed(0, c.now) - before; grown < 980 || grown > 1000 {
		t.Errorf("an answer grew by %.0f tokens in ten seconds, want 1,000", grown)
	}
}

func TestARequestThatAllHaveFailedIsNotHeldBehindOthers(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	for _, b := range fleet {
		b.SetState(backends.Down)
	}
	waits(t, "none is ready", submit(r, ask(fleet, 1, 10)))
	if w := submit(r, ask(fleet, 2, 10), fleet...); !errors.Is(w.err, ErrNoneReady) {
		t.Errorf("all were tried, and another waits: got %v, want ErrNoneReady at once", w.err)
	}
}
