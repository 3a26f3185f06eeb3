package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// rayAffinity is Ray Serve's PrefixCacheAffinityRouter. When one backend has more
// than abs requests in flight above another, or there is no text, it is power of
// two choices. Otherwise the longest match is chosen if that is at least ratio of
// the prompt, else the smallest tree. Its trees are not bounded unless configured;
// ours are, by maxTableBlocks.
type rayAffinity struct {
	*prefixTable
	rng        *rand.Rand
	ratio, abs float64
}

func newRay(o options) policy.Policy {
	return &rayAffinity{newPrefixTable(o.maxBlocks, tailFirst), o.Rand, orDefault(o.MatchRatio, 0.1), orDefault(o.ImbalanceAbs, 10)}
}

func (p *rayAffinity) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	if least, most := loadRange(candidates); most-least > p.abs || len(r.Blocks) == 0 {
		return powerOfTwo{p.rng}.Choose(r, candidates)
	}
	if chosen, blocks := pickLongestMatch(r, p.countPrefixMatches(r.Blocks, candidates), p.rng); matchShare(r, blocks) >= p.ratio {
		return chosen
	}
	return p.pickFewestBlocks(r, candidates, p.rng)
}
