package router

import (
	"time"

	"warmroute/backends"
)

// BreakerSettings say when a backend that fails what it is sent becomes a later
// choice than all others.
type BreakerSettings struct {
	Failures int           `mapstructure:"failures"` // in a row that open it; 0: none do
	Open     time.Duration `mapstructure:"open"`     // until it is tried again; twice as long each time that this fails, 4 s at most
}

// mostOpen bounds the time for which a healed backend is not noticed.
const mostOpen = 4 * time.Second

// BreakerState is how a backend's breaker stands.
type BreakerState int

const (
	BreakerClosed   BreakerState = iota
	BreakerHalfOpen              // one request at a time tries the backend
	BreakerOpen
)

// breaker counts what one backend fails. Guarded by Router.deciding.
type breaker struct {
	open     bool
	failures int           // in a row, while closed
	changed  time.Time     // when it was opened or closed: what was sent before says nothing of the time since
	wait     time.Duration // between two tries
	next     time.Time     // when it is tried again
	probe    *Decision     // that tries it; nil: none does
	opens    uint64
}

// due reports whether the next request is to try the backend.
func (k *breaker) due(now time.Time) bool {
	return k.open && k.probe == nil && !now.Before(k.next)
}

func (k *breaker) state(now time.Time) BreakerState {
	switch {
	case !k.open:
		return BreakerClosed
	case k.probe != nil || k.due(now):
		return BreakerHalfOpen
	}
	return BreakerOpen
}

// sent notes a request.
func (k *breaker) sent(d *Decision, now time.Time) {
	if k.due(now) {
		k.probe = d
	}
}

// worked notes that the engine put something out for d. The answers to what was
// sent before it opened do not close a breaker: a replica that is about to stop
// finishes those while it refuses all that is new.
func (k *breaker) worked(d *Decision, now time.Time) {
	k.failures = 0
	if k.open && (d == k.probe || d.sentAt.After(k.changed)) {
		k.close(now)
	}
}

func (k *breaker) close(now time.Time) {
	*k = breaker{changed: now, opens: k.opens}
}

// polled takes the engine's work since it was sent the probe for the probe's
// success, when it has not failed for a while: a whole answer can take minutes.
func (k *breaker) polled(o *BreakerSettings, worked, now time.Time) {
	if k.open && k.probe != nil && worked.Sub(k.probe.sentAt) >= o.Open {
		k.close(now)
	}
}

// ended notes how a request ended. What an engine at work refuses for its full
// queue is no failure of its, and tells as little of the next request as of this.
func (k *breaker) ended(d *Decision, o *Outcome, limits *BreakerSettings, busy bool, now time.Time) {
	probe := d == k.probe
	if probe {
		k.probe = nil // where it tells nothing, the next one tries
	}
	switch {
	case !o.Failed || limits.Failures == 0:
	case o.QueueFull && busy:
		if probe {
			k.next = now.Add(k.wait)
		}
	case probe:
		k.reopen(min(2*k.wait, max(mostOpen, limits.Open)), now)
	case k.open || d.sentAt.Before(k.changed):
	default:
		if k.failures++; o.Stalled || k.failures >= limits.Failures {
			k.reopen(limits.Open, now)
		}
	}
}

func (k *breaker) reopen(wait time.Duration, now time.Time) {
	*k = breaker{open: true, changed: now, wait: wait, next: now.Add(wait), opens: k.opens + 1}
}

// Breaker reports how a backend's breaker stands, and how often it was opened,
// failed tries included.
func (r *Router) Breaker(b *backends.Backend) (state BreakerState, opens uint64) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) {
		return BreakerClosed, 0
	}
	k := &r.progress[b.Slot].breaker
	return k.state(r.now()), k.opens
}
