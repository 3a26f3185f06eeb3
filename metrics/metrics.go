// Package metrics has the Prometheus metrics of the proxy: what is counted as it happens, and what is read from the
// router and the backends at each scrape. Label values come from the configuration, from the model lists of the
// backends or from a fixed set, never from a client.
package metrics

//go:generate go test ../e2e -run TestMetricsReferenceIsCurrent -update

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"warmroute/backends"
	"warmroute/router"
)

// Metrics records what the proxy does. It is safe for concurrent use.
type Metrics struct {
	fleet    *backends.Registry
	registry *prometheus.Registry
	requests *requestMetrics
	events   *eventMetrics
	reloads  *reloadMetrics
}

// New returns the metrics of a proxy. The state of the backends and of the router is read at each scrape.
func New(fleet *backends.Registry, r *router.Router, version string) *Metrics {
	registry := prometheus.NewRegistry()
	register := promauto.With(registry)
	m := &Metrics{
		fleet:    fleet,
		registry: registry,
		requests: newRequestMetrics(register, fleet),
		events:   newEventMetrics(register),
		reloads:  newReloadMetrics(register),
	}
	m.registry.MustRegister(&fleetCollector{fleet, r}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registerFunc(prometheus.GaugeValue, "build_info", "Always 1; the label has the version.", prometheus.Labels{"version": version},
		func() float64 { return 1 })
	return m
}

// Handler returns the handler of /metrics. The scraper chooses the format: only
// protobuf has native histograms, and only protobuf and OpenMetrics have exemplars.
func (m *Metrics) Handler() http.Handler {
	handler := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry, EnableOpenMetrics: true})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.requests.deleteUnlistedModels()
		for _, b := range backendsWithSeries(m.fleet) {
			m.events.pollErrors.WithLabelValues(b.Name)
			if m.fleet.Find(b.Name) == nil { // removed in the meantime
				m.DeleteBackend(b.Name)
			}
		}
		handler.ServeHTTP(w, r)
	})
}

// Register exports the metrics of a collector, whose names no other has.
func (m *Metrics) Register(c prometheus.Collector) { m.registry.MustRegister(c) }

// RegisterRequestsInFlight exports the number of unfinished requests, which read returns
// at each scrape. Like all Register methods, it must be called at most once.
func (m *Metrics) RegisterRequestsInFlight(read func() int64) {
	m.registerFunc(prometheus.GaugeValue, "requests_in_flight",
		"Unfinished requests: being read, waiting in the admission queue or sent to a backend.", nil, toFloat(read))
}

// RegisterStoredResponses exports the number of stored responses whose replica is known.
func (m *Metrics) RegisterStoredResponses(read func() int) {
	m.registerFunc(prometheus.GaugeValue, "stored_responses",
		"Stored responses of /v1/responses whose replica is known (responses.max_entries).", nil, toFloat(read))
}

// RegisterDroppedLogLines exports the number of lines dropped from the access log.
func (m *Metrics) RegisterDroppedLogLines(read func() int64) {
	const help = "Lines dropped from the access log because its file or pipe did not accept them in time."
	m.registerFunc(prometheus.CounterValue, "access_log_dropped_lines_total", help, nil, toFloat(read))
}

// RegisterTraceSpans exports the numbers of spans by result.
func (m *Metrics) RegisterTraceSpans(sent, failed, dropped func() int64) {
	const help = "Spans by result: sent to the collector, failed to be sent, or dropped because the queue was full."
	for result, read := range map[string]func() int64{"sent": sent, "failed": failed, "dropped": dropped} {
		m.registerFunc(prometheus.CounterValue, "trace_spans_total", help, prometheus.Labels{"result": result}, toFloat(read))
	}
}

func toFloat[T int | int64](read func() T) func() float64 {
	return func() float64 { return float64(read()) }
}

// registerFunc exports a metric that read returns at each scrape.
func (m *Metrics) registerFunc(kind prometheus.ValueType, name, help string, labels prometheus.Labels, read func() float64) {
	o := prometheus.Opts{Name: "warmroute_" + name, Help: help, ConstLabels: labels}
	if kind == prometheus.CounterValue {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts(o), read))
		return
	}
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts(o), read))
}

// RegisterKeyUsage exports the usage of each API key.
func (m *Metrics) RegisterKeyUsage(read func() []KeyUsage) {
	m.registry.MustRegister(keyCollector(read))
}

type reloadMetrics struct {
	total       *prometheus.CounterVec
	successful  prometheus.Gauge
	lastSuccess prometheus.Gauge
}

func newReloadMetrics(register promauto.Factory) *reloadMetrics {
	r := &reloadMetrics{
		total: newCounterVec(register, "config_reloads_total",
			"Reloads of the configuration by result, ok or failed. A failed reload changes nothing.", "result"),
		successful: register.NewGauge(prometheus.GaugeOpts{
			Name: "warmroute_config_last_reload_successful", Help: "1 if the last reload of the configuration succeeded, 0 if it failed.",
		}),
		lastSuccess: register.NewGauge(prometheus.GaugeOpts{
			Name: "warmroute_config_last_reload_success_timestamp_seconds", Help: "Time at which the configuration in use was loaded.",
		}),
	}
	r.total.WithLabelValues("ok")
	r.total.WithLabelValues("failed")
	r.successful.Set(1)
	r.lastSuccess.SetToCurrentTime()
	return r
}

// RecordReload records a reload of the configuration.
func (m *Metrics) RecordReload(ok bool) {
	if !ok {
		m.reloads.total.WithLabelValues("failed").Inc()
		m.reloads.successful.Set(0)
		return
	}
	m.reloads.total.WithLabelValues("ok").Inc()
	m.reloads.successful.Set(1)
	m.reloads.lastSuccess.SetToCurrentTime()
}

func newCounterVec(register promauto.Factory, name, help string, labels ...string) *prometheus.CounterVec {
	return register.NewCounterVec(prometheus.CounterOpts{Name: "warmroute_" + name, Help: help}, labels)
}

// histogramOpts returns the options of a histogram of seconds with classic and native
// buckets. minSeconds is the upper bound of the native zero bucket.
func histogramOpts(name, help string, minSeconds float64, buckets ...float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: "warmroute_" + name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor:    1.1,
		NativeHistogramZeroThreshold:   minSeconds,
		NativeHistogramMaxBucketNumber: 160,
	}
}
