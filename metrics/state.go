package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"warmroute/backends"
	"warmroute/router"
)

// state reads gauges off the fleet and the index when it is scraped, so that
// nothing has to keep them up on the way of a request.
type state struct {
	fleet  *backends.Registry
	router *router.Router
}

func perBackend(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_"+name, help, []string{"backend"}, nil)
}

var (
	ready     = perBackend("backend_ready", "1 when the backend may take traffic.")
	draining  = perBackend("backend_draining", "1 while the backend finishes what it has and takes nothing new: by the operator's word, or because the configuration no longer has it.")
	inFlight  = perBackend("backend_in_flight", "Sequences sent by this proxy and unfinished.")
	running   = perBackend("backend_running", "vLLM's own count of requests in its batch, when known.")
	waiting   = perBackend("backend_waiting", "vLLM's own count of requests in its queue, when known.")
	kvUsage   = perBackend("backend_kv_cache_usage", "Share of the KV cache in use, 0 to 1, when known.")
	stalled   = perBackend("backend_stalled", "1 while the backend has requests of this proxy and produces nothing.")
	stalls    = perBackend("backend_stalls_total", "How often the backend was found to have requests of this proxy and to produce nothing.")
	breaker   = perBackend("backend_breaker_state", "0 closed, 1 half-open, with one request at a time to try the backend, 2 open: it fails what it is sent, and others are asked first.")
	opens     = perBackend("backend_breaker_opens_total", "How often the backend's breaker opened, after tries in vain as well.")
	aborted   = perBackend("backend_aborted_responses_total", "Responses that the backend's engine aborted, before or after their first content.")
	blocks    = perBackend("index_blocks", "Blocks that the backend is thought to hold.")
	capacity  = perBackend("index_capacity_blocks", "Blocks that the backend's part of the index may hold.")
	evictions = perBackend("index_evictions_total", "Blocks that left the index to make room.")
	held      = prometheus.NewDesc("warmroute_hold_requests", "Requests that wait for a backend to have room, by priority class.", []string{"class"}, nil)
	serving   = prometheus.NewDesc("warmroute_model_backends", "Backends that list the model.", []string{"model"}, nil)
	servingOK = prometheus.NewDesc("warmroute_model_ready_backends", "Of these, the backends that are ready and make progress. 0: requests for the model wait, and fail after routing.hold.time.", []string{"model"}, nil)
	bytes     = prometheus.NewDesc("warmroute_index_bytes", "Memory that the index takes, about.", nil, nil)
)

func (s *state) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{ready, draining, inFlight, running, waiting, kvUsage, stalled, stalls, breaker, opens, aborted, blocks, capacity, evictions, held, serving, servingOK, bytes} {
		ch <- d
	}
}

func (s *state) Collect(ch chan<- prometheus.Metric) {
	parts, size := s.router.IndexStats()
	ch <- prometheus.MustNewConstMetric(bytes, prometheus.GaugeValue, float64(size))
	for class, n := range s.router.WaitingByClass() {
		ch <- prometheus.MustNewConstMetric(held, prometheus.GaugeValue, float64(n), class)
	}
	s.collectModels(ch)
	for _, b := range shown(s.fleet) {
		send := func(d *prometheus.Desc, t prometheus.ValueType, v float64) {
			ch <- prometheus.MustNewConstMetric(d, t, v, b.Name)
		}
		times, now := s.router.Stalls(b)
		state, opened := s.router.Breaker(b)
		send(breaker, prometheus.GaugeValue, float64(state))
		send(opens, prometheus.CounterValue, float64(opened))
		send(ready, prometheus.GaugeValue, truth(b.State() == backends.Ready))
		send(draining, prometheus.GaugeValue, truth(b.State() == backends.Draining))
		send(stalled, prometheus.GaugeValue, truth(now))
		send(stalls, prometheus.CounterValue, float64(times))
		send(aborted, prometheus.CounterValue, float64(b.Aborted.Load()))
		send(inFlight, prometheus.GaugeValue, float64(b.InFlight.Load()))
		if b.Slot < len(parts) && parts[b.Slot].Backend == b {
			send(blocks, prometheus.GaugeValue, float64(parts[b.Slot].Blocks))
			send(capacity, prometheus.GaugeValue, float64(parts[b.Slot].Capacity))
			send(evictions, prometheus.CounterValue, float64(parts[b.Slot].Evictions))
		}
		l := b.Load()
		if l == nil {
			continue
		}
		if l.QueuesKnown {
			send(running, prometheus.GaugeValue, float64(l.Running))
			send(waiting, prometheus.GaugeValue, float64(l.Waiting))
		}
		if l.KVKnown {
			send(kvUsage, prometheus.GaugeValue, l.KVCacheUsage)
		}
	}
}

// maxModelSeries bounds the models that have readiness series: base models first.
const maxModelSeries = 1000

func (s *state) collectModels(ch chan<- prometheus.Metric) {
	ready := map[*backends.Backend]bool{}
	for _, b := range s.fleet.All() {
		ready[b] = s.router.Condition(b).State == router.Ready
	}
	catalog, n := s.fleet.Catalog(), 0
	for _, adapters := range []bool{false, true} {
		for _, m := range catalog.Models {
			entry, ok := catalog.Find(m.ID)
			if !ok || entry.Adapter != adapters {
				continue
			}
			if n++; n > maxModelSeries {
				return
			}
			ch <- prometheus.MustNewConstMetric(serving, prometheus.GaugeValue, float64(len(entry.Backends)), m.ID)
			some := 0
			for _, b := range entry.Backends {
				some += int(truth(ready[b]))
			}
			ch <- prometheus.MustNewConstMetric(servingOK, prometheus.GaugeValue, float64(some), m.ID)
		}
	}
}

// shown are the backends that have series. Of two with one name, one of them on its
// way out, it is the other.
func shown(fleet *backends.Registry) []*backends.Backend {
	return slices.DeleteFunc(slices.Clone(fleet.All()), func(b *backends.Backend) bool { return fleet.Find(b.Name) != b })
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
