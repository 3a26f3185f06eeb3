package router

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/queue"
)

var (
	// ErrMaxInFlight means that every candidate has reached its maximum number of
	// requests in flight (Options.MaxInFlight).
	ErrMaxInFlight = errors.New("every candidate backend is at its max_in_flight limit")

	// ErrEndpointMissing means that every backend that serves the model is known to lack
	// the endpoint.
	ErrEndpointMissing = errors.New("no backend that serves the model has the endpoint")

	// errNoHeadroom means that every candidate of a batch request is needed for
	// interactive ones.
	errNoHeadroom = errors.New("batch requests wait while interactive requests need the replicas")
)

// minFreeKVShare is the share of a KV cache that batch requests leave free.
const minFreeKVShare = 0.2

// rank orders the backends that can accept a request. Only those of the lowest rank
// present are candidates, so a filter that applies to all of them has no effect.
type rank int

const (
	rankProbe     rank = iota - 1 // must be tried
	rankPreferred                 // no filter applies
	rankFailing
	rankTooLong
	rankStalled
	rankExcluded // never a candidate
)

// filter is a reason why a backend is not a candidate, or is one only if no backend of
// a lower rank exists.
type filter struct {
	name        string
	description string // follows the backend's name in an explanation
	rank        rank
	state       ConditionState                        // of a backend to which it applies; "": unaffected
	err         error                                 // why no backend takes the request, if this is the reason; nil: ErrNoneReady
	applies     func(*Router, *backends.Backend) bool // to the request in Router.decision
}

// availabilityFilters exclude backends that accept no request. They do not depend on
// the request.
var availabilityFilters = []filter{
	{name: "removed", rank: rankExcluded, state: Draining, description: "was removed from the configuration",
		applies: func(r *Router, b *backends.Backend) bool { return !r.has(b) }},
	{name: "unready", rank: rankExcluded, state: Down, description: "is not ready",
		applies: func(r *Router, b *backends.Backend) bool { return r.liveStateOf(b).state == backends.Down }},
	{name: "draining", rank: rankExcluded, state: Draining, description: "is draining",
		applies: func(r *Router, b *backends.Backend) bool { return r.liveStateOf(b).state == backends.Draining }},
	{name: "stopping", rank: rankExcluded, state: Stopping, description: "is about to stop",
		applies: func(r *Router, b *backends.Backend) bool { return r.states[b.Slot].health.isStopping(r.now) }},
	{name: "asleep", rank: rankExcluded, state: Asleep, description: "is asleep",
		applies: func(r *Router, b *backends.Backend) bool { l := r.liveStateOf(b).load; return l != nil && l.Asleep }},
}

// requestFilters rank an available backend for the request in Router.decision. The
// first that applies counts.
var requestFilters = []filter{
	{name: "tried", rank: rankExcluded, description: "was tried already",
		applies: func(r *Router, b *backends.Backend) bool { return slices.Contains(r.decision.tried, b) }},
	{name: "endpoint_missing", rank: rankExcluded, description: "does not serve the endpoint",
		applies: func(r *Router, b *backends.Backend) bool {
			return b.LacksEndpoint(r.decision.req.Endpoint, r.decision.now)
		}},
	{name: "max_in_flight", rank: rankExcluded, err: ErrMaxInFlight, description: "is at its max_in_flight limit",
		applies: func(r *Router, b *backends.Backend) bool {
			return r.exceedsMaxInFlight(b, r.decision.req.sequences()+r.states[b.Slot].claimed.sequences)
		}},
	{name: "stalled", rank: rankStalled, description: "is stalled",
		applies: func(r *Router, b *backends.Backend) bool {
			load := r.liveStateOf(b).load
			_, external := r.externalLoad(load, r.decision.now)
			return r.updateStalled(b, load, external, r.decision.now)
		}},
	{name: "probe", rank: rankProbe, description: "is probed first to check whether it has recovered",
		applies: (*Router).shouldProbe},
	{name: "prompt_too_long", rank: rankTooLong, description: "is too small for the prompt",
		applies: func(r *Router, b *backends.Backend) bool {
			return r.policy.definition.FiltersLength && r.isTooLong(&r.decision.req, b.Slot)
		}},
	{name: "queue_full", rank: rankFailing, description: "refused a request because its queue is full",
		applies: func(r *Router, b *backends.Backend) bool {
			return r.states[b.Slot].health.isQueueFull(r.decision.now)
		}},
	{name: "breaker_open", rank: rankFailing, description: "has an open circuit breaker",
		applies: func(r *Router, b *backends.Backend) bool { return r.states[b.Slot].health.breaker.open }},
}

// headroomFilter applies to batch requests, and only to the candidates that the
// other filters leave.
var headroomFilter = filter{name: "headroom", description: "is reserved for interactive requests"}

// findFilter returns the first filter that applies to a backend; nil for none.
func (r *Router) findFilter(b *backends.Backend) *filter {
	if r.decision.req.retrieves() && r.has(b) {
		return nil
	}
	if f := r.findAvailabilityFilter(b); f != nil {
		return f
	}
	for i := range requestFilters {
		if requestFilters[i].applies(r, b) {
			return &requestFilters[i]
		}
	}
	return nil
}

// findAvailabilityFilter returns the filter by which a backend takes no request at all;
// nil when it is available.
func (r *Router) findAvailabilityFilter(b *backends.Backend) *filter {
	for i := range availabilityFilters {
		if availabilityFilters[i].applies(r, b) {
			return &availabilityFilters[i]
		}
	}
	return nil
}

func (r *Router) isAvailable(b *backends.Backend) bool { return r.findAvailabilityFilter(b) == nil }

// exceedsMaxInFlight reports whether b may not have so many more sequences. One request
// alone always may, whatever it counts for.
func (r *Router) exceedsMaxInFlight(b *backends.Backend, moreSequences int64) bool {
	most := r.liveStateOf(b).options.MaxInFlight
	if most <= 0 {
		return false
	}
	n := b.KnownInFlight()
	return n > 0 && n+moreSequences > int64(most)
}

// shouldProbe reports whether the request is to try a backend whose breaker is open. A
// request that failed elsewhere is not risked.
func (r *Router) shouldProbe(b *backends.Backend) bool {
	d, h := &r.decision, r.states[b.Slot].health
	return h.breaker.isProbeDue(d.now) && !h.isQueueFull(d.now) && len(d.tried) == 0 && !d.req.NoEngine && !r.isTooLong(&d.req, b.Slot)
}

// isTooLong reports whether a replica will certainly refuse the request: its prompt is
// longer than the model takes, or than the whole cache. What will be refused neither takes
// the place of others in the index nor waits for room. Half of the media's learned tokens
// count, because items differ in size; a prompt is never too long while these are not known.
func (r *Router) isTooLong(req *Request, slot int) bool {
	limit := req.MaxPromptTokens
	if c := r.states[slot].kv.capacity; c > 0 && (limit == 0 || c < limit) {
		limit = c
	}
	bytes := len(req.Blocks) * r.blockBytes
	if limit == 0 || bytes == 0 { // a prompt that the engine truncates has no blocks
		return false
	}
	if req.Media {
		media := req.mediaCounts()
		if len(req.MediaItems) == 0 || !r.estimates.KnowsMediaTokens(req.Model, &media) {
			return false
		}
		sizes := r.estimates.TokenSizes(req.Model, req.TextClass)
		bytes -= len(req.MediaItems) * prompt.MediaBytes
		limit -= int(sizes.CountMediaTokens(&media) / 2)
	}
	return r.estimates.ExceedsTokens(req.Model, req.TextClass, bytes, limit)
}

// isTooLongForAll reports whether all that serve its model will refuse the request.
func (r *Router) isTooLongForAll(req *Request) bool {
	for _, b := range req.Backends {
		if !r.has(b) || !r.isTooLong(req, b.Slot) {
			return false
		}
	}
	return true
}

// isEndpointMissing reports whether all backends that serve a request's model, ready or
// not, are known to lack its endpoint.
func (r *Router) isEndpointMissing(req *Request, now time.Time) bool {
	lacking := 0
	for _, b := range req.Backends {
		switch {
		case !r.has(b) || b.Retiring():
		case !b.LacksEndpoint(req.Endpoint, now):
			return false
		default:
			lacking++
		}
	}
	return lacking > 0
}

// batchNeedsHeadroom reports whether a request is a batch request that starts only where
// there is headroom, since interactive requests were seen recently. One that was
// promoted starts anywhere.
func (r *Router) batchNeedsHeadroom(req *Request, promoted bool, now time.Time) bool {
	return r.isQueueEnabled() && r.settings.Queue.BatchSlowdown > 0 && req.class() == queue.Batch && !promoted && !req.NoEngine &&
		r.interactive.HasRecentRequests(now)
}

// batchHeadroom returns how much room some backends have for batch requests.
func (r *Router) batchHeadroom(list []*backends.Backend, now time.Time) queue.Headroom {
	return r.interactive.ReserveBackends(r.settings.Queue.BatchSlowdown, now, func(yield func(*queue.ClassLoad) bool) {
		for _, b := range list {
			if r.isAvailable(b) && !yield(&r.states[b.Slot].classes) {
				return
			}
		}
	})
}

// canStartBatch reports whether a backend has room for a batch request beside its
// interactive ones. Where it shares itself with those, it has nothing else to prefill.
func (r *Router) canStartBatch(slot int, h queue.Headroom, now time.Time) bool {
	s := &r.states[slot]
	admits, shared := s.classes.CheckBatchRoom(h, now)
	return admits && (!shared || s.load.queuedTokens(now, r.estimates.PrefillRate(slot))+s.claimed.uncached == 0 &&
		r.fitsKV(slot, minFreeKVShare*float64(s.kv.capacity), now))
}

// filterCandidatesByHeadroom keeps the candidates on which a batch request may start.
func (r *Router) filterCandidatesByHeadroom() error {
	d := &r.decision
	h := r.batchHeadroom(d.req.Backends, d.now)
	kept := 0
	for i, b := range d.backends {
		if r.canStartBatch(b.Slot, h, d.now) {
			d.backends[kept], d.candidates[kept] = b, d.candidates[i]
			kept++
		}
	}
	d.backends, d.candidates = d.backends[:kept], d.candidates[:kept]
	if kept == 0 {
		return errNoHeadroom
	}
	return nil
}
