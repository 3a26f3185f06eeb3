package router

import (
	"cmp"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
	"warmroute/router/queue"
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
	// settleDelay is after how long in the queue a request keeps the backend that it
	// waits for: the best one can change so often that a long prompt finds each of
	// them busy in turn.
	settleDelay = 2 * time.Second
	// maxReordered queued requests are matched again in each reorderInterval.
	maxReordered    = 96
	reorderInterval = 5 * TickInterval
	maxTimeAhead    = 24 * time.Hour // the longest that a request may be queued
)

// claim is what queued requests that cannot be sent yet claim of a backend for one
// round: nothing behind them may take it.
type claim struct {
	uncached, kv float64 // tokens
	sequences    int64
}

// dispatchQueued routes those of the first queued requests that can start now. It
// follows every event that may have made room.
func (r *Router) dispatchQueued(now time.Time) {
	if r.queue.Len() == 0 {
		return
	}
	r.deciding = nil
	if r.onPanic != nil {
		defer r.recoverDispatch(now)
	}
	r.refreshQueuedBackends()
	r.expireTickets(now)
	if r.draining {
		r.refuseUnready(now)
	}
	r.reorderQueue(now)
	r.clearClaims()
	for slot := range r.states {
		r.states[slot].room = r.prefillRoom(slot, now)
	}
	r.queue.StartRound()
	if r.queue.HasBatch() {
		for _, g := range r.queue.Groups() {
			g.Headroom = r.batchHeadroom(g.Backends, now)
		}
	}
	hasRoom := func(b *backends.Backend, it *queue.Item[*Ticket], g *queue.Group[*Ticket]) bool {
		return r.states[b.Slot].room > 0 &&
			(!r.batchNeedsHeadroom(&it.Value.req, it.Promoted, now) || r.canStartBatch(b.Slot, g.Headroom, now))
	}
	for it := r.queue.GiveNextTurn(hasRoom); it != nil; it = r.queue.GiveNextTurn(hasRoom) {
		r.routeQueuedOrClaim(it.Value, now)
	}
	r.clearClaims()
}

// recoverDispatch, deferred, ends a round that panicked. It refuses the request that was being decided:
// further rounds would panic at it as well, and those behind it would never have a turn. The caller is
// often the end of another request, which is not affected.
func (r *Router) recoverDispatch(now time.Time) {
	cause := recover()
	if cause == nil {
		return
	}
	r.callbacks.panics = append(r.callbacks.panics, recoveredPanic{cause, debug.Stack()})
	r.clearClaims()
	if t := r.deciding; t != nil && r.queue.Contains(&t.item) {
		r.finishTicket(t, nil, ErrPanicked, now)
	}
}

// reorderQueue orders the next maxReordered queued requests by what each would have to compute now,
// once in each reorderInterval: since it was queued, a prefix that it shares with others may have
// been computed, or evicted.
func (r *Router) reorderQueue(now time.Time) {
	if now.Sub(r.reorderedAt) < reorderInterval {
		return
	}
	r.reorderedAt = now
	r.queue.ReorderNext(maxReordered, func(it *queue.Item[*Ticket]) (seconds float64) {
		r.beginQueuedDecision(it.Value, now)
		_, _, seconds = r.leastPrefill()
		return seconds
	})
}

// leastPrefill returns what the candidates for the request would have to compute at least, how many
// tokens its backends prefill together in a second, and how long the prefill takes on one candidate.
// The whole prompt and the median rate are used where there is no candidate.
func (r *Router) leastPrefill() (tokens, rate, seconds float64) {
	err := r.filterBackends()
	d := &r.decision
	median := r.estimates.MedianPrefillRate()
	rate = cmp.Or(d.fleetRate, median)
	if err != nil {
		tokens = d.promptTokens()
		return tokens, rate, tokens / median
	}
	tokens = d.minUncachedTokens()
	sum := 0.0
	for i := range d.candidates {
		sum += d.candidates[i].PrefillRate
	}
	return tokens, rate, tokens * float64(len(d.candidates)) / sum
}

func (r *Router) clearClaims() {
	for slot := range r.states {
		r.states[slot].claimed = claim{}
	}
}

// routeQueuedOrClaim takes the steps of route for a queued request at its turn: it is sent
// if it can start, and else claims what it waits for.
func (r *Router) routeQueuedOrClaim(t *Ticket, now time.Time) {
	r.beginQueuedDecision(t, now)
	if t.waitsFor != nowhere && !r.fitsNextStepAnywhere() {
		r.queue.Skip(&t.item)
		r.claimTokensForRound(t.waitsFor)
		return
	}
	if err := r.filterBackends(); err != nil { // those that it may try are not among those with room
		if r.isEndpointMissing(&t.req, now) { // as others have found out since it was queued
			r.finishTicket(t, nil, ErrEndpointMissing, now)
			return
		}
		r.queue.Skip(&t.item)
		if err == ErrMaxInFlight {
			r.claimSequencesOnFreest()
		}
		return
	}
	chosen := r.score()
	if !r.canAdmit(chosen) {
		if chosen = r.stickyCandidate(t, chosen); !r.canAdmit(chosen) {
			r.queue.Skip(&t.item)
			if r.blockedBy(chosen) == blockedByNextTurns {
				return // these may be behind it, and must not wait for it
			}
			t.waitsFor = r.decision.candidates[chosen].Slot
			r.claimTokensForRound(t.waitsFor)
			return
		}
	}
	d := r.reserve(chosen)
	d.QueueTime = now.Sub(t.item.Arrived)
	d.OutageTime = t.item.Waited.Outage - t.req.Waited.Outage
	r.finishTicket(t, d, nil, now)
	slot := d.Backend.Slot
	r.states[slot].room = r.prefillRoom(slot, now)
}

// beginQueuedDecision starts the decision of a queued request. It is matched again if
// the index has changed.
func (r *Router) beginQueuedDecision(t *Ticket, now time.Time) {
	r.deciding = t
	r.beginDecision(&t.req, t.tried, now)
	r.decision.promoted = t.item.Promoted
	if v := r.index.Version(); t.indexVersion != v {
		if len(t.matched) != len(r.states) {
			t.matched = make([]int, len(r.states))
		}
		r.index.Match(t.req.Blocks, t.matched)
		t.indexVersion = v
	}
	r.decision.matched = t.matched
	r.decision.linked = r.findLinked()
}

// stickyCandidate returns which candidate a queued request waits for, where the best
// one cannot start it: after settleDelay the one that it waited for before.
func (r *Router) stickyCandidate(t *Ticket, best int) (chosen int) {
	if r.decision.now.Sub(t.item.Arrived) < settleDelay {
		return best
	}
	if at := slices.IndexFunc(r.decision.candidates, func(c policy.Candidate) bool { return c.Slot == t.waitsFor }); at >= 0 {
		return at
	}
	return best
}

// fitsNextStepAnywhere reports whether a backend has room in its next step for the request.
// Where none has, it need not be scored: it waits for the one that was the best last
// time.
func (r *Router) fitsNextStepAnywhere() bool {
	for _, b := range r.decision.req.Backends {
		if r.requestUncachedTokens(b.Slot) <= r.states[b.Slot].room {
			return true
		}
	}
	return false
}

// requestUncachedTokens returns how many tokens of the matched request the backend of a
// slot would have to compute.
func (r *Router) requestUncachedTokens(slot int) float64 {
	return max(minUncachedTokens, r.tokensAfter(r.decision.matched[slot]))
}

// claimTokensForRound claims what the request takes of a backend for the rest of the
// round. Where there is no room anyway, requiredKVTokens is not computed: within a round no
// room becomes free.
func (r *Router) claimTokensForRound(slot int) {
	s := &r.states[slot]
	s.claimed.uncached += r.requestUncachedTokens(slot)
	if s.room == 0 {
		return
	}
	s.claimed.kv += r.requiredKVTokens(slot)
	s.room = r.prefillRoom(slot, r.decision.now)
}

// claimSequencesOnFreest claims, on the full backend with the most free ones, the slots of a
// request that counts for more than any backend may have beside what it has; else
// requests that count for one would take each slot that becomes free.
func (r *Router) claimSequencesOnFreest() {
	d := &r.decision
	freest := slices.MaxFunc(d.full, func(a, b *backends.Backend) int { return cmp.Compare(r.freeSequences(a), r.freeSequences(b)) })
	s := &r.states[freest.Slot]
	s.claimed.sequences += d.req.sequences()
	s.room = r.prefillRoom(freest.Slot, d.now)
}

// freeSequences returns how many more sequences a backend may have by its MaxInFlight, without those that
// were claimed in this round.
func (r *Router) freeSequences(b *backends.Backend) int64 {
	return int64(r.liveStateOf(b).options.MaxInFlight) - b.KnownInFlight() - r.states[b.Slot].claimed.sequences
}

// expireTickets refuses the requests that were queued for as long as they may be.
func (r *Router) expireTickets(now time.Time) {
	isOutage := func(it *queue.Item[*Ticket]) bool { return r.isOutage(it.Value, now) }
	for it := r.queue.PromoteAndFindExpired(now, isOutage); it != nil; it = r.queue.PromoteAndFindExpired(now, isOutage) {
		err := ErrQueueTimeout
		if isOutage(it) {
			err = ErrNoneReady
		}
		r.finishTicket(it.Value, nil, err, now)
	}
}

// isOutage reports whether no backend that could take a queued request is ready and makes
// progress.
func (r *Router) isOutage(t *Ticket, now time.Time) bool {
	return !slices.ContainsFunc(t.req.Backends, func(b *backends.Backend) bool {
		return r.isAvailable(b) && !r.states[b.Slot].health.stalled && !slices.Contains(t.tried, b) && !b.LacksEndpoint(t.req.Endpoint, now)
	})
}

// refuseUnready refuses the requests for which no backend is ready.
func (r *Router) refuseUnready(now time.Time) {
	for _, g := range slices.Clone(r.queue.Groups()) {
		if slices.ContainsFunc(g.Backends, r.isAvailable) {
			continue
		}
		for it := g.First(); it != nil; it = g.First() {
			r.finishTicket(it.Value, nil, ErrNoneReady, now)
		}
	}
}

// prefillRoom returns how many uncached tokens a backend could be sent now, after what
// was claimed in this round; 0 for none.
func (r *Router) prefillRoom(slot int, now time.Time) (uncachedTokens float64) {
	s := &r.states[slot]
	b := s.backend
	if b == nil || !r.isAvailable(b) || r.exceedsMaxInFlight(b, 1+s.claimed.sequences) {
		return 0
	}
	if !r.isQueueEnabled() || b.KnownInFlight() == 0 {
		return math.Inf(1)
	}
	if r.isWaitingForKV(slot, now) || !r.fitsKV(slot, 0, now) {
		return 0
	}
	_, external := r.externalLoad(r.liveStateOf(b).load, now)
	return r.stepRoom(slot, s.load.queuedTokens(now, r.estimates.PrefillRate(slot))+s.claimed.uncached, external)
}

// stepRoom returns how many uncached tokens may be added to what is queued, of
// ours and of other clients, for the next step of a backend's engines. When fewer requests of
// ours are queued than it has engines any number may: other clients may always have something
// queued. So it is while the prefill rate is unknown: what is queued would be worked off too
// slowly in our account, and an engine that is faster than thought would be idle.
func (r *Router) stepRoom(slot int, ourQueuedTokens, externalQueuedTokens float64) (uncachedTokens float64) {
	configured := r.settings.Queue.StepTokens > 0
	s := &r.states[slot]
	engines := countEngines(r.liveStateOf(s.backend).load)
	if s.claimed.uncached == 0 && len(s.load.pending) < engines || !configured && !r.estimates.KnowsPrefillRate(slot) {
		return math.Inf(1)
	}
	if r.policy.definition.PushesToIdle {
		return 0
	}
	most := stepShare * float64(cmp.Or(r.settings.Queue.StepTokens, defaultStepTokens))
	if !configured {
		most = max(most, queuedSeconds*r.estimates.PrefillRate(slot))
	}
	return max(0, most*float64(engines)-ourQueuedTokens-externalQueuedTokens)
}

// blocker is what keeps a request from starting soon on a backend.
type blocker int

const (
	blockedByNothing   blocker = iota
	blockedByStep              // its next step is full
	blockedByQueue             // requests wait there for room in the KV cache
	blockedByKV                // its KV cache has no room for the request
	blockedByNextTurns         // its KV cache has no room beside what conversations will use soon
)

// String returns the reason as it is explained to operators.
func (b blocker) String() string {
	return [...]string{"", "its next step is full", "requests wait there for room", "its KV cache has no room", "its KV cache has no room beside conversations whose next turn is expected"}[b]
}

// blockedBy returns why the chosen candidate cannot start the request now, or nearly
// so; see docs/routing.md.
func (r *Router) blockedBy(chosen int) blocker {
	d := &r.decision
	c, s := &d.candidates[chosen], &r.states[d.candidates[chosen].Slot]
	switch {
	case r.isTooLong(&d.req, c.Slot):
		return blockedByNothing // it will be refused
	case s.health.breaker.isProbeDue(d.now):
		return blockedByNothing // or it would wait for what no request tries
	case s.backend.KnownInFlight() == 0:
		return blockedByNothing // nothing of ours could make room, and what others have there may last
	}
	ours := s.load.queuedTokens(d.now, c.PrefillRate) + s.claimed.uncached
	switch {
	case c.UncachedTokens > r.stepRoom(c.Slot, ours, c.QueuedTokens-ours):
		return blockedByStep
	case r.isWaitingForKV(c.Slot, d.now), r.batchNeedsHeadroom(&d.req, d.promoted, d.now) && r.hasWaiting(c.Slot, d.now):
		return blockedByQueue
	}
	kept := 0.0
	if !d.promoted {
		kept = float64(r.kept.countForOthers(c.Slot, d.req.conversationKey(), d.now))
	}
	if r.fitsKV(c.Slot, d.promptTokens()+kept, d.now) {
		return blockedByNothing
	}
	// Exact, now that it matters.
	need := r.requiredKVTokens(c.Slot)
	if capacity := s.kv.capacity; capacity > 0 && need > float64(capacity) {
		return blockedByNothing // it never fits: the engine decides
	}
	switch {
	case r.fitsKV(c.Slot, need+kept, d.now):
		return blockedByNothing
	case r.fitsKV(c.Slot, need, d.now):
		return blockedByNextTurns
	}
	return blockedByKV
}
