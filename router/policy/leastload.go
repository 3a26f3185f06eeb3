package policy

import "math/rand/v2"

// leastLoad takes the candidate with the fewest requests in flight by our own
// count, a random one among equals.
type leastLoad struct{ rng *rand.Rand }

func (l leastLoad) Choose(r *Request, candidates []Candidate) int {
	return fewest(r, candidates, l.rng)
}
