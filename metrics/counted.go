package metrics

import (
	"maps"
	"net/http"
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// counters are those that a request is counted in at its end, found together: a
// vector hashes and compares all labels anew for each of them, each time.
type counters struct {
	mu sync.RWMutex
	by map[ending]*endingCounters
}

// ending is all that tells the counters of one request from those of another.
type ending struct {
	endpoint, model, backend string
	code                     int
}

type endingCounters struct {
	requests                    prometheus.Counter
	prompt, predicted, observed prometheus.Counter // nil where no replica has answered with a 200
}

// countersOf finds the counters of a request.
func (m *Metrics) countersOf(r *Request) *endingCounters {
	c, key := &m.counters, ending{r.Endpoint, r.Model, r.Backend, r.Code}
	c.mu.RLock()
	found := c.by[key]
	c.mu.RUnlock()
	if found != nil {
		return found
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if found = c.by[key]; found != nil {
		return found
	}
	found = &endingCounters{requests: m.requests.WithLabelValues(r.Endpoint, r.Model, r.Backend, strconv.Itoa(r.Code))}
	if r.Backend != "" && r.Code == http.StatusOK {
		found.prompt = m.prompt.WithLabelValues(r.Model, r.Backend)
		found.predicted = m.predicted.WithLabelValues(r.Model, r.Backend)
		found.observed = m.observed.WithLabelValues(r.Model, r.Backend)
	}
	c.by[key] = found
	return found
}

// forget follows the deletion of the series themselves, so that none that was
// deleted is counted in for longer than that takes.
func (c *counters) forget(gone func(served) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.by, func(of ending, _ *endingCounters) bool { return gone(served{of.model, of.backend}) })
}
