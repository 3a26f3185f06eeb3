package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// random chooses any candidate.
type random struct{ rng *rand.Rand }

func (p random) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	traceCriterion(r, "random choice")
	return p.rng.IntN(len(candidates))
}
