package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// skyWalker is the selective pushing of SkyWalker (arXiv 2505.24095): a request goes only to
// a backend that has nothing to prefill, and waits in the router until there is one
// (Definition.WaitsForIdle). Of these the one with the longest match is chosen, the least
// loaded among equals.
type skyWalker struct{ rng *rand.Rand }

func (p skyWalker) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	idle := func(i int) bool { return candidates[i].QueuedSeconds == 0 }
	anyIdle, longest := false, 0.0
	for i := range candidates {
		anyIdle = anyIdle || idle(i)
	}
	for i := range candidates {
		if idle(i) || !anyIdle {
			longest = max(longest, candidates[i].MatchedTokens)
		}
	}
	const excluded = 1e12 // requests, more than any backend has
	return pickLowest(r, "requests in flight, of the longest matches that have nothing to prefill", len(candidates), p.rng,
		func(i int) float64 {
			if anyIdle && !idle(i) || candidates[i].MatchedTokens < longest {
				return excluded + candidates[i].Requests
			}
			return candidates[i].Requests
		})
}
