package policies

import (
	"cmp"
	"math/rand/v2"

	"warmroute/router/policy"
)

// session keeps a session on one backend by rendezvous hashing, whatever the load
// there. A request without a session is hashed by the beginning of its first message or
// of its prompt; without any of these, to the least loaded.
type session struct{ rng *rand.Rand }

func (p session) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	key := cmp.Or(r.Session, promptStartHash(r))
	if key == 0 {
		return pickLeastLoaded(r, candidates, p.rng)
	}
	criterion := "rank in a consistent hash of the session"
	if r.Session == 0 {
		criterion = "rank in a consistent hash of the prompt's beginning"
	}
	traceCriterion(r, criterion)
	return highestRank(key, candidates, -1)
}
