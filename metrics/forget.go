package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Forget deletes the series of a backend that has left the fleet, so that names
// that come and go leave nothing behind.
func (m *Metrics) Forget(backend string) {
	m.forget(prometheus.Labels{"backend": backend}, func(s served) bool { return s.backend == backend })
}

// forget takes the same twice: as labels, and as what is true of those that have them.
func (m *Metrics) forget(gone prometheus.Labels, has func(served) bool) {
	for _, c := range []*prometheus.CounterVec{m.requests, m.prompt, m.predicted, m.observed, m.spills, m.polls} {
		c.DeletePartialMatch(gone)
	}
	m.counters.forget(has)
	m.latency.forget(has)
}

// unlistedFor is for how long the series of a model stay that no replica lists any
// more: what they counted last is to be read, and an adapter that is unloaded and
// loaded anew goes on with them.
const unlistedFor = 10 * time.Minute

// models are those that have series, each with the time when it was first found to
// be listed no more; zero: it is listed.
type models struct {
	mu       sync.Mutex
	unlisted map[string]time.Time
}

// counted notes that a model has series. Adapters come and go by name, each with
// its own, so that a new one is the time to forget those that have gone.
func (m *Metrics) counted(model string) {
	m.models.mu.Lock()
	_, known := m.models.unlisted[model]
	if !known {
		m.models.unlisted[model] = time.Time{}
	}
	m.models.mu.Unlock()
	if !known {
		if model != "" {
			m.spills.WithLabelValues(model)
		}
		m.forgetModels()
	}
}

// forgetModels deletes the series of models that have long been listed no more.
func (m *Metrics) forgetModels() {
	m.models.mu.Lock()
	defer m.models.mu.Unlock()
	catalog, now := m.fleet.Catalog(), time.Now()
	for model, since := range m.models.unlisted {
		switch _, listed := catalog.Find(model); {
		case listed || model == "":
			m.models.unlisted[model] = time.Time{}
		case since.IsZero():
			m.models.unlisted[model] = now
		case now.Sub(since) >= unlistedFor:
			delete(m.models.unlisted, model)
			m.forget(prometheus.Labels{"model": model}, func(s served) bool { return s.model == model })
		}
	}
}
