// Package config defines the configuration of warmroute: it loads it from defaults, a file, the environment and
// flags, validates it, and compares two of them for a reload.
package config

//go:generate go test -run IsCurrent -update .

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"warmroute/backends"
	"warmroute/cluster"
	"warmroute/kvevents"
	"warmroute/proxy"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/apikey"
	"warmroute/proxy/recorder"
	"warmroute/router"
	"warmroute/router/policy"
	"warmroute/router/queue"
	"warmroute/router/responseindex"
	"warmroute/usage"
)

// Config holds every setting. The fields are in the order of config.yaml, which documents them; each has a line
// there. Components define the settings that concern them alone. An int64 is a size in bytes. A Config is not
// modified after it is loaded. Settings tagged reload:"no", and all settings of a section with that tag, take
// effect only at a restart.
type Config struct {
	Listeners       `mapstructure:",squash"`
	Backends        []Backend         `mapstructure:"backends"` // those of BackendsFile included
	BackendsFile    string            `mapstructure:"backends_file"`
	StateFile       string            `mapstructure:"state_file" reload:"no"`
	DNS             DNS               `mapstructure:"dns"`
	KVEvents        kvevents.Settings `mapstructure:"kv_events" reload:"no"`
	Registration    Registration      `mapstructure:"registration"`
	Tenants         `mapstructure:",squash"`
	Routing         Routing                 `mapstructure:"routing"`
	SLO             SLO                     `mapstructure:"slo"`
	Disaggregation  Disaggregation          `mapstructure:"disaggregation"`
	Index           Index                   `mapstructure:"index" reload:"no"`
	Responses       responseindex.Settings  `mapstructure:"responses"`
	Redis           cluster.Settings        `mapstructure:"redis" reload:"no"`
	Recording       recorder.Settings       `mapstructure:"recording" reload:"no"`
	Usage           usage.Settings          `mapstructure:"usage" reload:"no"`
	Limits          Limits                  `mapstructure:"limits"`
	Poll            backends.PollSettings   `mapstructure:"poll"`
	Health          backends.HealthSettings `mapstructure:"health"`
	Timeouts        Timeouts                `mapstructure:"timeouts"`
	Retry           proxy.RetrySettings     `mapstructure:"retry"`
	Breaker         router.BreakerSettings  `mapstructure:"breaker"`
	SSE             SSE                     `mapstructure:"sse"`
	Connections     Connections             `mapstructure:"connections"`
	CORS            CORS                    `mapstructure:"cors"`
	Models          Models                  `mapstructure:"models"`
	StartHooks      []StartHook             `mapstructure:"start_hooks"`
	ExtraPaths      []string                `mapstructure:"extra_paths"` // of replicas, to which requests are relayed as well
	ResponseHeaders bool                    `mapstructure:"response_headers"`
	Log             Log                     `mapstructure:"log"`
	AccessLog       accesslog.Settings      `mapstructure:"access_log"`
}

// Listeners are the public and the admin listener.
type Listeners struct {
	Listen           string         `mapstructure:"listen" reload:"no"` // host:port
	Admin            string         `mapstructure:"admin" reload:"no"`  // host:port, or empty: no admin listener
	AdminToken       string         `mapstructure:"admin_token"`        // the content of AdminTokenFile, if that is given
	AdminTokenFile   string         `mapstructure:"admin_token_file"`
	AdminTokenSource string         `mapstructure:"-"` // names the variable, setting or file that gave AdminToken, for errors
	AdminTLS         ListenerTLS    `mapstructure:"admin_tls"`
	TLS              ListenerTLS    `mapstructure:"tls"`
	TrustedProxies   []netip.Prefix `mapstructure:"trusted_proxies"`
}

// Tenants are the API keys and how they share the prefix cache.
type Tenants struct {
	Keys        []Key    `mapstructure:"keys"` // those of KeysFile included
	KeysFile    string   `mapstructure:"keys_file"`
	Tenant      string   `mapstructure:"tenant" oneof:"share isolate"` // share or isolate
	UserHeaders []string `mapstructure:"user_headers"`                 // name the user of a program that has one key for all
}

// Backend is one vLLM server, or a name that stands for several. Name is never empty after loading.
type Backend struct {
	Name   string `mapstructure:"name"`
	URL    string `mapstructure:"url"`
	DNS    string `mapstructure:"dns" oneof:"auto off"` // auto unless given
	APIKey string `mapstructure:"api_key"`

	Source      backends.Source `mapstructure:"-"`
	RefuseLocal bool            `mapstructure:"-"` // as in backends.Options: it was registered by a pattern with *

	CAFile     string `mapstructure:"ca_file"`     // for https; empty: the system's authorities
	ServerName string `mapstructure:"server_name"` // for https; empty: the URL's host
	CA         string `mapstructure:"-"`           // the content of CAFile

	MaxInFlight int     `mapstructure:"max_in_flight" range:"0..1048576"` // 0: no limit
	Weight      float64 `mapstructure:"weight" range:"0.01..100"`         // 1 unless given

	Device string `mapstructure:"device"` // a name; "": hardware of its own

	Role string `mapstructure:"role" oneof:"both prefill decode"` // both unless given

	EnginePriority bool `mapstructure:"engine_priority"`

	KVEvents string `mapstructure:"kv_events"` // auto, listen, off, or an endpoint; auto unless given
	KVReplay string `mapstructure:"kv_replay"` // of the endpoint; "": none

	Ranks string `mapstructure:"ranks" oneof:"auto off"` // auto unless given
}

// DNS configures the lookups of backends' names.
type DNS struct {
	Interval     time.Duration `mapstructure:"interval" range:"50ms..1h"`
	Server       string        `mapstructure:"server" reload:"no"` // host:port; empty: the system's
	MaxAddresses int           `mapstructure:"max_addresses" range:"1..4096"`
}

// Registration lets callers add replicas over the public listener.
type Registration struct {
	Listener    string         `mapstructure:"listener" oneof:"off public"`
	Token       string         `mapstructure:"-"` // the content of TokenFile
	TokenFile   string         `mapstructure:"token_file"`
	AllowFrom   []netip.Prefix `mapstructure:"allow_from"`
	AllowURLs   []string       `mapstructure:"allow_urls"`
	RemoveAfter time.Duration  `mapstructure:"remove_after" range:"0|1s.."` // 0: never
}

// IsOnPublicListener reports whether the public listener serves registration.
func (r Registration) IsOnPublicListener() bool { return r.Listener == "public" }

// TLSConfig returns how the certificate of an https backend is verified: by the authorities in CAFile alone, or
// by the system's if there is none. It returns nil for the defaults.
func (b Backend) TLSConfig() (*tls.Config, error) {
	if b.CAFile == "" && b.ServerName == "" {
		return nil, nil
	}
	c := &tls.Config{ServerName: b.ServerName}
	if b.CAFile == "" {
		return c, nil
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM([]byte(b.CA)) {
		return nil, fmt.Errorf("%s contains no certificate; expected PEM, beginning with -----BEGIN CERTIFICATE-----", b.CAFile)
	}
	return c, nil
}

// ListenerTLS is the certificate of a listener. Both files are given, or neither.
type ListenerTLS struct {
	CertFile string `mapstructure:"cert_file"`
	KeyFile  string `mapstructure:"key_file"`

	Certificate *tls.Certificate `mapstructure:"-"` // the content of the files; nil: none given
}

// Enabled reports whether the listener uses TLS.
func (t ListenerTLS) Enabled() bool { return t.Certificate != nil }

// Key is one API key.
type Key struct {
	apikey.Key `mapstructure:",squash"`

	SHA256 string `mapstructure:"sha256"`

	secrets []apikey.Secret // of this name in the keys file
}

// Routing selects and tunes the routing policy.
type Routing struct {
	Policy              string         `mapstructure:"policy"`
	Attempts            int            `mapstructure:"attempts" range:"1..10"` // the first one included
	Queue               queue.Settings `mapstructure:"queue"`
	LowPrioritySlowdown float64        `mapstructure:"low_priority_slowdown" range:"0..10"` // 0: no limit
	Learn               bool           `mapstructure:"learn"`
	ConversationHeaders []string       `mapstructure:"conversation_headers"`

	policy.Settings `mapstructure:",squash"`
}

// SLO holds latency targets.
type SLO struct {
	TTFT   time.Duration `mapstructure:"ttft" range:"0s..24h"` // 0: off
	Refuse bool          `mapstructure:"refuse"`               // requests that are predicted to miss their target
}

// Disaggregation configures requests of which one replica does the prefill and another one the decode.
type Disaggregation struct {
	Fallback          string        `mapstructure:"fallback" oneof:"plain queue"`
	KVLease           time.Duration `mapstructure:"kv_lease" range:"1s..10m"`
	MinUncachedTokens int           `mapstructure:"min_uncached_tokens" range:"0..10000000"` // 0: the cost decides
}

// Index bounds the index of the replicas' prefix caches.
type Index struct {
	BlockBytes int    `mapstructure:"block_bytes" range:"64..4096"`
	MaxBytes   int64  `mapstructure:"max_bytes" range:"1MiB..1024TiB"`
	Snapshot   string `mapstructure:"snapshot"` // file; empty: none
}

// Limits bounds what clients may send.
type Limits struct {
	proxy.Limits `mapstructure:",squash"`

	HeaderBytes int64 `mapstructure:"header_bytes" reload:"no" range:"4KiB..1GiB"`
}

// Timeouts bounds every wait. ServeAfterTerm and those of the proxy are off when 0.
type Timeouts struct {
	proxy.Timeouts `mapstructure:",squash"`

	Connect        time.Duration `mapstructure:"connect" range:"1ms.."`
	KeepaliveIdle  time.Duration `mapstructure:"keepalive_idle" range:"1ms.."`
	ReadHeader     time.Duration `mapstructure:"read_header" reload:"no" range:"1ms.."`
	ServeAfterTerm time.Duration `mapstructure:"serve_after_term" range:"0s.."`
	Shutdown       time.Duration `mapstructure:"shutdown" range:"0s.."`
}

// SSE configures streamed responses.
type SSE struct {
	Keepalive      time.Duration `mapstructure:"keepalive" range:"0s.."`       // 0: none
	QueueKeepalive time.Duration `mapstructure:"queue_keepalive" range:"0s.."` // 0: none
}

// Connections bounds the connections to the backends.
type Connections struct {
	MaxPerBackend int `mapstructure:"max_per_backend" range:"1..1048576"`
}

// CORS lets web pages of other origins use the API.
type CORS struct {
	Origins []string `mapstructure:"origins"` // or "*" alone: all
}

// Models configures models that replicas do not list.
type Models struct {
	Names    []ModelName       `mapstructure:"names"`
	Patterns map[string]string `mapstructure:"patterns"` // of adapters' names, with one *, to the base model
}

// ModelName is a name by which clients ask for a model of replicas, or for one of several.
type ModelName struct {
	Name            string        `mapstructure:"name"`
	Model           string        `mapstructure:"model"`                         // the only one
	Models          []string      `mapstructure:"models"`                        // several
	Weights         []int         `mapstructure:"weights"`                       // of Models; nil: the first serves all
	FallbackAfter   time.Duration `mapstructure:"fallback_after" range:"0s..1h"` // 20 s unless given
	Set             Members       `mapstructure:"set"`
	MaxOutputTokens int           `mapstructure:"max_output_tokens" range:"0..1000000000"` // 0: no limit
}

// Members are members of a JSON object, with values as YAML has them.
type Members map[string]any

// StartHook is a URL that is called when requests wait for a model that no replica serves.
type StartHook struct {
	Model   string        `mapstructure:"model"`
	URL     string        `mapstructure:"url"`
	Timeout time.Duration `mapstructure:"timeout" range:"1s.."` // 10 minutes unless given
}

// Log configures the log.
type Log struct {
	Level  string `mapstructure:"level" oneof:"debug info warn error"`
	Format string `mapstructure:"format" reload:"no" oneof:"text json"`
}

// ProxySettings returns the settings of the proxy in a process that may have maxOpenFiles file
// descriptors; 0: unknown.
func (c *Config) ProxySettings(maxOpenFiles uint64, replicas int) proxy.Settings {
	return proxy.Settings{
		Limits:              c.Limits.Limits,
		Timeouts:            c.Timeouts.Timeouts,
		Retry:               c.Retry,
		Attempts:            c.Routing.Attempts,
		QueueTimeouts:       c.QueueTimeouts(),
		Keepalive:           c.SSE.Keepalive,
		QueueKeepalive:      c.SSE.QueueKeepalive,
		KVLease:             c.Disaggregation.KVLease,
		QueueForRoles:       c.queuesForRoles(),
		TTFTTarget:          c.SLO.TTFT,
		RefuseLate:          c.SLO.Refuse,
		TrustedProxies:      c.TrustedProxies,
		ConversationHeaders: canonicalHeaders(c.Routing.ConversationHeaders),
		UserHeaders:         canonicalHeaders(c.UserHeaders),
		RouteHeaders:        c.ResponseHeaders,
		IsolateTenants:      c.Tenant == "isolate",
		CORSOrigins:         c.CORS.Origins,
		ReadyIfEmpty:        c.Registration.IsOnPublicListener(),
		ExtraPaths:          c.ExtraPaths,

		AdapterPatterns: c.Models.adapterPatterns(),
		ModelNames:      c.Models.modelNames(),
		StartTimeouts:   c.startTimeouts(),

		DescriptorConnections: c.MaxClientConnections(maxOpenFiles, replicas),
	}
}

// canonicalHeaders returns the names of headers as net/http has them.
func canonicalHeaders(names []string) []string {
	canonical := make([]string, len(names))
	for i, name := range names {
		canonical[i] = http.CanonicalHeaderKey(name)
	}
	return canonical
}

// QueueTimeouts returns how long a request may wait in the admission queue; none when the queue is off.
func (c *Config) QueueTimeouts() queue.Timeouts {
	if c.Routing.Queue.Requests == 0 {
		return queue.Timeouts{}
	}
	return c.Routing.Queue.Timeouts()
}

// PublicURL returns the URL of the public listener, as reached from the same machine.
func (c *Config) PublicURL() string {
	return listenerURL(c.Listen, c.TLS)
}

// AdminURL returns the URL of the admin listener, as reached from the same machine, or "" if there is none.
func (c *Config) AdminURL() string {
	if _, _, err := net.SplitHostPort(c.Admin); err != nil {
		return ""
	}
	return listenerURL(c.Admin, c.AdminTLS)
}

func listenerURL(listen string, t ListenerTLS) string {
	if t.CertFile != "" {
		return "https://" + LocalAddr(listen)
	}
	return "http://" + LocalAddr(listen)
}

// LocalAddr returns the address by which a listener at listen is reached from the same machine.
func LocalAddr(listen string) string {
	host, port, _ := net.SplitHostPort(listen)
	if isWildcard(host) {
		host = "127.0.0.1" // an unspecified IPv6 address accepts IPv4 as well
	}
	return net.JoinHostPort(host, port)
}

// RouterSettings returns the settings of the router.
func (c *Config) RouterSettings() router.Settings {
	return router.Settings{
		Policy:         c.Routing.Policy,
		PolicySettings: c.Routing.Settings,
		Queue:          c.Routing.QueueSettings(),
		Breaker:        c.Breaker,
		PollInterval:   c.Poll.Interval,
		Disaggregation: router.DisaggregationSettings{Queue: c.queuesForRoles(), Lease: c.Disaggregation.KVLease,
			MinUncachedTokens: c.Disaggregation.MinUncachedTokens},
		NoLearning: !c.Routing.Learn,
	}
}

// queuesForRoles reports whether requests wait for replicas of a role. Without a queue they would be refused.
func (c *Config) queuesForRoles() bool {
	return c.Disaggregation.Fallback == "queue" && c.Routing.Queue.Requests > 0
}

// QueueSettings returns the settings of the admission queue.
func (r Routing) QueueSettings() queue.Settings {
	q := r.Queue
	q.LowPrioritySlowdown = r.LowPrioritySlowdown
	return q
}
