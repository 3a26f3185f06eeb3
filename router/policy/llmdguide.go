package policy

import (
	"math"
	"math/rand/v2"
)

const (
	guideRate    = 15_928 // tokens of prefill a second that queues are divided by
	guidePenalty = 18     // seconds that a queue may be longer for the sake of a match
)

// llmdGuide is what llm-d's guide configures now: among the backends that hold
// at least ratio of the prompt, if any, the fewest uncached tokens whose first
// event has not come. All stay candidates when even the best queue of those is
// 18 s longer than the best of the others.
type llmdGuide struct {
	rng   *rand.Rand
	ratio float64
	table eppTable
}

func newLLMDGuide(o options) Policy {
	return &llmdGuide{o.rng, or(o.MatchRatio, 0.8), newEPPTable(o.maxBlocks)}
}

func (p *llmdGuide) Choose(r *Request, candidates []Candidate) int {
	matched := p.table.matched(r, candidates)
	holders, others := math.Inf(1), math.Inf(1) // the shortest queue of each
	for i := range candidates {
		if matched(i) >= p.ratio {
			holders = min(holders, candidates[i].UnstartedTokens)
		} else {
			others = min(others, candidates[i].UnstartedTokens)
		}
	}
	all := math.IsInf(holders, 1) || holders-others > guidePenalty*guideRate
	chosen := r.lowest("uncached tokens that show no first event yet, of those that hold enough of the prompt", len(candidates), p.rng, func(i int) float64 {
		if all || matched(i) >= p.ratio {
			return candidates[i].UnstartedTokens
		}
		return math.Inf(1)
	})
	if r.Trace == nil {
		p.table.placed(r, &candidates[chosen])
	}
	return chosen
}

// Forget implements Forgetful.
func (p *llmdGuide) Forget(slot int) { p.table.ledger.Forget(slot) }
