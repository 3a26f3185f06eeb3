package main

import (
	"sync"

	"warmroute/backends"
)

// firstChecks tells when every backend of the start was checked once: before
// that, nobody knows where to send a request. Safe for concurrent use.
type firstChecks struct {
	done chan struct{} // closed then

	mu   sync.Mutex
	left map[*backends.Backend]bool
}

func newFirstChecks(all []*backends.Backend) *firstChecks {
	f := &firstChecks{done: make(chan struct{}), left: map[*backends.Backend]bool{}}
	for _, b := range all {
		f.left[b] = true
	}
	return f
}

// note is called after each check that changed a backend's state, and after its first.
func (f *firstChecks) note(b *backends.Backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.left[b] {
		return
	}
	if delete(f.left, b); len(f.left) == 0 {
		close(f.done)
	}
}
