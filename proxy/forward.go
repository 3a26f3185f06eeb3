package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/relay"
	"warmroute/proxy/tracing"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// forward makes attempts until the client has its response, or has disconnected.
func (r *request) forward() {
	p, h := r.proxy, &r.history
	r.input.query = r.removeClientKey()
	upstream.RewriteHeader(r.httpReq.Header)
	r.input.sessionHeader = r.httpReq.Header[upstream.SessionHeader]
	p.instance.AppendTo(r.httpReq.Header)
	p.retries.CountRequest()
	h.receivedAt = r.bodyReceivedAt
	h.queueTimeouts, h.noneReadySetting = r.settings.queueTimeoutsOf(r.input.request.CatalogID, &r.caller)
	retry := &r.settings.Retry
	h.queuesIfFull = h.mayWait() && !r.input.request.NoEngine && r.settings.Attempts > 1 && (retry.Share > 0 || retry.PerSecond > 0)
	defer h.replaceBest(nil, &p.buffers)
	defer r.endSplit()
	stopWaiting := func() {
		r.queueKeepalive.stop()
		r.place.release(r.proxy.router, &r.input.request)
	}
	defer stopWaiting() // also if a wait panics
	r.startQueueKeepalive()
	r.beginAttemptContext()
	for {
		h.end = r.lifetime.endReason()
		if apiErr := r.storedResponseLostError(); apiErr != nil {
			r.context.End()
			stopWaiting()
			r.sendError(apiErr)
			return
		}
		var f fleetView
		if h.last != stepNone { // else nothing depends on it
			f = r.fleetView()
		}
		switch a := nextAction(h, f, r.settings, time.Now()); a.kind {
		case actPick:
			r.setPrefilledOn(a.decode)
			d, err := r.awaitPick()
			switch {
			case err == errOtherModel:
				if apiErr := r.chooseModelAgain(); apiErr != nil {
					r.context.End()
					stopWaiting()
					r.sendError(apiErr)
					return
				}
				continue
			case err != nil:
				h.last, h.pickErr = stepPick, err
				continue
			}
			if r.splitResult == "" {
				r.splitResult = metrics.SplitResult(d.Split)
			}
			if len(h.attempts) > 0 {
				p.metrics.CountRetry(h.latestAttempt().failure.Reason)
			}
			f := r.tryBackend(d)
			if f == nil || f.Done {
				return
			}
			r.startQueueKeepalive()
			r.beginAttemptContext()
			if f.Decision == nil {
				f.Decision = d
			}
			p.logFailureAndRecheck(f, r.endpoint, r.inFlight.ID)
			r.recordFailure(f)
			r.recordSplitFailure(f)
		case actWait:
			r.awaitAndRecord(&a)
		case actRespond:
			r.context.End()
			stopWaiting()
			r.respondWithError(&a)
			return
		}
	}
}

// endReason returns why the request needs no response of a replica any more, if it needs none.
func (l *lifetime) endReason() requestEnd {
	switch {
	case !l.isDone():
		return notEnded
	case l.isEndedByProxy():
		return endedByProxy
	}
	return disconnected
}

// fleetView returns the state of the backends that the request may go to or has gone to.
func (r *request) fleetView() fleetView {
	h := &r.history
	list := r.input.request.Backends
	fitting := list
	if r.input.request.ContextLengths.Differ() {
		fitting = r.proxy.router.FittingBackends(&r.input.request)
	}
	f := make(fleetView, 0, len(list)+len(h.attempts))
	add := func(b *backends.Backend, candidate bool) {
		f = append(f, backendView{backend: b, state: b.State(), candidate: candidate, decodes: h.kvTransfer.CanDecodeOn(b)})
	}
	now := time.Now()
	for _, b := range list {
		add(b, !b.LacksEndpoint(r.input.request.Endpoint, now) && !r.settings.isForPrefillOnly(b, &r.input.request) &&
			slices.Contains(fitting, b))
	}
	for i := range h.attempts {
		if b := h.attempts[i].backend; !slices.Contains(list, b) {
			add(b, false)
		}
	}
	return f
}

// recordFailure adds a failed attempt to the history.
func (r *request) recordFailure(f *fault.Failure) {
	if len(r.failures) < maxLoggedFailures {
		r.failures = append(r.failures, accesslog.Failure{Backend: f.Decision.Backend.Name, Reason: string(f.Reason)})
	}
	r.history.addFailure(f.Decision.Backend, f, time.Now())
	if r.history.isBetterFailure(f) {
		r.history.replaceBest(f, &r.proxy.buffers)
	} else {
		r.proxy.buffers.Release(f.Reserved)
		f.Body, f.Reserved = nil, 0
	}
}

// logFailureAndRecheck logs a failed attempt, and has its backend's health checked.
func (p *Proxy) logFailureAndRecheck(f *fault.Failure, e *api.Endpoint, requestID string) {
	level, more := slog.LevelDebug, []any(nil)
	switch {
	case f.Reason == metrics.RetryStale:
	case f.IsMissingEndpoint() && f.Decision.Backend.LacksEndpoint(e.Number, time.Now()):
		level = slog.LevelInfo // it is remembered, so there are few
	case f.IsUnsuited():
	case f.Reason == metrics.RetryDescriptors:
		p.outOfDescriptors(f.Err)
	default:
		p.recheckHealth(f.Decision.Backend)
		if due, left := p.failureLog.allowWarning(f.Decision.Backend, time.Now()); due {
			level = slog.LevelWarn
			if left > 0 {
				more = []any{"suppressed", left}
			}
		}
	}
	p.log.Log(context.Background(), level, "attempt failed", append([]any{
		"backend", f.Decision.Backend.Name, "reason", string(f.Reason), "err", f.Err, "request_id", requestID}, more...)...)
}

// awaitAndRecord waits until the condition of a holds, its deadline or the end of the request, and records the
// outcome in the history. It makes all waits of a request but those in the router's queue.
func (r *request) awaitAndRecord(a *action) {
	p, h := r.proxy, &r.history
	begun := time.Now()
	if a.wait == waitBudget && p.retries.TryAcquire(r.settings.Retry.Share, r.settings.Retry.PerSecond) {
		h.recordWaitAndReadmit(a, waitMet, nil)
		return
	}
	outcome := waitExpired
	switch {
	case a.isMet(r.fleetView(), begun, begun):
		outcome = waitMet
	case !a.deadline.After(begun):
	case !r.place.take(p.router, &r.input.request):
		h.ownQueueFull = true
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueFull, router.Waited{})
		outcome = waitRefused
	default:
		outcome = r.awaitEvents(a, begun)
	}
	if a.wait == waitBackoff {
		r.input.request.Arrival = time.Now()
	}
	r.recordWait(a.wait, outcome, time.Since(begun))
	h.recordWaitAndReadmit(a, outcome, r.fleetView())
}

// awaitEvents blocks until the condition of a holds, its deadline or the end of the request.
func (r *request) awaitEvents(a *action, begun time.Time) (outcome waitOutcome) {
	p := r.proxy
	var grant <-chan struct{}
	if a.wait == waitBudget {
		turn := p.retries.AddWait(r.settings.Retry.Share, r.settings.Retry.PerSecond)
		defer func() { p.retries.RemoveWait(turn, outcome == waitMet) }()
		grant = turn.Granted
	}
	probe := begun
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		stateChanged := p.registry.StateChanged() // before looking at the fleet
		now := time.Now()
		if a.isMet(r.fleetView(), begun, now) {
			return waitMet
		}
		if !now.Before(a.deadline) {
			return waitExpired
		}
		wake := a.deadline
		if at := begun.Add(a.backoff); a.wait == waitBackoff && at.Before(wake) {
			wake = at
		}
		if a.probeInterval > 0 {
			if !now.Before(probe) {
				probe = now.Add(a.probeInterval)
				for _, b := range a.backends {
					p.recheckHealth(b)
				}
			}
			if probe.Before(wake) {
				wake = probe
			}
		}
		timer.Reset(wake.Sub(now))
		select {
		case <-grant:
			if r.lifetime.isDone() {
				return waitExpired
			}
			return waitMet
		case <-stateChanged:
		case <-timer.C:
		case <-r.context.Done():
			return waitExpired
		}
	}
}

// recordWait counts a wait. One for the health checks is not time in the queue.
func (r *request) recordWait(kind waitKind, outcome waitOutcome, waited time.Duration) {
	queued, budget := metrics.QueueBusy, metrics.RetryWaitGivenUp
	switch {
	case outcome == waitMet:
		queued, budget = metrics.QueueSent, metrics.RetryWaitSent
	case r.lifetime.isDone():
		queued, budget = metrics.QueueDisconnected, metrics.RetryWaitDisconnected
	}
	switch {
	case kind == waitBackoff && outcome != waitRefused:
		r.history.recordQueueTime(r.proxy.metrics, r.spans, queued, router.Waited{Busy: waited})
	case kind == waitBudget:
		r.proxy.metrics.CountRetryWait(budget)
		r.history.waited.Busy += waited
		r.history.budgetWait += waited
		r.spans.AddQueueWaitSpan(waited, "retry_budget")
	}
}

// awaitPick asks the router for a backend, and blocks while the request is in the admission queue.
func (r *request) awaitPick() (*router.Reservation, error) {
	r.place.release(r.proxy.router, &r.input.request)
	asked := time.Now()
	ctx := context.Context(r.context)
	h := &r.history
	if h.last != stepNone {
		if left, isLimited := h.errorTimeLeft(r.fleetView(), asked); isLimited {
			limited, cancel := context.WithTimeout(ctx, left)
			defer cancel()
			ctx = limited
		}
	}
	if h.kvTransfer != nil {
		inTime, cancel := context.WithDeadline(ctx, h.kvTransfer.NotAfter)
		defer cancel()
		ctx = inTime
	}
	if r.mayUseOtherModel() {
		watched, stopWatching := r.watchOtherModels(ctx)
		defer stopWatching()
		ctx = watched
	}
	r.input.request.QueueTimeouts, r.input.request.Waited = h.queueTimeouts, h.waited
	d, err := r.proxy.router.Pick(ctx, &r.input.request, r.history.excludedBackends()...)
	if err == nil {
		r.input.request.Arrival = d.Arrival
		r.proxy.setAwaitedModel(&r.input.request, &r.outcome)
		if d.QueueTime > 0 {
			r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueSent,
				router.Waited{NoneReady: d.NoneReadyTime, Busy: d.QueueTime - d.NoneReadyTime})
		}
		return d, nil
	}
	waited := time.Since(asked)
	switch {
	case context.Cause(ctx) == errOtherModel:
		err = errOtherModel
		h.waited.NoneReady += waited
	case errors.Is(err, router.ErrQueueFull):
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueFull, router.Waited{})
	case errors.Is(err, router.ErrBusy):
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueBusy, router.Waited{Busy: waited})
	case errors.Is(err, router.ErrLate):
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueLate, router.Waited{Busy: waited})
	case errors.Is(err, context.DeadlineExceeded) && h.hasPickableBackend(r.fleetView()):
		err = router.ErrBusy
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueBusy, router.Waited{Busy: waited})
	case errors.Is(err, context.DeadlineExceeded):
		err = router.ErrNoneReady
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueNoneReady, router.Waited{NoneReady: waited})
	case errors.Is(err, context.Canceled):
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueDisconnected, router.Waited{Busy: waited})
	case h.mayWait() && waited >= h.queueTimeouts.Left(h.waited, true):
		r.history.recordQueueTime(r.proxy.metrics, r.spans, metrics.QueueNoneReady, router.Waited{NoneReady: waited})
	}
	return d, err
}

// setAwaitedModel sets the model and the backends of a request whose model no replica listed when it arrived.
func (p *Proxy) setAwaitedModel(req *router.Request, o *metrics.Request) {
	if len(req.Backends) > 0 || req.CatalogID == "" {
		return
	}
	if entry, ok := p.registry.Catalog().Find(req.CatalogID); ok {
		o.Model, req.Backends = entry.ID, entry.Backends
		req.ContextLengths = p.registry.Catalog().ContextLengths(entry.ID)
	}
}

// recordQueueTime counts a time in the queue, and how it ended.
func (h *history) recordQueueTime(m *metrics.Metrics, spans *tracing.Request, end metrics.QueueResult, waited router.Waited) {
	h.waited.Busy += waited.Busy
	h.waited.NoneReady += waited.NoneReady
	m.RecordQueueExit(end, waited.Total())
	spans.AddQueueWaitSpan(waited.Total(), string(end))
}

// waitingPlace is a request's place among those that the router counts in the queue while they wait elsewhere.
type waitingPlace struct{ taken bool }

// take takes a place for req, and reports whether there is one.
func (w *waitingPlace) take(r *router.Router, req *router.Request) bool {
	if !w.taken {
		w.taken = r.AddWaitingOutsideQueue(req) == nil
	}
	return w.taken
}

// release ends take. A second call does nothing.
func (w *waitingPlace) release(r *router.Router, req *router.Request) {
	if w.taken {
		w.taken = false
		r.RemoveWaitingOutsideQueue(req)
	}
}

// respondWithError ends a request without a response of its own: with an error of the proxy's or of a replica, or
// by recording a disconnect.
func (r *request) respondWithError(a *action) {
	best := r.history.best
	if a.poison {
		r.proxy.log.Warn("request was on two replicas that crashed; not retrying",
			"last", r.history.latestAttempt().backend.Name, "request_id", r.inFlight.ID)
	}
	switch a.response {
	case respondProxyEnd:
		r.sendError(r.recordProxyEnd())
	case respondDisconnected:
		r.recordDisconnectOrCancel(metrics.DisconnectInQueue)
	case respondReplicaError:
		r.relayFailure(best)
	case respondNoDescriptors:
		r.sendError(fault.Unavailable(fault.CodeOutOfDescriptors, "the proxy has no free file descriptor to connect to a replica; try again"))
	case respondNotPicked:
		r.sendError(r.notPickedError(a.err))
	default:
		r.sendError(fault.AttemptsError(best))
	}
}

// notPickedError returns the error for a request without a backend.
func (r *request) notPickedError(err error) *fault.Error {
	if r.input.stored.Backend != nil && errors.Is(err, router.ErrNoneReady) {
		return lostResponseError(&r.input.stored, r.endpoint, "the replica that holds it is not ready")
	}
	wait := 0
	if all := r.input.request.Backends; r.proxy.router.CountReady(all) == 0 {
		wait = r.proxy.unreadyRetryAfter(all)
	} else {
		wait = withJitter(int(r.proxy.router.RetryAfter(r.input.request.Priority) / time.Second))
	}
	e := fault.Unavailable(fault.CodeNoneReady, fmt.Sprintf("no replica that serves this model is ready; try again in %ds", wait))
	if h := &r.history; h.mayWait() && h.queueTimeouts.Left(h.waited, true) <= 0 {
		e.Message = fmt.Sprintf("no replica that serves this model was ready within %s; try again in %ds", h.queueLimit(true), wait)
	}
	switch {
	case errors.Is(err, router.ErrUnknownModel):
		return r.proxy.unknownModelError(r.named.nameOr(r.input.request.CatalogID), r.account)
	case errors.Is(err, router.ErrPanicked):
		return fault.New(http.StatusInternalServerError, fault.CodeInternalError,
			"the request could not be routed because of a bug of the proxy; report it with the stack in the proxy's log")
	case errors.Is(err, router.ErrEndpointMissing):
		return fault.New(http.StatusNotFound, fault.CodeEndpointNotServed,
			"no replica of the model serves "+r.endpoint.Path+"; use another endpoint, or enable it in vLLM")
	case errors.Is(err, router.ErrMaxInFlight):
		e = fault.Overloaded(fault.CodeReplicasFull, "every replica is at its limit of requests (backends[].max_in_flight)", wait)
	case errors.Is(err, router.ErrQueueFull):
		e = fault.Overloaded(fault.CodeQueueFull, "the admission queue is full for this priority class and has no more room for this "+
			r.tenant.Kind()+" (routing.queue)", wait)
	case errors.Is(err, router.ErrBusy):
		e = fault.Overloaded(fault.CodeBusy, "no replica could start this request within "+r.history.queueLimit(false), wait)
	case errors.Is(err, router.ErrLate):
		e = fault.Overloaded(fault.CodeTTFTUnreachable, fmt.Sprintf("no replica is predicted to send the first token within this request's "+
			"target of %v (%s, keys[].slo_ttft or slo.ttft)", r.input.request.FirstTokenDue.Sub(r.inFlight.Arrived), upstream.TTFTHeader), wait)
	}
	e.RetryAfter = wait
	return e
}

// queueKeepalive is the timer of the keep-alive events that a stream's client gets before a
// replica has responded. While it runs, only its goroutine writes to the client.
type queueKeepalive struct {
	mu      sync.Mutex // guards what follows, and the client's writer
	running bool
	timer   *time.Timer // nil: never started
}

// startQueueKeepalive sends a keep-alive event to the client of a stream whenever nothing was sent
// for Settings.QueueKeepalive, until queueKeepalive.stop. The first one sends the header: from then
// on a failure is an event of the stream. It commits to no backend.
func (r *request) startQueueKeepalive() {
	if r.settings.QueueKeepalive == 0 || !r.input.request.Streams || r.endpoint.Format == api.PlainFormat {
		return
	}
	k := &r.queueKeepalive
	k.mu.Lock()
	defer k.mu.Unlock()
	silentSince := r.bodyReceivedAt
	if r.client.WriteStartedAt.After(silentSince) { // an event may be being written
		silentSince = r.client.WriteStartedAt
	}
	wait := r.settings.QueueKeepalive - time.Since(silentSince)
	k.running = true
	if k.timer == nil {
		k.timer = time.AfterFunc(wait, r.sendAndScheduleKeepalive)
	} else {
		k.timer.Reset(wait)
	}
}

// stop ends startQueueKeepalive. It waits for the end of a write that has begun. It
// may be called when none runs.
func (k *queueKeepalive) stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.running {
		k.running = false
		k.timer.Stop()
	}
}

// sendAndScheduleKeepalive sends one keep-alive event, and schedules the next one unless the client
// cannot be written to.
func (r *request) sendAndScheduleKeepalive() {
	k := &r.queueKeepalive
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.running {
		return
	}
	if !r.headersSent {
		r.headersSent = true
		h := r.client.Header()
		h["Content-Type"] = []string{"text/event-stream; charset=utf-8"}
		if r.caller.mayShowRoute(r.proxy, r.settings) {
			h["X-Warmroute-Reason"] = []string{reasonQueued}
		}
		r.client.WriteHeader(http.StatusOK)
	}
	if err := r.client.WriteAndFlush([]byte(relay.KeepAliveEvent(r.endpoint.Format))); err == nil {
		k.timer.Reset(r.settings.QueueKeepalive)
	}
}

// sendKeepAlive sends a keep-alive event on a silent stream. The header names this attempt, the first
// with a response. Nothing is committed by it: a failure is still retried, and only if no
// retry succeeds the stream ends with an error event.
func (a *attempt) sendKeepAlive(resp *http.Response) error {
	a.ensureStreamHeader(resp)
	return a.req.client.WriteAndFlush([]byte(relay.KeepAliveEvent(a.req.endpoint.Format)))
}

// ensureStreamHeader sends the header of a stream, unless the client has one.
func (a *attempt) ensureStreamHeader(resp *http.Response) {
	if a.req.headersSent {
		return
	}
	a.req.headersSent = true
	a.req.fillResponseHeader(a.decision, resp.Header)
	a.req.client.WriteHeader(resp.StatusCode)
}
