package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"warmroute/backends"
	"warmroute/backends/vllm/kvevents"
)

// KVEventStats are the counts of a backend's subscribers, one for each data-parallel engine.
type KVEventStats []kvevents.Stats

// RegisterKVEvents exports what was received of the backends' KV events, which read returns at
// each scrape; nil where they are not read. It must be called at most once.
func (m *Metrics) RegisterKVEvents(fleet *backends.Registry, read func(*backends.Backend) KVEventStats) {
	m.registry.MustRegister(&kvEventCollector{fleet, read})
}

type kvEventCollector struct {
	fleet *backends.Registry
	read  func(*backends.Backend) KVEventStats
}

// kvEventMetrics are sums over the engines of a backend.
var kvEventMetrics = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(kvevents.Stats) float64
}{
	{newKVEventDesc("connected_engines", "Data-parallel engines whose KV events are received."), prometheus.GaugeValue, func(s kvevents.Stats) float64 { return boolToFloat(s.Connected) }},
	{newKVEventDesc("batches_total", "Batches of KV events applied."), prometheus.CounterValue, func(s kvevents.Stats) float64 { return float64(s.Batches) }},
	{newKVEventDesc("blocks_total", "KV blocks stored and removed by these."), prometheus.CounterValue, func(s kvevents.Stats) float64 { return float64(s.Blocks) }},
	{newKVEventDesc("lost_batches_total", "Batches that were missing or invalid, and could not be replayed."), prometheus.CounterValue, func(s kvevents.Stats) float64 { return float64(s.LostBatches) }},
	{newKVEventDesc("replays_total", "Requests for batches that were missed."), prometheus.CounterValue, func(s kvevents.Stats) float64 { return float64(s.Replays) }},
	{newKVEventDesc("restarts_total", "Times that what was known of a replica's cache was dropped: it restarted, or batches were lost."), prometheus.CounterValue, func(s kvevents.Stats) float64 { return float64(s.Restarts) }},
}

func newKVEventDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_kv_event_"+name, help, []string{"backend"}, nil)
}

// Describe implements prometheus.Collector.
func (*kvEventCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range kvEventMetrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *kvEventCollector) Collect(ch chan<- prometheus.Metric) {
	for _, b := range backendsWithSeries(c.fleet) {
		engines := c.read(b)
		if engines == nil {
			continue
		}
		for _, m := range kvEventMetrics {
			sum := 0.0
			for _, s := range engines {
				sum += m.value(s)
			}
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, sum, b.Name)
		}
	}
}
