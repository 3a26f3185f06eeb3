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
	told map[*backends.Backend]bool // those that were silent at the last look
}

// tell looks at a backend.
func (s *stalls) tell(b *backends.Backend) {
	_, silent := s.router.Stalls(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case silent && !s.told[b]:
		s.told[b] = true
		s.log.Warn("backend produces nothing, and gets nothing new until it does", "backend", b.Name, "in_flight", b.InFlight.Load())
	case !silent && s.told[b]:
		delete(s.told, b)
		s.log.Info("backend produces again", "backend", b.Name)
	}
}

// forget is for a backend that has left.
func (s *stalls) forget(b *backends.Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.told, b)
}
