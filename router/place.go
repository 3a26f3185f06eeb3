package router

import (
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
	case o.Full:
		p.freed, p.refused = 0, now
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
