package health

import (
	"slices"
	"time"

	"warmroute/backends"
)

const (
	stallTimeout     = 3 * time.Second // without progress, with nothing to prefill
	stallMargin      = 3               // times the expected time of the prefill of what was sent
	unknownRateSlack = 4               // ... and so many times that while the prefill rate is not known

	// maxMissedPolls is how many polls in a row a replica may let time out
	// before it counts as stalled, though nothing shows that it has work.
	maxMissedPolls = 3
)

// work is what shows that an engine works.
type work struct {
	at    time.Time // of the last sign of work
	since time.Time // of the last sign of work, or when there was first work to do
	// owed are the uncached tokens of the requests without output when the silence
	// began, or sent before it lasted for stallTimeout. What was sent later does not
	// count: a stalled engine that gets new requests would never be found out.
	owed float64
}

// recordWork records that the engine did something at a time, when requests with so
// many uncached tokens were without output.
func (w *work) recordWork(at time.Time, unstartedTokens float64) {
	if at.After(w.at) {
		w.at = at
	}
	if at.After(w.since) {
		w.since, w.owed = at, unstartedTokens
	}
}

// StallListener is notified when the backend of a request makes no progress. It is called without the router's
// lock, and may be called once more while the request's reservation is being committed or released.
type StallListener interface {
	// BackendStalled says whether another backend seems able to process the request, and
	// whether the replica is unresponsive: it does not even respond to health checks.
	BackendStalled(elsewhere, unresponsive bool)
}

// Watch adds a request to those that are notified of stalls: nothing of a response
// was relayed, so another backend could still process it.
func (r *Record) Watch(a *Attempt) {
	if a.Listener != nil {
		r.watched = append(r.watched, a)
	}
}

// Unwatch removes a request from those that are notified of stalls. It may be called any number of times.
func (r *Record) Unwatch(a *Attempt) {
	if a.Listener != nil {
		a.Listener = nil
		r.watched = slices.DeleteFunc(r.watched, func(w *Attempt) bool { return w == a })
	}
}

// Watched returns the requests that are notified of stalls.
func (r *Record) Watched() []*Attempt { return r.watched }

// StallCheck is what decides, beside the record, whether a backend is stalled.
type StallCheck struct {
	Now             time.Time
	Load            *backends.Load // nil: not known
	InFlight        int64          // sequences of ours
	UnstartedTokens float64        // uncached tokens of our requests without output
	ExternalTokens  float64        // of other clients' that wait there
	PrefillRate     float64        // tokens a second
	RateKnown       bool
}

// UpdateStalled records whether the backend has requests of ours and makes no progress. It
// reports whether that has just begun.
func (r *Record) UpdateStalled(c *StallCheck) (began bool) {
	w, stalled := r.checkStalled(c)
	began = stalled && !r.stalled
	if r.work, r.stalled = w, stalled; began {
		r.stalls++
	}
	return began
}

// IsStalled reports whether the backend was stalled when it was checked last.
func (r *Record) IsStalled() bool { return r.stalled }

// IsStalledNow returns what UpdateStalled would record, and changes nothing.
func (r *Record) IsStalledNow(c *StallCheck) bool {
	_, stalled := r.checkStalled(c)
	return stalled
}

// Stalls returns how often the backend was found stalled.
func (r *Record) Stalls() uint64 { return r.stalls }

// checkStalled reports whether the backend has requests of ours and makes no progress. w is
// the work with the last output.
func (r *Record) checkStalled(c *StallCheck) (w work, stalled bool) {
	w = r.work
	w.recordWork(r.lastOutput(), c.UnstartedTokens)
	if c.InFlight == 0 {
		return w, false
	}
	rate := c.PrefillRate
	if !c.RateKnown {
		rate /= unknownRateSlack
	}
	timeout := stallTimeout + time.Duration(stallMargin*(min(w.owed, c.UnstartedTokens)+c.ExternalTokens)/rate*float64(time.Second))
	return w, r.silentTime(&w, c.Load, c.Now) > timeout
}

// silentTime returns for how long the engine is known to have done nothing. Its counters say so as of the last
// poll. Where there are none its silence says nothing: it may work for other clients, or on responses that are
// not streamed. But when polls begin to fail, a stream that has stopped says enough, and so do polls that time
// out.
func (r *Record) silentTime(w *work, l *backends.Load, now time.Time) time.Duration {
	switch {
	case !r.polls.known || l == nil && r.streaming == 0 && r.polls.missed < maxMissedPolls:
		return 0
	case l != nil:
		now = r.polls.at
	}
	return now.Sub(w.since)
}
