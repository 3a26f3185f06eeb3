package router

import (
	"math"
	"time"

	"warmroute/backends"
)

const (
	foreignFades = 2 // poll intervals in which foreign load fades to 1/e
	foreignLasts = 3 // poll intervals after which nothing of it is left
)

// foreign is the load on a backend that is not ours: requests, and how many of
// them wait. It is what the last scrape saw beyond our own, and fades with its
// age, since the scrape is the only word on when those requests end.
func (r *Router) foreign(l *backends.Load, now time.Time) (requests, queued float64) {
	if l == nil || !l.QueuesKnown {
		return 0, 0
	}
	requests = float64(l.Running+l.Waiting) - float64(l.OwnInFlight)
	age := now.Sub(l.ScrapedAt)
	if requests <= 0 || age > foreignLasts*r.pollInterval {
		return 0, 0
	}
	queued = min(requests, float64(l.Waiting))
	fresh := math.Exp(-age.Seconds() / (foreignFades * r.pollInterval.Seconds()))
	return requests * fresh, queued * fresh
}
