package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"warmroute/backends"
	"warmroute/router"
	"warmroute/usage"
)

// fleetCollector reads the state of the backends and of the router at each scrape.
type fleetCollector struct {
	fleet  *backends.Registry
	router *router.Router
}

var (
	queuedRequests = prometheus.NewDesc("warmroute_queue_requests", "Requests in the admission queue by priority class.", []string{"class"},
		nil)
	modelBackends = prometheus.NewDesc("warmroute_model_backends", "Backends that list the model.", []string{"model"}, nil)
	modelReady    = prometheus.NewDesc("warmroute_model_ready_backends",
		"Backends that list the model, are ready and make progress. At 0, requests for the model wait in the admission queue until its timeout.",
		[]string{"model"}, nil)
	indexBytes = prometheus.NewDesc("warmroute_index_bytes", "Approximate memory used by the index; bounded by index.max_bytes.", nil, nil)
)

type backendState struct {
	*backends.Backend
	state     backends.State
	load      *backends.Load // nil: not known
	status    router.BackendStatus
	index     *router.BackendIndexStats // nil: not in the index
	estimates *router.BackendEstimates  // nil: likewise
}

type backendMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*backendState) float64
}

func newBackendMetric(kind prometheus.ValueType, name, help string, value func(*backendState) float64) backendMetric {
	return backendMetric{prometheus.NewDesc("warmroute_"+name, help, []string{"backend"}, nil), kind, value}
}

// backendMetrics are the metrics of a backend, grouped by what has to be known of it.
var backendMetrics = []struct {
	known   func(*backendState) bool
	metrics []backendMetric
}{
	{func(*backendState) bool { return true }, []backendMetric{
		newBackendMetric(prometheus.GaugeValue, "backend_ready", "1 if the backend accepts new requests.",
			func(b *backendState) float64 { return boolToFloat(b.state == backends.Ready) }),
		newBackendMetric(prometheus.GaugeValue, "backend_draining",
			"1 while the backend only finishes its requests: drained by an operator, or removed from the configuration.",
			func(b *backendState) float64 { return boolToFloat(b.state == backends.Draining) }),
		newBackendMetric(prometheus.GaugeValue, "backend_in_flight", "Unfinished sequences that this proxy has sent to the backend.",
			func(b *backendState) float64 { return float64(b.InFlight.Load()) }),
		newBackendMetric(prometheus.GaugeValue, "backend_stalled", "1 while the backend has requests of this proxy and makes no progress.",
			func(b *backendState) float64 { return boolToFloat(b.status.Stalled) }),
		newBackendMetric(prometheus.CounterValue, "backend_stalls_total", "Number of times that the backend stalled.",
			func(b *backendState) float64 { return float64(b.status.Stalls) }),
		newBackendMetric(prometheus.GaugeValue, "backend_slowdown",
			"How many times as long as usual the steps of the backend take, measured over 10 s, if that is at least 3 times and those of most "+
				"other backends do not take longer too; else 0. What lasts for 10 min is usual.",
			func(b *backendState) float64 { return b.status.Slowdown }),
		newBackendMetric(prometheus.GaugeValue, "learned_sequence_limit",
			"Sequences that the replica runs at a time (--max-num-seqs). While several tenants send requests, only a few more than these are "+
				"sent to it, and the rest waits in the queue. 0: not learned, since the limit was not reached.",
			func(b *backendState) float64 { return float64(b.status.SequenceLimit) }),
		newBackendMetric(prometheus.GaugeValue, "backend_breaker_state",
			"Circuit breaker: 0 closed, 1 half-open (one request at a time probes the backend), 2 open (other backends are preferred).",
			func(b *backendState) float64 { return float64(b.status.Breaker) }),
		newBackendMetric(prometheus.CounterValue, "backend_breaker_opens_total",
			"Number of times that the circuit breaker opened, including after failed probes.",
			func(b *backendState) float64 { return float64(b.status.Opens) }),
		newBackendMetric(prometheus.CounterValue, "backend_aborted_responses_total",
			"Responses aborted by the backend's engine, before or after their first content. vLLM aborts its requests when it is stopped without "+
				"--shutdown-timeout, paused or put to sleep.",
			func(b *backendState) float64 { return float64(b.Aborted.Load()) }),
		newBackendMetric(prometheus.CounterValue, "backend_wrong_responses_total",
			"Responses to other requests of this proxy that connections to the backend carried; no client got one. Should stay 0: if it grows, "+
				"find what sends them, and start vLLM with --enable-request-id-headers.",
			func(b *backendState) float64 { return float64(b.WrongResponses.Load()) }),
	}},
	{func(b *backendState) bool { return b.load != nil && b.load.QueuesKnown }, []backendMetric{
		newBackendMetric(prometheus.GaugeValue, "backend_running", "Requests in the engine's batch, as reported by vLLM.",
			func(b *backendState) float64 { return float64(b.load.Running) }),
		newBackendMetric(prometheus.GaugeValue, "backend_waiting",
			"Requests in the engine's queue, as reported by vLLM. More than a few: other clients use the replica.",
			func(b *backendState) float64 { return float64(b.load.Waiting) }),
	}},
	{func(b *backendState) bool { return b.load != nil && b.load.KVKnown }, []backendMetric{
		newBackendMetric(prometheus.GaugeValue, "backend_kv_cache_usage", "Used share of the KV cache as reported by vLLM, from 0 to 1.",
			func(b *backendState) float64 { return b.load.KVCacheUsage }),
	}},
	{func(b *backendState) bool { return b.index != nil }, []backendMetric{
		newBackendMetric(prometheus.GaugeValue, "index_blocks", "Blocks that the backend probably holds.",
			func(b *backendState) float64 { return float64(b.index.Blocks) }),
		newBackendMetric(prometheus.GaugeValue, "index_capacity_blocks", "Maximum number of blocks in the backend's part of the index.",
			func(b *backendState) float64 { return float64(b.index.Capacity) }),
		newBackendMetric(prometheus.CounterValue, "index_evictions_total",
			"Blocks evicted from the backend's part of the index, as the replica's cache evicts them. Normal under load.",
			func(b *backendState) float64 { return float64(b.index.Evictions) }),
		newBackendMetric(prometheus.CounterValue, "index_resets_total",
			"Number of times that the cached tokens which the replica reported showed that it had lost its prefix cache.",
			func(b *backendState) float64 { return float64(b.index.Resets) }),
	}},
	{func(b *backendState) bool { return b.index != nil && b.index.KV != nil }, []backendMetric{
		newBackendMetric(prometheus.GaugeValue, "kv_blocks", "KV blocks that the replica holds, according to its KV events.",
			func(b *backendState) float64 { return float64(b.index.KV.KVBlocks) }),
		newBackendMetric(prometheus.GaugeValue, "index_confirmed_blocks", "Blocks that the backend holds according to its KV events.",
			func(b *backendState) float64 { return float64(b.index.KV.Confirmed) }),
		newBackendMetric(prometheus.GaugeValue, "kv_complete", "1 if all that the replica's cache holds is known from its KV events.",
			func(b *backendState) float64 { return boolToFloat(b.index.KV.Complete) }),
	}},
	{func(b *backendState) bool { return b.estimates != nil }, []backendMetric{
		newBackendMetric(prometheus.GaugeValue, "learned_capacity_factor",
			"Effective size of the KV cache divided by the size that the replica reports. Well below 1: other clients use it.",
			func(b *backendState) float64 { return b.estimates.CapacityFactor }),
		newBackendMetric(prometheus.GaugeValue, "learned_bytes_per_token", "Bytes of prompt text per token.",
			func(b *backendState) float64 { return b.estimates.BytesPerToken }),
		newBackendMetric(prometheus.GaugeValue, "learned_fetch_token_seconds",
			"Time to fetch a cached token that is not on the GPU, but in host memory, on a disk or in a store. 0: not learned.",
			func(b *backendState) float64 { return b.estimates.FetchSeconds }),
		newBackendMetric(prometheus.GaugeValue, "learned_output_tokens", "Mean output length in tokens.",
			func(b *backendState) float64 { return b.estimates.OutputTokens }),
		newBackendMetric(prometheus.GaugeValue, "learned_prefill_tokens_per_second", "Prefill rate of the replica.",
			func(b *backendState) float64 { return b.estimates.PrefillRate }),
		newBackendMetric(prometheus.GaugeValue, "learned_step_base_seconds", "Time of an engine step without work.",
			func(b *backendState) float64 { return b.estimates.Step.Base }),
		newBackendMetric(prometheus.GaugeValue, "learned_step_prompt_tokens_per_second",
			"Prompt tokens per second of a step, without tokens before them.",
			func(b *backendState) float64 { return b.estimates.Step.Rate }),
		newBackendMetric(prometheus.GaugeValue, "learned_step_attention",
			"Increase of the time of a prompt token for each token before it, as a share of the time without any.",
			func(b *backendState) float64 { return b.estimates.Step.Attention }),
		newBackendMetric(prometheus.GaugeValue, "learned_step_sequence_seconds", "Time of a step for each sequence that decodes.",
			func(b *backendState) float64 { return b.estimates.Step.Sequence }),
		newBackendMetric(prometheus.GaugeValue, "learned_step_context_token_seconds",
			"Time of a step for each token in the contexts of the sequences that decode.",
			func(b *backendState) float64 { return b.estimates.Step.Context }),
		newBackendMetric(prometheus.GaugeValue, "learned_prompt_token_seconds", "Time of the API server for each prompt token.",
			func(b *backendState) float64 { return b.estimates.Step.PromptToken }),
	}},
}

// Describe implements prometheus.Collector.
func (c *fleetCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{queuedRequests, modelBackends, modelReady, indexBytes} {
		ch <- d
	}
	for _, group := range backendMetrics {
		for _, m := range group.metrics {
			ch <- m.desc
		}
	}
}

// Collect implements prometheus.Collector.
func (c *fleetCollector) Collect(ch chan<- prometheus.Metric) {
	index, size := c.router.IndexStats()
	ch <- prometheus.MustNewConstMetric(indexBytes, prometheus.GaugeValue, float64(size))
	for class, n := range c.router.CountWaitingByClass() {
		ch <- prometheus.MustNewConstMetric(queuedRequests, prometheus.GaugeValue, float64(n), class)
	}
	c.sendModelMetrics(ch)
	estimates := c.router.Estimates()
	for _, b := range backendsWithSeries(c.fleet) {
		s := &backendState{Backend: b, state: b.State(), load: b.Load(), status: c.router.Status(b)}
		if b.Slot < len(index) && index[b.Slot].Backend == b {
			s.index = &index[b.Slot]
		}
		if b.Slot < len(estimates) && estimates[b.Slot].Backend == b {
			s.estimates = &estimates[b.Slot]
		}
		for _, group := range backendMetrics {
			if !group.known(s) {
				continue
			}
			for _, m := range group.metrics {
				ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(s), b.Name)
			}
		}
	}
}

// maxModelSeries bounds the models that have readiness series; base models come first.
const maxModelSeries = 1000

func (c *fleetCollector) sendModelMetrics(ch chan<- prometheus.Metric) {
	ready := map[*backends.Backend]bool{}
	for _, b := range c.fleet.All() {
		ready[b] = c.router.Status(b).State == router.Ready
	}
	catalog, n := c.fleet.Catalog(), 0
	for _, adapters := range []bool{false, true} {
		for _, m := range catalog.Models {
			entry, ok := catalog.Find(m.ID)
			if !ok || entry.Adapter != adapters {
				continue
			}
			if n++; n > maxModelSeries {
				return
			}
			readyBackends := 0
			for _, b := range entry.Backends {
				if ready[b] {
					readyBackends++
				}
			}
			ch <- prometheus.MustNewConstMetric(modelBackends, prometheus.GaugeValue, float64(len(entry.Backends)), m.ID)
			ch <- prometheus.MustNewConstMetric(modelReady, prometheus.GaugeValue, float64(readyBackends), m.ID)
		}
	}
}

// backendsWithSeries returns all backends but the removed ones whose name another backend has by now.
func backendsWithSeries(fleet *backends.Registry) []*backends.Backend {
	return slices.DeleteFunc(slices.Clone(fleet.All()), func(b *backends.Backend) bool { return fleet.Find(b.Name) != b })
}

func boolToFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// KeyUsage is the usage of one API key.
type KeyUsage struct {
	Name     string
	InFlight int64
	Requests int64            // that were admitted
	Refused  map[string]int64 // by limit
	Ended    usage.Counts     // what its requests have used that have ended
}

// keyCollector reads the usage of the API keys at each scrape, so that a removed key
// has no series, even if requests with it are still in flight.
type keyCollector func() []KeyUsage

func newKeyDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_"+name, help, append([]string{"key"}, labels...), nil)
}

var (
	keyInFlight = newKeyDesc("key_in_flight", "Unfinished requests of the API key.")
	keyRequests = newKeyDesc("key_requests_total", "Accepted requests of the API key.")
	keyPrompt   = newKeyDesc("key_prompt_tokens_total", "Prompt tokens used by the API key, as reported by the replica or else estimated.")
	keyOutput   = newKeyDesc("key_output_tokens_total", "Output tokens used by the API key, as reported by the replica or else one per event.")
	keyCached   = newKeyDesc("key_cached_tokens_total",
		"Prompt tokens used by the API key that were cached, as the replica reported or else as predicted.")
	keySaved = newKeyDesc("key_saved_prefill_seconds_total",
		"Prefill time that the cached tokens of the API key would have taken, by the learned times of steps.")
	keyErrors  = newKeyDesc("key_errors_total", "Requests of the API key that ended with an error, refused ones included.")
	keyQueued  = newKeyDesc("key_queue_seconds_total", "Time that requests of the API key have spent in the admission queue.")
	keyRefused = newKeyDesc("key_refusals_total",
		"Requests of the API key refused because of one of its limits: requests, tokens, tokenize_bytes, concurrency.", "reason")
)

// Describe implements prometheus.Collector.
func (keyCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{keyInFlight, keyRequests, keyPrompt, keyOutput, keyCached, keySaved, keyErrors, keyQueued,
		keyRefused} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (read keyCollector) Collect(ch chan<- prometheus.Metric) {
	for _, k := range read() {
		send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, kind, v, append([]string{k.Name}, labels...)...)
		}
		send(keyInFlight, prometheus.GaugeValue, float64(k.InFlight))
		send(keyRequests, prometheus.CounterValue, float64(k.Requests))
		send(keyPrompt, prometheus.CounterValue, float64(k.Ended.PromptTokens))
		send(keyOutput, prometheus.CounterValue, float64(k.Ended.OutputTokens))
		send(keyCached, prometheus.CounterValue, float64(k.Ended.CachedTokens))
		send(keySaved, prometheus.CounterValue, k.Ended.SavedPrefillSeconds)
		send(keyErrors, prometheus.CounterValue, float64(k.Ended.Errors))
		send(keyQueued, prometheus.CounterValue, k.Ended.QueueSeconds)
		for reason, n := range k.Refused {
			send(keyRefused, prometheus.CounterValue, float64(n), reason)
		}
	}
}
