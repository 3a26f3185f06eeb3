package router

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/ledger"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

const defaultIndexMargin = 1.2 // an index slightly too large costs little, one too small much

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
	// OnCacheReset is called for each backend whose cached tokens or counters show that its replica has lost its
	// prefix cache without reporting it. nil: it is not called.
	OnCacheReset func(*backends.Backend)
	// OnPairAvoided is told of two replicas whose transfers of KV keep failing, so that no request is split between them
	// for a while. nil: it is not called.
	OnPairAvoided func(pair decide.Pair, failures int, duration time.Duration)
}

// New makes a Router for a fleet.
func New(o Options) (*Router, error) {
	now := o.Now()
	x := index.New(0, o.IndexMaxBytes)
	estimates := estimate.New(o.BlockBytes, cmp.Or(o.IndexMargin, defaultIndexMargin))
	if o.OnCacheReset == nil {
		o.OnCacheReset = func(*backends.Backend) {}
	}
	if o.OnPairAvoided == nil {
		o.OnPairAvoided = func(decide.Pair, int, time.Duration) {}
	}
	if o.Catalog == nil {
		o.Catalog = func() *backends.Catalog { return nil }
	}
	q := queue.New[*QueuedRequest](now)
	r := &Router{
		policies: o.Policies, now: o.Now, catalog: o.Catalog, onPanic: o.OnPanic, onCacheReset: o.OnCacheReset, onPairAvoided: o.OnPairAvoided,
		fleet: fleet{
			blockBytes: o.BlockBytes, isDueBefore: q.IsDueBefore, start: now, rand: o.Rand, index: x, estimates: estimates,
			ledger: ledger.New(o.BlockBytes, x, estimates, now),
		},
		admission: admission{queue: q, started: make(chan struct{}, 1), pauses: make(chan time.Duration, 1)},
		peers:     peers{reporter: o.Reporter},
	}
	apply, err := r.PrepareSettings(o.Settings)
	if err != nil {
		return nil, err
	}
	apply()
	for _, b := range o.Backends {
		r.fleet.setBackend(b.Slot, b)
	}
	return r, nil
}

// PrepareSettings checks the settings and changes nothing; apply, which cannot fail, changes them
// while requests are decided.
//
// No request that is queued is refused: those that no policy queues any more are sent, and lower bounds are for
// those to come. A policy keeps what it remembers unless its name or its settings change.
func (r *Router) PrepareSettings(s Settings) (apply func(), err error) {
	definition, err := r.policies.Lookup(s.Policy)
	if err != nil {
		return nil, fmt.Errorf("routing.policy: %w", err)
	}
	return func() {
		r.mu.Lock()
		defer r.unlockAndRunCallbacks()
		now, a := r.now(), &r.admission
		r.fleet.configure(s, definition, now)
		a.queue.Configure(s.Queue)
		for before := -1; a.queue.Len() > 0 && a.queue.Len() != before; { // a round is bounded
			before = a.queue.Len()
			r.dispatch(now)
		}
	}, nil
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
func (r *Router) Policy() (name string) {
	r.withLock(func() { name = r.fleet.policy.definition.Name })
	return name
}

// AddBackend adds a backend that a Registry has given a Slot. Until then it is sent nothing.
func (r *Router) AddBackend(b *backends.Backend) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.fleet.setBackend(b.Slot, b)
	r.dispatch(r.now())
}

// RemoveBackend removes a backend: it is sent nothing more, and all that is known of it is forgotten.
// Reservations on it that are in flight remain valid until their Release, which then counts only in the
// backend's own figures. Under another router's policy this may take a tenth of a second, if its table is full.
func (r *Router) RemoveBackend(b *backends.Backend) {
	if follower := r.kvFollower(b); follower != nil {
		follower.Close()
	}
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.fleet.has(b) {
		return
	}
	r.fleet.removeBackend(b)
	for it := range r.admission.queue.Items() {
		if t := it.Value; t.waitsFor == b.Slot {
			t.waitsFor = noSlot
		}
	}
	r.dispatch(r.now())
}
