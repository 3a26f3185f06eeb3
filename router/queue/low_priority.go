package queue

import (
	"cmp"
	"math"
	"slices"
	"time"

	"warmroute/router/estimate"
)

const (
	// loadWindow is the time, in seconds, over which interactive load is averaged.
	loadWindow = 15
	// loadForgetTime is after how long without interactive requests none is expected.
	loadForgetTime = 10 * loadWindow * time.Second
	// decodeShare is the share of an engine's time that one decoding sequence takes.
	decodeShare = 0.006
	// minMeanPrefill is what the mean prefill of interactive requests counts for at least, in seconds.
	minMeanPrefill = 0.01
	// reserveSlowdown is the part of the allowed slowdown that interactive requests
	// may suffer from sharing fewer backends. Queueing adds as much again.
	reserveSlowdown = 0.4
)

// ClassLoad is the load of one backend by priority class.
type ClassLoad struct {
	interactive, lowPriority int64     // sequences in flight
	meanInteractive          float64   // mean of interactive
	meanPrefill              float64   // mean share of the engine's time for prefills of interactive requests
	debt                     float64   // seconds of the engine that low-priority requests used and that are not paid off
	updated, paid            time.Time // when the means and the debt were updated
	reservedUntil            time.Time // until then the backend is reserved for interactive requests
}

// updateMeansAndDebt brings the means and the debt up to now. It precedes each change of the counts.
func (l *ClassLoad) updateMeansAndDebt(now time.Time) {
	elapsed := max(0, now.Sub(l.updated).Seconds())
	l.updated = now
	decay := math.Exp(-elapsed / loadWindow)
	l.meanInteractive = decay*l.meanInteractive + (1-decay)*float64(l.interactive)
	l.meanPrefill *= decay
	l.debt += decodeShare * float64(l.lowPriority) * elapsed
}

// interactiveSequences returns how many interactive sequences the backend has, now or on average.
func (l *ClassLoad) interactiveSequences() float64 {
	return max(l.meanInteractive, float64(l.interactive))
}

// interactiveTimeShare is the share of the engine's time that interactive requests take.
func (l *ClassLoad) interactiveTimeShare() float64 {
	return decodeShare*l.interactiveSequences() + l.meanPrefill
}

// reservationEnd is until when the backend is reserved; now where it is not.
func (l *ClassLoad) reservationEnd(now time.Time) time.Time {
	if l.reservedUntil.Before(now) {
		return now
	}
	return l.reservedUntil
}

func (l *ClassLoad) isReserved(now time.Time) bool { return now.Before(l.reservedUntil) }

// payLowPriorityDebt reduces the debt by a share of the time since the last call, or to nothing
// where the share is infinite, and reports whether another low-priority request may follow.
func (l *ClassLoad) payLowPriorityDebt(timeShare float64, now time.Time) (paid bool) {
	l.updateMeansAndDebt(now)
	elapsed := now.Sub(l.paid).Seconds()
	l.paid = now
	if math.IsInf(timeShare, 1) {
		l.debt = 0
	} else {
		l.debt = max(0, l.debt-timeShare*elapsed)
	}
	return timeShare > 0 && l.debt == 0
}

// CheckLowPriorityRoom updates the debt and reports whether the backend has room for a low-priority request beside its
// interactive ones, and whether it has to share itself with those.
func (l *ClassLoad) CheckLowPriorityRoom(headroom Headroom, now time.Time) (hasRoom, shared bool) {
	l.updateMeansAndDebt(now)
	slowdown := headroom.slowdownLimit(l.isReserved(now), l.interactiveSequences())
	return l.payLowPriorityDebt(slowdown, now), !math.IsInf(slowdown, 1)
}

// InteractiveLoad is the interactive load of a fleet.
type InteractiveLoad struct {
	meanPrefill estimate.Average // seconds of prefill of a request
	inFlight    int
	lastEnd     time.Time // when the last of them ended
	scratch     []*ClassLoad
}

// RecordSent counts a request with so many sequences, whose prefill takes so many seconds, on the backend of l.
// A low-priority request's prefill that is longer than the mean one counts for more than its time: a request that
// arrives meanwhile is more likely to meet it, and waits longer.
func (a *InteractiveLoad) RecordSent(l *ClassLoad, c Class, sequences int64, prefillSeconds float64, now time.Time) {
	l.updateMeansAndDebt(now)
	if c == LowPriority {
		l.lowPriority += sequences
		l.debt += prefillSeconds * max(1, prefillSeconds/max(minMeanPrefill, a.meanPrefill.Value))
		return
	}
	l.interactive += sequences
	l.meanPrefill += prefillSeconds / loadWindow
	a.meanPrefill.Add(prefillSeconds)
	a.inFlight++
}

// RecordEnd counts the end of a request that RecordSent has counted. l is nil when the
// backend was removed meanwhile.
func (a *InteractiveLoad) RecordEnd(l *ClassLoad, c Class, sequences int64, now time.Time) {
	if c != LowPriority {
		a.inFlight--
		a.lastEnd = now
	}
	if l == nil {
		return
	}
	l.updateMeansAndDebt(now)
	if c == LowPriority {
		l.lowPriority -= sequences
	} else {
		l.interactive -= sequences
	}
}

// HasRecentRequests reports whether there were interactive requests of late.
func (a *InteractiveLoad) HasRecentRequests(now time.Time) bool {
	return a.inFlight > 0 || now.Sub(a.lastEnd) < loadForgetTime
}

// Headroom is how much room some backends have for low-priority requests.
type Headroom struct {
	maxSlowdown float64 // slowdown of interactive requests by low-priority requests
	each        float64 // interactive sequences on each reserved backend
	unshared    bool    // there are backends that are not reserved
}

// ReserveBackends reserves as many of some backends for interactive requests as these need, those that were and
// then the busiest ones, and returns the room of all of them for low-priority requests.
func (a *InteractiveLoad) ReserveBackends(maxSlowdown float64, now time.Time,
	loads func(yield func(*ClassLoad) bool)) (forLowPriority Headroom) {
	all := a.scratch[:0]
	busy, sequences := 0.0, 0.0
	for l := range loads {
		l.updateMeansAndDebt(now)
		all = append(all, l)
		busy += l.interactiveTimeShare()
		sequences += l.interactiveSequences()
	}
	a.scratch = all
	slices.SortStableFunc(all, func(a, b *ClassLoad) int {
		return cmp.Or(b.reservationEnd(now).Compare(a.reservationEnd(now)), cmp.Compare(b.interactiveTimeShare(), a.interactiveTimeShare()))
	})
	n, reserved := len(all), 0
	for i, l := range all {
		if i < reservedBackendCount(busy, n, maxSlowdown) {
			l.reservedUntil = now.Add(loadWindow * time.Second)
		}
		if l.isReserved(now) {
			reserved++
		}
	}
	return Headroom{maxSlowdown: maxSlowdown, each: sequences / float64(max(1, reserved)), unshared: reserved < n}
}

// reservedBackendCount returns how many of n backends are reserved for interactive requests that take the time
// of busy of them: so many that sharing those slows the requests down by little.
func reservedBackendCount(busyBackends float64, fleetSize int, maxSlowdown float64) int {
	return min(fleetSize, int(math.Ceil(busyBackends/(reserveSlowdown*maxSlowdown+busyBackends/float64(fleetSize)))))
}

// slowdownLimit is by how much low-priority requests may slow down the interactive sequences of
// a backend: infinitely where there are next to none. The fewer there are the more,
// so that what all of them lose together stays the same.
func (h *Headroom) slowdownLimit(reserved bool, sequences float64) float64 {
	switch {
	case !reserved || h.each < h.maxSlowdown:
		return math.Inf(1)
	case h.unshared:
		return 0
	}
	return h.maxSlowdown / min(1, max(h.each, sequences))
}
