package policies

import "warmroute/router/policy"

// simHashRing is what production-stack tried before its trie: a locality-sensitive
// hash of the whole prompt is its place on a ring, whatever the load there.
// Similar prompts lie close together, so a popular one brings all its variants to
// one backend.
type simHashRing struct{ ring ring }

func (p *simHashRing) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	traceCriterion(r, "position on a hash ring after the prompt's hash")
	for i := range p.ring.clockwise(similarityHash(r), candidates) {
		return i
	}
	return 0
}

// similarityHash sets each bit that is set in the hashes of most blocks.
func similarityHash(r *policy.Request) uint64 {
	var ones [64]int
	for _, b := range r.Blocks {
		h := policy.RendezvousRank(uint64(b), 0)
		for bit := range ones {
			ones[bit] += int(h >> bit & 1)
		}
	}
	var hash uint64
	for bit, n := range ones {
		if 2*n > len(r.Blocks) {
			hash |= 1 << bit
		}
	}
	return hash
}
