package policy

import (
	"math"
	"math/rand/v2"
)

// lowest is the candidate, of n, of the lowest cost, a random one among equals.
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

// fewest is the candidate with the fewest requests in flight.
func fewest(r *Request, candidates []Candidate, rng *rand.Rand) int {
	return r.lowest("requests in flight", len(candidates), rng, func(i int) float64 { return candidates[i].Requests })
}

// extremes are the most and the least requests that a candidate has in flight.
func extremes(candidates []Candidate) (most, least float64) {
	most, least = candidates[0].Requests, candidates[0].Requests
	for i := range candidates {
		most, least = max(most, candidates[i].Requests), min(least, candidates[i].Requests)
	}
	return most, least
}

// deepest is one of the candidates of the largest depth, and that depth.
func deepest(r *Request, depths []int, rng *rand.Rand) (place, depth int) {
	place = r.highest("leading blocks of the prompt that it was sent before", len(depths), rng, func(i int) float64 { return float64(depths[i]) })
	return place, depths[place]
}

// or is a setting, or its default where it is not set.
func or(setting, standard float64) float64 {
	if setting == 0 {
		return standard
	}
	return setting
}

// share is what part of the prompt so many blocks are.
func (r *Request) share(blocks int) float64 {
	total := r.length()
	if total <= 0 {
		return 0
	}
	return float64(blocks) * r.BlockTokens / total
}

// length is that of the prompt in tokens.
func (r *Request) length() float64 {
	return max(r.PromptTokens, float64(len(r.Blocks))*r.BlockTokens)
}

// blocksIn is how many blocks so many tokens are, at least one.
func (r *Request) blocksIn(tokens float64) int {
	return max(1, int(tokens/max(1, r.BlockTokens)))
}

// uncached is what of the prompt follows so many blocks, in tokens.
func (r *Request) uncached(blocks int) float64 {
	return r.length() - float64(blocks)*r.BlockTokens
}
