package router

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"warmroute/backends"
)

// lowPriority makes a low-priority request out of another.
func lowPriority(req *Request) *Request {
	req.Priority = 10
	return req
}

func limitingLowPriority(o *Options) {
	o.Queue = QueueSettings{Requests: 1000, LowPriorityRequests: 1000, LowPrioritySlowdown: 0.05}
}

// ended completes the response to a request.
func ended(d *Reservation) {
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed, OutputTokens: 10})
}

func TestLowPrioritySharesBackend(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", limitingLowPriority)
	chat := sent(t, "", submit(r, ask(fleet, 1, 10)))
	first := submit(r, lowPriority(ask(fleet, 2, 10))) // 640 tokens: 80 ms of prefill, as the chat
	waits(t, "the chat's prefill is not done", first)
	chat.RecordFirstEvent()
	sent(t, "it is done", first).RecordFirstEvent()
	second := submit(r, lowPriority(ask(fleet, 3, 10)))
	c.advance(time.Second)
	r.Tick()
	waits(t, "a twentieth of a second was paid off", second)
	sent(t, "an interactive request passes", submit(r, ask(fleet, 4, 10))).RecordFirstEvent()
	c.advance(2 * time.Second)
	r.Tick()
	sent(t, "the first is paid off", second)
}

func TestLowPriorityAfterInteractiveRequests(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", limitingLowPriority)
	ended(sent(t, "", submit(r, ask(fleet, 1, 10))))
	sent(t, "", submit(r, lowPriority(ask(fleet, 2, 1)))).RecordFirstEvent()
	c.advance(10 * 150 * time.Second)
	for key := range 5 {
		sent(t, "no interactive request for long", submit(r, lowPriority(ask(fleet, 3+key, blocksFor(0.1)))))
	}
}

func TestLowPriorityUsesUnreservedBackends(t *testing.T) {
	r, fleet, c := newFleet(t, 4, "prefix", limitingLowPriority)
	chat := sent(t, "", submit(r, ask(fleet, 1, 10)))
	chat.RecordFirstEvent()
	c.advance(time.Second)
	var open []*Reservation
	for key := range 3 {
		d := sent(t, "another backend is free", submit(r, lowPriority(ask(fleet, 10+key, blocksFor(1.1)))))
		if d.Backend == chat.Backend {
			t.Error("a low-priority request was sent to the backend that is reserved")
		}
		open = append(open, d)
	}
	queued := submit(r, lowPriority(ask(fleet, 20, 50)))
	waits(t, "their prefill queues are full", queued)
	queued.queued.Cancel()
	// When interactive requests need all of them, each has a small share for low-priority ones.
	for key := range 60 {
		for _, d := range open {
			d.RecordFirstEvent()
		}
		open = append(open, sent(t, "an interactive request", submit(r, ask(fleet[key%4:key%4+1], 30+key, 10))))
	}
	open[len(open)-1].RecordFirstEvent()
	for key := range 4 {
		sent(t, "a backend's share", submit(r, lowPriority(ask(fleet, 100+key, 50)))).RecordFirstEvent()
	}
	waits(t, "all have taken theirs", submit(r, lowPriority(ask(fleet, 104, 10))))
}

func TestLowPriorityPromotion(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", limitingLowPriority)
	sent(t, "", submit(r, ask(fleet, 1, 10))).RecordFirstEvent()
	sent(t, "", submit(r, lowPriority(ask(fleet, 2, 400)))).RecordFirstEvent() // 3.2 s of prefill, for longer than a minute
	f := func(key, priority int, wait time.Duration) *waiter {
		req := ask(fleet, key, 10)
		req.Priority, req.QueueTimeouts.Total = priority, wait
		return submit(r, req)
	}
	patient, hasty := f(3, 1, time.Minute), f(4, 50, 20*time.Second)
	c.advance(9 * time.Second)
	r.Tick()
	waits(t, "9 s", hasty)
	c.advance(time.Second)
	r.Tick()
	sent(t, "10 of 20 s, though its priority is lower", hasty).RecordFirstEvent()
	waits(t, "10 of 60 s", patient)
	if got := r.CountWaitingByClass(); got["low"] != 1 || got["normal"] != 0 {
		t.Errorf("queued by class: %v", got)
	}
}

func TestQueueTimeout(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue) // a minute
	sent(t, "", submit(r, ask(fleet, 1, 200_000)))
	f := func(key int, wait time.Duration) *waiter {
		req := ask(fleet, key, 10)
		req.QueueTimeouts.Total = wait
		return submit(r, req)
	}
	hour, plain, second := f(2, time.Hour), f(3, 0), f(4, time.Second)
	for _, step := range []struct {
		at   time.Duration
		over []*waiter
		wait []*waiter
	}{
		{time.Second, []*waiter{second}, []*waiter{hour, plain}},
		{time.Minute, []*waiter{plain}, []*waiter{hour}},
		{time.Hour, []*waiter{hour}, nil},
	} {
		c.now = time.Unix(1000, 0).Add(step.at)
		r.Tick()
		for _, w := range step.over {
			if w.err != ErrBusy {
				t.Errorf("after %v: got %v, want ErrBusy", step.at, w.err)
			}
		}
		for _, w := range step.wait {
			waits(t, step.at.String(), w)
		}
	}
}

// Many requests of all priorities and times, of which each is sent or refused in time.
func TestQueueTimeoutsRandomized(t *testing.T) {
	r, fleet, c := newFleet(t, 2, "prefix", limitingLowPriority)
	rng := rand.New(rand.NewPCG(1, 8))
	sent(t, "", submit(r, ask(fleet[:1], 1, 1_000_000))).RecordFirstEvent()
	sent(t, "", submit(r, ask(fleet[1:], 2, 1_000_000))).RecordFirstEvent()
	type queued struct {
		*waiter
		until time.Time
	}
	var all []queued
	refused := 0
	for step := range 2000 {
		req := ask(fleet[rng.IntN(2):], 10+step, 1+rng.IntN(500))
		req.Priority, req.QueueTimeouts.Total = rng.IntN(7)-3, time.Duration(1+rng.IntN(30_000))*time.Millisecond
		all = append(all, queued{submit(r, req), c.now.Add(req.QueueTimeouts.Total)})
		if w := all[rng.IntN(len(all))]; w.waits() && rng.IntN(10) == 0 {
			w.queued.Cancel()
			w.err = context.Canceled
		}
		c.advance(time.Duration(rng.IntN(100)) * time.Millisecond)
		r.Tick()
		for i, w := range all {
			switch late := !c.now.Before(w.until); {
			case w.waits() && late:
				t.Fatalf("step %d: request %d still waits %v after its time", step, i, c.now.Sub(w.until))
			case w.err == ErrBusy && !late:
				t.Fatalf("step %d: request %d was refused %v before its time", step, i, w.until.Sub(c.now))
			case w.err == ErrBusy:
				refused++
			case w.d != nil:
				w.d.RecordFirstEvent()
				w.d.Release(Outcome{End: Completed})
			}
		}
		all = slices.DeleteFunc(all, func(w queued) bool { return !w.waits() })
	}
	if got := r.CountWaiting(); got != len(all) || refused == 0 {
		t.Errorf("%d requests in the queue, want %d; %d were refused", got, len(all), refused)
	}
}

// Where all requests have one priority, it changes nothing.
func TestSinglePriorityNeedsNoHeadroom(t *testing.T) {
	play := func(priority int) (backends []string) {
		r, fleet, c := newFleet(t, 4, "prefix", limitingLowPriority)
		var open []*Reservation
		for key := range 2000 {
			req := ask(fleet, key%50, 10+key%90)
			req.Priority = priority
			r.Submit(req, func(d *Reservation, err error) { open = append(open, d) })
			c.advance(time.Duration(20+key%80) * time.Millisecond)
			for n := 0; n < len(open); n++ {
				backends = append(backends, open[n].Backend.Name)
			}
			for len(open) > 3 {
				d := open[0]
				open = open[1:]
				ended(d)
			}
		}
		return backends
	}
	normal, lowPriority := play(0), play(7)
	if len(normal) < 2000 || len(normal) != len(lowPriority) {
		t.Fatalf("%d and %d decisions", len(normal), len(lowPriority))
	}
	for i := range normal {
		if normal[i] != lowPriority[i] {
			t.Fatalf("decision %d is for %s, and for %s among low-priority requests", i, normal[i], lowPriority[i])
		}
	}
}

func TestLowPriorityDoesNotBlockTooLongPrompts(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", func(o *Options) {
		o.Queue = QueueSettings{Requests: 10, Bytes: 1000, LowPriorityRequests: 10, LowPrioritySlowdown: 0.05}
	})
	fleet[0].SetState(backends.Down)
	sent(t, "", submit(r, ask(fleet[1:], 1, 10))).RecordFirstEvent()
	sent(t, "", submit(r, lowPriority(ask(fleet[1:], 2, 100)))).RecordFirstEvent()
	waits(t, "low priority", submit(r, lowPriority(ask(fleet[1:], 3, 10))))
	large := ask(fleet[1:], 4, 10)
	large.BodyBytes = 2000
	sent(t, "there is room", submit(r, large))
}
