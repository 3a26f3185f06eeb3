package router

import (
	"context"
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/decide"
	"warmroute/router/ledger"
	"warmroute/router/queue"
)

// Submit asks for a backend, now or when one can start the request; those that were tried are excluded. deliver
// is called exactly once, unless Cancel is in time: before Submit returns, or by a later call that made room.
// It may call the Router, but must not block. Submit returns nil when the request was not queued. What req and
// tried point to does not change until deliver is called, and until the Reservation's Release.
func (r *Router) Submit(req *Request, deliver func(*Reservation, error), tried ...*backends.Backend) *QueuedRequest {
	t, d, err := r.routeOrEnqueue(req, deliver, tried)
	if t == nil {
		deliver(d, err)
	}
	return t
}

// Pick is Submit for callers that wait. When ctx ends first, the request is removed
// from the queue and ctx's error is returned.
func (r *Router) Pick(ctx context.Context, req *Request, tried ...*backends.Backend) (*Reservation, error) {
	t, d, err := r.routeOrEnqueue(req, nil, tried)
	if t == nil {
		return d, err
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		if t.Cancel() {
			return nil, ctx.Err()
		}
		<-t.done // it was decided at the same moment
	}
	return t.reservation, t.err
}

// routeOrEnqueue decides or queues a request. It returns that of one that was queued. A full queue is an error.
func (r *Router) routeOrEnqueue(req *Request, deliver func(*Reservation, error), tried []*backends.Backend) (queued *QueuedRequest,
	d *Reservation, err error) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	d, err = r.route(req, tried, now)
	if err != errQueue {
		return nil, d, err
	}
	t := &QueuedRequest{router: r, req: *req, tried: slices.Clone(tried), deliver: deliver, waitsFor: noSlot}
	if deliver == nil {
		t.done = make(chan struct{})
	}
	updateBackends(r.catalog(), &t.req)
	if !r.admission.enqueue(&r.fleet, r.fleet.viewAll(&r.fleet.scratch, &r.callbacks, now), t) {
		return nil, nil, ErrQueueFull
	}
	r.dispatch(now)
	return t, nil, nil
}

// Cancel removes a request from the queue, and reports whether it was in time: if
// not, deliver was or will be called.
func (t *QueuedRequest) Cancel() (removed bool) {
	if t == nil {
		return false
	}
	r := t.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	a := &r.admission
	if !a.queue.Contains(&t.item) {
		return false
	}
	now := r.now()
	a.queue.Remove(&t.item, now)
	a.queue.RefundTenant(&t.item)
	r.dispatch(now) // what it had claimed is free
	return true
}

// FittingBackends returns the backends of a request but those whose context is too short for it, which others accept.
func (r *Router) FittingBackends(req *Request) []*backends.Backend {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.fleet.viewOf(&r.fleet.scratch, req.Backends, &r.callbacks, r.now()).FittingBackends(req)
}

// AddWaitingOutsideQueue counts a request that waits for something else than its turn in the queue. It returns
// ErrQueueFull if it may not wait; else RemoveWaitingOutsideQueue must follow, with the same request.
func (r *Router) AddWaitingOutsideQueue(req *Request) error {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if r.fleet.settings.Queue.Requests > 0 && r.admission.queue.IsFull(req.Class(), req.Tenant, req.BodyBytes) {
		return ErrQueueFull
	}
	r.admission.queue.AddWaitingOutsideQueue(req.Class(), req.Tenant, req.BodyBytes)
	return nil
}

// RemoveWaitingOutsideQueue undoes AddWaitingOutsideQueue.
func (r *Router) RemoveWaitingOutsideQueue(req *Request) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.admission.queue.RemoveWaitingOutsideQueue(req.Class(), req.Tenant, req.BodyBytes)
}

// CountWaiting returns how many requests wait, in the queue or outside it.
func (r *Router) CountWaiting() int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.admission.queue.CountWaiting()
}

// CountWaitingByClass returns how many requests wait, in the queue or outside it, by the
// name of their priority class.
func (r *Router) CountWaitingByClass() map[string]int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.admission.queue.CountWaitingByClass()
}

// RetryAfter returns the Retry-After of a refused request of a priority in whole seconds, at least one: the
// time in which as many requests left the queue as it has of that priority class and the classes before it or,
// if that is unknown, the expected time of the work ahead.
func (r *Router) RetryAfter(priority int) time.Duration {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	wait, silence, tokens := r.admission.queue.EstimateWait(queue.ClassOf(priority), now)
	if wait == 0 {
		wait = max(estimateFleetPrefillTime(r.fleet.viewAll(&r.fleet.scratch, &r.callbacks, now), tokens), silence)
	}
	return min(max(wait.Truncate(time.Second), time.Second), queue.MaxRetryDelay)
}

// estimateFleetPrefillTime estimates how long the available backends together take for the
// prefill of newTokens and of what is queued there.
func estimateFleetPrefillTime(v *decide.Fleet, newTokens float64) time.Duration {
	tokens, rate := newTokens, 0.0
	for i := range v.Backends {
		if b := &v.Backends[i]; b.Backend != nil && b.IsAvailable() {
			tokens += b.QueuedTokens
			rate += ledger.WorkRate * b.PrefillRate
		}
	}
	if rate == 0 {
		return noneReadyRetryDelay
	}
	return time.Duration(math.Ceil(min(tokens/rate, queue.MaxRetryDelay.Seconds()))) * time.Second
}

// StartRefusingUnready makes the queue refuse, now and from now on, requests for which no backend is ready,
// with ErrNoneReady: the proxy is about to stop. Those that wait for room still wait.
func (r *Router) StartRefusingUnready() {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.admission.draining = true
	r.dispatch(r.now())
}

// Tick handles what time alone changes: work that was done, external load that fades, queue timeouts. Callers
// that do not use Run call it every TickInterval or so while CountWaiting is not 0.
func (r *Router) Tick() {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if now := r.now(); !r.admission.isPaused(now) {
		r.dispatch(now)
	}
}

// Run ticks while requests are queued. It blocks until ctx is done, and may be called again after that
// or a panic.
func (r *Router) Run(ctx context.Context) {
	ticker := time.NewTicker(TickInterval)
	defer ticker.Stop()
	paused := time.NewTimer(0)
	defer paused.Stop()
	for {
		ticks := ticker.C
		r.withLock(func() {
			if r.admission.queue.Len() == 0 {
				ticks = nil
			}
		})
		select {
		case <-ctx.Done():
			return
		case <-r.admission.started:
		case wait := <-r.admission.pauses:
			paused.Reset(wait)
		case <-paused.C:
			r.Tick()
		case <-ticks:
			r.Tick()
		}
	}
}
