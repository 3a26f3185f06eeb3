package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// weighted is the default of the Gateway API's endpoint picker (EPP): the highest
//
//	3·match + 2·(1 - KV usage) + 2·(longest queue - queue) / (longest - shortest)
//
// where equal queues all score 1. Queue and KV usage are as of the last poll: a
// burst between two polls sees the same backend as best.
type weighted struct {
	eppTable
	rng *rand.Rand
}

func newWeighted(o options) policy.Policy { return &weighted{newEPPTable(o.maxBlocks), o.Rand} }

func (p *weighted) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	matched, blocks := p.countMatches(r, candidates)
	longest, shortest := candidates[0].Waiting, candidates[0].Waiting
	for i := range candidates {
		longest, shortest = max(longest, candidates[i].Waiting), min(shortest, candidates[i].Waiting)
	}
	return pickHighest(r, "weighted sum of match, free KV cache and queue", len(candidates), p.rng, func(i int) float64 {
		queue := 1.0
		if longest > shortest {
			queue = (longest - candidates[i].Waiting) / (longest - shortest)
		}
		return 3*(float64(matched[i])/blocks) + 2*(1-candidates[i].KVUsage) + 2*queue
	})
}
