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
	s.send(0).Release(Outcome{End: Served}) // it holds the prompt
	refuse := func() { s.send(0).Release(Outcome{Failed: true, Full: true, End: Unseen}) }
	refuse()
	s.goesTo("after it refused one", 1)
	s.clock.advance(fullLasts)
	s.goesTo("a while later", 0)

	under := s.send(0)
	refuse()
	s.goesTo("after it refused another", 1)
	under.Release(Outcome{End: Served})
	s.goesTo("when a place fell free", 0)

	refuse()
	s.send(1).Release(Outcome{Failed: true, Full: true, End: Unseen})
	s.goesTo("when all are full", 0)
}

func TestPlacesGoToThoseThatWaitInTheirOrder(t *testing.T) {
	s := newBreakers(t, 2)
	under := []*Decision{s.send(0), s.send(0), s.send(0)}
	s.send(0).Release(Outcome{Failed: true, Full: true, End: Unseen})
	other := s.r.AwaitPlace(s.fleet[1:])
	first, second, third := s.r.AwaitPlace(s.fleet[:1]), s.r.AwaitPlace(s.fleet), s.r.AwaitPlace(s.fleet[:1])
	given := func(w *PlaceWait) bool {
		select {
		case <-w.Given():
			return true
		default:
			return false
		}
	}
	want := func(when string, want ...bool) {
		t.Helper()
		for i, w := range []*PlaceWait{other, first, second, third} {
			if given(w) != want[i] {
				t.Errorf("%s: %d has a place: %v", when, i, given(w))
			}
		}
	}
	want("at first", false, false, false, false)
	under[0].Release(Outcome{End: Served})
	want("one ended", false, true, false, false)
	first.Leave(true)
	under[1].Release(Outcome{End: Served})
	want("two ended", false, true, true, false)
	second.Leave(false)
	want("its place was not taken", false, true, true, true)
	third.Leave(true)
	other.Leave(false)
	under[2].Release(Outcome{End: Served})
	late := s.r.AwaitPlace(s.fleet[:1])
	if !given(late) {
		t.Error("a place that fell free before is not given")
	}
	late.Leave(true)
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
	stops := Outcome{End: Unseen, Stopping: true}
	before := s.send(0)
	s.clock.advance(time.Millisecond)
	s.send(0).Release(stops)
	before.FirstEvent()
	before.Release(Outcome{End: Served})
	refuses("after its word, and an answer to what it had before")
	s.clock.advance(stoppingLasts)
	again := s.send(0)
	refuses("while it is tried")
	again.Release(Outcome{End: Served})
	s.send(0).Release(stops)
	s.r.Changed(s.fleet[0])
	s.send(0).Release(Outcome{End: Served})
}
