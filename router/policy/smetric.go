package policy

import (
	"cmp"
	"math/rand/v2"
)

// The TTFT that SMetric promises: a second, and the prompt at half of 8,000
// tokens a second.
const (
	smetricBase = 1
	smetricRate = 8000.0 / 2
)

// sMetric is a policy proposed for vllm-router. The backend that holds the most
// of the prompt gets it, if that is more than ratio of it, and if that backend is
// predicted to meet the TTFT it promises, or none is. Otherwise the lowest
// product of tokens to prefill and requests in flight. Of several that hold as
// much, the least loaded counts as the one that holds the most: by place, a
// prompt that everybody holds would send all requests to the first backend.
//
// Its term for attention is a constant of the model, and is left out here.
type sMetric struct {
	rng   *rand.Rand
	ratio float64
}

func newSMetric(o options) Policy { return &sMetric{o.rng, or(o.MatchRatio, 0.25)} }

func (p *sMetric) Choose(r *Request, candidates []Candidate) int {
	anyMeets := false
	for i := range candidates {
		anyMeets = anyMeets || meets(r, &candidates[i])
	}
	home := p.home(candidates)
	h := &candidates[home]
	if h.MatchedTokens > p.ratio*r.length() && (meets(r, h) || !anyMeets) {
		r.tell("tokens of the prompt that it holds", true, len(candidates), func(i int) float64 { return candidates[i].MatchedTokens })
		return home
	}
	return r.lowest("tokens to prefill times requests in flight", len(candidates), p.rng, func(i int) float64 {
		return queued(&candidates[i]) * candidates[i].InFlight
	})
}

// home holds the most of the prompt, of equals the one with the least to prefill,
// then the fewest in flight, then any.
func (p *sMetric) home(candidates []Candidate) int {
	home, ties := 0, 1
	for i := 1; i < len(candidates); i++ {
		c, h := &candidates[i], &candidates[home]
		switch cmp.Or(cmp.Compare(h.MatchedTokens, c.MatchedTokens), cmp.Compare(queued(c), queued(h)), cmp.Compare(c.InFlight, h.InFlight)) {
		case -1:
			home, ties = i, 1
		case 0:
			ties++
			if p.rng.IntN(ties) == 0 {
				home = i
			}
		}
	}
	return home
}

// queued is what a candidate would have to prefill, this request included.
func queued(c *Candidate) float64 { return c.UnstartedTokens + c.UncachedTokens }

func meets(r *Request, c *Candidate) bool {
	return c.PrefillRate > 0 && queued(c)/c.PrefillRate <= smetricBase+r.length()/smetricRate
}
