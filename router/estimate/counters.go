package estimate

import (
	"math"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/index"
)

const (
	maxUncertainShare = 0.15             // of a window's tokens may have been counted on either side of its ends
	maxWindowAge      = 10 * time.Minute // after which a window starts again
	maxPendingStarts  = 512              // requests whose prefill ended since the last poll was sent
	maxExternalShare  = 0.25             // of our tokens, above which other clients use the replica too
	minUsageGap       = 20               // responses without usage, after which the counters are used
)

// counterWindow is a stretch of time between two polls over which the replica's
// prefix-cache counters can be compared with the predictions. At its ends only few
// requests may be in a state in which the engine may or may not have counted them.
type counterWindow struct {
	open          bool
	since         time.Time
	queries, hits float64 // the counters at its start
	uncertain     float64 // tokens that may have been counted on either side of its start
	begin         uint64  // uses of the cache before its start

	prompt      float64 // tokens of the requests that started in it
	bytes       int
	model       string // of the last of them
	textClass   prompt.TextClass
	mixed       bool // they are of several models or classes
	predictions predictions
	reused      reused
	unknown     bool // nothing could be predicted for one of them

	pending []startedRequest // since the last poll was sent
	alone   bool             // no sign of other clients so far
}

// startedRequest is a request whose prefill is over.
type startedRequest struct {
	at        time.Time
	model     string
	prompt    float64 // tokens
	bytes     int
	textClass prompt.TextClass
	predicted float64 // tokens
	bucket    int
	unknown   bool // nothing could be predicted

	use         uint64                                 // of the cache
	reused      [index.MaxReusedSpans]index.ReusedSpan // of its blocks, those that cannot have been evicted
	blockTokens float64                                // tokens of one block
	prediction  *Prediction                            // the same request's
}

// addStarted adds a request to the pending ones.
func (w *counterWindow) addStarted(s startedRequest) {
	if len(w.pending) == maxPendingStarts {
		w.movePendingToTotals(maxPendingStarts / 2) // many at once: the rest is moved each time
	}
	w.pending = append(w.pending, s)
}

// movePendingToTotals adds the first n pending requests to the window's totals.
func (w *counterWindow) movePendingToTotals(n int) {
	for _, s := range w.pending[:n] {
		w.mixed = w.mixed || w.bytes > 0 && (s.model != w.model || s.textClass != w.textClass)
		w.model, w.textClass = s.model, s.textClass
		w.prompt += s.prompt
		w.bytes += s.bytes
		w.predictions.addPrediction(s.bucket, s.predicted, s.prompt)
		w.unknown = w.unknown || s.unknown
		w.reused.addRequest(&s, w.begin)
	}
	w.pending = append(w.pending[:0], w.pending[n:]...)
}

// restart begins a new window at a poll. Pending requests stay.
func (w *counterWindow) restart(l *backends.Load, uncertainTokens float64, uses uint64) {
	*w = counterWindow{
		open: true, since: l.PolledAt, queries: l.PrefixQueries, hits: l.PrefixHits, uncertain: uncertainTokens, begin: uses, pending: w.pending,
		alone: l.QueuesKnown && int64(l.Running+l.Waiting) <= l.OwnInFlight,
	}
}

// advanceCounterWindow moves a backend's counter window on to a poll. If the poll's prefix-cache counters are
// comparable with the predictions since the window's start, it learns from them and begins a new window.
// unseenTokens are those of the requests in flight that have shown no output.
func (f *Estimates) advanceCounterWindow(slot int, load *backends.Load, unseenTokens float64, c CacheInfo) {
	w := &f.backends[slot].window
	if !load.PrefixKnown {
		*w = counterWindow{}
		return
	}
	counted := 0
	for counted < len(w.pending) && !w.pending[counted].at.After(load.PolledAt) {
		counted++
	}
	for i := range w.pending[:counted] {
		f.RecordStarted(slot, w.pending[i].prediction, load, c)
	}
	w.movePendingToTotals(counted)
	uncertain := unseenTokens
	for i := range w.pending {
		uncertain += w.pending[i].prompt
	}
	w.alone = w.alone && !(load.QueuesKnown && int64(load.Running+load.Waiting) > load.OwnInFlight)
	switch {
	case !w.open || load.PrefixQueries < w.queries || load.PrefixHits < w.hits || load.PolledAt.Sub(w.since) > maxWindowAge,
		w.prompt == 0 && uncertain <= w.uncertain:
		w.restart(load, uncertain, c.Uses)
	case w.prompt > 0 && w.uncertain+uncertain <= maxUncertainShare*w.prompt:
		f.learnFromCounterWindow(slot, load, w.uncertain+uncertain, c)
		w.restart(load, uncertain, c.Uses)
	}
}

// learnFromCounterWindow learns from a window that has ended, in or outside of which uncertain tokens may have been
// counted.
func (f *Estimates) learnFromCounterWindow(slot int, l *backends.Load, uncertain float64, c CacheInfo) {
	b := &f.backends[slot]
	w := &b.window
	queries, hits := l.PrefixQueries-w.queries, l.PrefixHits-w.hits
	if b.withoutUsage < minUsageGap || w.unknown || hits > queries {
		return
	}
	if uncertain < 1 && w.alone && !f.disabled && queries > minTextBytes && queries < 2*w.prompt && w.prompt < 2*queries {
		// No other client: the counted tokens are those of our prompts.
		b.ratio.addPrompt(w.bytes, int(queries))
		if !w.mixed {
			f.models.addPrompt(w.model, w.textClass, w.bytes, int(queries))
		}
	}
	if math.Abs(queries-w.prompt) > maxExternalShare*w.prompt {
		return
	}
	f.recordWindowReuse(slot, w, hits, uncertain+w.predictions.hitTokensMargin(c))
	f.learnCapacity(slot, &w.predictions, hits, w.prompt, c)
}
