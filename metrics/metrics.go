// Package metrics holds every Prometheus instrument of the proxy. Label values
// come from the configuration, from the replicas' own model lists, or from a
// fixed set: never from a client's bytes.
package metrics

import (
	"net/http"
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
	latency    *latencies
	overhead   series
	prompt     *prometheus.CounterVec
	predicted  *prometheus.CounterVec
	observed   *prometheus.CounterVec
	spills     *prometheus.CounterVec
	retries    *prometheus.CounterVec
	retryWaits *prometheus.CounterVec
	aborts     *prometheus.CounterVec
	polls      *prometheus.CounterVec
	recording  prometheus.Counter
	hold       series
	holdEnds   *prometheus.CounterVec
	reloads    reloads
	models     models
	counters   counters

	unauthorized *prometheus.CounterVec
	closed       prometheus.Counter // client connections
}

// New makes the instruments, and collectors that read the backends' and the
// index's state when scraped.
func New(fleet *backends.Registry, r *router.Router, version string) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "warmroute_" + name, Help: help}, labels)
	}
	m := &Metrics{
		fleet:     fleet,
		registry:  prometheus.NewRegistry(),
		models:    models{unlisted: map[string]time.Time{}},
		counters:  counters{by: map[ending]*endingCounters{}},
		requests:  counter("requests_total", "Requests that ended, by the status sent to the client; 499: the client left; 502, 504: also answers that broke off or fell silent in their midst.", "endpoint", "model", "backend", "code"),
		latency:   newLatencies(),
		overhead:  newOverhead(),
		hold:      newHold(),
		prompt:    counter("prompt_tokens_total", "Prompt tokens of answered requests, as the replica counted them where it did, else about.", "model", "backend"),
		predicted: counter("predicted_cached_tokens_total", "Prompt tokens that the chosen backend was expected to hold, about.", "model", "backend"),
		observed:  counter("observed_cached_tokens_total", "Prompt tokens that replicas said came from their cache.", "model", "backend"),
		spills:    counter("spills_total", "Requests sent away from the best match because it was too busy.", "model"),
		retries:   counter("retries_total", "Attempts that failed before anything was committed, by reason.", "reason"),
		aborts:    counter("aborts_total", "Requests whose client left, or did not read its answer, or that an operator cancelled, by phase.", "phase"),
		polls:     counter("poll_errors_total", "Scrapes of a replica's /metrics that failed.", "backend"),
		recording: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_record_dropped_total", Help: "Requests missing from the recording of traffic (record.file): too many came at once, they are larger than can be replayed, they ended after the rest, or the disk is full.",
		}),
	}
	m.reloads = newReloads()
	m.retryWaits = counter("retry_waits_total", "Requests that waited because too many had to be tried again (retry.share), by how that ended.", "end")
	m.holdEnds = counter("hold_ends_total", "Requests that left the hold queue, or were not let in, by how.", "end")
	m.unauthorized = counter("unauthorized_total", "Requests refused for their API key, by why: missing, unknown, expired.", "reason")
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "warmroute_build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	m.closed = newClosedForRoom()
	m.zero()
	m.registry.MustRegister(m.closed, m.requests, m.latency, m.overhead, m.prompt, m.predicted, m.observed,
		m.spills, m.retries, m.retryWaits, m.aborts, m.polls, m.recording, m.hold, m.holdEnds, m.unauthorized, m.reloads.total, m.reloads.taken, m.reloads.last, info, &state{fleet, r}, &learned{fleet, r},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the exposition, in the format that the scraper asks for: native
// histograms are in protobuf alone, exemplars in that and in OpenMetrics.
func (m *Metrics) Handler() http.Handler {
	handler := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry, EnableOpenMetrics: true})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.forgetModels()
		m.zeroPolls()
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

// Ended records a request at its end, which is now. The latencies may show it, by its
// id.
func (m *Metrics) Ended(r *Request, id string, now time.Time) {
	m.ended(r, id, now)
	m.counted(r.Model) // after it, so that what is forgotten meanwhile is noted again
	if r.Backend != "" && m.fleet.Find(r.Backend) == nil {
		m.Forget(r.Backend) // it left before this came
	}
}

func (m *Metrics) ended(r *Request, id string, now time.Time) {
	count := m.countersOf(r)
	count.requests.Inc()
	if r.Backend == "" {
		return
	}
	took := m.latency.of(r.Model, r.Backend)
	took[duration].of(r.Duration, id, now)
	m.overhead.of(r.Overhead, id, now)
	if r.TTFT > 0 {
		took[ttft].of(r.TTFT, id, now)
	}
	if r.Spilled {
		m.spills.WithLabelValues(r.Model).Inc()
	}
	if r.Code == http.StatusOK {
		count.prompt.Add(float64(r.PromptTokens))
		count.predicted.Add(float64(r.PredictedTokens))
		count.observed.Add(float64(r.ObservedTokens))
	}
}

// RecordDropped records a request that is missing from the recording of traffic.
func (m *Metrics) RecordDropped() { m.recording.Inc() }

// PollFailed records a scrape that failed.
func (m *Metrics) PollFailed(b *backends.Backend) { m.polls.WithLabelValues(b.Name).Inc() }
