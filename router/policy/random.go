package policy

import "math/rand/v2"

// random takes any candidate.
type random struct{ rng *rand.Rand }

func (r random) Choose(_ *Request, candidates []Candidate) int {
	return r.rng.IntN(len(candidates))
}
