package queue

import (
	"math"
	"testing"
	"time"
)

func TestReservedBackends(t *testing.T) {
	for _, c := range []struct {
		busy    float64 // of all backends together, in backends
		n       int
		allowed float64
		want    int
	}{
		{0, 4, 0.05, 0},
		{0.001, 4, 0.05, 1}, // a request now and then
		{0.06, 4, 0.05, 2},
		{0.16, 4, 0.05, 3},
		{1.8, 4, 0.05, 4}, // half of what they can do
		{4, 4, 0.05, 4},
		{0.16, 4, 0.5, 1}, // more slowdown is allowed
		{0.16, 64, 0.05, 8},
		{0.3, 1, 0.05, 1},
	} {
		if got := reservedBackendCount(c.busy, c.n, c.allowed); got != c.want {
			t.Errorf("%v of %d backends busy, slowdown %v: %d reserved, want %d", c.busy, c.n, c.allowed, got, c.want)
		}
	}
}

func TestLowPrioritySlowdown(t *testing.T) {
	none := math.Inf(1)
	for _, c := range []struct {
		name      string
		headroom  Headroom
		reserved  bool
		sequences float64
		want      float64
	}{
		{"a backend that is not needed", Headroom{maxSlowdown: 0.05, each: 9, unshared: true}, false, 3, none},
		{"one that is, while others are not", Headroom{maxSlowdown: 0.05, each: 9, unshared: true}, true, 3, 0},
		{"all are needed", Headroom{maxSlowdown: 0.05, each: 9}, true, 3, 0.05},
		{"all are needed, this one is idle", Headroom{maxSlowdown: 0.05, each: 9}, true, 0, 0.05},
		{"few requests", Headroom{maxSlowdown: 0.05, each: 0.25}, true, 0.1, 0.2},
		{"few requests, and one of them here", Headroom{maxSlowdown: 0.05, each: 0.25}, true, 1, 0.05},
		{"next to none", Headroom{maxSlowdown: 0.05, each: 0.04}, true, 0, none},
		{"none", Headroom{maxSlowdown: 0.05}, true, 0, none},
	} {
		if got := c.headroom.slowdownLimit(c.reserved, c.sequences); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: slowdown %v, want %v", c.name, got, c.want)
		}
	}
}

func TestLowPriorityDebt(t *testing.T) {
	var l ClassLoad
	now := time.Unix(1000, 0)
	f := func(name string, share float64, after time.Duration, want bool) {
		t.Helper()
		if now = now.Add(after); l.payLowPriorityDebt(share, now) != want {
			t.Errorf("%s: a low-priority request may start: %v, want %v", name, !want, want)
		}
	}
	f("none yet", 0.05, 0, true)
	f("nothing allowed", 0, time.Second, false)
	l.debt = 0.1
	f("2 s of a twentieth pay for 0.1 s", 0.05, 1900*time.Millisecond, false)
	f("and then they do", 0.05, 101*time.Millisecond, true)
	l.debt = 100
	f("no bound", math.Inf(1), 0, true)
	f("which forgives the debt", 0.05, 0, true)
	l.lowPriority = 10 // which take decodeShare of the time each: 0.06
	f("sequences take more than is allowed", 0.05, 10*time.Second, false)
	f("or less", 0.07, 20*time.Second, true)
}
