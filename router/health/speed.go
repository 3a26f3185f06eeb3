package health

import (
	"math"
	"time"

	"warmroute/router/step"
)

const (
	// slowFactor is how many times longer than usual the steps of a slow backend take, and changedFactor those of one that is
	// slower too.
	slowFactor    = 3
	changedFactor = 1.5
	// slowDelay is for how long they do before the backend is slow, and maxSlowTime after which that is usual.
	slowDelay   = 10 * time.Second
	maxSlowTime = 10 * time.Minute
	// usualTime is over which time what was learned of the steps is compared with how long they take, and minUsualTime for how
	// long they have to be measured before anything is usual.
	usualTime    = time.Minute
	minUsualTime = 30 * time.Second
	// maxSpeedAge is for how long a measurement counts without another one.
	maxSpeedAge = time.Minute
)

// speed compares how long the steps of a backend take with how long they usually take for the same work.
type speed struct {
	measured  time.Duration // sum of the times that were measured
	last      time.Time     // the end of the last one
	model     step.Model    // of the usual steps, as learned
	usual     timeSums      // of usual steps, decaying with usualTime
	factor    float64       // of the last measurement, or of all since slowFrom: times the usual duration
	slowFrom  time.Time     // since when it is slowFactor or more; zero: it is not
	slowTimes timeSums      // since then
	slow      bool
}

// timeSums are sums over measurements: of how long the steps took, of how long they should by the model, and of the ratio of
// these weighted by the former.
type timeSums struct{ seconds, expected, ratios float64 }

// addTimes adds a measurement.
func (t *timeSums) addTimes(seconds, expected float64) {
	t.seconds += seconds
	t.expected += expected
	t.ratios += seconds * seconds / expected
}

// record records that steps took seconds between two times for their work, at most, and the model as learned by now.
func (v *speed) record(from, to time.Time, seconds float64, work *step.Work, model *step.Model) {
	if !v.slowFrom.IsZero() && to.Sub(v.slowFrom) > maxSlowTime {
		*v = speed{}
	}
	if v.measured == 0 {
		v.model = *model
	}
	expected := v.model.Seconds(work)
	if !(expected > 0 && seconds > 0) {
		return
	}
	usual, known := 1.0, v.measured >= minUsualTime
	if known { // of the work, much may be overestimated: what took long counts by its time
		usual = max(1, v.usual.ratios/v.usual.seconds)
	}
	ratio, all := seconds/expected/usual, v.slowTimes
	all.addTimes(seconds, expected)
	v.measured += to.Sub(from)
	if slowdown := all.seconds / all.expected / usual; known && slowdown >= slowFactor && ratio >= changedFactor {
		if v.slowFrom.IsZero() {
			v.slowFrom = from
		}
		v.factor, v.slowTimes = slowdown, all
	} else {
		v.factor = 1
		if known {
			v.factor = ratio
		}
		decay := math.Exp(-float64(to.Sub(v.last)) / float64(usualTime))
		v.usual = timeSums{decay * v.usual.seconds, decay * v.usual.expected, decay * v.usual.ratios}
		v.usual.addTimes(seconds, expected)
		v.model, v.slowFrom, v.slowTimes = *model, time.Time{}, timeSums{}
	}
	v.last = to
}

// RecordSpeed records that steps of the backend took seconds between two times, for that work at most. The model is what was
// learned of its steps, without the prefill rate if that is not known.
func (r *Record) RecordSpeed(from, to time.Time, seconds float64, work step.Work, model *step.Model, rateKnown bool) {
	if !rateKnown {
		work.Tokens *= unknownRateSlack
		work.Attended *= unknownRateSlack
	}
	r.speed.record(from, to, seconds, &work, model)
}

// ForgetSpeed forgets how long the steps of the backend take: its replica's process is another one.
func (r *Record) ForgetSpeed() { r.speed = speed{} }

// IsSlowerThanUsual reports whether the steps of the backend take longer than usual, and whether that is known.
func (r *Record) IsSlowerThanUsual(now time.Time) (slower, known bool) {
	known = r.speed.measured > 0 && now.Sub(r.speed.last) <= slowDelay
	return known && r.speed.factor >= changedFactor, known
}

// UpdateSlow records whether the backend is slow: its steps have taken slowFactor times as long as usual, or longer, for slowDelay.
// othersSlower: those of most others take longer too, so that it is not due to this one. A stalled one is not slow.
func (r *Record) UpdateSlow(othersSlower bool, now time.Time) {
	v := &r.speed
	isLong := !r.stalled && !v.slowFrom.IsZero() && now.Sub(v.last) <= maxSpeedAge
	v.slow = isLong && (v.slow || v.last.Sub(v.slowFrom) >= slowDelay && !othersSlower)
}

// Slowdown returns how many times longer than usual the steps of the backend take, if it is slow, else 0.
func (r *Record) Slowdown() float64 {
	if !r.speed.slow {
		return 0
	}
	return r.speed.factor
}
