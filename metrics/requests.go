package metrics

import "github.com/prometheus/client_golang/prometheus"

// WatchAccessLog has lost asked at each scrape. It may be called once.
func (m *Metrics) WatchAccessLog(lost func() int64) {
	m.watch("access_log_lost_total", "Lines missing from the access log: its disk or its reader did not take them.", nil, lost)
}

// WatchTraces has all three asked at each scrape. It may be called once.
func (m *Metrics) WatchTraces(sent, failed, dropped func() int64) {
	const help = "Spans, by what became of them: sent to the collector, failed there, or dropped because too many waited."
	m.watch("trace_spans_total", help, prometheus.Labels{"end": "sent"}, sent)
	m.watch("trace_spans_total", help, prometheus.Labels{"end": "failed"}, failed)
	m.watch("trace_spans_total", help, prometheus.Labels{"end": "dropped"}, dropped)
}

func (m *Metrics) watch(name, help string, labels prometheus.Labels, read func() int64) {
	m.registry.MustRegister(prometheus.NewCounterFunc(
		prometheus.CounterOpts{Name: "warmroute_" + name, Help: help, ConstLabels: labels},
		func() float64 { return float64(read()) },
	))
}
