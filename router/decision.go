package router

import (
	"time"

	"warmroute/backends"
	"warmroute/router/index"
	"warmroute/router/prompt"
)

// Why a backend was chosen, under the policy prefix. Under another policy the
// reason is the policy's name.
const (
	ReasonPrefix = "prefix" // it holds the most of the prompt
	ReasonSpill  = "spill"  // another holds more, but is too busy
	ReasonCold   = "cold"   // nobody holds any of it
	ReasonLoad   = "load"   // the endpoint has no prefix to go by
	ReasonOnly   = "only"   // no other could take it
)

// Decision is the outcome of Pick: a backend, and a reservation on it that
// Release must end exactly once. Its methods are safe for concurrent use.
type Decision struct {
	Backend                    *backends.Backend
	Reason                     string
	MatchedBlocks, TotalBlocks int
	MatchedTokens              int           // of the prompt, likely held; about
	PromptTokens               int           // about
	QueueTime                  time.Duration // that the request waited in the admission queue

	router    *Router
	progress  *progress // of the backend, for as long as it is in the fleet
	blocks    []prompt.Block
	sequences int64
	class     class
	uncached  float64
	model     string
	adapter   string // counted in the account; "": none
	streams   bool
	instant   bool // in no account; see Request
	plain     bool // its bytes are those of one prompt's text
	tooLong   bool // the replica will refuse it
	aside     bool // see Request
	bytes     int
	tokens    float64       // of the prompt, about
	ahead     float64       // uncached tokens sent to the backend before, and not yet computed
	ttft      time.Duration // from sentAt to the first event; 0: none was seen
	sentAt    time.Time
	placed    index.Pin
	maxTokens int                 // of the answer; 0: not known
	loose     int64               // see cache
	backends  []*backends.Backend // that could have been chosen, but for tried
	tried     []*backends.Backend

	// Guarded by router.deciding.
	stalls         StallListener // see Request; nil: not watched, or no more
	watchedAt      int
	started        bool
	released       bool
	answeringSince int64   // microseconds since Router.made
	longest        float64 // tokens that the answers are counted for at most
}

// End says how a request ended for the backend that it was sent to.
type End int

const (
	Completed          End = iota // the answer came to its end
	NotProcessed                  // the engine never got to it: connect error, 4xx, 5xx, or the replica died before its first output
	ClientDisconnected            // the client left
	Truncated                     // the answer broke off
)

// Outcome is what there is to say of a request at its end. Zero fields are not known.
type Outcome struct {
	End          End
	Failed       bool // by the backend's own fault: no connection, no answer in time, 5xx, broken off
	QueueFull    bool // it failed with a 503: perhaps its queue is full
	Stalled      bool // it showed no sign of work for so long that another is asked
	Stopping     bool // the replica says that it takes no more since it is about to stop
	AnswerTokens int  // length of the answer, all sequences together
	PromptTokens int  // of the prompt, as the engine counted them
	CachedTokens int  // of them from its cache
	CachedKnown  bool // the replica tells CachedTokens, so 0 means none
	// Reply are the blocks that follow the prompt's when the next turn sends the
	// answer back.
	Reply []prompt.Block
}

// Sent is when the backend was chosen, and how many uncached tokens had been sent
// to it before and were not yet computed, about.
func (d *Decision) Sent() (at time.Time, aheadTokens int) { return d.sentAt, int(d.ahead) }

// RecordFirstEvent tells that the engine has put out something: its prefill is done,
// so the prompt's blocks are there to stay, and need not be kept for Release.
func (d *Decision) RecordFirstEvent() {
	r := d.router
	r.deciding.Lock()
	defer r.deciding.Unlock()
	now := r.now()
	if d.streams && !d.started {
		d.ttft = now.Sub(d.sentAt)
	}
	d.start(now)
	r.dispatch(now)
}

func (d *Decision) start(now time.Time) {
	if d.started || d.instant {
		return
	}
	d.started = true
	d.unwatch()
	d.blocks = nil
	if d.orphaned() {
		return
	}
	d.progress.breaker.worked(d, now)
	d.progress.goesOn(d)
	a := &d.router.accounts[d.Backend.Slot]
	a.first(d, now)
	if !d.tooLong && !d.aside && d.router.isTypical(d, now) {
		d.router.uncached.add(d.uncached)
	}
	a.unstarted -= d.uncached
	a.unseen -= d.tokens
	d.router.begun(d, now)
	d.progress.started(d, a.unstarted, now)
	d.router.cacheStarted(d, now)
}

// Release ends the reservation. A second call is a bug in the caller, and
// panics: accounts that drift are worse than one lost request.
func (d *Decision) Release(o Outcome) {
	r := d.router
	r.deciding.Lock()
	defer r.unlock()
	if d.released {
		panic("router: a Decision was released twice")
	}
	d.released = true
	d.unwatch()
	if d.instant {
		d.Backend.NoEngineInFlight.Add(-1)
		return
	}
	d.Backend.InFlight.Add(-d.sequences)
	now := r.now()
	r.countEnded(d, now)
	if d.orphaned() {
		r.dispatch(now)
		return
	}
	if o.End == Completed {
		d.start(now)
	}
	if !d.mayAnswer(o.AnswerTokens) {
		o.AnswerTokens = 0
	}
	d.progress.ended(d)
	d.progress.freedBy(d, &o, now)
	r.givePlaces(d.Backend)
	d.progress.stopsBy(&o, now)
	d.progress.breaker.ended(d, &o, &r.breaking, now.Sub(d.progress.worked) < workLasts, now)
	switch {
	case o.End == Completed:
		r.served(d, &o)
		r.index.Release(&d.placed, o.Reply)
	case d.started: // the prompt was computed; the blocks are there
		r.index.Release(&d.placed, nil)
	case o.End == ClientDisconnected:
		r.accounts[d.Backend.Slot].gone(d)
		r.index.Rollback(&d.placed, d.blocks, d.reached(now))
	default:
		r.accounts[d.Backend.Slot].gone(d)
		r.index.Rollback(&d.placed, d.blocks, 0)
	}
	d.blocks = nil
	r.accounts[d.Backend.Slot].ended(d)
	r.cacheFreed(d, o, now)
	r.dispatch(now)
}

// orphaned reports whether the backend has left the fleet since. What is under its
// Slot now is another's.
func (d *Decision) orphaned() bool { return d.router.progress[d.Backend.Slot] != d.progress }

// mostAnswer is more tokens than any model answers with.
const mostAnswer = 1e6

// mayAnswer tells whether the engine can have put out so many tokens for d.
func (d *Decision) mayAnswer(tokens int) bool {
	most := mostAnswer
	if d.maxTokens > 0 {
		most = min(most, float64(d.maxTokens))
	}
	return float64(tokens) <= most*float64(d.sequences)
}

// reached is how many blocks the engine can have computed by now, had it begun
// at once.
func (d *Decision) reached(now time.Time) int {
	r := d.router
	computed := r.rate(d.Backend.Slot) * now.Sub(d.sentAt).Seconds() * r.texts.bytesPerToken(d.model)
	return d.MatchedBlocks + int(computed)/r.blockBytes
}
