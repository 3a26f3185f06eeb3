// Package health judges whether a replica that accepts requests makes progress, fails them or
// refuses them, by the requests that it was sent and by its metrics.
package health

import (
	"slices"
	"sync/atomic"
	"time"

	"warmroute/backends"
)

const (
	stallTimeout     = 3 * time.Second // without progress, with nothing to prefill
	stallMargin      = 3               // times the expected time of the prefill of what was sent
	unknownRateSlack = 4               // ... and so many times that while the prefill rate is not known

	// maxMissedPolls is how many polls in a row a replica may let time out
	// before it counts as stalled, though nothing shows that it has work.
	maxMissedPolls = 3
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

// work is what shows that an engine works.
type work struct {
	at    time.Time // of the last sign of work
	since time.Time // of the last sign of work, or when there was first work to do
	// owed are the uncached tokens of the requests without output when the silence
	// began, or sent before it lasted for stallTimeout. What was sent later does not
	// count: a stalled engine that gets new requests would never be found out.
	owed float64
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

// StallListener is notified when the backend of a request makes no progress. It is called without the router's
// lock, and may be called once more while the request's reservation is being committed or released.
type StallListener interface {
	// BackendStalled says whether another backend seems able to process the request, and
	// whether the replica is hung: it does not even respond to health checks.
	BackendStalled(elsewhere, hung bool)
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

// recordWork records that the engine did something at a time, when requests with so
// many uncached tokens were without output.
func (w *work) recordWork(at time.Time, unstartedTokens float64) {
	if at.After(w.at) {
		w.at = at
	}
	if at.After(w.since) {
		w.since, w.owed = at, unstartedTokens
	}
}

// Watch adds a request to those that are notified of stalls: nothing of a response
// was relayed, so another backend could still process it.
func (r *Record) Watch(a *Attempt) {
	if a.Listener != nil {
		r.watched = append(r.watched, a)
	}
}

// Unwatch removes a request from those that are notified of stalls. It may be called any number of times.
func (r *Record) Unwatch(a *Attempt) {
	if a.Listener != nil {
		a.Listener = nil
		at := slices.Index(r.watched, a)
		r.watched = slices.Delete(r.watched, at, at+1)
	}
}

// Watched returns the requests that are notified of stalls.
func (r *Record) Watched() []*Attempt { return r.watched }

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

// StallCheck is what decides, beside the record, whether a backend is stalled.
type StallCheck struct {
	Now             time.Time
	Load            *backends.Load // nil: not known
	InFlight        int64          // sequences of ours
	UnstartedTokens float64        // uncached tokens of our requests without output
	ExternalTokens  float64        // of other clients' that wait there
	PrefillRate     float64        // tokens a second
	RateKnown       bool
}

// UpdateStalled records whether the backend has requests of ours and makes no progress. It
// reports whether that has just begun.
func (r *Record) UpdateStalled(c *StallCheck) (began bool) {
	w, stalled := r.checkStalled(c)
	began = stalled && !r.stalled
	if r.work, r.stalled = w, stalled; began {
		r.stalls++
	}
	return began
}

// IsStalled reports whether the backend was stalled when it was checked last.
func (r *Record) IsStalled() bool { return r.stalled }

// IsStalledNow returns what UpdateStalled would record, and changes nothing.
func (r *Record) IsStalledNow(c *StallCheck) bool {
	_, stalled := r.checkStalled(c)
	return stalled
}

// Stalls returns how often the backend was found stalled.
func (r *Record) Stalls() uint64 { return r.stalls }

// checkStalled reports whether the backend has requests of ours and makes no progress. w is
// the work with the last output.
func (r *Record) checkStalled(c *StallCheck) (w work, stalled bool) {
	w = r.work
	w.recordWork(r.lastOutput(), c.UnstartedTokens)
	if c.InFlight == 0 {
		return w, false
	}
	rate := c.PrefillRate
	if !c.RateKnown {
		rate /= unknownRateSlack
	}
	timeout := stallTimeout + time.Duration(stallMargin*(min(w.owed, c.UnstartedTokens)+c.ExternalTokens)/rate*float64(time.Second))
	return w, r.silentTime(&w, c.Load, c.Now) > timeout
}

// silentTime returns for how long the engine is known to have done nothing. Its counters say so as of the last
// poll. Where there are none its silence says nothing: it may work for other clients, or on responses that are
// not streamed. But when polls begin to fail, a stream that has stopped says enough, and so do polls that time
// out.
func (r *Record) silentTime(w *work, l *backends.Load, now time.Time) time.Duration {
	switch {
	case !r.polls.known || l == nil && r.streaming == 0 && r.polls.missed < maxMissedPolls:
		return 0
	case l != nil:
		now = r.polls.at
	}
	return now.Sub(w.since)
}
