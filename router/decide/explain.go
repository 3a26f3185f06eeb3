package decide

import (
	"math"
	"slices"

	"warmroute/backends"
	"warmroute/router/policy"
	"warmroute/router/step"
)

// Explanation is what would be done with a request, and why. Tokens are estimates.
type Explanation struct {
	Policy       string   `json:"policy"`
	Model        string   `json:"model"` // its ID in the catalog
	PromptTokens int      `json:"prompt_tokens"`
	Blocks       int      `json:"blocks"` // full ones of the prompt, by which matches are counted
	BlockBytes   int      `json:"block_bytes"`
	Layout       []string `json:"layout"` // of the model's prompts: the bits that are set

	Choice  string `json:"choice"`            // backend; "" when none may take it now
	Reason  string `json:"reason"`            // as in Reservation; "" when Choice is
	Queued  string `json:"queued,omitempty"`  // why it would be queued; "" when it would not
	Refused string `json:"refused,omitempty"` // why it would be refused; "" when it would not
	Waiting int    `json:"waiting"`           // requests in the admission queue

	Backends []BackendExplanation `json:"backends"` // all in the fleet

	ScoreIs      string  `json:"score_is,omitempty"` // what decided, in words
	HighestWins  bool    `json:"highest_wins,omitempty"`
	OutputTokens float64 `json:"output_tokens"` // L̂

	Split *SplitExplanation `json:"split,omitempty"` // in a fleet with replicas for prefill or decode

	Sentence string `json:"sentence"`

	hasConversation bool // ties are broken by the conversation
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

	MatchedBlocks int     `json:"matched_blocks"`
	MatchedTokens float64 `json:"predicted_tokens"`
	// of a model that keeps checkpoints: that it has, up to which it can reuse those predicted
	HeldTokens     float64 `json:"held_tokens,omitempty"`
	Offloaded      float64 `json:"offloaded_tokens,omitempty"` // of MatchedTokens, those that are not on its GPU
	FetchSeconds   float64 `json:"fetch_seconds,omitempty"`    // of these, after those of the requests before
	UncachedTokens float64 `json:"uncached_tokens"`            // u
	QueuedTokens   float64 `json:"queued_tokens"`              // W
	AdapterSeconds float64 `json:"adapter_seconds"`            // to load an adapter that it has not loaded
	InFlight       float64 `json:"in_flight"`                  // n: sequences on it, other clients' included
	PrefillRate    float64 `json:"tokens_per_second"`          // at which the uncached tokens would be computed

	Step step.Model `json:"step"` // the times of its engine's steps, as learned

	Weight  float64 `json:"weight"`
	KVUsage float64 `json:"kv_usage"` // by its last poll; -1: unknown

	// The time to the first token is the sum of the wait, UncachedTokens/PrefillRate, and the time of steps.
	WaitSeconds float64 `json:"wait_seconds"`
	StepSeconds float64 `json:"step_seconds"`
	TTFTSeconds float64 `json:"seconds_to_first_token"`

	Score *float64      `json:"score"`                // in Explanation.ScoreIs; nil: it has none
	Terms []policy.Term `json:"cost_terms,omitempty"` // of the policy prefix; their sum over Weight is the score
}

// SplitExplanation says whether one replica would do the prefill of a request for another one.
type SplitExplanation struct {
	Result            string  `json:"result"` // "split", or why not
	Prefill           string  `json:"prefill,omitempty"`
	WholeSeconds      float64 `json:"whole_seconds,omitempty"` // what it costs whole, the delays of others included
	SplitSeconds      float64 `json:"split_seconds,omitempty"` // likewise split, with the best replica for prefill
	KVTransferSeconds float64 `json:"kv_transfer_seconds,omitempty"`
}

// notServed is the reason for a backend that does not serve the model.
const notServed = "does not list the model"

// Explain describes a request and what each backend of a view is to it. hasLowPriorityRoom reports whether
// a backend has headroom for the request, which is a low-priority request.
func (f *Fleet) Explain(q *Query, hasLowPriorityRoom func(slot int) bool) *Explanation {
	e := &Explanation{
		Policy: f.Policy.Name, Model: q.CatalogID, PromptTokens: int(math.Round(q.promptTokens())), Blocks: len(q.Blocks),
		BlockBytes: f.BlockBytes, hasConversation: q.Conversation != 0,
	}
	for i := range f.Backends {
		if b := &f.Backends[i]; b.Backend != nil {
			e.Backends = append(e.Backends, f.explainBackend(q, b, hasLowPriorityRoom))
		}
	}
	return e
}

// explainBackend describes one backend, and says why it is not a candidate.
func (f *Fleet) explainBackend(q *Query, b *Backend, hasLowPriorityRoom func(slot int) bool) BackendExplanation {
	var c policy.Candidate
	f.fillCandidate(&c, q, b)
	x := BackendExplanation{
		Name: b.Backend.Name, State: b.State.String(), Breaker: b.Breaker.String(), Stalled: b.Stalled,
		MatchedBlocks: q.Matched[b.Slot], MatchedTokens: roundMilli(c.MatchedTokens), UncachedTokens: roundMilli(c.UncachedTokens),
		QueuedTokens: roundMilli(b.QueuedTokens + b.ExternalTokens), AdapterSeconds: c.AdapterSeconds, InFlight: roundMilli(c.InFlight),
		Offloaded: roundMilli(c.OffloadedTokens), FetchSeconds: roundMilli(c.FetchSeconds),
		PrefillRate: roundMilli(c.UncachedTokens / c.PrefillSeconds), Weight: c.Weight, KVUsage: -1,
		Step: *f.Estimates.Step(b.Slot), WaitSeconds: roundMilli(c.WaitSeconds()), StepSeconds: roundMilli(c.StepSeconds),
		TTFTSeconds: roundMilli(c.TTFT()),
	}
	if q.Checkpoints != nil && q.Held[b.Slot] > 0 && (q.hasCheckpoint(b.Slot) || q.Matched[b.Slot] == 0) {
		x.HeldTokens = roundMilli(f.tokensBefore(q, q.Held[b.Slot]))
	}
	x.Filter, x.WhyNot = f.explainFilter(q, b, hasLowPriorityRoom)
	if l := b.Load; l != nil && l.KVKnown {
		x.KVUsage = roundMilli(l.KVCacheUsage)
	}
	return x
}

// explainFilter returns the filter that applies to b, and its description. Of a backend
// to which none applies it says why others may be preferred all the same.
func (f *Fleet) explainFilter(q *Query, b *Backend, hasLowPriorityRoom func(slot int) bool) (name, description string) {
	if !slices.Contains(q.Backends, b.Backend) {
		if q.Stored {
			return "stored", "does not hold the stored response"
		}
		return "model", notServed
	}
	if filter := f.findCandidateFilter(q, b); filter != nil {
		return filter.name, filter.description
	}
	if f.NeedsHeadroom(q.Request, false) && !hasLowPriorityRoom(b.Slot) {
		return headroomFilter.name, headroomFilter.description
	}
	return "", "is not a candidate (another is probed first to check whether it has recovered)"
}

// ExplainChoice records in e which of the candidates the policy chooses, and how. It returns why the
// chosen backend could not start the request soon.
func (f *Fleet) ExplainChoice(e *Explanation, q *Query, c *Candidates, by policy.Policy) (blockedReason string) {
	var t policy.Trace
	chosen := f.Choose(q, c, by, &t)
	e.Choice, e.Reason = chosen.Backend.Backend.Name, f.Reason(q, c, chosen)
	e.Split = explainSplit(f.DecideSplit(q, chosen))
	e.ScoreIs, e.HighestWins, e.OutputTokens = t.Criterion, t.HighestWins, roundMilli(c.request.MeanOutputTokens)
	for i, b := range c.backends {
		x := e.find(b)
		x.Candidate, x.WhyNot = true, ""
		x.Queued = f.BlockedBy(q, f.choice(c, i)).String()
		if i == chosen.index {
			blockedReason = x.Queued
		}
		if i < len(t.Scores) && !math.IsInf(t.Scores[i], 0) {
			score := roundMicro(t.Scores[i])
			x.Score = &score
		}
		if i < len(t.Terms) {
			x.Terms = t.Terms[i]
			for k := range x.Terms {
				x.Terms[k].Seconds = roundMicro(x.Terms[k].Seconds)
			}
		}
	}
	return blockedReason
}

func explainSplit(s Split) *SplitExplanation {
	if s.Result == "" {
		return nil
	}
	x := &SplitExplanation{
		Result: s.Result, WholeSeconds: roundMicro(s.Cost.Whole), SplitSeconds: roundMicro(s.Cost.Split),
		KVTransferSeconds: roundMicro(s.KVTransferSeconds),
	}
	if s.Prefill != nil {
		x.Prefill = s.Prefill.Backend.Name
	}
	return x
}

// find returns the description of a backend, which has one.
func (e *Explanation) find(b *backends.Backend) *BackendExplanation {
	return &e.Backends[slices.IndexFunc(e.Backends, func(x BackendExplanation) bool { return x.Name == b.Name })]
}

func roundMilli(x float64) float64 { return math.Round(x*1e3) / 1e3 }

func roundMicro(x float64) float64 { return math.Round(x*1e6) / 1e6 }
