package proxy

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
)

const (
	// verdict is how long the readiness checks take to find out that a replica is
	// dead, when they are asked to look.
	verdict = 500 * time.Millisecond
	// placeLook is how often a request that all have refused looks for what else
	// than a place lets it be tried again.
	placeLook = 250 * time.Millisecond
	// leastBackoff is how long it waits where nothing of ours will end and make
	// one, and at most twice that.
	leastBackoff = 500 * time.Millisecond
)

// again reports whether another attempt is made after f, and waits until it may be.
func (x *exchange) again(f *failure) bool {
	switch {
	case f.final:
		return false
	case f.free:
		return !x.killedTwo(f)
	case x.settings.RetryShare == 0 && x.settings.RetryPerSecond == 0:
		return false
	case x.refusedEverywhere(f):
		if !x.awaitPlace() {
			return false
		}
		if x.isGone(f) {
			return true
		}
	case x.stopped >= x.settings.Attempts:
		return false
	case x.spent >= x.settings.Attempts:
		return x.allAreDown(f)
	case x.killedTwo(f):
		return false
	case x.isGone(f):
		return true // and waits in the queue until one is back
	case x.over():
		return false
	case !x.anotherMayAnswer():
		return true // and pick says why there is none
	}
	return x.withinBudget()
}

// countFailure counts a failed attempt.
func (x *exchange) countFailure(f *failure) {
	b := f.decision.Backend
	if f.deadly || f.stops {
		x.fallen = append(x.fallen, fallen{b, time.Now(), f.deadly})
	}
	if f.status != 0 && !f.stops {
		x.spoke(b, time.Now())
	}
	switch {
	case f.free:
		x.refused = append(x.refused, b)
		return
	case f.stops:
		x.stopped++
	case f.stale:
		x.stale = append(x.stale, b)
		x.spent++
		return
	default:
		x.spent++
	}
	x.moved = x.moved || f.stuck
	if f.full {
		x.full = append(x.full, b)
	}
}

// anotherMayAnswer reports whether there is a backend that was not tried.
func (x *exchange) anotherMayAnswer() bool {
	return slices.ContainsFunc(x.input.request.Backends, func(b *backends.Backend) bool { return !slices.Contains(x.tried, b) })
}

// withinBudget takes a retry off the budget, and waits for it if it must.
func (x *exchange) withinBudget() bool {
	s, budget := x.settings, x.p.retries
	if !budget.inLine() && budget.take(s.RetryShare, s.RetryPerSecond) {
		return true
	}
	patience := x.holdTime() - x.held
	if x.hasWords() {
		patience = min(patience, retryPatience-x.queued)
	}
	if patience <= 0 || !x.waits() {
		x.p.metrics.RetryWaited(metrics.RetryGivenUp)
		return false
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(x.wait, patience)
	defer cancel()
	ok := budget.await(ctx, s.RetryShare, s.RetryPerSecond)
	waited := time.Since(begun)
	x.held += waited
	x.queued += waited
	x.spans.Held(waited, "retry_budget")
	switch {
	case ok:
		x.p.metrics.RetryWaited(metrics.RetrySent)
	case x.over():
		x.p.metrics.RetryWaited(metrics.RetryLeft)
	default:
		x.p.metrics.RetryWaited(metrics.RetryGivenUp)
	}
	return ok
}

// killedTwo reports whether the request is likely to be what two replicas died
// of, so that no third one is risked. A restart of one replica after another is
// told from it by the first being back, or by nobody being well; where a replica
// stops in good order, its answers say so.
func (x *exchange) killedTwo(f *failure) bool {
	if !f.deadly {
		return false
	}
	last := len(x.fallen) - 1
	if !slices.ContainsFunc(x.fallen[:last], func(o fallen) bool { return o.deadly }) {
		return false
	}
	all := x.input.request.Backends
	for range 2 { // a replica whose engine died answers for a moment more
		for _, b := range all {
			x.p.suspect(b)
		}
		if !x.rest(verdict / 2) {
			return true // and nobody waits for the answer
		}
	}
	dead := slices.ContainsFunc(x.fallen[:last], func(o fallen) bool { return o.deadly && o.backend.State() == backends.Down })
	atRisk := slices.ContainsFunc(all, func(b *backends.Backend) bool { return b.State() == backends.Ready && !x.killed(b) })
	if !dead || !atRisk {
		return false
	}
	x.p.log.Warn("request was on two replicas that failed and died, and is tried nowhere else",
		"last", f.decision.Backend.Name, "request_id", x.id)
	return true
}

// allAreDown waits until the checks have seen whether every backend is down, when a
// request has lost its connections on all of its attempts: replicas that are killed
// together may take as many attempts as there are within milliseconds. It allows one
// more attempt then, once, which waits in the queue until a backend is back.
func (x *exchange) allAreDown(f *failure) bool {
	if !f.deadly && !f.stale || x.outage || x.settings.Attempts < 2 || x.holdTime() == 0 || x.hasWords() {
		return false
	}
	if len(x.fallen) > 0 && time.Since(x.fallen[0].at) > farewell {
		return false // one after another: each may have died of the request
	}
	x.outage = true
	for range 2 {
		for _, b := range x.input.request.Backends {
			x.p.suspect(b)
		}
		if !x.rest(verdict / 2) {
			return false
		}
	}
	if slices.ContainsFunc(x.input.request.Backends, func(b *backends.Backend) bool { return b.State() != backends.Down }) {
		return false
	}
	x.tried = nil
	return true
}

// refusedEverywhere reports whether f leaves a request that waits for a place:
// all that could take it are full, by their own word. An engine that is dead has
// another status, or fails its checks.
func (x *exchange) refusedEverywhere(f *failure) bool {
	if x.waited || x.holdTime() == 0 || x.settings.Attempts < 2 || !f.full || len(x.full) < len(x.tried)-len(x.refused) {
		return false
	}
	return x.spent >= x.settings.Attempts || !x.anotherIsReady()
}

// awaitPlace waits until a backend that refused the request has finished
// another, or a while where it has nothing to finish, and lets them be tried
// once more.
func (x *exchange) awaitPlace() bool {
	x.waited = true
	if !x.waits() {
		return false
	}
	begun := time.Now()
	free := x.lookForPlace()
	waited := time.Since(begun)
	switch {
	case len(free) > 0:
		x.wasHeld(metrics.HeldSent, waited)
	case x.over():
		x.wasHeld(metrics.HeldLeft, waited)
	default:
		x.wasHeld(metrics.HeldTooLong, waited)
	}
	x.tried = slices.DeleteFunc(x.tried, func(b *backends.Backend) bool { return slices.Contains(free, b) })
	x.full = x.full[:0]
	return len(free) > 0
}

// lookForPlace waits for what awaitPlace does, and returns the backends that may
// be asked again: the one that has a place for this request, or after the backoff
// all of them. It returns none if the wait ended in another way.
func (x *exchange) lookForPlace() (free []*backends.Backend) {
	place := x.p.router.AwaitSlot(x.full)
	left := time.NewTimer(x.holdTime() - x.held)
	defer left.Stop()
	look := time.NewTicker(placeLook)
	defer look.Stop()
	backoff := time.Now().Add(leastBackoff + rand.N(leastBackoff))
	for {
		select {
		case <-place.Granted():
			takes := !x.over()
			place.Release(takes)
			if takes {
				free = []*backends.Backend{place.Backend()}
			}
			return free
		case <-look.C:
			if !x.anotherIsReady() && (time.Now().Before(backoff) || slices.ContainsFunc(x.full, busy)) {
				continue
			}
			free = x.full
		case <-left.C:
		case <-x.wait.Done():
		}
		place.Release(false)
		return free
	}
}

func busy(b *backends.Backend) bool { return b.InFlight.Load() > 0 }
