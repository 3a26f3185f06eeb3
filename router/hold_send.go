package router

import (
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

const (
	stepTokens      = 8192 // a scheduler's budget for a step, until learned
	leastStepTokens = 2048 // where a lower figure is learned, no step was full yet
	mostStepTokens  = 16384
)

// reservation is what held requests that cannot go yet have a claim to, for one
// round: nothing behind them may take it.
type reservation struct {
	uncached, cache float64
	sequences       int64
}

// dispatch sends those of the first held requests that can go now. It follows
// everything that may have made room.
func (r *Router) dispatch(now time.Time) {
	if r.queue.count == 0 {
		return
	}
	r.follow()
	r.expire(now)
	if r.stopping {
		r.refuseUnready()
	}
	clear(r.reserved)
	for slot := range r.fleet {
		r.room[slot] = r.roomOn(slot, now)
	}
	r.queue.rewind()
	r.measureHeadroom(now)
	takes := func(b *backends.Backend, h *Ticket) bool {
		return r.room[b.Slot] > 0 && (!r.needsHeadroom(&h.req, now) || r.mayStartBatch(b.Slot, &h.group.headroom, now))
	}
	for h := r.queue.next(takes); h != nil; h = r.queue.next(takes) {
		h.group.turns++
		r.turn(h, now)
	}
	clear(r.reserved)
}

// turn sends a held request if it can go, and else lets it reserve what it
// waits for.
func (r *Router) turn(h *Ticket, now time.Time) {
	r.match(h)
	if h.waitsFor != nowhere && !r.fitsAnywhere(h) {
		h.group.at++
		r.claim(h, h.waitsFor, now)
		return
	}
	chosen, err := r.score(&h.req, h.tried, now)
	if err != nil { // those that it may try are not among the open ones
		h.group.at++
		if err == ErrMaxInFlight {
			r.claimPlaces(h, now)
		}
		return
	}
	if r.late && !r.startsSoon(&h.req, chosen, now) {
		if chosen = r.settled(h, chosen, now); !r.startsSoon(&h.req, chosen, now) {
			h.group.at++
			h.waitsFor = r.candidates[chosen].Slot
			r.claim(h, h.waitsFor, now)
			return
		}
	}
	slot := r.candidates[chosen].Slot
	r.take(h)
	d := r.reserve(&h.req, h.tried, chosen, now)
	d.QueueTime = now.Sub(h.arrived)
	h.deliver(d, nil)
	r.room[slot] = r.roomOn(slot, now)
}

// settleAfter is how long a request may be held until it changes no more what
// backend it waits for: which one is the cheapest can change so often that a
// long prompt finds each of them busy in turn.
const settleAfter = 2 * time.Second

// settled is the candidate that a held request waits for, where the cheapest one
// cannot start it.
func (r *Router) settled(h *Ticket, cheapest int, now time.Time) int {
	if now.Sub(h.arrived) < settleAfter {
		return cheapest
	}
	if at := slices.IndexFunc(r.candidates, func(c policy.Candidate) bool { return c.Slot == h.waitsFor }); at >= 0 {
		return at
	}
	return cheapest
}

// nowhere is what a request waits for that was not scored yet.
const nowhere = -1

// fitsAnywhere reports whether a backend has room in its next step for the held
// request that was matched last. Where none has, scoring it is of no use: it
// waits for the one that was the cheapest last time.
func (r *Router) fitsAnywhere(h *Ticket) bool {
	perToken := r.texts.bytesPerToken(h.req.Model)
	for _, b := range h.req.Backends {
		if r.uncachedOn(h, b.Slot, perToken) <= r.room[b.Slot] {
			return true
		}
	}
	return false
}

func (r *Router) uncachedOn(h *Ticket, slot int, perToken float64) float64 {
	return max(leastUncached, float64(h.req.Bytes-h.depth[slot]*r.blockBytes)/perToken)
}

// claim reserves what h will take of a backend for the rest of the round. Where
// there is no room anyway, the walk along the prompt that cacheNeed takes would
// tell nothing: within a round no room falls free.
func (r *Router) claim(h *Ticket, slot int, now time.Time) {
	r.reserved[slot].uncached += r.uncachedOn(h, slot, r.texts.bytesPerToken(h.req.Model))
	if r.room[slot] == 0 {
		return
	}
	r.reserved[slot].cache += r.cacheNeed(&h.req, slot)
	r.room[slot] = r.roomOn(slot, now)
}

// claimPlaces reserves the places of a request that counts for more than any
// backend may have beside what it has; else requests that count for one would
// take each place that falls free. The backend with the most of them free is the
// one: nobody takes those, so that it changes for one with yet more at most.
func (r *Router) claimPlaces(h *Ticket, now time.Time) {
	var most *backends.Backend
	free := func(b *backends.Backend) int64 {
		return int64(b.Options().MaxInFlight) - b.InFlight.Load() - r.reserved[b.Slot].sequences
	}
	for _, b := range h.req.Backends {
		if r.available(b, h.tried) && (most == nil || free(b) > free(most)) {
			most = b
		}
	}
	r.reserved[most.Slot].sequences += h.req.sequences()
	r.room[most.Slot] = r.roomOn(most.Slot, now)
}

// expire answers the requests that were held as long as they may be.
func (r *Router) expire(now time.Time) {
	for len(r.queue.due) > 0 && !now.Before(r.queue.due[0].due) {
		h := r.queue.due[0]
		if now.Before(h.until) {
			r.queue.promote(h)
			continue
		}
		r.take(h)
		err := ErrNoneReady
		for _, b := range h.req.Backends {
			if r.available(b, h.tried) {
				err = ErrQueueTimeout
			}
		}
		h.deliver(nil, err)
	}
}

// refuseUnready answers the requests for which no backend is ready.
func (r *Router) refuseUnready() {
	for _, g := range slices.Clone(r.queue.groups) {
		if slices.ContainsFunc(g.backends, func(b *backends.Backend) bool { return r.available(b, nil) }) {
			continue
		}
		for len(g.front) > 0 {
			h := g.front[0]
			r.take(h)
			h.deliver(nil, ErrNoneReady)
		}
	}
}

// roomOn is how many uncached tokens a backend could be sent now, 0 for none.
func (r *Router) roomOn(slot int, now time.Time) float64 {
	b := r.fleet[slot]
	if b == nil || !r.available(b, nil) || isFull(b, 1+r.reserved[slot].sequences) {
		return 0
	}
	if !r.late || b.InFlight.Load() == 0 {
		return math.Inf(1)
	}
	if r.starved(slot, now) || !r.cacheFits(slot, 0, now) {
		return 0
	}
	_, queued := r.foreign(b.Load(), now)
	return r.roomInStep(slot, r.accounts[slot].waiting(now, r.rate(slot))+r.reserved[slot].uncached, queued*r.uncached.value)
}

// startsSoon reports whether the chosen candidate can start the request at once,
// or nearly so.
func (r *Router) startsSoon(req *Request, chosen int, now time.Time) bool {
	return r.lacks(req, chosen, now) == lacksNothing
}

// lack is what keeps a request from starting soon on a backend.
type lack int

const (
	lacksNothing lack = iota
	lacksStep         // its next step is full
	lacksStart        // requests wait there because there is no room for them
	lacksCache        // its KV cache has no room
)

// lacks says why the chosen candidate cannot start the request at once, or nearly
// so; see docs/routing.md, "The admission queue".
func (r *Router) lacks(req *Request, chosen int, now time.Time) lack {
	c := &r.candidates[chosen]
	switch {
	case r.tooLong(req, c.Slot):
		return lacksNothing // or rather, is refused at once
	case r.progress[c.Slot].breaker.due(now):
		return lacksNothing // or it would wait for what nobody tries
	}
	if r.slots[chosen].InFlight.Load() == 0 {
		return lacksNothing // nothing of ours could make room, and what others have there may last
	}
	ours := r.accounts[c.Slot].waiting(now, c.PrefillRate) + r.reserved[c.Slot].uncached
	switch {
	case c.UncachedTokens > r.roomInStep(c.Slot, ours, c.QueuedTokens-ours):
		return lacksStep
	case r.starved(c.Slot, now):
		return lacksStart
	case r.cacheFits(c.Slot, r.tokens(req), now):
		return lacksNothing
	}
	// Exact, now that it matters: what others use of the prompt costs nothing.
	need := r.cacheNeed(req, c.Slot)
	if capacity := r.caches[c.Slot].capacity; capacity > 0 && need > float64(capacity) {
		return lacksNothing // it never fits: the engine has to say what becomes of it
	}
	if r.cacheFits(c.Slot, need, now) {
		return lacksNothing
	}
	return lacksCache
}

// stepShare is how much of a step is sent ahead of it. A whole one would keep
// the engine as busy, but what waits there longer could have gone elsewhere.
const stepShare = 0.5

// roomInStep is how many uncached tokens may join what is pending, of ours and
// of others, for the next step of a backend's engine. When nothing of ours is
// pending any number may: others may always have something waiting.
func (r *Router) roomInStep(slot int, ours, others float64) float64 {
	if ours == 0 {
		return math.Inf(1)
	}
	return max(0, stepShare*r.stepTokens(slot)-ours-others)
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
func (r *Router) starved(slot int, now time.Time) bool {
	c := &r.caches[slot]
	return c.starving > 0 && now.Sub(c.polledAt) <= foreignLasts*r.pollInterval
}
