// Package router decides which backend takes a request, and accounts for what each
// was sent. It records no metrics and does not depend on HTTP.
package router

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

const (
	defaultIndexMargin = 1.2  // an index slightly too large costs little, one too small much
	upkeepBlocks       = 4096 // of the index's upkeep per scrape: well below a millisecond under the lock
)

// ErrNoneReady says that no backend that serves the model may take the request
// now, those already tried excluded.
var ErrNoneReady = errors.New("no backend is ready")

// Settings are what Configure may change.
type Settings struct {
	Policy         string // one of Options.Policies, or prefix
	PolicySettings policy.Settings
	Queue          QueueSettings
	Breaker        BreakerSettings
	SLO            time.Duration // TTFT to be met where it can be, by the policy prefix; 0: none
	PollInterval   time.Duration // how old a fresh Load may be
	NoLearning     bool          // use defaults and what replicas report, and learn nothing
}

// QueueSettings bound the admission queue.
type QueueSettings = queue.Settings

// QueueTimeouts limit for how long a request may be queued.
type QueueTimeouts = queue.Timeouts

// Waited is for how long a request was queued.
type Waited = queue.Waited

// Options configure a Router.
type Options struct {
	Settings
	Policies      policy.Registry     // that Settings may name beside prefix
	Backends      []*backends.Backend // at the start, by Slot
	BlockBytes    int                 // of canonical prompt in a block
	IndexMaxBytes int64
	IndexMargin   float64          // the index's size over that of the caches it mirrors; 0: 1.2
	Now           func() time.Time // the wall clock's, or a simulation's
	Rand          *rand.PCG        // from which the policy draws what it leaves to chance
	// Reporter is told what is sent to the backends, for the peers; nil: there are none.
	Reporter PlacementReporter
	// Catalog returns what the fleet serves now; requests follow it when it changes.
	// nil: they may be sent to their Backends only.
	Catalog func() *backends.Catalog
	// OnPanic is told of each panic in a round of the admission queue, which is recovered. nil: none is.
	OnPanic func(cause any, stack []byte)
}

// Router picks backends. Safe for concurrent use.
type Router struct {
	policies     policy.Registry
	blockBytes   int
	now          func() time.Time
	start        time.Time
	rand         *rand.PCG // used by the policy; guarded by mu
	catalog      func() *backends.Catalog
	onPanic      func(cause any, stack []byte)            // nil: panics are not recovered
	queueStarted chan struct{}                            // to Run: the queue is not empty any more
	layouts      atomic.Pointer[map[string]prompt.Layout] // by model; those that are not the default

	// mu guards all below: matching, choosing and reserving are one step, so that two
	// requests arriving together cannot both see the same backend idle. It is
	// released by unlock.
	mu          sync.Mutex
	settings    Settings
	policy      activePolicy
	states      []backendState // by slot
	index       *index.Index
	estimates   *estimate.Fleet
	interactive queue.InteractiveLoad
	queue       *queue.Queue[*Ticket]
	lastCatalog *backends.Catalog // that queued requests follow
	slotWaits   []*SlotWait       // first come, first served
	draining    bool
	kept        keptTokens
	kvEvents    kvEvents
	reorderedAt time.Time // when the queue was reordered last
	peers       peers

	lockHolds uint64    // times that mu was held, this one included
	decision  decision  // that is being made
	deciding  *Ticket   // of the queued request that it is about; nil: of none in this round
	callbacks callbacks // due when the lock is released
}

// activePolicy is the policy in use.
type activePolicy struct {
	policy.Policy
	definition policy.Definition
}

// backendState is the router's state for one backend and the requests sent there.
type backendState struct {
	backend  *backends.Backend // nil: the slot is free
	nameHash uint64
	health   *health // a Decision may outlive the backend's membership, and keeps it
	load     load
	kv       kvCache
	classes  queue.ClassLoad
	follower *KVFollower // of its KV events; nil: there is none

	live    liveState
	claimed claim   // by queued requests in this round
	room    float64 // in this round: uncached tokens that it could be sent
}

// New makes a Router for a fleet.
func New(o Options) (*Router, error) {
	now := o.Now()
	r := &Router{
		policies:     o.Policies,
		blockBytes:   o.BlockBytes,
		now:          o.Now,
		rand:         o.Rand,
		start:        now,
		catalog:      o.Catalog,
		onPanic:      o.OnPanic,
		index:        index.New(0, o.IndexMaxBytes),
		estimates:    estimate.NewFleet(o.BlockBytes, cmp.Or(o.IndexMargin, defaultIndexMargin)),
		queue:        queue.New[*Ticket](now),
		queueStarted: make(chan struct{}, 1),
		kept:         keptTokens{},
		kvEvents:     newKVEvents(),
		peers:        peers{reporter: o.Reporter, pauses: make(chan time.Duration, 1)},
		lockHolds:    1,
	}
	if err := r.Configure(o.Settings); err != nil {
		return nil, err
	}
	for _, b := range o.Backends {
		r.addBackendLocked(b)
	}
	return r, nil
}

// Configure changes the settings while requests are decided. On an error nothing
// has changed.
func (r *Router) Configure(s Settings) error {
	apply, err := r.PrepareSettings(s)
	if err == nil {
		apply()
	}
	return err
}

// PrepareSettings is Configure in two steps: it checks the settings and changes nothing; apply,
// which cannot fail, changes them.
//
// No request that is queued is refused: those that no rule queues any more are sent,
// and lower bounds are for those to come. A policy keeps what it remembers unless
// its name or its settings change.
func (r *Router) PrepareSettings(s Settings) (apply func(), err error) {
	definition, err := r.policies.Lookup(s.Policy)
	if err != nil {
		return nil, fmt.Errorf("routing.policy: %w", err)
	}
	s.PolicySettings.SLO = s.SLO
	return func() { r.configure(s, definition) }, nil
}

// configure changes the settings. definition is of the policy that they name.
func (r *Router) configure(s Settings, definition policy.Definition) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if r.policy.Policy == nil || s.Policy != r.policy.definition.Name || s.PolicySettings != r.settings.PolicySettings {
		r.policy = activePolicy{definition.New(policy.Options{Settings: s.PolicySettings, Rand: rand.New(r.rand)}), definition}
	}
	r.settings = s
	r.queue.Configure(s.Queue)
	r.estimates.SetLearningDisabled(s.NoLearning)
	now := r.now()
	if s.Breaker.Failures == 0 { // no outcome would count, so nothing else would close them
		for i := range r.states {
			r.states[i].health.breaker.close(now)
		}
	}
	for before := -1; r.queue.Len() > 0 && r.queue.Len() != before; { // a round is bounded
		before = r.queue.Len()
		r.dispatchQueued(now)
	}
}

// PromptLayout returns the layout that the prompts of a model have, as far as it is known.
func (r *Router) PromptLayout(engineModel string) prompt.Layout {
	if m := r.layouts.Load(); m != nil {
		if l, ok := (*m)[engineModel]; ok {
			return l
		}
	}
	return prompt.DefaultLayout
}

// Policy returns the name of the policy in use.
func (r *Router) Policy() string {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.policy.definition.Name
}

// isQueueEnabled reports whether requests wait until a backend can start them soon.
func (r *Router) isQueueEnabled() bool {
	return r.policy.definition.UsesQueue && r.settings.Queue.Requests > 0
}

// callbacks are calls that become due while the lock is held.
type callbacks struct {
	first, last *Ticket // whose requests were decided, linked by next
	stalls      []stallNotice
	panics      []recoveredPanic
}

// recoveredPanic is a call of Options.OnPanic.
type recoveredPanic struct {
	cause any
	stack []byte
}

// addTicket adds a call that delivers the result of t.
func (c *callbacks) addTicket(t *Ticket) {
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
	r.lockHolds++
	r.mu.Unlock()
	for t := due.first; t != nil; t = t.next {
		t.deliverResult()
	}
	for _, n := range due.stalls {
		n.to.BackendStalled(n.elsewhere, n.hung)
	}
	for _, p := range due.panics {
		r.onPanic(p.cause, p.stack)
	}
}

// AddBackend adds a backend that a Registry has given a Slot. Until then it is sent
// nothing.
func (r *Router) AddBackend(b *backends.Backend) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.addBackendLocked(b)
	r.dispatchQueued(r.now())
}

func (r *Router) addBackendLocked(b *backends.Backend) {
	for slot := len(r.states); slot <= b.Slot; slot++ {
		r.states = append(r.states, backendState{})
		r.index.Grow(slot + 1)
		r.estimates.Grow(slot + 1)
		r.clearSlot(slot)
	}
	r.states[b.Slot].backend = b
	r.states[b.Slot].nameHash = xxh3.HashString(b.Name)
	r.resizeIndex(b.Slot)
}

// RemoveBackend removes a backend: it is sent nothing more, and all that is known of
// it is forgotten. Decisions for it that are in flight remain valid until their
// Release, which then counts only in the backend's own figures. Under another
// router's policy this may take a tenth of a second, if its table is full.
func (r *Router) RemoveBackend(b *backends.Backend) {
	r.closeFollower(b)
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return
	}
	r.clearSlot(b.Slot)
	r.forgetInPolicy(b.Slot)
	for it := range r.queue.Items() {
		if t := it.Value; t.waitsFor == b.Slot {
			t.waitsFor = nowhere
		}
	}
	r.estimates.UpdateMedianPrefillRate()
	r.dispatchQueued(r.now())
}

// clearSlot resets a slot to the state of a new backend.
func (r *Router) clearSlot(slot int) {
	r.states[slot] = backendState{health: new(health), kv: newKVCache()} // a Decision may still have the old health
	r.estimates.ResetSlot(slot)
	r.index.ResetSlot(slot)
}

func (r *Router) forgetInPolicy(slot int) {
	r.kept.removeWhere(func(c keptConversation) bool { return c.slot == slot })
	if p, ok := r.policy.Policy.(policy.Forgetter); ok {
		p.Forget(slot)
	}
}

// has reports whether b is in the fleet. Requests and decisions may outlive its
// membership, and its Slot may be another backend's by then.
func (r *Router) has(b *backends.Backend) bool {
	return b.Slot < len(r.states) && r.states[b.Slot].backend == b
}

// resizeIndex adapts a backend's part of the index to what its cache is thought to
// hold. Small changes are ignored.
func (r *Router) resizeIndex(slot int) {
	want, have := r.estimates.IndexCapacity(slot), r.index.RequestedCapacity(slot)
	if want > have+have/64 || want < have-have/64 {
		r.index.SetRequestedCapacity(slot, want)
	}
}

// currentBackends returns the backends that serve a request's model now; those that
// did where the catalog does not list it any more: another may be about to serve it.
func (r *Router) currentBackends(req *Request) []*backends.Backend {
	if r.catalog == nil || req.CatalogID == "" || req.Stored {
		return req.Backends
	}
	if e, listed := r.catalog().Find(req.CatalogID); listed {
		return e.Backends
	}
	return req.Backends
}

// refreshBackends updates a request's backends, and reports whether they changed.
func (r *Router) refreshBackends(req *Request) (changed bool) {
	before := req.Backends
	req.Backends = r.currentBackends(req)
	return !slices.Equal(before, req.Backends)
}

// refreshQueuedBackends updates the backends of the queued requests when the catalog has
// changed.
func (r *Router) refreshQueuedBackends() {
	if r.catalog == nil {
		return
	}
	c := r.catalog()
	if c == r.lastCatalog {
		return
	}
	r.lastCatalog = c
	for it := range r.queue.Items() {
		t := it.Value
		if r.refreshBackends(&t.req) {
			r.queue.SetBackends(it, t.req.Backends)
			t.waitsFor = nowhere
		}
	}
}
