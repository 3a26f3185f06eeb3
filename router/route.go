package router

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/decide"
	"warmroute/router/estimate"
	"warmroute/router/health"
	"warmroute/router/ledger"
	"warmroute/router/policy"
)

// errQueue means that a request must wait in the queue.
var errQueue = errors.New("request must be queued")

// route decides where a request goes, in five steps: match its prompt against the index, filter the backends
// that may take it, score these, admit it if the best one can start it soon, and reserve what it takes there.
// It does not wait: it returns errQueue when the request has to.
func (r *Router) route(req *Request, tried []*backends.Backend, now time.Time) (*Reservation, error) {
	f, s := &r.fleet, &r.fleet.scratch
	f.sharing.record(req, now)
	if len(tried) > 0 {
		req.Backends = currentBackends(r.catalog(), req)
	}
	v := f.viewOf(s, req.Backends, &r.callbacks, now)
	if len(tried) > 0 {
		switch {
		case v.IsEndpointMissing(req):
			return nil, ErrEndpointMissing
		case !v.HasUntriedBackend(req, tried):
			return nil, ErrNoneReady // however many others wait
		}
	}
	if r.admission.mustQueueBehindOthers(v, req) {
		return nil, errQueue // its turn is decided among those queued
	}
	q := f.match(s, req, tried)
	err := f.filter(s, v, q, f.ledger)
	if err == ErrNoneReady {
		if current := currentBackends(r.catalog(), req); !slices.Equal(current, req.Backends) {
			req.Backends, q.Backends = current, current
			v = f.viewOf(s, current, &r.callbacks, now)
			err = f.filter(s, v, q, f.ledger)
		}
	}
	switch {
	case err == nil:
	case v.IsEndpointMissing(req):
		return nil, ErrEndpointMissing
	case r.admission.isQueueable(f, req):
		return nil, errQueue
	default:
		return nil, err
	}
	choice := v.Choose(q, &s.candidates, f.policy.Policy, nil)
	if v.BlockedBy(q, choice) != decide.NotBlocked {
		return nil, errQueue
	}
	if !req.NoEngine && !isRetry(req, tried) && !v.IsTooLong(req, choice.Backend) { // a retry was charged the first time
		p := v.LeastPrefill(q, &s.candidates)
		r.admission.queue.ChargeUnqueued(req.Class(), req.Tenant, p.Tokens, p.Rate, now)
	}
	return r.reserve(s, v, q, choice), nil
}

// currentBackends returns the backends that serve a request's model now; those that
// did where the catalog does not list it any more: another may be about to serve it.
func currentBackends(c *backends.Catalog, req *Request) []*backends.Backend {
	if req.Stored && len(req.Backends) == 1 { // its server may have other ranks by now
		if parts := req.Backends[0].Server().Parts(); !slices.Contains(parts, req.Backends[0]) {
			return parts
		}
	}
	if c == nil || req.CatalogID == "" || req.Stored {
		return req.Backends
	}
	if e, listed := c.Find(req.CatalogID); listed {
		return e.Backends
	}
	return req.Backends
}

// reserve accounts for a request on the chosen candidate.
func (r *Router) reserve(s *scratch, v *decide.Fleet, q *decide.Query, choice decide.Choice) *Reservation {
	f, c, b := &r.fleet, choice.Candidate, choice.Backend.Backend
	h, seen := f.states[b.Slot].health, s.candidates.PolicyRequest()
	d := &Reservation{
		Backend: b, Reason: v.Reason(q, &s.candidates, choice), MatchedBlocks: q.Matched[b.Slot], TotalBlocks: len(q.Blocks),
		MatchedTokens: int(c.MatchedTokens), PromptTokens: int(seen.PromptTokens),
		router: r, noEngine: q.NoEngine, health: h,
		entry: ledger.Entry{
			Slot: b.Slot, SentAt: v.Now, Adapter: q.Adapter, Class: q.Class(), Streams: q.Streams, NonGenerative: q.NonGenerative,
			MaxOutputTokens: q.MaxOutputTokens, Conversation: q.ConversationKey(),
			Prediction: estimate.Prediction{
				Model: q.Model, Bytes: q.Bytes, PromptTokens: seen.PromptTokens, Sequences: q.CountedSequences(),
				MatchedBlocks: q.Matched[b.Slot], MatchedTokens: int(c.MatchedTokens), Uncached: c.UncachedTokens,
				QueuedAhead: choice.Backend.QueuedTokens, Forks: q.Forks, TextClass: q.TextClass,
				IsText:    q.Sequences <= 1 && !q.Media && len(q.Blocks) > 0,
				IsTooLong: v.IsTooLong(q.Request, choice.Backend),
			},
		},
	}
	f.startKVRequest(d, q.Request)
	p := &d.entry.Prediction
	if q.Sequences <= 1 && len(q.Blocks) > 0 {
		p.Media = q.CountMedia()
	}
	d.attempt = health.Attempt{
		SentAt: v.Now, Uncached: p.Uncached, Streams: q.Streams, Listener: q.Stalls, Backends: q.Backends, Tried: q.Tried, Endpoint: q.Endpoint,
	}
	if q.NoEngine {
		h.Watch(&d.attempt)
		f.ledger.BeginNoEngine(&d.entry)
		return d
	}
	prompt := ledger.Prompt{Blocks: q.Blocks, Bytes: q.Bytes, BytesPerToken: q.Sizes.BytesPerToken}
	if p.IsTooLong {
		p.Uncached, d.attempt.Uncached = estimate.MinUncachedTokens, estimate.MinUncachedTokens
	} else {
		prompt.UnindexedMediaTokens = v.UnindexedMediaTokens(q, b.Slot)
	}
	// Code of policies and peers comes before the account: if it panics, nothing is reserved.
	if recorder, ok := f.policy.Policy.(policy.Recorder); ok {
		recorder.RecordSent(seen, c)
	}
	r.peers.reportSent(d, q.Request, seen.Retry)
	h.Watch(&d.attempt)
	onlyInFlight := f.ledger.Begin(&d.entry, prompt, !p.IsTooLong, v.Now)
	if onlyInFlight {
		b.RequestPoll() // the last one may be long ago
	}
	h.RecordSent(&d.attempt, onlyInFlight, v.Now)
	return d
}
