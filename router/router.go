// Package router decides which backend takes a request, and accounts for what each
// was sent. It records no metrics and does not depend on HTTP.
package router

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/health"
	"warmroute/router/ledger"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

// Request is what the decision needs of one request.
type Request = decide.Request

// Outcome describes a finished request.
type Outcome = ledger.Outcome

// End is how a request ended on its backend.
type End = ledger.End

// The ends of a request.
const (
	Completed          = ledger.Completed
	NotProcessed       = ledger.NotProcessed
	ClientDisconnected = ledger.ClientDisconnected
	Truncated          = ledger.Truncated
)

// StallListener is notified when the backend of a request makes no progress.
type StallListener = health.StallListener

// Why a backend was chosen.
const (
	ReasonPrefix      = decide.ReasonPrefix
	ReasonMatchedBusy = decide.ReasonMatchedBusy
	ReasonNoMatch     = decide.ReasonNoMatch
	ReasonLoad        = decide.ReasonLoad
	ReasonOnly        = decide.ReasonOnly
	ReasonStored      = decide.ReasonStored
)

// What a router tells its peers, the routers of other proxies in front of the same replicas.
type (
	Placement          = ledger.Placement
	PlacementEnd       = ledger.PlacementEnd
	PlacementEvent     = ledger.PlacementEvent
	PlacementEventKind = ledger.PlacementEventKind
	PlacementReporter  = ledger.PlacementReporter
)

// The requests that a split request becomes.
const (
	PrefillRequest = ledger.PrefillRequest
	DecodeRequest  = ledger.DecodeRequest
)

// The events of a Placement.
const (
	PlacementSent      = ledger.PlacementSent
	PlacementPrefilled = ledger.PlacementPrefilled
	PlacementEnded     = ledger.PlacementEnded
	PlacementIndexed   = ledger.PlacementIndexed
)

// QueueSettings bound the admission queue.
type QueueSettings = queue.Settings

// TenantID returns the Tenant of a Request: that of a tenant's hash, 0 for none in particular, and of the hash of which part of
// the tenant's share of the fleet is used.
func TenantID(tenant, part uint64) uint64 { return queue.TenantID(tenant, part) }

// QueueTimeouts limit for how long a request may be queued.
type QueueTimeouts = queue.Timeouts

// Waited is for how long a request was queued.
type Waited = queue.Waited

// The health of backends.
type (
	BreakerSettings = health.BreakerSettings
	BreakerState    = health.BreakerState
	Condition       = health.Condition
	ConditionState  = health.ConditionState
)

// The states of breakers and backends.
const (
	BreakerClosed   = health.BreakerClosed
	BreakerHalfOpen = health.BreakerHalfOpen
	BreakerOpen     = health.BreakerOpen

	Ready    = health.Ready
	Starting = health.Starting
	Down     = health.Down
	Draining = health.Draining
	Stopping = health.Stopping
	Paused   = health.Paused
	Asleep   = health.Asleep
	Stalled  = health.Stalled
)

// Why a request is not sent.
var (
	// ErrNoneReady means that no backend that serves the model may take the request
	// now, those already tried excluded.
	ErrNoneReady = decide.ErrNoneReady
	// ErrUnknownModel means that the replicas, which had listed no model yet, do not serve the request's.
	ErrUnknownModel = errors.New("no replica lists the model")
	// ErrMaxInFlight means that every candidate has reached its maximum number of requests in flight.
	ErrMaxInFlight = decide.ErrMaxInFlight
	// ErrEndpointMissing means that every backend that serves the model is known to lack the endpoint.
	ErrEndpointMissing = decide.ErrEndpointMissing
	// ErrQueueFull means that the admission queue is full.
	ErrQueueFull = errors.New("admission queue is full")
	// ErrBusy means that a request reached its maximum time in the queue.
	ErrBusy = errors.New("no replica had room in time")
	// ErrLate means that every candidate is predicted to have the first token of the request after it is due.
	ErrLate = errors.New("no replica is predicted to meet the target for the time to first token")
	// ErrPanicked means that the decision about a queued request panicked.
	ErrPanicked = errors.New("panic while the queued request was routed")
)

// Router picks backends. Safe for concurrent use.
type Router struct {
	policies     policy.Registry
	now          func() time.Time
	catalog      func() *backends.Catalog
	onPanic      func(cause any, stack []byte) // nil: panics are not recovered
	onCacheReset func(*backends.Backend)

	onPairAvoided func(decide.Pair, int, time.Duration)
	layouts       atomic.Pointer[map[string]prompt.Layout] // by model; those that are not the default

	// mu guards all below: matching, choosing and reserving are one step, so that two requests arriving
	// together cannot both see the same backend idle. It is released by unlockAndRunCallbacks.
	mu        sync.Mutex
	fleet     fleet
	admission admission
	peers     peers
	callbacks callbacks
}

// Settings are what PrepareSettings may change.
type Settings struct {
	Policy         string // one of Options.Policies, or prefix
	PolicySettings policy.Settings
	Queue          QueueSettings
	Breaker        BreakerSettings
	PollInterval   time.Duration // how old a fresh Load may be
	Disaggregation DisaggregationSettings
	NoLearning     bool // use defaults and what replicas report, and learn nothing
}

// DisaggregationSettings are those of split requests.
type DisaggregationSettings = decide.DisaggregationSettings

// Reservation is a chosen backend, and the account of a request on it that Release must end
// exactly once. Its methods are safe for concurrent use.
type Reservation struct {
	Backend                    *backends.Backend
	Reason                     string
	MatchedBlocks, TotalBlocks int
	MatchedTokens              int           // of the prompt, likely held; about
	ElsewhereTokens            int           // of the others, likely held by another backend; about
	PromptTokens               int           // about
	Arrival                    time.Time     // that its place in the queue is by; see Request. Zero: none
	QueueTime                  time.Duration // that the request was queued
	NoneReadyTime              time.Duration // the part of it without a ready backend; see QueueTimeouts
	// Prefill is where the prefill of the request is to be done first; nil: here. Its Release must be called as well.
	Prefill *Reservation
	// Split says whether the request is split or why not, in a fleet with replicas for prefill or decode; else "".
	Split string
	// KVSession is what is to be sent to the replica as the request's session, by which its KV
	// events name the request; "": nothing in particular.
	KVSession string

	router   *Router
	noEngine bool
	health   *health.Record // of the backend, for as long as it is in the fleet
	attempt  health.Attempt
	entry    ledger.Entry
	peerID   uint64 // by which other proxies know it; 0 if there are no other proxies
	kv       KVRequest
	released bool // guarded by router.mu

	kvTransferTokens float64 // of a decode request, that the backend reads from another replica
}

// callbacks are calls that become due while the lock is held.
type callbacks struct {
	first, last *QueuedRequest // whose requests were decided, linked by next
	stalls      []stallNotice
	panics      []recoveredPanic
	cacheResets []*backends.Backend
	avoided     []avoidedPair
}

// stallNotice is a call of a StallListener.
type stallNotice struct {
	to                      StallListener
	elsewhere, unresponsive bool
}

// recoveredPanic is a call of Options.OnPanic.
type recoveredPanic struct {
	cause any
	stack []byte
}

// addQueued adds a call that delivers the result of t.
func (c *callbacks) addQueued(t *QueuedRequest) {
	if c.last == nil {
		c.first = t
	} else {
		c.last.next = t
	}
	c.last = t
}

// unlockAndRunCallbacks releases the mutex, and then makes the calls that became due
// meanwhile: a callback never runs under the lock.
func (r *Router) unlockAndRunCallbacks() {
	due := r.callbacks
	r.callbacks = callbacks{}
	r.mu.Unlock()
	for t := due.first; t != nil; t = t.next {
		t.deliverResult()
	}
	for _, n := range due.stalls {
		n.to.BackendStalled(n.elsewhere, n.unresponsive)
	}
	for _, p := range due.panics {
		r.onPanic(p.cause, p.stack)
	}
	for _, b := range due.cacheResets {
		r.onCacheReset(b)
	}
	for _, a := range due.avoided {
		r.onPairAvoided(a.pair, a.failures, a.duration)
	}
}

// withLock calls f under the lock.
func (r *Router) withLock(f func()) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f()
}
