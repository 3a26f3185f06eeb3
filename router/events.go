package router

import (
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/health"
)

// ObserveLoad records a successful poll of a backend.
func (r *Router) ObserveLoad(b *backends.Backend, l *backends.Load) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f := &r.fleet
	if !f.has(b) {
		return
	}
	now, h := r.now(), f.states[b.Slot].health
	f.ledger.ApplyPoll(b.Slot, l, now)
	r.reportCacheReset(b)
	own := f.ledger.CountOwn(b.Slot)
	external, externalTokens := f.ledger.External(l, now)
	h.RecordExternal(l, external)
	h.RecordPoll(l, f.ledger.UnstartedTokens(b.Slot), own, &f.settings.Breaker, now)
	check := f.stallCheck(b.Slot, l, externalTokens, f.estimates.PrefillRate(b.Slot), now)
	h.UpdateStalled(&check)
	if h.IsStalled() {
		f.notifyStalled(b.Slot, now, &r.callbacks)
	}
	if v, ok := f.ledger.MeasureSpeed(b.Slot, l); ok {
		h.RecordSpeed(v.From, v.To, v.Seconds, v.Work, f.estimates.Step(b.Slot), f.estimates.IsPrefillRateKnown(b.Slot))
	}
	h.UpdateSlow(f.areOthersSlower(b, now), now)
	// Without a sign of work the replica may be stalled, which only the next poll shows.
	working := own == 0 || h.WorkedSince(l.PolledAt)
	f.ledger.RecordLoadExpected(b.Slot, l, working && f.policy.definition.PollInterval == 0, now)
	r.dispatch(now)
}

// IsLoadExpected reports whether the last successful poll of b showed what our own account
// explains: the next one may come later.
func (r *Router) IsLoadExpected(b *backends.Backend) bool {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.fleet.has(b) && r.fleet.ledger.IsLoadExpected(b.Slot)
}

// PollFailed records a poll that failed. timedOut: it timed out,
// as when the replica's process is stopped, or its event loop is blocked.
func (r *Router) PollFailed(b *backends.Backend, timedOut bool) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f := &r.fleet
	if !f.has(b) {
		return
	}
	now, h := r.now(), f.states[b.Slot].health
	h.RecordPollFailure(timedOut)
	check := f.stallCheck(b.Slot, b.Load(), 0, f.estimates.PrefillRate(b.Slot), now)
	h.UpdateStalled(&check)
	if h.IsStalled() || h.IsUnresponsive() {
		f.notifyStalled(b.Slot, now, &r.callbacks)
	}
	r.dispatch(now)
}

// ChecksTimedOut records that b is down because its health checks time out,
// while its connections stay open: what it was sent will not be processed.
func (r *Router) ChecksTimedOut(b *backends.Backend) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.fleet.has(b) {
		return
	}
	now := r.now()
	r.fleet.states[b.Slot].health.RecordUnresponsive()
	r.fleet.notifyStalled(b.Slot, now, &r.callbacks)
	r.dispatch(now)
}

// BackendStateChanged records that a backend's state has changed: requests may wait for
// it. For a backend that is ready again, past failures are reset.
func (r *Router) BackendStateChanged(b *backends.Backend) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	if r.fleet.has(b) && b.State() == backends.Ready {
		r.fleet.states[b.Slot].health.ForgetFailures(now)
		r.fleet.ledger.UpdateModel(b.Slot)
	}
	r.dispatch(now)
}

// ForgetCache forgets what a backend held: its replica lost its cache. What KV events say it holds stays.
func (r *Router) ForgetCache(b *backends.Backend) {
	defer restoreIndex(r.kvFollower(b))
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.fleet.has(b) {
		return
	}
	r.fleet.index.DropCache(b.Slot)
	r.fleet.estimates.ForgetReplicaProcess(b.Slot)
	r.fleet.states[b.Slot].health.ForgetSpeed()
	r.dispatch(r.now())
}

// RecordCacheReset forgets what a backend held, also what KV events say it holds: its replica has emptied its
// cache, and continues.
func (r *Router) RecordCacheReset(b *backends.Backend) {
	defer func() {
		if f := r.kvFollower(b); f != nil {
			f.RecordCacheReset()
		}
	}()
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if r.fleet.has(b) {
		r.fleet.index.DropCache(b.Slot)
		r.dispatch(r.now())
	}
}

// reportCacheReset notes the call of Options.OnCacheReset if the ledger has just found that the replica of b lost its
// cache.
func (r *Router) reportCacheReset(b *backends.Backend) {
	if n := r.fleet.ledger.CacheResets(b.Slot); n > r.fleet.states[b.Slot].cacheResets {
		r.fleet.states[b.Slot].cacheResets = n
		r.callbacks.cacheResets = append(r.callbacks.cacheResets, b)
	}
}

// IndexPlacement records that another client or proxy sent a request to b: its prompt's blocks are indexed for
// b as if they had been used now. It returns how many of them b is thought to hold: none of a prompt too long
// for it or of a backend that caches nothing. Load that is not ours is seen by polls, so it is not counted.
func (r *Router) IndexPlacement(req *Request, b *backends.Backend) (heldBlocks int) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now, f := r.now(), &r.fleet
	if !f.has(b) || req.NoEngine {
		return 0
	}
	v := f.viewOf(&f.scratch, []*backends.Backend{b}, &r.callbacks, now)
	if v.IsTooLong(req, v.Find(b)) {
		return 0
	}
	heldBlocks = f.ledger.IndexPrompt(b.Slot, req.Blocks)
	r.peers.reportIndexed(b, req.Blocks)
	r.dispatch(now)
	return heldBlocks
}

// ResetReport is what ResetBackend removed.
type ResetReport struct {
	Blocks    int                 // that the index attributed to the backend
	Breaker   health.BreakerState // before
	Estimates estimate.Summary
}

// ResetBackend forgets what is believed of b, as of a replica that has just joined: what its cache holds, what
// was learned of it, and that it failed or refused anything. What it has in flight stays, and so do figures
// that metrics count, and what the replica reported, also by KV events.
func (r *Router) ResetBackend(b *backends.Backend) ResetReport {
	defer restoreIndex(r.kvFollower(b))
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f := &r.fleet
	if !f.has(b) {
		return ResetReport{}
	}
	now, h := r.now(), f.states[b.Slot].health
	breaker, _ := h.Breaker(now)
	report := ResetReport{f.index.Len(b.Slot), breaker, f.estimates.Summary(b.Slot)}
	f.estimates.ForgetLearned(b.Slot)
	f.ledger.ForgetDecodeRate(b.Slot)
	f.index.DropCache(b.Slot)
	f.ledger.ResizeIndex(b.Slot)
	f.forgetInPolicy(b.Slot)
	b.ForgetReportsCached()
	b.ForgetMissingEndpoints()
	h.ForgetFailures(now)
	h.ForgetQueueFull()
	r.dispatch(now)
	return report
}

// BackendStatus is a backend's health.
type BackendStatus struct {
	health.Condition
	Breaker health.BreakerState
	Opens   uint64 // times that the breaker was opened, failed tries included
	Stalls  uint64 // times that it was found stalled
	Stalled bool   // when it was checked last

	Slowdown      float64 // how many times longer than usual its steps take, if it is slow; else 0
	SequenceLimit int     // how many sequences it runs at a time; 0: unknown
}

// Status returns the health of a backend. One that is not in the fleet is Draining.
func (r *Router) Status(b *backends.Backend) BackendStatus {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	s := b.Status()
	if !r.fleet.has(b) {
		return BackendStatus{Condition: health.Condition{State: Draining, Since: s.Since, Reason: s.Reason}}
	}
	now, h := r.now(), r.fleet.states[b.Slot].health
	status := BackendStatus{Condition: h.Condition(&s, b.Load(), now), Stalls: h.Stalls(), Stalled: h.IsStalled(), Slowdown: h.Slowdown(),
		SequenceLimit: h.SequenceLimit()}
	status.Breaker, status.Opens = h.Breaker(now)
	return status
}

// CountReady returns how many of the backends are Ready. A stalled one is not,
// though it gets requests where there is no other.
func (r *Router) CountReady(list []*backends.Backend) (n int) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	for _, b := range list {
		if r.fleet.isReady(b, now) {
			n++
		}
	}
	return n
}

// AwaitsModel reports whether a queued request is for a model, by its ID in the catalog.
func (r *Router) AwaitsModel(id string) (awaited bool) {
	r.withLock(func() {
		for it := range r.admission.queue.Items() {
			awaited = awaited || it.Value.req.CatalogID == id
		}
	})
	return awaited
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
	all := make([]BackendEstimates, len(r.fleet.states))
	for slot := range r.fleet.states {
		all[slot] = BackendEstimates{r.fleet.states[slot].backend, r.fleet.estimates.Summary(slot)}
	}
	return all
}

// BackendIndexStats is the state of one backend's part of the index.
type BackendIndexStats struct {
	Backend          *backends.Backend // nil: the slot is free
	Blocks, Capacity int
	Evictions        uint64
	Resets           uint64    // times that the replica was found to have lost its cache without saying so
	KV               *KVStatus // nil: its KV events are not read
}

// IndexStats returns the state of each backend's part, by slot, and about how many bytes all of them take.
func (r *Router) IndexStats() (parts []BackendIndexStats, bytes int64) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f := &r.fleet
	for slot := range f.states {
		s := BackendIndexStats{f.states[slot].backend, f.index.Len(slot), f.index.Capacity(slot), f.index.Evictions(slot),
			f.states[slot].cacheResets, nil}
		if follower := f.states[slot].follower; follower != nil {
			kvBlocks, complete := follower.Status()
			s.KV = &KVStatus{kvBlocks, f.index.CountConfirmed(slot), complete}
		}
		parts = append(parts, s)
	}
	return parts, f.index.Bytes()
}

// peerEventsAtOnce is how many events of a peer are applied while the lock is held: they take
// about as long as one decision each.
const peerEventsAtOnce = 8

// ApplyPlacements applies what a peer reports, in the order in which it happened: it counts as if
// this router had sent these requests at the time of the call. Backends that are not in the fleet
// are ignored, and so are requests beyond the bounds. The events must not be changed afterwards.
//
// Queued requests may take the room that they make after delay: several routers would otherwise
// fill it at once.
func (r *Router) ApplyPlacements(peerID uint64, events []PlacementEvent, delay time.Duration) {
	for len(events) > 0 {
		part := events[:min(peerEventsAtOnce, len(events))]
		events = events[len(part):]
		r.withLock(func() {
			now := r.now()
			for i := range part {
				r.peers.Apply(r.fleet.ledger, peerID, &part[i], r.peerRecorder(), now)
			}
		})
	}
	r.withLock(func() {
		now := r.now()
		if delay > 0 && r.admission.queue.Len() > 0 {
			r.admission.pause(now.Add(delay), now)
		}
		if !r.admission.isPaused(now) {
			r.dispatch(now)
		}
	})
}

// SyncPeer takes inFlight as all that a peer has in flight: other requests of that peer are
// removed, and those that were not known are counted, without their blocks.
func (r *Router) SyncPeer(peerID uint64, inFlight []Placement) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	r.peers.Sync(r.fleet.ledger, peerID, inFlight, r.peerRecorder(), now)
	if !r.admission.isPaused(now) {
		r.dispatch(now)
	}
}

// RemovePeer removes all that a peer has in flight: it has ended, or is not heard of any more.
func (r *Router) RemovePeer(peerID uint64) {
	r.SyncPeer(peerID, nil)
	r.withLock(func() { r.peers.Remove(peerID) })
}

// CountPeerRequests returns how many requests of peers are in flight, as far as is known.
func (r *Router) CountPeerRequests() (n int) {
	r.withLock(func() { n = r.peers.Count() })
	return n
}
