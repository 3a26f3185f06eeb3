package router

import (
	"errors"
	"testing"
	"time"
)

// TestABackendThatIsFullIsALaterChoice holds that one that refuses requests for
// its full queue is not sent all of them because it has so little to do.
func TestABackendThatIsFullIsALaterChoice(t *testing.T) {
	s := newBreakers(t, 2)
	s.send(0).Release(Outcome{End: Completed}) // it holds the prompt
	refuse := func() { s.send(0).Release(Outcome{Failed: true, QueueFull: true, End: NotProcessed}) }
	refuse()
	s.goesTo("after it refused one", 1)
	s.clock.advance(queueFullDelay)
	s.goesTo("a while later", 0)

	under := s.send(0)
	refuse()
	s.goesTo("after it refused another", 1)
	under.Release(Outcome{End: Completed})
	s.goesTo("when a place fell free", 0)

	refuse()
	s.send(1).Release(Outcome{Failed: true, QueueFull: true, End: NotProcessed})
	s.goesTo("when all are full", 0)
}

func TestPlacesGoToThoseThatWaitInTheirOrder(t *testing.T) {
	s := newBreakers(t, 2)
	under := []*Decision{s.send(0), s.send(0), s.send(0)}
	s.send(0).Release(Outcome{Failed: true, QueueFull: true, End: NotProcessed})
	other := s.r.AwaitSlot(s.fleet[1:])
	first, second, third := s.r.AwaitSlot(s.fleet[:1]), s.r.AwaitSlot(s.fleet), s.r.AwaitSlot(s.fleet[:1])
	given := func(w *SlotWait) bool {
		select {
		case <-w.Granted():
			return true
		default:
			return false
		}
	}
	want := func(when string, want ...bool) {
		t.Helper()
		for i, w := range []*SlotWait{other, first, second, third} {
			if given(w) != want[i] {
				t.Errorf("%s: %d has a place: %v", when, i, given(w))
			}
		}
	}
	want("at first", false, false, false, false)
	under[0].Release(Outcome{End: Completed})
	want("one ended", false, true, false, false)
	first.Release(true)
	under[1].Release(Outcome{End: Completed})
	want("two ended", false, true, true, false)
	second.Release(false)
	want("its place was not taken", false, true, true, true)
	third.Release(true)
	other.Release(false)
	under[2].Release(Outcome{End: Completed})
	late := s.r.AwaitSlot(s.fleet[:1])
	if !given(late) {
		t.Error("a place that fell free before is not given")
	}
	late.Release(true)
}

// A replica that is about to stop is sent one request a second, until it answers.
func TestABackendThatIsAboutToStopIsNotSentWhatItRefuses(t *testing.T) {
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
	refuses("after its word, and an answer to what it had before")
	s.clock.advance(stoppingDelay)
	again := s.send(0)
	refuses("while it is tried")
	again.Release(Outcome{End: Completed})
	s.send(0).Release(stops)
	s.r.BackendChanged(s.fleet[0])
	s.send(0).Release(Outcome{End: Completed})
}
