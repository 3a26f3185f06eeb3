package decide

import (
	"math"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// DisaggregationSettings are those of requests of which one replica does the prefill and another one the decode.
type DisaggregationSettings struct {
	Queue             bool          // requests wait while no replica for the other part is ready; else one replica serves them whole
	Lease             time.Duration // for how long a replica keeps a prompt's KV cache for another one
	MinUncachedTokens int           // that a request to be split has at least; 0: the cost decides alone
}

// Whether a request is split, or why not.
const (
	SplitDone         = "split"
	SplitCheaper      = "cheaper"      // whole it costs less
	SplitUnsplittable = "unsplittable" // its replica has to serve it whole
	SplitNoPrefill    = "no_prefill"   // no replica for prefill is ready that pairs with its replica
	SplitFull         = "full"         // those that are have no room
	SplitNoDecode     = "no_decode"    // no replica for decode is ready
	SplitLate         = "late"         // its replica might begin too late to read the KV cache
)

// SplitCost is what a request costs whole and split, in seconds: its time to the first token, and by how much its prefill
// delays the outputs beside it, of all of them together.
type SplitCost struct{ Whole, Split float64 }

// Split is the decision whether one replica does the prefill of a request for another one.
type Split struct {
	Result            string           // one of the constants; "" in a fleet without replicas for one part
	Prefill           *Backend         // that does the prefill; nil: the request is not split
	Candidate         policy.Candidate // what Prefill is to the request
	Cost              SplitCost        // with the best replica for prefill; 0 if there is none
	KVTransferSeconds float64
}

// DecideSplit decides whether the request that decode is chosen for is split, and who does its prefill.
func (f *Fleet) DecideSplit(q *Query, decode Choice) (s Split) {
	d := decode.Backend
	if q.PrefilledOn != nil {
		return Split{Result: SplitDone}
	}
	switch {
	case d.Role == backends.RoleBoth && !(f.HasPrefillReplica && f.hasPrefillReplica(q)):
		return Split{}
	case d.Role == backends.RolePrefill:
		return Split{Result: SplitNoDecode}
	case !q.Splittable, d.ProbeDue: // only a request that is sent at once keeps others from probing it too
		return Split{Result: SplitUnsplittable}
	case f.IsTooLong(q.Request, d), decode.Candidate.UncachedTokens < float64(f.Disaggregation.MinUncachedTokens):
		return Split{Result: SplitCheaper}
	}
	s = Split{Result: SplitNoPrefill, Cost: SplitCost{Whole: wholeCost(decode.Candidate), Split: math.Inf(1)}}
	s.KVTransferSeconds = f.Estimates.KVTransferSeconds(d.Slot, decode.Candidate.UncachedTokens)
	for _, b := range q.Backends {
		p := f.Find(b)
		if !f.canPrefillFor(q, p, d) || f.avoidsPair(p, d) {
			continue
		}
		var c policy.Candidate
		f.fillCandidate(&c, q, p)
		if f.BlockedBy(q, Choice{Backend: p, Candidate: &c}) != NotBlocked {
			s.Result = SplitFull
			continue
		}
		if cost := splitCost(&c, decode.Candidate, s.KVTransferSeconds); cost < s.Cost.Split {
			s.Prefill, s.Candidate, s.Cost.Split = p, c, cost
		}
	}
	switch {
	case s.Prefill == nil:
		s.Cost, s.KVTransferSeconds = SplitCost{}, 0
		return s
	case s.Cost.Split >= s.Cost.Whole && f.Disaggregation.MinUncachedTokens == 0:
		s.Result = SplitCheaper
	case decode.Candidate.QueuedSeconds > (f.Disaggregation.Lease / 2).Seconds():
		s.Result = SplitLate
	default:
		s.Result = SplitDone
		return s
	}
	s.Prefill = nil
	return s
}

// wholeCost returns what a request costs on a candidate that serves it whole.
func wholeCost(c *policy.Candidate) float64 {
	return c.QueuedSeconds + c.FetchSeconds + c.PrefillSeconds*(1+c.InFlight/c.Engines)
}

// splitCost returns what a request costs whose prefill one candidate does for another one. That one works on what was sent
// to it before meanwhile.
func splitCost(prefill, decode *policy.Candidate, kvTransferSeconds float64) float64 {
	first := prefill.QueuedSeconds + prefill.FetchSeconds + prefill.PrefillSeconds + kvTransferSeconds
	return max(first, decode.QueuedSeconds) + prefill.PrefillSeconds*prefill.InFlight/prefill.Engines
}

// hasPrefillReplica reports whether a replica for prefill serves the request's model, ready or not.
func (f *Fleet) hasPrefillReplica(q *Query) bool {
	for _, b := range q.Backends {
		if v := f.Find(b); v != nil && v.Role == backends.RolePrefill {
			return true
		}
	}
	return false
}

// canPrefillFor reports whether p is a replica for prefill that can do that of a request now, for d.
func (f *Fleet) canPrefillFor(q *Query, p, d *Backend) bool {
	if p == nil || p.Role != backends.RolePrefill || !p.KVForm.PairsWith(d.KVForm) {
		return false
	}
	filter := f.findFilter(q, p)
	return filter == nil || filter == &otherRoleFilter || filter.rank == rankProbe
}

// avoidsPair reports whether transfers of KV from p to d have failed so often that requests are not split between them now.
func (f *Fleet) avoidsPair(p, d *Backend) bool {
	until, avoided := f.AvoidedPairs[Pair{p.Backend, d.Backend}]
	return avoided && f.Now.Before(until)
}

// hasPartner reports whether a replica for decode has one for prefill that can do that of a request now.
func (f *Fleet) hasPartner(q *Query, d *Backend) bool {
	for _, b := range q.Backends {
		if f.canPrefillFor(q, f.Find(b), d) {
			return true
		}
	}
	return false
}

// hasTooShortPartners reports whether there are replicas for prefill that pair with a replica for decode, ready or not, and
// the context of each may be too short for the request: it is not worth waiting for one.
func (f *Fleet) hasTooShortPartners(q *Query, d *Backend) bool {
	found := false
	for _, b := range q.Backends {
		p := f.Find(b)
		if p == nil || p.Role != backends.RolePrefill || !p.KVForm.PairsWith(d.KVForm) {
			continue
		}
		if found = true; !f.exceedsLength(q.Request, p) && !f.mayBeTooShort(q, p) {
			return false
		}
	}
	return found
}

// isForPrefillOnly reports whether a request rather waits for another replica than be served by this one, whether others are
// ready or not.
func (f *Fleet) isForPrefillOnly(req *Request, b *Backend) bool {
	return f.Disaggregation.Queue && b.Role == backends.RolePrefill && !req.NoEngine && !req.Stored
}

// waitsForRole reports whether requests rather wait than be served by the backend: it is for another part of them, or for
// the decode of what no ready replica can do the prefill of.
func (f *Fleet) waitsForRole(q *Query, b *Backend) bool {
	switch {
	case !f.Disaggregation.Queue || q.NoEngine || q.Stored || q.PrefilledOn != nil:
		return false
	case f.isForPrefillOnly(q.Request, b):
		return true
	}
	return b.Role == backends.RoleDecode && q.Splittable && !f.hasPartner(q, b) && !f.hasTooShortPartners(q, b)
}
