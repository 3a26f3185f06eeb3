// Package metrics holds every Prometheus instrument of the proxy. Label values
// come from the configuration, from the replicas' own model lists, or from a
// fixed set: never from a client's bytes.
package metrics

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"warmroute/backends"
	"warmroute/router"
)

// Metrics records what the proxy does. Safe for concurrent use.
type Metrics struct {
	fleet    *backends.Registry
	registry *prometheus.Registry

	requests   *prometheus.CounterVec
	duration   *prometheus.HistogramVec
	ttft       *prometheus.HistogramVec
	overhead   prometheus.Histogram
	prompt     *prometheus.CounterVec
	predicted  *prometheus.CounterVec
	observed   *prometheus.CounterVec
	spills     *prometheus.CounterVec
	retries    *prometheus.CounterVec
	retryWaits *prometheus.CounterVec
	aborts     *prometheus.CounterVec
	polls      *prometheus.CounterVec
	recording  prometheus.Counter
	hold       prometheus.Histogram
	holdEnds   *prometheus.CounterVec
	reloads    reloads
	models     models

	unauthorized *prometheus.CounterVec
	closed       prometheus.Counter // client connections
}

// Latency buckets fit language models: from a hit on an idle replica to a cold
// prompt of 100,000 tokens behind a queue.
var (
	durationBuckets = []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600}
	ttftBuckets     = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 120}
	holdBuckets     = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	overheadBuckets = []float64{25e-6, 50e-6, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, .01, .025, .1}
)

// New makes the instruments, and collectors that read the backends' and the
// index's state when scraped.
func New(fleet *backends.Registry, r *router.Router, version string) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "warmroute_" + name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "warmroute_" + name, Help: help, Buckets: buckets}, labels)
	}
	m := &Metrics{
		fleet:     fleet,
		registry:  prometheus.NewRegistry(),
		models:    models{unlisted: map[string]time.Time{}},
		requests:  counter("requests_total", "Requests that ended, by the status sent to the client; 499: the client left; 502, 504: also answers that broke off or fell silent in their midst.", "endpoint", "model", "backend", "code"),
		duration:  histogram("request_duration_seconds", "Arrival of a request to the end of its answer.", durationBuckets, "model", "backend"),
		ttft:      histogram("ttft_seconds", "Arrival of a streamed request to its first content chunk written to the client.", ttftBuckets, "model", "backend"),
		prompt:    counter("prompt_tokens_total", "Prompt tokens of answered requests, as the replica counted them where it did, else about.", "model", "backend"),
		predicted: counter("predicted_cached_tokens_total", "Prompt tokens that the chosen backend was expected to hold, about.", "model", "backend"),
		observed:  counter("observed_cached_tokens_total", "Prompt tokens that replicas said came from their cache.", "model", "backend"),
		spills:    counter("spills_total", "Requests sent away from the best match because it was too busy.", "model"),
		retries:   counter("retries_total", "Attempts that failed before anything was committed, by reason.", "reason"),
		aborts:    counter("aborts_total", "Requests whose client left, or did not read its answer, by phase.", "phase"),
		polls:     counter("poll_errors_total", "Scrapes of a replica's /metrics that failed.", "backend"),
		recording: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_record_dropped_total", Help: "Requests missing from the recording of traffic (record.file): too many came at once, they are larger than can be replayed, they ended after the rest, or the disk is full.",
		}),
		overhead: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "warmroute_overhead_seconds", Buckets: overheadBuckets,
			Help: "Arrival of the whole body to the request sent on, less time held.",
		}),
	}
	m.hold = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "warmroute_hold_seconds", Buckets: holdBuckets,
		Help: "Time in the hold queue of requests that were in it.",
	})
	m.reloads = newReloads()
	m.retryWaits = counter("retry_waits_total", "Requests that waited because too many had to be tried again (retry.share), by how that ended.", "end")
	for _, end := range []RetryEnd{RetrySent, RetryGivenUp, RetryLeft} {
		m.retryWaits.WithLabelValues(string(end))
	}
	m.holdEnds = counter("hold_ends_total", "Requests that left the hold queue, or were not let in, by how.", "end")
	for _, end := range []HeldEnd{HeldSent, HeldRefused, HeldTooLong, HeldNoneReady, HeldLeft} {
		m.holdEnds.WithLabelValues(string(end)) // so that a rate is there before the first one
	}
	m.unauthorized = counter("unauthorized_total", "Requests refused for their API key, by why: missing, unknown, expired.", "reason")
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "warmroute_build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	m.closed = newClosedForRoom()
	m.registry.MustRegister(m.closed, m.requests, m.duration, m.ttft, m.overhead, m.prompt, m.predicted, m.observed,
		m.spills, m.retries, m.retryWaits, m.aborts, m.polls, m.recording, m.hold, m.holdEnds, m.unauthorized, m.reloads.total, m.reloads.last, info, &state{fleet, r}, &learned{fleet, r},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the exposition.
func (m *Metrics) Handler() http.Handler {
	handler := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.forgetModels()
		handler.ServeHTTP(w, r)
	})
}

// Request is what there is to say of one request at its end. Model and Backend
// are empty when it never got so far.
type Request struct {
	Endpoint, Model, Backend string
	Code                     int
	Duration                 time.Duration
	TTFT                     time.Duration // 0: not a stream, or no content came
	Overhead                 time.Duration // 0: never sent
	PromptTokens             int
	PredictedTokens          int
	ObservedTokens           int // 0 also where the replica does not tell
	Spilled                  bool
}

// Ended records a request at its end.
func (m *Metrics) Ended(r *Request) {
	m.ended(r)
	m.counted(r.Model) // after it, so that what is forgotten meanwhile is noted again
	if r.Backend != "" && m.fleet.Find(r.Backend) == nil {
		m.Forget(r.Backend) // it left before this came
	}
}

func (m *Metrics) ended(r *Request) {
	m.requests.WithLabelValues(r.Endpoint, r.Model, r.Backend, strconv.Itoa(r.Code)).Inc()
	if r.Backend == "" {
		return
	}
	m.duration.WithLabelValues(r.Model, r.Backend).Observe(r.Duration.Seconds())
	m.overhead.Observe(r.Overhead.Seconds())
	if r.TTFT > 0 {
		m.ttft.WithLabelValues(r.Model, r.Backend).Observe(r.TTFT.Seconds())
	}
	if r.Spilled {
		m.spills.WithLabelValues(r.Model).Inc()
	}
	if r.Code == http.StatusOK {
		m.prompt.WithLabelValues(r.Model, r.Backend).Add(float64(r.PromptTokens))
		m.predicted.WithLabelValues(r.Model, r.Backend).Add(float64(r.PredictedTokens))
		m.observed.WithLabelValues(r.Model, r.Backend).Add(float64(r.ObservedTokens))
	}
}

// Retried records an attempt that failed and could be made elsewhere.
func (m *Metrics) Retried(reason string) { m.retries.WithLabelValues(reason).Inc() }

// Aborted records a client that left.
func (m *Metrics) Aborted(phase string) { m.aborts.WithLabelValues(phase).Inc() }

// RecordDropped records a request that is missing from the recording of traffic.
func (m *Metrics) RecordDropped() { m.recording.Inc() }

// PollFailed records a scrape that failed.
func (m *Metrics) PollFailed(b *backends.Backend) { m.polls.WithLabelValues(b.Name).Inc() }
