package router

import (
	"errors"
	"testing"
	"time"

	"warmroute/backends"
)

// stalls is a fleet whose polls return what a test sets.
type stalls struct {
	t     *testing.T
	r     *Router
	fleet []*backends.Backend
	clock *clock
	loads []backends.Load // of each backend, as of its next poll
}

func newStalls(t *testing.T, n int) *stalls {
	r, fleet, c := newFleet(t, n, "prefix")
	s := &stalls{t: t, r: r, fleet: fleet, clock: c, loads: make([]backends.Load, n)}
	for i := range s.loads {
		s.loads[i] = backends.Load{TokensKnown: true, PromptTokens: 1000, GenerationTokens: 1000}
	}
	s.poll()
	return s
}

func (s *stalls) poll() {
	for i, b := range s.fleet {
		l := s.loads[i]
		l.PolledAt = s.clock.now
		b.SetLoad(&l)
		s.r.ObserveLoad(b, &l)
	}
}

// pass lets time pass, in which replicas are polled every second. each, which
// may be nil, happens before each poll.
func (s *stalls) pass(d time.Duration, each func()) {
	for ; d > 0; d -= time.Second {
		s.clock.advance(min(d, time.Second))
		if each != nil {
			each()
		}
		s.poll()
	}
}

// send sends a request of so many tokens to the first backend.
func (s *stalls) send(key, tokens int, streams bool) *Reservation {
	s.t.Helper()
	req := ask(s.fleet[:1], key, tokens/64)
	req.Streams = streams
	return mustPick(s.t, s.r, req)
}

// expectStalls checks the stalls of all backends together.
func (s *stalls) expectStalls(when string, times int, now bool) {
	s.t.Helper()
	sum, some := 0, false
	for _, b := range s.fleet {
		n, is := stallsOf(s.r, b)
		sum, some = sum+int(n), some || is
	}
	if sum != times || some != now {
		s.t.Errorf("%s: stalled %d times, and is so: %v; want %d, %v", when, sum, some, times, now)
	}
}

func TestStalledFilter(t *testing.T) {
	s := newStalls(t, 2)
	stuck := s.send(1, 640, true)
	again := func() *backends.Backend {
		d := mustPick(t, s.r, ask(s.fleet, 1, 10)) // b0 is thought to hold all of it
		d.Release(Outcome{End: ClientDisconnected})
		return d.Backend
	}
	s.pass(3*time.Second, nil)
	if again() != s.fleet[0] {
		t.Error("not sent where its prefix is")
	}
	s.expectStalls("after 3 s", 0, false)
	s.pass(time.Second, nil) // 3 s and twelve times the 80 ms that 640 tokens take
	s.expectStalls("after 4 s", 1, true)
	if again() != s.fleet[1] {
		t.Error("sent to a replica that makes no progress")
	}
	s.pass(time.Minute, nil)
	s.expectStalls("after a minute", 1, true)
	stuck.RecordFirstEvent()
	if again() != s.fleet[0] {
		t.Error("not sent there after its first sign of work")
	}
	s.expectStalls("after its first sign of work", 1, false)
}

func TestSignsOfWork(t *testing.T) {
	for name, work := range map[string]func(s *stalls, stream *Reservation){
		"a chunk":                func(s *stalls, stream *Reservation) { stream.RecordOutput() },
		"a first event":          func(s *stalls, _ *Reservation) { s.send(7, 64, true).RecordFirstEvent() },
		"a response":             func(s *stalls, _ *Reservation) { s.send(7, 64, false).Release(Outcome{End: Completed}) },
		"prompt tokens":          func(s *stalls, _ *Reservation) { s.loads[0].PromptTokens++ },
		"generated tokens":       func(s *stalls, _ *Reservation) { s.loads[0].GenerationTokens++ },
		"blocks being allocated": func(s *stalls, _ *Reservation) { s.loads[0].KVCacheUsage += 1. / 128 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStalls(t, 1)
			stream := s.send(1, 64, true)
			stream.RecordFirstEvent()
			s.pass(time.Minute, func() { work(s, stream) })
			s.expectStalls("at work", 0, false)
			s.pass(10*time.Second, nil)
			s.expectStalls("when it ceased", 1, true)
		})
	}
}

func TestEndWithoutResponseIsNoWork(t *testing.T) {
	for _, end := range []End{NotProcessed, ClientDisconnected, Truncated} {
		s := newStalls(t, 1)
		s.send(1, 64, true)
		s.pass(5*time.Second, func() { s.send(2, 64, true).Release(Outcome{End: end}) })
		s.expectStalls("", 1, true)
	}
}

func TestLongPrefillIsNotStalled(t *testing.T) {
	for name, streams := range map[string]bool{"streamed": true, "whole": false} {
		t.Run(name, func(t *testing.T) {
			s := newStalls(t, 1)
			s.send(1, 100_000, streams) // 12.5 s at the nominal rate, 25 s where tokens cost more the deeper they are
			s.pass(25*time.Second, nil)
			s.expectStalls("in prefill", 0, false)
			s.pass(2*time.Minute, nil)
			s.expectStalls("in the prefill of a GPU not yet known to be slow", 0, false)
			s.pass(20*time.Second, nil)
			s.expectStalls("far beyond it", 1, true)
		})
	}
	t.Run("whose speed is known", func(t *testing.T) {
		s := newStalls(t, 1)
		for key := range 2 * 8 {
			d := s.send(key, 8000, true)
			s.pass(time.Second, nil)
			d.RecordFirstEvent()
			d.Release(Outcome{End: Completed})
		}
		s.send(99, 100_000, true)
		s.pass(30*time.Second, nil)
		s.expectStalls("in prefill", 0, false)
		s.pass(12*time.Second, nil)
		s.expectStalls("far beyond it", 1, true)
	})
	t.Run("while others decode", func(t *testing.T) {
		s := newStalls(t, 1)
		s.send(1, 64, true).RecordFirstEvent()
		s.pass(time.Second, nil)
		s.send(2, 100_000, true)
		s.pass(25*time.Second, nil) // an engine without chunked prefill decodes nothing meanwhile
		s.expectStalls("in prefill", 0, false)
	})
	t.Run("another client's, with others behind it", func(t *testing.T) {
		s := newStalls(t, 1)
		s.loads[0].QueuesKnown, s.loads[0].Waiting, s.loads[0].OwnInFlight = true, 10, 1
		s.send(1, 6400, true) // so much is the mean u
		s.pass(9*time.Second, nil)
		s.expectStalls("in prefill", 0, false)
	})
}

func TestUnstreamedResponsesAreNotStalled(t *testing.T) {
	s := newStalls(t, 1)
	for key := range 20 {
		s.send(key, 640, false)
	}
	s.pass(2*time.Minute, func() { s.loads[0].GenerationTokens += 2000 })
	s.expectStalls("while tokens are generated", 0, false)
	s.pass(25*time.Second, nil)
	s.expectStalls("when none are", 1, true)
}

func TestStallWithoutCounters(t *testing.T) {
	s := newStalls(t, 1)
	s.loads[0].TokensKnown = false
	s.poll()
	s.send(1, 64, false)
	s.send(1, 64, true).RecordFirstEvent()
	s.pass(time.Minute, nil)
	s.fleet[0].SetLoad(nil)
	s.clock.advance(time.Minute)
	s.send(1, 64, false)
	s.expectStalls("", 0, false)
}

func TestSilenceEndsAtLastPoll(t *testing.T) {
	s := newStalls(t, 1)
	s.send(1, 64, false)
	s.clock.advance(time.Minute) // polls are that far apart
	s.send(2, 64, false)
	s.expectStalls("before the poll", 0, false)
	s.loads[0].GenerationTokens++
	s.poll()
	s.expectStalls("after a poll that shows work", 0, false)
}

// A process that is stopped does not respond to polls either.
func TestStallWithFailedPolls(t *testing.T) {
	for name, streaming := range map[string]bool{"during a stream": true, "responses that are not streamed": false} {
		t.Run(name, func(t *testing.T) {
			s := newStalls(t, 1)
			d := s.send(1, 64, streaming)
			if streaming {
				d.RecordFirstEvent()
			}
			s.fleet[0].SetLoad(nil)
			s.clock.advance(4 * time.Second)
			s.send(2, 64, true)
			if _, stalled := stallsOf(s.r, s.fleet[0]); stalled != streaming {
				t.Errorf("stalled is %v", stalled)
			}
		})
	}
}

// What is sent to a stalled replica must not put off that it is found out.
func TestStallUnderNewRequests(t *testing.T) {
	s := newStalls(t, 1)
	key := 0
	s.pass(time.Minute, func() {
		for range 8 { // as many tokens as it could prefill
			key++
			s.send(key, 1000, true)
		}
	})
	s.expectStalls("", 1, true)
}

func TestAllStalled(t *testing.T) {
	s := newStalls(t, 2)
	for _, b := range s.fleet {
		mustPick(t, s.r, ask([]*backends.Backend{b}, 1, 1))
	}
	s.pass(5*time.Second, nil)
	s.expectStalls("", 2, true)
	seen := map[*backends.Backend]bool{}
	for key := range 20 {
		seen[mustPick(t, s.r, ask(s.fleet, key, 10)).Backend] = true
	}
	if len(seen) != 2 {
		t.Errorf("%d of 2 stalled backends were used", len(seen))
	}
}

// Without requests of ours on it nothing could show that it works again.
func TestStallEndsWithoutRequests(t *testing.T) {
	s := newStalls(t, 2)
	d := s.send(1, 640, true)
	s.pass(5*time.Second, nil)
	s.expectStalls("stalled", 1, true)
	d.Release(Outcome{End: ClientDisconnected})
	s.clock.advance(time.Second)
	again := s.send(2, 640, true)
	s.expectStalls("tried again", 1, false)
	s.pass(3*time.Second, nil)
	s.expectStalls("its silence began again", 1, false)
	s.pass(time.Second, nil)
	s.expectStalls("still stalled", 2, true)
	again.Release(Outcome{End: ClientDisconnected})
}

func TestStreamingCount(t *testing.T) {
	s := newStalls(t, 1)
	for _, end := range []End{Completed, ClientDisconnected, Truncated, NotProcessed} {
		d := s.send(1, 64, true)
		if end != NotProcessed {
			d.RecordFirstEvent()
		}
		d.Release(Outcome{End: end})
		s.send(1, 64, false).Release(Outcome{End: end})
	}
	// While polls fail, silence says something only where a stream has begun.
	s.send(1, 64, false)
	s.fleet[0].SetLoad(nil)
	s.clock.advance(4 * time.Second)
	s.send(2, 64, false)
	s.expectStalls("without a stream, when all that began have ended", 0, false)
}

// stallCalls counts the calls of a StallListener.
type stallCalls struct{ times, elsewhere, unresponsive int }

// BackendStalled implements StallListener.
func (w *stallCalls) BackendStalled(elsewhere, unresponsive bool) {
	w.times++
	if elsewhere {
		w.elsewhere++
	}
	if unresponsive {
		w.unresponsive++
	}
}

// watch sends a request that may go to any backend, and chooses the first.
func (s *stalls) watch(streams bool) (*Reservation, *stallCalls) {
	s.t.Helper()
	w := new(stallCalls)
	req := ask(s.fleet, 1, 10)
	req.Streams, req.Stalls = streams, w
	s.fleet[0].SetState(backends.Ready)
	for _, b := range s.fleet[1:] {
		b.SetState(backends.Down)
	}
	d := mustPick(s.t, s.r, req)
	for _, b := range s.fleet[1:] {
		b.SetState(backends.Ready)
	}
	return d, w
}

func TestStallListener(t *testing.T) {
	s := newStalls(t, 2)
	waiting, first := s.watch(true)
	whole, second := s.watch(false)
	responding, third := s.watch(true)
	committed, fourth := s.watch(false)
	responding.RecordFirstEvent()
	committed.Commit()
	s.pass(10*time.Second, nil)
	for name, w := range map[string]*stallCalls{"a stream": first, "a response that is not streamed": second} {
		if w.times == 0 || w.elsewhere != w.times || w.unresponsive != 0 {
			t.Errorf("%s: called %+v", name, *w)
		}
	}
	if third.times+fourth.times != 0 {
		t.Error("called for a response that the client has begun to see")
	}
	s.fleet[1].SetState(backends.Down)
	*first = stallCalls{}
	s.pass(time.Second, nil)
	if first.times == 0 || first.elsewhere != 0 {
		t.Errorf("with no other backend: called %+v", *first)
	}
	for _, d := range []*Reservation{waiting, whole, responding, committed} {
		d.Release(Outcome{End: ClientDisconnected})
	}
	if n := len(s.r.fleet.states[0].health.Watched()); n != 0 {
		t.Errorf("%d are watched at the end", n)
	}
}

// pollFailed is a poll of the first backend that fails.
func (s *stalls) pollFailed(timedOut bool) {
	s.clock.advance(2 * time.Second)
	s.r.PollFailed(s.fleet[0], timedOut)
}

func TestStallByMissedPolls(t *testing.T) {
	for _, c := range []struct {
		name     string
		timedOut []bool // of the polls that fail
		found    bool
	}{
		{"two timeouts", []bool{true, true}, false},
		{"three timeouts", []bool{true, true, true}, true},
		{"refused between", []bool{true, true, false, true, true}, false},
		{"metrics gone", []bool{false, false, false, false, false}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStalls(t, 2)
			d, w := s.watch(false)
			for i, timedOut := range c.timedOut {
				if i == 2 {
					s.fleet[0].SetLoad(nil) // as the poller does
				}
				s.pollFailed(timedOut)
			}
			if (w.times > 0) != c.found {
				t.Errorf("called %+v", *w)
			}
			d.Release(Outcome{End: ClientDisconnected})
		})
	}
}

func TestStallListenerOfHungReplica(t *testing.T) {
	s := newStalls(t, 2)
	d, w := s.watch(false)
	s.fleet[0].SetState(backends.Down)
	s.r.ChecksTimedOut(s.fleet[0])
	if w.unresponsive != 1 || w.elsewhere != 1 {
		t.Errorf("called %+v", *w)
	}
	s.pollFailed(true)
	if w.unresponsive != 2 {
		t.Errorf("after another poll: called %+v", *w)
	}
	s.fleet[0].SetState(backends.Ready)
	s.r.BackendStateChanged(s.fleet[0])
	s.pollFailed(true)
	if w.times != 2 {
		t.Errorf("when it is back: called %+v", *w)
	}
	d.Release(Outcome{End: Completed})
}

// refused is the outcome of a request that a replica refuses because its queue is full.
var refused = Outcome{End: NotProcessed, Failed: true, QueueFull: true}

// TestFullReplicaAvoided expects that a backend that refuses requests because its full queue is not
// sent all of them because it has so little in flight. There is no queue here in which they could wait.
func TestFullReplicaAvoided(t *testing.T) {
	s := newBreakers(t, 2)
	s.send(0).Release(Outcome{End: Completed}) // it holds the prompt
	s.send(0).Release(refused)
	s.goesTo("after it refused one", 1)
	s.clock.advance(time.Second)
	s.goesTo("a while later", 0)

	under := s.send(0)
	s.send(0).Release(refused)
	s.goesTo("after it refused another", 1)
	under.Release(Outcome{End: Completed})
	s.goesTo("when a slot became free", 0)

	s.send(0).Release(refused)
	s.send(1).Release(refused)
	s.goesTo("when all are full", 0)
}

// TestQueueForFullReplicas expects that requests which replicas refuse because of their full queues take their place in the
// admission queue, before those that arrive later and without being charged twice, and that no others are sent.
func TestQueueForFullReplicas(t *testing.T) {
	for _, policy := range []string{"prefix", "round-robin"} { // the latter queues requests only while no replica takes any
		r, fleet, c := newFleet(t, 2, policy, withQueue)
		var running []*Reservation
		for i := range 4 {
			running = append(running, mustPick(t, r, ask(fleet[i%2:i%2+1], i, 1)))
			running[i].RecordFirstEvent()
		}
		first, second := ask(fleet, 10, 1), ask(fleet, 11, 1)
		first.Tenant, second.Tenant = 1, 2
		retry := func(req *Request) *waiter {
			c.advance(time.Millisecond)
			for range fleet {
				d := mustPick(t, r, req)
				req.Arrival = d.Arrival
				d.Release(refused)
			}
			return submit(r, req)
		}
		b := mustPick(t, r, second)
		second.Arrival = b.Arrival
		a := retry(first)
		waits(t, policy+": refused by all", a)
		b.Release(refused)
		late := submit(r, ask(fleet, 12, 1))
		waits(t, policy+": arrived later", late)
		earlier := submit(r, second)
		waits(t, policy+": refused later, but arrived earlier", earlier)
		if e := r.Explain(*ask(fleet, 13, 1)); e.Choice != "" || e.Queued == "" {
			t.Errorf("%s: another one would go to %q, and wait because of %q", policy, e.Choice, e.Queued)
		}

		running[0].Release(Outcome{End: Completed})
		second.Arrival = sent(t, policy+": the first to arrive, when a request ended", earlier).Arrival
		waits(t, policy+": the second", a)
		sent(t, policy, earlier).Release(refused) // another client has taken the place
		again := submit(r, second)
		waits(t, policy+": refused again", again)
		running[1].Release(Outcome{End: Completed})
		sent(t, policy+": refused again, when another one ended", again).RecordFirstEvent()
		waits(t, policy+": the second is next", a)
		running[2].Release(Outcome{End: Completed})
		running[3].Release(Outcome{End: Completed})
		sent(t, policy, a).Release(Outcome{End: Completed})
		sent(t, policy+": the last one", late).Release(Outcome{End: Completed})
		sent(t, policy, again).Release(Outcome{End: Completed})
		for slot := range fleet {
			expectEmptyAccount(t, policy, r, slot, c.now)
		}
	}
}

// TestPollShowsRoom expects that a poll which shows fewer requests of other clients than when a replica was full has those
// that wait sent, as many as there is room for.
func TestPollShowsRoom(t *testing.T) {
	r, fleet, c := newFleet(t, 1, "prefix", withQueue)
	poll := func(running int) {
		c.advance(10 * time.Millisecond)
		l := &backends.Load{QueuesKnown: true, Running: running, PolledAt: c.now, OwnInFlight: fleet[0].KnownInFlight()}
		fleet[0].SetLoad(l)
		r.ObserveLoad(fleet[0], l)
	}
	poll(4)
	var all []*waiter
	for i := range 3 {
		w := submit(r, ask(fleet, i, 1))
		if i == 0 {
			req := ask(fleet, i, 1)
			req.Arrival = w.d.Arrival
			w.d.Release(refused)
			w = submit(r, req)
		}
		all = append(all, w)
	}
	count := func() (n int) {
		for _, w := range all {
			if w.d != nil {
				n++
			}
		}
		return n
	}
	for _, step := range []struct{ running, sent int }{{4, 0}, {3, 1}, {4, 1}, {3, 2}} {
		if poll(step.running); count() != step.sent {
			t.Errorf("after a poll with %d requests, %d were sent, want %d", step.running, count(), step.sent)
		}
	}
	for _, w := range all {
		if w.d == nil {
			w.queued.Cancel()
			continue
		}
		w.d.Release(Outcome{End: Completed})
	}
}

// A replica that is about to stop is sent one request a second, until it responds.
func TestStoppingFilter(t *testing.T) {
	s := newBreakers(t, 1)
	refuses := func(when string) {
		t.Helper()
		if _, err := s.r.Pick(t.Context(), ask(s.fleet, 1, 4)); !errors.Is(err, ErrNoneReady) {
			t.Errorf("%s: %v", when, err)
		}
	}
	stops := Outcome{End: NotProcessed, Stopping: true}
	before := s.send(0)
	s.clock.advance(time.Millisecond)
	s.send(0).Release(stops)
	before.RecordFirstEvent()
	before.Release(Outcome{End: Completed})
	refuses("after it reported so, and a response to what it had before")
	s.clock.advance(stoppingDelay)
	again := s.send(0)
	refuses("while it is tried")
	again.Release(Outcome{End: Completed})
	s.send(0).Release(stops)
	s.r.BackendStateChanged(s.fleet[0])
	s.send(0).Release(Outcome{End: Completed})
}

func TestCondition(t *testing.T) {
	s := newStalls(t, 1)
	b := s.fleet[0]
	expect := func(when string, want ConditionState, since time.Time) {
		t.Helper()
		c := s.r.Status(b).Condition
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
