package router

import (
	"slices"
	"time"
)

const (
	workedOff   = 0.9 // of the prefill rate, by which W shrinks while nothing is heard
	pendingLeft = 0.2 // of the streams' part of W stays until their first events are seen
)

// account is what one backend was sent and has yet to prefill.
//
// An engine prefills in the order of arrival. So a first event says that
// everything sent before it is done as well, and for answers that have no first
// event (they come whole, at their end) time has to tell: they are worked off
// at the head of the queue, at the prefill rate.
type account struct {
	pending []*Decision // in the order sent
	tokens  float64     // sum of their uncached tokens
	streams float64     // the part of it whose first event can be seen
	since   time.Time   // up to when time has been counted as work

	adapters []adapterUse // that it was sent requests for

	// For policies that count and no more; see policy.Candidate.
	requests  int
	unstarted float64

	unseen float64 // tokens of the prompts of which nothing has come back

	load classLoad
}

func (a *account) sent(d *Decision, now time.Time) {
	if len(a.pending) == 0 {
		a.since = now
	}
	a.requests++
	a.adapterSent(d)
	a.unstarted += d.uncached
	a.unseen += d.tokens
	a.pending = append(a.pending, d)
	a.tokens += d.uncached
	if d.streams {
		a.streams += d.uncached
	}
}

// waiting is W, in tokens, of a backend that prefills so many a second.
func (a *account) waiting(now time.Time, rate float64) float64 {
	if len(a.pending) == 0 {
		return 0
	}
	worked := workedOff * rate * now.Sub(a.since).Seconds()
	for len(a.pending) > 0 && !a.pending[0].streams && a.pending[0].uncached <= worked {
		u := a.pending[0].uncached
		worked -= u
		a.since = a.since.Add(time.Duration(u / (workedOff * rate) * float64(time.Second)))
		a.drop(0)
	}
	return max(pendingLeft*a.streams, a.tokens-worked)
}

// first notes that d's prefill is over, and with it that of every whole answer
// sent before it.
func (a *account) first(d *Decision, now time.Time) {
	at := slices.Index(a.pending, d)
	if at < 0 {
		return // worked off already
	}
	a.drop(at)
	for i := at - 1; i >= 0; i-- {
		if !a.pending[i].streams {
			a.drop(i)
		}
	}
	a.since = now
}

// gone notes that d will not be prefilled any more.
func (a *account) gone(d *Decision) {
	if at := slices.Index(a.pending, d); at >= 0 {
		a.drop(at)
	}
}

// ended notes that d is in flight no more.
func (a *account) ended(d *Decision) {
	a.requests--
	a.adapterEnded(d)
	if !d.started {
		a.unstarted -= d.uncached
		a.unseen -= d.tokens
	}
	if a.requests == 0 {
		a.unstarted, a.unseen = 0, 0 // no residue of rounding
	}
}

func (a *account) drop(at int) {
	d := a.pending[at]
	a.tokens -= d.uncached
	if d.streams {
		a.streams -= d.uncached
	}
	a.pending = slices.Delete(a.pending, at, at+1)
	if len(a.pending) == 0 {
		a.tokens, a.streams = 0, 0 // no residue of rounding
	}
}
