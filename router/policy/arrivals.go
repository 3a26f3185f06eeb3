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

// recentArrivals are the rates at a time.
type recentArrivals struct {
	left   float64 // share of the rates that is left
	bySlot []arrivalRate
}

func (a *arrivals) recent(now time.Time) recentArrivals {
	return recentArrivals{math.Exp(-max(0, now.Sub(a.at).Seconds()) / arrivalWindow), a.bySlot}
}

func (r *recentArrivals) of(c *Candidate) arrivalRate {
	if c.Slot >= len(r.bySlot) {
		return arrivalRate{}
	}
	rate := r.bySlot[c.Slot]
	return arrivalRate{r.left * rate.requests, r.left * rate.prefill}
}

// mean returns the mean over the candidates of the requests a second, and of the share of its time that a backend
// prefills.
func (r *recentArrivals) mean(candidates []Candidate) (perSecond, utilization float64) {
	for i := range candidates {
		rate := r.of(&candidates[i])
		perSecond += rate.requests
		utilization += rate.prefill
	}
	n := float64(len(candidates))
	return perSecond / n, utilization / n
}

// prefillShare returns the share of its time that each engine of a candidate prefills.
func (r *recentArrivals) prefillShare(c *Candidate) float64 { return r.of(c).prefill / c.Engines }

// add counts a request that is sent to a backend.
func (a *arrivals) add(slot int, prefillSeconds float64, now time.Time) {
	left := a.recent(now).left
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
