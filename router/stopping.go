package router

import "time"

// stoppingLasts is for how long the word of a replica that it is about to stop
// keeps requests from it, and how far apart they are that try it nevertheless.
// One that drains says so for as long as that takes, and passes its checks.
const stoppingLasts = time.Second

// stopping reports whether a request would be refused because the replica is about
// to stop. It may mean another process by then, which shows when it is tried.
func (p *progress) stopping(now func() time.Time) bool {
	return !p.stops.IsZero() && now().Sub(p.stops) < stoppingLasts
}

func (p *progress) stopsBy(o *Outcome, now time.Time) {
	if o.Stopping {
		p.stops = now
	}
}

// tries notes a request that is sent. If the replica was about to stop, it is the
// only one for a while.
func (p *progress) tries(now time.Time) {
	if !p.stops.IsZero() {
		p.stops = now
	}
}

// goesOn notes an answer. Those to what was sent before the replica's word say
// nothing: it finishes what it has.
func (p *progress) goesOn(d *Decision) {
	if !d.sentAt.Before(p.stops) {
		p.stops = time.Time{}
	}
}
