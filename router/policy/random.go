package policy

import "math/rand/v2"

// random takes any candidate.
type random struct{ rng *rand.Rand }

func (r random) Choose(asked *Request, candidates []Candidate) int {
	asked.tell("chance", false, 0, nil)
	return r.rng.IntN(len(candidates))
}
