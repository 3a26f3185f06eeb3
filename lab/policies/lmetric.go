package policies

import (
	"math/rand/v2"

	"warmroute/router/policy"
)

// lMetric is Alibaba's LMetric (arXiv 2603.15202): the lowest product of the
// tokens to prefill, queued ones included, and the batch size with this request.
type lMetric struct{ rng *rand.Rand }

func (p lMetric) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	return pickLowest(r, "tokens to prefill times requests there", len(candidates), p.rng, func(i int) float64 {
		c := &candidates[i]
		return (c.UnstartedTokens + c.UncachedTokens) * (c.InFlight + 1)
	})
}
