package proxy

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/fault"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

const (
	// healthRecheckTimeout is how long the health checks take to find a replica dead when they are asked to look.
	healthRecheckTimeout = 500 * time.Millisecond
	// shutdownVerdictTimeout is how long the health checks of a replica pass, at most, after its last response. A
	// busy vLLM that was told to stop took up to 0.8 s.
	shutdownVerdictTimeout = 1500 * time.Millisecond
	verdictProbeInterval   = 50 * time.Millisecond
	crashProbeInterval     = 250 * time.Millisecond

	// Backends that all refused the connection are asked again after minReconnectDelay, and then after twice as long
	// each time: by then the health checks know which are down, and the admission queue waits for those.
	minReconnectDelay = 150 * time.Millisecond
	maxReconnectDelay = 2 * time.Second
	// upstreamErrorRetryTimeout is how long a request that got an error from a replica waits for another one, which
	// may be about to become ready.
	upstreamErrorRetryTimeout = 2 * time.Second

	// A request that a replica has refused again because of its full queue waits for minRefusedDelay, and then for twice as
	// long each time, before it is queued again, behind others: what is refused may be this request only.
	minRefusedDelay = 500 * time.Millisecond
	maxRefusedDelay = 4 * time.Second
)

// attemptRecord is one failed attempt.
type attemptRecord struct {
	backend         *backends.Backend
	endedAt         time.Time
	failure         *fault.Failure
	excluded        bool // the backend is not to be picked
	awaitsReconnect bool // nothing was sent to it, and no reconnect was awaited since
	upstreamError   bool // the replica sent an error that the client may get
	refusals        int  // of this backend in a row because of its full queue, after each of which the request is queued again
}

// isFailure reports whether the replica was sent the request and failed it, other than by its shutdown.
func (a *attemptRecord) isFailure() bool { return !a.failure.IsFree && !a.failure.ShuttingDown }

// suspectsReplicaDown reports whether the replica failed as one does that crashes or shuts down.
func (a *attemptRecord) suspectsReplicaDown() bool {
	return a.failure.SuspectsCrash || a.failure.ShuttingDown
}

// history is what a request has tried and waited for so far.
type history struct {
	receivedAt       time.Time            // when its body was there
	queueTimeouts    router.QueueTimeouts // of all its waits together; none: it never waits
	noneReadySetting string               // that sets the NoneReady of these
	queuesIfFull     bool                 // it is queued again if a replica refuses it because of its full queue
	attempts         []attemptRecord
	sent             int            // attempts begun
	best             *fault.Failure // the latest with a response of a replica, else the latest

	last    step
	wait    waitKind    // of the last step, if it was a wait
	outcome waitOutcome // of that wait
	pickErr error       // of the last step, if it was a pick
	end     requestEnd

	waited         router.Waited // in the admission queue, after repeated refusals and for the retry budget
	budgetWait     time.Duration // of it, for the retry budget
	reconnectDelay time.Duration // of the latest waitReconnect
	allDownAttempt bool          // an attempt beyond the limit was considered, as all backends were down
	ownQueueFull   bool          // the request was not allowed to wait

	kvTransfer *upstream.KVTransfer // of a prefill request, for a decode request of which nothing was sent yet; nil: none
}

// step is a kind of thing that a request does between its arrival and its response.
type step int

const (
	stepNone    step = iota
	stepPick         // the router picked no backend
	stepAttempt      // an attempt failed
	stepWait
)

// requestEnd says why a request needs no response of a replica any more.
type requestEnd int

const (
	notEnded     requestEnd = iota
	endedByProxy            // by an operator or the shutdown
	disconnected            // by its client
)

// waitKind is what a request waits for.
type waitKind int

const (
	waitVerdict   waitKind = iota // the health checks find the replica of the last attempt down
	waitCrashes                   // the health checks have had time to look at the replicas of two failed attempts
	waitAllDown                   // they have had time to look at all, and find all down
	waitBackoff                   // a replica that has refused the request repeatedly may be asked again
	waitBudget                    // the retry budget allows another attempt
	waitReconnect                 // backends that refused the connection may be asked again
)

// waitOutcome is how a wait ended.
type waitOutcome int

const (
	waitExpired waitOutcome = iota // at its deadline, or with the request
	waitMet
	waitRefused // the queue is full
)

// action is what a request does next.
type action struct {
	kind actionKind

	wait          waitKind
	backends      []*backends.Backend // that the wait is about
	deadline      time.Time
	probeInterval time.Duration // between health checks that are asked for; 0: none
	backoff       time.Duration // of waitBackoff

	decode bool // the backend is picked for the decode request of history.kvTransfer

	response responseKind
	err      error // why no backend was picked, for respondNotPicked
	poison   bool  // replicas seem to crash by the request
}

type actionKind int

const (
	actPick actionKind = iota
	actWait
	actRespond
)

// responseKind is the response when no attempt has succeeded.
type responseKind int

const (
	respondFailure       responseKind = iota // of the best attempt, by its reason
	respondReplicaError                      // the response of the best attempt
	respondProxyEnd                          // the request has ended
	respondDisconnected                      // none: the client has disconnected
	respondNoDescriptors                     // this process could not connect
	respondNotPicked
)

// fleetView is the state of the backends that serve a request, and of those it was sent to.
type fleetView []backendView

type backendView struct {
	backend   *backends.Backend
	state     backends.State
	candidate bool // it serves the request
	decodes   bool // it can do the decode request of history.kvTransfer
}

func (f fleetView) state(b *backends.Backend) backends.State {
	for i := range f {
		if f[i].backend == b {
			return f[i].state
		}
	}
	return backends.Down
}

func (f fleetView) candidates() (list []*backends.Backend) {
	for i := range f {
		if f[i].candidate {
			list = append(list, f[i].backend)
		}
	}
	return list
}

// nextAction decides what to do after the attempts and waits so far. It has no side effects.
func nextAction(h *history, f fleetView, s *Settings, now time.Time) action {
	a := nextStep(h, f, s, now)
	a.decode = a.kind == actPick && h.last != stepPick && h.mayDecode(f, now)
	return a
}

// mayDecode reports whether a backend can still do the decode request of the KV transfer, if there is one.
func (h *history) mayDecode(f fleetView, now time.Time) bool {
	return h.kvTransfer != nil && !now.After(h.kvTransfer.NotAfter) && slices.ContainsFunc(f, func(v backendView) bool {
		return v.candidate && v.decodes && v.state == backends.Ready && !h.isExcluded(v.backend)
	})
}

// nextStep is nextAction, but for the KV transfer of a split request.
func nextStep(h *history, f fleetView, s *Settings, now time.Time) action {
	if h.end != notEnded {
		return respond(h, f)
	}
	switch h.last {
	case stepNone:
		return pickOrAwaitReconnect(h, f, now)
	case stepPick:
		if h.kvTransfer != nil { // no backend can do the decode request, but one may serve the whole request
			return pickOrAwaitReconnect(h, f, now)
		}
		if errors.Is(h.pickErr, router.ErrNoneReady) && h.hasRetriableExcluded(f, now) && !h.reconnectExpired(f, now) {
			return awaitReconnect(h, now)
		}
		return respond(h, f)
	case stepAttempt:
		return nextAfterFailure(h, f, s, now)
	}
	switch met := h.outcome == waitMet; h.wait {
	case waitCrashes:
		switch {
		case h.outcome == waitRefused:
			return respond(h, f)
		case h.suspectsPoisonRequest(f):
			a := respond(h, f)
			a.poison = true
			return a
		case !h.latestAttempt().failure.IsFree:
			return awaitVerdictOrBudget(h, f, now)
		}
	case waitVerdict:
		if !met {
			return waitForRetryBudget(h, f, now)
		}
	case waitBackoff:
		if !met {
			return respondWith(h, f, router.ErrBusy)
		}
	case waitAllDown, waitBudget:
		if !met {
			return respond(h, f)
		}
	case waitReconnect:
		if h.outcome == waitRefused {
			return respond(h, f)
		}
	}
	return pickOrAwaitReconnect(h, f, now)
}

// nextAfterFailure decides what to do after a failed attempt.
func nextAfterFailure(h *history, f fleetView, s *Settings, now time.Time) action {
	latest := h.latestAttempt().failure
	switch charged, shutdowns := h.countCharged(); {
	case latest.NoRetry:
		return respond(h, f)
	case h.latestAttempt().refusals > 0:
		return awaitRoom(h, now)
	case latest.IsFree && !h.isSecondCrash():
		return pickOrAwaitReconnect(h, f, now)
	case latest.IsFree:
	case s.Retry.Share == 0 && s.Retry.PerSecond == 0:
		return respond(h, f)
	case shutdowns >= s.Attempts:
		return respond(h, f)
	case charged >= s.Attempts:
		if !h.mayRetryWhenAllDown(f, s, now) {
			return respond(h, f)
		}
		return awaitHealthChecks(waitAllDown, f.candidates(), now.Add(healthRecheckTimeout), crashProbeInterval)
	}
	if h.isSecondCrash() {
		return awaitHealthChecks(waitCrashes, f.candidates(), now.Add(healthRecheckTimeout), crashProbeInterval)
	}
	return awaitVerdictOrBudget(h, f, now)
}

// awaitRoom has the router queue the request until a backend has room. Replicas that refuse it repeatedly may refuse no
// others, and are asked again only after a while.
func awaitRoom(h *history, now time.Time) action {
	refusals := h.latestAttempt().refusals
	if refusals == 1 {
		return action{kind: actPick}
	}
	backoff := min(minRefusedDelay<<min(refusals-2, 8), maxRefusedDelay)
	return action{kind: actWait, wait: waitBackoff, backoff: backoff, deadline: now.Add(h.queueTimeouts.Left(h.waited, false))}
}

func awaitHealthChecks(kind waitKind, of []*backends.Backend, deadline time.Time, probeInterval time.Duration) action {
	return action{kind: actWait, wait: kind, backends: of, deadline: deadline, probeInterval: probeInterval}
}

// awaitVerdictOrBudget waits until the health checks have found whether the replica of the last attempt is down, if
// no other is ready, else for the retry budget. One that is down was stopped or has crashed: its last response was
// not about the request, for which its next process may be asked. If it stays, its response is worth as much as any.
func awaitVerdictOrBudget(h *history, f fleetView, now time.Time) action {
	latest := h.latestAttempt()
	if !latest.suspectsReplicaDown() || !h.mayWait() || h.hasPickableBackend(f) {
		return waitForRetryBudget(h, f, now)
	}
	timeout := healthRecheckTimeout
	if latest.failure.Status != 0 {
		timeout = shutdownVerdictTimeout
	}
	return awaitHealthChecks(waitVerdict, []*backends.Backend{latest.backend}, now.Add(timeout), verdictProbeInterval)
}

// waitForRetryBudget makes another attempt as soon as the retry budget allows it.
func waitForRetryBudget(h *history, f fleetView, now time.Time) action {
	if !h.hasUntriedBackend(f) {
		return action{kind: actPick} // the router says why there is none
	}
	timeout := time.Duration(0)
	if h.mayWait() {
		timeout = h.queueTimeouts.Left(h.waited, false)
	}
	if h.hasUpstreamError(f) {
		timeout = min(timeout, upstreamErrorRetryTimeout-h.budgetWait)
	}
	return action{kind: actWait, wait: waitBudget, deadline: now.Add(timeout)}
}

// pickOrAwaitReconnect asks the router for a backend, unless only backends are left that are worth an attempt later.
func pickOrAwaitReconnect(h *history, f fleetView, now time.Time) action {
	switch {
	case !h.hasRetriableExcluded(f, now) || h.hasPickableBackend(f):
		return action{kind: actPick}
	case h.reconnectExpired(f, now):
		return respondWith(h, f, router.ErrNoneReady)
	}
	return awaitReconnect(h, now)
}

// awaitReconnect waits until backends that refused the connection may be asked again.
func awaitReconnect(h *history, now time.Time) action {
	delay := min(h.nextReconnectDelay(), h.reconnectTimeLeft(now))
	return action{kind: actWait, wait: waitReconnect, deadline: now.Add(delay)}
}

// respond ends the request with the best response of a replica, if there was one, else with why there is none.
func respond(h *history, f fleetView) action {
	if h.last == stepPick {
		return respondWith(h, f, h.pickErr)
	}
	return respondWith(h, f, nil)
}

// respondWith is respond where the router has no backend for the reason pickErr.
func respondWith(h *history, f fleetView, pickErr error) action {
	if h.ownQueueFull {
		pickErr = router.ErrQueueFull
	}
	a := action{kind: actRespond, err: pickErr}
	switch best := h.best; {
	case h.end == endedByProxy:
		a.response = respondProxyEnd
	case h.end == disconnected:
		a.response = respondDisconnected
	case best != nil && best.IsUnsuited() && !errors.Is(pickErr, router.ErrEndpointMissing) && h.hasUntriedBackend(f):
		a.response = respondNotPicked // it may be suited, and is not ready
	case best != nil && best.Status != 0:
		a.response = respondReplicaError
	case best != nil && best.Reason == metrics.RetryDescriptors && !h.ownQueueFull:
		a.response = respondNoDescriptors
	case best == nil, h.ownQueueFull, pickErr != nil && (h.waited.Total() > 0 || best.IsFree && h.mayWait()):
		a.response = respondNotPicked
	}
	return a
}

// isMet reports whether the condition that a waits for holds. The retry budget is granted elsewhere.
func (a *action) isMet(f fleetView, waitBegun, now time.Time) bool {
	switch a.wait {
	case waitVerdict:
		return f.state(a.backends[0]) == backends.Down
	case waitAllDown:
		return !now.Before(a.deadline) && !slices.ContainsFunc(f, func(v backendView) bool { return v.candidate && v.state != backends.Down })
	case waitBackoff:
		return !now.Before(waitBegun.Add(a.backoff))
	}
	return false
}

func (h *history) latestAttempt() *attemptRecord { return &h.attempts[len(h.attempts)-1] }

// addFailure records a failed attempt.
func (h *history) addFailure(b *backends.Backend, f *fault.Failure, now time.Time) {
	h.last = stepAttempt
	if f.QueueFull && h.queuesIfFull { // the router knows that it is full
		h.attempts = append(h.attempts, attemptRecord{backend: b, endedAt: now, failure: f, refusals: h.removeRefusals(b) + 1})
		return
	}
	h.attempts = append(h.attempts, attemptRecord{
		backend: b, endedAt: now, failure: f,
		// else it may be the next one too, on a new connection or without a rank
		excluded:        !f.IsOfConnection() && !f.SameBackend && f.Reason != metrics.RetryRank,
		awaitsReconnect: f.IsFree && !f.SameBackend && !f.IsUnsuited() && f.Reason != metrics.RetryRank,
		upstreamError:   f.Status != 0 && !f.SameBackend && !f.ShuttingDown && !f.IsUnsuited(),
	})
}

// removeRefusals removes the record of the refusals of b, so that there is one for each backend at most, and returns how
// many there were.
func (h *history) removeRefusals(b *backends.Backend) (n int) {
	at := slices.IndexFunc(h.attempts, func(r attemptRecord) bool { return r.backend == b && r.refusals > 0 })
	if at < 0 {
		return 0
	}
	n = h.attempts[at].refusals
	h.attempts = slices.Delete(h.attempts, at, at+1)
	return n
}

// isBetterFailure reports whether f replaces the best failure.
func (h *history) isBetterFailure(f *fault.Failure) bool {
	best := h.best
	return best == nil || best.IsUnsuited() || !f.IsUnsuited() && (f.Status != 0 || f.NoRetry || best.Status == 0)
}

// recordWaitAndReadmit records how a wait ended, and lets backends be picked again.
func (h *history) recordWaitAndReadmit(a *action, outcome waitOutcome, f fleetView) {
	h.last, h.wait, h.outcome = stepWait, a.wait, outcome
	met := outcome == waitMet
	switch a.wait {
	case waitAllDown:
		h.allDownAttempt = true
		if met {
			h.readmitBackends(func(*attemptRecord) bool { return true })
		}
	case waitVerdict:
		latest := h.latestAttempt()
		if met {
			h.readmitBackends(func(r *attemptRecord) bool {
				return r.backend == latest.backend || h.suspectsReplicaDown(r.backend) && !h.suspectsCrashOf(r.backend)
			})
		} else if latest.failure.Status != 0 {
			latest.upstreamError = true
		}
	case waitReconnect:
		h.reconnectDelay = h.nextReconnectDelay()
		refused := h.backendsToReconnect()
		h.readmitBackends(func(r *attemptRecord) bool {
			return slices.Contains(refused, r.backend) || h.suspectsReplicaDown(r.backend) && f.state(r.backend) == backends.Down
		})
		for i := range h.attempts {
			h.attempts[i].awaitsReconnect = false
		}
	}
}

// readmitBackends lets the backends of matching attempts be picked again.
func (h *history) readmitBackends(matches func(*attemptRecord) bool) {
	for i := range h.attempts {
		if r := &h.attempts[i]; r.excluded && matches(r) {
			r.excluded = false
		}
	}
}

// forgetExclusions begins again, with backends of another model. Failures count as before.
func (h *history) forgetExclusions() {
	h.last = stepNone
	for i := range h.attempts {
		h.attempts[i].excluded, h.attempts[i].awaitsReconnect = false, false
	}
}

// excludedBackends returns the backends that are not to be picked: those that have failed, and all ranks of a
// server that does not serve the endpoint.
func (h *history) excludedBackends() (list []*backends.Backend) {
	for i := range h.attempts {
		switch r := &h.attempts[i]; {
		case r.excluded && r.failure.IsMissingEndpoint():
			list = append(list, r.backend.Server().Parts()...)
		case r.excluded:
			list = append(list, r.backend)
		}
	}
	return list
}

func (h *history) backendsToReconnect() (list []*backends.Backend) {
	for i := range h.attempts {
		if r := &h.attempts[i]; r.awaitsReconnect {
			list = append(list, r.backend)
		}
	}
	return list
}

// isExcluded reports whether b is one of the excludedBackends.
func (h *history) isExcluded(b *backends.Backend) bool {
	return h.anyAttempt(func(r *attemptRecord) bool {
		return r.excluded && (r.backend == b || r.failure.IsMissingEndpoint() && r.backend.Server() == b.Server())
	})
}

func (h *history) anyAttempt(matches func(*attemptRecord) bool) bool {
	return h.countAttempts(matches) > 0
}

func (h *history) countAttempts(matches func(*attemptRecord) bool) (n int) {
	for i := range h.attempts {
		if matches(&h.attempts[i]) {
			n++
		}
	}
	return n
}

// countCharged returns how many attempts count towards the limit, and how many were ended by replicas that shut
// down, which have a limit of their own.
func (h *history) countCharged() (charged, shutdowns int) {
	charged = h.countAttempts(func(r *attemptRecord) bool { return r.isFailure() && r.refusals == 0 })
	return charged, h.countAttempts(func(r *attemptRecord) bool { return r.failure.ShuttingDown && !r.failure.IsFree })
}

// countConnectionFailures returns how many attempts failed by their kept-alive connection.
func (h *history) countConnectionFailures() int {
	return h.countAttempts(func(r *attemptRecord) bool { return r.failure.IsOfConnection() })
}

func (h *history) suspectsReplicaDown(b *backends.Backend) bool {
	return h.anyAttempt(func(r *attemptRecord) bool { return r.backend == b && r.suspectsReplicaDown() })
}

// suspectsCrashOf reports whether the request may be what b crashed by.
func (h *history) suspectsCrashOf(b *backends.Backend) bool {
	return h.anyAttempt(func(r *attemptRecord) bool { return r.backend == b && r.failure.SuspectsCrash })
}

// hasUntriedBackend reports whether a backend that serves the request is not excluded, ready or not.
func (h *history) hasUntriedBackend(f fleetView) bool {
	return slices.ContainsFunc(f, func(v backendView) bool { return v.candidate && !h.isExcluded(v.backend) })
}

// hasPickableBackend reports whether a backend that serves the request is ready and not excluded.
func (h *history) hasPickableBackend(f fleetView) bool {
	return slices.ContainsFunc(f, func(v backendView) bool {
		return v.candidate && v.state == backends.Ready && !h.isExcluded(v.backend)
	})
}

// hasRetriableExcluded reports whether an excluded backend may be worth another attempt soon: it refused the
// connection, or is down or about to be found so, and will be another process when it is back.
func (h *history) hasRetriableExcluded(f fleetView, now time.Time) bool {
	return h.anyAttempt(func(r *attemptRecord) bool {
		return r.awaitsReconnect || r.suspectsReplicaDown() && h.isExcluded(r.backend) &&
			(f.state(r.backend) == backends.Down || now.Sub(r.endedAt) < healthRecheckTimeout)
	})
}

// hasUpstreamError reports whether a replica has sent an error that the client may get. One of a replica that is
// down by now was about its end.
func (h *history) hasUpstreamError(f fleetView) bool {
	return h.anyAttempt(func(r *attemptRecord) bool { return r.upstreamError && f.state(r.backend) != backends.Down })
}

// sinceUpstreamError returns the time since the first error that hasUpstreamError looks for.
func (h *history) sinceUpstreamError(now time.Time) time.Duration {
	i := slices.IndexFunc(h.attempts, func(r attemptRecord) bool { return r.upstreamError })
	return now.Sub(h.attempts[i].endedAt)
}

// nextReconnectDelay returns for how long backends that refused the connection are not asked.
func (h *history) nextReconnectDelay() time.Duration {
	return min(max(2*h.reconnectDelay, minReconnectDelay), maxReconnectDelay)
}

// reconnectExpired reports whether such backends are asked no more.
func (h *history) reconnectExpired(f fleetView, now time.Time) bool {
	return h.reconnectTimeLeft(now) <= 0 || h.hasUpstreamError(f) && h.sinceUpstreamError(now) >= upstreamErrorRetryTimeout
}

// reconnectTimeLeft returns for how long such backends may yet be asked. All of the time since the request came in
// counts but that in which it waited for ready backends.
func (h *history) reconnectTimeLeft(now time.Time) time.Duration {
	if h.queueTimeouts.Total > 0 || !h.mayWait() {
		return h.queueTimeouts.Total - now.Sub(h.receivedAt)
	}
	return h.queueTimeouts.Left(router.Waited{NoneReady: now.Sub(h.receivedAt) - h.waited.Busy}, true)
}

// mayWait reports whether the request may wait for a backend at all.
func (h *history) mayWait() bool { return h.queueTimeouts != router.QueueTimeouts{} }

// queueLimit returns how long the request may wait while no replica is ready, or while one is, and by which setting.
func (h *history) queueLimit(noneReady bool) string {
	switch t := &h.queueTimeouts; {
	case t.Total > 0:
		return t.Total.String() + " (the key's queue_time)"
	case noneReady:
		return t.NoneReady.String() + " (" + h.noneReadySetting + ")"
	default:
		return t.Busy.String() + " (routing.queue.busy_timeout)"
	}
}

// errorTimeLeft returns for how long a request that has an error of a replica may wait for another one. It is not
// limited without an error, or where another is ready.
func (h *history) errorTimeLeft(f fleetView, now time.Time) (left time.Duration, limited bool) {
	if !h.hasUpstreamError(f) || h.hasPickableBackend(f) {
		return 0, false
	}
	return upstreamErrorRetryTimeout - h.sinceUpstreamError(now), true
}

// isSecondCrash reports whether the last attempt failed as if its replica had crashed, and one before it too.
func (h *history) isSecondCrash() bool {
	return h.latestAttempt().failure.SuspectsCrash && h.countAttempts(func(r *attemptRecord) bool { return r.failure.SuspectsCrash }) > 1
}

// suspectsPoisonRequest reports whether the request is likely to be what two replicas crashed by, so that no third
// one is risked. In a rolling restart the first is back, or no other is ready.
func (h *history) suspectsPoisonRequest(f fleetView) bool {
	before := h.attempts[:len(h.attempts)-1]
	crashed := slices.ContainsFunc(before, func(r attemptRecord) bool {
		return r.failure.SuspectsCrash && f.state(r.backend) == backends.Down
	})
	return crashed && slices.ContainsFunc(f, func(v backendView) bool {
		return v.candidate && v.state == backends.Ready && !h.suspectsCrashOf(v.backend)
	})
}

// mayRetryWhenAllDown reports whether a request that has lost its connections on all attempts may have one more, should
// every backend be down: replicas that are killed together may take all attempts within milliseconds.
func (h *history) mayRetryWhenAllDown(f fleetView, s *Settings, now time.Time) bool {
	latest := h.latestAttempt().failure
	lostConnection := latest.SuspectsCrash || latest.Reason == metrics.RetryStale
	if !lostConnection || h.allDownAttempt || s.Attempts < 2 || !h.mayWait() || h.hasUpstreamError(f) {
		return false
	}
	first := slices.IndexFunc(h.attempts, func(r attemptRecord) bool { return r.suspectsReplicaDown() })
	// Later failures came one after another: each replica may have crashed by the request.
	return first < 0 || now.Sub(h.attempts[first].endedAt) <= shutdownVerdictTimeout
}
