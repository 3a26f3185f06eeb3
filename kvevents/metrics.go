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
	{newDesc("batches_total", "Batches of KV events applied."), prometheus.CounterValue, func(s wire.Stats) float64 { return float64(s.Batches) }},
	{newDesc("blocks_total", "KV blocks stored and removed by these."), prometheus.CounterValue, func(s wire.Stats) float64 { return float64(s.Blocks) }},
	{newDesc("lost_batches_total", "Batches that were missing or invalid, and could not be replayed."), prometheus.CounterValue, func(s wire.Stats) float64 { return float64(s.LostBatches) }},
	{newDesc("replays_total", "Requests for batches that were missed."), prometheus.CounterValue, func(s wire.Stats) float64 { return float64(s.Replays) }},
	{newDesc("restarts_total", "Number of times that the known content of a replica's cache was dropped, because the replica restarted or batches of events were lost."), prometheus.CounterValue, func(s wire.Stats) float64 { return float64(s.Restarts) }},
}

func newDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_kv_event_"+name, help, []string{"backend"}, nil)
}

// Describe implements prometheus.Collector.
func (r *Reader) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (r *Reader) Collect(ch chan<- prometheus.Metric) {
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
