package router

import (
	"errors"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

// waiter is a request that was submitted, and what became of it.
type waiter struct {
	held *Ticket
	d    *Decision
	err  error
}

func (w *waiter) waits() bool { return w.d == nil && w.err == nil }

func submit(r *Router, req *Request, tried ...*backends.Backend) *waiter {
	w := &waiter{}
	w.held = r.Submit(req, func(d *Decision, err error) { w.d, w.err = d, err }, tried...)
	return w
}

func holding(o *Options) {
	o.Queue = QueueSettings{Requests: 1000, Bytes: 1 << 28, BatchRequests: 1000, Timeout: time.Minute}
}

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
	if n := r.WaitingRequests(); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
	long.RecordFirstEvent()
	if d := sent(t, "its prefill is done", second); d.QueueTime != 0 || r.WaitingRequests() != 0 {
		t.Errorf("held for %v, %d still held", d.QueueTime, r.WaitingRequests())
	}
}

func TestAStepIsFilled(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	f := func(name string, budget int) {
		t.Helper()
		limit := budget / 2
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
			t.Errorf("%s: %d tokens pending, want as many as fit into half of %d", name, pending, budget)
		}
		for _, d := range open {
			d.Release(Outcome{End: NotProcessed})
		}
	}
	f("until learned", 8192)
	largest := func(tokens int) {
		r.ObserveLoad(fleet[0], &backends.Load{StepTokens: tokens, ScrapedAt: c.now})
	}
	step := 1000 // a prompt that nobody holds
	fill := func() {
		step += 3
		for key := range 3 {
			d := sent(t, "an idle backend", submit(r, ask(fleet, step+key, 200)))
			d.RecordFirstEvent()
			d.Release(Outcome{End: Truncated})
		}
	}
	largest(4096)
	f("its largest step may not have been full", 8192)
	fill()
	largest(4096)
	f("learned", 4096)
	r.ForgetCache(fleet[0])
	largest(128)
	f("a restarted replica that has done little", 8192)
	fill()
	largest(128)
	f("no scheduler's budget", 2048)
	r.ObserveLoad(fleet[0], &backends.Load{StepTokens: 1 << 17, ScrapedAt: c.now})
	f("a very large budget", 16384)
	r.settings.Queue.StepTokens = 3072
	f("configured", 3072)
}

func TestTimeAloneMakesRoom(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	submit(r, ask(fleet, 1, 200)) // 12,800 tokens
	w := submit(r, ask(fleet, 2, 20))
	r.Tick()
	waits(t, "nothing was worked off", w)
	c.advance(1500 * time.Millisecond)
	r.Tick()
	if d := sent(t, "10,800 tokens were worked off", w); d.QueueTime != 1500*time.Millisecond {
		t.Errorf("held for %v, want 1.5 s", d.QueueTime)
	}
}

func TestACacheIsNotOverfilled(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	observe := func(l backends.Load) {
		l.CacheTokens, l.ScrapedAt = 10_000, c.now
		r.ObserveLoad(fleet[0], &l)
	}
	observe(backends.Load{})
	started := func(name string, w *waiter) *Decision {
		t.Helper()
		d := sent(t, name, w)
		d.RecordFirstEvent()
		return d
	}
	first := started("an idle backend ignores the guard", submit(r, ask(fleet, 1, 150))) // 9,600 tokens
	small := submit(r, ask(fleet, 2, 1))
	waits(t, "the cache is full", small)
	shared := ask(fleet, 1, 100)
	copied := submit(r, shared)
	waits(t, "what is shared needs no room, but the guard's share is exceeded by what runs", copied)
	copied.held.Cancel()
	first.Release(Outcome{End: Completed})
	started("the cache is free", small).Release(Outcome{End: Completed})

	half := started("", submit(r, ask(fleet, 3, 75))) // 4,800 tokens
	for range 20 {
		copied := started("copies of one prompt take its room once", submit(r, ask(fleet, 3, 75)))
		defer copied.Release(Outcome{End: Completed})
	}
	waits(t, "another prompt of that length does not fit", submit(r, ask(fleet, 4, 75)))
	c.advance(time.Minute) // answers grow, at 40 tokens a second until learned
	r.Tick()
	waits(t, "the answers have filled the cache", submit(r, ask(fleet, 5, 1)))
	half.Release(Outcome{End: Completed})
}

func TestWhatOthersKeepInACacheCounts(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	d := sent(t, "", submit(r, ask(fleet, 1, 10)))
	d.RecordFirstEvent()
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, KVCacheUsage: 0.9, KVKnown: true, ScrapedAt: c.now})
	w := submit(r, ask(fleet, 2, 10))
	waits(t, "640 tokens are ours, and 9,000 are in use", w)
	c.advance(4 * time.Second)
	r.Tick()
	sent(t, "three polls were missed", w)
}

func TestAReplicaWithRequestsWaitingForRoomGetsNoMore(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	starve := func() {
		r.ObserveLoad(fleet[0], &backends.Load{WaitingForCapacity: 2, ScrapedAt: c.now})
	}
	a, b := sent(t, "", submit(r, ask(fleet, 1, 1))), sent(t, "", submit(r, ask(fleet, 2, 1)))
	starve()
	w := submit(r, ask(fleet, 3, 1))
	waits(t, "two requests wait for capacity", w)
	a.RecordFirstEvent()
	waits(t, "one of them started", w)
	b.RecordFirstEvent()
	sent(t, "both of them started", w).RecordFirstEvent()
	starve()
	w = submit(r, ask(fleet, 4, 1))
	waits(t, "two others wait", w)
	c.advance(4 * time.Second)
	r.Tick()
	sent(t, "the word is old", w)
}

func TestWhatWaitsIsNotOvertakenOnItsBackend(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	sent(t, "", submit(r, ask(fleet[:1], 1, 32)))   // 2,048 tokens
	sent(t, "", submit(r, ask(fleet[1:], 2, 2000))) // and 128,000 on the other one
	first := ask(fleet, 3, 100)
	first.Priority = -1
	waits(t, "6,400 tokens beside 2,048", submit(r, first))
	waits(t, "it fits, and would overtake", submit(r, ask(fleet, 4, 1)))
	urgent := ask(fleet, 5, 1)
	urgent.Priority = -2
	sent(t, "it is first", submit(r, urgent))
}

func TestWhatWaitsForRoomInACacheIsNotOvertaken(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, ScrapedAt: c.now})
	running := sent(t, "", submit(r, ask(fleet, 1, 75))) // 4,800 tokens
	running.RecordFirstEvent()
	first := ask(fleet, 2, 80) // 5,120
	first.Priority = -1
	large := submit(r, first)
	waits(t, "4,800 and 5,120 of 9,500 tokens", large)
	waits(t, "it fits, and would overtake", submit(r, ask(fleet, 3, 1)))
	running.Release(Outcome{End: Completed})
	sent(t, "the cache is free", large)
}

func TestWhatHasWaitedSettlesForOneBackend(t *testing.T) {
	r, _, c := newFleet(t, 3, "prefix", holding)
	r.decision.now = c.now
	r.decision.candidates = []policy.Candidate{{Slot: 0}, {Slot: 2}}
	f := func(name string, waitsFor int, waited time.Duration, want int) {
		t.Helper()
		h := &Ticket{waitsFor: waitsFor, item: queue.Item[*Ticket]{Arrived: c.now.Add(-waited)}}
		if got := r.settle(h, 0); got != want {
			t.Errorf("%s: it waits for candidate %d, want %d", name, got, want)
		}
	}
	f("the cheapest at first", 2, time.Second, 0)
	f("later the one that it has a claim to", 2, 2*time.Second, 1)
	f("unless that is gone", 1, 2*time.Second, 0)
	f("or it never waited for one", nowhere, 2*time.Second, 0)
}

func TestAnswersGrowAtTheSpeedThatWasLearned(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	for key := range 400 {
		d := sent(t, "", submit(r, ask(fleet, key, 1)))
		d.RecordFirstEvent()
		c.advance(time.Second)
		d.Release(Outcome{End: Completed, AnswerTokens: 100})
	}
	d := sent(t, "", submit(r, ask(fleet, 1, 1)))
	d.RecordFirstEvent()
	before := r.kvTokens(0, c.now)
	c.advance(5 * time.Second)
	if grown := r.kvTokens(0, c.now) - before; grown < 490 || grown > 500 {
		t.Errorf("an answer grew by %.0f tokens in five seconds, want 500", grown)
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
