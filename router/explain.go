package router

import (
	"math/rand/v2"
	"sync"

	"warmroute/backends"
	"warmroute/router/decide"
	"warmroute/router/queue"
)

// Explanation is what Pick would do with a request, and why.
type Explanation = decide.Explanation

// BackendExplanation describes one backend with respect to a request.
type BackendExplanation = decide.BackendExplanation

// Explain returns what Pick would return at this moment, by the code that decides;
// the backends that were tried are excluded. Nothing is reserved, used, learned or
// remembered. Where chance decides, the next Pick draws the same.
func (r *Router) Explain(req Request, tried ...*backends.Backend) Explanation {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	f := &r.fleet
	defer func(drawn rand.PCG) { *f.rand = drawn }(*f.rand)
	updateBackends(r.catalog(), &req)
	var s scratch
	v := f.viewAll(&s, nil, r.now())
	v.Waiting = r.admission.queue.WaitingAhead(queue.LowPriority, req.Backends).Count
	q, l := f.match(&s, &req, tried), f.ledger.WithCopiedClasses()
	hasLowPriorityRoom := sync.OnceValue(func() func(int) bool { return f.lowPriorityRoom(v, req.Backends, l) })
	e := v.Explain(q, func(slot int) bool { return hasLowPriorityRoom()(slot) })
	e.Layout, e.Waiting = r.PromptLayout(req.Model).BitNames(), r.admission.queue.Len()
	blocked, err := "", f.filter(&s, v, q, l)
	if err == nil {
		blocked = v.ExplainChoice(e, q, &s.candidates, f.policy.Policy)
	}
	e.Queued, e.Refused = r.admission.explain(f, v, q, &s.candidates, blocked, err)
	e.Sentence = e.Describe()
	return *e
}

// explain returns why a request would be queued, or why it would be refused, in the order in which route
// decides. blockedReason is why the chosen backend could not start it soon, filterErr why there is none.
func (a *admission) explain(f *fleet, v *decide.Fleet, q *decide.Query, c *decide.Candidates, blockedReason string,
	filterErr error) (queuedReason, refusedReason string) {
	switch {
	case filterErr != nil && v.IsEndpointMissing(q.Request):
		return "", ErrEndpointMissing.Error()
	case len(q.Tried) > 0 && !v.HasUntriedBackend(q.Request, q.Tried):
		return "", "every backend that serves the model was tried"
	case isRefusedLate(v, q, c):
		return "", ErrLate.Error()
	case a.mustQueueBehindOthers(v, q.Request):
		queuedReason = "other requests are queued before it"
	case filterErr == nil && q.NoEngine:
		return "", ""
	case filterErr != nil && !a.isQueueable(f, q.Request):
		return "", filterErr.Error()
	case filterErr != nil:
		queuedReason = filterErr.Error()
	default:
		queuedReason = blockedReason
	}
	if queuedReason != "" && a.queue.IsFull(q.Class(), q.Tenant, q.BodyBytes) {
		return "", ErrQueueFull.Error()
	}
	return queuedReason, ""
}
