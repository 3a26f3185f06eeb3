package router

import (
	"time"

	"warmroute/backends"
)

// workLasts is for how long after a sign of work an engine is thought to be at
// work: two polls.
const workLasts = 2 * time.Second

// freedBy counts the places that fall free on a backend. One that refuses a
// request for its full queue has none.
func (p *progress) freedBy(d *Decision, o *Outcome) {
	switch {
	case o.Full:
		p.freed = 0
	case d.started || o.End != Unseen:
		p.freed++
	}
}

// TakePlace reports whether a request has ended on b since b last refused one
// for its full queue, and gives the place that it left to the caller alone.
func (r *Router) TakePlace(b *backends.Backend) bool {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) || r.progress[b.Slot].freed == 0 {
		return false
	}
	r.progress[b.Slot].freed--
	return true
}
