package router

import (
	"math"
	"time"

	"warmroute/router/health"
	"warmroute/router/ledger"
)

// Sent returns when the backend was chosen, and how many uncached tokens had been
// sent to it before and were not yet computed, about.
func (d *Reservation) Sent() (at time.Time, aheadTokens int) {
	return d.entry.SentAt, int(d.entry.Prediction.QueuedAhead)
}

// StartDecode records that a request whose prefill another replica has done is about to be sent. Without it, the
// backend is not expected to work on the request.
func (d *Reservation) StartDecode() {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	onlyInFlight := r.fleet.ledger.StartDecode(&d.entry, now)
	d.attempt.SentAt = now
	d.startWatch(onlyInFlight, now)
}

// startWatch has the health of the backend judged by how the request, which is being sent, fares there. onlyInFlight: it
// is our only one there.
func (d *Reservation) startWatch(onlyInFlight bool, now time.Time) {
	d.health.Watch(&d.attempt)
	if onlyInFlight {
		d.Backend.RequestPoll() // the last one may be long ago
	}
	d.health.RecordSent(&d.attempt, onlyInFlight, now)
}

// RecordFirstEvent records the engine's first output: its prefill is done, so the
// prompt's blocks stay, and need not be kept for Release.
func (d *Reservation) RecordFirstEvent() {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	if d.entry.Streams && !d.entry.IsPrefilled() {
		d.entry.Prediction.TTFT = now.Sub(d.entry.SentAt)
		if d.entry.RequestKind == ledger.DecodeRequest && !r.fleet.ledger.IsOrphaned(&d.entry) {
			r.fleet.estimates.RecordKVTransferTime(d.Backend.Slot, d.kvTransferTokens, d.entry.Prediction.TTFT.Seconds())
		}
	}
	d.recordAndReportPrefilled(now)
	r.dispatch(now)
}

// recordAndReportPrefilled records, once, that the prefill is over.
func (d *Reservation) recordAndReportPrefilled(now time.Time) {
	if d.entry.IsPrefilled() || d.noEngine {
		return
	}
	d.kv.recordStart(now)
	d.health.Unwatch(&d.attempt)
	d.router.peers.reportPrefilled(d)
	l := d.router.fleet.ledger
	l.Prefilled(&d.entry, now)
	if !l.IsOrphaned(&d.entry) {
		d.health.RecordFirstOutput(&d.attempt, l.UnstartedTokens(d.Backend.Slot), now)
	}
}

// RecordOutput records that a piece of the response was relayed. It is cheap enough to
// be called for each: it takes no lock.
func (d *Reservation) RecordOutput() { d.health.RecordOutput(d.router.now()) }

// SinceProgress returns for how long the backend has shown no sign of work; sending the request
// counts as one. Where the replica has no token counters, only responses show it.
func (d *Reservation) SinceProgress() time.Duration {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	last := d.health.LastProgress()
	if d.entry.SentAt.After(last) {
		last = d.entry.SentAt
	}
	return r.now().Sub(last)
}

// Commit records that the response goes to the client, so that no other backend can
// process the request any more. A stall that is found from then on is not reported.
func (d *Reservation) Commit() {
	d.router.mu.Lock()
	defer d.router.unlockAndRunCallbacks()
	d.health.Unwatch(&d.attempt)
}

// Release ends the reservation. It panics on a second call: a wrong account is worse than one lost request.
func (d *Reservation) Release(o Outcome) {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if d.released {
		panic("router: Reservation released twice")
	}
	d.released = true
	d.health.Unwatch(&d.attempt)
	f := &r.fleet
	if d.noEngine {
		f.ledger.EndNoEngine(&d.entry)
		return
	}
	now := r.now()
	inFleet := !f.ledger.IsOrphaned(&d.entry)
	if inFleet {
		if o.End == Completed {
			d.recordAndReportPrefilled(now)
		}
		external, _ := f.ledger.External(d.Backend.Load(), now)
		d.health.RecordEnd(&d.attempt, health.End{
			Processed: d.entry.IsPrefilled() || o.End != NotProcessed, Failed: o.Failed, QueueFull: o.QueueFull, Stalled: o.Stalled,
			Stopping: o.Stopping,
			InFlight: d.Backend.KnownInFlight() - d.entry.Prediction.Sequences, External: external,
		}, &f.settings.Breaker, now)
	}
	if d.entry.RequestKind == ledger.DecodeRequest {
		o.CachedTokens, o.CachedKnown = 0, false // of the replica that has done the prefill
	}
	layoutChanged := f.ledger.End(&d.entry, &o, f.nextTurnTracker(), now)
	if inFleet {
		r.reportCacheReset(d.Backend)
	}
	if layoutChanged {
		layouts := f.estimates.Layouts()
		r.layouts.Store(&layouts)
	}
	if inFleet {
		f.endKVRequest(d, &o, now)
	}
	r.peers.reportEnded(d, &o)
	r.dispatch(now)
}

// SavedPrefillSeconds returns about how much longer the prompt's prefill would have taken without its cached tokens, by
// what was learned of the backend's steps. It is 0 if the backend was removed.
func (d *Reservation) SavedPrefillSeconds(promptTokens, cachedTokens int) float64 {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if cachedTokens <= 0 || r.fleet.ledger.IsOrphaned(&d.entry) {
		return 0
	}
	m, prompt, cached := r.fleet.estimates.Step(d.Backend.Slot), float64(promptTokens), float64(cachedTokens)
	return m.PrefillSeconds(0, prompt) - m.PrefillSeconds(cached, max(prompt-cached, 0))
}

// EstimateOutputTokens returns about how many tokens the engine has generated by now, all
// sequences together and at most as many as the request allows: it generates at the backend's rate
// from when the prefill should have ended. Of a stream it is the counted tokens of its events and
// those since countedAt, when the last of these came: vLLM sends no events of reasoning that is hidden.
// It is 0 for a stream without events, which countedAt is zero for.
func (d *Reservation) EstimateOutputTokens(counted int, countedAt time.Time) int {
	e := &d.entry
	if e.Streams && countedAt.IsZero() || d.noEngine || e.NonGenerative {
		return counted
	}
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now, f := r.now(), &r.fleet
	decodeRate := float64(ledger.DefaultDecodeRate)
	delay := (e.Prediction.QueuedAhead + e.Prediction.Uncached) / f.estimates.MedianPrefillRate()
	if !f.ledger.IsOrphaned(e) {
		if e.Streams && d.health.IsStalled() {
			return counted // there are no events since nothing is generated
		}
		decodeRate, delay = f.ledger.DecodeRateOf(e), f.ledger.FirstTokenDelay(e)
	}
	seconds := now.Sub(countedAt).Seconds()
	if !e.Streams {
		seconds = now.Sub(e.SentAt).Seconds() - delay
	}
	tokens := decodeRate * max(0, seconds) * float64(e.Prediction.Sequences)
	return max(counted, int(math.Round(min(float64(counted)+tokens, e.MaxTokens()))))
}
