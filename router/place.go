package router

import (
	"slices"
	"time"

	"warmroute/backends"
)

// workLasts is for how long after a sign of work an engine is thought to be at
// work: two polls.
const workLasts = 2 * time.Second

// fullLasts is for how long a backend that refused a request for its full queue
// is thought to have no place, unless one of ours falls free.
const fullLasts = time.Second

// full reports whether b has refused a request for its full queue of late and
// nothing of ours has ended there since. It has little of ours in flight then, and
// would else be sent everything, to be refused at once.
func (p *progress) full(now time.Time) bool {
	return p.freed == 0 && !p.refused.IsZero() && now.Sub(p.refused) < fullLasts
}

// freedBy counts the places that fall free on a backend. One that refuses a
// request for its full queue has none.
func (p *progress) freedBy(d *Decision, o *Outcome, now time.Time) {
	switch {
	case o.QueueFull:
		p.freed, p.refused = 0, now
	case d.started || o.End != NotProcessed:
		p.freed++
	}
}

// SlotWait is a request's turn among those that wait for a place on backends
// that have refused them.
type SlotWait struct {
	router  *Router
	full    []*backends.Backend
	given   chan struct{}
	backend *backends.Backend // that has the place; set before given is closed
}

// AwaitSlot begins a wait for a request to end on one of the backends, which
// last refused one for its full queue: the place that it leaves is given to one
// of those that wait, in their order. Leave must follow. full stays unchanged
// until then.
func (r *Router) AwaitSlot(full []*backends.Backend) *SlotWait {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	w := &SlotWait{router: r, full: full, given: make(chan struct{})}
	r.places = append(r.places, w)
	for _, b := range full {
		r.givePlaces(b)
	}
	return w
}

// Granted is closed when there is a place.
func (w *SlotWait) Granted() <-chan struct{} { return w.given }

// Backend returns the backend that has the place. It may be called once Given is
// closed.
func (w *SlotWait) Backend() *backends.Backend { return w.backend }

// Leave ends the wait. A place that was given and is not taken is the next one's.
func (w *SlotWait) Release(takes bool) {
	r := w.router
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if at := slices.Index(r.places, w); at >= 0 {
		r.places = slices.Delete(r.places, at, at+1)
		return
	}
	if takes {
		return
	}
	if r.has(w.backend) {
		r.progress[w.backend.Slot].freed++
		r.givePlaces(w.backend)
	}
}

// givePlaces gives the places that are free on b to those that wait for them.
func (r *Router) givePlaces(b *backends.Backend) {
	if !r.has(b) {
		return
	}
	p := r.progress[b.Slot]
	r.places = slices.DeleteFunc(r.places, func(w *SlotWait) bool {
		if p.freed == 0 || !slices.Contains(w.full, b) {
			return false
		}
		p.freed--
		w.backend = b
		close(w.given)
		return true
	})
}
