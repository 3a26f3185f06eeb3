package router

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"warmroute/backends"
)

// class is a request's priority class. Requests of the classes before classBatch
// are interactive. The admission queue has bounds for each class, and batch
// requests start only where they slow interactive ones down by little: see
// docs/routing.md, "Batch requests".
type class int

const (
	classUrgent class = iota // priority below 0
	classNormal              // 0
	classBatch               // above 0
	classes
)

func (c class) String() string { return [...]string{"urgent", "normal", "batch"}[c] }

func classOf(priority int) class {
	switch {
	case priority < 0:
		return classUrgent
	case priority > 0:
		return classBatch
	}
	return classNormal
}

func (req *Request) class() class { return classOf(req.Priority) }

// errNoHeadroom says that every backend that could take a batch request is needed
// for interactive ones.
var errNoHeadroom = errors.New("batch requests wait while interactive requests need the replicas")

const (
	// loadWindow is the time, in seconds, over which interactive load is averaged.
	loadWindow = 15
	// loadForgotten is after how long without interactive requests none is looked for.
	loadForgotten = 10 * loadWindow * time.Second
	// decodeShare is the share of an engine's time that one decoding sequence takes.
	decodeShare = 0.006
	// minPrefill is the least that the mean prefill of interactive requests counts
	// for, in seconds.
	minPrefill = 0.01
	// reserveSlowdown is the part of the slowdown allowed that interactive requests
	// may suffer from sharing fewer backends. Queueing adds as much again.
	reserveSlowdown = 0.4
	// cacheHeadroom is the share of a KV cache that batch requests leave free.
	cacheHeadroom = 0.2
)

// classLoad is the load of one backend by priority class.
type classLoad struct {
	interactive, batch int64     // sequences in flight
	meanInteractive    float64   // mean of interactive
	meanPrefill        float64   // mean share of the engine's time for prefills of interactive requests
	debt               float64   // seconds of the engine that batch requests took and that are not yet paid off
	updated, paid      time.Time // when the means and the debt were brought up to date
	reservedUntil      time.Time // until then the backend is reserved for interactive requests
}

// update brings the means and the debt up to date. It precedes each change of the counts.
func (l *classLoad) update(now time.Time) {
	passed := max(0, now.Sub(l.updated).Seconds())
	l.updated = now
	left := math.Exp(-passed / loadWindow)
	l.meanInteractive = left*l.meanInteractive + (1-left)*float64(l.interactive)
	l.meanPrefill *= left
	l.debt += decodeShare * float64(l.batch) * passed
}

// sequences is how many interactive sequences the backend has, now or on average.
func (l *classLoad) sequences() float64 { return max(l.meanInteractive, float64(l.interactive)) }

// busy is the share of the engine's time that interactive requests take.
func (l *classLoad) busy() float64 { return decodeShare*l.sequences() + l.meanPrefill }

// reserveEnd is until when the backend is reserved for interactive requests; now
// where it is not.
func (l *classLoad) reserveEnd(now time.Time) time.Time {
	if l.reservedUntil.Before(now) {
		return now
	}
	return l.reservedUntil
}

func (l *classLoad) reserved(now time.Time) bool { return now.Before(l.reservedUntil) }

// payOff reduces the debt by a share of the time since the last call, or to nothing
// where that is infinite, and reports whether another batch request may follow.
func (l *classLoad) payOff(share float64, now time.Time) bool {
	l.update(now)
	passed := now.Sub(l.paid).Seconds()
	l.paid = now
	if math.IsInf(share, 1) {
		l.debt = 0
	} else {
		l.debt = max(0, l.debt-share*passed)
	}
	return share > 0 && l.debt == 0
}

// countSent accounts for a request that was sent to a backend of such a prefill
// rate. A batch request's prefill that is longer than usual counts for more than
// its time: a request that arrives meanwhile is more likely to meet it, and waits
// longer then.
func (r *Router) countSent(d *Decision, rate float64, now time.Time) {
	l, prefill := &r.accounts[d.Backend.Slot].load, d.uncached/rate
	l.update(now)
	if d.class == classBatch {
		l.batch += d.sequences
		l.debt += prefill * max(1, prefill/max(minPrefill, r.interactivePrefill.value))
		return
	}
	l.interactive += d.sequences
	l.meanPrefill += prefill / loadWindow
	r.interactivePrefill.add(prefill)
	r.interactive++
}

// countEnded accounts for the end of a request that countSent has counted.
func (r *Router) countEnded(d *Decision, now time.Time) {
	if d.class != classBatch {
		r.interactive--
		r.interactiveSeen = now
	}
	if d.orphaned() {
		return
	}
	l := &r.accounts[d.Backend.Slot].load
	l.update(now)
	if d.class == classBatch {
		l.batch -= d.sequences
	} else {
		l.interactive -= d.sequences
	}
}

// headroom says how much room the backends of a model have for batch requests.
type headroom struct {
	allowed float64 // slowdown of interactive requests by batch requests
	each    float64 // interactive sequences on each backend that is reserved for them
	others  bool    // there are backends that are not reserved
}

// reservedBackends is how many of n backends are reserved for interactive requests
// that take so much time of them all: so many that sharing those slows the requests
// down by little.
func reservedBackends(busy float64, n int, allowed float64) int {
	return min(n, int(math.Ceil(busy/(reserveSlowdown*allowed+busy/float64(n)))))
}

// slowdown is by how much batch requests on a backend that has so many interactive
// sequences may slow these down: infinitely where there are next to none. The fewer
// there are the more, so that what all of them lose together stays the same.
func (h *headroom) slowdown(reserved bool, sequences float64) float64 {
	switch {
	case !reserved || h.each < h.allowed:
		return math.Inf(1)
	case h.others:
		return 0
	}
	return h.allowed / min(1, max(h.each, sequences))
}

// headroomOf looks at the interactive load of some backends, and reserves as many
// of them as it needs: those that were, and then the busiest ones.
func (r *Router) headroomOf(fleet []*backends.Backend, now time.Time) headroom {
	loads := r.loads[:0]
	busy, sequences := 0.0, 0.0
	for _, b := range fleet {
		if r.available(b, nil) {
			l := &r.accounts[b.Slot].load
			l.update(now)
			loads = append(loads, l)
			busy += l.busy()
			sequences += l.sequences()
		}
	}
	r.loads = loads
	slices.SortStableFunc(loads, func(a, b *classLoad) int {
		return cmp.Or(b.reserveEnd(now).Compare(a.reserveEnd(now)), cmp.Compare(b.busy(), a.busy()))
	})
	n, reserved := len(loads), 0
	for i, l := range loads {
		if i < reservedBackends(busy, n, r.holding.BatchSlowdown) {
			l.reservedUntil = now.Add(loadWindow * time.Second)
		}
		if l.reserved(now) {
			reserved++
		}
	}
	return headroom{allowed: r.holding.BatchSlowdown, each: sequences / float64(max(1, reserved)), others: reserved < n}
}

// needsHeadroom reports whether a request starts only where there is headroom for
// batch requests.
func (r *Router) needsHeadroom(req *Request, now time.Time) bool {
	return r.late && r.holding.BatchSlowdown > 0 && req.class() == classBatch && !req.promoted && !req.NoEngine &&
		r.servesInteractive(now)
}

// servesInteractive reports whether there were interactive requests of late.
func (r *Router) servesInteractive(now time.Time) bool {
	return r.interactive > 0 || now.Sub(r.interactiveSeen) < loadForgotten
}

// isTypical reports whether the lengths of a request and of its answer count in
// the means that decisions go by: those of batch requests would spoil them for
// interactive ones.
func (r *Router) isTypical(d *Decision, now time.Time) bool {
	return d.class != classBatch || !r.servesInteractive(now)
}

// mayStartBatch reports whether a backend has room for a batch request beside its
// interactive ones. Where these matter, it has nothing else to prefill.
func (r *Router) mayStartBatch(slot int, h *headroom, now time.Time) bool {
	a := &r.accounts[slot]
	a.load.update(now)
	slowdown := h.slowdown(a.load.reserved(now), a.load.sequences())
	return a.load.payOff(slowdown, now) &&
		(math.IsInf(slowdown, 1) || a.waiting(now, r.rate(slot))+r.reserved[slot].uncached == 0 &&
			r.cacheFits(slot, cacheHeadroom*float64(r.caches[slot].capacity), now))
}

// keepHeadroom leaves those of the candidates on which a batch request may start.
func (r *Router) keepHeadroom(req *Request, now time.Time) error {
	h := r.headroomOf(req.Backends, now)
	kept := 0
	for i, b := range r.slots {
		if r.mayStartBatch(b.Slot, &h, now) {
			r.slots[kept], r.candidates[kept] = b, r.candidates[i]
			kept++
		}
	}
	r.slots, r.candidates = r.slots[:kept], r.candidates[:kept]
	if kept == 0 {
		return errNoHeadroom
	}
	return nil
}

// measureHeadroom notes for each group of queued requests how much room its backends
// have for batch requests in this round.
func (r *Router) measureHeadroom(now time.Time) {
	if r.queue.classes[classBatch].count == 0 {
		return
	}
	for _, g := range r.queue.groups {
		g.headroom = r.headroomOf(g.backends, now)
	}
}
