package router

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/queue"
)

var (
	// ErrQueueFull means that the admission queue is full.
	ErrQueueFull = errors.New("admission queue is full")
	// ErrQueueTimeout means that a request reached its maximum time in the queue.
	ErrQueueTimeout = errors.New("queue timeout")
	// ErrPanicked means that the decision about a queued request panicked.
	ErrPanicked = errors.New("panic while the queued request was routed")
)

// outageRetryDelay is the Retry-After while no backend is available: a replica
// takes longer to start, but one of several may be back.
const outageRetryDelay = 5 * time.Second

// Ticket is a request in the admission queue.
type Ticket struct {
	router  *Router
	item    queue.Item[*Ticket]
	req     Request
	tried   []*backends.Backend
	deliver func(*Decision, error) // nil: done is closed
	done    chan struct{}

	// Guarded by router.mu.
	waitsFor     int    // slot of the backend that was the best when it was scored last; or nowhere
	matched      []int  // leading blocks that each backend holds, by slot
	indexVersion uint64 // that matched was read from

	decision *Decision // with err: the result, set before deliver is called or done closed
	err      error
	next     *Ticket // in callbacks
}

// nowhere is what a request waits for that was not scored yet.
const nowhere = -1

// Submit asks for a backend, now or when one can start the request; those that were
// tried are excluded. deliver is called exactly once, unless Cancel is in time:
// before Submit returns, or by a later call that made room. It may call the Router, but
// must not block. Submit returns nil when the request was not queued. What req and
// tried point to does not change until deliver is called, and until the Decision's
// Release.
func (r *Router) Submit(req *Request, deliver func(*Decision, error), tried ...*backends.Backend) *Ticket {
	t, d, err := r.routeOrEnqueue(req, deliver, tried)
	if t == nil {
		deliver(d, err)
	}
	return t
}

// Pick is Submit for callers that wait. When ctx ends first, the request is removed
// from the queue and ctx's error is returned.
func (r *Router) Pick(ctx context.Context, req *Request, tried ...*backends.Backend) (*Decision, error) {
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
	return t.decision, t.err
}

// routeOrEnqueue decides or queues a request. It returns the ticket of one that was queued.
func (r *Router) routeOrEnqueue(req *Request, deliver func(*Decision, error), tried []*backends.Backend) (queued *Ticket, d *Decision, err error) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	d, err = r.route(req, tried, now)
	if err != errQueue {
		return nil, d, err
	}
	queued, err = r.enqueueAndDispatch(req, tried, deliver, now)
	return queued, nil, err
}

// Cancel removes a request from the queue, and reports whether it was in time: if
// not, deliver was or will be called.
func (t *Ticket) Cancel() (removed bool) {
	if t == nil {
		return false
	}
	r := t.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.queue.Contains(&t.item) {
		return false
	}
	now := r.now()
	r.queue.Remove(&t.item, now)
	r.queue.RefundTenant(&t.item)
	r.dispatchQueued(now) // what it had claimed is free
	return true
}

// finishTicket removes a request from the queue, and delivers its result once the lock is
// released.
func (r *Router) finishTicket(t *Ticket, d *Decision, err error, now time.Time) {
	r.queue.Remove(&t.item, now)
	t.decision, t.err = d, err
	r.callbacks.addTicket(t)
}

func (t *Ticket) deliverResult() {
	if t.deliver == nil {
		close(t.done)
		return
	}
	t.deliver(t.decision, t.err)
}

// mustQueueBehindOthers reports whether a request has to queue because others wait for a
// backend that could take it.
func (r *Router) mustQueueBehindOthers(req *Request) bool {
	return r.isQueueEnabled() && !req.NoEngine && r.queue.WaitingAhead(req.class(), req.Backends).Count > 0 && !r.isTooLongForAll(req)
}

// isQueueable reports whether a request is queued when no backend takes it now: an engine
// works on it, some backend serves its model, and there is a queue.
func (r *Router) isQueueable(req *Request) bool {
	return !req.NoEngine && r.settings.Queue.Requests > 0 && len(req.Backends) > 0
}

// enqueueAndDispatch adds a request to the queue, and sends those that can start. A full
// queue is an error.
func (r *Router) enqueueAndDispatch(req *Request, tried []*backends.Backend, deliver func(*Decision, error), now time.Time) (queued *Ticket, err error) {
	if r.queue.IsFull(req.class(), req.BodyBytes) || r.isUnreadyShareFull(req) {
		return nil, ErrQueueFull
	}
	t := &Ticket{router: r, req: *req, tried: slices.Clone(tried), deliver: deliver, waitsFor: nowhere}
	if deliver == nil {
		t.done = make(chan struct{})
	}
	t.req.Backends = r.currentBackends(req)
	t.item = queue.Item[*Ticket]{
		Value: t, Backends: t.req.Backends, Class: req.class(), Priority: req.Priority, Tenant: req.Tenant, Bytes: req.BodyBytes,
		Lead: r.conversationLead(req, now), Timeouts: req.QueueTimeouts, Waited: req.Waited,
	}
	r.beginQueuedDecision(t, now)
	tokens, rate, alone := r.leastPrefill()
	t.item.Tokens, t.item.Ahead = tokens, r.timeAhead(req, rate, now)
	r.queue.Add(&t.item, alone, rate, isRetry(req, tried), now)
	if r.queue.Len() == 1 {
		select {
		case r.queueStarted <- struct{}{}:
		default: // Run has not read the last one yet
		}
	}
	r.dispatchQueued(now)
	return t, nil
}

// timeAhead returns about how long the backends that could take a request work on what they have
// and on what is queued before it, at their prefill rates, whose sum is rate.
func (r *Router) timeAhead(req *Request, rate float64, now time.Time) time.Duration {
	tokens := r.queue.WaitingAhead(req.class(), req.Backends).Tokens
	for _, b := range req.Backends {
		if r.isAvailable(b) {
			tokens += r.states[b.Slot].load.queuedTokens(now, r.estimates.PrefillRate(b.Slot))
		}
	}
	return time.Duration(min(tokens/rate, maxTimeAhead.Seconds()) * float64(time.Second))
}

// isUnreadyShareFull reports whether a request has no ready backend, and requests
// without one fill half of their class's bounds. Where no backend is ready there is
// nothing to keep the other half for.
func (r *Router) isUnreadyShareFull(req *Request) bool {
	hasReady := slices.ContainsFunc(r.states, func(s backendState) bool { return s.backend != nil && r.isAvailable(s.backend) })
	return !slices.ContainsFunc(req.Backends, r.isAvailable) && hasReady &&
		r.queue.UnreadyExceedHalf(req.class(), req.BodyBytes, r.isAvailable)
}

// AddWaitingOutsideQueue counts a request that waits for something else than its turn in
// the queue. It returns ErrQueueFull if it may not wait; else RemoveWaitingOutsideQueue
// must follow, with the same request.
func (r *Router) AddWaitingOutsideQueue(req *Request) error {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if r.settings.Queue.Requests > 0 && r.queue.IsFull(req.class(), req.BodyBytes) {
		return ErrQueueFull
	}
	r.queue.AddWaitingElsewhere(req.class(), req.BodyBytes)
	return nil
}

// RemoveWaitingOutsideQueue undoes AddWaitingOutsideQueue.
func (r *Router) RemoveWaitingOutsideQueue(req *Request) {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.queue.RemoveWaitingElsewhere(req.class(), req.BodyBytes)
}

// CountWaiting returns how many requests wait, in the queue or elsewhere.
func (r *Router) CountWaiting() int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.queue.CountWaiting()
}

// CountWaitingByClass returns how many requests wait, in the queue or elsewhere, by the
// name of their priority class.
func (r *Router) CountWaitingByClass() map[string]int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.queue.CountWaitingByClass()
}

// RetryAfter returns the Retry-After of a refused request of a priority in whole
// seconds, at least one: the time in which as many requests left the queue as it has
// of that priority class and the classes before it or, if that is unknown, the
// expected time of the work ahead.
func (r *Router) RetryAfter(priority int) time.Duration {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	wait, silence, tokens := r.queue.EstimateWait(queue.ClassOf(priority), now)
	if wait == 0 {
		wait = max(r.fleetPrefillTime(tokens, now), silence)
	}
	return min(max(wait.Truncate(time.Second), time.Second), queue.MaxRetryDelay)
}

// fleetPrefillTime estimates how long the available backends together take for the
// prefill of newTokens and of what is queued there.
func (r *Router) fleetPrefillTime(newTokens float64, now time.Time) time.Duration {
	tokens, rate := newTokens, 0.0
	for slot := range r.states {
		s := &r.states[slot]
		if s.backend != nil && r.isAvailable(s.backend) {
			tokens += s.load.queuedTokens(now, r.estimates.PrefillRate(slot))
			rate += workRate * r.estimates.PrefillRate(slot)
		}
	}
	if rate == 0 {
		return outageRetryDelay
	}
	return time.Duration(math.Ceil(min(tokens/rate, queue.MaxRetryDelay.Seconds()))) * time.Second
}

// StartRefusingUnready makes the queue refuse, now and from now on, requests for which
// no backend is ready, with ErrNoneReady: the proxy is about to stop. Those that wait
// for room still wait.
func (r *Router) StartRefusingUnready() {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.draining = true
	r.dispatchQueued(r.now())
}

// TickInterval is how often time is looked at while requests are queued. Most are
// sent by events, not by this.
const TickInterval = 20 * time.Millisecond

// Tick handles what time alone changes: work that was done, external load that
// fades, queue timeouts. Callers that do not use Run call it every
// TickInterval or so while CountWaiting is not 0.
func (r *Router) Tick() {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	r.dispatchUnlessPaused(r.now())
}

// Run ticks while requests are queued. It blocks until ctx is done, and may be called again after that
// or a panic.
func (r *Router) Run(ctx context.Context) {
	for {
		r.tickWhileQueued(ctx)
		select {
		case <-ctx.Done():
			return
		case <-r.queueStarted:
		}
	}
}

func (r *Router) tickWhileQueued(ctx context.Context) {
	ticker := time.NewTicker(TickInterval)
	defer ticker.Stop()
	held := time.NewTimer(0)
	defer held.Stop()
	for r.queueLen() > 0 {
		select {
		case <-ctx.Done():
			return
		case wait := <-r.peers.pauses:
			held.Reset(wait)
		case <-held.C:
			r.Tick()
		case <-ticker.C:
			r.Tick()
		}
	}
}

func (r *Router) queueLen() int {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	return r.queue.Len()
}
