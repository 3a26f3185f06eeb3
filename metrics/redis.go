package metrics

import "github.com/prometheus/client_golang/prometheus"

// RedisStats is the state of the connection to other proxies, over Redis.
type RedisStats struct {
	Connected    bool
	Proxies      int // that are alive, this one included
	PeerRequests int // in flight of the others
	WaitingBytes int // to be written
	Delay        float64

	WrittenMessages, ReadMessages   int64
	WrittenBytes, ReadBytes         int64
	Errors                          int64
	IgnoredMessages, MissedMessages int64
	DroppedMessages                 int64
}

var redisMetrics = []struct {
	kind                  prometheus.ValueType
	name, direction, help string
	value                 func(*RedisStats) float64
}{
	{prometheus.GaugeValue, "connected", "", "1 if the last read and the last write of Redis succeeded, else 0.",
		func(s *RedisStats) float64 { return boolToFloat(s.Connected) }},
	{prometheus.GaugeValue, "proxies", "", "Proxies that share over Redis and are alive, this one included; without Redis the last " +
		"known number.",
		func(s *RedisStats) float64 { return float64(s.Proxies) }},
	{prometheus.GaugeValue, "peer_requests_in_flight", "", "Requests that the other proxies have in flight on a backend, as far as is known.",
		func(s *RedisStats) float64 { return float64(s.PeerRequests) }},
	{prometheus.GaugeValue, "waiting_bytes", "", "Bytes in memory that are yet to be written to Redis.",
		func(s *RedisStats) float64 { return float64(s.WaitingBytes) }},
	{prometheus.GaugeValue, "delay_seconds", "", "Age of the last message that was read.",
		func(s *RedisStats) float64 { return s.Delay }},
	{prometheus.CounterValue, "messages_total", "written", "Messages written to Redis and read from it, including those of this proxy.",
		func(s *RedisStats) float64 { return float64(s.WrittenMessages) }},
	{prometheus.CounterValue, "messages_total", "read", "Messages written to Redis and read from it, including those of this proxy.",
		func(s *RedisStats) float64 { return float64(s.ReadMessages) }},
	{prometheus.CounterValue, "bytes_total", "written", "Bytes of the messages written to Redis and read from it.",
		func(s *RedisStats) float64 { return float64(s.WrittenBytes) }},
	{prometheus.CounterValue, "bytes_total", "read", "Bytes of the messages written to Redis and read from it.",
		func(s *RedisStats) float64 { return float64(s.ReadBytes) }},
	{prometheus.CounterValue, "errors_total", "", "Failed commands.", func(s *RedisStats) float64 { return float64(s.Errors) }},
	{prometheus.CounterValue, "ignored_messages_total", "",
		"Messages that were ignored: of another version or configuration, damaged, or without a valid signature.",
		func(s *RedisStats) float64 { return float64(s.IgnoredMessages) }},
	{prometheus.CounterValue, "missed_messages_total", "", "Messages of other proxies that were no longer in Redis when they were to be read.",
		func(s *RedisStats) float64 { return float64(s.MissedMessages) }},
	{prometheus.CounterValue, "dropped_messages_total", "", "Messages dropped because Redis was slow or absent for too long.",
		func(s *RedisStats) float64 { return float64(s.DroppedMessages) }},
}

// RegisterRedis exports the state of the connection to other proxies, which read returns at each
// scrape. It must be called at most once.
func (m *Metrics) RegisterRedis(read func() RedisStats) {
	for _, metric := range redisMetrics {
		var labels prometheus.Labels
		if metric.direction != "" {
			labels = prometheus.Labels{"direction": metric.direction}
		}
		m.registerFunc(metric.kind, "redis_"+metric.name, metric.help, labels, func() float64 {
			s := read()
			return metric.value(&s)
		})
	}
}
