package router

import (
	"math"
	"time"

	"warmroute/backends"
)

const (
	windowFuzz   = 0.15             // of a window's tokens may have been counted on either side of its ends
	windowLasts  = 10 * time.Minute // after which one that is never sharp begins anew
	windowStarts = 512              // requests whose start waits for a poll
	foreignShare = 0.25             // of our tokens, beyond which the counters are those of others too
)

// window is a stretch of time between two polls over which the replica's
// prefix-cache counters can be compared with what was predicted: few requests
// may be in that state at its ends in which nobody knows whether the engine has
// counted them.
type window struct {
	open          bool
	since         time.Time
	queries, hits float64 // the counters at its beginning
	fuzz          float64 // tokens that may have been counted on either side of that

	sums
	late  []begun // since the last scrape was sent
	alone bool    // no sign of other clients so far
}

// begun is a request whose prefill is over.
type begun struct {
	at        time.Time
	prompt    float64 // tokens
	bytes     int
	predicted float64 // tokens
	bucket    int
	blind     bool // nothing could be predicted, and something hit
}

// sums are of requests that began in a window.
type sums struct {
	prompt    float64 // tokens
	bytes     int
	foresight foresight
	blind     bool // of one of them nothing could be predicted
}

func (s *sums) add(b *begun) {
	s.prompt += b.prompt
	s.bytes += b.bytes
	s.foresight.add(b.bucket, b.predicted, b.prompt)
	s.blind = s.blind || b.blind
}

// begun notes that the prefill of d is over.
func (r *Router) begun(d *Decision, now time.Time) {
	l := &r.lessons[d.Backend.Slot]
	l.steps.prefilled(d.uncached)
	if !l.window.open {
		return
	}
	b := begun{at: now, prompt: d.tokens, bytes: d.bytes, bucket: r.bucket(d)}
	b.blind = d.tooLong || !d.plain && d.bytes >= r.blockBytes
	b.predicted = rounded(float64(d.MatchedTokens), d.tokens, r.alignment(d.Backend))
	w := &l.window
	if len(w.late) == windowStarts {
		w.settle(windowStarts / 2) // not one by one: each time the rest moves up
	}
	w.late = append(w.late, b)
}

// settle counts the first n of those that began late in the window's sums.
func (w *window) settle(n int) {
	for i := range n {
		w.sums.add(&w.late[i])
	}
	w.late = append(w.late[:0], w.late[n:]...)
}

// polled compares a scrape's prefix-cache counters with the predictions since
// the window's beginning, if it can tell.
func (r *Router) polled(b *backends.Backend, l *backends.Load) {
	w := &r.lessons[b.Slot].window
	if !l.PrefixKnown {
		*w = window{}
		return
	}
	ours := 0
	for ours < len(w.late) && !w.late[ours].at.After(l.ScrapedAt) {
		ours++
	}
	w.settle(ours)
	fuzz := r.accounts[b.Slot].unseen
	for i := range w.late {
		fuzz += w.late[i].prompt
	}
	w.alone = w.alone && !(l.QueuesKnown && int64(l.Running+l.Waiting) > l.OwnInFlight)
	switch {
	case !w.open || l.PrefixQueries < w.queries || l.PrefixHits < w.hits || l.ScrapedAt.Sub(w.since) > windowLasts,
		w.prompt == 0 && fuzz <= w.fuzz:
		w.reopen(l, fuzz)
	case w.prompt > 0 && w.fuzz+fuzz <= windowFuzz*w.prompt:
		r.judge(b, w, l, w.fuzz+fuzz < 1)
		w.reopen(l, fuzz)
	}
}

func (w *window) reopen(l *backends.Load, fuzz float64) {
	*w = window{
		open: true, since: l.ScrapedAt, queries: l.PrefixQueries, hits: l.PrefixHits, fuzz: fuzz, late: w.late,
		alone: l.QueuesKnown && int64(l.Running+l.Waiting) <= l.OwnInFlight,
	}
}

// judge learns from a window that has ended.
func (r *Router) judge(b *backends.Backend, w *window, l *backends.Load, sharp bool) {
	at := &r.lessons[b.Slot]
	queries, hits := l.PrefixQueries-w.queries, l.PrefixHits-w.hits
	if at.quiet < usageFades || w.blind || hits > queries {
		return
	}
	if sharp && w.alone && !r.noLearning && queries > leastTextBytes &&
		queries < 2*w.prompt && w.prompt < 2*queries {
		// Nobody else was there: so these are our prompts' tokens.
		at.texts.learn(w.bytes, int(queries))
		r.texts.all.learn(w.bytes, int(queries))
	}
	if math.Abs(queries-w.prompt) > foreignShare*w.prompt {
		return
	}
	r.compare(b.Slot, &w.foresight, hits, w.prompt, r.alignment(b))
}
