package policies

import "warmroute/router/policy"

// chwbl is KubeAI's PrefixHash, consistent hashing with bounded loads. The key is
// the beginning of the first user message. The first backend clockwise of it on
// the ring is chosen whose requests in flight are at most loadFactor times what
// the mean will be with this request.
type chwbl struct {
	loadFactor float64
	ring       ring
}

func newCHWBL(o policy.Options) policy.Policy {
	return &chwbl{loadFactor: orDefault(o.LoadFactor, 1.25)}
}

func (p *chwbl) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	total := 0.0
	for i := range candidates {
		total += candidates[i].Requests
	}
	bound := (total + 1) / float64(len(candidates)) * p.loadFactor
	traceCriterion(r, "position on a hash ring after the hash of the prompt's beginning, with bounded load")
	first := -1
	for i := range p.ring.clockwise(policy.RendezvousRank(promptStartHash(r), 0), candidates) {
		if first < 0 {
			first = i
		}
		if total == 0 || candidates[i].Requests <= bound {
			return i
		}
	}
	return first
}
