package replay

import (
	"testing"
	"time"
)

func TestJoinedShareIsOfTheTwoMinutesAfterJoining(t *testing.T) {
	// A token a second on each of two backends, ten on the third, which joins at 100 s.
	timeline := newTimeline(3)
	for second := range 400 {
		for backend, tokens := range []int{1, 1, 10} {
			if backend < 2 || second >= 100 {
				timeline.worked(backend, time.Duration(second)*time.Second, tokens)
			}
		}
	}
	f := func(want float64, changes ...Change) {
		t.Helper()
		if got := timeline.joinedShare(changes); got != want {
			t.Errorf("%v: share %g, want %g", changes, got, want)
		}
	}
	f(0)
	f(0, Change{At: 0, Backend: 2, What: Join}, Change{At: time.Minute, Backend: 1, What: Leave})
	f(2.5, Change{At: 100 * time.Second, Backend: 2, What: Join})
	f(0.25, Change{At: 100 * time.Second, Backend: 1, What: Join})
	f(1.375, Change{At: 100 * time.Second, Backend: 2, What: Join}, Change{At: 100 * time.Second, Backend: 1, What: Join})
	f(0, Change{At: time.Hour, Backend: 2, What: Join})
}
