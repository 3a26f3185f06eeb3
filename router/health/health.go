// Package health judges whether a replica that accepts requests makes progress, fails them or
// refuses them, by the requests that it was sent and by its metrics.
package health

import (
	"sync/atomic"
	"time"

	"warmroute/backends"
)

const (
	// maxWorkAge is for how long after a sign of work an engine counts as working.
	maxWorkAge = 2 * time.Second
	// queueFullDelay is for how long a backend that refused a request because of its
	// full queue counts as full, unless a request of ours ends there.
	queueFullDelay = time.Second
	// stoppingDelay is for how long a replica that reports that it is about to stop gets
	// no requests, and the time between those that try it nevertheless.
	stoppingDelay = time.Second
)

// Record is what is known of the health of one backend. Its owner's lock guards it, except for RecordOutput.
type Record struct {
	start time.Time
	// output is when the last piece of a response was relayed, in nanoseconds since start.
	// It is written for every chunk, so without a lock.
	output atomic.Int64

	work      work
	streaming int // streams of ours that have begun
	polls     polls
	hung      bool // down, because its health checks time out as well
	stalled   bool // when it was checked last
	stalls    uint64
	refusals  refusals
	breaker   breaker
	watched   []*Attempt // requests that are notified of a stall
}

// polls is what the polls of a replica's metrics showed.
type polls struct {
	at                    time.Time // of the last one; zero: there was none
	prompt, generated, kv float64
	known                 bool // it reports token counters
	missed                int  // in a row that timed out
}

// refusals are the refusals of requests that do not count as failures.
type refusals struct {
	queueFullAt time.Time // when it last refused a request because of its full queue
	freeSlots   int       // requests that ended on it since then
	stoppingAt  time.Time // when it last reported that it is about to stop, or was tried since; zero: it has not
}

// Attempt is a request on a backend, as far as the backend's health is concerned.
type Attempt struct {
	SentAt   time.Time
	Uncached float64 // tokens to compute
	Streams  bool

	// Listener is notified of a stall; nil: none is, or not any more.
	Listener StallListener
	Backends []*backends.Backend // that could have been chosen, except for Tried
	Tried    []*backends.Backend
	Endpoint backends.Endpoint

	begun bool // there was output
}

// End is how a request ended on its backend.
type End struct {
	Processed bool // the engine worked on it
	Failed    bool
	QueueFull bool // it was refused, perhaps since the replica's queue is full
	Stalled   bool // it made no progress
	Stopping  bool // it was refused since the replica is about to stop
}

// NewRecord returns the record of a backend of which nothing is known.
func NewRecord(start time.Time) *Record { return &Record{start: start} }

// RecordSent records a request that is being sent. onlyInFlight: it is our only one there.
func (r *Record) RecordSent(a *Attempt, onlyInFlight bool, now time.Time) {
	if onlyInFlight {
		r.work.since, r.work.owed = now, 0
	}
	if now.Sub(r.work.since) <= stallTimeout {
		r.work.owed += a.Uncached
	}
	r.breaker.setProbeIfDue(a, now)
	if !r.refusals.stoppingAt.IsZero() {
		r.refusals.stoppingAt = now // it is the only one that tries the replica for a while
	}
}

// RecordFirstOutput records the first output for a request. unstartedTokens are the uncached
// tokens of the requests that have none yet.
func (r *Record) RecordFirstOutput(a *Attempt, unstartedTokens float64, now time.Time) {
	a.begun = true
	r.breaker.recordOutput(a, now)
	// The replica does not stop. A response to what was sent before it reported that it does
	// says nothing: it finishes that.
	if !a.SentAt.Before(r.refusals.stoppingAt) {
		r.refusals.stoppingAt = time.Time{}
	}
	if a.Streams {
		r.streaming++
	}
	r.work.recordWork(now, unstartedTokens)
}

// RecordEnd records that a request is no longer in flight.
func (r *Record) RecordEnd(a *Attempt, end End, s *BreakerSettings, now time.Time) {
	if a.begun && a.Streams {
		r.streaming--
	}
	switch {
	case end.QueueFull:
		r.refusals.freeSlots, r.refusals.queueFullAt = 0, now
	case end.Processed:
		r.refusals.freeSlots++
	}
	if end.Stopping {
		r.refusals.stoppingAt = now
	}
	r.breaker.recordEnd(a, &end, s, now.Sub(r.work.at) < maxWorkAge, now)
}

// RecordOutput records that a piece of a response was relayed. It is safe for concurrent use.
func (r *Record) RecordOutput(now time.Time) { r.output.Store(int64(now.Sub(r.start))) }

// lastOutput returns when the last piece of a response was relayed.
func (r *Record) lastOutput() time.Time { return r.start.Add(time.Duration(r.output.Load())) }

// LastProgress returns when there was the last sign of work.
func (r *Record) LastProgress() time.Time {
	if output := r.lastOutput(); output.After(r.work.at) {
		return output
	}
	return r.work.at
}

// WorkedSince reports whether there was a sign of work, or no work, at a time or later.
func (r *Record) WorkedSince(t time.Time) bool { return !r.work.since.Before(t) }

// RecordPoll records a poll, and that the engine did something if its counters have changed since the last one.
// The share of the KV cache in use changes as well while an engine works on a long prompt, which the token
// counters show only at its end. inFlight is how many requests of ours the replica has.
func (r *Record) RecordPoll(l *backends.Load, unstartedTokens float64, inFlight int, s *BreakerSettings, now time.Time) {
	// All our requests are finished on the replica, and wait for clients that read slowly.
	idle := l.QueuesKnown && l.Running+l.Waiting == 0 && r.streaming == inFlight
	last := &r.polls
	if idle || l.PromptTokens != last.prompt || l.GenerationTokens != last.generated || l.KVCacheUsage != last.kv {
		r.work.recordWork(l.PolledAt, unstartedTokens)
	}
	r.hung = false
	r.polls = polls{at: l.PolledAt, prompt: l.PromptTokens, generated: l.GenerationTokens, kv: l.KVCacheUsage, known: l.TokensKnown}
	r.breaker.closeOnProgress(s, r.work.since, now)
}

// RecordPollFailure records a poll that failed. timedOut: it timed out.
func (r *Record) RecordPollFailure(timedOut bool) {
	if r.polls.missed++; !timedOut {
		r.polls.missed = 0
	}
}

// RecordHung records that the replica's health checks time out.
func (r *Record) RecordHung() { r.hung = true }

// IsHung reports whether the replica's health checks time out.
func (r *Record) IsHung() bool { return r.hung }

// ForgetFailures forgets the failures of a backend whose checks pass again: missed
// polls, a report that it stops, an open breaker.
func (r *Record) ForgetFailures(now time.Time) {
	r.polls.missed, r.hung = 0, false
	r.refusals.stoppingAt = time.Time{}
	r.breaker.close(now)
}

// ForgetQueueFull forgets that the backend refused a request because of its full queue.
func (r *Record) ForgetQueueFull() {
	r.refusals.queueFullAt, r.refusals.freeSlots = time.Time{}, 0
}

// CloseBreaker closes the breaker.
func (r *Record) CloseBreaker(now time.Time) { r.breaker.close(now) }

// Breaker returns the breaker's state, and how often it was opened, failed tries included.
func (r *Record) Breaker(now time.Time) (state BreakerState, opens uint64) {
	return r.breaker.state(now), r.breaker.opens
}

// IsProbeDue reports whether the breaker is open and the next request is to try the backend.
func (r *Record) IsProbeDue(now time.Time) bool { return r.breaker.isProbeDue(now) }

// IsQueueFull reports whether the backend has refused a request because of its full
// queue of late, and nothing of ours has ended there since. It has little of ours in
// flight then, and would be sent everything, only to refuse it.
func (r *Record) IsQueueFull(now time.Time) bool {
	q := &r.refusals
	return q.freeSlots == 0 && !q.queueFullAt.IsZero() && now.Sub(q.queueFullAt) < queueFullDelay
}

// AcquireFreeSlot takes one of the slots of requests that ended since the last refusal because
// of a full queue. It reports false if there is none.
func (r *Record) AcquireFreeSlot() bool {
	if r.refusals.freeSlots == 0 {
		return false
	}
	r.refusals.freeSlots--
	return true
}

// ReturnFreeSlot undoes AcquireFreeSlot.
func (r *Record) ReturnFreeSlot() { r.refusals.freeSlots++ }

// IsStopping reports whether a request would be refused because the replica is about
// to stop. It may be another process by then, which shows when it is tried.
func (r *Record) IsStopping(now time.Time) bool {
	at := r.refusals.stoppingAt
	return !at.IsZero() && now.Sub(at) < stoppingDelay
}
