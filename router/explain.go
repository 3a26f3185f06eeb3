package router

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// Explanation is what Pick would do with a request, and why. Tokens are estimates.
type Explanation struct {
	Policy       string   `json:"policy"`
	Model        string   `json:"model"` // its ID in the catalog
	PromptTokens int      `json:"prompt_tokens"`
	Blocks       int      `json:"blocks"` // full ones of the prompt, by which matches are counted
	BlockBytes   int      `json:"block_bytes"`
	Layout       []string `json:"layout"` // of the model's prompts: the bits that are set

	Choice  string `json:"choice"`            // backend; "" when none may take it now
	Reason  string `json:"reason"`            // as in Decision; "" when Choice is
	Queued  string `json:"queued,omitempty"`  // why it would be queued; "" when it would not
	Refused string `json:"refused,omitempty"` // why it would be refused; "" when it would not
	Waiting int    `json:"waiting"`           // requests in the admission queue

	Backends []BackendExplanation `json:"backends"` // all in the fleet

	ScoreIs      string  `json:"score_is,omitempty"` // what decided, in words
	HighestWins  bool    `json:"highest_wins,omitempty"`
	Kappa        float64 `json:"kappa"`         // κ, under the policy prefix
	OutputTokens float64 `json:"output_tokens"` // L̂

	Sentence string `json:"sentence"`

	hasSession bool // ties are broken by the session
}

// BackendExplanation describes one backend with respect to a request.
type BackendExplanation struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Breaker   string `json:"breaker"`
	Stalled   bool   `json:"stalled,omitempty"`
	Candidate bool   `json:"candidate"`
	Filter    string `json:"filter,omitempty"`  // name of the filter that applies to it
	WhyNot    string `json:"why_not,omitempty"` // why it is not a candidate
	Queued    string `json:"queued,omitempty"`  // why it could not start the request soon

	MatchedBlocks  int     `json:"matched_blocks"`
	MatchedTokens  float64 `json:"matched_tokens"`
	UncachedTokens float64 `json:"uncached_tokens"` // u
	QueuedTokens   float64 `json:"queued_tokens"`   // W
	AdapterTokens  float64 `json:"adapter_tokens"`  // of an adapter that it has not loaded
	InFlight       float64 `json:"in_flight"`       // n: sequences on it, other clients' included
	PrefillRate    float64 `json:"tokens_per_second"`
	Weight         float64 `json:"weight"`
	KVUsage        float64 `json:"kv_usage"` // by its last scrape; -1: unknown
	TTFTSeconds    float64 `json:"seconds_to_first_token"`

	Score *float64      `json:"score"`                // in Explanation.ScoreIs; nil: it has none
	Terms []policy.Term `json:"cost_terms,omitempty"` // of the policy prefix; their sum over Weight is the score
}

// Explain returns what Pick would return at this moment, by the code that decides;
// the backends that were tried are excluded. Nothing is reserved, used, learned or
// remembered. Where chance decides, the next Pick draws the same.
func (r *Router) Explain(req Request, tried ...*backends.Backend) Explanation {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	defer func(drawn rand.PCG) { *r.rand = drawn }(*r.rand)
	now := r.now()
	req.Backends = r.currentBackends(&req)
	r.beginDecision(&req, tried, now)
	r.matchPrompt()
	e := Explanation{
		Policy: r.policy.definition.Name, Model: req.CatalogID, PromptTokens: int(math.Round(r.decision.promptTokens())), Blocks: len(req.Blocks), BlockBytes: r.blockBytes,
		Layout: r.PromptLayout(req.Model).BitNames(), Waiting: r.queue.Len(), hasSession: req.Session != 0,
	}
	all := r.listBackendsLocked()
	for _, b := range all {
		e.Backends = append(e.Backends, r.explainBackend(b, now))
	}
	queued, err := "", r.filterBackends()
	if err == nil {
		queued = r.explainChoice(&e, all)
	}
	e.Queued, e.Refused = r.explainQueueing(&req, tried, queued, err, now)
	e.Sentence = e.sentence()
	return e
}

// explainChoice lets the policy choose, and records how in e, whose Backends are those
// of all. It returns why the chosen backend could not start the request soon.
func (r *Router) explainChoice(e *Explanation, all []*backends.Backend) (blockedReason string) {
	var t policy.Trace
	d := &r.decision
	r.fillPolicyRequest()
	d.request.Trace = &t
	chosen := r.policy.Choose(&d.request, d.candidates)
	e.Choice, e.Reason = d.backends[chosen].Name, r.reasonFor(chosen)
	e.ScoreIs, e.HighestWins, e.Kappa, e.OutputTokens = t.Criterion, t.HighestWins, roundMilli(t.Kappa), roundMilli(d.request.MeanOutputTokens)
	for i, b := range d.backends {
		x := &e.Backends[slices.Index(all, b)]
		x.Candidate, x.WhyNot = true, ""
		if r.isQueueEnabled() && !d.req.NoEngine {
			x.Queued = r.blockedBy(i).String()
		}
		if i == chosen {
			blockedReason = x.Queued
		}
		if i < len(t.Scores) && !math.IsInf(t.Scores[i], 0) {
			score := roundMilli(t.Scores[i])
			x.Score = &score
		}
		if i < len(t.Terms) {
			x.Terms = t.Terms[i]
			for k := range x.Terms {
				x.Terms[k].Tokens = roundMilli(x.Terms[k].Tokens)
			}
		}
	}
	return blockedReason
}

// explainQueueing returns why a request would be queued, or why it would be refused, in
// the order in which route decides. blockedReason is why the chosen backend could not
// start it soon, filterErr why there is none.
func (r *Router) explainQueueing(req *Request, tried []*backends.Backend, blockedReason string, filterErr error, now time.Time) (queuedReason, refusedReason string) {
	switch {
	case filterErr != nil && r.isEndpointMissing(req, now):
		return "", ErrEndpointMissing.Error()
	case len(tried) > 0 && !r.hasUntriedBackend(req, tried, now):
		return "", "every backend that serves the model was tried"
	case r.mustQueueBehindOthers(req):
		queuedReason = "other requests are queued before it"
	case filterErr == nil && req.NoEngine:
		return "", ""
	case filterErr != nil && !r.isQueueable(req):
		return "", filterErr.Error()
	case filterErr != nil:
		queuedReason = filterErr.Error()
	default:
		queuedReason = blockedReason
	}
	if queuedReason != "" && r.queue.IsFull(req.class(), req.BodyBytes) {
		return "", ErrQueueFull.Error()
	}
	return queuedReason, ""
}

// explainBackend describes one backend, and says why it is not a candidate.
func (r *Router) explainBackend(b *backends.Backend, now time.Time) BackendExplanation {
	s, live := &r.states[b.Slot], r.liveStateOf(b)
	var c policy.Candidate
	r.fillCandidate(&c, b)
	x := BackendExplanation{
		Name: b.Name, State: live.state.String(), Breaker: s.health.breaker.state(now).String(), Stalled: s.health.stalled,
		MatchedBlocks: r.decision.matched[b.Slot], MatchedTokens: roundMilli(c.MatchedTokens), UncachedTokens: roundMilli(c.UncachedTokens),
		QueuedTokens: roundMilli(c.QueuedTokens), AdapterTokens: c.AdapterTokens, InFlight: roundMilli(c.InFlight),
		PrefillRate: roundMilli(c.PrefillRate), Weight: c.Weight, KVUsage: -1,
		TTFTSeconds: roundMilli((c.QueuedTokens + c.AdapterTokens + c.KVWaitTokens + c.UncachedTokens) / c.PrefillRate),
	}
	x.Filter, x.WhyNot = r.explainFilter(b)
	if l := live.load; l != nil && l.KVKnown {
		x.KVUsage = roundMilli(l.KVCacheUsage)
	}
	return x
}

// explainFilter returns the filter that applies to b, and what it says. Of a backend
// to which none applies it says why others may be preferred all the same.
func (r *Router) explainFilter(b *backends.Backend) (name, description string) {
	d := &r.decision
	if !slices.Contains(d.req.Backends, b) {
		if d.req.Stored {
			return "stored", "does not hold the stored response"
		}
		return "model", notServed
	}
	if f := r.findFilter(b); f != nil {
		return f.name, f.description
	}
	if r.batchNeedsHeadroom(&d.req, false, d.now) && !r.canStartBatch(b.Slot, r.batchHeadroom(d.req.Backends, d.now), d.now) {
		return headroomFilter.name, headroomFilter.description
	}
	return "", "is not a candidate (another is probed first to check whether it has recovered)"
}

// notServed is the reason for a backend that does not serve the model.
const notServed = "does not list the model"

func roundMilli(x float64) float64 { return math.Round(x*1000) / 1000 }
