package config

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"warmroute/backends"
	"warmroute/cluster"
	"warmroute/kvevents"
	"warmroute/lab/policies"
	"warmroute/proxy"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/recorder"
	"warmroute/router"
	"warmroute/router/queue"
	"warmroute/router/responseindex"
	"warmroute/usage"
)

// defaults is the content of config.yaml.
var defaults = func() []byte {
	data, err := os.ReadFile("../config.yaml")
	if err != nil {
		panic(err)
	}
	return data
}()

// testLoader is that of the shipped binary.
var testLoader = Loader{Defaults: defaults, Policies: policies.All()}

// load reads a configuration as `serve --config FILE` followed by args does.
// No file is used if yaml is empty.
func load(t *testing.T, yaml string, args ...string) (*Config, error) {
	t.Helper()
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	testLoader.AddFlags(flags)
	if yaml != "" {
		file := filepath.Join(t.TempDir(), "test.yaml")
		if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", file)
	}
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return testLoader.Load(flags, flags.Args())
}

func mustLoad(t *testing.T, yaml string, args ...string) *Config {
	t.Helper()
	c, err := load(t, yaml, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDefaults(t *testing.T) {
	want := &Config{
		Listeners:    Listeners{Listen: ":8080", Admin: "127.0.0.1:9090", TrustedProxies: []netip.Prefix{}},
		Backends:     []Backend{{Name: "a:8000", URL: "http://a:8000", DNS: "auto", Weight: 1, Role: "both", KVEvents: "auto", Ranks: "auto"}},
		DNS:          DNS{Interval: 2 * time.Second, MaxAddresses: 256},
		KVEvents:     kvevents.Settings{Ports: 1},
		Registration: Registration{Listener: "off", AllowFrom: []netip.Prefix{}, AllowURLs: []string{}, RemoveAfter: time.Hour},
		Tenants:      Tenants{Keys: []Key{}, Tenant: "share", UserHeaders: []string{"X-OpenWebUI-User-Id"}},
		Routing: Routing{
			Policy: "prefix", Attempts: 3, Learn: true,
			ConversationHeaders: []string{"X-Session-Id", "X-Claude-Code-Session-Id", "Thread-Id", "Session-Id", "thread_id", "session_id",
				"X-OpenCode-Session", "X-Session-Affinity", "X-Multi-Turn-Session-Id", "X-Dynamo-Session-Id"},
			Queue: queue.Settings{Requests: 10_000, Bytes: 512 << 20, LowPriorityRequests: 10_000, LowPriorityBytes: 384 << 20,
				NoneReadyTimeout: time.Minute, BusyTimeout: 10 * time.Minute}, LowPrioritySlowdown: 0.05,
		},
		Disaggregation: Disaggregation{Fallback: "plain", KVLease: 30 * time.Second},
		Index:          Index{BlockBytes: 256, MaxBytes: 256 << 20},
		Responses:      responseindex.Settings{MaxEntries: 100_000, TTL: 24 * time.Hour},
		Redis:          cluster.Settings{Mode: "single", Prefix: "warmroute:", MaxBytes: 64 << 20},
		Recording:      recorder.Settings{Memory: 32 << 20, MaxBytes: 256 << 20, Keep: 3},
		Usage:          usage.Settings{Keep: 400 * 24 * time.Hour},
		Limits: Limits{proxy.Limits{InFlight: 24_000, Connections: 28_000, QueryBytes: 4 << 10, BodyBytes: 64 << 20,
			BodyBytesTotal: 1 << 30, KVTransferParams: "refuse"}, 64 << 10},
		Poll:            backends.PollSettings{Interval: time.Second, FastInterval: 250 * time.Millisecond, Timeout: 800 * time.Millisecond},
		Health:          backends.HealthSettings{Interval: 5 * time.Second, DownInterval: time.Second, Timeout: 3 * time.Second},
		Retry:           proxy.RetrySettings{Share: 0.2, PerSecond: 10, Stalled: true},
		Breaker:         router.BreakerSettings{Failures: 5, OpenTime: time.Second},
		SSE:             SSE{Keepalive: 15 * time.Second, QueueKeepalive: 45 * time.Second},
		Connections:     Connections{MaxPerBackend: 8192},
		CORS:            CORS{Origins: []string{}},
		Models:          Models{Names: []ModelName{}, Patterns: map[string]string{}},
		StartHooks:      []StartHook{},
		ExtraPaths:      []string{},
		ResponseHeaders: true,
		Log:             Log{Level: "info", Format: "text"},
		AccessLog:       accesslog.Settings{Format: "json", Sample: 1},
		Timeouts: Timeouts{
			Timeouts: proxy.Timeouts{FirstByte: 2 * time.Minute, Response: 15 * time.Minute, Idle: 2 * time.Minute, BodyIdle: 30 * time.Second,
				WriteIdle: time.Minute},
			Connect: 2 * time.Second, KeepaliveIdle: 4 * time.Second, ReadHeader: 10 * time.Second, ServeAfterTerm: 5 * time.Second,
			Shutdown: time.Minute,
		},
	}
	if got := mustLoad(t, "", "http://a:8000"); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// No limit is reached before the queue's own while one tenant fills the parts of interactive and low-priority requests.
func TestDefaultLimitsAgree(t *testing.T) {
	c := mustLoad(t, "", "http://a:8000", "http://b:8000", "http://c:8000")
	q, l := c.Routing.Queue, c.Limits
	const forLowPriority = 0.9 // of the limits on all requests
	if queued := q.Requests + q.LowPriorityRequests; float64(queued) >= forLowPriority*float64(l.InFlight) {
		t.Errorf("%d requests may be queued, and %d in flight", queued, l.InFlight)
	}
	if queued := q.Bytes + q.LowPriorityBytes; float64(queued) >= forLowPriority*float64(l.BodyBytesTotal) || 2*q.Bytes > l.BodyBytesTotal {
		t.Errorf("bodies of %d and %d bytes may be queued, and %d be in memory", q.Bytes, q.LowPriorityBytes, l.BodyBytesTotal)
	}
	if l.InFlight > l.Connections {
		t.Errorf("%d requests may be in flight on %d connections", l.InFlight, l.Connections)
	}
	if n := c.MaxFileDescriptors(0); n > 65_536 { // what docs/deploy/backends.md asks for
		t.Errorf("%d file descriptors may be needed", n)
	}
}

func TestDefaultsCoverAllSettings(t *testing.T) {
	given, err := decodeYAML(defaults)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	var walk func(m map[string]any, prefix string)
	walk = func(m map[string]any, prefix string) {
		for key, value := range m {
			if section, ok := value.(map[string]any); ok && len(section) > 0 { // else a setting that is a mapping
				walk(section, prefix+key+".")
			} else {
				lines = append(lines, prefix+key)
			}
		}
	}
	walk(given, "")
	slices.Sort(lines)
	var fields []string
	for _, s := range settingsOf(reflect.ValueOf(Config{}), "", false) {
		fields = append(fields, s.path)
	}
	slices.Sort(fields)
	if !slices.Equal(lines, fields) {
		t.Errorf("config.yaml has\n%v\nConfig has\n%v", lines, fields)
	}
}

func TestDefaultsHaveComments(t *testing.T) {
	var previous string
	for line := range strings.Lines(string(defaults)) {
		line = strings.TrimSpace(line)
		if name, value, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, "#") && value != "" && !strings.HasPrefix(previous, "#") {
			t.Errorf("no comment above %s", name)
		}
		previous = line
	}
}

// otherValues gives every scalar setting a value that is not its default, as
// text, and the same as Go's value.
func otherValues() map[string]struct {
	text  string
	value any
} {
	type v = struct {
		text  string
		value any
	}
	return map[string]v{
		"listen":                              {"127.0.0.1:7000", "127.0.0.1:7000"},
		"admin":                               {"", ""},
		"admin_token":                         {"0123456789abcdef", "0123456789abcdef"},
		"admin_token_file":                    {"testdata/admin_token", "testdata/admin_token"},
		"backends_file":                       {"testdata/backends", "testdata/backends"},
		"state_file":                          {"/tmp/state", "/tmp/state"},
		"dns.interval":                        {"5s", 5 * time.Second},
		"dns.server":                          {"127.0.0.1:8600", "127.0.0.1:8600"},
		"dns.max_addresses":                   {"16", 16},
		"kv_events.listen":                    {"tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"},
		"kv_events.ports":                     {"8", 8},
		"registration.listener":               {"off", "off"},
		"registration.token_file":             {"testdata/admin_token", "testdata/admin_token"},
		"registration.remove_after":           {"0", time.Duration(0)},
		"keys_file":                           {"testdata/keys", "testdata/keys"},
		"tenant":                              {"isolate", "isolate"},
		"user_headers":                        {"X-User", []string{"X-User"}},
		"routing.policy":                      {"least-load", "least-load"},
		"routing.attempts":                    {"2", 2},
		"routing.queue.requests":              {"0", 0},
		"routing.queue.bytes":                 {"128MiB", int64(128 << 20)},
		"routing.queue.low_priority_requests": {"20000", 20_000},
		"routing.queue.low_priority_bytes":    {"1GiB", int64(1 << 30)},
		"routing.queue.none_ready_timeout":    {"5s", 5 * time.Second},
		"routing.queue.busy_timeout":          {"2m", 2 * time.Minute},
		"routing.low_priority_slowdown":       {"0.2", 0.2},
		"routing.learn":                       {"false", false},
		"routing.conversation_headers":        {"X-Chat, x-agent", []string{"X-Chat", "x-agent"}},
		"routing.client_affinity":             {"true", true},
		"routing.match_ratio":                 {"0.5", 0.5},
		"routing.match_tokens":                {"1024", 1024},
		"routing.imbalance_abs":               {"32", 32.0},
		"routing.imbalance_ratio":             {"1.1", 1.1},
		"routing.load_factor":                 {"1.25", 1.25},
		"routing.eviction_threshold":          {"400000", 400_000},
		"routing.eviction_target":             {"360000", 360_000},
		"routing.eviction_interval":           {"30s", 30 * time.Second},
		"slo.ttft":                            {"500ms", 500 * time.Millisecond},
		"slo.refuse":                          {"true", true},
		"disaggregation.fallback":             {"queue", "queue"},
		"disaggregation.kv_lease":             {"1m", time.Minute},
		"disaggregation.min_uncached_tokens":  {"2000", 2000},
		"index.block_bytes":                   {"512", 512},
		"index.max_bytes":                     {"8MB", int64(8e6)},
		"index.snapshot":                      {"/tmp/index", "/tmp/index"},
		"responses.max_entries":               {"500", 500},
		"responses.ttl":                       {"2h", 2 * time.Hour},
		"redis.url":                           {"rediss://redis:6379", "rediss://redis:6379"},
		"redis.mode":                          {"cluster", "cluster"},
		"redis.password_file":                 {"testdata/admin_token", "testdata/admin_token"},
		"redis.ca_file":                       {"testdata/keys", "testdata/keys"},
		"redis.secret_file":                   {"testdata/admin_token", "testdata/admin_token"},
		"redis.prefix":                        {"fleet-a:", "fleet-a:"},
		"redis.max_bytes":                     {"16MiB", int64(16 << 20)},
		"recording.file":                      {"/tmp/traffic", "/tmp/traffic"},
		"recording.max_bytes":                 {"16MiB", int64(16 << 20)},
		"recording.keep":                      {"0", 0},
		"usage.file":                          {"/tmp/usage", "/tmp/usage"},
		"usage.keep":                          {"90d", 90 * 24 * time.Hour},
		"limits.in_flight":                    {"100", 100},
		"limits.connections":                  {"200", 200},
		"limits.query_bytes":                  {"0", int64(0)},
		"limits.body_bytes":                   {"1MiB", int64(1 << 20)},
		"limits.body_bytes_total":             {"2GiB", int64(2 << 30)},
		"limits.kv_transfer_params":           {"allow", "allow"},
		"limits.header_bytes":                 {"8192", int64(8192)},
		"poll.interval":                       {"2s", 2 * time.Second},
		"poll.fast_interval":                  {"100ms", 100 * time.Millisecond},
		"poll.timeout":                        {"900ms", 900 * time.Millisecond},
		"health.interval":                     {"7s", 7 * time.Second},
		"health.down_interval":                {"500ms", 500 * time.Millisecond},
		"health.timeout":                      {"3s", 3 * time.Second},
		"timeouts.connect":                    {"1s", time.Second},
		"timeouts.first_byte":                 {"0", time.Duration(0)},
		"timeouts.response":                   {"1h", time.Hour},
		"timeouts.body_idle":                  {"0", time.Duration(0)},
		"retry.share":                         {"0.5", 0.5},
		"retry.per_second":                    {"50", 50},
		"retry.stalled":                       {"false", false},
		"recording.memory":                    {"1MiB", int64(1 << 20)},
		"retry.after_timeout":                 {"true", true},
		"breaker.failures":                    {"3", 3},
		"breaker.open_time":                   {"2s", 2 * time.Second},
		"sse.keepalive":                       {"0", time.Duration(0)},
		"sse.queue_keepalive":                 {"30s", 30 * time.Second},
		"timeouts.write_idle":                 {"0", time.Duration(0)},
		"timeouts.idle":                       {"1m30s", 90 * time.Second},
		"timeouts.keepalive_idle":             {"60s", time.Minute},
		"timeouts.read_header":                {"5s", 5 * time.Second},
		"timeouts.serve_after_term":           {"0", time.Duration(0)},
		"timeouts.shutdown":                   {"10s", 10 * time.Second},
		"connections.max_per_backend":         {"16", 16},
		"cors.origins": {"https://a.example, http://localhost:3000",
			[]string{"https://a.example", "http://localhost:3000"}},
		"response_headers":  {"false", false},
		"log.level":         {"debug", "debug"},
		"log.format":        {"json", "json"},
		"access_log.file":   {"stderr", "stderr"},
		"access_log.format": {"text", "text"},
		"access_log.sample": {"0.1", 0.1},
	}
}

// valueAt returns the value of the setting at path.
func valueAt(c *Config, path string) any {
	for _, s := range settingsOf(reflect.ValueOf(*c), "", false) {
		if s.path == path {
			return s.value.Interface()
		}
	}
	return nil
}

func TestSettingFromFileAndEnvironment(t *testing.T) {
	values := otherValues()
	for _, s := range settingsOf(reflect.ValueOf(Config{}), "", false) {
		path := s.path
		// a pair, and of files that are there
		if s.value.Kind() == reflect.Slice || s.value.Kind() == reflect.Map || strings.HasPrefix(path, "tls.") ||
			strings.HasPrefix(path, "admin_tls.") {
			continue
		}
		other, ok := values[path]
		if !ok {
			t.Errorf("no test value for %s", path)
			continue
		}
		t.Run(path, func(t *testing.T) {
			var yaml, indent string
			for section := range strings.SplitSeq(path, ".") {
				yaml += "\n" + indent + section + ":"
				indent += "  "
			}
			yaml += " \"" + other.text + "\"\n"
			if got := valueAt(mustLoad(t, yaml, "http://a:8000"), path); got != other.value {
				t.Errorf("from the file: got %v, want %v", got, other.value)
			}
			t.Setenv(envName(path), other.text)
			if got := valueAt(mustLoad(t, "", "http://a:8000"), path); got != other.value {
				t.Errorf("from %s: got %v, want %v", envName(path), got, other.value)
			}
		})
	}
}

func TestModelPatterns(t *testing.T) {
	want := []proxy.AdapterPattern{{Prefix: "sql-", Suffix: "-v2", Base: "org/new"}, {Prefix: "sql-", Base: "org/base.1"},
		{Suffix: "-x", Base: "other"}}
	if got := mustLoad(t, "models:\n  patterns: {\"*-x\": other, \"sql-*\": org/base.1, \"sql-*-v2\": org/new}",
		"http://a:8000").ProxySettings(0, 0).AdapterPatterns; !slices.Equal(got, want) {
		t.Errorf("from the file: %+v", got)
	}
	t.Setenv("WARMROUTE_MODELS_PATTERNS", "*-x=other, sql-*=org/base.1,sql-*-v2=org/new")
	if got := mustLoad(t, "", "http://a:8000").ProxySettings(0, 0).AdapterPatterns; !slices.Equal(got, want) {
		t.Errorf("from the environment: %+v", got)
	}
}

func TestStartHooks(t *testing.T) {
	want := map[string]time.Duration{"a": 10 * time.Minute, "org/b": time.Hour}
	if got := mustLoad(t, "start_hooks: [{model: a, url: http://scaler/a}, {model: org/b, url: https://x:1/b?c, timeout: 1h}]",
		"http://a:8000").ProxySettings(0, 0).StartTimeouts; !maps.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestTrustedProxies(t *testing.T) {
	want := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("fd00::/8"),
		netip.MustParsePrefix("::1/128")}
	if got := mustLoad(t, "trusted_proxies: [10.1.2.3/8, 192.0.2.1, \"fd00::/8\", \"::1\"]", "http://a:8000").ProxySettings(0,
		0).TrustedProxies; !slices.Equal(got, want) {
		t.Errorf("from the file: got %v", got)
	}
	t.Setenv("WARMROUTE_TRUSTED_PROXIES", "10.0.0.0/8, 192.0.2.1,fd00::/8, ::1")
	if got := mustLoad(t, "", "http://a:8000").TrustedProxies; !slices.Equal(got, want) {
		t.Errorf("from the environment: got %v", got)
	}
}

// TestSourcePrecedence gives a setting in one more source each time: none, the file, its variable, its flag. In each
// source the value is zero, false or empty for some settings.
func TestSourcePrecedence(t *testing.T) {
	networks := func(list ...string) []netip.Prefix {
		prefixes := []netip.Prefix{}
		for _, network := range list {
			prefixes = append(prefixes, netip.MustParsePrefix(network))
		}
		return prefixes
	}
	initial := mustLoad(t, "", "http://a:8000").Routing.ConversationHeaders
	const noFlag = "none"
	for _, c := range []struct {
		path           string
		initial        any // by default
		file           string
		fromFile       any
		variable       string
		fromVariable   any
		flag, flagText string
	}{
		{"routing.learn", true, "false", false, "true", true, noFlag, ""},
		{"retry.after_timeout", false, "true", true, "false", false, noFlag, ""},
		{"response_headers", true, "\"false\"", false, " 1 ", true, noFlag, ""},
		{"routing.queue.requests", 10_000, "0", 0, "5", 5, noFlag, ""},
		{"recording.keep", 3, "7", 7, "0", 0, noFlag, ""},
		{"retry.share", 0.2, "0", 0.0, "0.5", 0.5, noFlag, ""},
		{"routing.low_priority_slowdown", 0.05, "1", 1.0, "0", 0.0, noFlag, ""},
		{"timeouts.idle", 2 * time.Minute, "0", time.Duration(0), "1m30s", 90 * time.Second, noFlag, ""},
		{"sse.keepalive", 15 * time.Second, "250ms", 250 * time.Millisecond, "0", time.Duration(0), noFlag, ""},
		{"usage.keep", 400 * 24 * time.Hour, "30d", 30 * 24 * time.Hour, "0s", time.Duration(0), noFlag, ""},
		{"limits.query_bytes", int64(4 << 10), "0", int64(0), "64KB", int64(64_000), noFlag, ""},
		{"recording.memory", int64(32 << 20), "1 GiB", int64(1 << 30), "0", int64(0), noFlag, ""},
		{"redis.prefix", "warmroute:", "\"\"", "", "Fleet.A:", "Fleet.A:", noFlag, ""},
		{"dns.server", "", "127.0.0.1:8600", "127.0.0.1:8600", "", "", noFlag, ""},
		{"routing.conversation_headers", initial, "[]", []string{}, "X-A, x-b,", []string{"X-A", "x-b"}, noFlag, ""},
		{"routing.conversation_headers", initial, "X-A, x-b", []string{"X-A", "x-b"}, "", []string{}, noFlag, ""},
		{"user_headers", []string{"X-OpenWebUI-User-Id"}, "[]", []string{}, "X-A, x-b", []string{"X-A", "x-b"}, noFlag, ""},
		{"cors.origins", []string{}, "[\"*\"]", []string{"*"}, "https://a.example", []string{"https://a.example"}, noFlag, ""},
		{"extra_paths", []string{}, "[/Custom.path]", []string{"/Custom.path"}, "", []string{}, noFlag, ""},
		{"trusted_proxies", networks(), "[10.0.0.0/8]", networks("10.0.0.0/8"),
			"fd00::/8,192.0.2.1", networks("fd00::/8", "192.0.2.1/32"), noFlag, ""},
		{"trusted_proxies", networks(), "[10.0.0.0/8, 10.1.2.3]", networks("10.0.0.0/8", "10.1.2.3/32"), "", networks(), noFlag, ""},
		{"models.patterns", map[string]string{}, "{Org.A-*: Base/One.1, a-*: b}", map[string]string{"Org.A-*": "Base/One.1", "a-*": "b"},
			"Org.B-*=Base/Two.2", map[string]string{"Org.B-*": "Base/Two.2"}, noFlag, ""},
		{"models.patterns", map[string]string{}, "{Org.A-*: b}", map[string]string{"Org.A-*": "b"}, "", map[string]string{}, noFlag, ""},
		{"admin", "127.0.0.1:9090", "\"\"", "", ":9091", ":9091", "--admin", ""},
		{"admin", "127.0.0.1:9090", ":9091", ":9091", "", "", "--admin", ":9092"},
		{"listen", ":8080", ":1", ":1", ":2", ":2", "--listen", "[::1]:3"},
		{"routing.policy", "prefix", "random", "random", "round-robin", "round-robin", "--policy", "least-load"},
		{"log.level", "info", "debug", "debug", "warn", "warn", "--log-level", "error"},
	} {
		t.Run(c.path, func(t *testing.T) {
			check := func(sources string, want any, yaml string, args ...string) {
				t.Helper()
				if got := valueAt(mustLoad(t, yaml, append(args, "http://a:8000")...), c.path); !reflect.DeepEqual(got, want) {
					t.Errorf("%s: got %#v, want %#v", sources, got, want)
				}
			}
			yaml, indent := "", ""
			for section := range strings.SplitSeq(c.path, ".") {
				yaml += "\n" + indent + section + ":"
				indent += "  "
			}
			yaml += " " + c.file + "\n"
			check("default", c.initial, "")
			check("file", c.fromFile, yaml)
			t.Setenv(envName(c.path), c.variable)
			check("variable", c.fromVariable, "")
			check("file and variable", c.fromVariable, yaml)
			if c.flag != noFlag {
				check("file, variable and flag", c.flagText, yaml, c.flag, c.flagText)
			}
		})
	}
}

// TestMapKeysKept has keys with dots and in upper case where they are names, and where they are those of settings.
func TestMapKeysKept(t *testing.T) {
	want := map[string]string{"Org.SQL-*": "Base/Model.1", "org.sql-*": "base/model.2", "a.b.c-*": "x", "routing.policy-*": "y"}
	yaml := `
models:
  patterns: {Org.SQL-*: Base/Model.1, org.sql-*: base/model.2, a.b.c-*: x, routing.policy-*: y}
start_hooks: [{model: Org/Model.1, url: "http://Scaler/A.b?C=d"}]
backends: [{url: "http://a:8000/Base.path", name: GPU.0}]
`
	for range 2 { // a reload reads the same
		c := mustLoad(t, yaml)
		if !maps.Equal(c.Models.Patterns, want) || c.Backends[0].Name != "GPU.0" {
			t.Errorf("got %+v, %+v", c.Models, c.Backends)
		}
		if want := (StartHook{Model: "Org/Model.1", URL: "http://Scaler/A.b?C=d", Timeout: 10 * time.Minute}); c.StartHooks[0] != want {
			t.Errorf("got %+v, want %+v", c.StartHooks[0], want)
		}
	}
	const others = "backends: [\"http://a:8000\"]\n"
	for range 20 { // the order in which viper reads the keys of a map varies
		if c := mustLoad(t, others+"poll: {interval: 3s}\nPoll: {}\nPOLL: {}\n"); c.Poll.Interval != 3*time.Second {
			t.Fatalf("a section in upper case replaces another: %+v", c.Poll)
		}
	}
	for _, c := range []struct{ yaml, want string }{
		{others + "Poll: {interval: 1s}", "Poll.interval: unknown setting; did you mean poll.interval?"},
		{others + "poll: {Interval: 1s}", "poll.Interval: unknown setting; did you mean poll.interval?"},
		{others + "models: {Patterns: {a-*: b}}", "models.Patterns: unknown setting; did you mean models.patterns?"},
		{"backends: [{Url: \"http://a:8000\"}]", `backends[0]: unknown key "Url"; did you mean url?`},
		{"backends: [{url: \"http://a:8000\", tls.ca_file: x}]",
			`backends[0]: unknown key "tls.ca_file"; a backend has ` + strings.Join(settingNames[Backend](), ", ")},
		{others + "start_hooks: [{Model: a, url: \"http://b\"}]", `start_hooks[0]: unknown key "Model"; did you mean model?`},
		{others + "keys: [{Name: a, sha256: " + aHash + "}]", `keys[0]: unknown setting "Name"; did you mean name?`},
		{others + "keys: [{name: a, sha256: " + aHash + ", B.c: d}]",
			`keys[0]: unknown setting "B.c"; a key has ` + strings.Join(settingNames[Key](), ", ")},
	} {
		if got := loadErrors(t, c.yaml); got != c.want {
			t.Errorf("%s\ngot  %s\nwant %s", c.yaml, got, c.want)
		}
	}
}

func TestNullValues(t *testing.T) {
	const backend = "backends: [\"http://a:8000\"]\n"
	for _, c := range []struct{ yaml, want string }{
		{backend + "poll:\nrouting: {queue: ~}\nmodels: null", ""},
		{"backends: ", "backends: has no value; give it one or delete the line"},
		{backend + "routing: {queue: {none_ready_timeout: ~}}", "routing.queue.none_ready_timeout: has no value; give it one or delete the line"},
		{backend + "routing: {conversation_headers: }", "routing.conversation_headers: has no value; give it one or delete the line"},
		{backend + "models: {patterns: }", "models.patterns: has no value; give it one or delete the line"},
		{backend + "models: {patterns: {A.b-*: }}",
			`models.patterns: "A.b-*" has no base model; name the one whose replicas load such adapters`},
		{backend + "start_hooks: [~]", "start_hooks[0].model: is missing; name the model\n" +
			"start_hooks[0].url: is not a URL such as http://scaler:8000/start\nstart_hooks[0].timeout: 0s is too short; the minimum is 1s"},
		{"backends: [{url: \"http://a:8000\", name: , weight: , dns: ~}]",
			`backends[0].dns: unknown dns ""; choose one of auto, off` + "\nbackends[0].weight: 0 is too small; the minimum is 0.01"},
	} {
		if got := loadErrors(t, c.yaml); got != c.want {
			t.Errorf("%s\ngot  %s\nwant %s", c.yaml, got, c.want)
		}
	}
	// A setting that the file has without a value is an error even if a variable gives it.
	t.Setenv("WARMROUTE_LISTEN", ":1")
	if got, want := loadErrors(t, backend+"listen:"), "listen: has no value; give it one or delete the line"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	t.Setenv("WARMROUTE_POLL_INTERVAL", "3s")
	if got := mustLoad(t, backend+"poll: ~").Poll.Interval; got != 3*time.Second {
		t.Errorf("poll.interval is %v", got)
	}
}

// TestVariableErrors has variables whose value or name is invalid. Each gives one error.
func TestVariableErrors(t *testing.T) {
	for _, c := range []struct{ name, value, want string }{
		{"WARMROUTE_ROUTING_ATTEMPTS", "2.5", `routing.attempts (from WARMROUTE_ROUTING_ATTEMPTS): "2.5" is not an integer`},
		{"WARMROUTE_ROUTING_ATTEMPTS", "", `routing.attempts (from WARMROUTE_ROUTING_ATTEMPTS): "" is not an integer`},
		{"WARMROUTE_ROUTING_ATTEMPTS", "0", "routing.attempts (from WARMROUTE_ROUTING_ATTEMPTS): 0 is too small; the minimum is 1"},
		{"WARMROUTE_POLL_INTERVAL", "5", `poll.interval (from WARMROUTE_POLL_INTERVAL): "5" is not a duration such as 250ms, 2s or 1m30s`},
		{"WARMROUTE_POLL_INTERVAL", "", `poll.interval (from WARMROUTE_POLL_INTERVAL): "" is not a duration such as 250ms, 2s or 1m30s`},
		{"WARMROUTE_LIMITS_BODY_BYTES", "64M",
			`limits.body_bytes (from WARMROUTE_LIMITS_BODY_BYTES): "64M" has the unknown unit "M"; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB`},
		{"WARMROUTE_RETRY_SHARE", "20%", `retry.share (from WARMROUTE_RETRY_SHARE): "20%" is not a number`},
		{"WARMROUTE_ROUTING_LEARN", "", `routing.learn (from WARMROUTE_ROUTING_LEARN): "" is not true or false`},
		{"WARMROUTE_LISTEN", "", "listen (from WARMROUTE_LISTEN): is empty; set an address such as :8080"},
		{"WARMROUTE_MODELS_PATTERNS", "a-*", `models.patterns (from WARMROUTE_MODELS_PATTERNS): "a-*" has no =; write entries as in a=b,c=d`},
		{"WARMROUTE_TRUSTED_PROXIES", "10.0.0.0/8,lb",
			`trusted_proxies[1] (from WARMROUTE_TRUSTED_PROXIES): "lb" is not a network such as 10.0.0.0/8 or an address`},
		{"WARMROUTE_START_HOOKS", "a", "start_hooks[0] (from WARMROUTE_START_HOOKS): expected a mapping with model and url, got a string"},
		{"WARMROUTE_ROUTING_QUEUE_TIME", "5s",
			"WARMROUTE_ROUTING_QUEUE_TIME: was renamed; use WARMROUTE_ROUTING_QUEUE_NONE_READY_TIMEOUT"},
		{"WARMROUTE_RECORD_FILE", "f", "WARMROUTE_RECORD_FILE: was renamed; use WARMROUTE_RECORDING_FILE"},
		{"WARMROUTE_EXTRA_PATH", "/a", "WARMROUTE_EXTRA_PATH: unknown variable; did you mean WARMROUTE_EXTRA_PATHS?"},
		{"WARMROUTE_ROUTING_CONVERSTION_HEADERS", "a",
			"WARMROUTE_ROUTING_CONVERSTION_HEADERS: unknown variable; did you mean WARMROUTE_ROUTING_CONVERSATION_HEADERS?"},
		{"WARMROUTE_MODELS_PATTERNS_A", "b", "WARMROUTE_MODELS_PATTERNS_A: unknown variable; did you mean WARMROUTE_MODELS_PATTERNS?"},
		{"WARMROUTE_routing_policy", "random", unknownVariable("WARMROUTE_routing_policy")},
		// Names of sections: their settings keep their values.
		{"WARMROUTE_POLL", "1s", unknownVariable("WARMROUTE_POLL")},
		{"WARMROUTE_ROUTING", "random", unknownVariable("WARMROUTE_ROUTING")},
		{"WARMROUTE_ROUTING_QUEUE", "", unknownVariable("WARMROUTE_ROUTING_QUEUE")},
		{"WARMROUTE_ADMIN_TLS", "on", unknownVariable("WARMROUTE_ADMIN_TLS")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(c.name, c.value)
			if got := loadErrors(t, "", "http://a:8000"); got != c.want {
				t.Errorf("%q\ngot  %s\nwant %s", c.value, got, c.want)
			}
		})
	}
	t.Setenv("WARMROUTE_POLL", "1s")
	c, err := load(t, "poll: {timeout: 5ms}", "http://a:8000")
	if err == nil || c.Poll.Timeout != 5*time.Millisecond || c.Poll.Interval != time.Second {
		t.Errorf("got %+v, %v", c.Poll, err)
	}
}

// unknownVariable returns the error of a variable whose name is not near that of any setting.
func unknownVariable(name string) string {
	return name + ": unknown variable; a variable is WARMROUTE_ followed by the path of a setting, as in WARMROUTE_ROUTING_POLICY"
}

func TestFlags(t *testing.T) {
	c := mustLoad(t, "", "--listen", ":1", "--admin", "", "--policy", "random", "--log-level", "warn", "http://a:8000")
	got := []string{c.Listen, c.Admin, c.Routing.Policy, c.Log.Level}
	if want := []string{":1", "", "random", "warn"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestFlagUsageShowsDefaults(t *testing.T) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	testLoader.AddFlags(flags)
	c := mustLoad(t, "", "http://a:8000")
	for flag, path := range flagSettings() {
		if want := fmt.Sprintf("(default %v)", valueAt(c, path)); !strings.HasSuffix(flags.Lookup(flag).Usage, want) {
			t.Errorf("--%s: %q does not end with %q", flag, flags.Lookup(flag).Usage, want)
		}
	}
}

func TestPartialSections(t *testing.T) {
	c := mustLoad(t, "poll:\n  interval: 3s\nhealth:\n  # interval: 1s\nbackends: [\"http://a:8000\"]\n")
	if c.Poll.Interval != 3*time.Second || c.Poll.Timeout != 800*time.Millisecond || c.Health.Interval != 5*time.Second {
		t.Errorf("got %+v %+v", c.Poll, c.Health)
	}
}

func TestBackendSources(t *testing.T) {
	list := "backends:\n  - {name: big, url: http://a:8000, api_key: k, max_in_flight: 9, weight: 1.5, device: gpu0, role: decode, " +
		"engine_priority: true, kv_events: off}\n  - {url: http://b:8000/vllm/, kv_events: \"tcp://*:5557\", kv_replay: \"tcp://*:5558\"}\n  " +
		"- http://c:8000\n"
	a, b, c := Backend{Name: "big", URL: "http://a:8000", DNS: "auto", APIKey: "k", MaxInFlight: 9, Weight: 1.5, Device: "gpu0",
		Role: "decode", EnginePriority: true, KVEvents: "off", Ranks: "auto"}, Backend{Name: "b:8000/vllm", URL: "http://b:8000/vllm/",
		DNS: "auto", Weight: 1, Role: "both", KVEvents: "tcp://*:5557", KVReplay: "tcp://*:5558", Ranks: "auto"},
		Backend{Name: "c:8000", URL: "http://c:8000", DNS: "auto", Weight: 1, Role: "both", KVEvents: "auto", Ranks: "auto"}
	f := func(yaml string, args []string, want ...Backend) {
		t.Helper()
		if got := mustLoad(t, yaml, args...).Backends; !slices.Equal(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	f(list, nil, a, b, c)
	f("", []string{"http://c:8000"}, c)
	t.Setenv("WARMROUTE_BACKENDS", "http://b:8000/vllm/, http://c:8000,")
	b.KVEvents, b.KVReplay = "auto", ""
	f("", nil, b, c)
	f(list, nil, b, c)
	f("", []string{"http://c:8000"}, c)
}

func TestNoImplicitFile(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, name := range []string{"config.yaml", "warmroute.yaml"} {
		if err := os.WriteFile(name, []byte("listen: :1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := mustLoad(t, "", "http://a:8000").Listen; got != ":8080" {
		t.Errorf("listen is %s: a file was read", got)
	}
}

func TestServiceVariablesIgnored(t *testing.T) {
	for _, name := range []string{
		"WARMROUTE_SERVICE_HOST", "WARMROUTE_SERVICE_PORT", "WARMROUTE_SERVICE_PORT_HTTP", "WARMROUTE_PORT",
		"WARMROUTE_PORT_8080_TCP", "WARMROUTE_PORT_8080_TCP_PROTO", "WARMROUTE_PORT_8080_TCP_ADDR",
		"WARMROUTE_ADMIN_PORT_9090_TCP_PORT", "WARMROUTER_X",
	} {
		t.Setenv(name, "tcp://10.0.0.1:8080")
	}
	mustLoad(t, "", "http://a:8000")
}

func TestPublicURL(t *testing.T) {
	f := func(want, listen string, tls ListenerTLS) {
		t.Helper()
		if got := (&Config{Listeners: Listeners{Listen: listen, TLS: tls}}).PublicURL(); got != want {
			t.Errorf("%s: %s, want %s", listen, got, want)
		}
	}
	f("http://127.0.0.1:8080", ":8080", ListenerTLS{})
	f("http://127.0.0.1:80", "0.0.0.0:80", ListenerTLS{})
	f("http://127.0.0.1:9000", "[::]:9000", ListenerTLS{})
	f("http://[::1]:9000", "[::1]:9000", ListenerTLS{})
	f("http://10.0.0.5:8080", "10.0.0.5:8080", ListenerTLS{})
	f("https://127.0.0.1:8443", ":8443", ListenerTLS{CertFile: "cert.pem"})
}

func TestFileVariable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "named.yaml")
	if err := os.WriteFile(file, []byte("backends: [\"http://a:8000\"]\nlisten: :1234"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(FileVariable, file)
	if c := mustLoad(t, ""); c.Listen != ":1234" {
		t.Errorf("listen is %s", c.Listen)
	}
	if c := mustLoad(t, "backends: [\"http://a:8000\"]"); c.Listen != ":8080" {
		t.Errorf("--config does not override it: listen is %s", c.Listen)
	}
}

// FuzzConfig asserts that loading any file returns a valid configuration or
// errors of one line each.
func FuzzConfig(f *testing.F) {
	f.Add(defaults)
	for _, seed := range []string{
		"", "listen", "- a", "listen: [", "\x00", "poll: {interval: 5}\nbackends: [http://a:1, null, {url: 7}]",
		"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nbackends: [*c,*c,*c,*c]",
		"? {a: b}\n: c", "1: 2\n? [a]\n: {b: c}", "<<: {listen: \":1\"}", "limits: {body_bytes: 1e400}", "a: &a {b: *a}",
		"\"routing.policy\": prefix", "Listen: \":1\"", "poll:\n  interval: 2001-01-01", "listen: !!binary aGk=", "---\na: 1\n---\nb: 2",
	} {
		f.Add([]byte(seed))
	}
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	testLoader.AddFlags(flags)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := testLoader.parse("fuzz.yaml", data, flags, nil)
		var listed Errors
		if err != nil {
			if !errors.As(err, &listed) || len(listed) == 0 {
				t.Fatalf("not a list oerrs errorList: %v", err)
			}
			if strings.Count(err.Error(), "\n") != len(listed)-1 {
				t.Fatalf("an error spans several lines: %q", err)
			}
			return
		}
		again := errorList{}
		if c.validate(&again, testLoader.Policies); again.err() != nil || len(c.Backends) == 0 {
			t.Fatalf("accepted %+v: %v", c, again.err())
		}
	})
}
