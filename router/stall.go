package router

import (
	"sync/atomic"
	"time"

	"warmroute/backends"
)

const (
	stallAfter  = 3 * time.Second // of silence, with nothing to prefill
	stallMargin = 3               // times what the prefill of what it was sent should take
	stallDoubt  = 4               // … and so many times that while nobody knows how fast the backend is
)

// progress is by what a replica that accepts requests and produces nothing is
// known. All of it is guarded by Router.deciding but for output.
type progress struct {
	// output is when the last piece of an answer passed, in nanoseconds since
	// Router.made. It is written for every chunk, so without a lock.
	output atomic.Int64

	worked time.Time // last sign of work
	since  time.Time // of the last sign of work, or when work was first there to be done
	// owed are the uncached tokens of what had put out nothing when the silence
	// began, or was sent before it was stallAfter long. What came later cannot
	// excuse it: engines take requests as they come, and a stalled one that is fed
	// on would never be found out.
	owed float64

	streaming int // streams of ours in mid-answer

	// What the last scrape said; zero before it.
	scraped               time.Time
	prompt, generated, kv float64
	tells                 bool // it has token counters

	missed int  // scrapes in a row that were not answered in time
	hung   bool // down, since its checks are not answered either

	stalled bool // by the last look
	stalls  uint64

	refused time.Time // when it last refused a request for want of a place
	freed   int       // places on it since then; see AwaitSlot

	stops time.Time // when it last said that it is about to stop, or was tried since; zero: it has not

	breaker breaker
	watched watched
}

// signOfWork notes that the engine did something at a time, and how many
// uncached tokens it was sent that have put out nothing.
func (p *progress) signOfWork(at time.Time, unstarted float64) {
	if at.After(p.worked) {
		p.worked = at
	}
	if at.After(p.since) {
		p.since, p.owed = at, unstarted
	}
}

// sent notes a request; alone: there is no other of ours.
func (p *progress) sent(d *Decision, alone bool, now time.Time) {
	if alone {
		p.since, p.owed = now, 0
	}
	if now.Sub(p.since) <= stallAfter {
		p.owed += d.uncached
	}
}

// started notes the first output of a request.
func (p *progress) started(d *Decision, unstarted float64, now time.Time) {
	if d.streams {
		p.streaming++
	}
	p.signOfWork(now, unstarted)
}

// ended notes that a request is in flight no more.
func (p *progress) ended(d *Decision) {
	if d.started && d.streams {
		p.streaming--
	}
}

// polled compares a scrape with the last one. The share of the KV cache in use
// moves as well while an engine works through a long prompt, which the token
// counters show only at its end.
func (p *progress) polled(l *backends.Load, unstarted float64, requests int) {
	// All of ours is done, and waits for clients that read slowly.
	idle := l.QueuesKnown && l.Running+l.Waiting == 0 && p.streaming == requests
	if idle || l.PromptTokens != p.prompt || l.GenerationTokens != p.generated || l.KVCacheUsage != p.kv {
		p.signOfWork(l.ScrapedAt, unstarted)
	}
	p.missed, p.hung = 0, false
	p.scraped, p.tells = l.ScrapedAt, l.TokensKnown
	p.prompt, p.generated, p.kv = l.PromptTokens, l.GenerationTokens, l.KVCacheUsage
}

// RecordOutput tells that a piece of the answer has passed. It is cheap enough to be
// called for each: it takes no lock.
func (d *Decision) RecordOutput() {
	r := d.router
	d.progress.output.Store(int64(r.now().Sub(r.made)))
}

// SinceProgress returns for how long the backend has shown no sign of work, d's own
// sending counting as one. Where the replica has no token counters, only responses tell.
func (d *Decision) SinceProgress() time.Duration {
	r, p := d.router, d.progress
	r.deciding.Lock()
	defer r.deciding.Unlock()
	last := r.made.Add(time.Duration(p.output.Load()))
	for _, at := range []time.Time{d.sentAt, p.worked} {
		if at.After(last) {
			last = at
		}
	}
	return r.now().Sub(last)
}

// stalled reports whether b has requests of ours and shows no sign of working on
// them. queued is what waits on it for other clients, in tokens.
func (r *Router) stalled(b *backends.Backend, l *backends.Load, queued float64, now time.Time) bool {
	p := r.progress[b.Slot]
	unstarted := r.accounts[b.Slot].unstarted
	p.signOfWork(r.made.Add(time.Duration(p.output.Load())), unstarted)
	owed := min(p.owed, unstarted) + queued
	rate := r.rate(b.Slot)
	if r.lessons[b.Slot].speed.learned == 0 {
		rate /= stallDoubt
	}
	limit := stallAfter + time.Duration(stallMargin*owed/rate*float64(time.Second))
	stalled := b.InFlight.Load() > 0 && p.silence(l, now) > limit
	began := stalled && !p.stalled
	if p.stalled = stalled; began {
		p.stalls++
		r.notifyStall(b)
	}
	return stalled
}

// Stalls reports how often a backend with requests of ours was found to produce
// nothing, and whether it was so at the last look.
func (r *Router) Stalls(b *backends.Backend) (times uint64, now bool) {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	if !r.has(b) {
		return 0, false
	}
	p := r.progress[b.Slot]
	return p.stalls, p.stalled
}

// silence is for how long the engine is known to have done nothing. Its counters
// tell as of the last scrape. Where there are none its silence says nothing: it
// may be at work for other clients, or on answers that come whole. But when
// scrapes begin to fail, a stream that stands still in mid-answer tells enough,
// and so do scrapes that are not even answered.
func (p *progress) silence(l *backends.Load, now time.Time) time.Duration {
	switch {
	case !p.tells || l == nil && p.streaming == 0 && p.missed < mute:
		return 0
	case l != nil:
		now = p.scraped
	}
	return now.Sub(p.since)
}
