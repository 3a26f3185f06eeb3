package router

import (
	"time"

	"warmroute/backends"
	"warmroute/router/queue"
)

// needsHeadroom reports whether a request starts only where there is headroom for
// batch requests.
func (r *Router) needsHeadroom(req *Request, promoted bool, now time.Time) bool {
	return r.isQueueEnabled() && r.settings.Queue.BatchSlowdown > 0 && req.class() == queue.Batch && !promoted && !req.NoEngine &&
		r.interactive.IsRecent(now)
}

// headroomOf computes how much room some backends have for batch requests.
func (r *Router) headroomOf(list []*backends.Backend, now time.Time) queue.Headroom {
	return r.interactive.Headroom(r.settings.Queue.BatchSlowdown, now, func(yield func(*queue.ClassLoad) bool) {
		for _, b := range list {
			if r.isAvailable(b) && !yield(&r.states[b.Slot].classes) {
				return
			}
		}
	})
}

// canStartBatch reports whether a backend has room for a batch request beside its
// interactive ones. Where it shares itself with those, it has nothing else to prefill.
func (r *Router) canStartBatch(slot int, h queue.Headroom, now time.Time) bool {
	s := &r.states[slot]
	admits, shared := s.classes.AdmitsBatch(h, now)
	return admits && (!shared || s.load.queuedTokens(now, r.estimates.PrefillRate(slot))+s.claimed.uncached == 0 &&
		r.fitsKV(slot, minFreeKVShare*float64(s.kv.capacity), now))
}

// filterHeadroom keeps the candidates on which a batch request may start.
func (r *Router) filterHeadroom() error {
	d := &r.decision
	h := r.headroomOf(d.req.Backends, d.now)
	kept := 0
	for i, b := range d.backends {
		if r.canStartBatch(b.Slot, h, d.now) {
			d.backends[kept], d.candidates[kept] = b, d.candidates[i]
			kept++
		}
	}
	d.backends, d.candidates = d.backends[:kept], d.candidates[:kept]
	if kept == 0 {
		return errNoHeadroom
	}
	return nil
}
