package policy

import (
	"math/rand/v2"
	"time"
)

// dynamoLife is how long Dynamo takes a block to stay, in its approximate mode.
const dynamoLife = 120 * time.Second

// dynamo is the KV router of NVIDIA Dynamo at temperature 0. It minimises, in
// blocks of 16 tokens or just as well in tokens,
//
//	max(active prefill + prompt - overlap, 0) + active decode
//
// where active prefill is what has not shown a first event and active decode all
// that is being generated for. A long context weighs as much as an equally long
// prefill, though it costs next to nothing.
type dynamo struct {
	rng  *rand.Rand
	tree *ledger
}

func newDynamo(o options) Policy { return &dynamo{o.rng, newLedger(o.maxBlocks, losesTails)} }

func (p *dynamo) Choose(r *Request, candidates []Candidate) int {
	p.tree.expire(r.Now.Add(-dynamoLife))
	depths := p.tree.leading(r.Blocks, candidates)
	chosen := r.lowest("tokens to prefill and in use", len(candidates), p.rng, func(i int) float64 {
		c := &candidates[i]
		return max(c.UnstartedTokens+r.uncached(depths[i]), 0) + c.ContextTokens
	})
	if r.Trace == nil {
		p.tree.add(candidates[chosen].Slot, r.Blocks, r.Now)
	}
	return chosen
}

// Forget implements Forgetful.
func (p *dynamo) Forget(slot int) { p.tree.Forget(slot) }
