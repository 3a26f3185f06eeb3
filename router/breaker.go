package router

import (
	"time"

	"warmroute/backends"
)

// BreakerSettings determine when a backend whose requests fail is avoided.
type BreakerSettings struct {
	Failures int           `mapstructure:"failures" range:"0..1048576"` // in a row that open the breaker; 0: none do
	Open     time.Duration `mapstructure:"open"`                        // until the backend is tried again; doubles with each try that fails, up to 4 s
}

// maxOpenDelay bounds the time for which a recovered backend is not noticed.
const maxOpenDelay = 4 * time.Second

// BreakerState is the state of a backend's breaker.
type BreakerState int

const (
	BreakerClosed   BreakerState = iota
	BreakerHalfOpen              // one request at a time tries the backend
	BreakerOpen
)

func (s BreakerState) String() string {
	return [...]string{"closed", "half-open", "open"}[s]
}

// breaker counts what one backend fails. Guarded by Router.mu.
type breaker struct {
	open     bool
	failures int       // in a row, while closed
	changed  time.Time // when it was opened or closed: requests sent before do not count
	delay    time.Duration
	next     time.Time // when the backend is tried again
	probe    *Decision // that tries it; nil: none does
	opens    uint64
}

// isProbeDue reports whether the next request is to try the backend.
func (k *breaker) isProbeDue(now time.Time) bool {
	return k.open && k.probe == nil && !now.Before(k.next)
}

func (k *breaker) state(now time.Time) BreakerState {
	switch {
	case !k.open:
		return BreakerClosed
	case k.probe != nil || k.isProbeDue(now):
		return BreakerHalfOpen
	}
	return BreakerOpen
}

// setProbeIfDue makes d, which is being sent, the probe if one is due.
func (k *breaker) setProbeIfDue(d *Decision, now time.Time) {
	if k.isProbeDue(now) {
		k.probe = d
	}
}

// recordOutput records that the engine put something out for d. Answers to what was
// sent before the breaker opened do not close it: a replica that is about to stop
// finishes those while it refuses all that is new.
func (k *breaker) recordOutput(d *Decision, now time.Time) {
	k.failures = 0
	if k.open && (d == k.probe || d.sentAt.After(k.changed)) {
		k.close(now)
	}
}

func (k *breaker) close(now time.Time) {
	*k = breaker{changed: now, opens: k.opens}
}

// closeOnProgress closes the breaker when the engine has worked since it was sent the
// probe, and that has not failed for a while: an answer can take minutes.
func (k *breaker) closeOnProgress(s *BreakerSettings, workedAt, now time.Time) {
	if k.open && k.probe != nil && workedAt.Sub(k.probe.sentAt) >= s.Open {
		k.close(now)
	}
}

// recordEnd records how a request ended. A refusal of a working engine because of its
// full queue is not a failure, and does not predict the next request's outcome.
func (k *breaker) recordEnd(d *Decision, o *Outcome, s *BreakerSettings, engineWorking bool, now time.Time) {
	probe := d == k.probe
	if probe {
		k.probe = nil // without an outcome, the next request is the probe
	}
	switch {
	case !o.Failed || s.Failures == 0:
	case o.QueueFull && engineWorking:
		if probe {
			k.next = now.Add(k.delay)
		}
	case probe:
		k.openFor(min(2*k.delay, max(maxOpenDelay, s.Open)), now)
	case k.open || d.sentAt.Before(k.changed):
	default:
		if k.failures++; o.Stalled || k.failures >= s.Failures {
			k.openFor(s.Open, now)
		}
	}
}

func (k *breaker) openFor(delay time.Duration, now time.Time) {
	*k = breaker{open: true, changed: now, delay: delay, next: now.Add(delay), opens: k.opens + 1}
}

// Breaker returns the state of a backend's breaker, and how often it was opened,
// failed tries included.
func (r *Router) Breaker(b *backends.Backend) (state BreakerState, opens uint64) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return BreakerClosed, 0
	}
	k := &r.states[b.Slot].health.breaker
	return k.state(r.now()), k.opens
}
