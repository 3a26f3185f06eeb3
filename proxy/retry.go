package proxy

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

const (
	// healthRecheckTimeout is how long the health checks take to find out that a replica
	// is dead, when they are asked to look.
	healthRecheckTimeout = 500 * time.Millisecond
	// shutdownVerdictTimeout is how long the health checks of a replica go on passing, at
	// most, after its last response. A busy vLLM that was told to stop took up to 0.8 s.
	shutdownVerdictTimeout = 1500 * time.Millisecond
	verdictProbeInterval   = 50 * time.Millisecond
	crashProbeInterval     = 250 * time.Millisecond

	// Backends that all refused the connection are asked again after minRecheckDelay, and
	// then after twice as long each time: by then the health checks know which are down,
	// and the admission queue waits for those.
	minRecheckDelay = 150 * time.Millisecond
	maxRecheckDelay = 2 * time.Second
	// upstreamErrorRetryTimeout is how long a request that got an error from a replica
	// waits for another replica. One that restarts may be about to become ready.
	upstreamErrorRetryTimeout = 2 * time.Second

	// After all backends have refused a request as full, another ready one is tried after
	// minSlotDelay. The full ones are tried after fullBackoff, and at most twice that, if
	// nothing of ours is in flight there, whose end would make room.
	minSlotDelay = 250 * time.Millisecond
	fullBackoff  = 500 * time.Millisecond
)

// attemptRecord is one failed attempt.
type attemptRecord struct {
	backend  *backends.Backend
	endedAt  time.Time
	failure  *failure
	excluded bool // the backend is not to be picked
	refused  bool // uncharged, and not readmitted since
	full     bool // refused as full, and no slot was awaited since
	answered bool // the replica sent an error that the client may get
}

// isSuspect reports whether the replica failed as one does that crashes or shuts down.
func (a *attemptRecord) isSuspect() bool { return a.failure.mayHaveCrashed || a.failure.shuttingDown }

// history is what a request has tried and waited for so far.
type history struct {
	receivedAt   time.Time     // when its body was there
	queueTimeout time.Duration // of all its waits together; 0: it never waits
	attempts     []attemptRecord
	sent         int      // attempts begun
	best         *failure // the latest with a response of a replica, else the latest

	last    step
	wait    waitKind    // of the last step, if it was a wait
	outcome waitOutcome // of that wait
	pickErr error       // of the last step, if it was a pick
	end     requestEnd

	queueTime     time.Duration // waited in the admission queue, for a slot and for the retry budget
	budgetWait    time.Duration // of it, for the retry budget
	recheckDelay  time.Duration // of the latest recheck
	slotAwaited   bool
	outageAttempt bool // an attempt beyond the limit was considered, as all backends were down
	queueFull     bool // the request was not allowed to wait
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
	cutOff                  // by an operator, or by the end of the proxy
	disconnected            // by its client
)

// waitKind is what a request waits for.
type waitKind int

const (
	waitVerdict waitKind = iota // the health checks find the replica of the last attempt down
	waitCrashes                 // the health checks have had time to look at the replicas of two failed attempts
	waitOutage                  // they have had time to look at all
	waitSlot                    // a full backend has finished a request
	waitBudget                  // the retry budget allows another attempt
	waitRecheck                 // backends that refused the connection may be asked again
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
	backoff       time.Duration // of waitSlot, with its jitter

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

// responseKind is what a request is answered with when no attempt has succeeded.
type responseKind int

const (
	respondFailure       responseKind = iota // of the best attempt, by its reason
	respondReplicaError                      // the response of the best attempt
	respondCutOff                            // the request has ended
	respondDisconnected                      // there is nobody to answer
	respondNoDescriptors                     // this process could not connect
	respondNotPicked
)

// fleetView is the state of the backends that serve a request, and of those it was sent to.
type fleetView []backendView

type backendView struct {
	backend   *backends.Backend
	state     backends.State
	busy      bool // requests of ours are in flight there
	candidate bool // it serves the request
}

func (f fleetView) state(b *backends.Backend) backends.State {
	for i := range f {
		if f[i].backend == b {
			return f[i].state
		}
	}
	return backends.Down
}

func (f fleetView) anyBusy(list []*backends.Backend) bool {
	return slices.ContainsFunc(f, func(v backendView) bool { return v.busy && slices.Contains(list, v.backend) })
}

func (f fleetView) candidates() (list []*backends.Backend) {
	for i := range f {
		if f[i].candidate {
			list = append(list, f[i].backend)
		}
	}
	return list
}

// next decides what to do after the attempts and waits so far. It has no side effects.
func next(h *history, f fleetView, s *Settings, now time.Time) action {
	if h.end != notEnded {
		return respond(h)
	}
	switch h.last {
	case stepNone:
		return pickOrRecheck(h, f, now)
	case stepPick:
		if errors.Is(h.pickErr, router.ErrNoneReady) && h.hasRetriable(f, now) && !h.recheckExpired(f, now) {
			return recheck(h, now)
		}
		return respond(h)
	case stepAttempt:
		return afterFailure(h, f, s, now)
	}
	switch met := h.outcome == waitMet; h.wait {
	case waitCrashes:
		switch {
		case h.outcome == waitRefused:
			return respond(h)
		case h.suspectsPoison(f):
			a := respond(h)
			a.poison = true
			return a
		case !h.latest().failure.uncharged:
			return awaitVerdict(h, f, now)
		}
	case waitVerdict:
		if !met {
			return retryWithinBudget(h, f, now)
		}
	case waitSlot:
		if !met {
			return respond(h)
		}
		return awaitVerdict(h, f, now)
	case waitOutage, waitBudget:
		if !met {
			return respond(h)
		}
	case waitRecheck:
		if h.outcome == waitRefused {
			return respond(h)
		}
	}
	return pickOrRecheck(h, f, now)
}

// afterFailure decides what to do after a failed attempt.
func afterFailure(h *history, f fleetView, s *Settings, now time.Time) action {
	latest := h.latest().failure
	switch charged, shutdowns := h.countCharged(); {
	case latest.final:
		return respond(h)
	case latest.uncharged && !h.secondCrash():
		return pickOrRecheck(h, f, now)
	case latest.uncharged:
	case s.Retry.Share == 0 && s.Retry.PerSecond == 0:
		return respond(h)
	case h.allFull(f, charged, s):
		return action{kind: actWait, wait: waitSlot, backends: h.fullBackends(), deadline: now.Add(h.queueTimeout - h.queueTime)}
	case shutdowns >= s.Attempts:
		return respond(h)
	case charged >= s.Attempts:
		if !h.mayBeOutage(f, s, now) {
			return respond(h)
		}
		return action{kind: actWait, wait: waitOutage, backends: f.candidates(), deadline: now.Add(healthRecheckTimeout), probeInterval: crashProbeInterval}
	}
	if h.secondCrash() {
		return action{kind: actWait, wait: waitCrashes, backends: f.candidates(), deadline: now.Add(healthRecheckTimeout), probeInterval: crashProbeInterval}
	}
	return awaitVerdict(h, f, now)
}

// awaitVerdict waits until the health checks have found whether the replica of the last
// attempt is down, if no other is ready. If it is down, it was stopped or has crashed, and
// is another process when it is back: its last response was not about the request, for
// which it may be asked again. If it stays, its response is worth as much as any.
func awaitVerdict(h *history, f fleetView, now time.Time) action {
	latest := h.latest()
	if !latest.isSuspect() && !latest.failure.full || h.queueTimeout == 0 || h.hasReady(f) {
		return retryWithinBudget(h, f, now)
	}
	timeout := healthRecheckTimeout
	switch {
	case latest.failure.full:
		timeout = 0
	case latest.failure.status != 0:
		timeout = shutdownVerdictTimeout
	}
	return action{kind: actWait, wait: waitVerdict, backends: []*backends.Backend{latest.backend}, deadline: now.Add(timeout), probeInterval: verdictProbeInterval}
}

// retryWithinBudget makes another attempt as soon as the retry budget allows it.
func retryWithinBudget(h *history, f fleetView, now time.Time) action {
	if !slices.ContainsFunc(f, func(v backendView) bool { return v.candidate && !h.isExcluded(v.backend) }) {
		return action{kind: actPick} // the router says why there is none
	}
	return awaitBudget(h, f, now)
}

func awaitBudget(h *history, f fleetView, now time.Time) action {
	timeout := h.queueTimeout - h.queueTime
	if h.hasUpstreamError(f) {
		timeout = min(timeout, upstreamErrorRetryTimeout-h.budgetWait)
	}
	return action{kind: actWait, wait: waitBudget, deadline: now.Add(timeout)}
}

// pickOrRecheck asks the router for a backend, unless only backends are left that will
// be worth another attempt soon.
func pickOrRecheck(h *history, f fleetView, now time.Time) action {
	switch {
	case !h.hasRetriable(f, now) || h.hasReady(f):
		return action{kind: actPick}
	case h.recheckExpired(f, now):
		return respondWith(h, router.ErrNoneReady)
	}
	return recheck(h, now)
}

func recheck(h *history, now time.Time) action {
	delay := min(h.nextRecheckDelay(), h.queueTimeout-now.Sub(h.receivedAt))
	return action{kind: actWait, wait: waitRecheck, deadline: now.Add(delay)}
}

// respond answers the request: with the best response of a replica, if there was one, else
// with why there is none.
func respond(h *history) action {
	if h.last == stepPick {
		return respondWith(h, h.pickErr)
	}
	return respondWith(h, nil)
}

// respondWith is respond where the router has no backend for the reason err.
func respondWith(h *history, err error) action {
	if h.queueFull {
		err = router.ErrQueueFull
	}
	a := action{kind: actRespond, err: err}
	switch best := h.best; {
	case h.end == cutOff:
		a.response = respondCutOff
	case h.end == disconnected:
		a.response = respondDisconnected
	case best != nil && best.status != 0:
		a.response = respondReplicaError
	case best != nil && best.noDescriptors && !h.queueFull:
		a.response = respondNoDescriptors
	case best == nil, h.queueFull, err != nil && (h.queueTime > 0 || best.uncharged && h.queueTimeout > 0):
		a.response = respondNotPicked
	}
	return a
}

// isMet reports whether what a waits for has come. Slots and the retry budget are granted
// by those who have them.
func (a *action) isMet(h *history, f fleetView, begun, now time.Time) bool {
	switch a.wait {
	case waitVerdict:
		return f.state(a.backends[0]) == backends.Down
	case waitOutage:
		return !now.Before(a.deadline) && !slices.ContainsFunc(f, func(v backendView) bool { return v.candidate && v.state != backends.Down })
	case waitSlot:
		return !now.Before(begun.Add(minSlotDelay)) && h.hasReady(f) || !now.Before(begun.Add(a.backoff)) && !f.anyBusy(a.backends)
	}
	return false
}

// latest returns the last attempt.
func (h *history) latest() *attemptRecord { return &h.attempts[len(h.attempts)-1] }

// addFailure records a failed attempt.
func (h *history) addFailure(b *backends.Backend, f *failure, now time.Time) {
	h.last = stepAttempt
	h.attempts = append(h.attempts, attemptRecord{
		backend: b, endedAt: now, failure: f,
		excluded: !f.stale, // else it may be the next one too, on a new connection
		refused:  f.uncharged,
		full:     f.full && !f.uncharged,
		answered: f.status != 0 && !f.shuttingDown,
	})
}

// endWait records how a wait ended, and readmits the backends that may be picked again.
// granted is the backend that has a slot, if any.
func (h *history) endWait(a *action, outcome waitOutcome, granted *backends.Backend, f fleetView) {
	h.last, h.wait, h.outcome = stepWait, a.wait, outcome
	met := outcome == waitMet
	switch a.wait {
	case waitOutage:
		h.outageAttempt = true
		if met {
			h.readmit(func(*attemptRecord) bool { return true })
		}
	case waitSlot:
		h.slotAwaited = true
		free := a.backends
		if granted != nil {
			free = []*backends.Backend{granted}
		}
		if met {
			h.readmit(func(r *attemptRecord) bool { return slices.Contains(free, r.backend) })
		}
		for i := range h.attempts {
			h.attempts[i].full = false
		}
	case waitVerdict:
		latest := h.latest()
		if met {
			h.readmit(func(r *attemptRecord) bool {
				return r.backend == latest.backend || h.isSuspect(r.backend) && !h.mayHaveCrashed(r.backend)
			})
		} else if latest.failure.status != 0 {
			latest.answered = true
		}
	case waitRecheck:
		h.recheckDelay = h.nextRecheckDelay()
		refused := h.refusedBackends()
		h.readmit(func(r *attemptRecord) bool {
			return slices.Contains(refused, r.backend) || h.isSuspect(r.backend) && f.state(r.backend) == backends.Down
		})
		for i := range h.attempts {
			h.attempts[i].refused = false
		}
	}
}

// readmit lets backends be picked again.
func (h *history) readmit(which func(*attemptRecord) bool) {
	for i := range h.attempts {
		if r := &h.attempts[i]; r.excluded && which(r) {
			r.excluded = false
		}
	}
}

// excluded returns the backends that are not to be picked.
func (h *history) excluded() []*backends.Backend {
	return h.backends(func(r *attemptRecord) bool { return r.excluded })
}

// refusedBackends returns those whose attempts were not charged, until the next recheck.
func (h *history) refusedBackends() []*backends.Backend {
	return h.backends(func(r *attemptRecord) bool { return r.refused })
}

// fullBackends returns those that refused the request as full, until the next wait for a slot.
func (h *history) fullBackends() []*backends.Backend {
	return h.backends(func(r *attemptRecord) bool { return r.full })
}

// backends returns the backends of some attempts.
func (h *history) backends(of func(*attemptRecord) bool) (list []*backends.Backend) {
	for i := range h.attempts {
		if r := &h.attempts[i]; of(r) {
			list = append(list, r.backend)
		}
	}
	return list
}

func (h *history) isExcluded(b *backends.Backend) bool {
	return h.any(func(r *attemptRecord) bool { return r.excluded && r.backend == b })
}

func (h *history) any(is func(*attemptRecord) bool) bool {
	for i := range h.attempts {
		if is(&h.attempts[i]) {
			return true
		}
	}
	return false
}

func (h *history) count(is func(*attemptRecord) bool) (n int) {
	for i := range h.attempts {
		if is(&h.attempts[i]) {
			n++
		}
	}
	return n
}

// countCharged returns how many attempts count towards the limit, and how many were ended by
// replicas that shut down, which have a limit of their own.
func (h *history) countCharged() (countCharged, shutdowns int) {
	countCharged = h.count(func(r *attemptRecord) bool { return !r.failure.uncharged && !r.failure.shuttingDown })
	return countCharged, h.count(func(r *attemptRecord) bool { return r.failure.shuttingDown && !r.failure.uncharged })
}

// countStale returns how many attempts were made over a stale connection.
func (h *history) countStale() int {
	return h.count(func(r *attemptRecord) bool { return r.failure.stale })
}

// wasStale reports whether an attempt at b was.
func (h *history) wasStale(b *backends.Backend) bool {
	return h.any(func(r *attemptRecord) bool { return r.failure.stale && r.backend == b })
}

// hasStalled reports whether an attempt was given up because its backend stalled.
func (h *history) hasStalled() bool {
	return h.any(func(r *attemptRecord) bool { return r.failure.stalled })
}

func (h *history) isSuspect(b *backends.Backend) bool {
	return h.any(func(r *attemptRecord) bool { return r.backend == b && r.isSuspect() })
}

// mayHaveCrashed reports whether the request may be what b crashed by.
func (h *history) mayHaveCrashed(b *backends.Backend) bool {
	return h.any(func(r *attemptRecord) bool { return r.backend == b && r.failure.mayHaveCrashed })
}

// hasReady reports whether a backend is ready that is not excluded.
func (h *history) hasReady(f fleetView) bool {
	return slices.ContainsFunc(f, func(v backendView) bool {
		return v.candidate && v.state == backends.Ready && !h.isExcluded(v.backend)
	})
}

// hasRetriable reports whether a backend that is excluded may be worth another attempt
// soon: it refused the connection, or is down or about to be found so, and will be another
// process when it is back.
func (h *history) hasRetriable(f fleetView, now time.Time) bool {
	return h.any(func(r *attemptRecord) bool {
		return r.refused || r.isSuspect() && h.isExcluded(r.backend) &&
			(f.state(r.backend) == backends.Down || now.Sub(r.endedAt) < healthRecheckTimeout)
	})
}

// hasUpstreamError reports whether a replica has sent an error that the client may get.
// One of a replica that is down by now was about its end, and is not worth more than a
// response.
func (h *history) hasUpstreamError(f fleetView) bool {
	return h.any(func(r *attemptRecord) bool { return r.answered && f.state(r.backend) != backends.Down })
}

// upstreamErrorAt returns when the first such error came.
func (h *history) upstreamErrorAt() time.Time {
	for i := range h.attempts {
		if h.attempts[i].answered {
			return h.attempts[i].endedAt
		}
	}
	return time.Time{}
}

// nextRecheckDelay returns for how long backends that refused the connection are left
// alone.
func (h *history) nextRecheckDelay() time.Duration {
	return min(max(2*h.recheckDelay, minRecheckDelay), maxRecheckDelay)
}

// recheckExpired reports whether they are asked no more.
func (h *history) recheckExpired(f fleetView, now time.Time) bool {
	return now.Sub(h.receivedAt) >= h.queueTimeout ||
		h.hasUpstreamError(f) && now.Sub(h.upstreamErrorAt()) >= upstreamErrorRetryTimeout
}

// queueTimeLeft returns how long the request may yet wait in the admission queue.
func (h *history) queueTimeLeft(f fleetView, now time.Time) time.Duration {
	left := h.queueTimeout - h.queueTime
	if h.hasUpstreamError(f) && !h.hasReady(f) {
		left = min(left, upstreamErrorRetryTimeout-now.Sub(h.upstreamErrorAt()))
	}
	return left
}

// secondCrash reports whether the last attempt failed as if its replica had crashed, and
// one before it too.
func (h *history) secondCrash() bool {
	return h.latest().failure.mayHaveCrashed && h.count(func(r *attemptRecord) bool { return r.failure.mayHaveCrashed }) > 1
}

// suspectsPoison reports whether the request is likely to be what two replicas crashed by,
// so that no third one is risked. A restart of one replica after another is told from it by
// the first being back, or by no other being ready; a replica that shuts down in good order
// says so.
func (h *history) suspectsPoison(f fleetView) bool {
	before := h.attempts[:len(h.attempts)-1]
	crashed := slices.ContainsFunc(before, func(r attemptRecord) bool {
		return r.failure.mayHaveCrashed && f.state(r.backend) == backends.Down
	})
	return crashed && slices.ContainsFunc(f, func(v backendView) bool {
		return v.candidate && v.state == backends.Ready && !h.mayHaveCrashed(v.backend)
	})
}

// allFull reports whether the last attempt leaves a request that waits for a slot: all
// backends that could take it have refused it as full. An engine that is dead has another
// status, or fails its checks.
func (h *history) allFull(f fleetView, charged int, s *Settings) bool {
	if h.slotAwaited || h.queueTimeout == 0 || s.Attempts < 2 || !h.latest().failure.full {
		return false
	}
	if len(h.fullBackends()) < len(h.excluded())-len(h.refusedBackends()) {
		return false
	}
	return charged >= s.Attempts || !h.hasReady(f)
}

// mayBeOutage reports whether a request that has lost its connections on all of its
// attempts may have one more, should every backend turn out to be down: replicas that are
// killed together may take as many attempts as there are within milliseconds.
func (h *history) mayBeOutage(f fleetView, s *Settings, now time.Time) bool {
	latest := h.latest().failure
	if !latest.mayHaveCrashed && !latest.stale || h.outageAttempt || s.Attempts < 2 || h.queueTimeout == 0 || h.hasUpstreamError(f) {
		return false
	}
	first := slices.IndexFunc(h.attempts, func(r attemptRecord) bool { return r.isSuspect() })
	return first < 0 || now.Sub(h.attempts[first].endedAt) <= shutdownVerdictTimeout // else one after another: each may have crashed by the request
}
