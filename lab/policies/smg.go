package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// maxSMGMatches is among how many of the longest matches SMG looks for the least
// loaded.
const maxSMGMatches = 8

// smg is cache_aware of SMG, the successor of sglang-router: the same tree, but
// imbalance excludes single backends and not affinity as such. Among up to eight
// backends with the longest match, if that exceeds the threshold, the
// least loaded is chosen, without those that have more in flight than both rel
// times the mean and the mean plus abs.
type smg struct {
	*sglangTree
	rng      *rand.Rand
	match    matchThreshold
	abs, rel float64
}

func newSMG(o options) policy.Policy {
	return &smg{
		sglangTree: newSGLangTree(o.maxBlocks), rng: o.Rand,
		match: newMatchThreshold(o.Settings, 0.3), abs: orDefault(o.ImbalanceAbs, 64), rel: orDefault(o.ImbalanceRatio, 1.5),
	}
}

func (p *smg) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	chosen := p.pickMatch(r, candidates)
	if chosen < 0 {
		chosen = pickLeastLoaded(r, candidates, p.rng)
	}
	return chosen
}

// pickMatch returns the candidate to choose for its match; -1 if there is none.
func (p *smg) pickMatch(r *policy.Request, candidates []policy.Candidate) (index int) {
	matched := p.countPrefixMatches(r.Blocks, candidates)
	mean, longest := 0.0, 0
	for i := range candidates {
		mean += candidates[i].Requests / float64(len(candidates))
		longest = max(longest, matched[i])
	}
	if !p.match.isExceeded(r, longest) {
		return -1
	}
	traceScores(r, "leading blocks of the prompt sent to it before, the least loaded among equals", true, len(candidates),
		func(i int) float64 { return float64(matched[i]) })
	best, seen := -1, 0
	for i := range candidates {
		n := candidates[i].Requests
		if matched[i] < longest || seen == maxSMGMatches {
			continue
		}
		seen++
		if n > p.rel*mean && n > mean+p.abs {
			continue
		}
		if best < 0 || n < candidates[best].Requests {
			best = i
		}
	}
	return best
}
