package main

import (
	"fmt"
	"slices"
	"time"

	"warmroute/router/policy"
)

func (c *Config) checkRouting(f *faults) {
	r := &c.Routing
	within(f, "routing.hold.requests", r.Hold.Requests, 0, 1<<20)
	within(f, "routing.hold.batch_requests", r.Hold.BatchRequests, 0, 1<<20)
	within(f, "routing.batch_slowdown", r.BatchSlowdown, 0, 10)
	if r.Hold.Requests > 0 {
		within(f, "routing.hold.bytes", r.Hold.Bytes, 1<<10, 1<<50)
		within(f, "routing.hold.batch_bytes", r.Hold.BatchBytes, 1<<10, 1<<50)
		if r.Hold.Time < time.Millisecond {
			f.add("routing.hold.time", "%v is too short; give it 1ms or more, or set routing.hold.requests to 0 to hold none", r.Hold.Time)
		}
	}
	if r.StepTokens != 0 {
		within(f, "routing.step_tokens", r.StepTokens, 64, 1<<20)
	}
	if !isHeaderName(r.SessionHeader) {
		f.add("routing.session_header", "%q is no name of a header; use letters, digits and -, or \"\" for none", r.SessionHeader)
	}
	within(f, "routing.match_ratio", r.MatchRatio, 0, 1)
	within(f, "routing.imbalance_abs", r.ImbalanceAbs, 0, 1<<20)
	if r.ImbalanceRatio != 0 {
		within(f, "routing.imbalance_ratio", r.ImbalanceRatio, 1, 1<<20)
	}
	if r.LoadFactor != 0 {
		within(f, "routing.load_factor", r.LoadFactor, 1, 1<<20)
	}
}

// routingWarnings lists what of routing's settings has no effect, or one that is seldom meant.
func (c *Config) routingWarnings() (warnings []string) {
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	r := &c.Routing
	chosen, _ := policy.Lookup(r.Policy) // an unknown one is an error elsewhere
	for _, gate := range []struct {
		key   string
		value float64
	}{
		{"routing.match_ratio", r.MatchRatio}, {"routing.imbalance_abs", r.ImbalanceAbs},
		{"routing.imbalance_ratio", r.ImbalanceRatio}, {"routing.load_factor", r.LoadFactor},
	} {
		if gate.value != 0 && !chosen.Reads(gate.key) {
			warn("%s: %v changes nothing, policy %s has no such gate; drop it or choose another policy", gate.key, gate.value, r.Policy)
		}
	}
	if c.SLO.TTFT > 0 && !chosen.Reads("slo.ttft") {
		warn("slo.ttft: %v changes nothing, policy %s does not look at it; drop it or choose prefix", c.SLO.TTFT, r.Policy)
	}
	if r.StepTokens > 0 && (!chosen.UsesQueue || r.Hold.Requests == 0) {
		warn("routing.step_tokens: %d changes nothing, it is for requests that policy prefix holds (routing.hold.requests); drop it", r.StepTokens)
	}
	if at := slices.IndexFunc(c.Keys, func(k KeyConfig) bool { return k.QueueTime > 0 }); at >= 0 && r.Hold.Requests == 0 {
		warn("keys[%d].queue_time: %v changes nothing, no request waits (routing.hold.requests); drop it or let requests wait", at, c.Keys[at].QueueTime)
	}
	if r.Hold.Requests > 0 && r.Hold.Bytes > c.Limits.BodyBytesTotal {
		warn("routing.hold.bytes: %v exceeds limits.body_bytes_total %v, which ends first", r.Hold.Bytes, c.Limits.BodyBytesTotal)
	}
	if r.Hold.Requests > 0 && r.Hold.Bytes < c.Limits.BodyBytes {
		warn("routing.hold.bytes: %v is below limits.body_bytes %v: requests larger than it cannot wait for a replica and get 429 under load",
			r.Hold.Bytes, c.Limits.BodyBytes)
	}
	for _, b := range c.Backends {
		if b.MaxInFlight > 0 && r.Hold.Requests == 0 {
			warn("backends: %s has max_in_flight %d and nothing is held (routing.hold.requests): requests beyond it get 429 at once", b.Name, b.MaxInFlight)
		}
		if b.MaxInFlight > c.Connections.MaxPerBackend {
			warn("backends: max_in_flight %d of %s exceeds connections.max_per_backend %d, which ends first", b.MaxInFlight, b.Name, c.Connections.MaxPerBackend)
		}
	}
	return warnings
}
