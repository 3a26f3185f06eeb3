package policy

import (
	"cmp"
	"math/rand/v2"
)

// The TTFT that SMetric promises: a second, and the prompt at half of 8,000
// tokens a second.
const (
	smetricBaseSeconds = 1
	smetricPrefillRate = 8000.0 / 2
)

// sMetric is a policy proposed for vllm-router. The backend with the longest match
// is chosen if that is more than ratio of the prompt, and if the backend is
// predicted to meet the promised TTFT, or none is. Otherwise the lowest product of
// tokens to prefill and requests in flight. Of several equal matches the least
// loaded counts as the longest: by index, a prompt that all have would send all
// requests to the first backend.
//
// Its term for attention is a constant of the model, and is left out here.
type sMetric struct {
	rng   *rand.Rand
	ratio float64
}

func newSMetric(o options) Policy { return &sMetric{o.rng, orDefault(o.MatchRatio, 0.25)} }

func (p *sMetric) Choose(r *Request, candidates []Candidate) (index int) {
	anyMeets := false
	for i := range candidates {
		anyMeets = anyMeets || meetsPromisedTTFT(r, &candidates[i])
	}
	best := p.pickBestMatch(candidates)
	b := &candidates[best]
	if b.MatchedTokens > p.ratio*r.lengthInTokens() && (meetsPromisedTTFT(r, b) || !anyMeets) {
		r.traceScores("matched tokens of the prompt", true, len(candidates), func(i int) float64 { return candidates[i].MatchedTokens })
		return best
	}
	return r.pickLowest("tokens to prefill times requests in flight", len(candidates), p.rng, func(i int) float64 {
		return tokensToPrefill(&candidates[i]) * candidates[i].InFlight
	})
}

// pickBestMatch returns the candidate with the longest match, among equals the one
// with the fewest tokens to prefill, then the fewest in flight, then any.
func (p *sMetric) pickBestMatch(candidates []Candidate) (index int) {
	best, ties := 0, 1
	for i := 1; i < len(candidates); i++ {
		c, b := &candidates[i], &candidates[best]
		switch cmp.Or(cmp.Compare(b.MatchedTokens, c.MatchedTokens), cmp.Compare(tokensToPrefill(c), tokensToPrefill(b)), cmp.Compare(c.InFlight, b.InFlight)) {
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
func tokensToPrefill(c *Candidate) float64 { return c.UnstartedTokens + c.UncachedTokens }

func meetsPromisedTTFT(r *Request, c *Candidate) bool {
	return c.PrefillRate > 0 && tokensToPrefill(c)/c.PrefillRate <= smetricBaseSeconds+r.lengthInTokens()/smetricPrefillRate
}
