package policy

import "math/rand/v2"

// lMetric is Alibaba's (arXiv 2603.15202): the lowest of the tokens to prefill,
// those queued included, times the batch that the request would be part of. It
// has no knob.
type lMetric struct{ rng *rand.Rand }

func (p lMetric) Choose(r *Request, candidates []Candidate) int {
	return r.lowest("tokens to prefill times requests there", len(candidates), p.rng, func(i int) float64 {
		c := &candidates[i]
		return (c.UnstartedTokens + c.UncachedTokens) * (c.InFlight + 1)
	})
}
