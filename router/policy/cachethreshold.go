package policy

import "math/rand/v2"

// cacheThreshold is cache_aware of sglang-router and vllm-router. While loads
// are balanced, the backend that holds the most of the prompt gets it, if that
// is more than ratio of it. Otherwise the fewest in flight do; in older
// versions, while loads are balanced, the smallest tree.
//
// A load difference anywhere switches affinity off everywhere, and below that
// no queue is too long for a match.
type cacheThreshold struct {
	rng             *rand.Rand
	ratio, abs, rel float64
	smallest        bool // below ratio the smallest tree
	tree            *sglangTree
}

func newCacheThreshold(o options) Policy {
	return &cacheThreshold{
		rng: o.rng, ratio: or(o.MatchRatio, 0.3), abs: or(o.ImbalanceAbs, 64), rel: or(o.ImbalanceRatio, 1.5),
		tree: newSGLangTree(o.maxBlocks),
	}
}

func newCacheThresholdOld(o options) Policy {
	return &cacheThreshold{
		rng: o.rng, ratio: or(o.MatchRatio, 0.5), abs: or(o.ImbalanceAbs, 32), rel: or(o.ImbalanceRatio, 1.1),
		smallest: true, tree: newSGLangTree(o.maxBlocks),
	}
}

func (p *cacheThreshold) Choose(r *Request, candidates []Candidate) int {
	chosen := p.choose(r, candidates)
	if r.Trace == nil {
		p.tree.add(candidates[chosen].Slot, r)
	}
	return chosen
}

// Forget implements Forgetful.
func (p *cacheThreshold) Forget(slot int) { p.tree.Forget(slot) }

func (p *cacheThreshold) choose(r *Request, candidates []Candidate) int {
	if most, least := extremes(candidates); most-least > p.abs && most > p.rel*least {
		return fewest(r, candidates, p.rng)
	}
	if matching, depth := deepest(r, p.tree.leading(r.Blocks, candidates), p.rng); r.share(depth) > p.ratio {
		return matching
	}
	if !p.smallest {
		return fewest(r, candidates, p.rng)
	}
	return p.tree.smallest(r, candidates, p.rng)
}
