package vllmsim

import (
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// counters are what /metrics counts beside the engine. Guarded by Server.engineMu.
type counters struct {
	success                                [killed]int64 // ends by reason
	ttft, queue, prefill, decode, e2e, itl *histogram
}

func newCounters() *counters { return &counters{} }

type histogram struct{}

func (c *counters) observe(step StepResult) {}

func (s *Server) start() time.Time {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.began
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	st := s.Stats()
	_ = st
	_ = fmt.Sprint
	_ = strconv.Itoa
	w.WriteHeader(200)
}
