package queue

import (
	"math"
	"time"
)

// Timeouts limit for how long a request may be queued; 0: no limit.
type Timeouts struct {
	NoneReady time.Duration // while no replica that could take it is ready and makes progress
	Busy      time.Duration // while one is and does
	Total     time.Duration // of both together
}

// Waited is for how long a request was queued.
type Waited struct {
	NoneReady, Busy time.Duration // as in Timeouts
}

// Total returns the whole time.
func (w Waited) Total() time.Duration { return w.NoneReady + w.Busy }

// add counts a further time.
func (w *Waited) add(d time.Duration, noneReady bool) {
	if noneReady {
		w.NoneReady += d
	} else {
		w.Busy += d
	}
}

// noLimit is what is left of a time without a limit.
const noLimit = time.Duration(math.MaxInt64)

// Left returns for how long a request that was queued for w may be queued further while no
// replica is ready, or one is, as in Timeouts; at most 0 where its time is over.
func (t Timeouts) Left(w Waited, noneReady bool) time.Duration {
	if noneReady {
		return min(timeLeft(t.Total, w.Total()), timeLeft(t.NoneReady, w.NoneReady))
	}
	return min(timeLeft(t.Total, w.Total()), timeLeft(t.Busy, w.Busy))
}

func timeLeft(limit, used time.Duration) time.Duration {
	if limit == 0 {
		return noLimit
	}
	return limit - used
}

// checkInterval returns how long after a check it is checked again whether a replica is ready for a
// request. The time in between counts as the first check found it, so where none is ready any more, the
// request's time ends up to 5 s later than its limit says, and never earlier. There is no further check
// where it makes no difference, since there is no limit, or only one on both times together.
func (t Timeouts) checkInterval(noneReady bool) time.Duration {
	switch {
	case t.NoneReady == 0 && t.Busy == 0:
		return noLimit
	case noneReady:
		return time.Second
	}
	return 5 * time.Second
}

// limit returns for how long a request may be queued where replicas work.
func (t Timeouts) limit() time.Duration { return t.Left(Waited{}, false) }

// maxOvertakeTime returns for how long others of its priority that arrived later may precede a
// request, where what is before it takes so long: half of the time that is left for it. The other half
// is for what takes longer than estimated, and for prefills that have begun. Where no order could
// start it in time, it is half of its time.
func (t Timeouts) maxOvertakeTime(ahead time.Duration) time.Duration {
	limit := t.limit()
	if ahead >= limit {
		return limit / 2
	}
	return (limit - ahead) / 2
}
