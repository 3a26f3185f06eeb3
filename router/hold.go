package router

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"warmroute/backends"
)

// QueueSettings bound the admission queue: requests that no backend can start soon
// wait here, and not in an engine's queue. A zero Requests turns it off.
type QueueSettings struct {
	Requests      int           // held at once of each priority class but batch requests
	Bytes         int64         // of the bodies of each of these classes; 0: no bound
	BatchRequests int           // batch requests (Request.Priority above 0) held at once
	BatchBytes    int64         // of their bodies; 0: no bound
	Timeout       time.Duration // that one may be held, as of its arrival, unless Request.QueueTime says otherwise; 0: no bound
	StepTokens    int           // the replicas' scheduler budget, up to which a backend is sent requests; 0: as it is learned
	BatchSlowdown float64       // share by which batch requests may slow down the others; 0: no bound
}

// bounds are how many requests of a class may be queued, and the bytes of their bodies.
func (o *QueueSettings) bounds(c class) (requests int, bytes int64) {
	if c == classBatch {
		return o.BatchRequests, o.BatchBytes
	}
	return o.Requests, o.Bytes
}

var (
	// ErrQueueFull says that the admission queue takes no more.
	ErrQueueFull = errors.New("the admission queue is full")
	// ErrQueueTimeout says that a request was held as long as it may be.
	ErrQueueTimeout = errors.New("timed out in the admission queue")
)

// Ticket is a request that waits in the admission queue.
type Ticket struct {
	router  *Router
	req     Request
	tried   []*backends.Backend
	deliver func(*Decision, error)
	arrived time.Time
	until   time.Time // when it was held too long; zero: never
	due     time.Time // when time alone changes its standing: it is promoted, or until; zero: never
	tokens  float64   // that it would have to compute at least, as of its arrival
	used    float64   // seconds of its tenant's share

	// Where it is in the queue; see holdQueue. Guarded by router.deciding, as all below.
	group        *heldGroup
	key          float64
	number       uint64
	place        int
	duePlace     int // in the queue's due
	older, newer *Ticket
	gone         bool // delivered or cancelled

	waitsFor int // slot of the backend that was the cheapest when it was scored last

	depth   []int  // matched blocks, by slot
	version uint64 // of the index that depth was read from
}

// Submit asks for a backend, now or when one can start the request; those that
// were tried are left out. deliver is called exactly once, unless Cancel comes
// before: within Submit, which then returns nil, or within a later call that
// made room. It is called under the router's lock, and so must neither block nor
// call the router. What req and tried point to stays unchanged until then, and
// until the Decision's Release.
func (r *Router) Submit(req *Request, deliver func(*Decision, error), tried ...*backends.Backend) *Ticket {
	r.deciding.Lock()
	defer r.unlock()
	now := r.now()
	if d, err := r.tryNow(req, tried, now); err != errHold {
		deliver(d, err)
		return nil
	}
	return r.hold(req, tried, deliver, now)
}

// Cancel takes a request out of the queue, and reports whether it was in time:
// if not, deliver was called.
func (h *Ticket) Cancel() bool {
	if h == nil {
		return false
	}
	r := h.router
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if h.gone {
		return false
	}
	r.take(h)
	r.fair.refund(h.req.Tenant, h.used)
	r.dispatch(r.now()) // what it had reserved is free
	return true
}

// Pick is Submit for callers that wait. A ctx that ends first takes the request
// out of the queue, and its error is returned.
func (r *Router) Pick(ctx context.Context, req *Request, tried ...*backends.Backend) (*Decision, error) {
	r.deciding.Lock()
	now := r.now()
	d, err := r.tryNow(req, tried, now)
	if err != errHold {
		r.unlock()
		return d, err
	}
	type answer struct {
		d   *Decision
		err error
	}
	answers := make(chan answer, 1)
	h := r.hold(req, tried, func(d *Decision, err error) { answers <- answer{d, err} }, now)
	r.unlock()
	select {
	case a := <-answers:
		return a.d, a.err
	case <-ctx.Done():
		if h.Cancel() {
			return nil, ctx.Err()
		}
		a := <-answers // it came in the same moment
		return a.d, a.err
	}
}

// errHold is how tryNow says that a request has to wait.
var errHold = errors.New("to be held")

// tryNow answers a request that need not wait, or may not.
func (r *Router) tryNow(req *Request, tried []*backends.Backend, now time.Time) (*Decision, error) {
	if len(tried) > 0 {
		req.Backends = r.serving(req)
		if !r.mayYet(req, tried) {
			return nil, ErrNoneReady // however many others wait
		}
	}
	if r.queues(req) {
		return nil, errHold // its turn is decided among those held
	}
	r.depth = r.matched
	r.index.Match(req.Blocks, r.depth)
	chosen, err := r.score(req, tried, now)
	if err == ErrNoneReady && r.moved(req) {
		chosen, err = r.score(req, tried, now)
	}
	switch {
	case err == nil && req.NoEngine:
		return r.reserve(req, tried, chosen, now), nil
	case err != nil && r.mayWait(req):
		return nil, errHold
	case err != nil:
		return nil, err
	}
	if r.late && !r.startsSoon(req, chosen, now) {
		return nil, errHold
	}
	if len(tried) == 0 && !r.tooLong(req, r.candidates[chosen].Slot) { // a retry was charged the first time
		r.fair.charge(req.Tenant, r.leastUncached(req), r.rates(), r.seconds(now))
	}
	return r.reserve(req, tried, chosen, now), nil
}

// queues reports whether a request joins others that wait for a backend that could take it.
func (r *Router) queues(req *Request) bool {
	return r.late && !req.NoEngine && r.queue.sharesBackend(req) && !r.tooLongForAll(req)
}

// queueTime is how long a request may wait; 0: as long as it takes.
func (r *Router) queueTime(req *Request) time.Duration {
	return cmp.Or(req.QueueTimeout, r.holding.Timeout)
}

// mayWait reports whether a request that no backend may take is held.
func (r *Router) mayWait(req *Request) bool {
	return !req.NoEngine && r.holding.Requests > 0 && len(req.Backends) > 0
}

// moved brings a request's backends up to date, and reports whether they changed.
func (r *Router) moved(req *Request) bool {
	before := req.Backends
	req.Backends = r.serving(req)
	return !slices.Equal(before, req.Backends)
}

// mayYet reports whether a backend that was not tried may come up for req: all
// that were tried have failed it, and waiting would not help.
func (r *Router) mayYet(req *Request, tried []*backends.Backend) bool {
	return slices.ContainsFunc(req.Backends, func(b *backends.Backend) bool { return r.has(b) && !b.Retiring() && !slices.Contains(tried, b) })
}

// hold puts a request into the queue, or answers it when that is full. It
// returns nil when deliver was called.
func (r *Router) hold(req *Request, tried []*backends.Backend, deliver func(*Decision, error), now time.Time) *Ticket {
	q := &r.queue
	if r.holdsAll(req) || r.unreadyHaveTheirShare(req) {
		deliver(nil, ErrQueueFull)
		return nil
	}
	h := &Ticket{
		router: r, req: *req, tried: slices.Clone(tried), deliver: deliver,
		arrived: now, waitsFor: nowhere,
	}
	h.req.Backends = r.serving(req)
	if limit := r.queueTime(req); limit > 0 {
		h.until = now.Add(limit)
		h.due = h.until
		if req.class() == classBatch {
			h.due = now.Add(limit / 2)
		}
	}
	r.place(h, now)
	r.fair.enter(h.req.Tenant)
	q.push(h)
	if q.count == 1 {
		r.departures.restart(now)
		select {
		case r.began <- struct{}{}:
		default: // Run has not read the last one yet
		}
	}
	r.dispatch(now)
	if h.gone {
		return nil
	}
	return h
}

const (
	ageing = 0.2 // seconds of prefill that a second of waiting weighs against
	// overtaken is the share of the time for which a request may be held in which
	// it may be overtaken: the longest prompts would else be held too long, always.
	overtaken = 0.75
)

// place gives a request its key in the queue: short work first, but what needs a
// second of prefill is overtaken by nothing that comes 1/ageing seconds later.
// Since what was waited grows alike for all, the key stays as it is. Of a tenant
// that has asked for more than its share, requests count as if they had come
// later.
func (r *Router) place(h *Ticket, now time.Time) {
	r.match(h)
	h.tokens = r.tokens(&h.req)
	rates := r.fleetRate
	if r.gather(&h.req, h.tried, now) == nil {
		h.tokens, rates = r.leastUncached(&h.req), r.rates()
	}
	alone := h.tokens * float64(max(1, len(r.candidates))) / rates // seconds, on one of them
	if limit := r.queueTime(&h.req).Seconds(); limit > 0 {
		alone = min(alone, ageing*overtaken*limit)
	}
	arrived := r.seconds(now)
	if len(h.tried) == 0 { // else its turn had come the first time
		arrived, h.used = r.fair.charge(h.req.Tenant, h.tokens, rates, arrived)
	}
	h.key = alone + ageing*arrived
}

// match reads what the backends hold of a held request, if that can have
// changed, and makes it what is scored next.
func (r *Router) match(h *Ticket) {
	if v := r.index.Version(); h.version != v {
		if len(h.depth) != len(r.fleet) {
			h.depth = make([]int, len(r.fleet))
		}
		r.index.Match(h.req.Blocks, h.depth)
		h.version = v
	}
	r.depth = h.depth
}

// take removes a request from the queue.
func (r *Router) take(h *Ticket) {
	h.gone = true
	r.queue.remove(h)
	r.departures.add(r.now())
	r.fair.leave(h.req.Tenant)
}

// leastUncached is what the candidates would have to compute of req at least.
func (r *Router) leastUncached(req *Request) float64 {
	least := r.tokens(req)
	for i := range r.candidates {
		least = min(least, r.candidates[i].UncachedTokens)
	}
	return least
}

// rates is what the candidates prefill together, in tokens a second.
func (r *Router) rates() float64 {
	sum := 0.0
	for i := range r.candidates {
		sum += r.candidates[i].PrefillRate
	}
	return sum
}

func (r *Router) seconds(now time.Time) float64 { return now.Sub(r.made).Seconds() }

const (
	longestRetry = time.Minute
	retryWhenOut = 5 * time.Second // a replica takes longer to start, but one of several may be back
)

// RetryAfter returns when a request of a priority that was refused may come again,
// in whole seconds, at least one: the time that the queue took to lose as many
// requests as it has of that priority class and those before it, or, where that is
// not known, that the work ahead should take.
func (r *Router) RetryAfter(priority int) time.Duration {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	now := r.now()
	queued, wait, silence := ahead(&r.queue.classes, classOf(priority)), time.Duration(0), time.Duration(0)
	if queued.count > 0 {
		wait, silence = r.departures.timeFor(queued.count, now)
	}
	if wait == 0 {
		wait = max(r.workAhead(queued.tokens, now), silence)
	}
	return min(max(wait.Truncate(time.Second), time.Second), longestRetry)
}

// workAhead estimates how long the available backends take for the prefill of so
// many queued tokens and of what waits there.
func (r *Router) workAhead(tokens float64, now time.Time) time.Duration {
	ahead, rate := tokens, 0.0
	for _, b := range r.fleet {
		if b != nil && r.available(b, nil) {
			ahead += r.accounts[b.Slot].waiting(now, r.rate(b.Slot))
			rate += workedOff * r.rate(b.Slot)
		}
	}
	if rate == 0 {
		return retryWhenOut
	}
	return time.Duration(math.Ceil(min(ahead/rate, longestRetry.Seconds()))) * time.Second
}
