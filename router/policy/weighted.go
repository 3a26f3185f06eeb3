package policy

import "math/rand/v2"

// weighted is the default of the Gateway API's endpoint picker (EPP): the
// highest of
//
//	3·matched + 2·(1 - kv usage) + 2·(longest queue - queue) / (longest - shortest)
//
// where equal queues all score 1. Queue and KV usage are the replica's word, a
// poll old: a burst between two polls sees the same backend best.
type weighted struct {
	rng   *rand.Rand
	table eppTable
}

func newWeighted(o options) Policy { return &weighted{o.rng, newEPPTable(o.maxBlocks)} }

func (p *weighted) Choose(r *Request, candidates []Candidate) int {
	matched := p.table.matched(r, candidates)
	longest, shortest := candidates[0].Waiting, candidates[0].Waiting
	for i := range candidates {
		longest, shortest = max(longest, candidates[i].Waiting), min(shortest, candidates[i].Waiting)
	}
	chosen := r.highest("weighted sum of match, free KV cache and queue", len(candidates), p.rng, func(i int) float64 {
		queue := 1.0
		if longest > shortest {
			queue = (longest - candidates[i].Waiting) / (longest - shortest)
		}
		return 3*matched(i) + 2*(1-candidates[i].KVUsage) + 2*queue
	})
	if r.Trace == nil {
		p.table.placed(r, &candidates[chosen])
	}
	return chosen
}

// Forget implements Forgetful.
func (p *weighted) Forget(slot int) { p.table.ledger.Forget(slot) }
