package router

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

	// maxMissedPolls is how many scrapes in a row a replica may leave unanswered
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

// health is what shows that a replica that accepts requests makes no progress, fails
// them, or refuses them. It is guarded by Router.mu, except for output.
type health struct {
	// output is when the last piece of an answer was relayed, in nanoseconds since
	// Router.start. It is written for every chunk, so without a lock.
	output atomic.Int64

	workedAt time.Time // last sign of work
	since    time.Time // of the last sign of work, or when there was first work to do
	// owed are the uncached tokens of the requests without output when the silence
	// began, or sent before it lasted for stallTimeout. What was sent later does not
	// count: a stalled engine that gets new requests would never be found out.
	owed      float64
	streaming int // streams of ours that have begun

	lastPoll    pollCounters
	missedPolls int  // in a row that were not answered in time
	hung        bool // down, because its health checks time out as well

	stalled bool // when it was checked last
	stalls  uint64

	refusedAt  time.Time // when it last refused a request because of its full queue
	freeSlots  int       // requests that ended on it since then; see StartSlotWait
	stoppingAt time.Time // when it last reported that it is about to stop, or was tried since; zero: it has not

	breaker breaker
	watched []*Decision // requests that are notified when it makes no progress
}

// pollCounters are the counters of the last scrape; zero before it.
type pollCounters struct {
	at                    time.Time
	prompt, generated, kv float64
	known                 bool // it reports token counters
}

// recordWork records that the engine did something at a time, when requests with so
// many uncached tokens were without output.
func (h *health) recordWork(at time.Time, unstartedTokens float64) {
	if at.After(h.workedAt) {
		h.workedAt = at
	}
	if at.After(h.since) {
		h.since, h.owed = at, unstartedTokens
	}
}

// recordSent records a request; alone means that it is our only one there.
func (h *health) recordSent(d *Decision, onlyInFlight bool, now time.Time) {
	if onlyInFlight {
		h.since, h.owed = now, 0
	}
	if now.Sub(h.since) <= stallTimeout {
		h.owed += d.prediction.Uncached
	}
	h.breaker.setProbeIfDue(d, now)
	if !h.stoppingAt.IsZero() {
		h.stoppingAt = now // d is the only one that tries it for a while
	}
}

// recordFirstOutput records the first output of a request.
func (h *health) recordFirstOutput(d *Decision, unstartedTokens float64, now time.Time) {
	if d.request.streams {
		h.streaming++
	}
	h.recordWork(now, unstartedTokens)
}

// recordEnd records that a request is in flight no more.
func (h *health) recordEnd(d *Decision, o *Outcome, now time.Time) {
	if d.started && d.request.streams {
		h.streaming--
	}
	switch {
	case o.QueueFull:
		h.freeSlots, h.refusedAt = 0, now
	case d.started || o.End != NotProcessed:
		h.freeSlots++
	}
	if o.Stopping {
		h.stoppingAt = now
	}
}

// clearStoppingOnResponse records that d was answered, so the replica does not stop. What
// was sent before it reported that it does says nothing: it finishes that.
func (h *health) clearStoppingOnResponse(d *Decision) {
	if !d.sentAt.Before(h.stoppingAt) {
		h.stoppingAt = time.Time{}
	}
}

// recordPollProgress records a scrape, and that the engine did something if its
// counters have changed since the last one. The share of the KV cache in use changes as
// well while an engine works on a long prompt, which the token counters show only at its
// end. inFlight is how many requests of ours the replica has.
func (h *health) recordPollProgress(l *backends.Load, unstartedTokens float64, inFlight int) {
	// All our requests are finished on the replica, and wait for clients that read slowly.
	idle := l.QueuesKnown && l.Running+l.Waiting == 0 && h.streaming == inFlight
	last := &h.lastPoll
	if idle || l.PromptTokens != last.prompt || l.GenerationTokens != last.generated || l.KVCacheUsage != last.kv {
		h.recordWork(l.PolledAt, unstartedTokens)
	}
	h.missedPolls, h.hung = 0, false
	*last = pollCounters{l.PolledAt, l.PromptTokens, l.GenerationTokens, l.KVCacheUsage, l.TokensKnown}
}

// resetFailures forgets what speaks against a backend whose checks pass again: missed
// scrapes, a report that it stops, an open breaker.
func (h *health) resetFailures(now time.Time) {
	h.missedPolls, h.hung = 0, false
	h.stoppingAt = time.Time{}
	h.breaker.close(now)
}

// isQueueFull reports whether the backend has refused a request because of its full
// queue of late, and nothing of ours has ended there since. It has little of ours in
// flight then, and would be sent everything, only to refuse it.
func (h *health) isQueueFull(now time.Time) bool {
	return h.freeSlots == 0 && !h.refusedAt.IsZero() && now.Sub(h.refusedAt) < queueFullDelay
}

// isStopping reports whether a request would be refused because the replica is about
// to stop. It may be another process by then, which shows when it is tried.
func (h *health) isStopping(now func() time.Time) bool {
	return !h.stoppingAt.IsZero() && now().Sub(h.stoppingAt) < stoppingDelay
}

// silentTime returns for how long the engine is known to have done nothing. Its
// counters say so as of the last scrape. Where there are none its silence says
// nothing: it may work for other clients, or on answers that are not streamed. But
// when scrapes begin to fail, a stream that has stopped says enough, and so do
// scrapes that are not even answered.
func (h *health) silentTime(l *backends.Load, now time.Time) time.Duration {
	switch {
	case !h.lastPoll.known || l == nil && h.streaming == 0 && h.missedPolls < maxMissedPolls:
		return 0
	case l != nil:
		now = h.lastPoll.at
	}
	return now.Sub(h.since)
}

// updateStalled records and returns whether b has requests of ours and makes no
// progress. externalTokens wait there for other clients.
func (r *Router) updateStalled(b *backends.Backend, l *backends.Load, externalTokens float64, now time.Time) (stalled bool) {
	s := &r.states[b.Slot]
	h := s.health
	h.recordWork(r.start.Add(time.Duration(h.output.Load())), s.load.unstarted)
	rate := r.estimates.PrefillRate(b.Slot)
	if !r.estimates.IsPrefillRateKnown(b.Slot) {
		rate /= unknownRateSlack
	}
	timeout := stallTimeout + time.Duration(stallMargin*(min(h.owed, s.load.unstarted)+externalTokens)/rate*float64(time.Second))
	stalled = b.InFlight.Load() > 0 && h.silentTime(l, now) > timeout
	began := stalled && !h.stalled
	if h.stalled = stalled; began {
		h.stalls++
		r.scheduleStallNotices(b)
	}
	return stalled
}

// Stalls returns how often a backend with requests of ours was found to make no
// progress, and whether it was when it was checked last.
func (r *Router) Stalls(b *backends.Backend) (count uint64, stalled bool) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.has(b) {
		return 0, false
	}
	h := r.states[b.Slot].health
	return h.stalls, h.stalled
}

// RecordOutput records that a piece of the answer was relayed. It is cheap enough to
// be called for each: it takes no lock.
func (d *Decision) RecordOutput() {
	d.health.output.Store(int64(d.router.now().Sub(d.router.start)))
}

// SinceProgress returns for how long the backend has shown no sign of work; sending d
// counts as one. Where the replica has no token counters, only answers show it.
func (d *Decision) SinceProgress() time.Duration {
	r, h := d.router, d.health
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	last := r.start.Add(time.Duration(h.output.Load()))
	for _, at := range []time.Time{d.sentAt, h.workedAt} {
		if at.After(last) {
			last = at
		}
	}
	return r.now().Sub(last)
}

// ConditionState is whether a backend accepts new requests, and why not. Its values
// are shown to operators.
type ConditionState string

// The states of a backend.
const (
	Ready    ConditionState = "ready"
	Starting ConditionState = "starting" // no check has finished yet
	Down     ConditionState = "down"     // its checks fail
	Draining ConditionState = "draining" // it finishes what it has
	Stopping ConditionState = "stopping" // its replica refuses new requests because it shuts down
	Asleep   ConditionState = "asleep"   // its replica reports so
	Stalled  ConditionState = "stalled"  // it has requests and makes no progress
)

// Condition is a backend's state with its cause and age.
type Condition struct {
	State  ConditionState
	Since  time.Time // zero: not known
	Reason string    // why it is not ready; empty when it is
}

// Condition returns the state of a backend.
func (r *Router) Condition(b *backends.Backend) Condition {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	s := b.Status()
	if r.has(b) {
		r.liveStateOf(b).state = s.State // of which s has the reason
	}
	c := Condition{State: Ready, Since: s.Since, Reason: s.Reason}
	f := r.findAvailabilityFilter(b)
	if f == nil {
		if h := r.states[b.Slot].health; h.stalled {
			return Condition{Stalled, h.since, "it has requests and makes no progress"}
		}
		return c
	}
	switch c.State = f.state; c.State {
	case Down:
		if !s.Checked {
			c.State = Starting
		}
	case Stopping:
		c.Since, c.Reason = r.states[b.Slot].health.stoppingAt, "the replica reports that it is shutting down"
	case Asleep:
		c.Since, c.Reason = r.liveStateOf(b).load.AsleepSince, "the replica reports that its engine is asleep"
	}
	return c
}

// CountReady returns how many of the backends are Ready. A stalled one is not,
// though it gets requests where there is no other.
func (r *Router) CountReady(list []*backends.Backend) int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	n := 0
	for _, b := range list {
		if r.isAvailable(b) && !r.states[b.Slot].health.stalled {
			n++
		}
	}
	return n
}

// StallListener is notified when the backend of a request makes no progress. It is called
// without the router's lock, and may be called once more while the request's Decision
// is being committed or released.
type StallListener interface {
	// BackendStalled says whether another backend seems able to answer the request, and
	// whether the replica is hung: it does not even respond to health checks.
	BackendStalled(elsewhere, hung bool)
}

// stallWatch is what a Decision keeps for its StallListener. Guarded by Router.mu.
type stallWatch struct {
	listener StallListener       // nil: none, or not any more
	backends []*backends.Backend // that could have been chosen, except for tried
	tried    []*backends.Backend
	endpoint backends.Endpoint
}

// stallNotice is a call of a StallListener that is due when the lock is released.
type stallNotice struct {
	to              StallListener
	elsewhere, hung bool
}

// addStallWatch adds a request to those that are notified of stalls: nothing of an answer
// was relayed, so another backend could still answer it.
func (h *health) addStallWatch(d *Decision) {
	if d.watch.listener != nil {
		h.watched = append(h.watched, d)
	}
}

// removeStallWatch removes a request from those that are notified of stalls. It may be
// called any number of times.
func (h *health) removeStallWatch(d *Decision) {
	if d.watch.listener != nil {
		d.watch.listener = nil
		at := slices.Index(h.watched, d)
		h.watched = slices.Delete(h.watched, at, at+1)
	}
}

// Commit records that the answer goes to the client, so that no other backend can
// give it any more. A stall that is found from then on is not reported.
func (d *Decision) Commit() {
	d.router.mu.Lock()
	defer d.router.unlockAndRunCallbacks()
	d.health.removeStallWatch(d)
}

// scheduleStallNotices reports to the requests on b that it makes no progress, once the
// lock is released.
func (r *Router) scheduleStallNotices(b *backends.Backend) {
	h, now := r.states[b.Slot].health, r.now()
	for _, d := range h.watched {
		elsewhere := slices.ContainsFunc(d.watch.backends, func(o *backends.Backend) bool {
			return o != b && r.isAvailable(o) && !slices.Contains(d.watch.tried, o) && !r.states[o.Slot].health.stalled &&
				!o.LacksEndpoint(d.watch.endpoint, now)
		})
		r.callbacks.stalls = append(r.callbacks.stalls, stallNotice{d.watch.listener, elsewhere, h.hung})
	}
}
