package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/router"
)

const (
	// healthRecheckTimeout is how long the readiness checks take to find out that a replica is
	// dead, when they are asked to look.
	healthRecheckTimeout = 500 * time.Millisecond
	// slotPollInterval is how often a request that all have refused looks for what else
	// than a place lets it be tried again.
	slotPollInterval = 250 * time.Millisecond
	// minFullBackoff is how long it waits where nothing of ours will end and make
	// one, and at most twice that.
	minFullBackoff = 500 * time.Millisecond
)

// awaitRetry reports whether another attempt is made after f, and waits until it may be.
func (r *request) awaitRetry(f *failure) bool {
	switch {
	case f.final:
		return false
	case f.uncharged:
		return !r.suspectsPoisonRequest(f)
	case r.settings.RetryShare == 0 && r.settings.RetryPerSecond == 0:
		return false
	case r.allFull(f):
		if !r.awaitSlot() {
			return false
		}
		if r.awaitHealthVerdict(f) {
			return true
		}
	case r.shutdownAttempts >= r.settings.Attempts:
		return false
	case r.attemptsCharged >= r.settings.Attempts:
		return r.awaitOutageVerdict(f)
	case r.suspectsPoisonRequest(f):
		return false
	case r.awaitHealthVerdict(f):
		return true // and waits in the queue until one is back
	case r.isDone():
		return false
	case !r.hasUntriedBackend():
		return true // and pick says why there is none
	}
	return r.awaitRetryBudget()
}

// countFailure counts a failed attempt.
func (r *request) countFailure(f *failure) {
	b := f.decision.Backend
	if f.mayHaveCrashed || f.shuttingDown {
		r.suspected = append(r.suspected, suspectedFailure{b, time.Now(), f.mayHaveCrashed})
	}
	if f.status != 0 && !f.shuttingDown {
		r.recordResponder(b, time.Now())
	}
	switch {
	case f.uncharged:
		r.refusedConnect = append(r.refusedConnect, b)
		return
	case f.shuttingDown:
		r.shutdownAttempts++
	case f.stale:
		r.stale = append(r.stale, b)
		r.attemptsCharged++
		return
	default:
		r.attemptsCharged++
	}
	r.relocated = r.relocated || f.stalled
	if f.full {
		r.refusedFull = append(r.refusedFull, b)
	}
}

// hasUntriedBackend reports whether there is a backend that was not tried.
func (r *request) hasUntriedBackend() bool {
	return slices.ContainsFunc(r.input.request.Backends, func(b *backends.Backend) bool { return !slices.Contains(r.tried, b) })
}

// awaitRetryBudget takes a retry off the budget, and waits for it if it must.
func (r *request) awaitRetryBudget() bool {
	s, budget := r.settings, r.proxy.retries
	if !budget.hasWaiters() && budget.tryAcquire(s.RetryShare, s.RetryPerSecond) {
		return true
	}
	patience := r.maxQueueTime() - r.queueTime
	if r.hasUpstreamError() {
		patience = min(patience, upstreamErrorRetryTimeout-r.budgetWait)
	}
	if patience <= 0 || !r.joinQueue() {
		r.proxy.metrics.CountRetryWait(metrics.RetryWaitGivenUp)
		return false
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(r.context, patience)
	defer cancel()
	ok := budget.acquire(ctx, s.RetryShare, s.RetryPerSecond)
	waited := time.Since(begun)
	r.queueTime += waited
	r.budgetWait += waited
	r.spans.Held(waited, "retry_budget")
	switch {
	case ok:
		r.proxy.metrics.CountRetryWait(metrics.RetryWaitSent)
	case r.isDone():
		r.proxy.metrics.CountRetryWait(metrics.RetryWaitDisconnected)
	default:
		r.proxy.metrics.CountRetryWait(metrics.RetryWaitGivenUp)
	}
	return ok
}

// suspectsPoisonRequest reports whether the request is likely to be what two replicas died
// of, so that no third one is risked. A restart of one replica after another is
// told from it by the first being back, or by nobody being well; where a replica
// stops in good order, its answers say so.
func (r *request) suspectsPoisonRequest(f *failure) bool {
	if !f.mayHaveCrashed {
		return false
	}
	last := len(r.suspected) - 1
	if !slices.ContainsFunc(r.suspected[:last], func(o suspectedFailure) bool { return o.mayHaveCrashed }) {
		return false
	}
	all := r.input.request.Backends
	for range 2 { // a replica whose engine died answers for a moment more
		for _, b := range all {
			r.proxy.suspect(b)
		}
		if !r.sleep(healthRecheckTimeout / 2) {
			return true // and nobody waits for the answer
		}
	}
	dead := slices.ContainsFunc(r.suspected[:last], func(o suspectedFailure) bool { return o.mayHaveCrashed && o.backend.State() == backends.Down })
	atRisk := slices.ContainsFunc(all, func(b *backends.Backend) bool { return b.State() == backends.Ready && !r.mayHaveCrashed(b) })
	if !dead || !atRisk {
		return false
	}
	r.proxy.log.Warn("request was on two replicas that failed and died, and is tried nowhere else",
		"last", f.decision.Backend.Name, "request_id", r.id)
	return true
}

// awaitOutageVerdict waits until the checks have seen whether every backend is down, when a
// request has lost its connections on all of its attempts: replicas that are killed
// together may take as many attempts as there are within milliseconds. It allows one
// more attempt then, once, which waits in the queue until a backend is back.
func (r *request) awaitOutageVerdict(f *failure) bool {
	if !f.mayHaveCrashed && !f.stale || r.outageAttempt || r.settings.Attempts < 2 || r.maxQueueTime() == 0 || r.hasUpstreamError() {
		return false
	}
	if len(r.suspected) > 0 && time.Since(r.suspected[0].at) > shutdownVerdictTimeout {
		return false // one after another: each may have died of the request
	}
	r.outageAttempt = true
	for range 2 {
		for _, b := range r.input.request.Backends {
			r.proxy.suspect(b)
		}
		if !r.sleep(healthRecheckTimeout / 2) {
			return false
		}
	}
	if slices.ContainsFunc(r.input.request.Backends, func(b *backends.Backend) bool { return b.State() != backends.Down }) {
		return false
	}
	r.tried = nil
	return true
}

// allFull reports whether f leaves a request that waits for a place:
// all that could take it are full, by their own word. An engine that is dead has
// another status, or fails its checks.
func (r *request) allFull(f *failure) bool {
	if r.slotAwaited || r.maxQueueTime() == 0 || r.settings.Attempts < 2 || !f.full || len(r.refusedFull) < len(r.tried)-len(r.refusedConnect) {
		return false
	}
	return r.attemptsCharged >= r.settings.Attempts || !r.hasReadyBackend()
}

// awaitSlot waits until a backend that refused the request has finished
// another, or a while where it has nothing to finish, and lets them be tried
// once more.
func (r *request) awaitSlot() bool {
	r.slotAwaited = true
	if !r.joinQueue() {
		return false
	}
	begun := time.Now()
	free := r.waitForSlot()
	waited := time.Since(begun)
	switch {
	case len(free) > 0:
		r.recordQueueTime(metrics.QueueSent, waited)
	case r.isDone():
		r.recordQueueTime(metrics.QueueDisconnected, waited)
	default:
		r.recordQueueTime(metrics.QueueTimeout, waited)
	}
	r.tried = slices.DeleteFunc(r.tried, func(b *backends.Backend) bool { return slices.Contains(free, b) })
	r.refusedFull = r.refusedFull[:0]
	return len(free) > 0
}

// waitForSlot waits for what awaitSlot does, and returns the backends that may
// be asked again: the one that has a place for this request, or after the backoff
// all of them. It returns none if the wait ended in another way.
func (r *request) waitForSlot() (free []*backends.Backend) {
	place := r.proxy.router.AwaitSlot(r.refusedFull)
	left := time.NewTimer(r.maxQueueTime() - r.queueTime)
	defer left.Stop()
	look := time.NewTicker(slotPollInterval)
	defer look.Stop()
	backoff := time.Now().Add(minFullBackoff + rand.N(minFullBackoff))
	for {
		select {
		case <-place.Granted():
			takes := !r.isDone()
			place.Release(takes)
			if takes {
				free = []*backends.Backend{place.Backend()}
			}
			return free
		case <-look.C:
			if !r.hasReadyBackend() && (time.Now().Before(backoff) || slices.ContainsFunc(r.refusedFull, isBusy)) {
				continue
			}
			free = r.refusedFull
		case <-left.C:
		case <-r.context.Done():
		}
		place.Release(false)
		return free
	}
}

func isBusy(b *backends.Backend) bool { return b.InFlight.Load() > 0 }

// forward makes attempts until the client has its answer, or is gone.
func (r *request) forward() {
	r.query = r.redactKey()
	rewriteRequestHeader(r.httpReq.Header, r.id)
	r.proxy.addInstance(r.httpReq.Header)
	r.proxy.retries.countRequest()
	var latest *failure
	var none error // why there is no backend to ask
	defer r.setBestFailure(nil)
	r.beginAttemptContext()
	for {
		var d *router.Decision
		if d, none = r.pick(); none != nil {
			r.context.end()
			break
		}
		if latest != nil {
			r.proxy.metrics.CountRetry(latest.reason)
		}
		f := r.attempt(d)
		if f == nil || f.done {
			return
		}
		r.beginAttemptContext()
		f.decision, latest = d, f
		r.reportFailure(f)
		r.summary.addFailure(string(f.reason))
		if !f.stale { // else it may be the next one too, on a new connection
			r.tried = append(r.tried, d.Backend)
		}
		if f.status != 0 || f.final || r.bestFailure == nil || r.bestFailure.status == 0 {
			r.setBestFailure(f)
		}
		r.countFailure(f)
		if !r.awaitRetry(f) {
			r.context.end()
			break
		}
	}
	r.respondFailure(none)
}

// reportFailure makes a failed attempt known.
func (r *request) reportFailure(f *failure) {
	level, more := slog.LevelDebug, []any(nil)
	switch {
	case f.stale:
	case f.noDescriptors:
		r.proxy.outOfDescriptors(f.err)
	default:
		r.proxy.suspect(f.decision.Backend)
		if due, left := r.proxy.failureLog.due(f.decision.Backend, time.Now()); due {
			level = slog.LevelWarn
			if left > 0 {
				more = []any{"others_since_the_last_warning", left}
			}
		}
	}
	r.proxy.log.Log(r.httpReq.Context(), level, "attempt failed", append([]any{
		"backend", f.decision.Backend.Name, "reason", string(f.reason), "error", f.err, "request_id", r.id}, more...)...)
}

// respondFailure answers when no attempt is left: with the last replica's own words, if
// there were any, else with why there is none.
func (r *request) respondFailure(none error) {
	last := r.bestFailure
	r.leaveQueue()
	if r.queueFull {
		none = router.ErrQueueFull
	}
	switch {
	case r.isCutOff():
		r.sendError(r.cutOffError())
	case r.isDisconnected():
		r.recordAborted(metrics.AbortInQueue)
	case last != nil && last.status != 0:
		r.relayFailure(last)
	case last != nil && last.noDescriptors && !r.queueFull:
		e := unavailableError("this proxy has no file descriptor left to connect to a replica with; try again")
		e.code = "out_of_descriptors"
		r.sendError(e)
	case last == nil, r.queueFull, none != nil && (r.queueTime > 0 || last.uncharged && r.maxQueueTime() > 0): // it waited for one
		r.sendError(r.notPickedError(none))
	case last.stalled:
		r.sendError(&apiError{status: http.StatusGatewayTimeout, kind: "timeout", code: "replica_stuck",
			message: "the replica does nothing about the request, and no other could answer it"})
	case errors.Is(last.err, errResponse):
		r.sendError(responseTimeoutError())
	case last.timeout:
		r.sendError(firstByteTimeoutError())
	default:
		e := unavailableError("no replica could answer: " + string(last.reason))
		e.status, e.kind, e.code = http.StatusBadGateway, "bad_gateway", "replica_failed"
		r.sendError(e)
	}
}

// shutdownVerdictTimeout is how long a replica takes, at most, from the last word on what it
// had until its checks fail. A busy vLLM that is told to stop took up to 0.8 s.
const shutdownVerdictTimeout = 1500 * time.Millisecond

// suspectedFailure is a backend that failed an attempt as one does that dies, or stops.
type suspectedFailure struct {
	backend        *backends.Backend
	at             time.Time
	mayHaveCrashed bool // it may have died of the request
}

func (r *request) hasFailed(b *backends.Backend) bool {
	return slices.ContainsFunc(r.suspected, func(o suspectedFailure) bool { return o.backend == b })
}

// mayHaveCrashed reports whether the request may be what b died of.
func (r *request) mayHaveCrashed(b *backends.Backend) bool {
	return slices.ContainsFunc(r.suspected, func(o suspectedFailure) bool { return o.backend == b && o.mayHaveCrashed })
}

// awaitHealthVerdict waits until the checks have seen whether the replica of a failed attempt
// is gone, where no other is ready. If it is, it was stopped or has died, and it is
// another process when it is back: what it said last was not about the request, for
// which it may be asked again. If it stays, its words are worth as much as any.
func (r *request) awaitHealthVerdict(f *failure) bool {
	if !(f.mayHaveCrashed || f.shuttingDown || f.full) || r.maxQueueTime() == 0 || r.hasReadyBackend() {
		return false
	}
	b, begun, limit := f.decision.Backend, time.Now(), healthRecheckTimeout
	switch {
	case f.full:
		limit = 0 // whoever says that has stayed, mostly; and awaitSlot gave the time
	case f.status != 0:
		limit = shutdownVerdictTimeout
	}
	for b.State() != backends.Down {
		if r.proxy.suspect(b); time.Since(begun) >= limit || !r.sleep(healthRecheckTimeout/10) {
			if f.status != 0 {
				r.recordResponder(b, begun)
			}
			return false
		}
	}
	r.tried = slices.DeleteFunc(r.tried, func(o *backends.Backend) bool { return o == b || r.hasFailed(o) && !r.mayHaveCrashed(o) })
	return true
}

// recordResponder notes that a replica has answered, if only with an error.
func (r *request) recordResponder(b *backends.Backend, at time.Time) {
	if r.hasUpstreamError() {
		return
	}
	r.lastResponder = b
	if r.firstResponseAt.IsZero() {
		r.firstResponseAt = at
	}
}

// hasUpstreamError reports whether there are a replica's words to relay, if no other does
// better. Those of one that is down by now are about its end, and not worth more
// than an answer.
func (r *request) hasUpstreamError() bool {
	return r.lastResponder != nil && r.lastResponder.State() != backends.Down
}

const (
	// minRecheckDelay is how long a request waits when all backends refused its
	// connection, until they are asked again: by then the readiness checks know
	// which are down, and the admission queue waits for those.
	minRecheckDelay = 150 * time.Millisecond
	maxRecheckDelay = 2 * time.Second
	// upstreamErrorRetryTimeout is how long a request that a replica has answered, if only with
	// an error, waits for another replica to become ready. One that restarts may be
	// about to; after that its client gets the answer that there is.
	upstreamErrorRetryTimeout = 2 * time.Second
)

// pick asks the router for a backend. The request may wait for it in the admission queue.
func (r *request) pick() (*router.Decision, error) {
	if r.isCancelled() {
		return nil, errCancelled // a free backend would be picked all the same
	}
	for {
		d, err := (*router.Decision)(nil), router.ErrNoneReady
		if !r.hasRetriableBackend() || r.hasReadyBackend() {
			d, err = r.pickOnce()
		}
		if !errors.Is(err, router.ErrNoneReady) || !r.hasRetriableBackend() || r.recheckExpired() {
			return d, err
		}
		// All that were ready refused the connection, or seem to have died, or there is
		// no descriptor to reach them with.
		r.recheckDelay = min(max(2*r.recheckDelay, minRecheckDelay), maxRecheckDelay)
		if !r.sleep(min(r.recheckDelay, r.maxQueueTime()-time.Since(r.bodyReceivedAt))) {
			if r.queueFull {
				return nil, router.ErrQueueFull
			}
			return nil, r.context.Err()
		}
		r.readmitRetriable()
	}
}

// maxQueueTime returns how long the request may wait for a backend: as its key says,
// else routing.queue.time; 0 where no request waits.
func (r *request) maxQueueTime() time.Duration {
	if r.settings.HoldTime > 0 && r.holder != nil && r.holder.QueueTime > 0 {
		return r.holder.QueueTime
	}
	return r.settings.HoldTime
}

// recheckExpired reports whether backends that refused the connection are asked
// no more.
func (r *request) recheckExpired() bool {
	return time.Since(r.bodyReceivedAt) >= r.maxQueueTime() || r.hasUpstreamError() && time.Since(r.firstResponseAt) >= upstreamErrorRetryTimeout
}

// queueTimeLeft is how long the next ask may hold the request: what is left of the
// time after the asks before.
func (r *request) queueTimeLeft() time.Duration {
	left := r.maxQueueTime() - r.queueTime
	if r.hasUpstreamError() && !r.hasReadyBackend() {
		left = min(left, upstreamErrorRetryTimeout-time.Since(r.firstResponseAt))
	}
	return left
}

// pickOnce is one round of pick, with what becomes of it in the metrics.
func (r *request) pickOnce() (*router.Decision, error) {
	r.leaveQueue()
	asked := time.Now()
	ctx := context.Context(r.context)
	left := r.queueTimeLeft()
	r.input.request.QueueTimeout = max(0, left)
	if left < r.maxQueueTime() { // else the router's own limit will do
		limited, cancel := context.WithTimeout(ctx, left)
		defer cancel()
		ctx = limited
	}
	d, err := r.proxy.router.Pick(ctx, &r.input.request, r.tried...)
	if err == nil {
		if d.QueueTime > 0 {
			r.recordQueueTime(metrics.QueueSent, d.QueueTime)
		}
		return d, nil
	}
	waited := time.Since(asked)
	switch {
	case errors.Is(err, router.ErrQueueFull):
		r.recordQueueTime(metrics.QueueFull, 0)
	case errors.Is(err, router.ErrQueueTimeout):
		r.recordQueueTime(metrics.QueueTimeout, waited)
	case errors.Is(err, context.DeadlineExceeded) && r.hasReadyBackend():
		err = router.ErrQueueTimeout
		r.recordQueueTime(metrics.QueueTimeout, waited)
	case errors.Is(err, context.DeadlineExceeded):
		err = router.ErrNoneReady
		r.recordQueueTime(metrics.QueueNoneReady, waited)
	case errors.Is(err, context.Canceled):
		r.recordQueueTime(metrics.QueueDisconnected, waited)
	case r.maxQueueTime() > 0 && waited >= r.maxQueueTime():
		r.recordQueueTime(metrics.QueueNoneReady, waited)
	}
	return d, err
}

// hasReadyBackend reports whether a backend is ready that was not tried.
func (r *request) hasReadyBackend() bool {
	return slices.ContainsFunc(r.input.request.Backends, func(b *backends.Backend) bool {
		return b.State() == backends.Ready && !slices.Contains(r.tried, b)
	})
}

func (r *request) recordQueueTime(end metrics.QueueResult, waited time.Duration) {
	r.queueTime += waited
	r.proxy.metrics.RecordQueueExit(end, waited)
	r.spans.Held(waited, string(end))
}

// joinQueue counts the request among those that wait, and reports whether one more
// may.
func (r *request) joinQueue() bool {
	if r.waiting {
		return true
	}
	if r.waiting = r.proxy.router.AddWaiting(&r.input.request) == nil; !r.waiting {
		r.queueFull = true
		r.recordQueueTime(metrics.QueueFull, 0)
	}
	return r.waiting
}

func (r *request) leaveQueue() {
	if r.waiting {
		r.waiting = false
		r.proxy.router.RemoveWaiting(&r.input.request)
	}
}

// sleep waits, and reports whether there is anybody still to wait for.
func (r *request) sleep(d time.Duration) bool {
	if !r.joinQueue() {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-r.context.Done():
		return false
	}
}

// hasRetriableBackend reports whether a backend that was tried may be worth another try
// soon: it refused the connection, or is dead or about to be found so, and will
// be another process when it is back.
func (r *request) hasRetriableBackend() bool {
	return len(r.refusedConnect) > 0 || slices.ContainsFunc(r.suspected, func(o suspectedFailure) bool {
		return slices.Contains(r.tried, o.backend) && (o.backend.State() == backends.Down || time.Since(o.at) < healthRecheckTimeout)
	})
}

// readmitRetriable lets those be tried once more.
func (r *request) readmitRetriable() {
	r.tried = slices.DeleteFunc(r.tried, func(b *backends.Backend) bool {
		return slices.Contains(r.refusedConnect, b) || r.hasFailed(b) && b.State() == backends.Down
	})
	r.refusedConnect = r.refusedConnect[:0]
}

// notPickedError is the answer to a request for which there is no backend.
func (r *request) notPickedError(err error) *apiError {
	wait := 0
	if all := r.input.request.Backends; r.proxy.router.CountReady(all) == 0 {
		wait = r.proxy.unreadyRetryAfter(all)
	} else {
		wait = withJitter(int(r.proxy.router.RetryAfter(r.input.request.Priority) / time.Second))
	}
	e := unavailableError(fmt.Sprintf("no replica that serves this model is ready; try again in %ds", wait))
	switch {
	case errors.Is(err, router.ErrMaxInFlight):
		e = &apiError{status: http.StatusTooManyRequests, kind: "overloaded", code: "replicas_full",
			message: fmt.Sprintf("every replica has as many requests as it may (backends[].max_in_flight); try again in %ds", wait)}
	case errors.Is(err, router.ErrQueueFull):
		e = &apiError{status: http.StatusTooManyRequests, kind: "overloaded", code: "queue_full",
			message: fmt.Sprintf("as many requests of this priority class as may wait for a replica do (routing.queue); try again in %ds", wait)}
	case errors.Is(err, router.ErrQueueTimeout):
		e = &apiError{status: http.StatusTooManyRequests, kind: "overloaded", code: "queue_timeout",
			message: fmt.Sprintf("no replica could start this request in %v (routing.queue.time, or queue_time of its key); try again in %ds", r.maxQueueTime(), wait)}
	}
	e.retryAfter = wait
	return e
}

const (
	budgetSlotDuration = 100 * time.Millisecond
	budgetSlots        = 100                   // what counts is the last 10 s
	slotsPerSecond     = 10                    // of them, the last second
	budgetLook         = 20 * time.Millisecond // between two looks of the request whose turn it is
)

// retryBudget bounds what a failing fleet is asked on top of what its clients
// ask: retries are at most a share of the requests of the last 10 s, or a few a
// second. Safe for concurrent use; the zero value has the whole budget.
type retryBudget struct {
	mu           sync.Mutex
	currentSlot  int64 // number of the newest, since 1970
	requests     [budgetSlots]int
	retries      [budgetSlots]int
	requestCount int // sum of requests
	retryCount   int // sum of retries

	line chan struct{} // holds the one whose turn it is; channels are first come, first served
}

func newRetryBudget() *retryBudget { return &retryBudget{line: make(chan struct{}, 1)} }

// countRequest counts a request that is sent for the first time.
func (b *retryBudget) countRequest() {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.advance(time.Now())
	b.requests[at]++
	b.requestCount++
}

// advance drops what is too old and returns the slot of now.
func (b *retryBudget) advance(now time.Time) int {
	slot := now.UnixNano() / int64(budgetSlotDuration)
	for ; b.currentSlot < slot; b.currentSlot++ {
		if slot-b.currentSlot > budgetSlots {
			b.currentSlot = slot - budgetSlots
		}
		at := (b.currentSlot + 1) % budgetSlots
		b.requestCount -= b.requests[at]
		b.retryCount -= b.retries[at]
		b.requests[at], b.retries[at] = 0, 0
	}
	return int(b.currentSlot % budgetSlots)
}

// tryAcquire counts a retry if there is room for it.
func (b *retryBudget) tryAcquire(share float64, perSecond int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.advance(time.Now())
	lately := 0
	for i := range slotsPerSecond {
		lately += b.retries[(at-i+budgetSlots)%budgetSlots]
	}
	if lately >= perSecond && float64(b.retryCount+1) > share*float64(b.requestCount) {
		return false
	}
	b.retries[at]++
	b.retryCount++
	return true
}

// acquire takes a retry as soon as there is room for it, in the order of those
// that wait, until ctx is done.
func (b *retryBudget) acquire(ctx context.Context, share float64, perSecond int) bool {
	select {
	case b.line <- struct{}{}:
		defer func() { <-b.line }()
	case <-ctx.Done():
		return false
	}
	look := time.NewTicker(budgetLook)
	defer look.Stop()
	for !b.tryAcquire(share, perSecond) {
		select {
		case <-look.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// hasWaiters reports whether anybody waits.
func (b *retryBudget) hasWaiters() bool { return len(b.line) > 0 }
