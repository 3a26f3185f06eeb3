package metrics

import "github.com/prometheus/client_golang/prometheus"

// reloads tells of the configuration's being read while the proxy runs.
type reloads struct {
	total *prometheus.CounterVec
	taken prometheus.Gauge // whether the last one was
	last  prometheus.Gauge
}

func newReloads() reloads {
	r := reloads{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_config_reloads_total", Help: "Times that the configuration was read anew while running, by result: ok or failed. A failed one changes nothing.",
		}, []string{"result"}),
		taken: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "warmroute_config_last_reload_successful", Help: "Whether the configuration that was read last is in use: 1, or 0 when it has a fault.",
		}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "warmroute_config_last_reload_success_timestamp_seconds", Help: "When the configuration in use was read.",
		}),
	}
	r.total.WithLabelValues("ok") // so that a rate is there before the first one
	r.total.WithLabelValues("failed")
	r.taken.Set(1)
	r.last.SetToCurrentTime()
	return r
}

// Reloaded records that the configuration was read anew, and whether it is in use.
func (m *Metrics) Reloaded(ok bool) {
	if !ok {
		m.reloads.total.WithLabelValues("failed").Inc()
		m.reloads.taken.Set(0)
		return
	}
	m.reloads.total.WithLabelValues("ok").Inc()
	m.reloads.taken.Set(1)
	m.reloads.last.SetToCurrentTime()
}
