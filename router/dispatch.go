package router

import (
	"runtime/debug"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/decide"
	"warmroute/router/queue"
)

const (
	// maxReordered queued requests are matched again in each reorderInterval.
	maxReordered    = 96
	reorderInterval = 5 * TickInterval
	// scoreInterval is for how long a request that waits for a backend is not scored for another one.
	scoreInterval = TickInterval
)

// dispatch routes those of the first queued requests that can start now, in one round. It
// follows every event that may have made room.
func (r *Router) dispatch(now time.Time) {
	a, f := &r.admission, &r.fleet
	if a.queue.Len() == 0 {
		return
	}
	a.deciding = nil
	if r.onPanic != nil {
		defer a.recoverRound(now, &r.callbacks)
	}
	v := f.viewAll(&f.scratch, &r.callbacks, now)
	a.followCatalog(r.catalog(), v, &r.callbacks)
	a.expireAndPromote(v, &r.callbacks)
	if a.draining {
		a.refuseUnready(v, &r.callbacks)
	}
	a.reorder(f, v, &r.callbacks)
	for i := range v.Backends {
		v.UpdateRoom(&v.Backends[i])
	}
	a.queue.StartRound()
	rooms := a.lowPriorityRooms(f, v)
	hasRoom := func(b *backends.Backend, it *queue.Item[*QueuedRequest], g *queue.Group[*QueuedRequest]) bool {
		return v.Backends[b.Slot].HasRoom && (!v.NeedsHeadroom(&it.Value.req, it.Promoted) || rooms[g](b.Slot))
	}
	for it := a.queue.GiveNextTurn(hasRoom); it != nil; it = a.queue.GiveNextTurn(hasRoom) {
		t := it.Value
		a.deciding = t
		q, choice, err := a.decide(f, v, t)
		switch {
		case err == errQueue:
			a.queue.Skip(it)
		case err != nil:
			a.removeWithResult(t, nil, err, now, &r.callbacks)
		default:
			d := r.reserve(&f.scratch, v, q, choice)
			d.Arrival, d.QueueTime = a.queue.Arrival(it), now.Sub(it.Arrived)
			d.NoneReadyTime = it.Waited.NoneReady - t.req.Waited.NoneReady
			a.removeWithResult(t, d, nil, now, &r.callbacks)
			f.updateLowPriorityLimit(v)
			f.updateAfterSent(v, choice.Backend, &r.callbacks)
			if d.Prefill != nil {
				f.updateAfterSent(v, v.Find(d.Prefill.Backend), &r.callbacks)
			}
		}
	}
}

// recoverRound, deferred, ends a round that panicked. It refuses the request that was being decided:
// further rounds would panic at it as well, and those behind it would never have a turn. The caller is
// often the end of another request, which is not affected.
func (a *admission) recoverRound(now time.Time, due *callbacks) {
	cause := recover()
	if cause == nil {
		return
	}
	due.panics = append(due.panics, recoveredPanic{cause, debug.Stack()})
	if t := a.deciding; t != nil && a.queue.Contains(&t.item) {
		a.removeWithResult(t, nil, ErrPanicked, now, due)
	}
}

// isPaused reports whether queued requests wait before they take what others than our own requests
// have left.
func (a *admission) isPaused(now time.Time) bool { return now.Before(a.pausedUntil) }

// pause makes queued requests wait, unless they wait already. It is cut short by what our own requests leave.
func (a *admission) pause(until, now time.Time) {
	if now.Before(a.pausedUntil) {
		return
	}
	a.pausedUntil = until
	select {
	case a.pauses <- until.Sub(now):
	default: // Run has yet to read the last one
	}
}

// followCatalog updates the backends of the queued requests when the catalog has changed. Requests that came
// before any model was listed end with ErrUnknownModel if theirs is not among the first.
func (a *admission) followCatalog(c *backends.Catalog, v *decide.Fleet, due *callbacks) {
	if c == a.lastCatalog {
		return
	}
	a.lastCatalog = c
	var unknown []*QueuedRequest
	for it := range a.queue.Items() {
		t := it.Value
		updateBackends(c, &t.req)
		if list := v.FittingBackends(&t.req); !slices.Equal(list, it.Backends) {
			a.queue.SetBackends(it, list)
			t.waitsFor = noSlot
		}
		if c != nil && len(c.Models) > 0 && len(t.req.Backends) == 0 && t.req.CatalogID != "" && !t.req.AwaitsModel {
			unknown = append(unknown, t)
		}
	}
	for _, t := range unknown {
		a.removeWithResult(t, nil, ErrUnknownModel, v.Now, due)
	}
}

// expireAndPromote refuses the requests that were queued for as long as they may be, and promotes those that
// have been overtaken for as long as they may be.
func (a *admission) expireAndPromote(v *decide.Fleet, due *callbacks) {
	noneReady := func(it *queue.Item[*QueuedRequest]) bool { return v.NoneReady(&it.Value.req, it.Value.tried) }
	for it := a.queue.ExpireNext(v.Now, noneReady); it != nil; it = a.queue.ExpireNext(v.Now, noneReady) {
		err := ErrBusy
		if noneReady(it) {
			err = ErrNoneReady
		}
		a.removeWithResult(it.Value, nil, err, v.Now, due)
	}
}

// refuseUnready refuses the requests for which no backend is ready.
func (a *admission) refuseUnready(v *decide.Fleet, due *callbacks) {
	for _, g := range slices.Clone(a.queue.Groups()) {
		if slices.ContainsFunc(g.Backends, v.IsAvailable) {
			continue
		}
		for it := g.First(); it != nil; it = g.First() {
			a.removeWithResult(it.Value, nil, ErrNoneReady, v.Now, due)
		}
	}
}

// reorder orders the next maxReordered queued requests by what each would have to compute now, once in each
// reorderInterval: since it was queued, a prefix that it shares with others may have been computed, or evicted. Those that have become
// late are refused, or lose the lead that their target gave them.
func (a *admission) reorder(f *fleet, v *decide.Fleet, due *callbacks) {
	if v.Now.Sub(a.reorderedAt) < reorderInterval {
		return
	}
	a.reorderedAt = v.Now
	var refused []*QueuedRequest
	a.queue.ReorderNext(maxReordered, func(it *queue.Item[*QueuedRequest]) (seconds float64) {
		p, late := a.leastPrefill(f, v, it.Value)
		if late {
			it.FirstTokenDue = time.Time{}
			if t := it.Value; refusesLate(&t.req, t.tried) {
				refused = append(refused, t)
			}
		}
		return p.Seconds
	})
	for _, t := range refused {
		a.removeWithResult(t, nil, ErrLate, v.Now, due)
		a.queue.RefundTenant(&t.item)
	}
}

// lowPriorityRooms returns for each group, if a low-priority request is queued, a function that reports whether a
// backend may start one of the group's low-priority requests.
func (a *admission) lowPriorityRooms(f *fleet, v *decide.Fleet) map[*queue.Group[*QueuedRequest]]func(slot int) bool {
	if !a.queue.HasLowPriority() {
		return nil
	}
	rooms := map[*queue.Group[*QueuedRequest]]func(int) bool{}
	for _, g := range a.queue.Groups() {
		rooms[g] = f.lowPriorityRoom(v, g.Backends, f.ledger)
	}
	return rooms
}

// decide takes the steps of route for a queued request at its turn. It returns errQueue if the
// request cannot start, after it has claimed what the request waits for.
func (a *admission) decide(f *fleet, v *decide.Fleet, t *QueuedRequest) (*decide.Query, decide.Choice, error) {
	q, c := f.matchQueued(t), &f.scratch.candidates
	if t.waitsFor != noSlot && !v.Backends[t.waitsFor].HasRoom && v.Now.Sub(t.scoredAt) < scoreInterval {
		return nil, decide.Choice{}, errQueue
	}
	if err := f.filter(&f.scratch, v, q, f.ledger); err != nil { // those that it may try are not among those with room
		if v.IsEndpointMissing(&t.req) { // as others have found out since it was queued
			return nil, decide.Choice{}, ErrEndpointMissing
		}
		if err == ErrMaxInFlight {
			v.ClaimSequences(q, c)
		}
		return nil, decide.Choice{}, errQueue
	}
	t.scoredAt = v.Now
	v.Waiting = a.queue.WaitingAhead(queue.LowPriority, q.Backends).Count
	choice := v.Choose(q, c, f.policy.Policy, nil)
	switch v.BlockedBy(q, choice) {
	case decide.NotBlocked:
		return q, choice, nil
	case decide.BlockedByNextTurns: // these may be behind it, and must not wait for it
	default:
		t.waitsFor = choice.Backend.Slot
		v.Claim(q, t.waitsFor)
	}
	return nil, decide.Choice{}, errQueue
}
