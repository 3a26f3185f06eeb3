package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// powerOfTwo draws two candidates and chooses the one with fewer requests in
// flight, the first drawn among equals.
type powerOfTwo struct{ rng *rand.Rand }

func (p powerOfTwo) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	traceScores(r, "requests in flight, of two drawn at random", false, len(candidates), func(i int) float64 { return candidates[i].Requests })
	if len(candidates) == 1 {
		return 0
	}
	a, b := p.rng.IntN(len(candidates)), p.rng.IntN(len(candidates)-1)
	if b >= a {
		b++
	}
	if candidates[b].Requests < candidates[a].Requests {
		return b
	}
	return a
}
