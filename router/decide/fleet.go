// Package decide decides which backend takes a request. Its functions are pure: they read a view of
// the backends at one moment, what was looked up for the request, and the ledger, and return the
// choice with its reasons. The router takes the view, and accounts for the choice.
package decide

import (
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/health"
	"warmroute/router/ledger"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

const (
	// maxSharedQueue is how many seconds of prefill a backend has before it at most, where requests of several tenants
	// or priorities share it: what waits in a replica is served in the order of arrival.
	maxSharedQueue = 2
	// minSharedSequences is how many sequences may wait in a backend that runs as many as it can, where several tenants share it;
	// an eighth of those that it runs may, if that is more.
	minSharedSequences = 2
	// fullKVUsage is the share of its KV cache that a replica can use for a request to start
	// there at once: beyond it, requests that run would soon preempt each other.
	fullKVUsage = 0.95
	// minFreeKVShare is the share of a KV cache that low-priority requests leave free.
	minFreeKVShare = 0.2
)

// Fleet is what a decision knows of the backends at one moment.
type Fleet struct {
	Now      time.Time
	Backends []Backend // by slot; those in the view have a Backend

	Policy       policy.Definition
	HasQueue     bool // requests wait while no backend takes any
	QueueEnabled bool // they wait until a backend can start them soon
	Waiting      int  // requests in the queue
	Shared       bool // requests of several tenants or priorities were seen recently
	// LimitsLowPriority: low-priority requests start only where there is headroom, since interactive requests
	// were seen recently.
	LimitsLowPriority bool

	Disaggregation    DisaggregationSettings
	HasPrefillReplica bool // the role of a backend in the view is backends.RolePrefill

	AvoidedPairs map[Pair]time.Time // whose transfers of KV keep failing, and until when
	// IsDueBefore reports whether a tenant has used no more of its share than another one; nil: none has.
	IsDueBefore func(c queue.Class, tenant, other uint64, now time.Time) bool

	BlockBytes int
	Ledger     *ledger.Ledger      // only read
	Estimates  *estimate.Estimates // only read
	Links      Links               // nil: none are known
}

// Pair is two replicas, of which one reads the KV caches of the other.
type Pair struct{ Prefill, Decode *backends.Backend }

// Backend is what a decision knows of one backend.
type Backend struct {
	Backend *backends.Backend // nil: it is not in the view; its live state is not read
	Slot    int
	Availability

	NameHash      uint64
	KVForm        backends.KVForm
	Weight        float64
	Role          backends.Role
	MaxInFlight   int // sequences; 0: no bound
	Device        int // backends of the view with the same one share their hardware; 0: it has its own
	KnownInFlight int64
	Missing       backends.EndpointSet // endpoints that the replica lacks
	Retiring      bool
	Load          *backends.Load // nil: not known

	Stalled       bool
	SequenceLimit int  // sequences that it runs at a time; 0: unknown
	QueueFull     bool // it refused a request because its queue is full, and would refuse another one
	Breaker       health.BreakerState
	ProbeDue      bool // its breaker is open, and the next request is to try it

	PrefillRate      float64 // tokens a second
	PrefillRateKnown bool
	MissingHits      float64 // share of the matched tokens that were not cached
	RestoredShare    float64 // share of the restored blocks that counts as cached; see RestoredUntil
	RestoredUntil    uint64  // blocks with this last use or an earlier one were restored; 0: all blocks count in full
	Offloading       Offloading
	ledger.Figures
	ExternalRequests, ExternalTokens float64 // of other clients; tokens are those that wait

	// Of a round of the queue.
	Claimed Claim
	HasRoom bool // it could be sent a request
}

// Offloading is what is known of the parts of a backend's cache that are not on its GPU: in host memory, on a disk or in a store.
type Offloading struct {
	Before       uint64  // blocks whose last use was before this are taken to be there only; 0: none are
	FetchSeconds float64 // for each token
	StoreShare   float64 // share of the tokens that only other backends hold which it can fetch from a store
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
	KV        float64 // tokens
	Sequences int64
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

// alignHit returns how many of so many tokens of the prompt the replica can reuse: hits are of whole blocks of its cache.
func (b *Backend) alignHit(q *Query, tokens float64) float64 {
	if b.Load == nil || b.Load.HitAlignment <= 1 {
		return tokens
	}
	return estimate.UsableHitTokens(tokens, q.promptTokens(), float64(b.Load.HitAlignment))
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

// fitsKV reports whether so many tokens fit into a backend's KV cache, beside those in use.
func (b *Backend) fitsKV(tokens float64) bool {
	return b.Capacity == 0 || b.UsedKVTokens+b.Claimed.KV+tokens <= float64(b.Capacity)
}

// isWaitingForKV reports whether requests wait in the replica because there is no room in its cache.
func (b *Backend) isWaitingForKV() bool { return b.NearlyFull && b.HasWaiting }

// queuedSeconds returns for how long an engine of the backend prefills what was sent there, by us and other clients.
func (b *Backend) queuedSeconds() float64 {
	return b.QueuedSeconds/float64(b.engines()) + b.ExternalTokens/b.PrefillRate
}

// UpdateRoom sets whether a backend could be sent a request now, after what was claimed in this round.
func (f *Fleet) UpdateRoom(b *Backend) { b.HasRoom = f.hasRoom(b) }

func (f *Fleet) hasRoom(b *Backend) bool {
	switch {
	case b.Backend == nil || !b.IsAvailable() || b.exceedsMaxInFlight(1) || f.HasQueue && b.QueueFull:
		return false
	case !f.QueueEnabled || b.KnownInFlight == 0:
		return true
	}
	return !b.isWaitingForKV() && b.fitsKV(0) && f.hasPrefillRoom(b) && f.hasSequenceRoom(b)
}

// hasSequenceRoom reports whether a backend may be sent more sequences. A replica does not know tenants: where several share the
// fleet, only as many sequences wait in it as it needs to start one as soon as another ends.
func (f *Fleet) hasSequenceRoom(b *Backend) bool {
	if !f.Shared || b.SequenceLimit == 0 {
		return true
	}
	return b.KnownInFlight+b.Claimed.Sequences < int64(b.SequenceLimit+max(minSharedSequences, b.SequenceLimit/8))
}

// hasPrefillRoom reports whether a backend may be sent more to prefill. It may if fewer requests of ours are queued
// there than it has engines, since other clients may always have something queued; and while the prefill rate is
// unknown: what is queued would be worked off too slowly in our account.
func (f *Fleet) hasPrefillRoom(b *Backend) bool {
	switch {
	case !b.PrefillRateKnown || b.Pending < b.engines():
		return true
	case f.Policy.WaitsForIdle:
		return false
	}
	return !f.Shared || b.queuedSeconds() <= maxSharedQueue
}
