package kvevents

import (
	"github.com/prometheus/client_golang/prometheus"

	"warmroute/kvevents/wire"
)

// metrics are sums over the data-parallel engines of a backend.
var metrics = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(wire.Stats) float64
}{
	{newDesc("connected_engines", "Data-parallel engines whose KV events are received."), prometheus.GaugeValue, func(s wire.Stats) float64 {
		if s.Connected {
			return 1
		}
		return 0
	}},
	{newDesc("batches_total", "Batches of KV events applied."), prometheus.CounterValue, func(s wire.Stats) float64 {
		return float64(s.Batches)
	}},
	{newDesc("blocks_total", "KV blocks stored and removed by KV events."), prometheus.CounterValue, func(s wire.Stats) float64 {
		return float64(s.Blocks)
	}},
	{newDesc("missed_batches_total", "Batches of KV events that were missed or invalid, and could not be replayed."), prometheus.CounterValue,
		func(s wire.Stats) float64 { return float64(s.MissedBatches) }},
	{newDesc("replays_total", "Requests to replay missed batches of KV events."), prometheus.CounterValue, func(s wire.Stats) float64 {
		return float64(s.Replays)
	}},
	{newDesc("restarts_total", "Number of times that the known content of a replica's cache was cleared, because the replica restarted or "+
		"batches of events were missed."), prometheus.CounterValue, func(s wire.Stats) float64 { return float64(s.Restarts) }},
}

// connectionsDesc describes how many connections publishers have made.
var connectionsDesc = prometheus.NewDesc("warmroute_kv_event_connections", "Open connections of replicas to kv_events.listen.", nil, nil)

// newListenerCounters returns the counters of what publishers send that connect to us, and of their connections.
func newListenerCounters() (ignored, refused *prometheus.CounterVec) {
	ignored = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "warmroute_kv_event_ignored_messages_total",
		Help: "Messages to kv_events.listen that were ignored: their topic has another form, the address of no backend or of several, or a " +
			"model that the backend does not list, or no events of the backend are expected.",
	}, []string{"reason"})
	for _, reason := range []string{ignoredTopic, ignoredAddress, ignoredModel, ignoredUnexpected} {
		ignored.WithLabelValues(reason)
	}
	refused = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "warmroute_kv_event_refused_connections_total",
		Help: "Connections to kv_events.listen that were closed: the peer is not a publisher or too slow, sent an invalid message, named a " +
			"replica whose events another connection has, changed its topic, or there were too many.",
	}, []string{"reason"})
	for _, reason := range []string{refusedHandshake, refusedInvalid, refusedDuplicate, refusedRenamed, refusedLimit} {
		refused.WithLabelValues(reason)
	}
	return ignored, refused
}

func newDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_kv_event_"+name, help, []string{"backend"}, nil)
}

// Describe implements prometheus.Collector.
func (r *Reader) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
	ch <- connectionsDesc
	r.ignored.Describe(ch)
	r.refused.Describe(ch)
}

// Collect implements prometheus.Collector.
func (r *Reader) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(connectionsDesc, prometheus.GaugeValue, float64(r.listener.countConnections()))
	r.ignored.Collect(ch)
	r.refused.Collect(ch)
	r.mu.Lock()
	defer r.mu.Unlock()
	for b, reading := range r.readings {
		if r.registry.Find(b.Name) != b {
			continue // it was removed, and another may have its name
		}
		for _, m := range metrics {
			sum := 0.0
			for _, s := range reading.subscribers {
				sum += m.value(s.Stats())
			}
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, sum, b.Name)
		}
	}
}
