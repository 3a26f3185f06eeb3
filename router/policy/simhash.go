package policy

// simHash is what production-stack tried before its trie: a locality-sensitive
// hash of the whole prompt, by which it has a place on a ring, whatever the load
// there. Prompts that are alike lie close together, so a popular one brings all
// its kin to one backend.
type simHash struct{ ring ring }

func (p *simHash) Choose(r *Request, candidates []Candidate) int {
	r.tell("its place on a hash ring, behind that of the prompt", false, 0, nil)
	for i := range p.ring.clockwise(fingerprint(r), candidates) {
		return i
	}
	return 0
}

// fingerprint has each of its bits as most blocks' hashes have theirs.
func fingerprint(r *Request) uint64 {
	var ones [64]int
	for _, b := range r.Blocks {
		h := rendezvous(uint64(b), 0)
		for bit := range ones {
			ones[bit] += int(h >> bit & 1)
		}
	}
	var out uint64
	for bit, n := range ones {
		if 2*n > len(r.Blocks) {
			out |= 1 << bit
		}
	}
	return out
}
