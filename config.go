package main

import (
	"crypto/tls"
	_ "embed" // for config.yaml
	"time"
)

// defaultsYAML is the only place that knows a setting's default.
//
//go:embed config.yaml
var defaultsYAML []byte

// Config is everything a user may set. The fields stand in the order of
// config.yaml, which says what each is for; every field has a line there and
// every line a field. Never modified once loaded. A setting marked reload:"no"
// stays as it was at the start until the next one; so does all of a section.
type Config struct {
	Listen          string            `mapstructure:"listen" reload:"no"` // host:port
	Admin           string            `mapstructure:"admin" reload:"no"`  // host:port, or empty: no admin listener
	AdminToken      string            `mapstructure:"admin_token"`        // what AdminTokenFile holds, if that is given
	AdminTokenFile  string            `mapstructure:"admin_token_file"`
	AdminTLS        ListenerTLSConfig `mapstructure:"admin_tls"`
	TLS             ListenerTLSConfig `mapstructure:"tls"`
	Backends        []BackendConfig   `mapstructure:"backends"`
	Keys            []KeyConfig       `mapstructure:"keys"` // those of KeysFile included
	KeysFile        string            `mapstructure:"keys_file"`
	Tenant          string            `mapstructure:"tenant"` // share or isolate
	Routing         RoutingConfig     `mapstructure:"routing"`
	SLO             SLOConfig         `mapstructure:"slo"`
	Index           IndexConfig       `mapstructure:"index"`
	Record          RecordConfig      `mapstructure:"record" reload:"no"`
	Limits          LimitsConfig      `mapstructure:"limits"`
	Poll            PollConfig        `mapstructure:"poll"`
	Health          HealthConfig      `mapstructure:"health"`
	Timeouts        TimeoutsConfig    `mapstructure:"timeouts"`
	Retry           RetryConfig       `mapstructure:"retry"`
	Breaker         BreakerConfig     `mapstructure:"breaker"`
	SSE             SSEConfig         `mapstructure:"sse"`
	Connections     ConnectionsConfig `mapstructure:"connections"`
	ResponseHeaders bool              `mapstructure:"response_headers"`
	Log             LogConfig         `mapstructure:"log"`
	AccessLog       AccessLogConfig   `mapstructure:"access_log"`
}

// BackendConfig names one vLLM server. Name is never empty once loaded.
type BackendConfig struct {
	Name   string `mapstructure:"name"`
	URL    string `mapstructure:"url"`
	APIKey string `mapstructure:"api_key"`

	CAFile     string `mapstructure:"ca_file"`     // for https; empty: the system's authorities
	ServerName string `mapstructure:"server_name"` // for https; empty: the URL's host
	authority  string // what CAFile holds

	MaxInFlight int     `mapstructure:"max_in_flight"` // 0: no bound
	Weight      float64 `mapstructure:"weight"`        // 1 unless given
}

// ListenerTLSConfig is for a listener's connections. Both are empty, or neither.
type ListenerTLSConfig struct {
	CertFile string `mapstructure:"cert_file"`
	KeyFile  string `mapstructure:"key_file"`

	pair *tls.Certificate // what they hold; nil: they are not given
}

// RoutingConfig says how a request finds its backend.
type RoutingConfig struct {
	Policy   string `mapstructure:"policy"`
	Attempts int    `mapstructure:"attempts"` // the first one included

	Hold          HoldConfig `mapstructure:"hold"`
	StepTokens    int        `mapstructure:"step_tokens"`    // 0: learned
	BatchSlowdown float64    `mapstructure:"batch_slowdown"` // 0: no bound
	Learn         bool       `mapstructure:"learn"`
	SessionHeader string     `mapstructure:"session_header"` // empty: none

	// 0: the policy's own.
	MatchRatio     float64 `mapstructure:"match_ratio"`
	ImbalanceAbs   float64 `mapstructure:"imbalance_abs"`
	ImbalanceRatio float64 `mapstructure:"imbalance_ratio"`
	LoadFactor     float64 `mapstructure:"load_factor"`
}

// HoldConfig bounds the requests that wait for a replica. It is off when
// Requests is 0.
type HoldConfig struct {
	Requests      int           `mapstructure:"requests"` // of each priority class but batch requests
	Bytes         ByteSize      `mapstructure:"bytes"`
	BatchRequests int           `mapstructure:"batch_requests"`
	BatchBytes    ByteSize      `mapstructure:"batch_bytes"`
	Time          time.Duration `mapstructure:"time"`
}

// holdTime is how long requests may be held; 0 when none are.
func (c *Config) holdTime() time.Duration {
	if c.Routing.Hold.Requests == 0 {
		return 0
	}
	return c.Routing.Hold.Time
}

// SLOConfig is what answers should keep.
type SLOConfig struct {
	TTFT time.Duration `mapstructure:"ttft"` // 0: off
}

// IndexConfig sizes what is remembered of the replicas' caches.
type IndexConfig struct {
	BlockBytes int      `mapstructure:"block_bytes" reload:"no"`
	MaxBytes   ByteSize `mapstructure:"max_bytes" reload:"no"`
	Snapshot   string   `mapstructure:"snapshot" reload:"no"` // file; empty: none
}

// RecordConfig is for the recording of traffic.
type RecordConfig struct {
	File     string   `mapstructure:"file"` // empty: none
	MaxBytes ByteSize `mapstructure:"max_bytes"`
	Keep     int      `mapstructure:"keep"`
}

// LimitsConfig bounds what clients may send.
type LimitsConfig struct {
	InFlight       int      `mapstructure:"in_flight"`
	Connections    int      `mapstructure:"connections"`
	QueryBytes     ByteSize `mapstructure:"query_bytes"`
	BodyBytes      ByteSize `mapstructure:"body_bytes"`
	BodyBytesTotal ByteSize `mapstructure:"body_bytes_total"`
	HeaderBytes    ByteSize `mapstructure:"header_bytes" reload:"no"`
}

// PollConfig is for the scrapes of /metrics.
type PollConfig struct {
	Interval     time.Duration `mapstructure:"interval"`
	FastInterval time.Duration `mapstructure:"fast_interval"`
	Timeout      time.Duration `mapstructure:"timeout"`
}

// HealthConfig is for the readiness checks.
type HealthConfig struct {
	Interval     time.Duration `mapstructure:"interval"`
	DownInterval time.Duration `mapstructure:"down_interval"`
	Timeout      time.Duration `mapstructure:"timeout"`
}

// TimeoutsConfig bounds every wait in a request's life. FirstByte, Response, Idle,
// BodyIdle, WriteIdle and Drain are off when 0.
type TimeoutsConfig struct {
	Connect       time.Duration `mapstructure:"connect"`
	FirstByte     time.Duration `mapstructure:"first_byte"`
	Response      time.Duration `mapstructure:"response"`
	Idle          time.Duration `mapstructure:"idle"`
	KeepaliveIdle time.Duration `mapstructure:"keepalive_idle"`
	ReadHeader    time.Duration `mapstructure:"read_header" reload:"no"`
	BodyIdle      time.Duration `mapstructure:"body_idle"`
	WriteIdle     time.Duration `mapstructure:"write_idle"`
	Drain         time.Duration `mapstructure:"drain"`
	Shutdown      time.Duration `mapstructure:"shutdown"`
}

// RetryConfig says what is tried again, and how much of it.
type RetryConfig struct {
	Share     float64 `mapstructure:"share"`      // of the requests of 10 s
	PerSecond int     `mapstructure:"per_second"` // always allowed
	Stalled   bool    `mapstructure:"stalled"`
	Timeouts  bool    `mapstructure:"timeouts"`
}

// BreakerConfig says when a backend that fails is a later choice; never when
// Failures is 0.
type BreakerConfig struct {
	Failures int           `mapstructure:"failures"`
	Open     time.Duration `mapstructure:"open"`
}

// SSEConfig is for answers that are streams.
type SSEConfig struct {
	Keepalive time.Duration `mapstructure:"keepalive"` // 0: none
}

// ConnectionsConfig bounds what is open towards the replicas.
type ConnectionsConfig struct {
	MaxPerBackend int `mapstructure:"max_per_backend"`
}

// LogConfig chooses what is logged, and how.
type LogConfig struct {
	Level  string `mapstructure:"level"`
	Format string `mapstructure:"format" reload:"no"`
}

// AccessLogConfig is for the lines about requests.
type AccessLogConfig struct {
	File   string  `mapstructure:"file"` // a path, stdout or stderr; empty: none
	Format string  `mapstructure:"format"`
	Sample float64 `mapstructure:"sample"`
}
