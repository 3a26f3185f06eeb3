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

// ready tells whoever started this process that it serves, and knows its fleet.
func (s *service) ready() {
	s.tellSystemd("READY=1")
	if err := s.control.before.serves(); err != nil {
		// All the more this one has to serve.
		s.log.Warn("the process before has ended in the hand-over", "reason", err.Error())
	}
}
