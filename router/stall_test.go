package router

import (
	"testing"
	"time"

	"warmroute/backends"
)

// stalls is a fleet whose polls a test answers.
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
		l.ScrapedAt = s.clock.now
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
func (s *stalls) send(key, tokens int, streams bool) *Decision {
	s.t.Helper()
	req := ask(s.fleet[:1], key, tokens/64)
	req.Streams = streams
	return mustPick(s.t, s.r, req)
}

// told checks what the guard says of all backends together.
func (s *stalls) told(when string, times int, now bool) {
	s.t.Helper()
	sum, some := 0, false
	for _, b := range s.fleet {
		n, is := s.r.Stalls(b)
		sum, some = sum+int(n), some || is
	}
	if sum != times || some != now {
		s.t.Errorf("%s: stalled %d times, and is so: %v; want %d, %v", when, sum, some, times, now)
	}
}

func TestAReplicaThatProducesNothingGetsNothingUntilItDoes(t *testing.T) {
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
	s.told("after 3 s", 0, false)
	s.pass(time.Second, nil) // 3 s and twelve times the 80 ms that 640 tokens take
	s.told("after 4 s", 1, true)
	if again() != s.fleet[1] {
		t.Error("sent to a replica that produces nothing")
	}
	s.pass(time.Minute, nil)
	s.told("after a minute", 1, true)
	stuck.RecordFirstEvent()
	if again() != s.fleet[0] {
		t.Error("not sent there after its first sign of work")
	}
	s.told("after its first sign of work", 1, false)
}

func TestEverySignOfWorkIsSeen(t *testing.T) {
	for name, work := range map[string]func(s *stalls, stream *Decision){
		"a chunk":                func(s *stalls, stream *Decision) { stream.RecordOutput() },
		"a first event":          func(s *stalls, _ *Decision) { s.send(7, 64, true).RecordFirstEvent() },
		"an answer":              func(s *stalls, _ *Decision) { s.send(7, 64, false).Release(Outcome{End: Completed}) },
		"prompt tokens":          func(s *stalls, _ *Decision) { s.loads[0].PromptTokens++ },
		"generated tokens":       func(s *stalls, _ *Decision) { s.loads[0].GenerationTokens++ },
		"blocks being allocated": func(s *stalls, _ *Decision) { s.loads[0].KVCacheUsage += 1. / 128 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStalls(t, 1)
			stream := s.send(1, 64, true)
			stream.RecordFirstEvent()
			s.pass(time.Minute, func() { work(s, stream) })
			s.told("at work", 0, false)
			s.pass(10*time.Second, nil)
			s.told("when it ceased", 1, true)
		})
	}
}

func TestAnEndThatIsNoAnswerIsNoSignOfWork(t *testing.T) {
	for _, end := range []End{NotProcessed, ClientDisconnected, Truncated} {
		s := newStalls(t, 1)
		s.send(1, 64, true)
		s.pass(5*time.Second, func() { s.send(2, 64, true).Release(Outcome{End: end}) })
		s.told("", 1, true)
	}
}

func TestALongPrefillIsNoStall(t *testing.T) {
	for name, streams := range map[string]bool{"streamed": true, "whole": false} {
		t.Run(name, func(t *testing.T) {
			s := newStalls(t, 1)
			s.send(1, 100_000, streams) // 12.5 s at the nominal rate, 25 s where tokens cost more the deeper they are
			s.pass(25*time.Second, nil)
			s.told("in prefill", 0, false)
			s.pass(2*time.Minute, nil)
			s.told("in the prefill of a GPU that nobody knows yet to be slow", 0, false)
			s.pass(10*time.Second, nil)
			s.told("far beyond it", 1, true)
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
		s.pass(40*time.Second, nil)
		s.told("in prefill", 0, false)
		s.pass(2*time.Second, nil)
		s.told("far beyond it", 1, true)
	})
	t.Run("while others decode", func(t *testing.T) {
		s := newStalls(t, 1)
		s.send(1, 64, true).RecordFirstEvent()
		s.pass(time.Second, nil)
		s.send(2, 100_000, true)
		s.pass(25*time.Second, nil) // an engine without chunked prefill decodes nothing meanwhile
		s.told("in prefill", 0, false)
	})
	t.Run("another client's, with others behind it", func(t *testing.T) {
		s := newStalls(t, 1)
		s.loads[0].QueuesKnown, s.loads[0].Waiting, s.loads[0].OwnInFlight = true, 10, 1
		s.send(1, 6400, true) // so much is the mean u
		s.pass(9*time.Second, nil)
		s.told("in prefill", 0, false)
	})
}

func TestAnswersThatComeWholeAreNoStall(t *testing.T) {
	s := newStalls(t, 1)
	for key := range 20 {
		s.send(key, 640, false)
	}
	s.pass(2*time.Minute, func() { s.loads[0].GenerationTokens += 2000 })
	s.told("while tokens are generated", 0, false)
	s.pass(25*time.Second, nil)
	s.told("when none are", 1, true)
}

func TestAReplicaThatTellsNoCountersIsNeverStalled(t *testing.T) {
	s := newStalls(t, 1)
	s.loads[0].TokensKnown = false
	s.poll()
	s.send(1, 64, false)
	s.send(1, 64, true).RecordFirstEvent()
	s.pass(time.Minute, nil)
	s.fleet[0].SetLoad(nil)
	s.clock.advance(time.Minute)
	s.send(1, 64, false)
	s.told("", 0, false)
}

func TestSilenceIsKnownOnlyUpToTheLastPoll(t *testing.T) {
	s := newStalls(t, 1)
	s.send(1, 64, false)
	s.clock.advance(time.Minute) // polls are that far apart
	s.send(2, 64, false)
	s.told("before the poll", 0, false)
	s.loads[0].GenerationTokens++
	s.poll()
	s.told("after a poll that shows work", 0, false)
}

// A process that is stopped answers polls no more than anything else.
func TestWhenPollsFailAStreamThatStandsStillTells(t *testing.T) {
	for name, streaming := range map[string]bool{"in mid-answer": true, "answers that come whole": false} {
		t.Run(name, func(t *testing.T) {
			s := newStalls(t, 1)
			d := s.send(1, 64, streaming)
			if streaming {
				d.RecordFirstEvent()
			}
			s.fleet[0].SetLoad(nil)
			s.clock.advance(4 * time.Second)
			s.send(2, 64, true)
			if _, stalled := s.r.Stalls(s.fleet[0]); stalled != streaming {
				t.Errorf("stalled is %v", stalled)
			}
		})
	}
}

// What is sent to a stalled replica must not put off that it is found out.
func TestAStalledReplicaThatIsFedOnIsFoundOut(t *testing.T) {
	s := newStalls(t, 1)
	key := 0
	s.pass(time.Minute, func() {
		for range 8 { // as many tokens as it could prefill
			key++
			s.send(key, 1000, true)
		}
	})
	s.told("", 1, true)
}

func TestWhereAllAreStalledAllAreCandidates(t *testing.T) {
	s := newStalls(t, 2)
	for _, b := range s.fleet {
		mustPick(t, s.r, ask([]*backends.Backend{b}, 1, 1))
	}
	s.pass(5*time.Second, nil)
	s.told("", 2, true)
	seen := map[*backends.Backend]bool{}
	for key := range 20 {
		seen[mustPick(t, s.r, ask(s.fleet, key, 10)).Backend] = true
	}
	if len(seen) != 2 {
		t.Errorf("%d of 2 stalled backends were used", len(seen))
	}
}

// With nothing of ours on it nothing could show that it works again.
func TestAStalledReplicaIsTriedAgainWhenAllItsClientsHaveLeft(t *testing.T) {
	s := newStalls(t, 2)
	d := s.send(1, 640, true)
	s.pass(5*time.Second, nil)
	s.told("stalled", 1, true)
	d.Release(Outcome{End: ClientDisconnected})
	s.clock.advance(time.Second)
	again := s.send(2, 640, true)
	s.told("tried again", 1, false)
	s.pass(3*time.Second, nil)
	s.told("its silence began anew", 1, false)
	s.pass(time.Second, nil)
	s.told("still stalled", 2, true)
	again.Release(Outcome{End: ClientDisconnected})
}

func TestStreamsInMidAnswerAreCounted(t *testing.T) {
	s := newStalls(t, 1)
	for _, end := range []End{Completed, ClientDisconnected, Truncated, NotProcessed} {
		d := s.send(1, 64, true)
		if end != NotProcessed {
			d.RecordFirstEvent()
		}
		d.Release(Outcome{End: end})
		s.send(1, 64, false).Release(Outcome{End: end})
	}
	if n := s.r.states[0].health.streaming; n != 0 {
		t.Errorf("%d streams in mid-answer when all have ended", n)
	}
}
