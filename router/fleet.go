package router

import (
	"iter"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/estimate"
	"warmroute/router/health"
	"warmroute/router/index"
	"warmroute/router/ledger"
	"warmroute/router/policy"
	"warmroute/router/queue"
)

// fleet is the backends with what is known of them, and the policy by which one is chosen.
type fleet struct {
	blockBytes int
	start      time.Time
	rand       *rand.PCG // used by the policy
	settings   Settings
	policy     activePolicy
	states     []backendState // by slot
	index      *index.Index
	estimates  *estimate.Estimates
	ledger     *ledger.Ledger
	scratch    scratch
	tenantMix  tenantMix
	transfers  transfers

	isDueBefore func(c queue.Class, tenant, other uint64, now time.Time) bool // see decide.Fleet
}

// activePolicy is the policy in use.
type activePolicy struct {
	policy.Policy
	definition policy.Definition
}

// backendState is what is known of one backend beside its account, and its place in the index and
// the estimates.
type backendState struct {
	backend  *backends.Backend // nil: the slot is free
	nameHash uint64
	health   *health.Record // a Reservation may outlive the backend's membership, and keeps it
	follower KVFollower     // of its KV events; nil: there is none

	cacheResets uint64 // that were reported, of those that the ledger has found
}

// scratch is the memory of one decision, or of one round of the queue, for the next one.
type scratch struct {
	view       decide.Fleet
	viewed     []int          // slots in view
	devices    map[string]int // numbers of the devices in view, from 1
	query      decide.Query
	request    Request // of query, unless it is queued
	candidates decide.Candidates
	matched    []int // by slot
	hits       hits
}

// configure changes the settings. definition is of the policy that they name.
func (f *fleet) configure(s Settings, definition policy.Definition, now time.Time) {
	if f.policy.Policy == nil || s.Policy != f.policy.definition.Name || s.PolicySettings != f.settings.PolicySettings {
		f.policy = activePolicy{definition.New(policy.Options{Settings: s.PolicySettings, Rand: rand.New(f.rand)}), definition}
	}
	f.settings = s
	f.ledger.SetPollInterval(s.PollInterval)
	f.estimates.SetLearningDisabled(s.NoLearning)
	if s.Breaker.Failures == 0 { // no outcome would count, so nothing else would close them
		for i := range f.states {
			f.states[i].health.CloseBreaker(now)
		}
	}
}

// setBackend begins the state of a slot's new backend; nil: the slot is free.
func (f *fleet) setBackend(slot int, b *backends.Backend) {
	for len(f.states) <= slot {
		f.states = append(f.states, backendState{health: health.NewRecord(f.start)})
		f.ledger.SetBackend(len(f.states)-1, nil)
	}
	f.states[slot] = backendState{backend: b, health: health.NewRecord(f.start)}
	if b != nil {
		f.states[slot].nameHash = xxh3.HashString(b.Name)
	}
	f.ledger.SetBackend(slot, b)
}

// removeBackend frees the slot of a backend, and forgets all that is known of it.
func (f *fleet) removeBackend(b *backends.Backend) {
	f.setBackend(b.Slot, nil)
	f.transfers.removeBackend(b)
	f.forgetInPolicy(b.Slot)
}

func (f *fleet) forgetInPolicy(slot int) {
	f.ledger.ForgetNextTurns(slot)
	if p, ok := f.policy.Policy.(policy.Forgetter); ok {
		p.ForgetBackend(slot)
	}
}

// has reports whether b is in the fleet. Requests and reservations may outlive its
// membership, and its Slot may be another backend's by then.
func (f *fleet) has(b *backends.Backend) bool { return f.ledger.Has(b) }

// all returns the backends in the fleet, by slot.
func (f *fleet) all() (list []*backends.Backend) {
	for i := range f.states {
		if b := f.states[i].backend; b != nil {
			list = append(list, b)
		}
	}
	return list
}

// isQueueEnabled reports whether requests wait until a backend can start them soon.
func (f *fleet) isQueueEnabled() bool {
	return f.policy.definition.UsesQueue && f.settings.Queue.Requests > 0
}

// tracker returns the policy, if it knows which conversations are under way.
func (f *fleet) tracker() policy.ConversationTracker {
	t, _ := f.policy.Policy.(policy.ConversationTracker)
	return t
}

// nextTurnTracker is tracker, or nil where no tokens are reserved for next turns.
func (f *fleet) nextTurnTracker() policy.ConversationTracker {
	if !f.isQueueEnabled() {
		return nil
	}
	return f.tracker()
}

// viewAll returns a view of all backends. Stalls that it shows are noted in due; nil: nothing is changed but s.
func (f *fleet) viewAll(s *scratch, due *callbacks, now time.Time) *decide.Fleet {
	v := f.beginView(s, now)
	for slot := range f.states {
		f.addToView(s, slot, due)
	}
	return v
}

// viewOf is viewAll for some backends.
func (f *fleet) viewOf(s *scratch, list []*backends.Backend, due *callbacks, now time.Time) *decide.Fleet {
	v := f.beginView(s, now)
	for _, b := range list {
		if f.has(b) {
			f.addToView(s, b.Slot, due)
		}
	}
	return v
}

// beginView returns a view without backends.
func (f *fleet) beginView(s *scratch, now time.Time) *decide.Fleet {
	v := &s.view
	for _, slot := range s.viewed {
		v.Backends[slot].Backend = nil
	}
	s.viewed = s.viewed[:0]
	clear(s.devices)
	for len(v.Backends) < len(f.states) {
		v.Backends = append(v.Backends, decide.Backend{})
	}
	v.Now, v.Policy, v.Waiting = now, f.policy.definition, 0
	v.HasQueue = f.settings.Queue.Requests > 0
	v.QueueEnabled, v.Shared = f.isQueueEnabled(), now.Before(f.tenantMix.until)
	v.Disaggregation, v.HasPrefillReplica, v.AvoidedPairs = f.settings.Disaggregation, false, f.transfers.avoided
	v.IsDueBefore = f.isDueBefore
	v.BlockBytes, v.Ledger, v.Estimates, v.Links = f.blockBytes, f.ledger, f.estimates, kvLinks{f.index}
	f.updateLowPriorityLimit(v)
	return v
}

// updateLowPriorityLimit updates whether low-priority requests are limited: interactive requests may be the first of late.
func (f *fleet) updateLowPriorityLimit(v *decide.Fleet) {
	v.LimitsLowPriority = v.QueueEnabled && f.settings.Queue.LowPrioritySlowdown > 0 && f.ledger.HasRecentInteractive(v.Now)
}

// addToView reads the state of a slot's backend, if it has one.
func (f *fleet) addToView(s *scratch, slot int, due *callbacks) {
	b, v := f.states[slot].backend, &s.view.Backends[slot]
	if b == nil {
		return
	}
	s.viewed = append(s.viewed, slot)
	options := b.Options()
	v.Backend, v.Slot, v.NameHash = b, slot, f.states[slot].nameHash
	v.Weight, v.MaxInFlight, v.Claimed, v.HasRoom = weightOf(options), options.MaxInFlight, decide.Claim{}, false
	v.Role, v.KVForm, v.Device = options.Role, b.KVForm(), s.numberDevice(options.Device)
	s.view.HasPrefillReplica = s.view.HasPrefillReplica || v.Role == backends.RolePrefill
	v.Missing, v.Retiring, v.Load = b.MissingEndpoints(s.view.Now), b.Retiring(), b.Load()
	v.State, v.Asleep = b.State(), v.Load != nil && v.Load.Asleep
	v.PrefillRate, v.PrefillRateKnown = f.estimates.PrefillRate(slot), f.estimates.KnowsPrefillRate(slot)
	v.MissingHits = f.estimates.MissingHits(slot)
	v.RestoredShare, v.RestoredUntil = f.estimates.RestoredShare(slot)
	v.Offloading = decide.Offloading{}
	if f.estimates.Offloads(slot) {
		v.Offloading = decide.Offloading{
			Before: f.ledger.OffloadedBefore(slot), FetchSeconds: f.estimates.FetchSeconds(slot), StoreShare: f.estimates.StoreShare(slot),
		}
	}
	v.ExternalRequests, v.ExternalTokens = f.ledger.External(v.Load, s.view.Now)
	f.updateView(v, s.view.Now, due)
}

// numberDevice returns the number of a device in the view, which gets one if it has none; 0 for "".
func (s *scratch) numberDevice(name string) int {
	if name == "" {
		return 0
	}
	number, ok := s.devices[name]
	if !ok {
		if s.devices == nil {
			s.devices = map[string]int{}
		}
		number = len(s.devices) + 1
		s.devices[name] = number
	}
	return number
}

// updateView reads what a reservation on the backend changes.
func (f *fleet) updateView(v *decide.Backend, now time.Time, due *callbacks) {
	h := f.states[v.Slot].health
	v.Stopping = h.IsStopping(now)
	v.KnownInFlight = v.Backend.KnownInFlight()
	v.QueueFull, v.ProbeDue = h.IsQueueFull(v.KnownInFlight, now), h.IsProbeDue(now)
	v.SequenceLimit = h.SequenceLimit()
	v.Breaker, _ = h.Breaker(now)
	f.ledger.ReadFigures(&v.Figures, v.Slot, v.PrefillRate, now, due != nil)
	check := f.stallCheck(v.Slot, v.Load, v.ExternalTokens, v.PrefillRate, now)
	switch {
	case due == nil:
		v.Stalled = h.IsStalledNow(&check)
	case v.IsAvailable():
		if h.UpdateStalled(&check) {
			f.notifyStalled(v.Slot, now, due)
		}
		v.Stalled = h.IsStalled()
	default:
		v.Stalled = h.IsStalled()
	}
}

// updateAfterSent updates the view of a backend that was sent a request.
func (f *fleet) updateAfterSent(v *decide.Fleet, b *decide.Backend, due *callbacks) {
	f.updateView(b, v.Now, due)
	v.UpdateRoom(b)
}

// stallCheck returns what decides whether a backend is stalled.
func (f *fleet) stallCheck(slot int, load *backends.Load, externalTokens, prefillRate float64, now time.Time) health.StallCheck {
	return health.StallCheck{
		Now: now, Load: load, InFlight: f.ledger.SentSequences(slot), UnstartedTokens: f.ledger.UnstartedTokens(slot),
		ExternalTokens: externalTokens, PrefillRate: prefillRate, RateKnown: f.estimates.IsPrefillRateKnown(slot),
	}
}

// notifyStalled notes in due that the requests on a backend are to be notified that it makes no progress.
func (f *fleet) notifyStalled(slot int, now time.Time, due *callbacks) {
	b, h := f.states[slot].backend, f.states[slot].health
	for _, a := range h.Watched() {
		due.stalls = append(due.stalls, stallNotice{a.Listener, f.canProcessElsewhere(a, b, now), h.IsUnresponsive()})
	}
}

// canProcessElsewhere reports whether another backend than b seems able to process a request.
func (f *fleet) canProcessElsewhere(a *health.Attempt, b *backends.Backend, now time.Time) bool {
	for _, o := range a.Backends {
		if o != b && f.isReady(o, now) && !slices.Contains(a.Tried, o) && !o.LacksEndpoint(a.Endpoint, now) {
			return true
		}
	}
	return false
}

// areOthersSlower reports whether the steps of most other backends take longer than usual.
func (f *fleet) areOthersSlower(b *backends.Backend, now time.Time) bool {
	slower, all := 0, 0
	for i := range f.states {
		if s := &f.states[i]; s.backend != nil && s.backend != b {
			isSlower, known := s.health.IsSlowerThanUsual(now)
			if known {
				all++
			}
			if isSlower {
				slower++
			}
		}
	}
	return 2*slower > all
}

// isReady reports whether a backend accepts requests and was not stalled when it was checked last.
func (f *fleet) isReady(b *backends.Backend, now time.Time) bool {
	if !f.has(b) {
		return false
	}
	h, load := f.states[b.Slot].health, b.Load()
	a := decide.Availability{State: b.State(), Stopping: h.IsStopping(now), Asleep: load != nil && load.Asleep}
	return a.IsAvailable() && !h.IsStalled()
}

// match looks up what the decision about a request needs. The result is valid until the next call
// with the same s.
func (f *fleet) match(s *scratch, req *Request, tried []*backends.Backend) *decide.Query {
	for len(s.matched) < len(f.states) {
		s.matched = append(s.matched, 0)
	}
	matched := s.matched[:len(f.states)]
	f.index.Match(req.Blocks, matched)
	s.request = *req
	return f.query(s, &s.request, tried, matched)
}

// query is match for a request of which it is known how many blocks each backend holds.
func (f *fleet) query(s *scratch, req *Request, tried []*backends.Backend, held []int) *decide.Query {
	s.query = decide.Query{
		Request: req, Tried: tried, Sizes: f.estimates.TokenSizes(req.Model, req.TextClass), Held: held, Matched: held,
		Linked: f.findLinked(req, held),
	}
	if f.index.HasAnyCheckpoints() {
		s.hits.find(f.ledger, req.Blocks, held, &s.query.Sizes)
		s.query.Matched, s.query.Checkpoints = s.hits.matched, s.hits.checkpoints
	}
	return &s.query
}

// hits are what each backend can reuse of a prompt, by slot.
type hits struct {
	matched     []int // blocks
	checkpoints []index.Checkpoint
}

// find sets h to what backends that hold so many leading blocks of a prompt can reuse.
func (h *hits) find(l *ledger.Ledger, blocks []prompt.Block, held []int, sizes *estimate.TokenSizes) {
	h.matched, h.checkpoints = append(h.matched[:0], held...), h.checkpoints[:0]
	for slot, n := range held {
		p, ok := l.FindCheckpoint(slot, blocks[:n], sizes)
		if ok {
			h.matched[slot] = p.Blocks
		}
		h.checkpoints = append(h.checkpoints, p)
	}
}

// filter finds the candidates for a request, in s. l is the fleet's ledger, or a copy of it that may
// be changed.
func (f *fleet) filter(s *scratch, v *decide.Fleet, q *decide.Query, l *ledger.Ledger) error {
	err := v.Filter(q, &s.candidates)
	if err == nil && v.NeedsHeadroom(q.Request, q.Promoted) && !v.IsTooLongForAll(q.Request) {
		err = s.candidates.FilterByHeadroom(f.lowPriorityRoom(v, q.Backends, l))
	}
	return err
}

// lowPriorityRoom returns a function that reports whether the backend of a slot may start a low-priority request,
// for which interactive requests leave room on some of list.
func (f *fleet) lowPriorityRoom(v *decide.Fleet, list []*backends.Backend, l *ledger.Ledger) func(slot int) bool {
	h := l.ReserveForInteractive(availableSlots(v, list), f.settings.Queue.LowPrioritySlowdown, v.Now)
	return func(slot int) bool {
		return v.Backends[slot].HasLowPriorityRoom(l.CheckLowPriorityRoom(slot, h, v.Now))
	}
}

// availableSlots returns the slots of those of list that accept requests.
func availableSlots(v *decide.Fleet, list []*backends.Backend) iter.Seq[int] {
	return func(yield func(int) bool) {
		for _, b := range list {
			if s := v.Find(b); s != nil && s.IsAvailable() && !yield(s.Slot) {
				return
			}
		}
	}
}

// recordPeerRequestInPolicy records a peer's request in the policy, if that remembers what is sent where.
func (f *fleet) recordPeerRequestInPolicy(e *ledger.Entry, p *Placement, bytesPerToken float64) {
	recorder, ok := f.policy.Policy.(policy.Recorder)
	if !ok {
		return
	}
	request := policy.Request{
		Now: e.SentAt, Blocks: p.Blocks, BlockTokens: float64(f.blockBytes) / bytesPerToken, PromptTokens: e.Prediction.PromptTokens,
		PromptKey: p.PromptKey, Turn: p.Turn, Conversation: p.Conversation, Tenant: p.Tenant,
		MeanUncachedTokens: f.estimates.MeanUncachedTokens(p.Model),
	}
	recorder.RecordSent(&request, &policy.Candidate{
		Slot: e.Slot, NameHash: f.states[e.Slot].nameHash, Weight: weightOf(p.Backend.Options()),
		MatchedTokens: float64(e.Prediction.MatchedTokens), UncachedTokens: e.Prediction.Uncached,
	})
}

// weightOf returns the weight of a backend; 1 if it has none.
func weightOf(o *backends.Options) float64 {
	if o.Weight > 0 {
		return o.Weight
	}
	return 1
}
