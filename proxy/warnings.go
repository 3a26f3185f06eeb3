package proxy

import (
	"sync"
	"time"

	"warmroute/backends"
)

// warningGap is the least time between two warnings of failed attempts on one
// backend: a fleet that fails, fails thousands a second.
const warningGap = time.Second

// warnings are how many failed attempts were not warned of. Safe for concurrent
// use; the zero value is ready. Its size is that of the fleet.
type warnings struct {
	mu sync.Mutex
	of []warned // by slot
}

type warned struct {
	backend *backends.Backend // whose slot it was then
	at      time.Time
	left    int // left out since
}

// due reports whether a failed attempt on b is to be warned of, and how many were
// left out since the last that was.
func (w *warnings) due(b *backends.Backend, now time.Time) (due bool, left int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.of) <= b.Slot {
		w.of = append(w.of, warned{})
	}
	of := &w.of[b.Slot]
	if of.backend != b {
		*of = warned{backend: b}
	}
	if now.Sub(of.at) < warningGap {
		of.left++
		return false, 0
	}
	left = of.left
	of.at, of.left = now, 0
	return true, left
}
