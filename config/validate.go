package config

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"warmroute/cluster"
	"warmroute/proxy"
	"warmroute/router/policy"
	"warmroute/router/responseindex"
)

// validate adds an error for every rule that the settings break.
func (c *Config) validate(errs *errorList) {
	c.validateListeners(errs)
	c.validateTrustedProxies(errs)
	c.validateBackends(errs)
	c.validateKeys(errs)
	c.validateAdminToken(errs)
	checkOneOf(errs, "routing.policy", "policy", strings.TrimSuffix(c.Routing.Policy, policy.WithQueue), policy.Names()...)
	checkOneOf(errs, "log.level", "level", c.Log.Level, "debug", "info", "warn", "error")
	checkOneOf(errs, "log.format", "format", c.Log.Format, "text", "json")
	checkOneOf(errs, "access_log.format", "format", c.AccessLog.Format, "json", "text")
	checkRange(errs, "access_log.sample", c.AccessLog.Sample, 0, 1)
	c.validateFiles(errs)
	c.validateRouting(errs)
	c.validateRetry(errs)
	c.validateCORS(errs)
	checkRange(errs, "index.block_bytes", c.Index.BlockBytes, 64, 4096)
	checkRange(errs, "connections.max_per_backend", c.Connections.MaxPerBackend, 1, 1<<20)
	checkRange(errs, "index.max_bytes", c.Index.MaxBytes, 1<<20, 1<<50)
	checkRange(errs, "responses.max_entries", c.Responses.MaxEntries, 0, responseindex.MaxEntries)
	c.validateRedis(errs)
	checkRange(errs, "record.max_bytes", c.Record.MaxBytes, 1<<20, 1<<40)
	checkRange(errs, "record.keep", c.Record.Keep, 0, 1000)
	c.validateLimits(errs)
	c.validateDurations(errs)
}

func (c *Config) validateListeners(errs *errorList) {
	if c.Listen == "" {
		errs.add("listen", "is empty; set an address such as :8080")
	} else if err := CheckListenAddress(c.Listen); err != nil {
		errs.add("listen", "%v", err)
	}
	if c.Admin == "" {
		return
	}
	if err := CheckListenAddress(c.Admin); err != nil {
		errs.add("admin", "%v", err)
	}
	if errs.hasAny("listen", "admin") {
		return
	}
	listenHost, listenPort, _ := net.SplitHostPort(c.Listen)
	adminHost, adminPort, _ := net.SplitHostPort(c.Admin)
	sameHost := listenHost == adminHost || isWildcard(listenHost) || isWildcard(adminHost)
	if sameHost && listenPort == adminPort && adminPort != "0" {
		errs.add("admin", "%s conflicts with listen %s; use another port for one of the two", c.Admin, c.Listen)
	}
}

// maxTrustedProxies bounds the comparisons for each request.
const maxTrustedProxies = 64

func (c *Config) validateTrustedProxies(errs *errorList) {
	if len(c.TrustedProxies) > maxTrustedProxies {
		errs.add("trusted_proxies", "%d networks are too many; the maximum is %d", len(c.TrustedProxies), maxTrustedProxies)
	}
	for i, network := range c.TrustedProxies {
		if network.Bits() == 0 {
			errs.add(fmt.Sprintf("trusted_proxies[%d]", i), "%v lets every client state its address; name the networks of the load balancers", network)
		}
	}
}

func (c *Config) validateRedis(errs *errorList) {
	checkOneOf(errs, "redis.mode", "mode", c.Redis.Mode, cluster.Modes...)
	checkRange(errs, "redis.max_bytes", c.Redis.MaxBytes, 1<<20, 1<<34)
	if n := len(c.Redis.Secret); n > 0 && n < cluster.MinSecretBytes {
		errs.add("redis.secret_file", "the secret in %s has %d bytes, expected at least %d; write one with openssl rand -hex 32", c.Redis.SecretFile, n, cluster.MinSecretBytes)
	}
	if c.Redis.URL == "" || errs.hasAny("redis.mode", "redis.password_file", "redis.ca_file") {
		return
	}
	if err := cluster.CheckSettings(c.Redis); err != nil {
		errs.add("redis.url", "%v", err)
	}
}

// validateCORS validates origins as browsers send them: a page whose origin is spelled otherwise
// would be refused.
func (c *Config) validateCORS(errs *errorList) {
	for i, origin := range c.CORS.Origins {
		at := fmt.Sprintf("cors.origins[%d]", i)
		if origin == "*" {
			if len(c.CORS.Origins) > 1 {
				errs.add(at, `"*" allows all origins; remove it or the others`)
			}
			continue
		}
		u, err := url.Parse(origin)
		switch {
		case err != nil || u.Scheme == "" || u.Host == "" || u.Hostname() == "" || strings.Contains(origin, "*"):
			errs.add(at, `%q is not an origin; write scheme://host or scheme://host:port, as in https://chat.example.com, or "*" alone for all`, origin)
		case !strings.EqualFold(origin, u.Scheme+"://"+u.Host):
			errs.add(at, "%q has more than an origin; write %s://%s", origin, u.Scheme, u.Host)
		case u.Scheme == "https" && u.Port() == "443" || u.Scheme == "http" && u.Port() == "80":
			errs.add(at, "%q names the default port, which browsers leave out; write %s://%s", origin, u.Scheme, strings.TrimSuffix(u.Host, ":"+u.Port()))
		}
	}
}

func (c *Config) validateRetry(errs *errorList) {
	checkRange(errs, "retry.share", c.Retry.Share, 0, 1)
	checkRange(errs, "retry.per_second", c.Retry.PerSecond, 0, 1<<20)
	checkRange(errs, "breaker.failures", c.Breaker.Failures, 0, 1<<20)
	if c.Breaker.Failures > 0 && c.Breaker.Open < 10*time.Millisecond {
		errs.add("breaker.open", "%v is too short; the minimum is 10ms; to disable the breaker, set breaker.failures to 0", c.Breaker.Open)
	}
}

func (c *Config) validateLimits(errs *errorList) {
	l := &c.Limits
	checkRange(errs, "limits.in_flight", l.InFlight, 1, 1<<20)
	checkRange(errs, "limits.connections", l.Connections, 16, 1<<20)
	checkRange(errs, "limits.query_bytes", l.QueryBytes, 0, 1<<20)
	checkRange(errs, "limits.body_bytes", l.BodyBytes, 1<<10, 1<<40)
	checkRange(errs, "limits.body_bytes_total", l.BodyBytesTotal, 1<<10, 1<<50)
	checkOneOf(errs, "limits.kv_transfer_params", "mode", l.KVTransferParams, proxy.RefuseTransferParams, proxy.AllowTransferParams)
	checkRange(errs, "limits.header_bytes", l.HeaderBytes, 4<<10, 1<<30)
	if !errs.hasAny("limits.body_bytes", "limits.body_bytes_total") && l.BodyBytes > l.BodyBytesTotal {
		errs.add("limits.body_bytes", "%s exceeds limits.body_bytes_total %s, so such a body could never be accepted; raise the total or lower this",
			formatByteSize(l.BodyBytes), formatByteSize(l.BodyBytesTotal))
	}
}

func (c *Config) validateDurations(errs *errorList) {
	for _, d := range []struct {
		path  string
		value time.Duration
		min   time.Duration
	}{
		{"poll.interval", c.Poll.Interval, 10 * time.Millisecond},
		{"poll.fast_interval", c.Poll.FastInterval, 10 * time.Millisecond},
		{"poll.timeout", c.Poll.Timeout, time.Millisecond},
		{"health.interval", c.Health.Interval, 10 * time.Millisecond},
		{"health.down_interval", c.Health.DownInterval, 10 * time.Millisecond},
		{"health.timeout", c.Health.Timeout, time.Millisecond},
		{"slo.ttft", c.SLO.TTFT, 0},
		{"responses.ttl", c.Responses.TTL, time.Second},
		{"timeouts.connect", c.Timeouts.Connect, time.Millisecond},
		{"timeouts.first_byte", c.Timeouts.FirstByte, 0},
		{"timeouts.response", c.Timeouts.Response, 0},
		{"timeouts.body_idle", c.Timeouts.BodyIdle, 0},
		{"sse.keepalive", c.SSE.Keepalive, 0},
		{"sse.queue_keepalive", c.SSE.QueueKeepalive, 0},
		{"timeouts.write_idle", c.Timeouts.WriteIdle, 0},
		{"timeouts.idle", c.Timeouts.Idle, 0},
		{"timeouts.keepalive_idle", c.Timeouts.KeepaliveIdle, time.Millisecond},
		{"timeouts.read_header", c.Timeouts.ReadHeader, time.Millisecond},
		{"timeouts.drain", c.Timeouts.Drain, 0},
		{"timeouts.shutdown", c.Timeouts.Shutdown, 0},
	} {
		if d.value < d.min {
			errs.add(d.path, "%v is too short; the minimum is %v", d.value, d.min)
		}
	}
	notAbove := func(path string, value time.Duration, limitPath string, limit time.Duration, why string) {
		if value > limit && !errs.hasAny(path, limitPath) {
			errs.add(path, "%v exceeds %s %v, so %s; lower it", value, limitPath, limit, why)
		}
	}
	notAbove("poll.timeout", c.Poll.Timeout, "poll.interval", c.Poll.Interval, "scrapes would overlap")
	notAbove("poll.fast_interval", c.Poll.FastInterval, "poll.interval", c.Poll.Interval, "busy replicas would be scraped less often than idle ones")
	notAbove("health.down_interval", c.Health.DownInterval, "health.interval", c.Health.Interval, "a restarted replica would be detected late")
}

// Warnings returns a line about each setting that is allowed but rarely intended.
func (c *Config) Warnings() []string {
	var warnings []string
	if c.Timeouts.KeepaliveIdle >= 5*time.Second {
		warnings = append(warnings, fmt.Sprintf("timeouts.keepalive_idle: %v is not below the 5s after which vLLM closes idle connections; "+
			"set VLLM_HTTP_TIMEOUT_KEEP_ALIVE above it on every replica", c.Timeouts.KeepaliveIdle))
	}
	if slices.Contains(c.CORS.Origins, "*") && len(c.Keys) == 0 {
		warnings = append(warnings, `cors.origins: "*" without keys: any web page that is opened on a machine that reaches this proxy can use the replicas; `+
			"configure keys, or list the origins")
	}
	return slices.Concat(warnings, c.adminWarnings(), c.TLS.expiryWarnings("tls"), c.AdminTLS.expiryWarnings("admin_tls"), c.caWarnings(), c.routingWarnings())
}

// spareFileDescriptors are for listeners, files, name servers and admin clients.
const spareFileDescriptors = 100

// MaxFileDescriptors returns how many file descriptors the settings allow to be
// open at once: a client's connection and a backend's for each request, clients'
// idle connections, and a health check and a scrape of each backend.
func (c *Config) MaxFileDescriptors() uint64 {
	return uint64(max(c.Limits.Connections, c.Limits.InFlight) + c.maxRequestConnections() + c.otherFileDescriptors())
}

// maxRequestConnections returns how many connections to backends requests may have.
func (c *Config) maxRequestConnections() int {
	return min(c.Limits.InFlight, len(c.Backends)*c.Connections.MaxPerBackend)
}

// otherFileDescriptors returns how many file descriptors may be open beside the connections of clients
// and requests.
func (c *Config) otherFileDescriptors() int { return 2*len(c.Backends) + spareFileDescriptors }

// MaxClientConnections returns the number of client connections above which idle ones are closed:
// limits.connections, or less if the process may not open enough files for them and for requests'
// connections to backends. Then at least half of the files are for these two, half of
// them for each. maxOpenFiles is 0 if it is unknown.
func (c *Config) MaxClientConnections(maxOpenFiles uint64) int {
	if maxOpenFiles == 0 || c.MaxFileDescriptors() <= maxOpenFiles {
		return c.Limits.Connections
	}
	limit := int(maxOpenFiles)
	connections := limit - min(c.otherFileDescriptors(), limit/2)
	return min(c.Limits.Connections, max(connections-c.maxRequestConnections(), connections/2))
}

// DescriptorWarning returns a warning if the process that runs the proxy may not open enough files,
// else "". maxOpenFiles is 0 if it is unknown.
func (c *Config) DescriptorWarning(maxOpenFiles uint64) string {
	need := c.MaxFileDescriptors()
	if maxOpenFiles == 0 || need <= maxOpenFiles {
		return ""
	}
	return fmt.Sprintf("may need %d file descriptors, limit is %d: idle client connections are closed above %d; "+
		"raise the limit (ulimit -n, systemd's LimitNOFILE=, Docker's --ulimit nofile=), or lower limits.connections and limits.in_flight",
		need, maxOpenFiles, c.MaxClientConnections(maxOpenFiles))
}

// adminWarnings returns the warnings about an admin listener that other machines
// can reach.
func (c *Config) adminWarnings() []string {
	host, _, err := net.SplitHostPort(c.Admin)
	switch {
	case err != nil || isLoopback(host) || c.AdminToken != "" && c.AdminTLS.Enabled():
		return nil
	case c.AdminToken != "":
		return []string{fmt.Sprintf("admin: %s is reachable from other machines and uses plain HTTP, so the admin token can be read on the network; "+
			"set admin_tls.cert_file and admin_tls.key_file", c.Admin)}
	}
	return []string{fmt.Sprintf("admin: %s is reachable from other machines: /metrics is open to them, everything else is refused until admin_token is set; "+
		"keep it on a private network", c.Admin)}
}

// expiryWarnings returns a warning if the certificate has expired. section is "tls" or
// "admin_tls".
func (t ListenerTLS) expiryWarnings(section string) []string {
	if t.Certificate == nil || time.Now().Before(t.Certificate.Leaf.NotAfter) {
		return nil
	}
	return []string{fmt.Sprintf("%s.cert_file: %s expired on %s; clients will reject it", section, t.CertFile, t.Certificate.Leaf.NotAfter.Format(time.DateOnly))}
}

// checkOneOf adds an error unless value is one of allowed. noun says what they are.
func checkOneOf(errs *errorList, path, noun, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	if near := nearestWord(strings.ToLower(value), allowed); near != "" {
		errs.add(path, "unknown %s %q; did you mean %s?", noun, value, near)
		return
	}
	errs.add(path, "unknown %s %q; choose one of %s", noun, value, strings.Join(allowed, ", "))
}

// checkRange adds an error unless value is at least min and at most max.
func checkRange[T int | float64 | int64](errs *errorList, path string, value, min, max T) {
	if !(value >= min) { // true for NaN
		errs.add(path, "%v is too small; the minimum is %v", formatIfByteSize(value), formatIfByteSize(min))
	} else if value > max {
		errs.add(path, "%v is too large; the maximum is %v", formatIfByteSize(value), formatIfByteSize(max))
	}
}

// formatIfByteSize returns a size as text with a unit, and any other value as it is.
func formatIfByteSize(value any) any {
	if size, ok := value.(int64); ok {
		return formatByteSize(size)
	}
	return value
}

// CheckListenAddress returns an error unless address is a host, which may be
// empty, and a port.
func CheckListenAddress(address string) error {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q is not an address such as :8080 or 127.0.0.1:8080", address)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q has no port between 0 and 65535", address)
	}
	return nil
}

func isWildcard(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// isHeaderName reports whether s can be the name of a header.
func isHeaderName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
	})
}

// IsHeaderValue reports whether s can be the value of a header: visible ASCII and
// spaces.
func IsHeaderValue(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}
