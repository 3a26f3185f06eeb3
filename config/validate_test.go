package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// loadErrors returns the error lines of loading test.yaml with that content, in
// a directory of its own. An empty yaml is no file.
func loadErrors(t *testing.T, yaml string, args ...string) string {
	t.Helper()
	if yaml != "" {
		t.Chdir(t.TempDir())
		if err := os.WriteFile("test.yaml", []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", "test.yaml")
	}
	if _, err := load(t, "", args...); err != nil {
		return err.Error()
	}
	return ""
}

func TestValidationErrors(t *testing.T) {
	const backend = "backends: [\"http://a:8000\"]\n"
	for _, c := range []struct{ name, yaml, want string }{
		{"misspelled setting", backend + "poll: {timout: 1s}", "poll.timout: unknown setting; did you mean poll.timeout?"},
		{"unknown setting with a dash", backend + "timeouts: {first-byte: 1s}",
			"timeouts.first-byte: unknown setting; did you mean timeouts.first_byte?"},
		{"renamed setting", backend + "routing: {queue: {time: 5s}}", "routing.queue.time: was renamed; use routing.queue.none_ready_timeout"},
		{"renamed setting beside its default", backend + "timeouts: {drain: 1s}", "timeouts.drain: was renamed; use timeouts.serve_after_term"},
		{"renamed list that is a mapping", backend + "wake: {model: m, url: http://a/b}", "wake: was renamed; use start_hooks"},
		{"renamed setting in another case", backend + "timeouts: {Drain: 1s}", "timeouts.Drain: was renamed; use timeouts.serve_after_term"},
		{"renamed section", backend + "record: {file: f}", "record: was renamed; use recording"},
		{"renamed list", backend + "wake: [{model: m, url: http://a/b}]", "wake: was renamed; use start_hooks"},
		{"unknown setting outside its section", backend + "policy: prefix", "policy: unknown setting; did you mean routing.policy?"},
		{"unknown setting", backend + "telemetry: {endpoint: x}", "telemetry.endpoint: unknown setting; config.yaml lists all settings"},
		{"upper case", backend + "Listen: \":1\"", "Listen: unknown setting; did you mean listen?"},
		{"section and setting in one key", backend + "routing.policy: random",
			`routing.policy: write it in 2 lines, "routing:" and below it, indented, "policy:"`},
		{"two sections and a setting in one key", backend + "routing: {queue.none_ready_timeout: 1s}",
			`routing.queue.none_ready_timeout: write it in 3 lines, "routing:" and below it, indented, "queue:" and below it, indented, ` +
				`"none_ready_timeout:"`},
		{"value for a section", backend + "log: debug", "log: is a section; it contains log.format, log.level"},
		{"section for a value", backend + "listen: {port: 1}", "listen: expected a string, got a mapping; put it in quotes"},
		{"no value", backend + "listen:", "listen: has no value; give it one or delete the line"},
		{"duration without unit", backend + "poll: {interval: 5}", "poll.interval: 5 has no unit; write a duration such as 250ms, 5s or 1m30s"},
		{"invalid duration", backend + "poll: {interval: soon}", `poll.interval: "soon" is not a duration such as 250ms, 2s or 1m30s`},
		{"duration as a list", backend + "poll: {interval: [1s]}", "poll.interval: expected a duration such as 250ms, 2s or 1m30s, got a list"},
		{"negative duration", backend + "timeouts: {idle: -1s}", "timeouts.idle: -1s is too short; the minimum is 0s"},
		{"zero timeout", backend + "health: {timeout: 0}", "health.timeout: 0s is too short; the minimum is 1ms"},
		{"size with an ambiguous unit", backend + "limits: {body_bytes: 64M}",
			`limits.body_bytes: "64M" has the unknown unit "M"; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB`},
		{"size as a fraction", backend + "limits: {body_bytes: 1.5}", "limits.body_bytes: expected a size such as 64MiB, got a decimal number"},
		{"negative size", backend + "index: {max_bytes: -1}", "index.max_bytes: -1B is too small; the minimum is 1MiB"},
		{"fraction for an integer", backend + "routing: {attempts: 2.5}", "routing.attempts: expected an integer, got a decimal number"},
		{"number out of range", backend + "routing: {attempts: 18446744073709551615}",
			"routing.attempts: expected an integer, got a number that is out of range"},
		{"string for an integer", backend + "routing: {attempts: three}", `routing.attempts: "three" is not an integer`},
		{"share above 1", backend + "retry: {share: 1.5}", "retry.share: 1.5 is too large; the maximum is 1"},
		{"zero breaker time", backend + "breaker: {open_time: 0s}",
			"breaker.open_time: 0s is too short; the minimum is 10ms; to disable the breaker, set breaker.failures to 0"},
		{"access log in an unknown format", backend + "access_log: {format: jsn}", `access_log.format: unknown format "jsn"; did you mean json?`},
		{"unknown mode of redis", backend + "redis: {mode: sentinels}", `redis.mode: unknown mode "sentinels"; did you mean sentinel?`},
		{"URL of something else", backend + "redis: {url: \"http://redis\"}",
			"redis.url: invalid URL scheme \"http\"; expected a URL such as redis://host:6379, or rediss:// for TLS"},
		{"invalid URL of redis", backend + "redis: {url: \"redis://:hidden%@redis\"}",
			"redis.url: is not a valid URL; expected one such as redis://host:6379, or rediss:// for TLS"},
		{"no such secret file", backend + "redis: {secret_file: /none}", "redis.secret_file: stat /none: no such file or directory"},
		{"little memory in redis", backend + "redis: {max_bytes: 1KiB}", "redis.max_bytes: 1KiB is too small; the minimum is 1MiB"},
		{"no such password file", backend + "redis: {password_file: /none}", "redis.password_file: stat /none: no such file or directory"},
		{"sample above 1", backend + "access_log: {sample: 2}", "access_log.sample: 2 is too large; the maximum is 1"},
		{"access log in a missing directory", backend + "access_log: {file: absent/log}",
			"access_log.file: absent/log: directory absent does not exist; create it, writable by the user that runs warmroute"},
		{"access log below a file", backend + "access_log: {file: test.yaml/log}", "access_log.file: stat test.yaml/log: not a directory"},
		{"access log is a directory", backend + "access_log: {file: .}", "access_log.file: . is a directory, expected a file"},
		{"recording in a missing directory", backend + "recording: {file: absent/traffic}",
			"recording.file: absent/traffic: directory absent does not exist; create it, writable by the user that runs warmroute"},
		{"snapshot in a missing directory", backend + "index: {snapshot: absent/index}",
			"index.snapshot: absent/index: directory absent does not exist; create it, writable by the user that runs warmroute"},
		{"snapshot is a directory", backend + "index: {snapshot: .}", "index.snapshot: . is a directory, expected a file"},
		{"snapshot over another file", backend + "index: {snapshot: test.yaml}",
			"index.snapshot: test.yaml is not a warmroute snapshot; name another file"},
		{"access log over the recording", backend + "access_log: {file: a}\nrecording: {file: ./a}",
			"access_log.file: a is also recording.file; use another file for one of the two"},
		{"number too small", backend + "routing: {attempts: 0}", "routing.attempts: 0 is too small; the minimum is 1"},
		{"number too large", backend + "index: {block_bytes: 8192}", "index.block_bytes: 8192 is too large; the maximum is 4096"},
		{"eviction target above the threshold", backend + "routing: {policy: ray, eviction_threshold: 400000, eviction_target: 400001}",
			"routing.eviction_target: 400001 exceeds routing.eviction_threshold 400000: lower it or raise the threshold"},
		{"eviction interval too short", backend + "routing: {eviction_interval: 10ms}",
			"routing.eviction_interval: 10ms is too short; the minimum is 1s"},
		{"string for a number", backend + "routing: {load_factor: much}", `routing.load_factor: "much" is not a number`},
		{"boolean for a number", backend + "routing: {load_factor: true}", "routing.load_factor: expected a number, got a boolean"},
		{"NaN", backend + "routing: {load_factor: .nan}", "routing.load_factor: NaN is too small; the minimum is 1"},
		{"match ratio above 1", backend + "routing: {match_ratio: 30}", "routing.match_ratio: 30 is too large; the maximum is 1"},
		{"negative match", backend + "routing: {match_tokens: -1}", "routing.match_tokens: -1 is too small; the minimum is 0"},
		{"fraction of a token", backend + "routing: {match_tokens: 0.5}", "routing.match_tokens: expected an integer, got a decimal number"},
		{"imbalance ratio below 1", backend + "routing: {imbalance_ratio: 0.5}", "routing.imbalance_ratio: 0.5 is too small; the minimum is 1"},
		{"negative imbalance", backend + "routing: {imbalance_abs: -1}", "routing.imbalance_abs: -1 is too small; the minimum is 0"},
		{"small recording", backend + "recording: {max_bytes: 1KB}", "recording.max_bytes: 1KB is too small; the minimum is 1MiB"},
		{"negative number of files", backend + "recording: {keep: -1}", "recording.keep: -1 is too small; the minimum is 0"},
		{"negative queue", backend + "routing: {queue: {requests: -1}}", "routing.queue.requests: -1 is too small; the minimum is 0"},
		{"no memory for low-priority requests", backend + "routing: {queue: {low_priority_bytes: 0}}",
			"routing.queue.low_priority_bytes: 0B is too small; the minimum is 1KiB"},
		{"negative low-priority queue", backend + "routing: {queue: {low_priority_requests: -1}}",
			"routing.queue.low_priority_requests: -1 is too small; the minimum is 0"},
		{"negative slowdown", backend + "routing: {low_priority_slowdown: -0.1}",
			"routing.low_priority_slowdown: -0.1 is too small; the minimum is 0"},
		{"slowdown too large", backend + "routing: {low_priority_slowdown: 11}",
			"routing.low_priority_slowdown: 11 is too large; the maximum is 10"},
		{"zero queue time", backend + "routing: {queue: {none_ready_timeout: 0}}",
			"routing.queue.none_ready_timeout: 0s is too short; the minimum is 1ms; to disable the queue, set routing.queue.requests to 0"},
		{"no time in the queue beside work", backend + "routing: {queue: {busy_timeout: 0}}",
			"routing.queue.busy_timeout: 0s is too short; the minimum is 1ms; to disable the queue, set routing.queue.requests to 0"},
		{"no memory for the queue", backend + "routing: {queue: {bytes: 0}}", "routing.queue.bytes: 0B is too small; the minimum is 1KiB"},
		{"all origins and one", backend + "cors: {origins: [\"*\", https://a.example]}",
			`cors.origins[0]: "*" allows all origins; remove it or the others`},
		{"origin without a scheme", backend + "cors: {origins: a.example}",
			`cors.origins[0]: "a.example" is not an origin; write scheme://host or scheme://host:port, as in https://chat.example.com, or "*" ` +
				`alone for all`},
		{"pattern of origins", backend + "cors: {origins: [\"https://*.example\"]}",
			`cors.origins[0]: "https://*.example" is not an origin; write scheme://host or scheme://host:port, as in https://chat.example.com, ` +
				`or "*" alone for all`},
		{"origin null", backend + "cors: {origins: [\"null\"]}",
			`cors.origins[0]: "null" is not an origin; write scheme://host or scheme://host:port, as in https://chat.example.com, or "*" ` +
				`alone for all`},
		{"origin with a path", backend + "cors: {origins: [https://a.example/]}",
			`cors.origins[0]: "https://a.example/" has more than an origin; write https://a.example`},
		{"origin with a user", backend + "cors: {origins: [https://me@a.example]}",
			`cors.origins[0]: "https://me@a.example" has more than an origin; write https://a.example`},
		{"origin with the default port", backend + "cors: {origins: [https://a.example:443]}",
			`cors.origins[0]: "https://a.example:443" names the default port, which browsers leave out; write https://a.example`},
		{"extra path of the proxy's own", backend + "extra_paths: [/skyrl/v1/generate, /v1/completions]",
			"extra_paths[1]: /v1/completions is served already; remove it"},
		{"extra path with a wildcard", backend + "extra_paths: [/a/*]", `extra_paths[0]: "/a/*" is not a plain absolute path; ` +
			"write one as /skyrl/v1/generate, without wildcards, escapes, a query or a slash at its end"},
		{"extra path of operators", backend + "extra_paths: [/v1/pause]",
			"extra_paths[0]: /v1/pause is for the operator of a replica, and clients must not reach it; use the admin listener"},
		{"extra path given twice", backend + "extra_paths: [/a, /a]", "extra_paths[1]: /a is already extra_paths[0]; remove one of the two"},
		{"too many extra paths", backend + "extra_paths: [" + strings.Repeat("/a, ", 16) + "/a]",
			"extra_paths: 17 paths are too many; the maximum is 16"},
		{"pattern without a wildcard", backend + "models: {patterns: {sql: base}}", `models.patterns: "sql" needs exactly one *, as in sql-*`},
		{"pattern of all models", backend + "models: {patterns: {\"*\": base}}",
			`models.patterns: "*" would match every unknown model; name a part that all adapters share`},
		{"pattern without a base", backend + "models: {patterns: {\"a-*\": \"\"}}",
			`models.patterns: "a-*" has no base model; name the one whose replicas load such adapters`},
		{"patterns that are a list", backend + "models: {patterns: [a]}", "models.patterns: expected a mapping, got a list"},
		{"start hook without a model", backend + "start_hooks: [{url: http://a/b}]", "start_hooks[0].model: is missing; name the model"},
		{"start hook given twice", backend + "start_hooks: [{model: m, url: http://a/b}, {model: m, url: http://a/c}]",
			"start_hooks[1].model: m is already start_hooks[0]; remove one of the two"},
		{"start hook by a command", backend + "start_hooks: [{model: m, url: /bin/start}]",
			"start_hooks[0].url: is not a URL such as http://scaler:8000/start"},
		{"start hook with a short timeout", backend + "start_hooks: [{model: m, url: http://a/b, timeout: 1ms}]",
			"start_hooks[0].timeout: 1ms is too short; the minimum is 1s"},
		{"start hook with an unknown key", backend + "start_hooks: [{model: m, command: x}]",
			"start_hooks[0]: unknown key \"command\"; a start hook has model, url, timeout"},
		{"header with a colon", backend + "routing: {conversation_headers: [X-Chat, \"X-Session:\"]}",
			`routing.conversation_headers[1]: "X-Session:" is not the name of a header; use letters, digits, - and _`},
		{"header without a name", backend + "routing: {conversation_headers: [\"\"]}",
			`routing.conversation_headers[0]: "" is not the name of a header; use letters, digits, - and _`},
		{"header given twice", backend + "routing: {conversation_headers: [X-Chat, x-chat]}",
			"routing.conversation_headers[1]: X-Chat is already routing.conversation_headers[0]; remove one of the two"},
		{"too many headers", backend + "routing: {conversation_headers: [" + strings.Repeat("a, ", 32) + "a]}",
			"routing.conversation_headers: 33 names are too many; the maximum is 32"},
		{"user header with a space", backend + "user_headers: [X User]",
			`user_headers[0]: "X User" is not the name of a header; use letters, digits, - and _`},
		{"number for a list", backend + "routing: {conversation_headers: 1}",
			"routing.conversation_headers: expected a list such as [a, b], got a number"},
		{"name of a trusted proxy", backend + "trusted_proxies: [lb.internal]",
			`trusted_proxies[0]: "lb.internal" is not a network such as 10.0.0.0/8 or an address`},
		{"IPv4 in IPv6", backend + "trusted_proxies: [10.0.0.0/8, \"::ffff:10.0.0.1\"]",
			"trusted_proxies[1]: ::ffff:10.0.0.1 is an IPv4 address in IPv6; write it as IPv4"},
		{"all proxies trusted", backend + "trusted_proxies: [0.0.0.0/0]",
			"trusted_proxies[0]: 0.0.0.0/0 lets every client state its address; name the networks of the load balancers"},
		{"number for a network", backend + "trusted_proxies: [10]",
			"trusted_proxies[0]: expected a network such as 10.0.0.0/8 or an address, got a number"},
		{"too many trusted proxies", backend + "trusted_proxies: [" + strings.Repeat("10.0.0.1, ", 64) + "10.0.0.1]",
			"trusted_proxies: 65 networks are too many; the maximum is 64"},
		{"negative SLO", backend + "slo: {ttft: -1s}", "slo.ttft: -1s is too short; the minimum is 0s"},
		{"number for a boolean", backend + "response_headers: 1", "response_headers: expected true or false, got a number"},
		{"string for a boolean", backend + "response_headers: maybe", `response_headers: "maybe" is not true or false`},
		{"number for a string", backend + "listen: 8080", "listen: expected a string, got a number; put it in quotes"},
		{
			"policy by another router's name", backend + "routing: {policy: cache_aware}",
			`routing.policy: unknown policy "cache_aware"; what other routers call so is cache-threshold or smg here; the default, prefix, is ` +
				`warmroute's own`,
		},
		{"misspelled policy", backend + "routing: {policy: least_load}", `routing.policy: unknown policy "least_load"; did you mean least-load?`},
		{"unknown format", backend + "log: {format: logfmt}", `log.format: unknown format "logfmt"; choose one of text, json`},
		{"empty listen", backend + "listen: \"\"", "listen: is empty; set an address such as :8080"},
		{"address without port", backend + "listen: localhost", `listen: "localhost" is not an address such as :8080 or 127.0.0.1:8080`},
		{"port out of range", backend + "admin: \":70000\"", `admin: ":70000" has no port between 0 and 65535`},
		{"listeners on one port", backend + "listen: \"[::]:9090\"",
			"admin: 127.0.0.1:9090 conflicts with listen [::]:9090; use another port for one of the two"},
		{"poll timeout above interval", backend + "poll: {timeout: 2s}",
			"poll.timeout: 2s exceeds poll.interval 1s, so polls would overlap; lower it"},
		{"fast interval above interval", backend + "poll: {fast_interval: 2s}",
			"poll.fast_interval: 2s exceeds poll.interval 1s, so busy replicas would be polled less often than idle ones; lower it"},
		{"down interval above interval", backend + "health: {down_interval: 6s}",
			"health.down_interval: 6s exceeds health.interval 5s, so a restarted replica would be detected late; lower it"},
		{"body limit above total", backend + "limits: {body_bytes: 2GiB}",
			"limits.body_bytes: 2GiB exceeds limits.body_bytes_total 1GiB, so such a body could never be accepted; raise the total or lower this"},
		{"same file for two settings", backend + "recording: {file: ./kept}\nindex: {snapshot: kept}",
			"recording.file: ./kept is also index.snapshot; use another file for one of the two"},
		{"no backends", "listen: \":1\"", "backends: the list is empty; name at least one vLLM server, as in serve http://127.0.0.1:8000, or " +
			"list backends in the file; it may be empty with backends_file, state_file or registration"},
		{"misspelled list of backends", "backend: [\"http://a:8000\"]", "backend: unknown setting; did you mean backends?"},
		{"misspelled list with one backend", "backend: {url: \"http://a:8000\", name: a}", "backend: unknown setting; did you mean backends?"},
		{"misspelled file of backends", "backend_file: b.yaml", "backend_file: unknown setting; did you mean backends_file?"},
		{"misspelled state file", "statefile: s.json", "statefile: unknown setting; did you mean state_file?"},
		{"misspelled section that allows no backends", "registration: {listner: public}",
			"registration.listner: unknown setting; did you mean registration.listener?"},
		{"invalid setting that allows no backends", "state_file: 5", "state_file: expected a string, got a number; put it in quotes"},
		{"misspelled section", backend + "timeout: {first_byte: 1s, conect: 1s}",
			"timeout.conect: unknown setting; did you mean timeouts.connect?\n" +
				"timeout.first_byte: unknown setting; did you mean timeouts.first_byte?"},
		{"number for engine_priority", "backends: [{url: \"http://a\", engine_priority: 1}]",
			"backends[0].engine_priority: expected true or false, got a number"},
		{"negative limit of a backend", "backends: [{url: \"http://a\", max_in_flight: -1}]",
			"backends[0].max_in_flight: -1 is too small; the minimum is 0"},
		{"KV events without a port", "backends: [{url: \"http://a\", kv_events: \"tcp://a\"}]",
			`backends[0].kv_events: endpoint "tcp://a": no port: want tcp://HOST:PORT; use auto, listen, off, ` +
				"or an address such as tcp://10.0.0.5:5557"},
		{"KV events over a file", "backends: [{url: \"http://a\", kv_events: \"ipc:///tmp/x\"}]",
			`backends[0].kv_events: endpoint "ipc:///tmp/x": ipc reaches processes of the replica's own machine only: start vLLM with a tcp ` +
				`endpoint, such as tcp://*:5557; use auto, listen, off, or an address such as tcp://10.0.0.5:5557`},
		{"KV events that are awaited nowhere", "backends: [{url: \"http://a\", kv_events: listen, kv_replay: \"tcp://*:5558\"}]",
			"backends[0].kv_events: is listen, but the proxy listens nowhere: set kv_events.listen, such as tcp://10.0.0.2:5557"},
		{"replay of awaited KV events without a port", "kv_events: {listen: \"tcp://*:5557\"}\n" +
			"backends: [{url: \"http://a\", kv_events: listen, kv_replay: \"tcp://a\"}]", `backends[0].kv_replay: endpoint "tcp://a": no port: ` +
			`want tcp://HOST:PORT; use auto, listen, off, or an address such as tcp://10.0.0.5:5557`},
		{"KV event listener without a scheme", "kv_events: {listen: \":5557\"}\nbackends: [\"http://a\"]",
			"kv_events.listen: not of the form tcp://HOST:PORT; use an address such as tcp://10.0.0.2:5557, or tcp://*:5557 for all interfaces"},
		{"too many ports for KV events", "kv_events: {listen: \"tcp://*:65535\", ports: 2}\nbackends: [\"http://a\"]",
			"kv_events.listen: the last of 2 ports from 65535 on exceeds 65535; use an address such as tcp://10.0.0.2:5557, or tcp://*:5557 " +
				"for all interfaces"},
		{"replay of KV events alone", "backends: [{url: \"http://a\", kv_replay: \"tcp://a:5558\"}]",
			"backends[0].kv_replay: has no effect with kv_events: auto; " +
				"set kv_events to the replica's endpoint as well, such as tcp://10.0.0.5:5557"},
		{"zero weight", "backends: [{url: \"http://a\", weight: 0}]", "backends[0].weight: 0 is too small; the minimum is 0.01"},
		{"invalid weight", "backends: [{url: \"http://a\", weight: heavy}]", `backends[0].weight: "heavy" is not a number`},
		{"backends as a mapping", "backends: {a: {url: \"http://a:8000\"}}",
			`backends: expected a list, got a mapping; begin each backend with "- url:"`},
		{"backend without URL", "backends: [{name: a}]", "backends[0].url: is missing; set a URL such as http://10.0.0.5:8000"},
		{"null backend", "backends: [null]", "backends[0].url: is missing; set a URL such as http://10.0.0.5:8000"},
		{"backend as a number", "backends: [8000]", "backends[0]: expected a mapping with url, name and so on, or just a URL, got a number"},
		{"backend with a misspelled key", "backends: [{ulr: x}]", `backends[0]: unknown key "ulr"; did you mean url?`},
		{"URL without scheme", "backends: [\"a:8000\"]",
			`backends[0].url: backend URL "a:8000": no scheme; write http://HOST:PORT or https://HOST:PORT`},
		{"URL with another scheme", "backends: [\"ftp://a\"]", `backends[0].url: backend URL "ftp://a": the scheme must be http or https`},
		{"URL with a password", "backends: [\"http://u:hidden@a\"]",
			`backends[0].url: backend URL "http://***@a": user and password are not supported; set api_key instead`},
		{"URL with a query", "backends: [\"http://a?x=1\"]", `backends[0].url: backend URL "http://a?***": remove the query`},
		{"duplicate URL", "backends: [\"http://a\", {name: b, url: \"http://A:80/\"}]",
			"backends[1].url: http://a:80 is already backends[0]; remove one of the two"},
		{"duplicate name", "backends: [{name: x, url: \"http://a\"}, {name: x, url: \"http://b\"}]",
			"backends[1].name: x is already the name of backends[0]; rename one of the two"},
		{"invalid device", "backends: [{device: \"gpu 0\", url: \"http://a\"}]",
			`backends[0].device: "gpu 0" is not a valid name: use letters, digits and ._:-, at most 200 of them`},
		{"number as device", "backends: [{device: 0, url: \"http://a\"}]",
			"backends[0].device: expected a string, got a number; put it in quotes"},
		{"unknown role", "backends: [{role: Decode, url: \"http://a\"}]", `backends[0].role: unknown role "Decode"; did you mean decode?`},
		{"unknown fallback", backend + "disaggregation: {fallback: none}",
			`disaggregation.fallback: unknown fallback "none"; choose one of plain, queue`},
		{"short lease", backend + "disaggregation: {kv_lease: 900ms}", "disaggregation.kv_lease: 900ms is too short; the minimum is 1s"},
		{"long lease", backend + "disaggregation: {kv_lease: 11m}", "disaggregation.kv_lease: 11m0s is too long; the maximum is 10m0s"},
		{"negative number of tokens", backend + "disaggregation: {min_uncached_tokens: -1}",
			"disaggregation.min_uncached_tokens: -1 is too small; the minimum is 0"},
		{"invalid name", "backends: [{name: \"ä b\", url: \"http://a\"}]",
			`backends[0].name: "ä b" is not a valid name; it is used in headers and labels: use letters, digits and ._:-`},
		{"API key with a line break", "backends: [{api_key: \"hidden\\n\", url: \"http://a\"}]",
			"backends[0].api_key: contains characters that are not allowed in a header; does it end with a line break?"},
		{"API key as a number", "backends: [{api_key: 1234, url: \"http://a\"}]",
			"backends[0].api_key: expected a string, got a number; put it in quotes"},
		{"lookup of an address", "backends: [\"dns://10.0.0.5:8000\"]",
			`backends[0].url: backend URL "dns://10.0.0.5:8000": an address needs no lookup; write http://10.0.0.5:PORT`},
		{"lookup with a path", "backends: [\"dns://vllm:8000/a\"]",
			`backends[0].url: backend URL "dns://vllm:8000/a": remove the path; write dns://HOST:PORT, or dns://SERVICE for SRV records`},
		{"lookups off and on", "backends: [{url: \"dns://vllm:8000\", dns: off}]",
			`backends[0].url: backend URL "dns://vllm:8000" contradicts dns: off; write http://HOST:PORT for the load balancer`},
		{"lookups neither off nor on", "backends: [{url: \"http://a\", dns: never}]",
			`backends[0].dns: unknown dns "never"; choose one of auto, off`},
		{"CA for dns://", "backends: [{url: \"dns://a\", ca_file: ca.pem}]",
			"backends[0].ca_file: has no effect on dns://a; use https:// or remove it"},
		{"duplicate name to look up", "backends: [\"http://a:8000\", {name: b, url: \"DNS://A:8000\"}]",
			"backends[1].url: http://a:8000 is already backends[0]; remove one of the two"},
		{"DNS server without a port", backend + "dns: {server: 10.0.0.53}", `dns.server: "10.0.0.53" is not an address such as 10.0.0.53:53`},
		{"DNS server without a host", backend + "dns: {server: \":53\"}", `dns.server: ":53" is not an address such as 10.0.0.53:53`},
		{"lookups all the time", backend + "dns: {interval: 0}", "dns.interval: 0s is too short; the minimum is 50ms"},
		{"CA for plain HTTP", "backends: [{url: \"http://a\", ca_file: ca.pem}]",
			"backends[0].ca_file: has no effect on http://a; use https:// or remove it"},
		{"server name for plain HTTP", "backends: [{url: \"http://a\", server_name: b}]",
			"backends[0].server_name: has no effect on http://a; use https:// or remove it"},
		{"server name that is a URL", "backends: [{url: \"https://a\", server_name: \"https://b\"}]",
			`backends[0].server_name: "https://b" is not a host name; use the one in the replica's certificate, without scheme and port`},
		{"missing CA file", "backends: [{url: \"https://a\", ca_file: absent.pem}]",
			"backends[0].ca_file: stat absent.pem: no such file or directory"},
		{"CA file is a directory", "backends: [{url: \"https://a\", ca_file: .}]", "backends[0].ca_file: . is not a regular file"},
		{"CA file without a certificate", "backends: [{url: \"https://a\", ca_file: test.yaml}]",
			"backends[0].ca_file: test.yaml contains no certificate; expected PEM, beginning with -----BEGIN CERTIFICATE-----"},
		{"invalid YAML", backend + "listen: [\n",
			"test.yaml: line 3: a value is missing, or a list in brackets or a mapping in braces that begins before does not end"},
		{"duplicate key", "listen: \":1\"\nlisten: \":2\"", `test.yaml: line 2: mapping key "listen" already defined at line 1`},
		{"not a mapping", "- listen", `test.yaml: line 1: expected settings, such as "listen: :8080"`},
		{"string for a mapping", "sk-of-somebody", `test.yaml: line 1: expected settings, such as "listen: :8080"`},
		{"missing colon", backend + "log\npoll: {interval: 1s}", `test.yaml: line 2: has no ":" after the name of the setting`},
		{"missing colon before a section", backend + "\nlog\n  level: debug",
			`test.yaml: line 4: has an unexpected ":"; put a value that contains ": " in quotes, and check the indentation and that the line ` +
				`before it ends as intended`},
		{"unterminated list", backend + "routing:\n  conversation_headers: [a, b\nlog: x",
			"test.yaml: line 3: a list in brackets begins that does not end; add the ] or the , that is missing"},
		{"unterminated mapping", backend + "log: {level: debug\nlisten: x",
			"test.yaml: line 2: a mapping in braces begins that does not end; add the } or the , that is missing"},
		{"unterminated quote", backend + "log:\n  level: \"debug\n  format: text\n",
			"test.yaml: line 3: a quoted value begins that does not end; add the closing quote"},
		{"unterminated quote before another", backend + "log:\n  level: \"debug\n  format: \"text\"\n",
			"test.yaml: line 4: does not continue the section or list above it; check the indentation and the quotes"},
		{"error in the first line", "listen: @x", "test.yaml: line 1: a value cannot begin with '@'; put it in quotes"},
		{"tab", backend + "log:\n\tlevel: debug", "test.yaml: line 3: is indented with a tab; use spaces"},
		{"tab after spaces", backend + "log:\n  format: text\n  \tlevel: debug", "test.yaml: line 4: is indented with a tab; use spaces"},
		{"tab after a value", backend + "log:\n  format: text\n\tlevel: debug", "test.yaml: line 4: is indented with a tab; use spaces"},
		{"tab in the first line", "\tlisten: x", "test.yaml: line 1: is indented with a tab; use spaces"},
		{"less indentation", backend + "log:\n  level: debug\n format: text\nlisten: x",
			"test.yaml: line 4: does not continue the section or list above it; check the indentation and the quotes"},
		{"key without a dash", "backends:\n- url: a\n\n  name: b\n - url: c",
			"test.yaml: line 5: does not continue the section or list above it; check the indentation and the quotes"},
		{"colon in a value", backend + "listen: a: b\nlog: {}",
			`test.yaml: line 2: has an unexpected ":"; put a value that contains ": " in quotes, and check the indentation and that the line ` +
				`before it ends as intended`},
		{"control character", backend + "log:\n  level: \x01", `test.yaml: line 3: "\x01" is not allowed; write the file as UTF-8 text`},
		{"invalid UTF-8", backend + "listen: \xff", `test.yaml: line 2: "\xff" is not allowed; write the file as UTF-8 text`},
		{"alias for a setting", backend + "log:\n  level: *debug",
			"test.yaml: line 3: level: unknown anchor 'debug' referenced; put strings that begin with * in quotes"},
		{"alias for a secret", backend + "admin_token: *hidden",
			"test.yaml: line 2: admin_token: unknown anchor '***' referenced; put strings that begin with * in quotes"},
		{"alias for a replica's key", "backends:\n- {url: \"http://a\", api_key: *hidden}",
			"test.yaml: line 2: api_key: unknown anchor '***' referenced; put strings that begin with * in quotes"},
		{"alias in a list", "backends:\n- *hidden",
			"test.yaml: line 2: unknown anchor '***' referenced; put strings that begin with * in quotes"},
		{"alias of a setting and a secret", "listen: *hidden\nadmin_token: *hidden",
			"test.yaml: line 1: listen: unknown anchor '***' referenced; put strings that begin with * in quotes"},
		{"alias of itself", backend + "log: &log {level: *log}", "test.yaml: line 2: level: anchor 'log' value contains itself"},
		{"mismatched tag", backend + "listen: !!int abc", "test.yaml: line 2: listen: cannot construct !!str `abc` as a !!int"},
		{"mismatched tag on a secret", backend + "admin_token: !!int hidden",
			"test.yaml: line 2: admin_token: cannot construct !!str `***` as a !!int"},
		{"mismatched tag on a URL", backend + "redis: {url: !!int hidden}", "test.yaml: line 2: url: cannot construct !!str `***` as a !!int"},
		{"multi-line secret", backend + "admin_token: !!int \"hid\\nden\"", "test.yaml: cannot construct !!str `***` as a !!int"},
		{"multi-line string for a mapping", "hid\n\nden", `test.yaml: line 1: expected settings, such as "listen: :8080"`},
		{"unexpanded template", backend + "admin_token: {{hidden}}",
			"test.yaml: line 2: a mapping cannot be the name of a setting; put strings that contain braces in quotes"},
		{"two documents", backend + "---\nlisten: \":1\"\n", "test.yaml: line 2: a second document begins; only one is allowed"},
		{"unprintable key", backend + "\"a\\nb\": 1", `"a\nb": unknown setting; config.yaml lists all settings`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := loadErrors(t, c.yaml); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

func TestMisspelledVariableOfBackends(t *testing.T) {
	t.Setenv("WARMROUTE_BACKEND", "http://a:8000")
	if got, want := loadErrors(t, ""), "WARMROUTE_BACKEND: unknown variable; did you mean WARMROUTE_BACKENDS?"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestAllErrorsReported(t *testing.T) {
	t.Setenv("WARMROUTE_POLL_TIMEOT", "1s")
	t.Setenv("WARMROUTE_TIMEOUTS_CONNECT", "2")
	got := loadErrors(t, `
listn: ":1"
poll: {interval: 5}
routing: {policy: fastest}
backends: [{name: a, url: "http://a"}, {name: a, url: "b"}]
`, "--log-level", "loud")
	want := []string{
		"listn: unknown setting; did you mean listen?",
		"WARMROUTE_POLL_TIMEOT: unknown variable; did you mean WARMROUTE_POLL_TIMEOUT?",
		"poll.interval: 5 has no unit; write a duration such as 250ms, 5s or 1m30s",
		`timeouts.connect (from WARMROUTE_TIMEOUTS_CONNECT): "2" is not a duration such as 250ms, 2s or 1m30s`,
		`backends[1].url: backend URL "b": no scheme; write http://HOST:PORT or https://HOST:PORT`,
		`routing.policy: unknown policy "fastest"; choose one of ` + strings.Join(testLoader.Policies.Names(), ", "),
		`log.level (from --log-level): unknown level "loud"; choose one of debug, info, warn, error`,
	}
	if want := strings.Join(want, "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestArgumentAndVariableErrors(t *testing.T) {
	f := func(want string, args ...string) {
		t.Helper()
		if got := loadErrors(t, "", args...); !strings.HasPrefix(got, want) {
			t.Errorf("%q: got %q, want %q", args, got, want)
		}
	}
	f("--config missing.yaml: no such file", "--config", "missing.yaml")
	f(`backends[0].url (from the command line): backend URL "a": no scheme`, "a")

	big := filepath.Join(t.TempDir(), "model.safetensors")
	if err := os.WriteFile(big, make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	f(big+": larger than 1048576 bytes; is it the right file?", "--config", big)

	t.Setenv("WARMROUTE_FOO", "1")
	f("WARMROUTE_FOO: unknown variable; a variable is WARMROUTE_ followed by the path of a setting, as in WARMROUTE_ROUTING_POLICY",
		"http://a")
}

func TestBackendsInFileAndArguments(t *testing.T) {
	want := "backends: both test.yaml and the command line list backends; remove one of the two lists"
	if got := loadErrors(t, "backends: [\"http://a:8000\"]", "http://b:8000"); got != want {
		t.Errorf("got %q", got)
	}
}

func TestAliasBombRejected(t *testing.T) {
	bomb := "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
	for i := range 9 {
		now, before := string(rune('1'+i)), string(rune('0'+i))
		bomb += "a" + now + ": &a" + now + " [" + strings.Repeat("*a"+before+",", 10) + "]\n"
	}
	if got, want := loadErrors(t, bomb), "test.yaml: line 1: document contains excessive aliasing"; got != want {
		t.Errorf("got %.200q", got)
	}
}

func TestWarnings(t *testing.T) {
	for _, c := range []struct{ name, yaml, want string }{
		{"keep-alive above vLLM's", "timeouts: {keepalive_idle: 5s}", "timeouts.keepalive_idle: 5s is not below"},
		{"public admin listener", "admin: \":9090\"", "admin: :9090 is reachable"},
		{"SLO with another policy", "routing: {policy: smg}\nslo: {ttft: 1s}", "slo.ttft: 1s has no effect: policy smg does not use it"},
		{"SLO of a key with another policy", "routing: {policy: smg}\nkeys: [{name: a, sha256: " + strings.Repeat("a", 64) + ", slo_ttft: 1s}]",
			"keys[0].slo_ttft: 1s has no effect: policy smg does not use it"},
		{"queue time without queue", "routing: {queue: {requests: 0}}\nkeys: [{name: a, sha256: " + aHash + ", queue_time: 1h}]",
			"keys[0].queue_time: 1h0m0s has no effect"},
		{"threshold of another policy", "routing: {match_ratio: 0.3}", "routing.match_ratio: 0.3 has no effect: policy prefix does not use it"},
		{"tokens of another policy", "routing: {match_tokens: 1024}", "routing.match_tokens: 1024 has no effect: policy prefix does not use it"},
		{"eviction target without a threshold", "routing: {policy: ray, eviction_target: 1}",
			"routing.eviction_target: 1 has no effect: nothing is evicted"},
		{"eviction interval without a threshold", "routing: {policy: ray, eviction_interval: 1m}",
			"routing.eviction_interval: 1m0s has no effect: nothing is evicted"},
		{"eviction of another policy", "routing: {eviction_interval: 1m}",
			"routing.eviction_interval: 1m0s has no effect: policy prefix does not use it"},
		{"client affinity of another policy", "routing: {client_affinity: true}",
			"routing.client_affinity: true has no effect: policy prefix does not use it"},
		{"one threshold of two", "routing: {policy: ray, match_ratio: 0.3, imbalance_ratio: 2}",
			"routing.imbalance_ratio: 2 has no effect: policy ray does not use it"},
		{"queue above body limit", "routing: {queue: {bytes: 2GiB}}", "routing.queue.bytes: 2GiB exceeds limits.body_bytes_total 1GiB"},
		{"queue below body limit", "routing: {queue: {bytes: 1MiB}}", "routing.queue.bytes: 1MiB is below limits.body_bytes 64MiB"},
		{"limit without queue", "routing: {queue: {requests: 0}}\nbackends: [{name: a, url: \"http://a\", max_in_flight: 9}]",
			"backends: a has max_in_flight 9 and the admission queue is off"},
		{"fallback without queue", "routing: {queue: {requests: 0}}\ndisaggregation: {fallback: queue}",
			"disaggregation.fallback: queue has no effect"},
		{"only prefill", "backends: [{url: \"http://a\", role: prefill}, {url: \"http://b\", role: prefill}]", "backends: all have role prefill"},
		{"no prefill", "backends: [\"http://a\", {url: \"http://b\", role: decode}]",
			"backends: some have role decode and none has role prefill"},
		{"all origins without keys", "cors: {origins: \"*\"}", `cors.origins: "*" without keys: any web page`},
		{"limit above connections", "connections: {max_per_backend: 8}\nbackends: [{name: a, url: \"http://a\", max_in_flight: 9}]",
			"backends: max_in_flight 9 of a exceeds connections.max_per_backend 8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !strings.Contains(c.yaml, "backends") {
				c.yaml += "\nbackends: [\"http://a:8000\"]"
			}
			if got := mustLoad(t, c.yaml).Warnings(testLoader.Policies); len(got) != 1 || !strings.HasPrefix(got[0], c.want) {
				t.Errorf("got %q, want one line %q", got, c.want)
			}
		})
	}
}

func TestFileDescriptorWarning(t *testing.T) {
	c := mustLoad(t, "limits: {in_flight: 1000, connections: 3000}\nconnections: {max_per_backend: 400}", "http://a:8000", "http://b:8000")
	const need = 3000 + 800 + 4 + spareFileDescriptors // the two backends take 800 connections and no more
	if w := c.DescriptorWarning(need, 0); w != "" {
		t.Errorf("limit %d: %q", need, w)
	}
	if w := c.DescriptorWarning(need-1, 2); !strings.HasPrefix(w, "file descriptor limit is too low: 3904 may be needed, limit is 3903, ") {
		t.Errorf("limit %d: %q", need-1, w)
	}
	// Ten replicas, of which the names of the two stand for some and others have registered.
	if w := c.DescriptorWarning(need, 10); !strings.HasPrefix(w, "file descriptor limit is too low: 4120 may be needed, limit is 3904, ") {
		t.Errorf("ten replicas: %q", w)
	}
}

func TestValidationCreatesNoFiles(t *testing.T) {
	if got := loadErrors(t,
		"backends: [\"http://a:8000\"]\naccess_log: {file: log}\nrecording: {file: traffic}\nindex: {snapshot: index}\n"); got != "" {
		t.Error(got)
	}
	for _, name := range []string{"log", "traffic", "index", "index.lock"} {
		if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", name, err)
		}
	}
}

func TestRedisSecretLength(t *testing.T) {
	for _, c := range []struct{ secret, want string }{
		{strings.Repeat("x", 15) + "\n", "has 15 bytes, expected at least 16"},
		{strings.Repeat("x", 16) + "\n", ""},
		{" \n", "is empty; put a secret into it"},
	} {
		file := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(file, []byte(c.secret), 0o600); err != nil {
			t.Fatal(err)
		}
		got := loadErrors(t, "backends: [\"http://a:8000\"]\nredis: {url: \"redis://redis\", secret_file: "+file+"}")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%q: got %q, want an error with %q", c.secret, got, c.want)
		}
	}
}

func TestMaxClientConnections(t *testing.T) {
	for _, c := range []struct {
		yaml  string
		limit uint64
		want  int
	}{
		{"limits: {in_flight: 1000, connections: 3000}", 0, 3000},
		{"limits: {in_flight: 1000, connections: 3000}", 4102, 3000},
		{"limits: {in_flight: 1000, connections: 3000}", 4101, 2999},
		{"limits: {in_flight: 1000, connections: 3000}", 2302, 1200},
		{"limits: {in_flight: 1000, connections: 3000}", 1102, 500}, // half of those for clients and requests
		{"limits: {in_flight: 12000, connections: 16}", 1024, 16},
		{"limits: {in_flight: 20, connections: 3000}", 90, 25}, // half of all is for the rest
		{"", 64, 16},
		{"", 1, 0},
	} {
		if got := mustLoad(t, c.yaml, "http://a:8000").MaxClientConnections(c.limit, 0); got != c.want {
			t.Errorf("%s, limit %d: got %d, want %d", c.yaml, c.limit, got, c.want)
		}
	}
}
