package metrics

import (
	"maps"
	"net/http"
	"sort"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"warmroute/backends"
)

// Request describes a finished request. Model and Backend are empty if it failed before they were known.
type Request struct {
	Endpoint, Model, Backend string
	ModelName                string // by which the model was asked for, of models.names; "": by none
	Code                     int
	Duration                 time.Duration
	TTFT                     time.Duration // 0: not a stream, or no content
	Overhead                 time.Duration // 0: not sent to a backend
	PromptTokens             int
	PredictedTokens          int     // of PromptTokens, to be cached
	CachedTokens             int     // of PromptTokens, as the replica has reported, else as predicted
	CachedKnown              bool    // the replica has reported CachedTokens
	ElsewhereTokens          int     // of PromptTokens, which another backend held, and this one not, as far as is known
	SavedPrefillSeconds      float64 // that the cached tokens would have taken
	MatchedBusy              bool
}

// StatusClientClosed is the status of a client disconnect in metrics and logs.
const StatusClientClosed = 499

// Failed reports whether the request has failed; a client disconnect is no failure.
func (r *Request) Failed() bool { return r.Code >= 400 && r.Code != StatusClientClosed }

// requestMetrics are the instruments labelled by model and backend. Label lookups of a vector cost too much for
// every request, so the instruments of each combination are cached.
type requestMetrics struct {
	fleet *backends.Registry

	requests    *prometheus.CounterVec
	named       *prometheus.CounterVec
	prompt      *prometheus.CounterVec
	predicted   *prometheus.CounterVec
	cached      *prometheus.CounterVec
	saved       *prometheus.CounterVec
	elsewhere   *prometheus.CounterVec
	matchedBusy *prometheus.CounterVec
	duration    *prometheus.HistogramVec
	ttft        *prometheus.HistogramVec
	itl         *prometheus.HistogramVec
	overhead    *latencyHistogram

	mu       sync.RWMutex // guards the caches and the deletion of series
	counters map[requestLabels]*requestCounters
	placed   map[placement]*placementMetrics
	unlisted map[string]time.Time // models with series, by the time they were first found unlisted; zero: listed

	isModelName     func(string) bool // reports whether a name is one of models.names; nil: any
	namesWithSeries map[string]bool
}

type requestLabels struct {
	endpoint string
	placement
	code int
}

type placement struct{ model, backend string }

type requestCounters struct {
	requests prometheus.Counter
	placed   *placementMetrics // nil without a backend
}

type placementMetrics struct {
	reported, estimated tokenCounters // of requests whose cached tokens the replica has reported, and of others
	saved, matchedBusy  prometheus.Counter
	elsewhere           prometheus.Counter
	duration, ttft      *latencyHistogram
	itl                 prometheus.Observer
}

type tokenCounters struct{ prompt, predicted, cached prometheus.Counter }

// Values of the label cached_tokens.
const (
	cachedReported  = "reported"
	cachedPredicted = "predicted"
)

func (m *requestMetrics) newTokenCounters(at placement, cachedTokens string) tokenCounters {
	return tokenCounters{
		prompt:    m.prompt.WithLabelValues(at.model, at.backend, cachedTokens),
		predicted: m.predicted.WithLabelValues(at.model, at.backend, cachedTokens),
		cached:    m.cached.WithLabelValues(at.model, at.backend, cachedTokens),
	}
}

// The buckets range from a cached prompt on an idle replica to a cold prompt of 100,000 tokens behind a queue.
var (
	durationOpts = histogramOpts("request_duration_seconds", "Time from the arrival of a request to the end of its response.",
		1.0/(1<<10), .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
	ttftOpts = histogramOpts("ttft_seconds", "Time from the arrival of a streamed request to its first content written to the client.",
		1.0/(1<<10), .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 120)
	itlOpts = histogramOpts("itl_seconds", "Time between two chunks of a stream as written to the client, about the time between tokens.",
		1.0/(1<<13), .001, .0025, .005, .01, .015, .02, .03, .04, .05, .075, .1, .15, .25, .5, 1, 2.5, 10)
	overheadOpts = histogramOpts("overhead_seconds",
		"Time from the arrival of the whole body to the request sent to a backend, without time in the admission queue.",
		1.0/(1<<20), 1e-5, 25e-6, 50e-6, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, .01, .025, .1)
)

func newRequestMetrics(register promauto.Factory, fleet *backends.Registry) *requestMetrics {
	labels := []string{"model", "backend"}
	tokenLabels := append(labels, "cached_tokens")
	return &requestMetrics{
		fleet: fleet,
		requests: newCounterVec(register, "requests_total",
			"Finished requests by the status sent to the client. 499: client disconnected; 502 and 504 include responses that were truncated or "+
				"stalled after their start.", "endpoint", "model", "backend", "code"),
		named: newCounterVec(register, "named_requests_total",
			"Finished requests that asked for their model by one of models.names, by that name, by the model that served them and by the status "+
				"sent to the client. They are in warmroute_requests_total as well.", "model_name", "model", "code"),
		prompt: newCounterVec(register, "prompt_tokens_total",
			"Prompt tokens of successful requests, as reported by the replica or else estimated. cached_tokens: whether the replica reported how "+
				"many of them were cached (reported), or that is a prediction (predicted).", tokenLabels...),
		predicted: newCounterVec(register, "predicted_tokens_total",
			"Prompt tokens of successful requests that were predicted to be cached on the chosen backend. Compare them with "+
				"warmroute_cached_tokens_total where cached_tokens is reported.", tokenLabels...),
		cached: newCounterVec(register, "cached_tokens_total",
			"Prompt tokens of successful requests that were cached, as the replica reported, or as predicted where it did not: the label "+
				"cached_tokens. Divided by warmroute_prompt_tokens_total: the hit ratio.", tokenLabels...),
		saved: newCounterVec(register, "saved_prefill_seconds_total",
			"Prefill time that the cached tokens of successful requests would have taken, by the learned times of steps (estimated).", labels...),
		elsewhere: newCounterVec(register, "elsewhere_tokens_total",
			"Prompt tokens of successful requests that had to be computed on the chosen backend while another one held them, as far as the index "+
				"knows: what the load, or a replica that was not ready, has cost in reuse. Divided by warmroute_prompt_tokens_total: their share.",
			"model"),
		matchedBusy: newCounterVec(register, "matched_busy_total",
			"Requests not sent to the best match because it was too busy. A large share means that few replicas hold what many requests share.",
			"model"),
		duration: register.NewHistogramVec(durationOpts, labels),
		ttft:     register.NewHistogramVec(ttftOpts, labels),
		itl:      register.NewHistogramVec(itlOpts, labels),
		overhead: newLatencyHistogram(register.NewHistogram(overheadOpts), overheadOpts.Buckets),
		counters: map[requestLabels]*requestCounters{},
		placed:   map[placement]*placementMetrics{},
		unlisted: map[string]time.Time{},

		namesWithSeries: map[string]bool{},
	}
}

// RecordRequest records a request that ended now. Its ID may become the exemplar of a latency bucket.
func (m *Metrics) RecordRequest(r *Request, id string, now time.Time) {
	c := m.requests.ensureCounters(r)
	c.requests.Inc()
	if r.ModelName != "" {
		m.requests.countNamed(r)
	}
	p := c.placed
	if p == nil {
		return
	}
	p.duration.observe(r.Duration, id, now)
	m.requests.overhead.observe(r.Overhead, id, now)
	if r.TTFT > 0 {
		p.ttft.observe(r.TTFT, id, now)
	}
	if r.MatchedBusy {
		p.matchedBusy.Inc()
	}
	if r.Code == http.StatusOK {
		tokens := &p.estimated
		if r.CachedKnown {
			tokens = &p.reported
		}
		tokens.prompt.Add(float64(r.PromptTokens))
		tokens.predicted.Add(float64(r.PredictedTokens))
		tokens.cached.Add(float64(r.CachedTokens))
		p.saved.Add(r.SavedPrefillSeconds)
		p.elsewhere.Add(float64(r.ElsewhereTokens))
	}
	if m.fleet.Find(r.Backend) == nil { // removed while the request was in flight
		m.DeleteBackend(r.Backend)
	}
}

// countNamed counts a request that asked for its model by a name.
func (m *requestMetrics) countNamed(r *Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isModelName == nil || m.isModelName(r.ModelName) { // else it was removed while the request was in flight
		m.named.WithLabelValues(r.ModelName, r.Model, strconv.Itoa(r.Code)).Inc()
		m.namesWithSeries[r.ModelName] = true
	}
}

// RestrictModelNames deletes the series of all names of models for which isModelName is false, and adds none for such names from now on.
func (m *Metrics) RestrictModelNames(isModelName func(string) bool) {
	r := m.requests
	r.mu.Lock()
	defer r.mu.Unlock()
	r.isModelName = isModelName
	for name := range r.namesWithSeries {
		if !isModelName(name) {
			r.named.DeletePartialMatch(prometheus.Labels{"model_name": name})
			delete(r.namesWithSeries, name)
		}
	}
}

// ITLHistogram returns the histogram of the seconds between the chunks of a model's
// streams from a backend, and makes it if necessary. A stream looks it up once.
func (m *Metrics) ITLHistogram(model, backend string) prometheus.Observer {
	at := placement{model, backend}
	m.requests.mu.RLock()
	p := m.requests.placed[at]
	m.requests.mu.RUnlock()
	if p == nil {
		m.requests.mu.Lock()
		defer m.requests.mu.Unlock()
		p = m.requests.ensurePlacement(at)
	}
	return p.itl
}

func (m *requestMetrics) ensureCounters(r *Request) *requestCounters {
	labels := requestLabels{r.Endpoint, placement{r.Model, r.Backend}, r.Code}
	m.mu.RLock()
	c := m.counters[labels]
	m.mu.RUnlock()
	if c != nil {
		return c
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c = m.counters[labels]; c == nil {
		c = &requestCounters{requests: m.requests.WithLabelValues(r.Endpoint, r.Model, r.Backend, strconv.Itoa(r.Code))}
		if r.Backend != "" {
			c.placed = m.ensurePlacement(labels.placement)
		}
		m.trackModel(r.Model)
		m.counters[labels] = c
	}
	return c
}

// ensurePlacement returns the instruments of a placement and makes them if necessary. m.mu is locked.
func (m *requestMetrics) ensurePlacement(at placement) *placementMetrics {
	if p := m.placed[at]; p != nil {
		return p
	}
	p := &placementMetrics{
		reported:    m.newTokenCounters(at, cachedReported),
		estimated:   m.newTokenCounters(at, cachedPredicted),
		saved:       m.saved.WithLabelValues(at.model, at.backend),
		matchedBusy: m.matchedBusy.WithLabelValues(at.model),
		elsewhere:   m.elsewhere.WithLabelValues(at.model),
		duration:    newLatencyHistogram(m.duration.WithLabelValues(at.model, at.backend), durationOpts.Buckets),
		ttft:        newLatencyHistogram(m.ttft.WithLabelValues(at.model, at.backend), ttftOpts.Buckets),
		itl:         m.itl.WithLabelValues(at.model, at.backend),
	}
	m.trackModel(at.model)
	m.placed[at] = p
	return p
}

// unlistedModelTimeout is how long the series of a model that no backend lists are kept: their last values can
// still be scraped, and an adapter that is loaded again continues them.
const unlistedModelTimeout = 10 * time.Minute

// trackModel notes that a model has series. Adapters come and go by name, so a new model
// is the time to delete the series of old ones. m.mu is locked.
func (m *requestMetrics) trackModel(model string) {
	if _, known := m.unlisted[model]; !known {
		m.unlisted[model] = time.Time{}
		m.deleteUnlistedModelsLocked()
	}
}

// deleteUnlistedModels deletes the series of the models that no backend has listed for unlistedModelTimeout.
func (m *requestMetrics) deleteUnlistedModels() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deleteUnlistedModelsLocked()
}

// deleteUnlistedModelsLocked is deleteUnlistedModels while m.mu is locked.
func (m *requestMetrics) deleteUnlistedModelsLocked() {
	catalog, now := m.fleet.Catalog(), time.Now()
	for model, since := range m.unlisted {
		switch _, listed := catalog.Find(model); {
		case listed || model == "":
			m.unlisted[model] = time.Time{}
		case since.IsZero():
			m.unlisted[model] = now
		case now.Sub(since) >= unlistedModelTimeout:
			delete(m.unlisted, model)
			m.deleteSeries(prometheus.Labels{"model": model}, func(p placement) bool { return p.model == model })
		}
	}
}

// DeleteBackend deletes the series of a backend that was removed from the fleet.
func (m *Metrics) DeleteBackend(backend string) {
	m.events.pollErrors.DeleteLabelValues(backend)
	m.requests.mu.Lock()
	defer m.requests.mu.Unlock()
	m.requests.deleteSeries(prometheus.Labels{"backend": backend}, func(p placement) bool { return p.backend == backend })
}

// DeleteEndpoint deletes the series of an endpoint that is served no more.
func (m *Metrics) DeleteEndpoint(path string) {
	r := m.requests
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests.DeletePartialMatch(prometheus.Labels{"endpoint": path})
	maps.DeleteFunc(r.counters, func(l requestLabels, _ *requestCounters) bool { return l.endpoint == path })
}

// deleteSeries deletes the series with the label and the cached instruments that match. m.mu is locked.
func (m *requestMetrics) deleteSeries(label prometheus.Labels, matches func(placement) bool) {
	for _, c := range []*prometheus.CounterVec{
		m.requests, m.named, m.prompt, m.predicted, m.cached, m.saved, m.matchedBusy, m.elsewhere,
	} {
		c.DeletePartialMatch(label)
	}
	m.duration.DeletePartialMatch(label)
	m.ttft.DeletePartialMatch(label)
	m.itl.DeletePartialMatch(label)
	maps.DeleteFunc(m.counters, func(l requestLabels, _ *requestCounters) bool { return matches(l.placement) })
	maps.DeleteFunc(m.placed, func(p placement, _ *placementMetrics) bool { return matches(p) })
}

const (
	// exemplarInterval is how often a bucket gets another exemplar.
	exemplarInterval = time.Second
	exemplarLabel    = "request_id"
)

// latencyHistogram is a histogram with request IDs as exemplars.
type latencyHistogram struct {
	histogram prometheus.Histogram
	buckets   []float64
	next      []atomic.Int64 // by bucket, the time from which it gets another exemplar, in Unix nanoseconds
}

func newLatencyHistogram(o prometheus.Observer, buckets []float64) *latencyHistogram {
	return &latencyHistogram{o.(prometheus.Histogram), buckets, make([]atomic.Int64, len(buckets)+1)}
}

func (l *latencyHistogram) observe(d time.Duration, requestID string, now time.Time) {
	seconds := max(d, 0).Seconds()
	next := &l.next[sort.SearchFloat64s(l.buckets, seconds)]
	if at := now.UnixNano(); at >= next.Load() && isValidExemplar(requestID) {
		next.Store(at + int64(exemplarInterval))
		l.histogram.(prometheus.ExemplarObserver).ObserveWithExemplar(seconds, prometheus.Labels{exemplarLabel: requestID})
		return
	}
	l.histogram.Observe(seconds)
}

// isValidExemplar reports whether a request ID, which may come from a client, is a
// valid exemplar. client_golang panics if one is not.
func isValidExemplar(requestID string) bool {
	return requestID != "" && utf8.ValidString(requestID) &&
		len(exemplarLabel)+utf8.RuneCountInString(requestID) <= prometheus.ExemplarMaxRunes
}
