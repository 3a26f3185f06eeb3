package policy

import "math/rand/v2"

// random chooses any candidate.
type random struct{ rng *rand.Rand }

func (p random) Choose(r *Request, candidates []Candidate) (index int) {
	r.traceCriterion("random choice")
	return p.rng.IntN(len(candidates))
}
