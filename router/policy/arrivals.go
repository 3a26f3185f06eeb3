package policy

import (
	"math"
	"time"
)

// arrivalWindow is the time, in seconds, over which arrivals are averaged.
const arrivalWindow = 30

// arrivals are the mean rates of what was sent to each backend of late.
type arrivals struct {
	at     time.Time // of the rates
	bySlot []arrivalRate
}

type arrivalRate struct {
	requests float64 // a second
	prefill  float64 // seconds of prefill a second
}

// decayUntil returns what share of the rates is left at a time.
func (a *arrivals) decayUntil(now time.Time) float64 {
	return math.Exp(-max(0, now.Sub(a.at).Seconds()) / arrivalWindow)
}

// decayedRates are the rates of arrivals at a time.
type decayedRates struct {
	left   float64 // share of the rates that is left
	bySlot []arrivalRate
}

// ratesAt returns the rates at a time.
func (a *arrivals) ratesAt(now time.Time) decayedRates {
	return decayedRates{a.decayUntil(now), a.bySlot}
}

// rateOf returns the rate of a candidate's backend.
func (r *decayedRates) rateOf(c *Candidate) arrivalRate {
	if c.Slot >= len(r.bySlot) {
		return arrivalRate{}
	}
	rate := r.bySlot[c.Slot]
	return arrivalRate{r.left * rate.requests, r.left * rate.prefill}
}

// meanRate returns the mean rate of the candidates' backends.
func (r *decayedRates) meanRate(candidates []Candidate) (mean arrivalRate) {
	for i := range candidates {
		rate := r.rateOf(&candidates[i])
		mean.requests += rate.requests
		mean.prefill += rate.prefill
	}
	n := float64(len(candidates))
	return arrivalRate{mean.requests / n, mean.prefill / n}
}

// enginePrefillShare returns the share of its time that each engine of a candidate prefills.
func (r *decayedRates) enginePrefillShare(c *Candidate) float64 {
	return r.rateOf(c).prefill / c.Engines
}

// meanPrefillShare returns the mean of enginePrefillShare of the candidates.
func (r *decayedRates) meanPrefillShare(candidates []Candidate) (mean float64) {
	for i := range candidates {
		mean += r.enginePrefillShare(&candidates[i])
	}
	return mean / float64(len(candidates))
}

// add counts a request that is sent to a backend.
func (a *arrivals) add(slot int, prefillSeconds float64, now time.Time) {
	left := a.decayUntil(now)
	for i := range a.bySlot {
		a.bySlot[i].requests *= left
		a.bySlot[i].prefill *= left
	}
	a.at = now
	for len(a.bySlot) <= slot {
		a.bySlot = append(a.bySlot, arrivalRate{})
	}
	a.bySlot[slot].requests += 1.0 / arrivalWindow
	a.bySlot[slot].prefill += prefillSeconds / arrivalWindow
}

// forget forgets the rates of a backend.
func (a *arrivals) forget(slot int) {
	if slot < len(a.bySlot) {
		a.bySlot[slot] = arrivalRate{}
	}
}
