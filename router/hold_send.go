package router

import (
	"context"
	"time"

	"warmroute/backends"
)

const (
	stepTokens      = 8192 // a scheduler's budget for a step, until learned
	leastStepTokens = 2048 // where a lower figure is learned, no step was full yet
	mostStepTokens  = 16384
)

// reservation is what held requests that cannot go yet have a claim to, for one
// round: nothing behind them may take it.
type reservation struct{ uncached, cache float64 }

// dispatch sends those of the first held requests that can go now. It follows
// everything that may have made room.
func (r *Router) dispatch(now time.Time) {
	if r.queue.count == 0 {
		return
	}
	r.expire(now)
	clear(r.reserved)
	for slot, b := range r.fleet {
		r.open[slot] = r.isOpen(b, now)
	}
	r.queue.rewind()
	for range mostScored {
		h := r.queue.next(r.open)
		if h == nil {
			break
		}
		r.turn(h, now)
	}
	clear(r.reserved)
}

// turn sends a held request if it can go, and else lets it reserve what it
// waits for.
func (r *Router) turn(h *Held, now time.Time) {
	r.match(h)
	chosen, err := r.score(&h.req, h.tried, now)
	if err != nil { // those that it may try are not among the open ones
		h.group.at++
		return
	}
	slot := r.candidates[chosen].Slot
	if r.late && !r.startsSoon(&h.req, chosen, now) {
		h.group.at++
		r.reserved[slot].uncached += r.candidates[chosen].Uncached
		r.reserved[slot].cache += r.cacheNeed(&h.req, slot)
	} else {
		r.take(h)
		d := r.reserve(&h.req, chosen, now)
		d.Held = now.Sub(h.arrived)
		h.deliver(d, nil)
	}
	r.open[slot] = r.isOpen(r.fleet[slot], now)
}

// expire answers the requests that were held as long as they may be.
func (r *Router) expire(now time.Time) {
	for h := r.queue.oldest; h != nil && r.holding.Time > 0 && now.Sub(h.arrived) >= r.holding.Time; h = r.queue.oldest {
		r.take(h)
		err := ErrNoneReady
		for _, b := range h.req.Backends {
			if available(b, h.tried) {
				err = ErrHeldTooLong
			}
		}
		h.deliver(nil, err)
	}
}

// isOpen reports whether a backend could take a request, if only the smallest.
// Where none is, nothing needs to be scored.
func (r *Router) isOpen(b *backends.Backend, now time.Time) bool {
	if !available(b, nil) || isFull(b, 1) {
		return false
	}
	if !r.late || b.InFlight.Load() == 0 {
		return true
	}
	_, queued := r.foreign(b.Load(), now)
	pending := r.accounts[b.Slot].waiting(now, r.rate(b.Slot)) + queued*r.uncached.value + r.reserved[b.Slot].uncached
	return r.roomInStep(b.Slot, pending, leastUncached) && !r.starved(b, now) && r.cacheFits(b.Slot, 0, now)
}

// startsSoon reports whether the chosen candidate can start the request at
// once, or nearly so; see docs/design.md, "Hold queue".
func (r *Router) startsSoon(req *Request, chosen int, now time.Time) bool {
	c, b := &r.candidates[chosen], r.slots[chosen]
	if b.InFlight.Load() == 0 {
		return true // nothing of ours could make room, and what others have there may last
	}
	if !r.roomInStep(c.Slot, c.Pending, c.Uncached) || r.starved(b, now) {
		return false
	}
	if r.cacheFits(c.Slot, r.tokens(req), now) {
		return true
	}
	// Exact, now that it matters: what others use of the prompt costs nothing.
	return r.cacheFits(c.Slot, r.cacheNeed(req, c.Slot), now)
}

// roomInStep reports whether so many uncached tokens find room in the next step
// of a backend's engine. When nothing is pending any number does.
func (r *Router) roomInStep(slot int, pending, uncached float64) bool {
	return pending == 0 || pending+uncached <= r.stepTokens(slot)
}

// stepTokens is how many tokens a backend's engine takes in one step, about.
func (r *Router) stepTokens(slot int) float64 {
	switch learned := r.lessons[slot].steps.budget; {
	case r.holding.StepTokens > 0:
		return float64(r.holding.StepTokens)
	case learned > 0:
		return float64(min(max(learned, leastStepTokens), mostStepTokens))
	}
	return stepTokens
}

// starved reports whether the replica says that requests wait because there is
// no room for them, and as many have not started since.
func (r *Router) starved(b *backends.Backend, now time.Time) bool {
	c := &r.caches[b.Slot]
	return c.starving > 0 && now.Sub(c.polledAt) <= foreignLasts*r.pollInterval
}

// Changed tells that a backend's state has changed: requests may be waiting for it.
func (r *Router) Changed(*backends.Backend) { r.Tick() }

// Tick looks at what time alone changes: work that was done, loads that fade,
// requests held too long. Whoever drives a Router without Run calls it every
// TickInterval or so while HeldRequests is not 0.
func (r *Router) Tick() {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	r.dispatch(r.now())
}

// TickInterval is how often time is looked at while requests are held. Most are
// sent by what happens, not by this.
const TickInterval = 20 * time.Millisecond

// Run ticks while requests are held, until ctx is done.
func (r *Router) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.began:
			r.tickWhileHeld(ctx)
		}
	}
}

func (r *Router) tickWhileHeld(ctx context.Context) {
	ticker := time.NewTicker(TickInterval)
	defer ticker.Stop()
	for r.HeldRequests() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			r.Tick()
		}
	}
}
