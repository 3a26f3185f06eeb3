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
	DroppedRecords                  int64
}

// RegisterRedis exports the state of the connection to other proxies, which read returns at each
// scrape. It must be called at most once.
func (m *Metrics) RegisterRedis(read func() RedisStats) {
	m.registry.MustRegister(redisCollector(read))
}

// redisCollector reads the state at each scrape.
type redisCollector func() RedisStats

func newRedisDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("warmroute_"+name, help, labels, nil)
}

var (
	redisConnected    = newRedisDesc("redis_connected", "1 if the last read and the last write of Redis succeeded, else 0.")
	redisProxies      = newRedisDesc("redis_proxies", "Proxies that share over Redis and are alive, this one included; without Redis the last known number.")
	redisPeerRequests = newRedisDesc("redis_peer_requests_in_flight", "Requests of the other proxies that are sent to a backend and not ended, as far as is known.")
	redisWaiting      = newRedisDesc("redis_waiting_bytes", "Bytes in memory that are yet to be written to Redis.")
	redisDelay        = newRedisDesc("redis_delay_seconds", "Age of the last message that was read.")
	redisMessages     = newRedisDesc("redis_messages_total", "Messages that were written to Redis, and those that were read there, the own ones included.", "direction")
	redisBytes        = newRedisDesc("redis_bytes_total", "Bytes of these messages.", "direction")
	redisErrors       = newRedisDesc("redis_errors_total", "Failed commands.")
	redisIgnored      = newRedisDesc("redis_ignored_messages_total", "Messages that were ignored: of another version or configuration, damaged, or without a valid signature.")
	redisMissed       = newRedisDesc("redis_missed_messages_total", "Messages of other proxies that were not in Redis any more when they were to be read.")
	redisDropped      = newRedisDesc("redis_dropped_records_total", "Records dropped because Redis was slow or absent for too long.")
)

// Describe implements prometheus.Collector.
func (redisCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{redisConnected, redisProxies, redisPeerRequests, redisWaiting, redisDelay, redisMessages, redisBytes,
		redisErrors, redisIgnored, redisMissed, redisDropped} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (read redisCollector) Collect(ch chan<- prometheus.Metric) {
	s := read()
	gauge := func(d *prometheus.Desc, x float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, x)
	}
	counter := func(d *prometheus.Desc, n int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	gauge(redisConnected, boolToFloat(s.Connected))
	gauge(redisProxies, float64(s.Proxies))
	gauge(redisPeerRequests, float64(s.PeerRequests))
	gauge(redisWaiting, float64(s.WaitingBytes))
	gauge(redisDelay, s.Delay)
	counter(redisMessages, s.WrittenMessages, "written")
	counter(redisMessages, s.ReadMessages, "read")
	counter(redisBytes, s.WrittenBytes, "written")
	counter(redisBytes, s.ReadBytes, "read")
	counter(redisErrors, s.Errors)
	counter(redisIgnored, s.IgnoredMessages)
	counter(redisMissed, s.MissedMessages)
	counter(redisDropped, s.DroppedRecords)
}
