package metrics

import "github.com/prometheus/client_golang/prometheus"

// WatchInFlight has read asked at each scrape for the requests that have come and
// not ended. It may be called once.
func (m *Metrics) WatchInFlight(read func() int64) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "warmroute_requests_in_flight",
		Help: "Requests that have come and not ended: those whose body is still read, those that are held, and those on a backend.",
	}, func() float64 { return float64(read()) }))
}
