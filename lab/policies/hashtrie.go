package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// hashTrie is prefixaware of vLLM's production-stack: a random one of the backends
// with the longest match, however short that is and however loaded they are. Its
// trie is not bounded; ours is, by maxTableBlocks.
type hashTrie struct {
	*sharedTable
	rng *rand.Rand
}

func newHashTrie(o options) policy.Policy {
	return &hashTrie{newSharedTable(o.maxBlocks, tailFirst), o.Rand}
}

func (p *hashTrie) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	chosen, _ := pickLongestMatch(r, p.countPrefixMatches(r.Blocks, candidates), p.rng)
	return chosen
}
