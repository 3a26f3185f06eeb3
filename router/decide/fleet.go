// Package decide decides which backend takes a request. Its functions are pure: they read a view of
// the backends at one moment, what was looked up for the request, and the ledger, and return the
// choice with its reasons. The router takes the view, and accounts for the choice.
package decide

import (
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/health"
	"warmroute/router/ledger"
	"warmroute/router/policy"
)

const (
	defaultStepTokens = 8192 // a scheduler's budget for a step
	// stepShare is how much of a step is sent ahead of it. A whole one would keep the
	// engine as busy, but what waits there longer could have gone elsewhere.
	stepShare = 0.25
	// queuedSeconds is for how much prefill an engine is sent requests at least. Where
	// prefill is fast, that share of a step takes no longer than the decodes beside it, and
	// an engine that never has more is busy for half of the time.
	queuedSeconds = 0.25
	// fullKVUsage is the share of its KV cache that a replica can use for a request to start
	// there at once: beyond it, requests that run would soon preempt each other.
	fullKVUsage = 0.95
	// maxKVUsage is the share of its KV cache up to which a replica is sent requests from the
	// queue. What ends there soon makes room for a little more than it has.
	maxKVUsage = 1.05
	// minFreeKVShare is the share of a KV cache that batch requests leave free.
	minFreeKVShare = 0.2
)

// Fleet is what a decision knows of the backends at one moment.
type Fleet struct {
	Now      time.Time
	Backends []Backend // by slot; those in the view have a Backend

	Rule         policy.Definition
	QueueEnabled bool // requests wait until a backend can start them soon
	Waiting      int  // requests in the queue
	StepTokens   int  // scheduler's budget for a step, as configured; 0: not known
	// LimitsBatch: batch requests start only where there is headroom, since interactive requests
	// were seen recently.
	LimitsBatch bool

	BlockBytes int
	Ledger     *ledger.Ledger      // only read
	Estimates  *estimate.Estimates // only read
	Links      Links               // nil: none are known
}

// Backend is what a decision knows of one backend.
type Backend struct {
	Backend *backends.Backend // nil: it is not in the view; its live state is not read
	Slot    int
	Availability

	NameHash      uint64
	Weight        float64
	MaxInFlight   int // sequences; 0: no bound
	Device        int // backends of the view with the same one share their hardware; 0: it has its own
	KnownInFlight int64
	Missing       backends.EndpointSet // endpoints that the replica lacks
	Retiring      bool
	Load          *backends.Load // nil: not known

	Stalled   bool
	QueueFull bool // it refused a request of late because of its full queue
	Breaker   health.BreakerState
	ProbeDue  bool // its breaker is open, and the next request is to try it

	PrefillRate      float64 // tokens a second
	PrefillRateKnown bool
	MissingHits      float64 // share of the matched tokens that were not cached
	Recomputed       float64 // share of what it computed lately that had been evicted from its cache
	ledger.Figures
	ExternalRequests, ExternalTokens float64 // of other clients; tokens are those that wait

	// Of a round of the queue.
	Claimed Claim
	Room    float64 // uncached tokens that it could be sent
}

// Availability is whether a backend accepts requests at all.
type Availability struct {
	State    backends.State
	Stopping bool // its replica is about to stop
	Asleep   bool
}

// IsAvailable reports whether the backend accepts requests.
func (a *Availability) IsAvailable() bool {
	return a.State == backends.Ready && !a.Stopping && !a.Asleep
}

// Claim is what queued requests that cannot be sent yet claim of a backend for one
// round: nothing behind them may take it.
type Claim struct {
	Uncached, KV float64 // tokens
	Prefill      float64 // seconds that the uncached ones take
	Sequences    int64
}

// Find returns the view of a backend; nil if it is not in the fleet.
func (f *Fleet) Find(b *backends.Backend) *Backend {
	if b.Slot < len(f.Backends) {
		if v := &f.Backends[b.Slot]; v.Backend == b {
			return v
		}
	}
	return nil
}

// IsAvailable reports whether a backend accepts requests.
func (f *Fleet) IsAvailable(b *backends.Backend) bool {
	v := f.Find(b)
	return v != nil && v.IsAvailable()
}

// HasAvailable reports whether a backend in the view accepts requests.
func (f *Fleet) HasAvailable() bool {
	return slices.ContainsFunc(f.Backends, func(b Backend) bool { return b.Backend != nil && b.IsAvailable() })
}

// engines returns how many data-parallel engines the replica has, at least 1.
func (b *Backend) engines() int {
	if b.Load == nil {
		return 1
	}
	return max(1, b.Load.Engines)
}

// exceedsMaxInFlight reports whether b may not have so many more sequences. One request
// alone always may, whatever it counts for.
func (b *Backend) exceedsMaxInFlight(moreSequences int64) bool {
	return b.MaxInFlight > 0 && b.KnownInFlight > 0 && b.KnownInFlight+moreSequences+b.Claimed.Sequences > int64(b.MaxInFlight)
}

// freeSequences returns how many more sequences a backend may have by its MaxInFlight, without those that
// were claimed in this round.
func (b *Backend) freeSequences() int64 {
	return int64(b.MaxInFlight) - b.KnownInFlight - b.Claimed.Sequences
}

// ourQueuedTokens returns the tokens that were sent and are not yet computed, with those that were claimed.
func (b *Backend) ourQueuedTokens() float64 { return b.QueuedTokens + b.Claimed.Uncached }

// fitsKV reports whether so many tokens fit beside those in use into the share of a backend's
// cache that queued requests are sent to.
func (b *Backend) fitsKV(tokens float64) bool {
	return b.Capacity == 0 || b.UsedKVTokens+b.Claimed.KV+tokens <= maxKVUsage*float64(b.Capacity)
}

// isWaitingForKV reports whether requests wait in the replica because there is no room in its cache.
func (b *Backend) isWaitingForKV() bool { return b.NearlyFull && b.HasWaiting }

// UpdateRoom sets how many uncached tokens a backend could be sent now, after what
// was claimed in this round; 0 for none.
func (f *Fleet) UpdateRoom(b *Backend) { b.Room = f.roomOf(b) }

func (f *Fleet) roomOf(b *Backend) (uncachedTokens float64) {
	switch {
	case b.Backend == nil || !b.IsAvailable() || b.exceedsMaxInFlight(1):
		return 0
	case !f.QueueEnabled || b.KnownInFlight == 0:
		return math.Inf(1)
	case b.isWaitingForKV() || !b.fitsKV(0):
		return 0
	}
	return f.stepRoom(b)
}

// stepRoom returns how many uncached tokens may be added to what is queued, of
// ours and of other clients, for the next step of a backend's engines. When fewer requests of
// ours are queued than it has engines any number may: other clients may always have something
// queued. So it is while the prefill rate is unknown: what is queued would be worked off too
// slowly in our account, and an engine that is faster than thought would be idle.
func (f *Fleet) stepRoom(b *Backend) (uncachedTokens float64) {
	configured := f.StepTokens > 0
	engines := b.engines()
	if b.Claimed.Uncached == 0 && b.Pending < engines || !configured && !b.PrefillRateKnown {
		return math.Inf(1)
	}
	if f.Rule.WaitsForIdle {
		return 0
	}
	stepTokens := defaultStepTokens
	if configured {
		stepTokens = f.StepTokens
	}
	most := stepShare * float64(stepTokens)
	if !configured {
		most = max(most, queuedSeconds*f.Estimates.Step(b.Slot).Rate)
	}
	return max(0, most*float64(engines)-b.ourQueuedTokens()-b.ExternalTokens)
}
