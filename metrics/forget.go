package metrics

import "github.com/prometheus/client_golang/prometheus"

// Forget deletes the series of a backend that has left the fleet, so that names
// that come and go leave nothing behind.
func (m *Metrics) Forget(backend string) {
	gone := prometheus.Labels{"backend": backend}
	for _, c := range []*prometheus.CounterVec{m.requests, m.prompt, m.predicted, m.observed, m.polls} {
		c.DeletePartialMatch(gone)
	}
	for _, h := range []*prometheus.HistogramVec{m.duration, m.ttft} {
		h.DeletePartialMatch(gone)
	}
}
