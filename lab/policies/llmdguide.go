package policies

import (
	"math"
	"math/rand/v2"

	"warmroute/router/policy"
)

const (
	guidePrefillRate  = 15_928 // tokens a second that queues are divided by
	guideQueuePenalty = 18     // seconds that a queue may be longer for a match
)

// llmdGuide is what llm-d's guide configures: among the backends whose match
// reaches the threshold, if any, the fewest uncached tokens without a first
// event. All backends stay candidates when the shortest such queue is 18 s longer
// than the shortest of the others.
type llmdGuide struct {
	eppTable
	rng   *rand.Rand
	match matchThreshold
}

func newLLMDGuide(o options) policy.Policy {
	return &llmdGuide{newEPPTable(o.maxBlocks), o.Rand, newMatchThreshold(o.Settings, 0.8)}
}

func (p *llmdGuide) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	matched, blocks := p.countMatches(r, candidates)
	isMatch := func(i int) bool {
		return float64(matched[i])/blocks >= p.match.ratio && matchedTokens(r, matched[i]) >= p.match.tokens
	}
	matching, others := math.Inf(1), math.Inf(1) // the shortest queue of each
	for i := range candidates {
		if isMatch(i) {
			matching = min(matching, candidates[i].UnstartedTokens)
		} else {
			others = min(others, candidates[i].UnstartedTokens)
		}
	}
	all := math.IsInf(matching, 1) || matching-others > guideQueuePenalty*guidePrefillRate
	return pickLowest(r, "uncached tokens without a first event, of those that match enough of the prompt", len(candidates), p.rng,
		func(i int) float64 {
			if all || isMatch(i) {
				return candidates[i].UnstartedTokens
			}
			return math.Inf(1)
		})
}
