package router

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
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
	f.tenantMix.observe(req, now)
	if len(tried) > 0 {
		updateBackends(r.catalog(), req)
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
	mustQueue := r.admission.mustQueueBehindOthers(v, req)
	if mustQueue && !req.RefuseLate {
		return nil, errQueue // its turn is decided among those queued
	}
	q := f.match(s, req, tried)
	err := f.filter(s, v, q, f.ledger)
	switch {
	case isRefusedLate(v, q, &s.candidates):
		return nil, ErrLate
	case mustQueue:
		return nil, errQueue
	}
	if err == ErrNoneReady {
		updateBackends(r.catalog(), req)
		q.Backends, q.ContextLengths = req.Backends, req.ContextLengths
		v = f.viewOf(s, req.Backends, &r.callbacks, now)
		err = f.filter(s, v, q, f.ledger)
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
	arrival := req.Arrival
	if !req.NoEngine && !isRetry(req, tried) && !v.IsTooLong(req, choice.Backend) { // a retry was charged the first time
		p := v.LeastPrefill(q, &s.candidates)
		arrival = r.admission.queue.ChargeUnqueued(req.Class(), req.Tenant, p.Tokens, p.Rate, now)
	}
	d := r.reserve(s, v, q, choice)
	d.Arrival = arrival
	return d, nil
}

// updateBackends sets the backends of a request to those that serve its model now, and their context lengths. Those that
// did stay where the catalog does not list it any more: another may be about to serve it.
func updateBackends(c *backends.Catalog, req *Request) {
	if req.Stored && len(req.Backends) == 1 { // its server may have other ranks by now
		if parts := req.Backends[0].Server().Parts(); !slices.Contains(parts, req.Backends[0]) {
			req.Backends = parts
		}
	}
	if c == nil || req.CatalogID == "" || req.Stored {
		return
	}
	if e, listed := c.Find(req.CatalogID); listed {
		req.Backends, req.ContextLengths = e.Backends, c.ContextLengths(req.CatalogID)
	}
}

// reserve accounts for a request on the chosen candidate, and on another backend if that does the prefill.
func (r *Router) reserve(s *scratch, v *decide.Fleet, q *decide.Query, choice decide.Choice) *Reservation {
	split := v.DecideSplit(q, choice)
	seen := s.candidates.PolicyRequest()
	if split.Result != decide.SplitDone {
		d := r.prepare(v, q, choice, seen, ledger.WholeRequest)
		d.Reason, d.Split = v.Reason(q, &s.candidates, choice), split.Result
		d.begin(v, q, choice.Backend)
		return d
	}
	computed := *choice.Candidate
	computed.UncachedTokens, computed.OffloadedTokens, computed.FetchSeconds = estimate.MinUncachedTokens, 0, 0
	computed.PrefillSeconds = computed.Step.PrefillSeconds(seen.PromptTokens, computed.UncachedTokens)
	d := r.prepare(v, q, decide.Choice{Backend: choice.Backend, Candidate: &computed}, seen, ledger.DecodeRequest)
	d.Reason, d.Split, d.kvTransferTokens = v.Reason(q, &s.candidates, choice), split.Result, choice.Candidate.UncachedTokens
	if split.Prefill != nil {
		request := *q.Request
		request.Streams, request.MaxOutputTokens = false, 1
		request.Turn, request.Conversation, request.PromptKey = prompt.TurnUnknown, 0, 0 // the decode request is the turn
		prefill := *q
		prefill.Request = &request
		seenPrefill, candidate := *seen, split.Candidate
		seenPrefill.Turn, seenPrefill.Conversation, seenPrefill.PromptKey = request.Turn, 0, 0
		d.Prefill = r.prepare(v, &prefill, decide.Choice{Backend: split.Prefill, Candidate: &candidate}, &seenPrefill, ledger.PrefillRequest)
		d.Prefill.begin(v, &prefill, split.Prefill)
	}
	d.begin(v, q, choice.Backend)
	return d
}

// prepare returns the reservation for a request of that kind on a candidate, after it has called the code of policies and peers:
// if that panics, nothing is reserved. begin must follow.
func (r *Router) prepare(v *decide.Fleet, q *decide.Query, choice decide.Choice, seen *policy.Request,
	kind ledger.RequestKind) *Reservation {
	f, c, b := &r.fleet, choice.Candidate, choice.Backend.Backend
	elsewhere := 0.0
	if kind != ledger.DecodeRequest { // it transfers what the prefill replica has computed
		elsewhere = v.TokensElsewhere(q, b.Slot)
	}
	d := &Reservation{
		Backend: b, MatchedBlocks: q.Matched[b.Slot], TotalBlocks: len(q.Blocks),
		MatchedTokens: int(c.MatchedTokens), ElsewhereTokens: int(elsewhere), PromptTokens: int(seen.PromptTokens),
		router: r, noEngine: q.NoEngine, health: f.states[b.Slot].health,
		entry: ledger.Entry{
			Slot: b.Slot, SentAt: v.Now, Adapter: q.Adapter, Class: q.Class(), Streams: q.Streams, NonGenerative: q.NonGenerative,
			MaxOutputTokens: q.MaxOutputTokens, Conversation: q.ConversationID(), RequestKind: kind,
			Prediction: estimate.Prediction{
				Model: q.Model, Bytes: q.Bytes, PromptTokens: seen.PromptTokens, Sequences: q.CountedSequences(),
				HeldBlocks: q.Held[b.Slot], MatchedBlocks: q.Matched[b.Slot], MatchedTokens: int(c.MatchedTokens), Uncached: c.UncachedTokens,
				Elsewhere:   elsewhere,
				Offloaded:   c.OffloadedTokens,
				QueuedAhead: choice.Backend.QueuedTokens, Forks: q.Forks, TextClass: q.TextClass,
				IsText:    q.Sequences <= 1 && !q.Media && len(q.Blocks) > 0,
				IsTooLong: v.IsTooLong(q.Request, choice.Backend),
			},
		},
	}
	if f.index.HasCheckpoints(b.Slot) {
		checkpoint := q.Checkpoints[b.Slot]
		d.entry.Prediction.Checkpoint = &checkpoint
	}
	f.startKVRequest(d, q.Request)
	p := &d.entry.Prediction
	if q.Sequences <= 1 && len(q.Blocks) > 0 {
		p.Media = q.CountMedia()
	}
	if p.IsTooLong && !q.NoEngine {
		p.Uncached = estimate.MinUncachedTokens
	}
	d.attempt = health.Attempt{
		SentAt: v.Now, Uncached: p.Uncached, Streams: q.Streams, Listener: q.Stalls, Backends: v.FittingBackends(q.Request), Tried: q.Tried,
		Endpoint: q.Endpoint,
	}
	if q.NoEngine {
		return d
	}
	if recorder, ok := f.policy.Policy.(policy.Recorder); ok {
		recorder.RecordSent(seen, c)
	}
	r.peers.reportSent(d, q.Request, seen.Retry)
	r.admission.queue.RecordPrompt(q.ConversationID(), q.Blocks, v.Now)
	return d
}

// begin accounts for the reservation.
func (d *Reservation) begin(v *decide.Fleet, q *decide.Query, b *decide.Backend) {
	l, p := d.router.fleet.ledger, &d.entry.Prediction
	if d.noEngine {
		d.health.Watch(&d.attempt)
		l.BeginNoEngine(&d.entry)
		return
	}
	content := ledger.Prompt{Blocks: q.Blocks, Bytes: q.Bytes, BytesPerToken: q.Sizes.BytesPerToken}
	if !p.IsTooLong {
		content.UnindexedMediaTokens = v.UnindexedMediaTokens(q, b.Slot)
	}
	onlyInFlight := l.Begin(&d.entry, content, !p.IsTooLong, v.Now)
	d.health.RecordReserved(&d.attempt, b.Backend.KnownInFlight(), v.Now)
	if d.entry.RequestKind != ledger.DecodeRequest {
		d.startWatch(onlyInFlight, v.Now)
	}
}
