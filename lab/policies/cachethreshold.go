package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// cacheThreshold is cache_aware of sglang-router and vllm-router. While loads are
// balanced, the backend with the longest match is chosen if that exceeds
// the threshold. Otherwise the least loaded is; in older versions, while
// loads are balanced, the one with the smallest tree.
//
// An imbalance between any two backends switches affinity off for all, and below
// that no queue is too long for a match.
type cacheThreshold struct {
	*sglangTree
	rng        *rand.Rand
	match      matchThreshold
	abs, rel   float64
	toSmallest bool // without a match, the smallest tree is chosen
}

func newCacheThreshold(o options) policy.Policy {
	return &cacheThreshold{
		sglangTree: newSGLangTree(o.maxBlocks), rng: o.Rand,
		match: newMatchThreshold(o.Settings, 0.3), abs: orDefault(o.ImbalanceAbs, 64), rel: orDefault(o.ImbalanceRatio, 1.5),
	}
}

func newCacheThresholdOld(o options) policy.Policy {
	return &cacheThreshold{
		sglangTree: newSGLangTree(o.maxBlocks), rng: o.Rand,
		match: newMatchThreshold(o.Settings, 0.5), abs: orDefault(o.ImbalanceAbs, 32), rel: orDefault(o.ImbalanceRatio, 1.1),
		toSmallest: true,
	}
}

func (p *cacheThreshold) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	if least, most := loadRange(candidates); most-least > p.abs && most > p.rel*least {
		return pickLeastLoaded(r, candidates, p.rng)
	}
	if chosen, blocks := pickLongestMatch(r, p.countPrefixMatches(r.Blocks, candidates), p.rng); p.match.isExceeded(r, blocks) {
		return chosen
	}
	if !p.toSmallest {
		return pickLeastLoaded(r, candidates, p.rng)
	}
	return p.pickFewestBlocks(r, candidates, p.rng)
}
