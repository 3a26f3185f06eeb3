package metrics

import "github.com/prometheus/client_golang/prometheus"

// newClosedForRoom counts client connections that made room for others.
func newClosedForRoom() prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{
		Name: "warmroute_connections_closed_total",
		Help: "Client connections that carried no request for longest, closed to make room for new ones (limits.connections).",
	})
}

// ClosedForRoom records a client connection that was closed for another.
func (m *Metrics) ClosedForRoom() { m.closed.Inc() }
