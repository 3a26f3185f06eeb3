package router

import (
	"context"
	"errors"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router/queue"
)

func TestTheQueueIsBounded(t *testing.T) {
	f := func(name string, hold QueueSettings, bodyBytes int) {
		t.Helper()
		r, fleet, _ := newFleet(t, 1, "prefix", func(o *Options) { o.Queue = hold })
		sent(t, name, submit(r, ask(fleet, 1, 2000)))
		var held []*waiter
		for key := range 3 {
			req := ask(fleet, 2+key, 10)
			req.BodyBytes = bodyBytes
			held = append(held, submit(r, req))
		}
		waits(t, name, held[0])
		waits(t, name, held[1])
		if held[2].err != ErrQueueFull || held[2].held != nil {
			t.Errorf("%s: the third got %v, want ErrQueueFull", name, held[2].err)
		}
		held[0].held.Cancel()
		again := ask(fleet, 9, 10)
		again.BodyBytes = bodyBytes
		waits(t, name+": one has left", submit(r, again))
	}
	f("requests", QueueSettings{Requests: 2}, 100)
	f("bytes", QueueSettings{Requests: 100, Bytes: 250}, 100)
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
	if busy.err != ErrQueueTimeout || down.err != ErrNoneReady {
		t.Errorf("after a minute: %v and %v, want ErrQueueTimeout and ErrNoneReady", busy.err, down.err)
	}
	waits(t, "1 s", late)
	if n := r.WaitingRequests(); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
}

func TestWhoLeavesIsGoneAtOnce(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	busy := sent(t, "", submit(r, ask(fleet, 1, 2000)))
	if busy := submit(r, ask(fleet, 1, 2000)); busy.held == nil {
		t.Fatal("not held")
	} else if !busy.held.Cancel() || busy.held.Cancel() || r.WaitingRequests() != 0 {
		t.Error("a cancelled request is still there, or can be cancelled twice")
	}
	left, stays := submit(r, ask(fleet, 2, 1)), submit(r, ask(fleet, 3, 1))
	left.held.Cancel()
	busy.RecordFirstEvent()
	waits(t, "it left", left)
	sent(t, "it stayed", stays)
	if stays.held.Cancel() {
		t.Error("what was sent can be cancelled")
	}
}

func TestWhoLeavesFreesWhatItHadReserved(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	sent(t, "", submit(r, ask(fleet, 1, 40))) // 2,560 tokens
	first := ask(fleet, 2, 60)                // 3,840: more than is left of half a step
	first.Priority = -1
	large, small := submit(r, first), submit(r, ask(fleet, 3, 1))
	waits(t, "it would overtake", small)
	large.held.Cancel()
	sent(t, "nothing is before it", small)
}

func TestWhoStopsWaitsForRoomOnly(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", holding)
	fleet[1].SetState(backends.Down)
	busy := sent(t, "", submit(r, ask(fleet[:1], 1, 2000)))
	room := submit(r, ask(fleet, 2, 10))
	var down []*waiter
	for key := range queue.MaxTurns + 10 {
		down = append(down, submit(r, ask(fleet[1:], 10+key, 10)))
		waits(t, "until the end is near", down[key])
	}
	r.Drain()
	for _, w := range append(down, submit(r, ask(fleet[1:], 3, 10))) {
		if w.err != ErrNoneReady {
			t.Fatalf("its only backend is down: got %v, want ErrNoneReady", w.err)
		}
	}
	waits(t, "its backend is busy", room)
	busy.RecordFirstEvent()
	sent(t, "its backend has room", room)
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
		r.BackendChanged(fleet[0])
		if d := sent(t, name, w); d.Backend != fleet[0] || d.QueueTime != 5*time.Second {
			t.Errorf("%s: sent to %s after %v", name, d.Backend.Name, d.QueueTime)
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

// What the first model's requests want is on a backend of theirs that is busy,
// while the other one has a little room: each of them is looked at in full.
func TestARoundIsNotUsedUpByOneModel(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix", holding)
	hot := sent(t, "", submit(r, ask(fleet[:1], 1, 400)))
	c.advance(10 * time.Second)
	hot.RecordFirstEvent()
	hot.Release(Outcome{End: Completed})
	sent(t, "", submit(r, ask(fleet[:1], 2, 200))) // 12,800 tokens
	sent(t, "", submit(r, ask(fleet[1:2], 3, 62))) // 3,968
	other := sent(t, "", submit(r, ask(fleet[2:], 4, 200)))
	for range queue.MaxTurns + 20 {
		waits(t, "busy", submit(r, ask(fleet[:2], 1, 402)))
	}
	w := submit(r, ask(fleet[2:], 5, 10))
	waits(t, "its only backend is busy", w)
	other.RecordFirstEvent()
	sent(t, "its only backend is idle", w)
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
	f("nobody is ready", 5*time.Second)
}

func TestAFullBackendIsWaitedFor(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	fleet[0].SetOptions(backends.Options{MaxInFlight: 1})
	running := sent(t, "", submit(r, ask(fleet, 1, 1)))
	running.RecordFirstEvent()
	w := submit(r, ask(fleet, 2, 1))
	waits(t, "one is all that it may have", w)
	running.Release(Outcome{End: Completed})
	sent(t, "it has none", w)
}

func TestARequestThatCountsForManyGetsItsPlaces(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", holding)
	var running []*Decision
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
		running[ended].Release(Outcome{End: Completed, AnswerTokens: 5})
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

func TestPickLeavesTheQueueWithItsContext(t *testing.T) {
	r, fleet, _ := newFleet(t, 1, "prefix", holding)
	sent(t, "", submit(r, ask(fleet, 1, 2000)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Pick(ctx, ask(fleet, 2, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
	if n := r.WaitingRequests(); n != 0 {
		t.Errorf("%d held", n)
	}
}
