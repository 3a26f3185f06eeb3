package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// session keeps a conversation on one backend by rendezvous hashing, whatever the load
// there. A request without a conversation is hashed by the client's address, if
// byClient, else by the beginning of its first message or of its prompt; without any of
// these, to the least loaded.
type session struct {
	rng      *rand.Rand
	byClient bool
}

func (p session) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	var key uint64
	switch {
	case r.Conversation != 0:
		key = r.Conversation
		traceCriterion(r, "rank in a consistent hash of the conversation")
	case p.byClient && r.Client != 0:
		key = r.Client
		traceCriterion(r, "rank in a consistent hash of the client's address")
	default:
		if key = promptStartHash(r); key == 0 {
			return pickLeastLoaded(r, candidates, p.rng)
		}
		traceCriterion(r, "rank in a consistent hash of the prompt's beginning")
	}
	return highestRank(key, candidates, -1)
}
