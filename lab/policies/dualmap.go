package policies

import (
	"cmp"
	"math/rand/v2"

	"warmroute/router/policy"
)

// dualMap is DualMap (arXiv 2602.06502): two consistent hashes of the prompt's beginning
// give two candidates. The one with the longer match is chosen while it is predicted to
// meet the promised TTFT, which is that of sMetric; otherwise the one that is predicted to
// be faster. The paper also moves requests that wait at a replica, which no router
// can do for a vLLM server.
type dualMap struct{ rng *rand.Rand }

func (p dualMap) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	key := cmp.Or(promptStartHash(r), r.Conversation)
	if key == 0 {
		return pickLeastLoaded(r, candidates, p.rng)
	}
	first := highestRank(key, candidates, -1)
	if len(candidates) == 1 {
		traceCriterion(r, "the only one")
		return first
	}
	second := highestRank(policy.RendezvousRank(key, oddGolden), candidates, first)
	a, b := &candidates[first], &candidates[second]
	if b.MatchedTokens > a.MatchedTokens {
		first, second, a, b = second, first, b, a
	}
	traceCriterion(r, "longer match of the two backends that the prompt's hash names, if it meets the promised TTFT")
	if meetsPromisedTTFT(r, a, tokensToPrefill(a)) || tokensToPrefill(a)/a.PrefillRate <= tokensToPrefill(b)/b.PrefillRate {
		return first
	}
	return second
}

// highestRank returns the candidate that ranks highest for a key, other than one.
func highestRank(key uint64, candidates []policy.Candidate, without int) (index int) {
	best := -1
	for i := range candidates {
		if i != without && (best < 0 || policy.RendezvousRank(key, candidates[i].NameHash) > policy.RendezvousRank(key,
			candidates[best].NameHash)) {
			best = i
		}
	}
	return best
}
