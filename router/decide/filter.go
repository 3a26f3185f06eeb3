package decide

import (
	"errors"
	"slices"

	"warmroute/backends"
	"warmroute/router/health"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

var (
	// ErrNoneReady means that no backend that serves the model may take the request
	// now, those already tried excluded.
	ErrNoneReady = errors.New("no backend is ready")

	// ErrMaxInFlight means that every candidate has reached its maximum number of
	// requests in flight (Options.MaxInFlight).
	ErrMaxInFlight = errors.New("every candidate backend is at its max_in_flight limit")

	// ErrReplicasFull means that every candidate refuses requests because its queue is full.
	ErrReplicasFull = errors.New("the queue of every candidate replica is full")

	// ErrEndpointMissing means that every backend that serves the model is known to lack the endpoint.
	ErrEndpointMissing = errors.New("no backend that serves the model has the endpoint")

	// errNoHeadroom means that every candidate of a low-priority request is needed for interactive ones.
	errNoHeadroom = errors.New("low-priority requests wait while interactive requests need the replicas")
)

// rank orders the backends that can accept a request. Only those of the lowest rank
// present are candidates, so a filter that applies to all of them has no effect.
type rank int

const (
	rankProbe     rank = iota - 1 // must be tried
	rankPreferred                 // no filter applies
	rankMayBeTooShort
	rankOtherRole
	rankFailing
	rankTooLong
	rankStalled
	rankExcluded // never a candidate
)

// filter is a reason why a backend is not a candidate, or is one only if no backend of a lower rank exists.
type filter struct {
	name        string
	description string // follows the backend's name in an explanation
	rank        rank
	applies     func(*Fleet, *Query, *Backend) bool
}

// removedFilter applies to backends that are not in the fleet any more.
var removedFilter = filter{name: "removed", rank: rankExcluded, description: "was removed from the configuration"}

// availabilityFilters exclude backends that accept no request. They do not depend on the request.
var availabilityFilters = []filter{
	{name: "unready", rank: rankExcluded, description: "is not ready",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.State == backends.Down }},
	{name: "draining", rank: rankExcluded, description: "is draining",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.State == backends.Draining }},
	{name: "stopping", rank: rankExcluded, description: "is about to stop",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.Stopping }},
	{name: "asleep", rank: rankExcluded, description: "is asleep",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.Asleep }},
}

// maxInFlightFilter is that of the backends that would be candidates without their MaxInFlight.
var maxInFlightFilter = filter{name: "max_in_flight", rank: rankExcluded, description: "is at its max_in_flight limit",
	applies: func(_ *Fleet, q *Query, b *Backend) bool { return b.exceedsMaxInFlight(q.CountedSequences()) }}

// queueFullFilter is that of the backends that refuse requests because their queue is full, where requests wait here instead.
var queueFullFilter = filter{name: "queue_full", rank: rankExcluded, description: "refuses requests because its queue is full",
	applies: func(f *Fleet, q *Query, b *Backend) bool { return f.HasQueue && b.QueueFull && !q.NoEngine }}

// otherRoleFilter is that of replicas for prefill. It comes last, so that those to which another filter applies are ranked by that.
var otherRoleFilter = filter{name: "role", rank: rankOtherRole, description: "is for prefill",
	applies: func(_ *Fleet, q *Query, b *Backend) bool { return b.Role == backends.RolePrefill && !q.Stored }}

// requestFilters rank an available backend for a request. The first that applies counts.
var requestFilters = []*filter{
	{name: "tried", rank: rankExcluded, description: "was tried already",
		applies: func(_ *Fleet, q *Query, b *Backend) bool { return slices.Contains(q.Tried, b.Backend) }},
	{name: "endpoint_missing", rank: rankExcluded, description: "does not serve the endpoint",
		applies: func(_ *Fleet, q *Query, b *Backend) bool { return b.Missing.Has(q.Endpoint) }},
	{name: "kv_transfer", rank: rankExcluded, description: "cannot read the KV cache of the replica that has done the prefill",
		applies: func(f *Fleet, q *Query, b *Backend) bool {
			if q.PrefilledOn == nil {
				return false
			}
			p := f.Find(q.PrefilledOn)
			return p == nil || b.Role == backends.RolePrefill || !b.KVForm.PairsWith(p.KVForm)
		}},
	{name: "context_length", rank: rankExcluded, description: "has too short a context for the request",
		applies: func(f *Fleet, q *Query, b *Backend) bool { return f.isTooShort(q.Request, b) }},
	&maxInFlightFilter,
	&queueFullFilter,
	{name: "stalled", rank: rankStalled, description: "is stalled",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.Stalled }},
	{name: "probe", rank: rankProbe, description: "is probed first to check whether it has recovered",
		applies: (*Fleet).shouldProbe},
	{name: "prompt_too_long", rank: rankTooLong, description: "is too small for the prompt",
		applies: func(f *Fleet, q *Query, b *Backend) bool { return f.Policy.FiltersLength && f.IsTooLong(q.Request, b) }},
	{name: "queue_full", rank: rankFailing, description: "refuses requests because its queue is full",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.QueueFull }},
	{name: "breaker_open", rank: rankFailing, description: "has an open circuit breaker",
		applies: func(_ *Fleet, _ *Query, b *Backend) bool { return b.Breaker != health.BreakerClosed }},
	{name: "context_length_near", rank: rankMayBeTooShort, description: "may have too short a context for the request",
		applies: (*Fleet).mayBeTooShort},
	&otherRoleFilter,
}

// roleWaitFilter is that of backends for which requests rather wait, by disaggregation.fallback.
var roleWaitFilter = filter{name: "role_wait", rank: rankExcluded, description: "is for another part of requests (disaggregation.fallback)",
	applies: (*Fleet).waitsForRole}

// headroomFilter applies to low-priority requests, and only to the candidates that the other filters leave.
var headroomFilter = filter{name: "headroom", description: "is reserved for interactive requests"}

// findFilter returns the first filter that applies to a backend; nil for none. b is nil if it is
// not in the fleet.
func (f *Fleet) findFilter(q *Query, b *Backend) *filter {
	switch {
	case b == nil:
		return &removedFilter
	case q.IsStoredLookup():
		return nil
	case !b.IsAvailable():
		for i := range availabilityFilters {
			if availabilityFilters[i].applies(f, q, b) {
				return &availabilityFilters[i]
			}
		}
	}
	for _, filter := range requestFilters {
		if filter.applies(f, q, b) {
			return filter
		}
	}
	return nil
}

// findCandidateFilter is findFilter for a backend that is to serve the request or its decode.
func (f *Fleet) findCandidateFilter(q *Query, b *Backend) *filter {
	filter := f.findFilter(q, b)
	if (filter == nil || filter.rank < rankExcluded) && b != nil && b.Role != backends.RoleBoth && f.waitsForRole(q, b) {
		return &roleWaitFilter
	}
	return filter
}

// shouldProbe reports whether the request is to try a backend whose breaker is open. A
// request that failed elsewhere is not risked.
func (f *Fleet) shouldProbe(q *Query, b *Backend) bool {
	return b.ProbeDue && !b.QueueFull && len(q.Tried) == 0 && !q.NoEngine && !f.IsTooLong(q.Request, b) && !f.mayBeTooShort(q, b)
}

// Candidates are the backends that may take a request. A value is reused for the next one.
type Candidates struct {
	list      []policy.Candidate
	backends  []*backends.Backend // of list
	full      []*backends.Backend // at their MaxInFlight, or their queue is full: no other filter before these excludes them
	fleetRate float64             // tokens a second that full and the candidates prefill together, those without headroom included
	request   policy.Request      // of the last Choose
}

// Filter finds the candidates: the backends that may take the request, less those
// that others are preferred to. When there are none it returns why.
func (f *Fleet) Filter(q *Query, c *Candidates) error {
	c.list, c.backends, c.full = c.list[:0], c.backends[:0], c.full[:0]
	none, best := ErrNoneReady, rankStalled
	for _, b := range q.Backends {
		v, rank := f.Find(b), rankPreferred
		if filter := f.findCandidateFilter(q, v); filter != nil {
			rank = filter.rank
			switch filter {
			case &maxInFlightFilter:
				none, c.full = ErrMaxInFlight, append(c.full, b)
			case &queueFullFilter:
				c.full = append(c.full, b)
				if none == ErrNoneReady {
					none = ErrReplicasFull
				}
			}
		}
		if rank > best {
			continue
		}
		if rank < best {
			best = rank
			c.list, c.backends = c.list[:0], c.backends[:0]
		}
		c.backends = append(c.backends, b)
		c.list = append(c.list, policy.Candidate{})
		f.fillCandidate(&c.list[len(c.list)-1], q, v)
	}
	c.fleetRate = f.totalPrefillRate(c)
	if len(c.list) == 0 {
		return none
	}
	return nil
}

// totalPrefillRate returns how many tokens the candidates and the full backends prefill together in a second.
func (f *Fleet) totalPrefillRate(c *Candidates) float64 {
	sum := 0.0
	for i := range c.list {
		sum += c.list[i].PrefillRate
	}
	for _, b := range c.full {
		sum += f.Backends[b.Slot].PrefillRate
	}
	return sum
}

// NeedsHeadroom reports whether a request is a low-priority request that starts only where
// there is headroom. One that was promoted starts anywhere.
func (f *Fleet) NeedsHeadroom(req *Request, promoted bool) bool {
	return f.LimitsLowPriority && req.Class() == queue.LowPriority && !promoted && !req.NoEngine
}

// HasLowPriorityRoom reports whether a backend may start a low-priority request: by its interactive load it has
// room, and shares itself with that. Then it has nothing else to prefill.
func (b *Backend) HasLowPriorityRoom(hasRoom, shared bool) bool {
	return hasRoom && (!shared || b.QueuedTokens == 0 && b.fitsKV(minFreeKVShare*float64(b.Capacity)))
}

// FilterByHeadroom keeps the candidates on which a low-priority request may start.
func (c *Candidates) FilterByHeadroom(hasRoom func(slot int) bool) error {
	kept := 0
	for i, b := range c.backends {
		if hasRoom(b.Slot) {
			c.backends[kept], c.list[kept] = b, c.list[i]
			kept++
		}
	}
	c.backends, c.list = c.backends[:kept], c.list[:kept]
	if kept == 0 {
		return errNoHeadroom
	}
	return nil
}

// freestFull returns the backend at its MaxInFlight with the most free sequences, which there is.
func (f *Fleet) freestFull(c *Candidates) (freest *Backend) {
	for _, b := range c.full {
		if v := &f.Backends[b.Slot]; v.MaxInFlight > 0 && (freest == nil || v.freeSequences() > freest.freeSequences()) {
			freest = v
		}
	}
	return freest
}

// IsEndpointMissing reports whether all backends that serve a request's model, ready or
// not, are known to lack its endpoint.
func (f *Fleet) IsEndpointMissing(req *Request) bool {
	lacking := 0
	for _, b := range req.Backends {
		switch v := f.Find(b); {
		case v == nil || v.Retiring:
		case !v.Missing.Has(req.Endpoint):
			return false
		default:
			lacking++
		}
	}
	return lacking > 0
}

// HasUntriedBackend reports whether a backend that was not tried, and has the endpoint as far as is known, may
// take the request later: where all have failed it, waiting would not help.
func (f *Fleet) HasUntriedBackend(req *Request, tried []*backends.Backend) bool {
	return slices.ContainsFunc(req.Backends, func(b *backends.Backend) bool {
		v := f.Find(b)
		return v != nil && !v.Retiring && !slices.Contains(tried, b) && !v.Missing.Has(req.Endpoint) && !f.isForPrefillOnly(req, v) &&
			!f.isTooShort(req, v)
	})
}

// NoneReady reports whether no backend that could take a queued request is ready and makes progress.
func (f *Fleet) NoneReady(req *Request, tried []*backends.Backend) bool {
	return !slices.ContainsFunc(req.Backends, func(b *backends.Backend) bool {
		v := f.Find(b)
		return v != nil && v.IsAvailable() && !v.Stalled && !slices.Contains(tried, b) && !v.Missing.Has(req.Endpoint) &&
			!f.isForPrefillOnly(req, v) &&
			!f.isTooShort(req, v)
	})
}
