package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// leastLoad chooses the candidate with the fewest of our requests in flight.
type leastLoad struct{ rng *rand.Rand }

func (p leastLoad) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	return pickLeastLoaded(r, candidates, p.rng)
}
