package replay

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestTimeline(t *testing.T) {
	at := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	l := newTimeline(2)
	l.addWork(0, at(0.5), 100)
	l.addWork(1, at(2.5), 50)
	l.addInFlight(0, at(0.5), 2)
	l.addInFlight(0, at(2.25), -2)
	if want := []float64{1, 2, 0.5}; !slices.Equal(l.InFlight[0], want) {
		t.Errorf("in flight %v, want %v", l.InFlight[0], want)
	}
	if want := []float64{100, 0, 0}; !slices.Equal(l.Work[0], want) {
		t.Errorf("work %v, want %v", l.Work[0], want)
	}

	l.addInFlight(1, at(3), 1)
	l.addInFlight(1, at(maxBuckets+2), -1)
	if l.Bucket != 2*time.Second || len(l.Work[0]) != maxBuckets/2+2 {
		t.Fatalf("after %d s there are %d stretches of %v", maxBuckets+2, len(l.Work[0]), l.Bucket)
	}
	if a, b := l.Work[0][0], l.Work[1][1]; a != 100 || b != 50 {
		t.Errorf("joined in pairs the work is %.0f and %.0f, want 100 and 50", a, b)
	}
	if got := l.InFlight[0][:2]; math.Abs(got[0]-1.5) > 1e-9 || math.Abs(got[1]-0.25) > 1e-9 {
		t.Errorf("joined in pairs the means are %v, want [1.5 0.25]", got)
	}
	total := 0.0
	for _, x := range l.InFlight[1] {
		total += x * l.Bucket.Seconds()
	}
	if math.Abs(total-(maxBuckets-1)) > 1e-6 {
		t.Errorf("%.3f request-seconds over the run, want %d", total, maxBuckets-1)
	}
}

func TestSumMiddle(t *testing.T) {
	l := newTimeline(1)
	for s := range 100 {
		l.addWork(0, time.Duration(s)*time.Second, 1)
	}
	l.addWork(0, 0, 1000)
	l.addWork(0, 99*time.Second, 1000)
	if got := l.sumMiddle(l.Work, 100*time.Second); got[0] < 80 || got[0] > 81 {
		t.Errorf("%.0f in the middle, want 80", got[0])
	}
}

func TestNewBackendShare(t *testing.T) {
	// A token a second on each of two backends, ten on the third, which joins at 100 s.
	timeline := newTimeline(3)
	for second := range 400 {
		for backend, tokens := range []int{1, 1, 10} {
			if backend < 2 || second >= 100 {
				timeline.addWork(backend, time.Duration(second)*time.Second, tokens)
			}
		}
	}
	f := func(want float64, changes ...Change) {
		t.Helper()
		if got := timeline.joinedWorkOverMean(changes); got != want {
			t.Errorf("%v: share %g, want %g", changes, got, want)
		}
	}
	f(0)
	f(0, Change{At: 0, Backend: 2, Kind: Join}, Change{At: time.Minute, Backend: 1, Kind: Leave})
	f(2.5, Change{At: 100 * time.Second, Backend: 2, Kind: Join})
	f(0.25, Change{At: 100 * time.Second, Backend: 1, Kind: Join})
	f(1.375, Change{At: 100 * time.Second, Backend: 2, Kind: Join}, Change{At: 100 * time.Second, Backend: 1, Kind: Join})
	f(0, Change{At: time.Hour, Backend: 2, Kind: Join})
}
