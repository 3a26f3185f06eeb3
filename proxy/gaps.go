package proxy

import (
	"time"

	"warmroute/metrics"
)

// gaps observes the time between the chunks of a stream that carry events, by the
// time at which each was written, which is known anyway: reading the clock would
// cost more than all the rest of it.
type gaps struct {
	itl  *metrics.Histogram
	last time.Time // zero: there was none yet
}

func (g *gaps) chunk(at time.Time) {
	if !g.last.IsZero() {
		g.itl.Observe(at.Sub(g.last))
	}
	g.last = at
}
