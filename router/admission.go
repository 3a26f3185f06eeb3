package router

import (
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/queue"
)

const (
	// noneReadyRetryDelay is the Retry-After while no backend is available: a replica
	// takes longer to start, but one of several may be back.
	noneReadyRetryDelay = 5 * time.Second
	maxTimeAhead        = 24 * time.Hour // the longest that a request may be queued

	// TickInterval is how often time is looked at while requests are queued. Most are
	// sent by events, not by this.
	TickInterval = 20 * time.Millisecond
)

// QueuedRequest is a request in the admission queue.
type QueuedRequest struct {
	router  *Router
	item    queue.Item[*QueuedRequest]
	req     Request
	tried   []*backends.Backend
	deliver func(*Reservation, error) // nil: done is closed
	done    chan struct{}

	// Guarded by router.mu.
	waitsFor     int       // slot of the backend that was the best when it was scored last; or noSlot
	scoredAt     time.Time // when that was
	matched      []int     // leading blocks that each backend holds, by slot
	indexVersion uint64    // that matched was read from

	reservation *Reservation // with err: the result, set before deliver is called or done closed
	err         error
	next        *QueuedRequest // in callbacks
}

// noSlot is what a request waits for that was not scored yet.
const noSlot = -1

// admission is the admission queue with what its rounds remember.
type admission struct {
	queue       *queue.Queue[*QueuedRequest]
	started     chan struct{}     // to Run: the queue is not empty any more
	lastCatalog *backends.Catalog // that queued requests follow
	draining    bool
	reorderedAt time.Time // when the queue was reordered last
	deciding    *QueuedRequest

	// Queued requests wait until pausedUntil before they take what a peer has left: the queues of other
	// peers come first.
	pausedUntil time.Time
	pauses      chan time.Duration // tells Run how long the pause is
}

// enqueue adds a request to the queue. It reports false if the queue is full for its tenant.
func (a *admission) enqueue(f *fleet, v *decide.Fleet, t *QueuedRequest) (added bool) {
	req := &t.req
	fitting := v.FittingBackends(req) // what waits for a longer context is not in the way of others
	if a.queue.IsFull(req.Class(), req.Tenant, req.BodyBytes) || a.isUnreadyShareFull(v, req, fitting) {
		return false
	}
	t.item = queue.Item[*QueuedRequest]{
		Value: t, Backends: fitting, Class: req.Class(), Priority: req.Priority, Tenant: req.Tenant, Bytes: req.BodyBytes,
		Timeouts: req.QueueTimeouts, Waited: req.Waited, Arrival: req.Arrival,
	}
	if f.isQueueEnabled() && req.Turn == prompt.TurnLater {
		t.item.Conversation, t.item.Blocks = req.ConversationID(), req.Blocks
	}
	p, late := a.leastPrefill(f, v, t)
	if !late {
		t.item.FirstTokenDue = req.FirstTokenDue
	}
	t.item.Tokens, t.item.Ahead = p.Tokens, a.timeAhead(v, req, p.Rate)
	a.queue.Add(&t.item, p.Seconds, a.fairShareRate(v, p.Rate), isRetry(req, t.tried), v.Now)
	if a.queue.Len() == 1 {
		select {
		case a.started <- struct{}{}:
		default: // Run has not read the last one yet
		}
	}
	return true
}

// fairShareRate returns the tokens per second that are shared among the tenants: the prefill rate, or the rate at which tokens
// leave the queue if that is lower, because outputs, the KV cache or max_in_flight are the limit.
func (a *admission) fairShareRate(v *decide.Fleet, prefillRate float64) float64 {
	if sent := a.queue.TokensPerSecond(v.Now); v.Shared && sent > 0 {
		return min(prefillRate, sent)
	}
	return prefillRate
}

// removeWithResult removes a request from the queue, and notes in due that its result is to be delivered.
func (a *admission) removeWithResult(t *QueuedRequest, d *Reservation, err error, now time.Time, due *callbacks) {
	if d != nil {
		a.queue.RecordSent(&t.item, now)
	}
	a.queue.Remove(&t.item, now)
	t.reservation, t.err = d, err
	due.addQueued(t)
}

func (t *QueuedRequest) deliverResult() {
	if t.deliver == nil {
		close(t.done)
		return
	}
	t.deliver(t.reservation, t.err)
}

// mustQueueBehindOthers reports whether a request has to queue because others wait for a
// backend that could take it.
func (a *admission) mustQueueBehindOthers(v *decide.Fleet, req *Request) bool {
	return v.QueueEnabled && !req.NoEngine && a.queue.WaitingAhead(req.Class(), req.Backends).Count > 0 && !v.IsTooLongForAll(req)
}

// isQueueable reports whether a request is queued when no backend takes it now: an engine
// works on it, some backend serves its model or none has listed any yet, and there is a queue.
func (a *admission) isQueueable(f *fleet, req *Request) bool {
	return !req.NoEngine && f.settings.Queue.Requests > 0 && (len(req.Backends) > 0 || req.CatalogID != "")
}

// timeAhead returns about how long the backends that could take a request work on what they have
// and on what is queued before it, at their prefill rates, whose sum is rate.
func (a *admission) timeAhead(v *decide.Fleet, req *Request, rate float64) time.Duration {
	tokens := a.queue.WaitingAhead(req.Class(), req.Backends).Tokens
	for _, b := range req.Backends {
		if s := v.Find(b); s != nil && s.IsAvailable() {
			tokens += s.QueuedTokens
		}
	}
	return time.Duration(min(tokens/rate, maxTimeAhead.Seconds()) * float64(time.Second))
}

// isUnreadyShareFull reports whether no backend that a request fits is ready, and requests without one fill half of
// their class's bounds for its tenant. Where no backend is ready there is nothing to keep the other half for.
func (a *admission) isUnreadyShareFull(v *decide.Fleet, req *Request, fitting []*backends.Backend) bool {
	return !slices.ContainsFunc(fitting, v.IsAvailable) && v.HasAvailable() &&
		a.queue.UnreadyExceedHalf(req.Class(), req.Tenant, req.BodyBytes, v.IsAvailable)
}

// leastPrefill returns the prefill of a queued request on its candidates, and whether all of these are predicted to be late for it.
func (a *admission) leastPrefill(f *fleet, v *decide.Fleet, t *QueuedRequest) (p decide.Prefill, late bool) {
	a.deciding = t
	q := f.matchQueued(t)
	f.filter(&f.scratch, v, q, f.ledger) // without candidates, the whole prompt counts
	return v.LeastPrefill(q, &f.scratch.candidates), v.IsLate(q, &f.scratch.candidates)
}

// matchQueued is match for a queued request, which is matched again only if the index has changed.
func (f *fleet) matchQueued(t *QueuedRequest) *decide.Query {
	if version := f.index.Version(); t.indexVersion != version {
		if len(t.matched) != len(f.states) {
			t.matched = make([]int, len(f.states))
		}
		f.index.Match(t.req.Blocks, t.matched)
		t.indexVersion = version
	}
	q := f.query(&f.scratch, &t.req, t.tried, t.matched)
	q.Promoted = t.item.Promoted
	return q
}

// isRefusedLate reports whether a request is refused because it is late.
func isRefusedLate(v *decide.Fleet, q *decide.Query, c *decide.Candidates) bool {
	return refusesLate(q.Request, q.Tried) && v.IsLate(q, c)
}

// refusesLate reports whether a request is refused once it is late. A retry is not.
func refusesLate(req *Request, tried []*backends.Backend) bool {
	return req.RefuseLate && !isRetry(req, tried)
}

// isRetry reports whether a request was routed before, also if each backend may be tried again.
func isRetry(req *Request, tried []*backends.Backend) bool {
	return len(tried) > 0 || req.Waited != Waited{} || !req.Arrival.IsZero()
}
