package decide

import (
	"math"

	"warmroute/backends"
	"warmroute/router/estimate"
	"warmroute/router/policy"
)

// Why a backend was chosen, under the policy prefix. Under another policy the
// reason is the policy's name, or ReasonStored.
const (
	ReasonPrefix = "prefix" // it has the longest match
	ReasonSpill  = "spill"  // another holds more, but is too busy
	ReasonCold   = "cold"   // none holds any of it
	ReasonLoad   = "load"   // the request has no prefix to match
	ReasonOnly   = "only"   // no other could take it
	ReasonStored = "stored" // it holds the stored response to which the request refers
)

// Choice is a candidate that was chosen.
type Choice struct {
	Backend   *Backend
	Candidate *policy.Candidate
	index     int
}

// fillCandidate fills in what policies know about a backend.
func (f *Fleet) fillCandidate(c *policy.Candidate, q *Query, b *Backend) {
	tokens := q.promptTokens()
	matched := (1 - b.MissingHits) * min(f.matchedTokens(q, b), tokens)
	engines := float64(b.engines())
	*c = policy.Candidate{
		Slot:               b.Slot,
		NameHash:           b.NameHash,
		Weight:             b.Weight,
		Device:             b.Device,
		MatchedTokens:      matched,
		UncachedTokens:     max(estimate.MinUncachedTokens, tokens-matched),
		QueuedSeconds:      b.queuedSeconds(),
		AdapterSeconds:     f.Ledger.AdapterCost(b.Slot, q.Adapter, b.Load),
		InFlight:           float64(b.KnownInFlight) + b.ExternalRequests,
		ContextTokens:      b.ContextTokens + b.ExternalRequests*tokens, // prompts of other clients count as equally long
		KVTokens:           b.OwnKVTokens,
		Engines:            engines,
		Step:               f.Estimates.Step(b.Slot),
		PrefillRate:        b.PrefillRate,
		Requests:           float64(b.Requests) / b.Weight,
		UnstartedTokens:    b.UnstartedTokens / b.Weight,
		UnstartedAttention: b.UnstartedAttention / b.Weight,
	}
	c.PrefillSeconds = c.Step.PrefillSeconds(max(0, tokens-c.UncachedTokens), c.UncachedTokens)
	steps := 1 + c.UncachedTokens/estimate.StepTokens
	c.StepSeconds = steps*c.Step.DecodeSeconds(c.InFlight/engines, c.ContextTokens/engines) + f.Estimates.RequestSeconds(b.Slot, tokens)
	if f.Rule.NeedsKVWait {
		c.KVWaitSeconds = f.kvWait(q, b)
	}
	if l := b.Load; l != nil {
		c.Waiting = float64(l.Waiting)
		c.KVUsage, c.CacheTokens = l.KVCacheUsage, float64(l.CacheTokens)
		c.EngineCacheTokens = c.CacheTokens / engines
	}
}

// Choose lets the policy choose a candidate. With trace it is a dry run, which is recorded there.
func (f *Fleet) Choose(q *Query, c *Candidates, rule policy.Policy, trace *policy.Trace) Choice {
	c.request = policy.Request{
		Now: f.Now, Blocks: q.Blocks, BlockTokens: float64(f.BlockBytes) / q.Sizes.BytesPerToken, PromptTokens: q.promptTokens(),
		PromptKey: q.PromptKey, Turn: q.Turn, Retry: len(q.Tried) > 0 || !q.Arrival.IsZero(), Session: q.Session, Tenant: q.Tenant,
		MeanOutputTokens: f.expectedOutputTokens(q, c.backends), MeanUncachedTokens: f.Estimates.MeanUncachedTokens(q.Model),
		Waiting: float64(f.Waiting), Trace: trace,
	}
	return f.choice(c, rule.Choose(&c.request, c.list))
}

// choice returns the choice of the candidate at an index.
func (f *Fleet) choice(c *Candidates, index int) Choice {
	return Choice{Backend: &f.Backends[c.list[index].Slot], Candidate: &c.list[index], index: index}
}

// PolicyRequest returns the request as the policy saw it in the last Choose.
func (c *Candidates) PolicyRequest() *policy.Request { return &c.request }

// expectedOutputTokens returns how long the output will be, about: the mean of the candidates'
// outputs, or what the client set as the maximum if that is less.
func (f *Fleet) expectedOutputTokens(q *Query, candidates []*backends.Backend) float64 {
	tokens := f.Estimates.MeanOutputTokens(candidates)
	if most := q.MaxOutputTokens; most > 0 {
		tokens = min(tokens, float64(most))
	}
	return tokens
}

// Reason says in a word why a candidate was chosen.
func (f *Fleet) Reason(q *Query, c *Candidates, chosen Choice) string {
	switch {
	case q.Stored:
		return ReasonStored
	case !f.Rule.ReportsMatchReason:
		return f.Rule.Name
	}
	most := 0.0
	for i := range c.list {
		most = max(most, c.list[i].MatchedTokens)
	}
	switch {
	case len(c.list) == 1:
		return ReasonOnly
	case len(q.Blocks) == 0:
		return ReasonLoad
	case most == 0:
		return ReasonCold
	case chosen.Candidate.MatchedTokens < most:
		return ReasonSpill
	}
	return ReasonPrefix
}

// Prefill is how much prefill a request is, before a backend is chosen.
type Prefill struct {
	Tokens  float64 // to compute at least
	Rate    float64 // tokens a second that its backends prefill together
	Seconds float64 // that it takes at least, on one candidate
}

// LeastPrefill returns the prefill of a request on its candidates, or on the full backends if it has none. The whole
// prompt and the median rate are used where there are none of these either.
func (f *Fleet) LeastPrefill(q *Query, c *Candidates) Prefill {
	median := f.Estimates.MedianPrefillRate()
	rate := c.fleetRate
	if rate == 0 {
		rate = median
	}
	p := Prefill{q.promptTokens(), rate, math.Inf(1)}
	add := func(x *policy.Candidate) {
		p.Tokens, p.Seconds = min(p.Tokens, x.UncachedTokens), min(p.Seconds, x.PrefillSeconds)
	}
	for i := range c.list {
		add(&c.list[i])
	}
	if len(c.list) == 0 {
		for _, b := range c.full {
			var x policy.Candidate
			f.fillCandidate(&x, q, &f.Backends[b.Slot])
			add(&x)
		}
	}
	if math.IsInf(p.Seconds, 1) {
		p.Seconds = p.Tokens / median
	}
	return p
}
