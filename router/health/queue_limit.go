package health

import "time"

const (
	// minFullDelay is for how long a replica that refused a request because of its full queue is sent no more
	// requests than it has. Each refusal of one more after that quadruples it, up to maxFullDelay.
	minFullDelay = 250 * time.Millisecond
	maxFullDelay = time.Minute
	// maxIdleFullDelay is that time, at most, while nothing of ours is there, whose end would make room.
	maxIdleFullDelay = 2 * time.Second
	// fullMemory is after how long without a refusal they are forgotten.
	fullMemory = 2 * maxFullDelay
)

// queueLimit is how many requests a replica takes, according to those that it refused because its queue is full.
// Requests are sequences in flight, those of peers included.
type queueLimit struct {
	known    bool
	requests int64   // with which it counts as full
	total    float64 // with those of other clients
	delay    time.Duration
	refused  time.Time // when it last refused one
	retryAt  time.Time // when it is sent one more
	probe    *Attempt  // that is the one more; nil: none is, or it was accepted
	ended    bool      // another one has ended since the probe was sent
}

// isFull reports whether the replica would refuse one more than inFlight. Once in a while it is tried: the limit may
// have grown, or what was refused may have been the only one of its kind.
func (l *queueLimit) isFull(inFlight int64, now time.Time) bool {
	if !l.known || inFlight < l.requests || now.Sub(l.refused) >= fullMemory {
		return false
	}
	retryAt := l.retryAt
	if soonest := l.refused.Add(maxIdleFullDelay); inFlight == 0 && soonest.Before(retryAt) {
		retryAt = soonest
	}
	return now.Before(retryAt)
}

// recordSent records that the replica has so many requests in flight with a, which is being sent.
func (l *queueLimit) recordSent(a *Attempt, inFlight int64, now time.Time) {
	if l.known && inFlight > l.requests {
		l.requests, l.probe, l.retryAt = inFlight, a, now.Add(minFullDelay) // it would be refused before that
		l.ended = false
	}
}

// recordRefusal records that the replica has refused a, beside which it has so many requests in flight and, about,
// of other clients.
func (l *queueLimit) recordRefusal(a *Attempt, inFlight int64, external float64, now time.Time) {
	switch {
	case !l.known || now.Sub(l.refused) >= fullMemory:
		l.delay = minFullDelay
	case a == l.probe:
		l.delay = min(4*l.delay, maxFullDelay)
	}
	l.known, l.probe = true, nil
	l.requests, l.total = inFlight, float64(inFlight)+external
	l.refused, l.retryAt = now, now.Add(l.delay)
}

// recordAccepted records that the replica works on a. If that was one more than the limit, this is twice as high from
// now on, and the next one beyond it is tried at once; but only one higher if another request has ended in the
// meantime, whose place it may have taken.
func (l *queueLimit) recordAccepted(a *Attempt, now time.Time) {
	switch {
	case !l.known || a != l.probe:
		return
	case !l.ended:
		l.requests *= 2
		l.delay, l.retryAt = minFullDelay, now
	}
	l.probe = nil
}

// recordEnd records that a, which the replica did not refuse, is no longer in flight. Ends of requests of peers and of other
// clients are not known in time.
func (l *queueLimit) recordEnd(a *Attempt) {
	if a != l.probe {
		l.ended = true
	}
}

// recordPoll records that a poll at polledAt showed so many requests of other clients. If they are fewer than when a
// request was refused, there is room.
func (l *queueLimit) recordPoll(external float64, polledAt time.Time) {
	if !l.known || polledAt.Before(l.refused) {
		return
	}
	l.requests = max(l.requests, int64(l.total-external))
}
