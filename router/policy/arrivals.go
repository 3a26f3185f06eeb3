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

// mean returns the mean over the candidates of the requests a second, and of the share of its time that a backend
// prefills.
func (a *arrivals) mean(now time.Time, candidates []Candidate) (perSecond, utilization float64) {
	share := a.decayUntil(now) / float64(len(candidates))
	for i := range candidates {
		if slot := candidates[i].Slot; slot < len(a.bySlot) {
			perSecond += share * a.bySlot[slot].requests
			utilization += share * a.bySlot[slot].prefill
		}
	}
	return perSecond, utilization
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
