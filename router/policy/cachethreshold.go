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

func newCacheThreshold(s Settings, rng *rand.Rand, most int) *cacheThreshold {
	return &cacheThreshold{
		rng: rng, ratio: or(s.MatchRatio, 0.3), abs: or(s.ImbalanceAbs, 64), rel: or(s.ImbalanceRatio, 1.5),
		tree: newSGLangTree(most),
	}
}

func newCacheThresholdOld(s Settings, rng *rand.Rand, most int) *cacheThreshold {
	return &cacheThreshold{
		rng: rng, ratio: or(s.MatchRatio, 0.5), abs: or(s.ImbalanceAbs, 32), rel: or(s.ImbalanceRatio, 1.1),
		smallest: true, tree: newSGLangTree(most),
	}
}

func (p *cacheThreshold) Choose(r *Request, candidates []Candidate) int {
	chosen := p.choose(r, candidates)
	if r.Trial == nil {
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
