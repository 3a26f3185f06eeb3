package main

import (
	"log/slog"
	"sync"

	"warmroute/backends"
	"warmroute/router"
)

// stalls logs when backends fall silent with requests of ours, and when they are
// back. Safe for concurrent use.
type stalls struct {
	router *router.Router
	log    *slog.Logger

	mu   sync.Mutex
	told map[*backends.Backend]lastStalls // as of the last look
}

type lastStalls struct {
	times  uint64
	silent bool
}

// tell looks at a backend. A stall may be over by then: what waits is moved to
// another backend as soon as it is found.
func (s *stalls) tell(b *backends.Backend) {
	times, silent := s.router.Stalls(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.told[b]
	if s.told[b] = (lastStalls{times, silent}); times == 0 {
		delete(s.told, b) // nor is one kept that has left
	}
	switch {
	case times > last.times:
		s.log.Warn("backend produces nothing, and gets nothing new until it does", "backend", b.Name, "in_flight", b.InFlight.Load())
	case last.silent && !silent:
		s.log.Info("backend produces again", "backend", b.Name)
	}
}

// forget is for a backend that has left.
func (s *stalls) forget(b *backends.Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.told, b)
}
