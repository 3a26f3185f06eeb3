package policy

import "math/rand/v2"

// rayAffinity is Ray Serve's PrefixCacheAffinityRouter. When one backend has
// more than abs requests in flight above another, or there is no text, it is
// power of two choices. Otherwise the longest match, if that is at least ratio of
// the prompt; below that the smallest tree. Its trees never forget, as eviction is
// off unless asked for; ours forget the oldest beyond mostEntries.
type rayAffinity struct {
	rng        *rand.Rand
	ratio, abs float64
	tree       *ledger
}

func newRay(o options) Policy {
	return &rayAffinity{
		rng: o.rng, ratio: or(o.MatchRatio, 0.1), abs: or(o.ImbalanceAbs, 10),
		tree: newLedger(o.maxBlocks, losesTails),
	}
}

func (p *rayAffinity) Choose(r *Request, candidates []Candidate) int {
	chosen := p.choose(r, candidates)
	if r.Trace == nil {
		p.tree.add(candidates[chosen].Slot, r.Blocks, r.Now)
	}
	return chosen
}

// Forget implements Forgetful.
func (p *rayAffinity) Forget(slot int) { p.tree.Forget(slot) }

func (p *rayAffinity) choose(r *Request, candidates []Candidate) int {
	if most, least := extremes(candidates); most-least > p.abs || len(r.Blocks) == 0 {
		return powerOfTwo{p.rng}.Choose(r, candidates)
	}
	if matching, depth := deepest(r, p.tree.leading(r.Blocks, candidates), p.rng); r.share(depth) >= p.ratio {
		return matching
	}
	return p.tree.smallest(r, candidates, p.rng)
}
