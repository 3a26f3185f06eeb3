package policies

import (
	"math/rand/v2"
	"time"

	"warmroute/router/policy"
)

// maxDynamoAge is how long Dynamo takes a block to stay, in its approximate mode.
const maxDynamoAge = 120 * time.Second

// dynamo is the KV router of NVIDIA Dynamo at temperature 0. It minimizes, in
// blocks of 16 tokens or, equally, in tokens,
//
//	max(active prefill + prompt - overlap, 0) + active decode
//
// where active prefill is what has not shown a first event and active decode the
// context of all sequences. A long context weighs as much as an equally long
// prefill, though it costs next to nothing.
type dynamo struct {
	*prefixTable
	rng *rand.Rand
}

func newDynamo(o options) policy.Policy {
	return &dynamo{newPrefixTable(o.maxBlocks, tailFirst), o.Rand}
}

func (p *dynamo) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	matched := p.countPrefixMatchesSince(r.Blocks, candidates, r.Now.Add(-maxDynamoAge))
	return pickLowest(r, "tokens to prefill and in use", len(candidates), p.rng, func(i int) float64 {
		c := &candidates[i]
		return max(c.UnstartedTokens+uncachedTokens(r, matched[i]), 0) + c.KVTokens
	})
}

// RecordSent implements Recorder.
func (p *dynamo) RecordSent(r *policy.Request, c *policy.Candidate) {
	p.evictUnused(r.Now.Add(-maxDynamoAge))
	p.prefixTable.RecordSent(r, c)
}
