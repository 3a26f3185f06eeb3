package config

import (
	"fmt"
	"net"
	"net/url"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"warmroute/cluster"
	"warmroute/kvevents"
	"warmroute/proxy/api"
	"warmroute/router/policy"
)

func (c *Config) validate(errs *errorList, policies policy.Registry) {
	c.validateListeners(errs)
	c.validateTrustedProxies(errs)
	c.validateBackends(errs)
	c.validateDNS(errs)
	c.validateRegistration(errs)
	c.validateKeys(errs)
	c.validateAdminToken(errs)
	validateHeaderNames(errs, "user_headers", c.UserHeaders)
	checkPolicy(errs, strings.TrimSuffix(c.Routing.Policy, policy.WithQueue), policies)
	validateTags(errs, *c, "")
	c.validateFiles(errs)
	c.validateRouting(errs)
	c.validateCORS(errs)
	c.validateExtraPaths(errs)
	c.validateModels(errs)
	c.validateRedis(errs)
	c.validateKVEventListener(errs)
	c.validateRelations(errs)
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
			errs.add(fmt.Sprintf("trusted_proxies[%d]", i), "%v lets every client state its address; name the networks of the load balancers",
				network)
		}
	}
}

// maxRegistrationRules bounds the networks and the patterns for registration.
const maxRegistrationRules = 64

// validateRegistration validates who may register which replicas.
func (c *Config) validateRegistration(errs *errorList) {
	r := c.Registration
	if len(r.AllowFrom) > maxRegistrationRules || len(r.AllowURLs) > maxRegistrationRules {
		errs.add("registration.allow_from", "too many networks or URLs; the maximum is %d of each", maxRegistrationRules)
	}
	if r.IsOnPublicListener() && r.TokenFile == "" && (len(r.AllowFrom) == 0 || len(r.AllowURLs) == 0) {
		errs.add("registration.listener", "anyone who can register a URL receives prompts: set registration.token_file, or both "+
			"registration.allow_from and registration.allow_urls")
	}
	for i, pattern := range r.AllowURLs {
		if _, err := path.Match(pattern, ""); err != nil || !strings.Contains(pattern, "://") {
			errs.add(fmt.Sprintf("registration.allow_urls[%d]", i), "%q is not a pattern of URLs; write one such as http://10.0.*:8000", pattern)
		}
	}
}

func (c *Config) validateDNS(errs *errorList) {
	if c.DNS.Server == "" || errs.hasAny("dns.server") {
		return
	}
	host, port, err := net.SplitHostPort(c.DNS.Server)
	if n, badPort := strconv.ParseUint(port, 10, 16); err != nil || host == "" || badPort != nil || n == 0 {
		errs.add("dns.server", "%q is not an address such as 10.0.0.53:53", c.DNS.Server)
	}
}

func (c *Config) validateRedis(errs *errorList) {
	if n := len(c.Redis.Secret); n > 0 && n < cluster.MinSecretBytes {
		errs.add("redis.secret_file", "the secret in %s has %d bytes, expected at least %d; write one with openssl rand -hex 32",
			c.Redis.SecretFile, n, cluster.MinSecretBytes)
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
			errs.add(at, `%q is not an origin; write scheme://host or scheme://host:port, as in https://chat.example.com, or "*" alone for all`,
				origin)
		case !strings.EqualFold(origin, u.Scheme+"://"+u.Host):
			errs.add(at, "%q has more than an origin; write %s://%s", origin, u.Scheme, u.Host)
		case u.Scheme == "https" && u.Port() == "443" || u.Scheme == "http" && u.Port() == "80":
			errs.add(at, "%q names the default port, which browsers leave out; write %s://%s", origin, u.Scheme,
				strings.TrimSuffix(u.Host, ":"+u.Port()))
		}
	}
}

func (c *Config) validateExtraPaths(errs *errorList) {
	if len(c.ExtraPaths) > api.MaxExtraPaths {
		errs.add("extra_paths", "%d paths are too many; the maximum is %d", len(c.ExtraPaths), api.MaxExtraPaths)
		return
	}
	for i, path := range c.ExtraPaths {
		at := fmt.Sprintf("extra_paths[%d]", i)
		if err := api.CheckExtraPath(path); err != nil {
			errs.add(at, "%v", err)
		} else if first := slices.Index(c.ExtraPaths, path); first < i {
			errs.add(at, "%s is already extra_paths[%d]; remove one of the two", path, first)
		}
	}
}

// validateRelations validates settings by others.
func (c *Config) validateRelations(errs *errorList) {
	if c.Breaker.Failures > 0 && c.Breaker.OpenTime < 10*time.Millisecond {
		errs.add("breaker.open_time", "%v is too short; the minimum is 10ms; to disable the breaker, set breaker.failures to 0",
			c.Breaker.OpenTime)
	}
	if l := &c.Limits; !errs.hasAny("limits.body_bytes", "limits.body_bytes_total") && l.BodyBytes > l.BodyBytesTotal {
		errs.add("limits.body_bytes", "%s exceeds limits.body_bytes_total %s, so such a body could never be accepted; raise the total or "+
			"lower this",
			formatByteSize(l.BodyBytes), formatByteSize(l.BodyBytesTotal))
	}
	notAbove := func(path string, value time.Duration, limitPath string, limit time.Duration, why string) {
		if value > limit && !errs.hasAny(path, limitPath) {
			errs.add(path, "%v exceeds %s %v, so %s; lower it", value, limitPath, limit, why)
		}
	}
	notAbove("poll.timeout", c.Poll.Timeout, "poll.interval", c.Poll.Interval, "polls would overlap")
	notAbove("poll.fast_interval", c.Poll.FastInterval, "poll.interval", c.Poll.Interval,
		"busy replicas would be polled less often than idle ones")
	notAbove("health.down_interval", c.Health.DownInterval, "health.interval", c.Health.Interval, "a restarted replica would be detected late")
}

// Warnings returns a line about each setting that is allowed but rarely intended. policies are
// those of the Loader.
func (c *Config) Warnings(policies policy.Registry) []string {
	var warnings []string
	if c.Timeouts.KeepaliveIdle >= 5*time.Second {
		warnings = append(warnings, fmt.Sprintf("timeouts.keepalive_idle: %v is not below the 5s after which vLLM closes idle connections; "+
			"set VLLM_HTTP_TIMEOUT_KEEP_ALIVE above it on every replica", c.Timeouts.KeepaliveIdle))
	}
	if slices.Contains(c.CORS.Origins, "*") && len(c.Keys) == 0 {
		warnings = append(warnings, `cors.origins: "*" without keys: any web page that is opened on a machine that reaches this proxy can use `+
			`the replicas; `+
			"configure keys, or list the origins")
	}
	if c.Registration.IsOnPublicListener() && c.StateFile == "" && c.Redis.URL == "" {
		warnings = append(warnings, "registration.listener: public without state_file or redis.url: a proxy that restarts does not know the "+
			"registered replicas; set one of them")
	}
	return slices.Concat(warnings, c.adminWarnings(), c.kvEventWarnings(), c.TLS.expiryWarnings("tls"),
		c.AdminTLS.expiryWarnings("admin_tls"), c.caWarnings(), c.routingWarnings(policies))
}

// spareFileDescriptors are for listeners, files, name servers and admin clients.
const spareFileDescriptors = 100

// MaxFileDescriptors returns how many file descriptors the settings allow to be
// open at once: a client's connection and a backend's for each request, clients'
// idle connections, and a health check and a poll of each backend. The fleet has so many
// replicas, or as many as the configuration has backends if these are more.
func (c *Config) MaxFileDescriptors(replicas int) uint64 {
	return uint64(max(c.Limits.Connections, c.Limits.InFlight) + c.maxRequestConnections(replicas) + c.otherFileDescriptors(replicas))
}

// maxRequestConnections returns how many connections to backends requests may have.
func (c *Config) maxRequestConnections(replicas int) int {
	return min(c.Limits.InFlight, max(replicas, len(c.Backends))*c.Connections.MaxPerBackend)
}

// otherFileDescriptors returns how many file descriptors may be open beside the connections of clients
// and requests.
func (c *Config) otherFileDescriptors(replicas int) int {
	n := 2*max(replicas, len(c.Backends)) + spareFileDescriptors
	if c.KVEvents.Listen != "" {
		n += kvevents.MaxConnections
	}
	return n
}

// MaxClientConnections returns the number of client connections above which idle ones are closed:
// limits.connections, or less if the process may not open enough files for them and for requests'
// connections to backends. Then at least half of the files are for these two, half of
// them for each. maxOpenFiles is 0 if it is unknown.
func (c *Config) MaxClientConnections(maxOpenFiles uint64, replicas int) int {
	if maxOpenFiles == 0 || c.MaxFileDescriptors(replicas) <= maxOpenFiles {
		return c.Limits.Connections
	}
	limit := int(maxOpenFiles)
	connections := limit - min(c.otherFileDescriptors(replicas), limit/2)
	return min(c.Limits.Connections, max(connections-c.maxRequestConnections(replicas), connections/2))
}

// DescriptorWarning returns a warning if the process that runs the proxy may not open enough files,
// else "". maxOpenFiles is 0 if it is unknown.
func (c *Config) DescriptorWarning(maxOpenFiles uint64, replicas int) string {
	need := c.MaxFileDescriptors(replicas)
	if maxOpenFiles == 0 || need <= maxOpenFiles {
		return ""
	}
	return fmt.Sprintf("file descriptor limit is too low: %d may be needed, limit is %d, so idle client connections are closed above %d; "+
		"raise the limit (ulimit -n, systemd's LimitNOFILE=, Docker's --ulimit nofile=), or lower limits.connections and limits.in_flight",
		need, maxOpenFiles, c.MaxClientConnections(maxOpenFiles, replicas))
}

// adminWarnings returns the warnings about an admin listener that other machines can reach.
func (c *Config) adminWarnings() []string {
	host, _, err := net.SplitHostPort(c.Admin)
	switch {
	case err != nil || isLoopback(host) || c.AdminToken != "" && c.AdminTLS.Enabled():
		return nil
	case c.AdminToken != "":
		return []string{fmt.Sprintf("admin: %s is reachable from other machines and uses plain HTTP, so the admin token can be read on the "+
			"network; "+
			"set admin_tls.cert_file and admin_tls.key_file", c.Admin)}
	}
	return []string{fmt.Sprintf("admin: %s is reachable from other machines: /metrics is open to them, everything else is refused until "+
		"admin_token is set; "+
		"keep it on a private network", c.Admin)}
}

// expiryWarnings returns a warning if the certificate has expired. section is "tls" or "admin_tls".
func (t ListenerTLS) expiryWarnings(section string) []string {
	if t.Certificate == nil || time.Now().Before(t.Certificate.Leaf.NotAfter) {
		return nil
	}
	return []string{fmt.Sprintf("%s.cert_file: %s expired on %s; clients will reject it", section, t.CertFile,
		t.Certificate.Leaf.NotAfter.Format(time.DateOnly))}
}

// validateTags adds an error for each setting of a struct whose value its tags do not allow. prefix is
// the beginning of the settings' paths.
func validateTags(errs *errorList, section any, prefix string) {
	for _, s := range settingsOf(reflect.ValueOf(section), prefix, false) {
		if names := s.tag.Get("oneof"); names != "" {
			checkOneOf(errs, s.path, s.value.String(), strings.Fields(names)...)
		}
		bounds, orZero := strings.CutPrefix(s.tag.Get("range"), "0|")
		if bounds == "" || orZero && s.value.IsZero() {
			continue
		}
		switch value := s.value.Interface().(type) {
		case int:
			checkRange(errs, s.path, value, bounds, decodeInt)
		case int64:
			checkRange(errs, s.path, value, bounds, decodeByteSize)
		case float64:
			checkRange(errs, s.path, value, bounds, decodeFloat)
		case time.Duration:
			checkRange(errs, s.path, value, bounds, decodeDuration)
		}
	}
}

// checkPolicy adds an error unless there is a policy of that name.
func checkPolicy(errs *errorList, name string, policies policy.Registry) {
	if described := policies.DescribeUnknown(name); described != "" {
		errs.add("routing.policy", "unknown policy %q; %s", name, described)
		return
	}
	checkOneOf(errs, "routing.policy", name, policies.Names()...)
}

// checkOneOf adds an error unless value is one of allowed.
func checkOneOf(errs *errorList, path, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	noun := path[strings.LastIndexByte(path, '.')+1:]
	if near := nearestWord(strings.ToLower(value), allowed); near != "" {
		errs.add(path, "unknown %s %q; did you mean %s?", noun, value, near)
		return
	}
	errs.add(path, "unknown %s %q; choose one of %s", noun, value, strings.Join(allowed, ", "))
}

// checkRange adds an error unless value is in the bounds, such as "1..10" or "10ms..", which decode reads.
func checkRange[T int | float64 | int64 | time.Duration](errs *errorList, path string, value T, bounds string,
	decode func(any) (any, error)) {
	low, high, _ := strings.Cut(bounds, "..")
	small, large := "small", "large"
	if reflect.TypeFor[T]() == reflect.TypeFor[time.Duration]() {
		small, large = "short", "long"
	}
	if least, err := decode(low); err == nil && !(value >= least.(T)) { // true for NaN
		errs.add(path, "%v is too %s; the minimum is %v", formatIfByteSize(value), small, formatIfByteSize(least))
	} else if most, err := decode(high); err == nil && value > most.(T) {
		errs.add(path, "%v is too %s; the maximum is %v", formatIfByteSize(value), large, formatIfByteSize(most))
	}
}

// formatIfByteSize returns a size as text with a unit, and any other value as it is.
func formatIfByteSize(value any) any {
	if size, ok := value.(int64); ok {
		return formatByteSize(size)
	}
	return value
}

// CheckListenAddress returns an error unless address is a host, which may be empty, and a port.
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

// IsHeaderValue reports whether s can be the value of a header: visible ASCII and spaces.
func IsHeaderValue(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}
