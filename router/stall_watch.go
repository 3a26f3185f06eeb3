package router

import (
	"slices"

	"warmroute/backends"
)

// StallListener is told when the backend of a request makes no progress. It is called
// without the router's lock, and may be called once more while the request's Decision
// is being committed or released.
type StallListener interface {
	// BackendStalled says whether another backend seems able to answer the request, and
	// whether the replica is hung: it answers nobody, not even its health checks.
	BackendStalled(elsewhere, hung bool)
}

// stallNotice is a call of a StallListener that is due when the lock is released.
type stallNotice struct {
	to              StallListener
	elsewhere, hung bool
}

// stallWatch is what a Decision keeps for its StallListener. Guarded by Router.mu.
type stallWatch struct {
	listener StallListener       // nil: none
	backends []*backends.Backend // that could have been chosen, except for tried
	tried    []*backends.Backend
	place    int // in stallWatchers; -1: not there
}

// stallWatchers are the requests on one backend that could still be answered by
// another: nothing of an answer was relayed.
type stallWatchers []*Decision

func (w *stallWatchers) add(d *Decision) {
	if d.watch.listener != nil {
		d.watch.place = len(*w)
		*w = append(*w, d)
	}
}

// remove may be called any number of times.
func (w *stallWatchers) remove(d *Decision) {
	place := d.watch.place
	if place < 0 {
		return
	}
	last := len(*w) - 1
	moved := (*w)[last]
	(*w)[place], moved.watch.place = moved, place
	(*w)[last] = nil
	*w = (*w)[:last]
	d.watch.place = -1
}

// Commit records that the answer goes to the client, so that no other backend can
// give it any more. A stall that is found from then on is not reported.
func (d *Decision) Commit() {
	d.router.mu.Lock()
	defer d.router.unlock()
	d.health.watched.remove(d)
}

// notifyStalled reports to the requests on b that it makes no progress, once the lock
// is released.
func (r *Router) notifyStalled(b *backends.Backend) {
	h := r.states[b.Slot].health
	for _, d := range h.watched {
		r.callbacks.stalls = append(r.callbacks.stalls, stallNotice{d.watch.listener, r.hasAlternative(d), h.hung})
	}
}

// hasAlternative reports whether another backend seems able to answer d's request.
func (r *Router) hasAlternative(d *Decision) bool {
	return slices.ContainsFunc(d.watch.backends, func(b *backends.Backend) bool {
		return b != d.Backend && r.isAvailable(b) && !slices.Contains(d.watch.tried, b) && !r.states[b.Slot].health.stalled
	})
}
