package decide

import (
	"math"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/policy"
)

// Why a backend was chosen, under the policy prefix. Under another policy the
// reason is the policy's name, or ReasonStored.
const (
	ReasonPrefix      = "prefix"       // it has the longest match
	ReasonMatchedBusy = "matched_busy" // another holds more, but is too busy
	ReasonNoMatch     = "no_match"     // none holds any of it
	ReasonLoad        = "load"         // the request has no prefix to match
	ReasonOnly        = "only"         // no other could take it
	ReasonStored      = "stored"       // it holds the stored response to which the request refers
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
	held := min(f.matchedTokens(q, b), tokens)
	engines := float64(b.engines())
	if engines == 1 { // with several, a request may have missed because the replica chose another engine, and no replica avoids that
		held *= 1 - b.MissingHits
	}
	matched := held
	if b.Offloading.StoreShare > 0 {
		matched += b.Offloading.StoreShare * f.TokensElsewhere(q, b.Slot)
	}
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
	if b.Offloading.Before > 0 || matched > held {
		c.OffloadedTokens = matched - held + f.offloadedTokens(q, b, held)
		if c.OffloadedTokens > 0 { // fetches follow each other
			c.FetchSeconds = b.Offloading.FetchSeconds * (b.QueuedFetchTokens + c.OffloadedTokens)
		}
	}
	if f.Policy.NeedsKVWait {
		c.KVWaitSeconds = f.kvWait(q, b)
	}
	if l := b.Load; l != nil {
		c.Waiting = float64(l.Waiting)
		c.KVUsage, c.CacheTokens = l.KVCacheUsage, float64(l.CacheTokens)
		c.EngineCacheTokens = c.CacheTokens / engines
	}
}

// Choose lets the policy choose a candidate. With trace it is a dry run, which is recorded there.
func (f *Fleet) Choose(q *Query, c *Candidates, by policy.Policy, trace *policy.Trace) Choice {
	c.request = policy.Request{
		Now: f.Now, Blocks: q.Blocks, BlockTokens: float64(f.BlockBytes) / q.Sizes.BytesPerToken, PromptTokens: q.promptTokens(),
		PromptKey: q.PromptKey, Turn: q.Turn, Retry: len(q.Tried) > 0 || !q.Arrival.IsZero(), Conversation: q.Conversation,
		Client: q.Client, Tenant: q.Tenant,
		MeanOutputTokens: f.expectedOutputTokens(q, c.backends), MeanUncachedTokens: f.Estimates.MeanUncachedTokens(q.Model),
		DueSeconds: f.dueSeconds(q), Waiting: float64(f.Waiting), Trace: trace,
	}
	if q.Checkpoints != nil {
		f.priceCheckpoints(q, c.list)
	}
	return f.choice(c, by.Choose(&c.request, c.list))
}

// laterTurnPrice multiplies the price of a later turn in priceCheckpoints.
const laterTurnPrice = 4

// priceCheckpoints sets the price of a request that begins as earlier ones did on candidates that do not hold all of that beginning. A
// replica that keeps checkpoints computes it twice before it can reuse it: it has a checkpoint there only once a second prompt has left
// a first one. On a candidate that holds the beginning the request is that second one. A later turn has a price only
// for the tokens that no candidate can reuse, because its checkpoint was evicted: if it moves, it takes room in a second cache.
func (f *Fleet) priceCheckpoints(q *Query, list []policy.Candidate) {
	most, reusable := 0.0, 0.0
	for i := range list {
		slot := list[i].Slot
		most = max(most, f.tokensBefore(q, q.Held[slot]))
		if q.Turn == prompt.TurnLater {
			reusable = max(reusable, f.reusableTokens(q, slot))
		}
	}
	for i := range list {
		c := &list[i]
		held := max(f.tokensBefore(q, q.Held[c.Slot]), reusable)
		if b := &f.Backends[c.Slot]; held < most && b.Load != nil && b.Load.KeepsCheckpoints {
			c.CheckpointSeconds = c.Step.PrefillSeconds(held, most-held)
			if q.Turn == prompt.TurnLater {
				c.CheckpointSeconds *= laterTurnPrice
			}
		}
	}
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
	case !f.Policy.ReportsMatchReason:
		return f.Policy.Name
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
		return ReasonNoMatch
	case chosen.Candidate.MatchedTokens < most:
		return ReasonMatchedBusy
	}
	return ReasonPrefix
}

// IsLate reports whether every candidate is predicted to have the first token of the request after it is due. As long as the
// prefill rate of one is not known, nothing can be predicted, and it is late only once it is due.
func (f *Fleet) IsLate(q *Query, c *Candidates) bool {
	due := f.dueSeconds(q)
	switch {
	case due == 0 || f.IsTooLongForAll(q.Request): // what is too long gets that error
		return false
	case !f.Now.Before(q.FirstTokenDue):
		return true
	case len(c.list) == 0:
		return false
	}
	for i := range c.list {
		if x := &c.list[i]; !f.Backends[x.Slot].PrefillRateKnown || x.TTFT() <= due {
			return false
		}
	}
	return true
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
