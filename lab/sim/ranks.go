package sim

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"warmroute/lab/sim/engine"
)

// RankConfig is how a server with data-parallel engines behaves.
type RankConfig struct {
	// First is the label of the first engine: that of a hybrid deployment's later node is not 0.
	First int
	// Rust: X-data-parallel-rank is the label of an engine, as for the Rust front end; else its place among the
	// server's engines.
	Rust bool
	// Ignored: X-data-parallel-rank has no effect.
	Ignored bool
	// Spare engines can be added by ScaleRanks.
	Spare int
}

// pinnedRank returns the engine that a request names in its header, or anyRank. vLLM ignores
// what is not a number, and refuses what is not one of its ranks.
func (s *Server) pinnedRank(r *http.Request) (index int, err error) {
	number, err := strconv.Atoi(r.Header.Get("X-Data-Parallel-Rank"))
	if err != nil || s.cfg.Rank.Ignored {
		return anyRank, nil
	}
	n := s.CountRanks()
	index = number
	if s.cfg.Rank.Rust {
		index -= s.cfg.Rank.First
	}
	switch {
	case index >= 0 && index < n:
		return index, nil
	case s.cfg.Rank.Rust:
		var connected []string
		for i := range n {
			connected = append(connected, strconv.Itoa(s.cfg.Rank.First+i))
		}
		return 0, badRequest("", fmt.Sprintf("data parallel rank %d is not connected to this frontend; connected ranks: [%s]", number,
			strings.Join(connected, ", ")))
	}
	return 0, badRequest("", fmt.Sprintf("data_parallel_rank %d is out of range [0, %d).", number, n))
}

// CountRanks returns how many engines the server has.
func (s *Server) CountRanks() int {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	return s.serving
}

// ScaleRanks changes the number of engines, as an elastic deployment does: requests on those that are removed end
// there.
func (s *Server) ScaleRanks(n int) error {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	if n < 1 || n > len(s.ranks) {
		return fmt.Errorf("%d data-parallel engines: choose 1 to %d", n, len(s.ranks))
	}
	s.serving = n
	s.balanceServing()
	return nil
}

// RankStats returns the counters and gauges of each engine.
func (s *Server) RankStats() (stats []engine.Stats) {
	s.engineMu.Lock()
	defer s.engineMu.Unlock()
	s.expireLeases(time.Since(s.startedAt))
	for _, k := range s.ranks {
		stats = append(stats, k.engine.Stats())
	}
	return stats
}

// balanceServing makes the server choose among the engines that it has. It requires engineMu, or that nothing runs yet.
func (s *Server) balanceServing() {
	var engines []*engine.Engine
	for _, k := range s.ranks[:s.serving] {
		engines = append(engines, k.engine)
	}
	s.balancer = engine.NewBalancer(engines)
}
