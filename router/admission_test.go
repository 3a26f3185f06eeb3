package router

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/router/queue"
)

func TestAdmission(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	long := sent(t, "an idle backend takes anything", submit(r, ask(fleet, 1, 1000)))
	second := submit(r, ask(fleet, 2, 1))
	waits(t, "64,000 tokens are pending", second)
	if n := r.CountWaiting(); n != 1 {
		t.Errorf("%d queued, want 1", n)
	}
	long.RecordFirstEvent()
	if d := sent(t, "its prefill is done", second); d.QueueTime != 0 || r.CountWaiting() != 0 {
		t.Errorf("queued for %v, %d still queued", d.QueueTime, r.CountWaiting())
	}
}

func TestSharedQueue(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	r.fleet.tenantMix.until = time.Time{}
	for key := range 10 {
		sent(t, "all are of one tenant", submit(r, ask(fleet, key, blocksFor(1))))
	}
	other := func(key int) *waiter {
		req := ask(fleet, key, 1)
		req.Tenant = 7
		return submit(r, req)
	}
	waits(t, "much is queued before that of another tenant", other(10))
	c.advance(time.Minute)
	r.Tick()
	if r.fleet.viewAll(&r.fleet.scratch, &r.callbacks, c.now).Shared {
		t.Error("shared, a minute after the last request of another tenant")
	}
}

// While the prefill rate is unknown a request that waits would wait for a guess.
func TestNoQueueWhileRateIsUnknown(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	if err := configure(r, Settings{Policy: "prefix", Queue: QueueSettings{Requests: 100, Bytes: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	setShared(r)
	submit(r, ask(fleet, 1, 1000))
	sent(t, "the rate is unknown", submit(r, ask(fleet, 2, 1000)))
	learnPrefillRate(r, testPrefillRate)
	waits(t, "the rate is known", submit(r, ask(fleet, 3, 1000)))
}

func TestRequestsWaitingInReplica(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	submit(r, ask(fleet, 1, 1)).d.RecordFirstEvent()
	poll := func(usage float64) {
		r.ObserveLoad(fleet[0], &backends.Load{
			CacheTokens: 100_000, KVKnown: true, KVCacheUsage: usage,
			Waiting: 3, WaitingForCapacity: 3, QueuesKnown: true, OwnInFlight: 4, PolledAt: c.now,
		})
	}
	poll(0.3)
	sent(t, "they wait for the next step", submit(r, ask(fleet, 2, 1)))
	poll(0.85)
	waits(t, "they wait for room", submit(r, ask(fleet, 3, 1)))
}

// Where several tenants send, what a replica cannot run at a time waits in the proxy.
func TestSequencesBeyondThoseThatRun(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	poll := func(running int, prompt float64) {
		c.advance(time.Second)
		r.ObserveLoad(fleet[0], &backends.Load{
			CacheTokens: 100_000, KVKnown: true, KVCacheUsage: 0.3, Running: running, Waiting: 3, WaitingForCapacity: 3, QueuesKnown: true,
			OwnInFlight: 7, PromptTokens: prompt, TokensKnown: true, PolledAt: c.now,
		})
	}
	setShared(r)
	for key := range 7 {
		submit(r, ask(fleet, key, 1)).d.RecordFirstEvent()
	}
	for i := range 4 {
		poll(4, float64(1000*i))
	}
	sent(t, "the limit is not known", submit(r, ask(fleet, 8, 1)))
	poll(4, 4000)
	poll(4, 5000)
	waits(t, "four run, and more wait", submit(r, ask(fleet, 9, 1)))
	poll(9, 6000)
	sent(t, "nine run: four was not the limit", submit(r, ask(fleet, 10, 1)))
}

func TestTickSendsAfterTime(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	submit(r, ask(fleet, 1, blocksFor(2)))
	w := submit(r, ask(fleet, 2, blocksFor(0.25)))
	r.Tick()
	waits(t, "nothing was worked off", w)
	c.advance(timeToWorkOff(1))
	r.Tick()
	waits(t, "too little was worked off, since long prompts take longer", w)
	c.advance(timeToWorkOff(0.5))
	r.Tick()
	sent(t, "more than half was worked off", w)
}

func TestKVAdmission(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	observe := func(l backends.Load) {
		l.CacheTokens, l.PolledAt = 10_000, c.now
		r.ObserveLoad(fleet[0], &l)
	}
	observe(backends.Load{})
	started := func(name string, w *waiter) *Reservation {
		t.Helper()
		d := sent(t, name, w)
		d.RecordFirstEvent()
		return d
	}
	first := started("an idle backend ignores the guard", submit(r, ask(fleet, 1, 165))) // 10,560 tokens
	small := submit(r, ask(fleet, 2, 1))
	waits(t, "the cache is full", small)
	shared := ask(fleet, 1, 100)
	copied := submit(r, shared)
	waits(t, "what is shared needs no room, but the guard's share is exceeded by what runs", copied)
	copied.queued.Cancel()
	first.Release(Outcome{End: Completed})
	started("the cache is free", small).Release(Outcome{End: Completed})

	half := started("", submit(r, ask(fleet, 3, 75))) // 4,800 tokens
	for range 20 {
		copied := started("copies of one prompt take its room once", submit(r, ask(fleet, 3, 75)))
		defer copied.Release(Outcome{End: Completed})
	}
	waits(t, "a prompt of 5,760 tokens does not fit", submit(r, ask(fleet, 4, 90)))
	c.advance(time.Minute) // outputs grow, at 40 tokens a second until learned
	r.Tick()
	waits(t, "the outputs have filled the cache", submit(r, ask(fleet, 5, 1)))
	half.Release(Outcome{End: Completed})
}

func TestKVAdmissionWithExternalUse(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	d := sent(t, "", submit(r, ask(fleet, 1, 10)))
	d.RecordFirstEvent()
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, KVCacheUsage: 0.99, KVKnown: true, PolledAt: c.now})
	w := submit(r, ask(fleet, 2, 10))
	waits(t, "640 tokens are ours, and 9,900 are in use", w)
	c.advance(4 * time.Second)
	r.Tick()
	sent(t, "three polls were missed", w)
}

func TestReplicaWaitingForCapacity(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	starve := func() {
		r.ObserveLoad(fleet[0], &backends.Load{WaitingForCapacity: 2, PolledAt: c.now})
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

func TestClaimedKVIsNotTaken(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, PolledAt: c.now})
	running := sent(t, "", submit(r, ask(fleet, 1, 75))) // 4,800 tokens
	running.RecordFirstEvent()
	first := ask(fleet, 2, 90) // 5,760
	first.Priority = -1
	large := submit(r, first)
	waits(t, "4,800 and 5,760 of 10,000 tokens", large)
	waits(t, "it fits, and would overtake", submit(r, ask(fleet, 3, 1)))
	running.Release(Outcome{End: Completed})
	sent(t, "the cache is free", large)
}

func TestOutputGrowth(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	for key := range 400 {
		d := sent(t, "", submit(r, ask(fleet, key, 1)))
		d.RecordFirstEvent()
		c.advance(time.Second)
		d.Release(Outcome{End: Completed, OutputTokens: 100})
	}
	d := sent(t, "", submit(r, ask(fleet, 1, 1)))
	d.RecordFirstEvent()
	before := ownKVTokens(r, 0, c.now)
	c.advance(5 * time.Second)
	if grown := ownKVTokens(r, 0, c.now) - before; grown < 490 || grown > 500 {
		t.Errorf("an output grew by %.0f tokens in five seconds, want 500", grown)
	}
}

func TestAllTriedIsNotQueued(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", withQueue)
	for _, b := range fleet {
		b.SetState(backends.Down)
	}
	waits(t, "none is ready", submit(r, ask(fleet, 1, 10)))
	if w := submit(r, ask(fleet, 2, 10), fleet...); !errors.Is(w.err, ErrNoneReady) {
		t.Errorf("all were tried, and another waits: got %v, want ErrNoneReady at once", w.err)
	}
}

func TestQueueBounds(t *testing.T) {
	f := func(name string, settings QueueSettings, bodyBytes int) {
		t.Helper()
		r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.Queue = settings })
		sent(t, name, submit(r, ask(fleet, 1, 2000)))
		var queued []*waiter
		for key := range 3 {
			req := ask(fleet, 2+key, 10)
			req.BodyBytes = bodyBytes
			queued = append(queued, submit(r, req))
		}
		waits(t, name, queued[0])
		waits(t, name, queued[1])
		if queued[2].err != ErrQueueFull || queued[2].queued != nil {
			t.Errorf("%s: the third got %v, want ErrQueueFull", name, queued[2].err)
		}
		queued[0].queued.Cancel()
		again := ask(fleet, 9, 10)
		again.BodyBytes = bodyBytes
		waits(t, name+": one has left", submit(r, again))
	}
	f("requests", QueueSettings{Requests: 2}, 100)
	f("bytes", QueueSettings{Requests: 100, Bytes: 250}, 100)
}

func TestQueueTimeoutErrors(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", withQueue)
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
	if busy.err != ErrBusy || down.err != ErrNoneReady {
		t.Errorf("after a minute: %v and %v, want ErrBusy and ErrNoneReady", busy.err, down.err)
	}
	waits(t, "1 s", late)
	if n := r.CountWaiting(); n != 1 {
		t.Errorf("%d queued, want 1", n)
	}
}

func TestCancel(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	busy := sent(t, "", submit(r, ask(fleet, 1, 2000)))
	if busy := submit(r, ask(fleet, 1, 2000)); busy.queued == nil {
		t.Fatal("not queued")
	} else if !busy.queued.Cancel() || busy.queued.Cancel() || r.CountWaiting() != 0 {
		t.Error("a cancelled request is still there, or can be cancelled twice")
	}
	left, stays := submit(r, ask(fleet, 2, 1)), submit(r, ask(fleet, 3, 1))
	left.queued.Cancel()
	busy.RecordFirstEvent()
	waits(t, "it left", left)
	sent(t, "it stayed", stays)
	if stays.queued.Cancel() {
		t.Error("what was sent can be cancelled")
	}
}

func TestCancelFreesClaim(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	r.ObserveLoad(fleet[0], &backends.Load{CacheTokens: 10_000, PolledAt: c.now})
	sent(t, "", submit(r, ask(fleet, 1, 75))).RecordFirstEvent() // 4,800 tokens
	first := ask(fleet, 2, 90)                                   // 5,760
	first.Priority = -1
	large, small := submit(r, first), submit(r, ask(fleet, 3, 1))
	waits(t, "it would overtake", small)
	large.queued.Cancel()
	sent(t, "nothing is before it", small)
}

func TestDrain(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", withQueue)
	fleet[1].SetState(backends.Down)
	busy := sent(t, "", submit(r, ask(fleet[:1], 1, 2000)))
	room := submit(r, ask(fleet, 2, 10))
	var down []*waiter
	for key := range queue.MaxTurns + 10 {
		down = append(down, submit(r, ask(fleet[1:], 10+key, 10)))
		waits(t, "until the end is near", down[key])
	}
	r.StartRefusingUnready()
	for _, w := range append(down, submit(r, ask(fleet[1:], 3, 10))) {
		if w.err != ErrNoneReady {
			t.Fatalf("its only backend is down: got %v, want ErrNoneReady", w.err)
		}
	}
	waits(t, "its backend is busy", room)
	busy.RecordFirstEvent()
	sent(t, "its backend has room", room)
}

func TestQueueUntilReady(t *testing.T) {
	for _, name := range []string{"prefix", "least-load"} {
		r, fleet, c := newFleet(t, 2, name, withQueue)
		fleet[0].SetState(backends.Down)
		fleet[1].SetState(backends.Draining)
		w := submit(r, ask(fleet, 1, 10))
		waits(t, name, w)
		c.advance(5 * time.Second)
		fleet[0].SetState(backends.Ready)
		r.BackendStateChanged(fleet[0])
		if d := sent(t, name, w); d.Backend != fleet[0] || d.QueueTime != 5*time.Second {
			t.Errorf("%s: sent to %s after %v", name, d.Backend.Name, d.QueueTime)
		}
	}
}

func TestRetryWaitsForUntriedBackend(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", withQueue)
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

func TestBacklogOfAnotherModel(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", withQueue)
	fleet[0].SetState(backends.Down)
	for key := range 300 {
		waits(t, "its only backend is down", submit(r, ask(fleet[:1], key, 1)))
	}
	sent(t, "another model's", submit(r, ask(fleet[1:], 1000, 500)))
}

// What the first model's requests want is on a backend of theirs that is busy,
// while the other one has a little room: each of them is looked at in full.
func TestRoundIsSharedByModels(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix", withQueue)
	hot := sent(t, "", submit(r, ask(fleet[:1], 1, 400)))
	c.advance(10 * time.Second)
	hot.RecordFirstEvent()
	hot.Release(Outcome{End: Completed})
	sent(t, "", submit(r, ask(fleet[:1], 2, 200)))             // 12,800 tokens
	sent(t, "", submit(r, ask(fleet[1:2], 3, blocksFor(1)-1))) // all but a block of a step's budget
	other := sent(t, "", submit(r, ask(fleet[2:], 4, 200)))
	for range queue.MaxTurns + 20 {
		waits(t, "busy", submit(r, ask(fleet[:2], 1, 402)))
	}
	w := submit(r, ask(fleet[2:], 5, 10))
	waits(t, "its only backend is busy", w)
	other.RecordFirstEvent()
	sent(t, "its only backend is idle", w)
}

func TestDisabledQueue(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix")
	for key := range 20 {
		sent(t, "no late binding", submit(r, ask(fleet, key, 500)))
	}
	fleet[0].SetState(backends.Down)
	if w := submit(r, ask(fleet, 1, 1)); w.err != ErrNoneReady {
		t.Errorf("got %v, want ErrNoneReady", w.err)
	}
}

func TestPoliciesWithoutQueue(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "least-load", withQueue)
	for key := range 20 {
		sent(t, "", submit(r, ask(fleet, key, 500)))
	}
}

func TestRetryAfterFromWorkAhead(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", withQueue)
	f := func(name string, want time.Duration) {
		t.Helper()
		if got := r.RetryAfter(0); got != want {
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
	f("no backend is ready", 5*time.Second)
}

func TestQueueForMaxInFlight(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	fleet[0].SetOptions(backends.Options{MaxInFlight: 1})
	running := sent(t, "", submit(r, ask(fleet, 1, 1)))
	running.RecordFirstEvent()
	w := submit(r, ask(fleet, 2, 1))
	waits(t, "one is all that it may have", w)
	running.Release(Outcome{End: Completed})
	sent(t, "it has none", w)
}

func TestManySequencesClaimSlots(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", withQueue)
	var running []*Reservation
	send := func(key int) *waiter {
		w := submit(r, ask(fleet, key, 1))
		c.advance(100 * time.Millisecond)
		return w
	}
	for _, b := range fleet {
		b.SetOptions(backends.Options{MaxInFlight: 8})
	}
	for key := range 16 {
		d := sent(t, "", send(key))
		d.RecordFirstEvent()
		running = append(running, d)
	}
	four := ask(fleet, 1000, 1)
	four.Sequences = 4
	many := submit(r, four)
	waits(t, "all places are taken", many)
	var later []*waiter
	for key := range 40 {
		later = append(later, send(100+key))
	}
	ended := 0
	for ; many.waits() && ended < 16; ended++ {
		running[ended].Release(Outcome{End: Completed, OutputTokens: 5})
	}
	// Eight ends leave four places on one of the two.
	if d := sent(t, "all that ran before it has ended", many); ended > 8 {
		t.Errorf("sent to %s only when %d others had ended, want 8 at most", d.Backend.Name, ended)
	}
	overtook := 0
	for _, w := range later {
		if w.d != nil {
			overtook++
		}
	}
	if overtook > ended-4 {
		t.Errorf("%d of the %d places that fell free went to requests behind it", overtook, ended)
	}
}

func TestPickContextError(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", withQueue)
	sent(t, "", submit(r, ask(fleet, 1, 2000)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Pick(ctx, ask(fleet, 2, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
	if n := r.CountWaiting(); n != 0 {
		t.Errorf("%d queued", n)
	}
}

// inBubble runs a router with the wall clock of a synctest bubble, and Run.
func inBubble(t *testing.T, queueTimeout time.Duration, f func(t *testing.T, r *Router, fleet []*backends.Backend)) {
	settings := QueueSettings{Requests: 10, NoneReadyTimeout: queueTimeout, BusyTimeout: queueTimeout}
	synctest.Test(t, func(t *testing.T) {
		r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.Queue, o.Now = settings, time.Now })
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.Run(ctx) })
		f(t, r, fleet)
		cancel()
		running.Wait()
	})
}

func TestPickWaits(t *testing.T) {
	inBubble(t, time.Minute, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		busy := mustPick(t, r, ask(fleet, 1, 2000))
		time.AfterFunc(3*time.Second, busy.RecordFirstEvent)
		start := time.Now()
		if d := mustPick(t, r, ask(fleet, 2, 100)); time.Since(start) != 3*time.Second || d.QueueTime != 3*time.Second {
			t.Errorf("sent after %v, and QueueTime says %v; want 3 s", time.Since(start), d.QueueTime)
		}
	})
}

func TestRunSendsAfterTime(t *testing.T) {
	inBubble(t, time.Minute, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		least, most := timeToWorkOff(1), timeToWorkOff(1.5)
		for key := range 2 { // the second time after Run has rested
			busy := mustPick(t, r, ask(fleet, key, blocksFor(2)))
			start := time.Now()
			d := mustPick(t, r, ask(fleet, 10+key, blocksFor(0.25)))
			if waited := time.Since(start); waited < least || waited > most {
				t.Errorf("sent after %v, want %v to %v", waited, least, most)
			}
			busy.RecordFirstEvent()
			d.RecordFirstEvent()
			time.Sleep(time.Minute)
		}
	})
}

func TestRunTimesOutQueued(t *testing.T) {
	inBubble(t, 10*time.Second, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		mustPick(t, r, ask(fleet, 1, 100_000))
		start := time.Now()
		_, err := r.Pick(t.Context(), ask(fleet, 2, 100))
		if waited := time.Since(start); err != ErrBusy || waited < 10*time.Second || waited > 10*time.Second+TickInterval {
			t.Errorf("got %v after %v, want ErrBusy after 10 s", err, waited)
		}
	})
}

func TestPickCancelled(t *testing.T) {
	inBubble(t, time.Minute, func(t *testing.T, r *Router, fleet []*backends.Backend) {
		mustPick(t, r, ask(fleet, 1, 100_000))
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		start := time.Now()
		if _, err := r.Pick(ctx, ask(fleet, 2, 100)); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 2*time.Second {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
		if n := r.CountWaiting(); n != 0 {
			t.Errorf("%d queued", n)
		}
	})
}

// Everything at once, from many goroutines: every request gets one result, and
// nothing is left behind.
func TestConcurrentQueueing(t *testing.T) {
	r, fleet, _ := newFleet(t, 3, "prefix", func(o *Options) {
		o.Queue = QueueSettings{Requests: 50, Bytes: 40_000, NoneReadyTimeout: 50 * time.Millisecond, BusyTimeout: 50 * time.Millisecond}
		o.Now = time.Now
	})
	ctx, cancel := context.WithCancel(t.Context())
	var around, clients sync.WaitGroup
	around.Go(func() { r.Run(ctx) })
	around.Go(func() {
		for ctx.Err() == nil {
			for _, b := range fleet {
				r.ObserveLoad(b, &backends.Load{CacheTokens: 30_000, KVKnown: true, KVCacheUsage: 0.2, PolledAt: time.Now()})
			}
			fleet[0].SetState(backends.Down)
			r.BackendStateChanged(fleet[0])
			r.ForgetCache(fleet[0])
			fleet[0].SetState(backends.Ready)
			r.BackendStateChanged(fleet[0])
			r.RetryAfter(0)
		}
	})
	for g := range 16 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 3))
			for range 300 {
				req := ask(fleet, rng.IntN(40), 1+rng.IntN(60))
				req.BodyBytes, req.Priority, req.Tenant = 1000, rng.IntN(2), rng.Uint64()
				req.Streams = rng.IntN(2) == 0
				limit, stop := context.WithTimeout(ctx, time.Duration(rng.IntN(20))*time.Millisecond)
				d, err := r.Pick(limit, req)
				stop()
				if err != nil {
					continue
				}
				if rng.IntN(2) == 0 {
					d.RecordFirstEvent()
				}
				d.Release(Outcome{End: End(rng.IntN(4)), OutputTokens: rng.IntN(30)})
			}
		})
	}
	clients.Wait()
	cancel()
	around.Wait()
	if n := r.CountWaiting(); n != 0 {
		t.Errorf("%d wait", n)
	}
	for i, b := range fleet {
		if n := b.InFlight.Load(); n != 0 {
			t.Errorf("%s: %d in flight", b.Name, n)
		}
		expectEmptyAccount(t, "at the end", r, i, time.Now())
	}
}

func TestUnreadyModelsQueueShare(t *testing.T) {
	f := func(name string, settings QueueSettings) {
		t.Helper()
		r, fleet, _ := newFleet(t, 2, "prefix", func(o *Options) { o.Queue = settings })
		down, up := fleet[:1], fleet[1:]
		down[0].SetState(backends.Down)
		sized := func(fleet []*backends.Backend, key, blocks int) *Request {
			req := ask(fleet, key, blocks)
			req.BodyBytes = 100
			return req
		}
		waits(t, name, submit(r, sized(down, 1, 10)))
		waits(t, name, submit(r, sized(down, 2, 10)))
		if w := submit(r, sized(down, 3, 10)); w.err != ErrQueueFull {
			t.Errorf("%s: a third one for the model that is down got %v, want ErrQueueFull", name, w.err)
		}
		busy := sent(t, name, submit(r, sized(up, 4, 2000)))
		waits(t, name, submit(r, sized(up, 5, 10)))
		waits(t, name, submit(r, sized(up, 6, 10)))
		if w := submit(r, sized(up, 7, 10)); w.err != ErrQueueFull {
			t.Errorf("%s: more than the queue takes: %v, want ErrQueueFull", name, w.err)
		}
		busy.RecordFirstEvent()
		busy.Release(Outcome{End: Completed})
	}
	f("in number", QueueSettings{Requests: 4})
	f("in bytes", QueueSettings{Requests: 100, Bytes: 400})

	r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.Queue = QueueSettings{Requests: 4} })
	fleet[0].SetState(backends.Down)
	for key := range 4 {
		waits(t, "no backend of the fleet is ready", submit(r, ask(fleet, key, 10)))
	}
}

func TestRetryAfterFromDepartures(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	next := sent(t, "", submit(r, ask(fleet, 1, 300)))
	for key := range 31 {
		r.Submit(ask(fleet, 2+key, 300), func(d *Reservation, _ error) { next = d })
	}
	if n := r.CountWaiting(); n != 31 {
		t.Fatalf("%d wait, want 31", n)
	}
	for range 8 { // one every two seconds, though the prefill of each takes 2.4 s
		c.advance(2 * time.Second)
		waiting := r.admission.queue.Len()
		running := next
		running.RecordFirstEvent() // the next one is sent
		running.Release(Outcome{End: Completed, OutputTokens: 10})
		if r.admission.queue.Len() != waiting-1 {
			t.Fatalf("%d wait, want %d", r.admission.queue.Len(), waiting-1)
		}
	}
	if got := r.RetryAfter(0); got < 40*time.Second || got > 50*time.Second {
		t.Errorf("23 wait and one leaves every two seconds: %v, want about 46 s", got)
	}
	c.advance(time.Minute)
	if got := r.RetryAfter(0); got != time.Minute {
		t.Errorf("none has left for a minute: %v, want a minute", got)
	}
}
