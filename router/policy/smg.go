package policy

import "math/rand/v2"

// smgTenants is among how many of those that match SMG looks for the least
// loaded.
const smgTenants = 8

// smg is cache_aware of SMG, the successor of sglang-router: the same tree, but
// imbalance rules out single backends and not affinity as such. Among up to
// eight backends that hold the most of the prompt, if that is more than ratio of
// it, the fewest in flight get it, those left out that have more than both rel
// times the mean and the mean plus abs.
type smg struct {
	rng             *rand.Rand
	ratio, abs, rel float64
	tree            *sglangTree
}

func newSMG(o options) Policy {
	return &smg{
		rng: o.rng, ratio: or(o.MatchRatio, 0.3), abs: or(o.ImbalanceAbs, 64), rel: or(o.ImbalanceRatio, 1.5),
		tree: newSGLangTree(o.maxBlocks),
	}
}

func (p *smg) Choose(r *Request, candidates []Candidate) int {
	chosen := p.matching(r, candidates)
	if chosen < 0 {
		chosen = fewest(r, candidates, p.rng)
	}
	if r.Trace == nil {
		p.tree.add(candidates[chosen].Slot, r)
	}
	return chosen
}

// Forget implements Forgetful.
func (p *smg) Forget(slot int) { p.tree.Forget(slot) }

// matching is the candidate to be chosen for what it holds; -1: none.
func (p *smg) matching(r *Request, candidates []Candidate) int {
	depths := p.tree.leading(r.Blocks, candidates)
	mean, longest := 0.0, 0
	for i := range candidates {
		mean += candidates[i].Requests / float64(len(candidates))
		longest = max(longest, depths[i])
	}
	if r.share(longest) <= p.ratio {
		return -1
	}
	r.tell("leading blocks of the prompt that it was sent before, of equals the fewest in flight", true, len(candidates), func(i int) float64 { return float64(depths[i]) })
	best, tenants := -1, 0
	for i := range candidates {
		n := candidates[i].Requests
		if depths[i] < longest || tenants == smgTenants {
			continue
		}
		tenants++
		if n > p.rel*mean && n > mean+p.abs {
			continue
		}
		if best < 0 || n < candidates[best].Requests {
			best = i
		}
	}
	return best
}
