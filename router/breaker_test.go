package router

import (
	"context"
	"testing"
	"time"

	"warmroute/backends"
)

// breakers is a fleet whose breakers open after 3 failures, for a second at first.
type breakers struct {
	t     *testing.T
	r     *Router
	fleet []*backends.Backend
	clock *clock
}

func newBreakers(t *testing.T, n int, change ...func(*Options)) *breakers {
	change = append(change, func(o *Options) { o.Breaker = BreakerSettings{Failures: 3, OpenTime: time.Second} })
	r, fleet, c := newFleet(t, n, "prefix", change...)
	return &breakers{t, r, fleet, c}
}

// send sends a request to the backend of that slot, whatever the others are like.
func (s *breakers) send(slot int) *Reservation {
	s.t.Helper()
	return mustPick(s.t, s.r, ask(s.fleet[slot:slot+1], 1, 4))
}

// fail makes so many requests fail there, one after another.
func (s *breakers) fail(slot, times int) {
	s.t.Helper()
	for range times {
		d := s.send(slot)
		s.clock.advance(time.Millisecond)
		d.Release(Outcome{Failed: true, End: NotProcessed})
	}
}

// next is where the next request goes, on all of the fleet.
func (s *breakers) next() *Reservation {
	s.t.Helper()
	return mustPick(s.t, s.r, ask(s.fleet, 1, 4))
}

func (s *breakers) goesTo(when string, want int) {
	s.t.Helper()
	d := s.next()
	if d.Backend.Slot != want {
		s.t.Errorf("%s: went to backend %d, want %d", when, d.Backend.Slot, want)
	}
	d.Release(Outcome{End: ClientDisconnected})
}

func (s *breakers) is(when string, slot int, want BreakerState, opens uint64) {
	s.t.Helper()
	if state, n := breakerOf(s.r, s.fleet[slot]); state != want || n != opens {
		s.t.Errorf("%s: breaker of %d is %d after %d times; want %d, %d", when, slot, state, n, want, opens)
	}
}

func TestBreakerOpensAndCloses(t *testing.T) {
	s := newBreakers(t, 2)
	s.send(0).Release(Outcome{End: Completed}) // it holds the prompt
	s.fail(0, 2)
	s.goesTo("after two failures", 0)
	s.fail(0, 1)
	s.is("after three", 0, BreakerOpen, 1)
	s.goesTo("after three failures", 1)

	s.clock.advance(time.Second)
	s.is("after a second", 0, BreakerHalfOpen, 1)
	try := s.next()
	if try.Backend.Slot != 0 {
		t.Fatal("it is not tried again")
	}
	s.goesTo("while it is tried", 1)
	s.is("while it is tried", 0, BreakerHalfOpen, 1)
	try.RecordFirstEvent()
	s.is("after the first event", 0, BreakerClosed, 1)
	s.goesTo("after the first event", 0)
	try.Release(Outcome{End: Completed})
}

func TestProbePrecedesCost(t *testing.T) {
	s := newBreakers(t, 2)
	s.send(1).Release(Outcome{End: Completed})
	s.fail(0, 3)
	s.goesTo("open", 1)
	s.clock.advance(time.Second)
	s.goesTo("half-open", 0)
}

func TestProbeDelayDoubles(t *testing.T) {
	s := newBreakers(t, 2)
	s.fail(0, 3)
	for i, wait := range []time.Duration{1, 2, 4, 4, 4} {
		s.clock.advance(wait*time.Second - time.Millisecond)
		s.goesTo("just before its time", 1)
		s.clock.advance(time.Millisecond)
		try := s.next()
		if try.Backend.Slot != 0 {
			t.Fatalf("not tried after %d s, the %d. time", wait, i+1)
		}
		try.Release(Outcome{End: NotProcessed, Failed: true})
		s.is("probe failed", 0, BreakerOpen, uint64(i+2))
	}
}

func TestProbeWithoutOutcomeIsRepeated(t *testing.T) {
	for name, end := range map[string]Outcome{"its client left": {End: ClientDisconnected}, "the client's own fault": {End: NotProcessed}} {
		s := newBreakers(t, 2)
		s.fail(0, 3)
		s.clock.advance(time.Second)
		first := s.next()
		s.goesTo("one is on its way", 1)
		first.Release(end)
		s.goesTo(name, 0)
		s.is(name, 0, BreakerHalfOpen, 1)
	}
}

// A replica with a full queue must not be the first choice of everything.
func TestProbeRefusedByFullQueue(t *testing.T) {
	s := newBreakers(t, 2)
	under := s.send(0)
	under.RecordFirstEvent()
	s.fail(0, 3)
	s.clock.advance(time.Second)
	for _, delay := range []time.Duration{time.Second, time.Second, 4 * time.Second, 16 * time.Second} {
		under.RecordOutput()
		try := s.next()
		if try.Backend.Slot != 0 {
			t.Fatal("it is not tried")
		}
		try.Release(Outcome{End: NotProcessed, Failed: true, QueueFull: true})
		s.is("its queue is full", 0, BreakerOpen, 1)
		s.goesTo("after the try", 1)
		s.clock.advance(delay - time.Millisecond)
		s.goesTo("just before the next", 1)
		s.clock.advance(time.Millisecond)
	}
	s.next().Release(Outcome{End: Completed})
	s.is("after a response", 0, BreakerClosed, 1)
	under.Release(Outcome{End: Completed})
}

// It is known to have no place for a second.
func TestFullReplicaIsNotProbed(t *testing.T) {
	s := newBreakers(t, 2)
	s.fail(0, 3)
	s.clock.advance(900 * time.Millisecond)
	s.send(0).Release(Outcome{End: NotProcessed, Failed: true, QueueFull: true})
	s.clock.advance(100 * time.Millisecond)
	s.goesTo("due and full", 1)
	s.clock.advance(200 * time.Millisecond)
	s.goesTo("due", 0)
}

func TestDisabledBreaker(t *testing.T) {
	s := newBreakers(t, 2)
	s.fail(0, 3)
	s.is("on", 0, BreakerOpen, 1)
	reconfigured(t, s.r, func(o *Options) { o.Breaker = BreakerSettings{} })
	s.is("off", 0, BreakerClosed, 1)
	s.fail(0, 5)
	s.is("off", 0, BreakerClosed, 1)
}

func TestBreakerOutcomes(t *testing.T) {
	failed, refused, left := Outcome{End: NotProcessed, Failed: true}, Outcome{End: NotProcessed}, Outcome{End: ClientDisconnected}
	for name, c := range map[string]struct {
		ends []Outcome
		open bool
	}{
		"refusals":                        {[]Outcome{failed, failed, failed}, true},
		"4xx":                             {[]Outcome{refused, refused, refused, refused}, false},
		"clients that leave":              {[]Outcome{left, left, left, left}, false},
		"a response between":              {[]Outcome{failed, failed, {End: Completed}, failed, failed}, false},
		"a 4xx between":                   {[]Outcome{failed, failed, refused, failed}, true},
		"truncated responses":             {[]Outcome{{End: Truncated, Failed: true}, {End: Truncated, Failed: true}, failed}, true},
		"one that another has to process": {[]Outcome{{End: NotProcessed, Failed: true, Stalled: true}}, true},
	} {
		s := newBreakers(t, 1)
		for _, o := range c.ends {
			s.send(0).Release(o)
			s.clock.advance(time.Millisecond)
		}
		if state, _ := breakerOf(s.r, s.fleet[0]); (state == BreakerOpen) != c.open {
			t.Errorf("%s: state %d", name, state)
		}
	}
}

func TestAllBreakersOpen(t *testing.T) {
	s := newBreakers(t, 3)
	for slot := range s.fleet {
		s.fail(slot, 3)
	}
	d := s.next()
	s.is("sent in spite of it", d.Backend.Slot, BreakerOpen, 1)
	s.clock.advance(time.Millisecond)
	d.Release(Outcome{End: Completed})
	s.is("it works", d.Backend.Slot, BreakerClosed, 1)
}

func TestBreakerClosesOnRecovery(t *testing.T) {
	s := newBreakers(t, 2)
	s.fail(0, 3)
	s.fleet[0].SetState(backends.Down)
	s.r.BackendStateChanged(s.fleet[0])
	s.is("down", 0, BreakerOpen, 1)
	s.fleet[0].SetState(backends.Ready)
	s.r.BackendStateChanged(s.fleet[0])
	s.is("back", 0, BreakerClosed, 1)
}

// A whole response can take minutes; the engine's counters show sooner that it works.
func TestProbeSucceedsByCounters(t *testing.T) {
	s := newStalls(t, 2)
	s.r.fleet.settings.Breaker = BreakerSettings{Failures: 1, OpenTime: time.Second}
	s.send(1, 64, false).Release(Outcome{End: NotProcessed, Failed: true})
	s.pass(time.Second, nil)
	try := s.send(1, 64, false)
	s.pass(3*time.Second, nil)
	if state, _ := breakerOf(s.r, s.fleet[0]); state != BreakerHalfOpen {
		t.Errorf("no sign of work: state %d", state)
	}
	s.pass(2*time.Second, func() { s.loads[0].GenerationTokens++ })
	if state, _ := breakerOf(s.r, s.fleet[0]); state != BreakerClosed {
		t.Errorf("at work: state %d", state)
	}
	try.Release(Outcome{End: Completed})
}

// What is queued must not wait for a backend that nobody tries.
func TestQueuedRequestProbes(t *testing.T) {
	s := newBreakers(t, 2, withQueue)
	s.fail(0, 3)
	var busy []*Reservation
	for range 2 {
		busy = append(busy, s.send(1))
	}
	s.clock.advance(time.Second)
	d, err := s.r.Pick(context.Background(), ask(s.fleet, 7, 1000))
	if err != nil || d.Backend.Slot != 0 {
		t.Errorf("got %+v, %v; want backend 0", d, err)
	}
	d.Release(Outcome{End: ClientDisconnected})
	for _, b := range busy {
		b.Release(Outcome{End: ClientDisconnected})
	}
}

func TestRetryDoesNotProbe(t *testing.T) {
	s := newBreakers(t, 3)
	s.fail(0, 3)
	s.clock.advance(time.Second)
	d := mustPick(t, s.r, ask(s.fleet, 1, 4), s.fleet[1])
	if d.Backend.Slot != 2 {
		t.Errorf("went to backend %d", d.Backend.Slot)
	}
	d.Release(Outcome{End: ClientDisconnected})
}
