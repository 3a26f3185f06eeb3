package policy

import "math/rand/v2"

// leastLoad takes the candidate with the fewest requests in flight by our own
// count, a random one among equals.
type leastLoad struct{ rng *rand.Rand }

func (l leastLoad) Choose(_ *Request, candidates []Candidate) int {
	best, ties := 0, 1
	for i := 1; i < len(candidates); i++ {
		switch a, b := candidates[i].Requests, candidates[best].Requests; {
		case a < b:
			best, ties = i, 1
		case a == b:
			ties++
			if l.rng.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}
