package router

import (
	"math"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/router/policy"
)

// Explanation is what Pick would do with a request, and why. Tokens are about.
type Explanation struct {
	Policy       string `json:"policy"`
	Model        string `json:"model"` // its ID in the catalog
	PromptTokens int    `json:"prompt_tokens"`
	Blocks       int    `json:"blocks"` // full ones of the prompt, by which matches are counted
	BlockBytes   int    `json:"block_bytes"`

	Choice string `json:"choice"` // backend; "" when none may take it now
	Reason string `json:"reason"` // as in Decision; "" when Choice is
	// Held says why it would wait and not be sent at once, Refused why it would be
	// sent nowhere; "" when it would not.
	Queued  string `json:"queued,omitempty"`
	Refused string `json:"refused,omitempty"`
	Waiting int    `json:"waiting"` // requests in the admission queue

	Backends []BackendExplanation `json:"backends"` // all in the fleet

	ScoreIs      string  `json:"score_is,omitempty"` // what decided, in words
	HighestWins  bool    `json:"highest_wins,omitempty"`
	Kappa        float64 `json:"kappa"`         // κ, under the policy prefix
	AnswerTokens float64 `json:"answer_tokens"` // L̂

	Sentence string `json:"sentence"`
}

// BackendExplanation is how one backend stands to a request.
type BackendExplanation struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Candidate bool   `json:"candidate"`
	WhyNot    string `json:"why_not,omitempty"` // of one that is no candidate
	Queued    string `json:"queued,omitempty"`  // why it could not start the request soon
	Breaker   string `json:"breaker"`
	Stalled   bool   `json:"stalled,omitempty"`

	MatchedBlocks int     `json:"matched_blocks"`
	MatchedTokens float64 `json:"matched_tokens"`
	Uncached      float64 `json:"uncached_tokens"` // u
	Pending       float64 `json:"pending_tokens"`  // W
	Loading       float64 `json:"loading_tokens"`  // of an adapter that it has not
	InFlight      float64 `json:"in_flight"`       // n: sequences on it, other clients' included
	Rate          float64 `json:"tokens_per_second"`
	Weight        float64 `json:"weight"`
	KVUsage       float64 `json:"kv_usage"` // by its last scrape; -1: not known
	FirstToken    float64 `json:"seconds_to_first_token"`

	Score *float64      `json:"score"`                // in Explanation.ScoreIs; nil: it has none
	Terms []policy.Term `json:"cost_terms,omitempty"` // of the policy prefix, whose sum over Weight is the score

	slot int // while one backend takes over from another, both may have its name
}

// Explain tells what Pick would answer at this moment, those that were tried left
// out, by the code that decides. Nothing is reserved, used, learned or remembered
// by it; and where chance decides, Pick may draw another backend.
func (r *Router) Explain(req Request, tried ...*backends.Backend) Explanation {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	now := r.now()
	req.Backends = r.serving(&req)
	r.depth = r.matched
	r.index.Match(req.Blocks, r.depth)
	e := Explanation{
		Policy: r.policyDef.Name, Model: req.CatalogID, PromptTokens: int(r.tokens(&req)), Blocks: len(req.Blocks), BlockBytes: r.blockBytes,
		Waiting: r.queue.count,
	}
	for _, b := range r.fleet {
		if b != nil {
			e.Backends = append(e.Backends, r.explainBackend(&req, tried, b, now))
		}
	}
	held, err := "", r.gather(&req, tried, now)
	if err == nil {
		held = r.try(&e, &req, now)
	}
	e.Queued, e.Refused = r.fate(&req, tried, held, err)
	e.Sentence = e.sentence()
	return e
}

// try lets the policy choose, and notes how it does. It returns why the chosen
// backend could not start the request soon.
func (r *Router) try(e *Explanation, req *Request, now time.Time) (held string) {
	var t policy.Trace
	r.pose(req, now)
	r.asked.Trace = &t
	chosen := r.policy.Choose(&r.asked, r.candidates)
	e.Choice, e.Reason = r.slots[chosen].Name, r.reason(req, chosen)
	e.ScoreIs, e.HighestWins, e.Kappa, e.AnswerTokens = t.Criterion, t.HighestWins, thousandths(t.Kappa), thousandths(r.asked.MeanAnswerTokens)
	for i, b := range r.slots {
		at := slices.IndexFunc(e.Backends, func(x BackendExplanation) bool { return x.slot == b.Slot })
		x := &e.Backends[at]
		x.Candidate, x.WhyNot = true, ""
		if r.late && !req.NoEngine {
			x.Queued = r.lacks(req, i, now).String()
		}
		if i == chosen {
			held = x.Queued
		}
		if i < len(t.Scores) && !math.IsInf(t.Scores[i], 0) {
			score := thousandths(t.Scores[i])
			x.Score = &score
		}
		if i < len(t.Terms) {
			x.Terms = t.Terms[i]
			for k := range x.Terms {
				x.Terms[k].Tokens = thousandths(x.Terms[k].Tokens)
			}
		}
	}
	return held
}

// fate says why a request would wait, or why it would be refused, in the order in
// which tryNow looks. full is why the chosen backend could not start it soon, err
// why there is none.
func (r *Router) fate(req *Request, tried []*backends.Backend, full string, err error) (held, refused string) {
	switch {
	case len(tried) > 0 && !r.mayYet(req, tried):
		return "", "every backend that serves its model was tried"
	case r.queues(req):
		held = "others wait already, and its turn is decided among them"
	case err == nil && req.NoEngine:
		return "", ""
	case err != nil && !r.mayWait(req):
		return "", err.Error()
	case err != nil:
		held = err.Error()
	default:
		held = full
	}
	if held != "" && r.holdsAll(req) {
		return "", ErrQueueFull.Error()
	}
	return held, ""
}

// explainBackend tells how b stands. Why it is no candidate, if it is none, is told
// as if others were.
func (r *Router) explainBackend(req *Request, tried []*backends.Backend, b *backends.Backend, now time.Time) BackendExplanation {
	s := r.stands(req, tried, b, now)
	var c policy.Candidate
	r.describe(&c, req, b, &s, r.texts.bytesPerToken(req.Model), now)
	x := BackendExplanation{
		slot: b.Slot, Name: b.Name, State: b.State().String(),
		Breaker: r.progress[b.Slot].breaker.state(now).String(), Stalled: r.progress[b.Slot].stalled,
		MatchedBlocks: r.depth[b.Slot], MatchedTokens: thousandths(c.MatchedTokens), Uncached: thousandths(c.UncachedTokens),
		Pending: thousandths(c.QueuedTokens), Loading: c.AdapterTokens, InFlight: thousandths(c.InFlight),
		Rate: thousandths(c.PrefillRate), Weight: c.Weight, KVUsage: -1,
		FirstToken: thousandths((c.QueuedTokens + c.AdapterTokens + c.UncachedTokens) / c.PrefillRate),
	}
	if s.load != nil && s.load.KVKnown {
		x.KVUsage = thousandths(s.load.KVCacheUsage)
	}
	x.WhyNot = r.whyNot(req, tried, b, s.rank, now)
	return x
}

// whyNot says what speaks against b; of one against which nothing does, why it
// may be left out all the same.
func (r *Router) whyNot(req *Request, tried []*backends.Backend, b *backends.Backend, rank trouble, now time.Time) string {
	switch {
	case !slices.Contains(req.Backends, b):
		return notListed
	case !r.available(b, tried):
		return r.absent(b, tried).String()
	case isFull(b, req.sequences()):
		return hasItsMost
	case r.needsHeadroom(req, now) && !r.mayStartBatch(b.Slot, new(r.headroomOf(req.Backends, now)), now):
		return keptFree
	case rank == failing && r.progress[b.Slot].full(now):
		return queueFull
	}
	return rank.String()
}

func thousandths(x float64) float64 { return math.Round(x*1000) / 1000 }
