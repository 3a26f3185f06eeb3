package policy

import (
	"math"
	"math/rand/v2"
)

// pickLowest returns which of n candidates has the lowest cost, a random one among
// equals, and records the costs in the request's Trace.
func (r *Request) pickLowest(criterion string, n int, rng *rand.Rand, cost func(i int) float64) int {
	r.traceScores(criterion, false, n, cost)
	return lowest(n, rng, cost)
}

// pickHighest is pickLowest for the highest score.
func (r *Request) pickHighest(criterion string, n int, rng *rand.Rand, score func(i int) float64) int {
	r.traceScores(criterion, true, n, score)
	return lowest(n, rng, func(i int) float64 { return -score(i) })
}

func lowest(n int, rng *rand.Rand, cost func(i int) float64) int {
	best, least, ties := 0, math.Inf(1), 0
	for i := range n {
		switch c := cost(i); {
		case c < least:
			best, least, ties = i, c, 1
		case c == least:
			ties++
			if rng.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

// leastLoaded picks the candidate with the fewest requests in flight.
func leastLoaded(r *Request, candidates []Candidate, rng *rand.Rand) int {
	return r.pickLowest("requests in flight", len(candidates), rng, func(i int) float64 { return candidates[i].Requests })
}

// longestMatch picks a candidate with the most matched blocks, and returns their
// number.
func longestMatch(r *Request, matched []int, rng *rand.Rand) (chosen, blocks int) {
	chosen = r.pickHighest("leading blocks of the prompt sent to it before", len(matched), rng, func(i int) float64 { return float64(matched[i]) })
	return chosen, matched[chosen]
}

// loadRange returns the fewest and the most requests in flight on a candidate.
func loadRange(candidates []Candidate) (least, most float64) {
	least, most = candidates[0].Requests, candidates[0].Requests
	for i := range candidates {
		least, most = min(least, candidates[i].Requests), max(most, candidates[i].Requests)
	}
	return least, most
}

func orDefault(setting, standard float64) float64 {
	if setting == 0 {
		return standard
	}
	return setting
}

// matchShare returns what share of the prompt so many blocks are.
func (r *Request) matchShare(blocks int) float64 {
	tokens := r.length()
	if tokens <= 0 {
		return 0
	}
	return float64(blocks) * r.BlockTokens / tokens
}

// length returns the prompt's length in tokens.
func (r *Request) length() float64 {
	return max(r.PromptTokens, float64(len(r.Blocks))*r.BlockTokens)
}

// toBlocks returns how many blocks so many tokens are, at least one.
func (r *Request) toBlocks(tokens float64) int {
	return max(1, int(tokens/max(1, r.BlockTokens)))
}

// uncached returns how many tokens of the prompt follow so many blocks.
func (r *Request) uncached(blocks int) float64 {
	return r.length() - float64(blocks)*r.BlockTokens
}
