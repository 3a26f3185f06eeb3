package policies

import (
	"cmp"
	"math/rand/v2"

	"warmroute/router/policy"
)

// The TTFT that SMetric promises: a second, and the prompt at half of 8,000
// tokens a second.
const (
	smetricBaseSeconds = 1
	smetricPrefillRate = 8000.0 / 2
	// smetricAttention is the default of Settings.AttentionCost: that of Llama 3.1 8B.
	smetricAttention = 4.0 * 32 * 4096 / (2 * 8.03e9)
)

// sMetric is a policy proposed for vllm-router. The backend with the longest match
// is chosen if that exceeds the threshold, and if the backend is
// predicted to meet the promised TTFT, or none is. Otherwise the lowest product of
// work and requests in flight. Of several equal matches the least
// loaded counts as the longest: by index, a prompt that all have would send all
// requests to the first backend.
//
// The work is that of the prefill of this request and of those without a first event: the tokens, and
// attention times the tokens that they attend to. That is a constant of the model, which is to be
// calibrated; replay knows it.
type sMetric struct {
	rng       *rand.Rand
	match     matchThreshold
	attention float64
}

func newSMetric(o policy.Options) policy.Policy {
	return &sMetric{o.Rand, newMatchThreshold(o.Settings, 0.25), max(0, orDefault(o.AttentionCost, smetricAttention))}
}

func (p *sMetric) Choose(r *policy.Request, candidates []policy.Candidate) (index int) {
	anyMeets := false
	for i := range candidates {
		anyMeets = anyMeets || meetsPromisedTTFT(r, &candidates[i], p.work(r, &candidates[i]))
	}
	best := p.pickBestMatch(r, candidates)
	b := &candidates[best]
	isMatch := b.MatchedTokens > p.match.ratio*lengthInTokens(r) && b.MatchedTokens >= p.match.tokens
	if isMatch && (meetsPromisedTTFT(r, b, p.work(r, b)) || !anyMeets) {
		traceScores(r, "matched tokens of the prompt", true, len(candidates), func(i int) float64 { return candidates[i].MatchedTokens })
		return best
	}
	return pickLowest(r, "work of the prefill times requests in flight", len(candidates), p.rng, func(i int) float64 {
		return p.work(r, &candidates[i]) * candidates[i].InFlight
	})
}

// pickBestMatch returns the candidate with the longest match, among equals the one
// with the least work, then the fewest in flight, then any.
func (p *sMetric) pickBestMatch(r *policy.Request, candidates []policy.Candidate) (index int) {
	best, ties := 0, 1
	for i := 1; i < len(candidates); i++ {
		c, b := &candidates[i], &candidates[best]
		switch cmp.Or(cmp.Compare(b.MatchedTokens, c.MatchedTokens), cmp.Compare(p.work(r, c), p.work(r, b)),
			cmp.Compare(c.InFlight, b.InFlight)) {
		case -1:
			best, ties = i, 1
		case 0:
			ties++
			if p.rng.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

// tokensToPrefill is what a candidate has to prefill, this request included.
func tokensToPrefill(c *policy.Candidate) float64 { return c.UnstartedTokens + c.UncachedTokens }

// work is the work of what a candidate has to prefill, this request included, in tokens.
func (p *sMetric) work(r *policy.Request, c *policy.Candidate) float64 {
	attended := c.UnstartedAttention + policy.AttendedTokens(lengthInTokens(r), c.UncachedTokens)
	return tokensToPrefill(c) + p.attention*attended
}

// meetsPromisedTTFT reports whether a candidate is predicted to have so much to prefill, in tokens, done
// within the TTFT that SMetric promises for the request.
func meetsPromisedTTFT(r *policy.Request, c *policy.Candidate, tokens float64) bool {
	return c.PrefillRate > 0 && tokens/c.PrefillRate <= smetricBaseSeconds+lengthInTokens(r)/smetricPrefillRate
}
