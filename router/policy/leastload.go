package policy

import "math/rand/v2"

// leastLoad chooses the candidate with the fewest of our requests in flight.
type leastLoad struct{ rng *rand.Rand }

func (p leastLoad) Choose(r *Request, candidates []Candidate) (index int) {
	return pickLeastLoaded(r, candidates, p.rng)
}
