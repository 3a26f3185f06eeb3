package estimate

import (
	"slices"
	"time"
)

const (
	defaultPrefillRate = 8000 // tokens a second of an 8B-class model on one GPU

	maxRateSamples = 64
	minRateSamples = 3   // below which nothing is known
	minOwnSamples  = 8   // below which a backend has the rate that is typical of its model
	rateQuantile   = 0.9 // most prefills share their steps with other requests' decodes

	// A shorter prefill says little about the rate.
	minPrefillTokens = 1024
	minPrefillTime   = 100 * time.Millisecond

	minPrefillRate, maxPrefillRate = 10, 1e6
	// rateTolerance is by how much a backend's rate may differ from the fleet's
	// and still be taken for equal: the difference is noise.
	rateTolerance = 0.25
)

// prefillRate is how fast a backend prefills, measured by its times to first token.
type prefillRate struct {
	samples [maxRateSamples]float64 // tokens a second; a ring
	count   int                     // of all samples so far
	value   float64                 // 0: unknown

	// provisional is of fewer samples; 0: unknown. It tells the order of magnitude, but not
	// which of two backends is the faster one: equal ones can differ by a factor of four, and
	// the slower one would get no request of an idle fleet, and so no sample that corrects it.
	provisional float64
}

// addSample adds a measurement: so many uncached tokens, those sent before included,
// took so long. It reports whether the rate was updated.
func (p *prefillRate) addSample(tokens float64, took time.Duration) (updated bool) {
	if tokens < minPrefillTokens || took < minPrefillTime {
		return false
	}
	p.samples[p.count%maxRateSamples] = max(minPrefillRate, min(maxPrefillRate, tokens/took.Seconds()))
	p.count++
	if p.count < minRateSamples {
		return false
	}
	sorted := p.samples
	n := min(p.count, maxRateSamples)
	slices.Sort(sorted[:n])
	rate := sorted[int(rateQuantile*float64(n-1))]
	if p.count >= minOwnSamples {
		p.value = rate
	} else {
		p.provisional = rate
	}
	return true
}
