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

	// provisional is of fewer samples, or of responses that were not streamed; 0: unknown. It
	// tells the order of magnitude, but not which of two backends is the faster one: equal ones
	// can differ by a factor of four, and the slower one would get no request of an idle
	// fleet, and so no sample that corrects it.
	provisional float64
	unstreamed  durations // used while there are too few samples
}

// addUnstreamed adds a response without a first event: so many uncached tokens, those sent
// before included, and so many generated ones took so long. It reports whether the rate was
// updated.
func (p *prefillRate) addUnstreamed(tokens, generated float64, took time.Duration) (updated bool) {
	p.unstreamed.add(tokens, generated, took)
	if p.count >= minRateSamples {
		return false
	}
	rate := p.unstreamed.prefillRate()
	if rate == 0 {
		return false
	}
	p.provisional = rate
	return true
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

// durations relates the durations of responses without a first event to what was computed:
// a least-squares fit of duration = a·prefilled + b·generated, in which older responses
// fade.
type durations struct {
	pp, pg, gg float64 // sums of products of prefilled and generated tokens
	pd, gd     float64 // of these with the duration
	count      int
}

const (
	minDurations  = 8
	durationDecay = 0.98 // for each response
	// minIndependence is how far from proportional the two counts must be.
	minIndependence = 0.01
)

// add adds a response: prefilled tokens, those sent before it included, and generated ones.
func (d *durations) add(prefilled, generated float64, took time.Duration) {
	for _, sum := range []*float64{&d.pp, &d.pg, &d.gg, &d.pd, &d.gd} {
		*sum *= durationDecay
	}
	seconds := took.Seconds()
	d.pp += prefilled * prefilled
	d.pg += prefilled * generated
	d.gg += generated * generated
	d.pd += prefilled * seconds
	d.gd += generated * seconds
	d.count++
}

// prefillRate returns the fitted rate in tokens a second; 0 if the responses do not tell.
func (d *durations) prefillRate() float64 {
	determinant := d.pp*d.gg - d.pg*d.pg
	if d.count < minDurations || determinant <= minIndependence*d.pp*d.gg {
		return 0
	}
	rate := determinant / (d.pd*d.gg - d.gd*d.pg)
	if !(rate >= minPrefillRate && rate <= maxPrefillRate) {
		return 0
	}
	return rate
}
