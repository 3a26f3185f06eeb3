package policy

import "math/rand/v2"

// The TTFT that SMetric promises: a second, and the prompt at half of 8,000
// tokens a second.
const (
	smetricBase = 1
	smetricRate = 8000.0 / 2
)

// sMetric is a policy proposed for vllm-router. The backend that holds the most
// of the prompt gets it, if that is more than ratio of it, and if that backend is
// predicted to meet the TTFT it promises, or none is. Otherwise the lowest
// product of tokens to prefill and requests in flight.
//
// Its term for attention is a constant of the model, and is left out here.
type sMetric struct {
	rng   *rand.Rand
	ratio float64
}

func newSMetric(s Settings, rng *rand.Rand) *sMetric { return &sMetric{rng, or(s.MatchRatio, 0.25)} }

func (p *sMetric) Choose(r *Request, candidates []Candidate) int {
	home, anyMeets := 0, false
	for i := range candidates {
		if candidates[i].Matched > candidates[home].Matched {
			home = i
		}
		anyMeets = anyMeets || meets(r, &candidates[i])
	}
	h := &candidates[home]
	if h.Matched > p.ratio*r.length() && (meets(r, h) || !anyMeets) {
		return home
	}
	return lowest(len(candidates), p.rng, func(i int) float64 {
		return queued(&candidates[i]) * candidates[i].InFlight
	})
}

// queued is what a candidate would have to prefill, this request included.
func queued(c *Candidate) float64 { return c.Unstarted + c.Uncached }

func meets(r *Request, c *Candidate) bool {
	return c.Rate > 0 && queued(c)/c.Rate <= smetricBase+r.length()/smetricRate
}
