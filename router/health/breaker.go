package health

import "time"

// BreakerSettings determine when a backend whose requests fail is avoided.
type BreakerSettings struct {
	Failures int `mapstructure:"failures" range:"0..1048576"` // in a row that open the breaker; 0: none do
	// until the backend is tried again; doubles with each try that fails, up to 4 s
	OpenTime time.Duration `mapstructure:"open_time"`
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

// breaker counts the failures of one backend.
type breaker struct {
	open     bool
	failures int       // in a row, while closed
	changed  time.Time // when it was opened or closed: requests sent before do not count
	delay    time.Duration
	next     time.Time // when the backend is tried again
	probe    *Attempt  // that tries it; nil: none does
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

// setProbeIfDue makes a, which is being sent, the probe if one is due.
func (k *breaker) setProbeIfDue(a *Attempt, now time.Time) {
	if k.isProbeDue(now) {
		k.probe = a
	}
}

// recordOutput records the first output for a. Responses to what was sent before the breaker opened do not
// close it: a replica that is about to stop finishes those while it refuses all new requests.
func (k *breaker) recordOutput(a *Attempt, now time.Time) {
	k.failures = 0
	if k.open && (a == k.probe || a.SentAt.After(k.changed)) {
		k.close(now)
	}
}

func (k *breaker) close(now time.Time) {
	*k = breaker{changed: now, opens: k.opens}
}

// closeOnProgress closes the breaker when the engine has worked since it was sent the
// probe, and that has not failed for a while: a response can take minutes.
func (k *breaker) closeOnProgress(s *BreakerSettings, workedAt, now time.Time) {
	if k.open && k.probe != nil && workedAt.Sub(k.probe.SentAt) >= s.OpenTime {
		k.close(now)
	}
}

// recordEnd records how a request ended. A refusal of a working engine because of its
// full queue is not a failure, and does not predict the next request's outcome.
func (k *breaker) recordEnd(a *Attempt, end *End, s *BreakerSettings, engineWorking bool, now time.Time) {
	probe := a == k.probe
	if probe {
		k.probe = nil // without an outcome, the next request is the probe
	}
	switch {
	case !end.Failed || s.Failures == 0:
	case end.QueueFull && engineWorking:
		if probe {
			k.next = now.Add(k.delay)
		}
	case probe:
		k.openFor(min(2*k.delay, max(maxOpenDelay, s.OpenTime)), now)
	case k.open || a.SentAt.Before(k.changed):
	default:
		if k.failures++; end.Stalled || k.failures >= s.Failures {
			k.openFor(s.OpenTime, now)
		}
	}
}

func (k *breaker) openFor(delay time.Duration, now time.Time) {
	*k = breaker{open: true, changed: now, delay: delay, next: now.Add(delay), opens: k.opens + 1}
}
