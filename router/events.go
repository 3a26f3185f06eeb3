package router

import (
	"cmp"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/index"
)

// ObserveLoad records a successful scrape of a backend.
func (r *Router) ObserveLoad(b *backends.Backend, l *backends.Load) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return
	}
	s := &r.states[b.Slot]
	cache := r.cacheInfo(b)
	if models := b.Models(); len(models) > 0 {
		r.estimates.SetModel(b.Slot, cmp.Or(models[0].Root, models[0].ID))
	}
	r.estimates.ObserveLoad(b.Slot, l, s.load.unseen, cache)
	r.resizeIndex(b.Slot)
	r.index.SweepAndEvict(upkeepBlocks)
	s.health.recordPollProgress(l, s.load.unstarted, s.load.own())
	now := r.now()
	s.health.breaker.closeOnProgress(&r.settings.Breaker, s.health.since, now)
	_, external := r.externalLoad(l, now)
	if r.updateStalled(b, l, external, now) {
		r.scheduleStallNotices(b)
	}
	r.observeKV(b, l, now)
	// Without a sign of work the replica may be stalled, which only the next scrape shows.
	working := s.load.own() == 0 || !s.health.since.Before(l.PolledAt)
	s.kv.expected = working && r.policy.definition.PollInterval == 0 &&
		isExpectedLoad(l, r.ownKVTokens(b.Slot, now), s.load.unseen)
	r.dispatchQueued(now)
}

// IsLoadExpected reports whether the last successful scrape of b showed what our own account
// explains, so that the next one can wait. Under a policy that decides by scrapes none can.
func (r *Router) IsLoadExpected(b *backends.Backend) bool {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.has(b) && r.states[b.Slot].kv.expected
}

// PollFailed records a scrape that failed. timedOut: it was not answered in time,
// as when the replica's process is stopped, or its event loop is blocked.
func (r *Router) PollFailed(b *backends.Backend, timedOut bool) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return
	}
	h := r.states[b.Slot].health
	if h.missedPolls++; !timedOut {
		h.missedPolls = 0
	}
	now := r.now()
	if r.updateStalled(b, r.liveStateOf(b).load, 0, now) || h.hung {
		r.scheduleStallNotices(b)
	}
	r.dispatchQueued(now)
}

// ChecksTimedOut records that b is down because its health checks are not answered,
// while its connections stay open: what it was sent will not be answered.
func (r *Router) ChecksTimedOut(b *backends.Backend) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return
	}
	r.states[b.Slot].health.hung = true
	r.scheduleStallNotices(b)
	r.dispatchQueued(r.now())
}

// BackendStateChanged records that a backend's state has changed: requests may wait for
// it. For a backend that is ready again, past failures are reset.
func (r *Router) BackendStateChanged(b *backends.Backend) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	if r.has(b) && r.liveStateOf(b).state == backends.Ready {
		r.states[b.Slot].health.resetFailures(now)
	}
	r.dispatchQueued(now)
}

// ForgetCache forgets what a backend held: its replica lost its cache. What KV events say it
// holds stays.
func (r *Router) ForgetCache(b *backends.Backend) {
	defer r.confirmAgain(b)
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return
	}
	r.index.DropCache(b.Slot)
	r.estimates.ForgetReplicaProcess(b.Slot)
	r.dispatchQueued(r.now())
}

// IndexPlacement records that another client or proxy sent a request to b: its prompt's
// blocks are indexed for b as if they had been used now. It returns how many of them b
// is thought to hold: none of a prompt too long for it or of a backend that caches
// nothing. Load that is not ours is seen by scrapes, so it is not counted.
func (r *Router) IndexPlacement(req *Request, b *backends.Backend) (heldBlocks int) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) || req.NoEngine || r.isTooLong(req, b.Slot) {
		return 0
	}
	now := r.now()
	heldBlocks = r.indexPrompt(req, b.Slot, now)
	r.reportIndexed(b, req.Blocks)
	r.dispatchQueued(now)
	return heldBlocks
}

// indexPrompt indexes a prompt for a backend, and returns how many of its blocks that may hold.
func (r *Router) indexPrompt(req *Request, slot int, now time.Time) (heldBlocks int) {
	r.beginDecision(req, nil, now)
	r.matchPrompt()
	var p index.Pin
	r.index.Add(&p, slot, req.Blocks, r.decision.matched[slot])
	omitted := p.Omitted
	r.index.Release(&p, nil)
	return len(req.Blocks) - omitted
}

// ResetReport is what ResetBackend removed.
type ResetReport struct {
	Blocks    int          // that the index attributed to the backend
	Breaker   BreakerState // before
	Estimates estimate.Summary
}

// ResetBackend forgets what is believed of b, as of a replica that has just joined:
// what its cache holds, what was learned of it, and that it failed or refused
// anything. What it has in flight stays, and so do figures that metrics count, and
// what the replica reported, also by KV events.
func (r *Router) ResetBackend(b *backends.Backend) ResetReport {
	defer r.confirmAgain(b)
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return ResetReport{}
	}
	now, s := r.now(), &r.states[b.Slot]
	report := ResetReport{r.index.Len(b.Slot), s.health.breaker.state(now), r.estimates.Summary(b.Slot)}
	r.estimates.ForgetLearned(b.Slot)
	s.kv.decodeRate = newKVCache().decodeRate
	r.index.DropCache(b.Slot)
	r.resizeIndex(b.Slot)
	r.forgetInPolicy(b.Slot)
	b.ReportsCached.Store(false)
	b.ForgetMissingEndpoints()
	s.health.resetFailures(now)
	s.health.refusedAt, s.health.freeSlots = time.Time{}, 0
	r.dispatchQueued(now)
	return report
}

// BackendEstimates is what was learned of one backend.
type BackendEstimates struct {
	Backend *backends.Backend // nil: the slot is free
	estimate.Summary
}

// Estimates returns what was learned of each backend, by slot.
func (r *Router) Estimates() []BackendEstimates {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	all := make([]BackendEstimates, len(r.states))
	for slot := range r.states {
		all[slot] = BackendEstimates{r.states[slot].backend, r.estimates.Summary(slot)}
	}
	return all
}

// BackendIndexStats is the state of one backend's part of the index.
type BackendIndexStats struct {
	Backend          *backends.Backend // nil: the slot is free
	Blocks, Capacity int
	Evictions        uint64
	KV               *KVStatus // nil: its KV events are not read
}

// IndexStats returns the state of each backend's part, by slot, and about how many
// bytes all of them take.
func (r *Router) IndexStats() (parts []BackendIndexStats, bytes int64) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	for slot := range r.states {
		s := BackendIndexStats{r.states[slot].backend, r.index.Len(slot), r.index.Capacity(slot), r.index.Evictions(slot), nil}
		if f := r.states[slot].follower; f != nil {
			s.KV = f.status()
		}
		parts = append(parts, s)
	}
	return parts, r.index.Bytes()
}
