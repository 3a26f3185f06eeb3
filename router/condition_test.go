package router

import (
	"testing"
	"time"

	"warmroute/backends"
)

func TestCondition(t *testing.T) {
	s := newStalls(t, 1)
	b := s.fleet[0]
	expect := func(when string, want ConditionState, since time.Time) {
		t.Helper()
		c := s.r.Condition(b)
		if c.State != want || !since.IsZero() && !c.Since.Equal(since) || (c.Reason == "") != (want == Ready) {
			t.Errorf("%s: got %+v, want %s since %v", when, c, want, since)
		}
		if ready := s.r.CountReady(s.fleet); ready != 0 != (want == Ready) {
			t.Errorf("%s: %d are ready", when, ready)
		}
	}
	expect("at first", Ready, time.Time{})
	stuck := s.send(1, 640, true)
	began := s.clock.now
	s.pass(10*time.Second, nil)
	expect("no progress for 10 s", Stalled, began)
	stuck.Release(Outcome{End: ClientDisconnected})
	s.pass(time.Second, nil)
	expect("nothing is left there", Ready, time.Time{})

	slept := s.clock.now
	s.loads[0].Asleep, s.loads[0].AsleepSince = true, slept
	s.poll()
	expect("it sleeps", Asleep, slept)
	s.loads[0].Asleep = false
	s.poll()
	b.Drain()
	expect("drained", Draining, time.Time{})
	b.Undrain()
	d := s.send(2, 640, true)
	d.Release(Outcome{End: NotProcessed, Stopping: true})
	expect("it refuses because it stops", Stopping, s.clock.now)
}

func TestUnreadyModelLeavesHalfOfTheQueue(t *testing.T) {
	f := func(name string, hold QueueSettings) {
		t.Helper()
		r, fleet, _ := newFleet(t, 2, "prefix", func(o *Options) { o.Queue = hold })
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

func TestRetryAfterIsTheObservedTimeOfTheQueue(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", holding)
	running := sent(t, "", submit(r, ask(fleet, 1, 200)))
	for key := range 31 {
		waits(t, "", submit(r, ask(fleet, 2+key, 200)))
	}
	next := running
	for range 8 { // one every two seconds, though the prefill of each takes 1.6 s
		c.advance(2 * time.Second)
		waiting := r.queue.Len()
		next.RecordFirstEvent()
		next.Release(Outcome{End: Completed, AnswerTokens: 10})
		if r.queue.Len() != waiting-1 {
			t.Fatalf("%d wait, want %d", r.queue.Len(), waiting-1)
		}
		next = r.states[0].load.pending[0]
	}
	if got := r.RetryAfter(0); got < 40*time.Second || got > 50*time.Second {
		t.Errorf("23 wait and one leaves every two seconds: %v, want about 46 s", got)
	}
	c.advance(time.Minute)
	if got := r.RetryAfter(0); got != time.Minute {
		t.Errorf("none has left for a minute: %v, want a minute", got)
	}
}
