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

// stallWatch is what a Decision keeps for its StallListener. Guarded by Router.mu.
type stallWatch struct {
	listener StallListener       // nil: none, or not any more
	backends []*backends.Backend // that could have been chosen, except for tried
	tried    []*backends.Backend
}

// stallNotice is a call of a StallListener that is due when the lock is released.
type stallNotice struct {
	to              StallListener
	elsewhere, hung bool
}

// addWatched adds a request to those that are told of stalls: nothing of an answer was
// relayed, so another backend could still answer it.
func (h *health) addWatched(d *Decision) {
	if d.watch.listener != nil {
		h.watched = append(h.watched, d)
	}
}

// removeWatched may be called any number of times.
func (h *health) removeWatched(d *Decision) {
	if d.watch.listener != nil {
		d.watch.listener = nil
		at := slices.Index(h.watched, d)
		h.watched = slices.Delete(h.watched, at, at+1)
	}
}

// Commit records that the answer goes to the client, so that no other backend can
// give it any more. A stall that is found from then on is not reported.
func (d *Decision) Commit() {
	d.router.mu.Lock()
	defer d.router.unlock()
	d.health.removeWatched(d)
}

// notifyStalled reports to the requests on b that it makes no progress, once the lock
// is released.
func (r *Router) notifyStalled(b *backends.Backend) {
	h := r.states[b.Slot].health
	for _, d := range h.watched {
		elsewhere := slices.ContainsFunc(d.watch.backends, func(o *backends.Backend) bool {
			return o != b && r.isAvailable(o) && !slices.Contains(d.watch.tried, o) && !r.states[o.Slot].health.stalled
		})
		r.callbacks.stalls = append(r.callbacks.stalls, stallNotice{d.watch.listener, elsewhere, h.hung})
	}
}
