package router

import (
	"time"

	"warmroute/backends"
	"warmroute/router/index"
	"warmroute/router/policy"
)

// RecordPlacement tells that a request was sent to b by somebody else: the index takes its
// prompt's blocks for b's, as if they had been used now. It returns how many of them
// b is thought to hold, which is none of a prompt too long for it or of a backend
// that caches nothing. Load that is not ours is seen by the polls, so it counts
// nowhere.
func (r *Router) RecordPlacement(req *Request, b *backends.Backend) (blocks int) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) || req.NoEngine || r.tooLong(req, b.Slot) {
		return 0
	}
	r.depth = r.matched
	r.index.Match(req.Blocks, r.depth)
	var p index.Pin
	r.index.Add(&p, b.Slot, req.Blocks, r.depth[b.Slot])
	left := p.Omitted
	r.index.Release(&p, nil)
	r.dispatch(r.now())
	return len(req.Blocks) - left
}

// ResetReport is what Router.ResetBackend took away.
type ResetReport struct {
	Blocks        int          // that the index thought the backend to hold
	Breaker       BreakerState // as it stood
	CacheFactor   float64      // learned, of the cache's size over what the replica reports
	PrefillRate   float64      // learned, in tokens a second
	AnswerTokens  float64      // learned
	BytesPerToken float64      // learned, of the backend's own prompts
}

// ResetBackend forgets what is believed of b, as of a replica that has just joined: what
// its cache holds, what was learned of it, and that it failed or refused anything.
// What it has in flight stays, and so do figures that metrics count, and what it
// said of itself.
func (r *Router) ResetBackend(b *backends.Backend) (was ResetReport) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) {
		return was
	}
	now, l, p := r.now(), &r.lessons[b.Slot], r.progress[b.Slot]
	was = ResetReport{
		Blocks: r.index.Len(b.Slot), Breaker: p.breaker.state(now), CacheFactor: l.reach.factor(),
		PrefillRate: r.rate(b.Slot), AnswerTokens: l.answer.value, BytesPerToken: l.texts.value(),
	}
	fresh := newLessons()
	fresh.told, fresh.off, fresh.predicted, fresh.observed = l.told, l.off, l.predicted, l.observed
	*l = fresh
	r.learnRate()
	r.caches[b.Slot].speed = average{decodeRate, decodeRatePrior}
	r.index.Drop(b.Slot)
	r.resize(b.Slot)
	if t, ok := r.policy.(policy.Forgetter); ok {
		t.Forget(b.Slot)
	}
	b.ReportsCached.Store(false)
	p.breaker.close(now)
	p.stops, p.refused, p.freed = time.Time{}, time.Time{}, 0
	p.missed, p.hung = 0, false
	r.dispatch(now)
	return was
}
