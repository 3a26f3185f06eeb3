package router

import (
	"errors"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/policy"
)

// errQueue means that a request must wait in the queue.
var errQueue = errors.New("request must be queued")

// decision is the decision that is being made, and its scratch memory.
type decision struct {
	req      Request
	tried    []*backends.Backend // excluded
	promoted bool                // see queue.Item
	now      time.Time
	sizes    estimate.TokenSizes

	matched    []int // leading blocks of the prompt that each backend holds, by slot
	buffer     []int // for matched
	candidates []policy.Candidate
	backends   []*backends.Backend // of candidates
	full       []*backends.Backend // at their MaxInFlight: no other filter before that one excludes them
	fleetRate  float64             // tokens a second that full and candidates prefill together, those without headroom included
	request    policy.Request
	linked     linkedPrefix
}

// route decides where a request goes, in five steps: match its prompt against the
// index, filter the backends that may take it, score these, admit it if the best
// one can start it soon, and reserve what it takes there. It does not wait: it returns
// errQueue when the request has to.
func (r *Router) route(req *Request, tried []*backends.Backend, now time.Time) (*Decision, error) {
	if len(tried) > 0 {
		req.Backends = r.currentBackends(req)
		switch {
		case r.isEndpointMissing(req, now):
			return nil, ErrEndpointMissing
		case !r.hasUntriedBackend(req, tried, now):
			return nil, ErrNoneReady // however many others wait
		}
	}
	if r.mustQueueBehindOthers(req) {
		return nil, errQueue // its turn is decided among those queued
	}
	r.beginDecision(req, tried, now)
	r.matchPrompt()
	err := r.filterBackends()
	if err == ErrNoneReady && r.refreshBackends(req) {
		r.decision.req.Backends = req.Backends
		err = r.filterBackends()
	}
	switch {
	case err == nil:
	case r.isEndpointMissing(req, now):
		return nil, ErrEndpointMissing
	case r.isQueueable(req):
		return nil, errQueue
	default:
		return nil, err
	}
	chosen := r.score()
	if !req.NoEngine && !r.canAdmit(chosen) {
		return nil, errQueue
	}
	if !req.NoEngine && !isRetry(req, tried) && !r.isTooLong(req, r.decision.candidates[chosen].Slot) { // a retry was charged the first time
		r.queue.ChargeUnqueued(req.class(), req.Tenant, r.decision.minUncachedTokens(), r.decision.fleetRate, now)
	}
	return r.reserve(chosen), nil
}

// isRetry reports whether a request was routed before, also if each backend may be tried again.
func isRetry(req *Request, tried []*backends.Backend) bool {
	return len(tried) > 0 || req.Waited != Waited{}
}

// beginDecision starts a decision.
func (r *Router) beginDecision(req *Request, tried []*backends.Backend, now time.Time) {
	d := &r.decision
	d.req, d.tried, d.promoted, d.now = *req, tried, false, now
	d.sizes = r.estimates.TokenSizes(req.Model, req.TextClass)
	d.linked = linkedPrefix{}
}

// matchPrompt reads from the index how much of the prompt each backend holds.
func (r *Router) matchPrompt() {
	d := &r.decision
	if len(d.buffer) < len(r.states) {
		d.buffer = make([]int, len(r.states))
	}
	d.matched = d.buffer[:len(r.states)]
	r.index.Match(d.req.Blocks, d.matched)
	d.linked = r.findLinked()
}

// filterBackends finds the candidates: the backends that may take the request, less those
// that others are preferred to. When there are none it returns why.
func (r *Router) filterBackends() error {
	d := &r.decision
	d.candidates, d.backends, d.full = d.candidates[:0], d.backends[:0], d.full[:0]
	none, best := ErrNoneReady, rankStalled
	for _, b := range d.req.Backends {
		rank := rankPreferred
		if f := r.findFilter(b); f != nil {
			rank = f.rank
			if f.err == ErrMaxInFlight {
				none, d.full = f.err, append(d.full, b)
			}
		}
		if rank > best {
			continue
		}
		if rank < best {
			best = rank
			d.candidates, d.backends = d.candidates[:0], d.backends[:0]
		}
		d.backends = append(d.backends, b)
		d.candidates = append(d.candidates, policy.Candidate{})
		r.fillCandidate(&d.candidates[len(d.candidates)-1], b)
	}
	d.fleetRate = r.totalPrefillRate()
	if len(d.backends) == 0 {
		return none
	}
	if r.batchNeedsHeadroom(&d.req, d.promoted, d.now) && !r.isTooLongForAll(&d.req) {
		return r.filterCandidatesByHeadroom()
	}
	return nil
}

// fillCandidate fills in what policies know about a backend.
func (r *Router) fillCandidate(c *policy.Candidate, b *backends.Backend) {
	d, s, l := &r.decision, &r.states[b.Slot], r.liveStateOf(b).load
	externalRequests, externalTokens := r.externalLoad(l, d.now)
	rate, weight, tokens := r.estimates.PrefillRate(b.Slot), r.weightOf(b), d.promptTokens()
	missing, recomputed := r.estimates.MissingHits(b.Slot)
	matched := (1 - missing) * min(r.tokensBefore(d.matched[b.Slot]), tokens)
	*c = policy.Candidate{
		Slot:           b.Slot,
		NameHash:       s.nameHash,
		Weight:         weight,
		MatchedTokens:  matched,
		UncachedTokens: max(minUncachedTokens, tokens-matched),
		Recomputed:     recomputed,
		QueuedTokens:   s.load.queuedTokens(d.now, rate) + externalTokens + s.claimed.uncached,
		AdapterTokens:  s.load.adapterCost(d.req.Adapter, l),
		InFlight:       float64(b.KnownInFlight()) + externalRequests,
		PrefillRate:    rate,
		Requests:       float64(s.load.requests) / weight, UnstartedTokens: s.load.unstarted / weight,
		UnstartedAttention: s.load.attended / weight,
	}
	if r.policy.definition.NeedsKVWait {
		c.KVWaitTokens = r.kvWait(b.Slot, d.now) * rate
	}
	if r.policy.definition.NeedsContext {
		c.ContextTokens = r.ownKVTokens(b.Slot, d.now)
	}
	if l != nil {
		c.Waiting = float64(l.Waiting)
		c.KVUsage, c.CacheTokens = l.KVCacheUsage, float64(l.CacheTokens)
		c.EngineCacheTokens = c.CacheTokens / float64(countEngines(l))
	}
}

// score lets the policy choose a candidate, and returns its place.
func (r *Router) score() (chosen int) {
	r.fillPolicyRequest()
	return r.policy.Choose(&r.decision.request, r.decision.candidates)
}

// fillPolicyRequest fills in what policies know about the request.
func (r *Router) fillPolicyRequest() {
	d := &r.decision
	d.request = policy.Request{
		Now: d.now, Blocks: d.req.Blocks, BlockTokens: float64(r.blockBytes) / d.sizes.BytesPerToken, PromptTokens: d.promptTokens(),
		PromptKey: d.req.PromptKey, Turn: d.req.Turn, Retry: len(d.tried) > 0, Session: d.req.Session,
		MeanOutputTokens: r.expectedOutputTokens(), MeanUncachedTokens: r.estimates.MeanUncachedTokens(d.req.Model),
	}
}

// expectedOutputTokens returns how long the answer will be, about: the mean of the candidates'
// answers, or what the client set as the maximum if that is less.
func (r *Router) expectedOutputTokens() float64 {
	d := &r.decision
	tokens := r.estimates.MeanOutputTokens(d.backends)
	if most := d.req.MaxOutputTokens; most > 0 {
		tokens = min(tokens, float64(most))
	}
	return tokens
}

// canAdmit reports whether the chosen candidate can start the request now, or nearly so.
func (r *Router) canAdmit(chosen int) bool {
	return !r.isQueueEnabled() || r.blockedBy(chosen) == blockedByNothing
}

// reserve makes the decision, and accounts for the request on the chosen candidate.
func (r *Router) reserve(chosen int) *Decision {
	d, req := &r.decision, &r.decision.req
	c, b := &d.candidates[chosen], d.backends[chosen]
	s, depth := &r.states[b.Slot], d.matched[b.Slot]
	made := &Decision{
		Backend:       b,
		Reason:        r.reasonFor(chosen),
		MatchedBlocks: depth,
		TotalBlocks:   len(req.Blocks),
		MatchedTokens: int(c.MatchedTokens),
		PromptTokens:  int(d.request.PromptTokens),
		router:        r,
		health:        s.health,
		sentAt:        d.now,
	}
	made.request = sentRequest{
		blocks: req.Blocks, adapter: req.Adapter, class: req.class(), streams: req.Streams,
		noEngine: req.NoEngine, nonGenerative: req.NonGenerative, maxOutputTokens: req.MaxOutputTokens,
		conversation: req.conversationKey(),
	}
	r.nameForKVEvents(made, req)
	delete(r.kept, made.request.conversation)
	p := &made.prediction
	p.Model, p.Bytes, p.PromptTokens, p.Sequences = req.Model, req.Bytes, d.request.PromptTokens, req.sequences()
	p.MatchedBlocks, p.MatchedTokens, p.Uncached = depth, int(c.MatchedTokens), c.UncachedTokens
	p.QueuedAhead = s.load.queuedTokens(d.now, c.PrefillRate)
	p.Forks, p.TextClass = req.Forks, req.TextClass
	p.IsText = req.Sequences <= 1 && !req.Media && len(req.Blocks) > 0
	if req.Sequences <= 1 && len(req.Blocks) > 0 {
		p.Media = req.mediaCounts()
	}
	p.IsTooLong = r.isTooLong(req, b.Slot)
	made.watch = stallWatch{req.Stalls, req.Backends, d.tried, req.Endpoint}
	if req.NoEngine {
		s.health.addStallWatch(made)
		b.NoEngineInFlight.Add(1)
		return made
	}
	if p.IsTooLong {
		made.request.blocks, p.Uncached = nil, minUncachedTokens
	} else {
		made.kv.unindexed = r.unindexedMediaTokens(b.Slot)
	}
	// Others' code comes before the accounts: if it panics, nothing is reserved.
	if p, ok := r.policy.Policy.(policy.Recorder); ok {
		p.RecordSent(&d.request, c)
	}
	r.reportSent(made, req)
	if !p.IsTooLong {
		r.index.Add(&made.pin, b.Slot, req.Blocks, depth)
		p.Distance = made.pin.ReuseDistance
	}
	s.health.addStallWatch(made)
	s.load.addRequest(made, d.now)
	r.interactive.RecordSent(&s.classes, made.request.class, p.Sequences, p.Uncached/c.PrefillRate, d.now)
	onlyInFlight := b.InFlight.Add(p.Sequences) == p.Sequences
	if onlyInFlight {
		b.RequestPoll() // the last one may be long ago
	}
	s.health.recordSent(made, onlyInFlight, d.now)
	s.kv.recordSent(made, req, r, d.now)
	return made
}

// reasonFor says in a word why the candidate was chosen.
func (r *Router) reasonFor(chosen int) string {
	d := &r.decision
	switch {
	case d.req.Stored:
		return ReasonStored
	case !r.policy.definition.ExplainsChoice:
		return r.policy.definition.Name
	}
	most := 0.0
	for i := range d.candidates {
		most = max(most, d.candidates[i].MatchedTokens)
	}
	switch {
	case len(d.candidates) == 1:
		return ReasonOnly
	case len(d.req.Blocks) == 0:
		return ReasonLoad
	case most == 0:
		return ReasonCold
	case d.candidates[chosen].MatchedTokens < most:
		return ReasonSpill
	}
	return ReasonPrefix
}

// promptTokens returns how long the prompt is, about.
func (d *decision) promptTokens() float64 {
	return d.linked.tokens + d.countTokens(d.req.Bytes) - d.countTokens(d.linked.bytes)
}

// countTokens returns how many tokens the first bytes of the prompt have, about.
func (d *decision) countTokens(bytes int) float64 {
	return d.sizes.CountTokens(bytes, d.req.MediaItems)
}

// tokensAfter returns how many tokens of the prompt come after so many blocks, about.
func (r *Router) tokensAfter(blocks int) float64 {
	return max(0, r.decision.promptTokens()-r.tokensBefore(blocks))
}

// minUncachedTokens is what the candidates would have to compute at least.
func (d *decision) minUncachedTokens() float64 {
	least := d.promptTokens()
	for i := range d.candidates {
		least = min(least, d.candidates[i].UncachedTokens)
	}
	return least
}

// totalPrefillRate returns how many tokens the candidates, and the backends that would be without
// their MaxInFlight, prefill together in a second.
func (r *Router) totalPrefillRate() float64 {
	sum := 0.0
	for i := range r.decision.candidates {
		sum += r.decision.candidates[i].PrefillRate
	}
	for _, b := range r.decision.full {
		sum += r.estimates.PrefillRate(b.Slot)
	}
	return sum
}

// hasUntriedBackend reports whether a backend that was not tried, and has the endpoint as
// far as is known, may take the request later: where all have failed it, waiting would not
// help.
func (r *Router) hasUntriedBackend(req *Request, tried []*backends.Backend, now time.Time) bool {
	return slices.ContainsFunc(req.Backends, func(b *backends.Backend) bool {
		return r.has(b) && !b.Retiring() && !slices.Contains(tried, b) && !b.LacksEndpoint(req.Endpoint, now)
	})
}

func (r *Router) weightOf(b *backends.Backend) float64 {
	if w := r.liveStateOf(b).options.Weight; w > 0 {
		return w
	}
	return 1
}
