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

	work         work
	streaming    int // streams of ours that have begun
	polls        polls
	speed        speed
	unresponsive bool // down, because its health checks time out as well
	stalled      bool // when it was checked last
	stalls       uint64
	limit        queueLimit
	sequences    sequenceLimit
	breaker      breaker
	// stoppingAt is when the replica last reported that it is about to stop, or was tried since; zero: it has not.
	stoppingAt time.Time
	watched    []*Attempt // requests that are notified of a stall
}

// polls is what the polls of a replica's metrics showed.
type polls struct {
	at                    time.Time // of the last one; zero: there was none
	prompt, generated, kv float64
	known                 bool // it reports token counters
	missed                int  // in a row that timed out
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
	QueueFull bool    // it was refused, perhaps since the replica's queue is full
	InFlight  int64   // sequences that the backend has beside it
	External  float64 // requests of other clients there, about
	Stalled   bool    // it made no progress
	Stopping  bool    // it was refused since the replica is about to stop
}

// NewRecord returns the record of a backend of which nothing is known.
func NewRecord(start time.Time) *Record { return &Record{start: start} }

// RecordReserved records that a request is about to be sent, with which the backend has so many sequences in flight.
func (r *Record) RecordReserved(a *Attempt, inFlight int64, now time.Time) {
	r.limit.recordSent(a, inFlight, now)
}

// RecordSent records a request that is being sent. onlyInFlight: it is our only one there.
func (r *Record) RecordSent(a *Attempt, onlyInFlight bool, now time.Time) {
	if onlyInFlight {
		r.work.since, r.work.owed = now, 0
	}
	if now.Sub(r.work.since) <= stallTimeout {
		r.work.owed += a.Uncached
	}
	r.breaker.setProbeIfDue(a, now)
	if !r.stoppingAt.IsZero() {
		r.stoppingAt = now // it is the only one that tries the replica for a while
	}
}

// RecordFirstOutput records the first output for a request. unstartedTokens are the uncached
// tokens of the requests that have none yet.
func (r *Record) RecordFirstOutput(a *Attempt, unstartedTokens float64, now time.Time) {
	a.begun = true
	r.limit.recordAccepted(a, now)
	r.breaker.recordOutput(a, now)
	// The replica does not stop. A response to what was sent before it reported that it does
	// says nothing: it finishes that.
	if !a.SentAt.Before(r.stoppingAt) {
		r.stoppingAt = time.Time{}
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
		r.limit.recordRefusal(a, end.InFlight, end.External, now)
	case end.Processed:
		r.limit.recordAccepted(a, now)
	}
	if !end.QueueFull {
		r.limit.recordEnd(a)
	}
	if end.Stopping {
		r.stoppingAt = now
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
	r.sequences.recordPoll(l, l.PromptTokens != last.prompt)
	r.unresponsive = false
	r.polls = polls{at: l.PolledAt, prompt: l.PromptTokens, generated: l.GenerationTokens, kv: l.KVCacheUsage, known: l.TokensKnown}
	r.breaker.closeOnProgress(s, r.work.since, now)
}

// RecordExternal records that a poll showed so many requests of other clients.
func (r *Record) RecordExternal(l *backends.Load, requests float64) {
	if l.QueuesKnown {
		r.limit.recordPoll(requests, l.PolledAt)
	}
}

// RecordPollFailure records a poll that failed. timedOut: it timed out.
func (r *Record) RecordPollFailure(timedOut bool) {
	if r.polls.missed++; !timedOut {
		r.polls.missed = 0
	}
}

// RecordUnresponsive records that the replica's health checks time out.
func (r *Record) RecordUnresponsive() { r.unresponsive = true }

// IsUnresponsive reports whether the replica's health checks time out.
func (r *Record) IsUnresponsive() bool { return r.unresponsive }

// ForgetFailures forgets the failures of a backend whose checks pass again: missed
// polls, a report that it stops, an open breaker.
func (r *Record) ForgetFailures(now time.Time) {
	r.polls.missed, r.unresponsive = 0, false
	r.stoppingAt = time.Time{}
	r.breaker.close(now)
}

// ForgetQueueFull forgets the refusals of the backend because of its full queue.
func (r *Record) ForgetQueueFull() { r.limit = queueLimit{} }

// CloseBreaker closes the breaker.
func (r *Record) CloseBreaker(now time.Time) { r.breaker.close(now) }

// Breaker returns the breaker's state, and how often it was opened, failed tries included.
func (r *Record) Breaker(now time.Time) (state BreakerState, opens uint64) {
	return r.breaker.state(now), r.breaker.opens
}

// IsProbeDue reports whether the breaker is open and the next request is to try the backend.
func (r *Record) IsProbeDue(now time.Time) bool { return r.breaker.isProbeDue(now) }

// IsQueueFull reports whether the backend, which has so many sequences in flight, would refuse one more request
// because its queue is full.
func (r *Record) IsQueueFull(inFlight int64, now time.Time) bool {
	return r.limit.isFull(inFlight, now)
}

// IsStopping reports whether a request would be refused because the replica is about
// to stop. It may be another process by then, which shows when it is tried.
func (r *Record) IsStopping(now time.Time) bool {
	at := r.stoppingAt
	return !at.IsZero() && now.Sub(at) < stoppingDelay
}
