package policies

import (
	"cmp"
	"math"
	"math/rand/v2"

	"warmroute/router/policy"
)

// pickLowest returns which of n candidates has the lowest cost, a random one among
// equals, and records the costs in the request's Trace.
func pickLowest(r *policy.Request, criterion string, n int, rng *rand.Rand, cost func(i int) float64) (index int) {
	traceScores(r, criterion, false, n, cost)
	return pickLowestUntraced(n, rng, cost)
}

// pickHighest is pickLowest for the highest score.
func pickHighest(r *policy.Request, criterion string, n int, rng *rand.Rand, score func(i int) float64) (index int) {
	traceScores(r, criterion, true, n, score)
	return pickLowestUntraced(n, rng, func(i int) float64 { return -score(i) })
}

// pickLowestUntraced is pickLowest without a record in a Trace.
func pickLowestUntraced(n int, rng *rand.Rand, cost func(i int) float64) (index int) {
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

// pickLeastLoaded picks the candidate with the fewest requests in flight.
func pickLeastLoaded(r *policy.Request, candidates []policy.Candidate, rng *rand.Rand) (index int) {
	return pickLowest(r, "requests in flight", len(candidates), rng, func(i int) float64 { return candidates[i].Requests })
}

// pickLongestMatch picks a candidate with the most matched blocks, and returns their
// number.
func pickLongestMatch(r *policy.Request, matched []int, rng *rand.Rand) (index, blocks int) {
	index = pickHighest(r, "leading blocks of the prompt sent to it before", len(matched), rng, func(i int) float64 {
		return float64(matched[i])
	})
	return index, matched[index]
}

// loadRange returns the fewest and the most requests in flight on a candidate.
func loadRange(candidates []policy.Candidate) (least, most float64) {
	least, most = candidates[0].Requests, candidates[0].Requests
	for i := range candidates {
		least, most = min(least, candidates[i].Requests), max(most, candidates[i].Requests)
	}
	return least, most
}

func orDefault(setting, fallback float64) float64 {
	if setting == 0 {
		return fallback
	}
	return setting
}

// matchThreshold is what must match of a prompt for a backend to be chosen for it. A few tokens of a short
// prompt exceed a ratio, though they save little: hence the minimum in tokens.
type matchThreshold struct {
	ratio  float64 // share of the prompt
	tokens float64 // 0: no minimum
}

// newMatchThreshold returns the threshold that the settings give, with the policy's own ratio unless they have one.
func newMatchThreshold(s policy.Settings, ratio float64) matchThreshold {
	return matchThreshold{orDefault(s.MatchRatio, ratio), float64(s.MatchTokens)}
}

// isExceeded reports whether so many blocks are more than the ratio, and at least the tokens.
func (t matchThreshold) isExceeded(r *policy.Request, matchedBlocks int) bool {
	return matchShare(r, matchedBlocks) > t.ratio && matchedTokens(r, matchedBlocks) >= t.tokens
}

// isReached reports whether so many blocks are at least the ratio, and at least the tokens.
func (t matchThreshold) isReached(r *policy.Request, matchedBlocks int) bool {
	return matchShare(r, matchedBlocks) >= t.ratio && matchedTokens(r, matchedBlocks) >= t.tokens
}

// matchedTokens returns how many tokens so many blocks have.
func matchedTokens(r *policy.Request, matchedBlocks int) float64 {
	return float64(matchedBlocks) * r.BlockTokens
}

// matchShare returns what share of the prompt so many blocks are.
func matchShare(r *policy.Request, matchedBlocks int) float64 {
	tokens := lengthInTokens(r)
	if tokens <= 0 {
		return 0
	}
	return matchedTokens(r, matchedBlocks) / tokens
}

// lengthInTokens returns the prompt's length in tokens.
func lengthInTokens(r *policy.Request) float64 {
	return max(r.PromptTokens, float64(len(r.Blocks))*r.BlockTokens)
}

// toBlocks returns how many blocks so many tokens are, at least one.
func toBlocks(r *policy.Request, tokens float64) int {
	return max(1, int(tokens/max(1, r.BlockTokens)))
}

// uncachedTokens returns how many tokens of the prompt follow so many blocks.
func uncachedTokens(r *policy.Request, matchedBlocks int) float64 {
	return lengthInTokens(r) - matchedTokens(r, matchedBlocks)
}

// promptStartHash returns the hash that stands for the beginning of the prompt, or 0.
func promptStartHash(r *policy.Request) uint64 { return cmp.Or(r.PromptKey, r.FirstBlock()) }

// traceScores records the scores that the choice is about to be made by. A later
// step of the same policy overwrites them.
func traceScores(r *policy.Request, criterion string, highestWins bool, n int, score func(i int) float64) {
	t := r.Trace
	if t == nil {
		return
	}
	t.Criterion, t.HighestWins, t.Scores = criterion, highestWins, nil
	for i := range n {
		t.Scores = append(t.Scores, score(i))
	}
}

// traceCriterion is traceScores for a step that compares no scores.
func traceCriterion(r *policy.Request, criterion string) {
	traceScores(r, criterion, false, 0, nil)
}
