package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"warmroute/backends"
	"warmroute/router/policy"
)

func (c *Config) validateRouting(errs *errorList) {
	r := &c.Routing
	if r.Queue.Requests > 0 {
		checkRange(errs, "routing.queue.bytes", r.Queue.Bytes, "1KiB..1024TiB", decodeByteSize)
		checkRange(errs, "routing.queue.low_priority_bytes", r.Queue.LowPriorityBytes, "1KiB..1024TiB", decodeByteSize)
		validateQueueTime(errs, "routing.queue.none_ready_timeout", r.Queue.NoneReadyTimeout)
		validateQueueTime(errs, "routing.queue.busy_timeout", r.Queue.BusyTimeout)
	}
	validateHeaderNames(errs, "routing.conversation_headers", r.ConversationHeaders)
	if r.EvictionThreshold > 0 && r.EvictionTarget > r.EvictionThreshold {
		errs.add("routing.eviction_target", "%d exceeds routing.eviction_threshold %d: lower it or raise the threshold",
			r.EvictionTarget, r.EvictionThreshold)
	}
}

func validateQueueTime(errs *errorList, name string, d time.Duration) {
	if d < time.Millisecond {
		errs.add(name, "%v is too short; the minimum is 1ms; to disable the queue, set routing.queue.requests to 0", d)
	}
}

// maxHeaderNames bounds the look-ups in the header of each request.
const maxHeaderNames = 32

// validateHeaderNames validates a setting that lists names of headers.
func validateHeaderNames(errs *errorList, setting string, list []string) {
	if len(list) > maxHeaderNames {
		errs.add(setting, "%d names are too many; the maximum is %d", len(list), maxHeaderNames)
		return
	}
	names := canonicalHeaders(list)
	for i, name := range names {
		at := fmt.Sprintf("%s[%d]", setting, i)
		if !httpguts.ValidHeaderFieldName(name) {
			errs.add(at, "%q is not the name of a header; use letters, digits, - and _", name)
		}
		if first := slices.Index(names, name); first < i {
			errs.add(at, "%s is already %s[%d]; remove one of the two", name, setting, first)
		}
	}
}

// routingWarnings returns the warnings about routing settings that have no
// effect, or an effect that is rarely intended.
func (c *Config) routingWarnings(policies policy.Registry) (warnings []string) {
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	r := &c.Routing
	chosen, _ := policies.Lookup(r.Policy) // an unknown policy is an error elsewhere
	for _, s := range settingsOf(reflect.ValueOf(r.Settings), "routing.", false) {
		if !s.value.IsZero() && !chosen.Reads(s.path) {
			warn("%s: %v has no effect: policy %s does not use it; remove it or choose another policy", s.path, s.value, r.Policy)
		} else if !s.value.IsZero() && r.EvictionThreshold == 0 && strings.HasPrefix(s.path, "routing.eviction_") {
			warn("%s: %v has no effect: nothing is evicted (routing.eviction_threshold is 0); remove it or set the threshold", s.path, s.value)
		}
	}
	if c.SLO.TTFT > 0 && !chosen.Reads("slo.ttft") {
		warn("slo.ttft: %v has no effect: policy %s does not use it; remove it or choose policy prefix", c.SLO.TTFT, r.Policy)
	}
	if at := slices.IndexFunc(c.Keys, func(k Key) bool { return k.SLOTTFT > 0 }); at >= 0 && !chosen.Reads("slo.ttft") {
		warn("keys[%d].slo_ttft: %v has no effect: policy %s does not use it; remove it or choose policy prefix", at, c.Keys[at].SLOTTFT,
			r.Policy)
	}
	if len(c.StartHooks) > 0 && r.Queue.Requests == 0 {
		warn("start_hooks: has no effect: the admission queue is off (routing.queue.requests), so that no request waits; remove it or turn " +
			"the queue on")
	}
	warnings = append(warnings, c.fallbackWarnings()...)
	if c.Disaggregation.Fallback == "queue" && r.Queue.Requests == 0 {
		warn("disaggregation.fallback: queue has no effect: the admission queue is off (routing.queue.requests); remove it or turn the queue on")
	}
	if at := slices.IndexFunc(c.Keys, func(k Key) bool { return k.QueueTime > 0 }); at >= 0 && r.Queue.Requests == 0 {
		warn("keys[%d].queue_time: %v has no effect: the admission queue is off (routing.queue.requests); remove it or turn the queue on", at,
			c.Keys[at].QueueTime)
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
			warn("backends: %s has max_in_flight %d and the admission queue is off (routing.queue.requests): requests beyond it get 429 at once",
				b.Name, b.MaxInFlight)
		}
		if b.MaxInFlight > c.Connections.MaxPerBackend {
			warn("backends: max_in_flight %d of %s exceeds connections.max_per_backend %d, which is reached first", b.MaxInFlight, b.Name,
				c.Connections.MaxPerBackend)
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
