package engine

import "time"

// Balancer chooses the engine for each request to a data-parallel server, as the front end
// of a vLLM with one API server process does. It is not safe for concurrent use.
type Balancer struct {
	engines    []*Engine
	reports    []report // by engine
	reportedAt time.Duration
	start      int // the engine at which the next search begins
}

// report is what a front end was told of an engine.
type report struct {
	running, waiting int
	kvUsage          float64
}

const reportInterval = 100 * time.Millisecond

// NewBalancer returns a balancer over the engines of one server. From now on they share the first one's API server.
func NewBalancer(engines []*Engine) *Balancer {
	for _, e := range engines {
		e.api = engines[0].api
	}
	return &Balancer{engines: engines, reports: make([]report, len(engines)), reportedAt: -reportInterval}
}

// Choose returns the index of the engine for a request that arrives at now. The caller adds
// the request to it.
func (b *Balancer) Choose(now time.Duration) (rank int) {
	if len(b.engines) == 1 {
		return 0
	}
	b.updateReports(now)
	least := 0.0
	for i := range b.engines {
		candidate := (b.start + i) % len(b.engines)
		if score := b.score(candidate); i == 0 || score < least {
			rank, least = candidate, score
		}
	}
	b.reports[rank].waiting++
	b.start = (b.start + 1) % len(b.engines)
	return rank
}

// score is higher for a more loaded engine. What the front end itself has sent there is
// known exactly, the rest as of the last report. Waiting requests count for more where
// the KV cache is full, since they wait for long.
func (b *Balancer) score(rank int) float64 {
	e, r := b.engines[rank], &b.reports[rank]
	inFlight := e.running() + len(e.arriving) + len(e.waiting)
	return float64(max(inFlight, r.running+r.waiting)) + 6*float64(r.waiting)*max(0, r.kvUsage-0.5)
}

// updateReports replaces the reports when they are too old.
func (b *Balancer) updateReports(now time.Duration) {
	if now < b.reportedAt+reportInterval {
		return
	}
	b.reportedAt = now
	for i, e := range b.engines {
		st := e.Stats()
		b.reports[i] = report{st.Running, st.Waiting, st.KVUsage}
	}
}
