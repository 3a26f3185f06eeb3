package router

import "warmroute/backends"

// mute is how many scrapes in a row a replica must leave without an answer until
// its silence is held against it, though nothing shows that it has work.
const mute = 3

// watched are the requests on one backend that could still be answered by
// another: nothing of an answer has passed. Guarded by Router.deciding.
type watched []*Decision

func (w *watched) add(d *Decision) {
	if d.stalls == nil {
		return
	}
	d.watchedAt = len(*w)
	*w = append(*w, d)
}

// remove may be called any number of times.
func (w *watched) remove(d *Decision) {
	if d.stalls == nil {
		return
	}
	d.stalls = nil
	last := len(*w) - 1
	moved := (*w)[last]
	(*w)[d.watchedAt], moved.watchedAt = moved, d.watchedAt
	(*w)[last] = nil
	*w = (*w)[:last]
}

// Commit tells that the answer goes to the client, so that no other backend can
// give it any more: a stall that is found from then on is not told.
func (d *Decision) Commit() {
	d.router.deciding.Lock()
	defer d.router.deciding.Unlock()
	d.unwatch()
}

func (d *Decision) unwatch() { d.progress.watched.remove(d) }

// StallListener is told when the backend of a request makes no progress. It is called
// without the router's lock, at times once more while the request's Decision is being
// committed or released.
type StallListener interface {
	// BackendStalled says whether another backend seems able to answer the request, and
	// whether the replica is hung: it answers nobody, not even its checks.
	BackendStalled(elsewhere, hung bool)
}

// stallNotice is a call of a StallListener that is due when the lock is released.
type stallNotice struct {
	to              StallListener
	elsewhere, hung bool
}

// notifyStall notes that the requests on b are to be told that it makes no progress.
func (r *Router) notifyStall(b *backends.Backend) {
	p := r.progress[b.Slot]
	for _, d := range p.watched {
		r.stallNotices = append(r.stallNotices, stallNotice{d.stalls, r.elsewhere(d), p.hung})
	}
}

// unlock releases the lock, and tells of the stalls that were found under it.
func (r *Router) unlock() {
	notices := r.stallNotices
	r.stallNotices = nil
	r.deciding.Unlock()
	for _, n := range notices {
		n.to.BackendStalled(n.elsewhere, n.hung)
	}
}

// elsewhere reports whether another backend seems able to answer d's request.
func (r *Router) elsewhere(d *Decision) bool {
	for _, b := range d.backends {
		if b != d.Backend && r.available(b, d.tried) && !r.progress[b.Slot].stalled {
			return true
		}
	}
	return false
}

// ScrapeFailed tells of a scrape that failed. late: it was not answered in time, as
// when the replica's process is stopped, or its event loop is blocked.
func (r *Router) ScrapeFailed(b *backends.Backend, late bool) {
	r.deciding.Lock()
	defer r.unlock()
	if !r.has(b) {
		return
	}
	p := r.progress[b.Slot]
	if p.missed++; !late {
		p.missed = 0
	}
	now := r.now()
	if r.stalled(b, b.Load(), 0, now) || p.hung {
		r.notifyStall(b)
	}
	r.dispatch(now)
}

// ChecksTimedOut tells that b is down because its checks are not answered, while its
// connections stand: what it was sent waits for nothing.
func (r *Router) ChecksTimedOut(b *backends.Backend) {
	r.deciding.Lock()
	defer r.unlock()
	if !r.has(b) {
		return
	}
	r.progress[b.Slot].hung = true
	r.notifyStall(b)
	r.dispatch(r.now())
}
