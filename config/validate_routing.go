package config

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/net/http/httpguts"

	"warmroute/backends"
	"warmroute/router/policy"
)

func (c *Config) validateRouting(errs *errorList) {
	r := &c.Routing
	if r.Queue.Requests > 0 {
		checkRange(errs, "routing.queue.bytes", r.Queue.Bytes, "1KiB..1024TiB", decodeByteSize)
		checkRange(errs, "routing.queue.batch_bytes", r.Queue.BatchBytes, "1KiB..1024TiB", decodeByteSize)
		validateQueueTime(errs, "routing.queue.none_ready_timeout", r.Queue.NoneReadyTimeout)
		validateQueueTime(errs, "routing.queue.busy_timeout", r.Queue.BusyTimeout)
	}
	r.validateSessionHeaders(errs)
}

func validateQueueTime(errs *errorList, name string, d time.Duration) {
	if d < time.Millisecond {
		errs.add(name, "%v is too short; the minimum is 1ms; to disable the queue, set routing.queue.requests to 0", d)
	}
}

// maxSessionHeaders bounds the look-ups in the header of each request.
const maxSessionHeaders = 32

func (r *Routing) validateSessionHeaders(errs *errorList) {
	if len(r.SessionHeaders) > maxSessionHeaders {
		errs.add("routing.session_headers", "%d names are too many; the maximum is %d", len(r.SessionHeaders), maxSessionHeaders)
		return
	}
	names := r.canonicalSessionHeaders()
	for i, name := range names {
		at := fmt.Sprintf("routing.session_headers[%d]", i)
		if !httpguts.ValidHeaderFieldName(name) {
			errs.add(at, "%q is not the name of a header; use letters, digits, - and _", name)
		}
		if first := slices.Index(names, name); first < i {
			errs.add(at, "%s is already routing.session_headers[%d]; remove one of the two", name, first)
		}
	}
}

// routingWarnings returns the warnings about routing settings that have no
// effect, or an effect that is rarely intended.
func (c *Config) routingWarnings(policies policy.Registry) (warnings []string) {
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	r := &c.Routing
	chosen, _ := policies.Lookup(r.Policy) // an unknown policy is an error elsewhere
	for _, gate := range []struct {
		key   string
		value float64
	}{
		{"routing.match_ratio", r.MatchRatio}, {"routing.imbalance_abs", r.ImbalanceAbs},
		{"routing.imbalance_ratio", r.ImbalanceRatio}, {"routing.load_factor", r.LoadFactor},
	} {
		if gate.value != 0 && !chosen.Reads(gate.key) {
			warn("%s: %v has no effect: policy %s does not use it; remove it or choose another policy", gate.key, gate.value, r.Policy)
		}
	}
	if c.SLO.TTFT > 0 && !chosen.Reads("slo.ttft") {
		warn("slo.ttft: %v has no effect: policy %s does not use it; remove it or choose policy prefix", c.SLO.TTFT, r.Policy)
	}
	if len(c.StartHooks) > 0 && r.Queue.Requests == 0 {
		warn("start_hooks: has no effect: the admission queue is off (routing.queue.requests), so that no request waits; remove it or turn the queue on")
	}
	if c.PD.Fallback == "queue" && r.Queue.Requests == 0 {
		warn("pd.fallback: queue has no effect: the admission queue is off (routing.queue.requests); remove it or turn the queue on")
	}
	if at := slices.IndexFunc(c.Keys, func(k Key) bool { return k.QueueTime > 0 }); at >= 0 && r.Queue.Requests == 0 {
		warn("keys[%d].queue_time: %v has no effect: the admission queue is off (routing.queue.requests); remove it or turn the queue on", at, c.Keys[at].QueueTime)
	}
	if r.Queue.Requests > 0 && r.Queue.Bytes > c.Limits.BodyBytesTotal {
		warn("routing.queue.bytes: %s exceeds limits.body_bytes_total %s, which is reached first",
			formatByteSize(r.Queue.Bytes), formatByteSize(c.Limits.BodyBytesTotal))
	}
	if r.Queue.Requests > 0 && r.Queue.Bytes < c.Limits.BodyBytes {
		warn("routing.queue.bytes: %s is below limits.body_bytes %s: larger requests cannot be queued and get 429 under load",
			formatByteSize(r.Queue.Bytes), formatByteSize(c.Limits.BodyBytes))
	}
	if warning := c.roleWarning(); warning != "" {
		warn("%s", warning)
	}
	for _, b := range c.Backends {
		if b.MaxInFlight > 0 && r.Queue.Requests == 0 {
			warn("backends: %s has max_in_flight %d and the admission queue is off (routing.queue.requests): requests beyond it get 429 at once", b.Name, b.MaxInFlight)
		}
		if b.MaxInFlight > c.Connections.MaxPerBackend {
			warn("backends: max_in_flight %d of %s exceeds connections.max_per_backend %d, which is reached first", b.MaxInFlight, b.Name, c.Connections.MaxPerBackend)
		}
	}
	return warnings
}

// CountRoles returns how many backends have each role.
func (c *Config) CountRoles() map[backends.Role]int {
	count := map[backends.Role]int{}
	for _, b := range c.Backends {
		role, _ := backends.ParseRole(b.Role) // which is valid
		count[role]++
	}
	return count
}

// roleWarning returns a warning if backends have a role and none has the other one, unless others may be added.
func (c *Config) roleWarning() string {
	count := c.CountRoles()
	switch prefill := count[backends.RolePrefill]; {
	case c.Registration.IsOnPublicListener() || c.StateFile != "":
	case prefill > 0 && prefill == len(c.Backends):
		return "backends: all have role prefill: each request is served whole by one of them; give others role decode"
	case prefill == 0 && count[backends.RoleDecode] > 0:
		return "backends: some have role decode and none has role prefill: each request is served whole; give others role prefill"
	}
	return ""
}
