package main

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"warmroute/backends"
	"warmroute/router/policy"
)

func newCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [URL ...]",
		Short: "Report every fault of a configuration",
		Long: `Read the configuration as serve would, and ask no backend. Every fault is
printed on a line of its own, and the exit code is 2; or what serve would run,
and 0.`,
		Example: `  warmroute check --config warmroute.yaml
  warmroute check --policy chwbl http://10.0.0.5:8000 http://10.0.0.6:8000`,
		RunE: func(cmd *cobra.Command, urls []string) error {
			config, err := loadConfig(cmd.Flags(), urls)
			if err != nil {
				return err
			}
			for _, w := range config.Warnings() {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
			}
			guarded := ""
			if len(config.Keys) > 0 {
				guarded = fmt.Sprintf(", %d keys", len(config.Keys))
			}
			fmt.Fprintf(cmd.OutOrStdout(), "ok: %d backends, policy %s, listen %s%s\n",
				len(config.Backends), config.Routing.Policy, config.Listen, guarded)
			return nil
		},
	}
	addConfigFlags(cmd.Flags())
	return cmd
}

// Warnings lists what is allowed but seldom meant.
func (c *Config) Warnings() []string {
	var warnings []string
	if c.Timeouts.KeepaliveIdle >= 5*time.Second {
		warnings = append(warnings, fmt.Sprintf("timeouts.keepalive_idle: %v is no less than the 5s after which vLLM closes idle connections; "+
			"raise VLLM_HTTP_TIMEOUT_KEEP_ALIVE above it on every replica", c.Timeouts.KeepaliveIdle))
	}
	return slices.Concat(warnings, c.adminWarnings(), c.TLS.warnings("tls"), c.AdminTLS.warnings("admin_tls"), c.routingWarnings())
}

// check adds a fault for every rule that the settings break.
func (c *Config) check(f *faults) {
	c.checkListeners(f)
	c.checkBackends(f)
	c.checkKeys(f)
	c.checkAdminToken(f)
	oneOf(f, "routing.policy", c.Routing.Policy, policy.Names()...)
	oneOf(f, "log.level", c.Log.Level, "debug", "info", "warn", "error")
	oneOf(f, "log.format", c.Log.Format, "text", "json")
	c.checkAccessLog(f)
	c.checkWritten(f)
	within(f, "routing.attempts", c.Routing.Attempts, 1, 10)
	c.checkRouting(f)
	c.checkRetry(f)
	within(f, "index.block_bytes", c.Index.BlockBytes, 64, 4096)
	within(f, "connections.max_per_backend", c.Connections.MaxPerBackend, 1, 1<<20)
	within(f, "index.max_bytes", c.Index.MaxBytes, 1<<20, 1<<50)
	within(f, "record.max_bytes", c.Record.MaxBytes, 1<<20, 1<<40)
	within(f, "record.keep", c.Record.Keep, 0, 1000)
	within(f, "limits.in_flight", c.Limits.InFlight, 1, 1<<20)
	within(f, "limits.connections", c.Limits.Connections, 16, 1<<20)
	within(f, "limits.query_bytes", c.Limits.QueryBytes, 0, 1<<20)
	within(f, "limits.body_bytes", c.Limits.BodyBytes, 1<<10, 1<<40)
	within(f, "limits.body_bytes_total", c.Limits.BodyBytesTotal, 1<<10, 1<<50)
	within(f, "limits.header_bytes", c.Limits.HeaderBytes, 4<<10, 1<<30)
	c.checkDurations(f)
	c.checkContradictions(f)
}

func (c *Config) checkListeners(f *faults) {
	if c.Listen == "" {
		f.add("listen", "is empty; give it an address, such as :8080")
	} else {
		checkAddress(f, "listen", c.Listen)
	}
	if c.Admin != "" {
		checkAddress(f, "admin", c.Admin)
	}
	if c.Admin == "" || f.blames("listen", "admin") {
		return
	}
	listenHost, listenPort, _ := net.SplitHostPort(c.Listen)
	adminHost, adminPort, _ := net.SplitHostPort(c.Admin)
	samePlace := listenHost == adminHost || isWildcard(listenHost) || isWildcard(adminHost)
	if samePlace && listenPort == adminPort && adminPort != "0" {
		f.add("admin", "%s clashes with listen %s; give one of the two another port", c.Admin, c.Listen)
	}
}

func (c *Config) checkDurations(f *faults) {
	for _, d := range []struct {
		path  string
		value time.Duration
		least time.Duration
	}{
		{"poll.interval", c.Poll.Interval, 10 * time.Millisecond},
		{"poll.fast_interval", c.Poll.FastInterval, 10 * time.Millisecond},
		{"poll.timeout", c.Poll.Timeout, time.Millisecond},
		{"health.interval", c.Health.Interval, 10 * time.Millisecond},
		{"health.down_interval", c.Health.DownInterval, 10 * time.Millisecond},
		{"health.timeout", c.Health.Timeout, time.Millisecond},
		{"slo.ttft", c.SLO.TTFT, 0},
		{"timeouts.connect", c.Timeouts.Connect, time.Millisecond},
		{"timeouts.first_byte", c.Timeouts.FirstByte, 0},
		{"timeouts.response", c.Timeouts.Response, 0},
		{"timeouts.body_idle", c.Timeouts.BodyIdle, 0},
		{"sse.keepalive", c.SSE.Keepalive, 0},
		{"timeouts.write_idle", c.Timeouts.WriteIdle, 0},
		{"timeouts.idle", c.Timeouts.Idle, 0},
		{"timeouts.keepalive_idle", c.Timeouts.KeepaliveIdle, time.Millisecond},
		{"timeouts.read_header", c.Timeouts.ReadHeader, time.Millisecond},
		{"timeouts.drain", c.Timeouts.Drain, 0},
		{"timeouts.shutdown", c.Timeouts.Shutdown, 0},
	} {
		if d.value < d.least {
			f.add(d.path, "%v is too short; give it %v or more", d.value, d.least)
		}
	}
}

// checkContradictions is for pairs of settings that are each in range. It
// keeps quiet where one of the pair has a fault of its own.
func (c *Config) checkContradictions(f *faults) {
	if !f.blames("poll.timeout", "poll.interval") && c.Poll.Timeout > c.Poll.Interval {
		f.add("poll.timeout", "%v exceeds poll.interval %v: rounds would pile up; lower the timeout", c.Poll.Timeout, c.Poll.Interval)
	}
	if !f.blames("poll.fast_interval", "poll.interval") && c.Poll.FastInterval > c.Poll.Interval {
		f.add("poll.fast_interval", "%v exceeds poll.interval %v: busy replicas would be asked less often than idle ones; lower it",
			c.Poll.FastInterval, c.Poll.Interval)
	}
	if !f.blames("health.down_interval", "health.interval") && c.Health.DownInterval > c.Health.Interval {
		f.add("health.down_interval", "%v exceeds health.interval %v: a restarted replica would be found late; lower it",
			c.Health.DownInterval, c.Health.Interval)
	}
	if !f.blames("limits.body_bytes", "limits.body_bytes_total") && c.Limits.BodyBytes > c.Limits.BodyBytesTotal {
		f.add("limits.body_bytes", "%v exceeds limits.body_bytes_total %v: such a body could never be held; raise the total or lower this",
			c.Limits.BodyBytes, c.Limits.BodyBytesTotal)
	}
	if c.Record.File != "" && filepath.Clean(c.Record.File) == filepath.Clean(c.Index.Snapshot) {
		f.add("record.file", "%s is index.snapshot as well; give one of the two another file", c.Record.File)
	}
}

func oneOf(f *faults, path, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	if near := nearest(strings.ToLower(value), allowed); near != "" {
		f.add(path, "unknown value %q; did you mean %s?", value, near)
		return
	}
	f.add(path, "unknown value %q; use one of %s", value, strings.Join(allowed, ", "))
}

func within[T int | float64 | ByteSize](f *faults, path string, value, least, most T) {
	if !(value >= least) { // NaN is below everything
		f.add(path, "%v is too small; give it %v or more", value, least)
	} else if value > most {
		f.add(path, "%v is too large; give it %v or less", value, most)
	}
}

func checkAddress(f *faults, path, address string) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		f.add(path, "%q is not an address; write it like :8080 or 127.0.0.1:8080", address)
		return
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		f.add(path, "%q has no port between 0 and 65535", address)
	}
}

func isWildcard(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// nameBackends gives those without a name the one that is unique anyway: host,
// port and path of their URL.
func (c *Config) nameBackends() {
	for i := range c.Backends {
		b := &c.Backends[i]
		if u, err := backends.ParseURL(b.URL); b.Name == "" && err == nil {
			b.Name = backends.DefaultName(u)
		}
	}
}

// checkBackends looks at each backend by itself and for two that are one.
func (c *Config) checkBackends(f *faults) {
	if len(c.Backends) == 0 {
		f.add("backends", "the list is empty; name at least one vLLM server: serve http://127.0.0.1:8000, or a backends list in the file")
	}
	firstName, firstURL := map[string]int{}, map[string]int{}
	for i, b := range c.Backends {
		at := fmt.Sprintf("backends[%d]", i)
		if f.blames(at, at+".url", at+".name", at+".api_key", at+".ca_file", at+".server_name", at+".max_in_flight", at+".weight") {
			continue
		}
		if !isHeaderText(b.APIKey) {
			f.add(at+".api_key", "has characters that no header may carry; was a line end copied with it?")
		}
		if b.URL == "" {
			f.add(at+".url", "is missing; write it like http://10.0.0.5:8000")
			continue
		}
		u, err := backends.ParseURL(b.URL)
		if err != nil {
			f.add(at+".url", "%v", err)
			continue
		}
		checkBackendTLS(f, at, u.Scheme, b)
		within(f, at+".max_in_flight", b.MaxInFlight, 0, 1<<20)
		within(f, at+".weight", b.Weight, 0.01, 100)
		if !isHeaderText(b.Name) || strings.ContainsAny(b.Name, " ,") || len(b.Name) > 200 {
			f.add(at+".name", "%q cannot be a name: it stands in headers and labels; use letters, digits and ._:-", b.Name)
			continue
		}
		address := backends.Address(u)
		if first, taken := firstURL[address]; taken {
			f.add(at+".url", "%s is already backends[%d]; drop one of the two", address, first)
		} else {
			firstURL[address] = i
		}
		if first, taken := firstName[b.Name]; taken {
			f.add(at+".name", "%s is already the name of backends[%d]; give one of the two another", b.Name, first)
		} else {
			firstName[b.Name] = i
		}
	}
}

// isHeaderName reports whether s may name a header; empty is allowed.
func isHeaderName(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
	})
}

// isHeaderText reports whether s may stand in a header's value: visible ASCII.
func isHeaderText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}
