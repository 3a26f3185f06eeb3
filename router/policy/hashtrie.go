package policy

import "math/rand/v2"

// hashTrie is prefixaware of vLLM's production-stack: a random one of those that
// hold the most of the prompt, however little that is and however loaded they
// are. Its trie never forgets; ours forgets the oldest beyond mostEntries.
type hashTrie struct {
	rng  *rand.Rand
	trie *trie
}

func newHashTrie(o options) Policy {
	return &hashTrie{o.rng, newTrie(o.maxBlocks, losesTails)}
}

func (p *hashTrie) Choose(r *Request, candidates []Candidate) int {
	chosen, _ := deepest(r, p.trie.leading(r.Blocks, candidates), p.rng)
	if r.Trace == nil {
		p.trie.add(candidates[chosen].Slot, r.Blocks, r.Now)
	}
	return chosen
}

// Forget implements Forgetful.
func (p *hashTrie) Forget(slot int) { p.trie.Forget(slot) }
