package router

import (
	"math"
	"time"

	"warmroute/backends"
	"warmroute/prompt"
	"warmroute/router/estimate"
	"warmroute/router/index"
	"warmroute/router/queue"
)

const (
	maxSequences = 1024 // of one request; a client may set any n

	minUncachedTokens = estimate.MinUncachedTokens
)

// Request is what the decision needs of one request. Where the router has a
// catalog, Backends is updated when they could not take the request, or it is
// routed again.
type Request struct {
	Backends  []*backends.Backend // those that serve its model
	CatalogID string              // its model's ID in the catalog; "": Backends stay as they are
	Model     string              // as the engine knows it; token ratios are learned by it
	Adapter   string              // LoRA adapter that it is for; "": none
	Endpoint  backends.Endpoint

	Blocks    []prompt.Block // unchanged until the Decision's Release
	Forks     []prompt.Fork  // where Blocks part from those of other layouts
	Bytes     int            // of canonical prompt, all sequences included
	BodyBytes int            // of memory that it uses while it is queued
	Sequences int            // that the engine will run for it
	Streams   bool           // its first event can be seen
	Media     bool           // part of its Bytes is not text
	// MediaItems are those of its Bytes, as far as their places there are known; unchanged like
	// Blocks.
	MediaItems []prompt.Media

	// TextClass is the class of its prompt's text, by which and Model the bytes per token are
	// learned.
	TextClass prompt.TextClass

	// Stored says that Backends is the one that holds the stored response to which it
	// refers. It stays the only one, whatever serves the model.
	Stored bool

	NoEngine      bool // no engine works on it: it is never queued, and has no load
	NonGenerative bool // its endpoint generates no text: its uncached tokens are not typical

	MaxPromptTokens int // that a prompt may have, as reported by the replicas; 0: not known
	MaxOutputTokens int // that the answer may have; 0: not known

	Turn      prompt.Turn
	PromptKey uint64 // hash of the model and the beginning of the first user message; 0: none
	Session   uint64 // hash of its session's name; 0: none
	Tenant    uint64 // hash of its sender, for fairness; 0: none in particular
	Priority  int    // lower first; above 0: a batch request

	QueueTimeouts QueueTimeouts // of all its waits; none: those of QueueSettings
	Waited        Waited        // in the queue, of earlier waits

	// Stalls, if not nil, is called when the chosen backend makes no progress, and again
	// while that lasts, until the Decision's Commit, RecordFirstEvent or Release.
	Stalls StallListener
}

// mediaCounts returns how many of the request's MediaItems there are.
func (req *Request) mediaCounts() (counts prompt.MediaCounts) {
	if n := len(req.MediaItems); n > 0 {
		counts = req.MediaItems[n-1].Counts
	}
	return counts
}

// sequences returns what the request counts for.
func (req *Request) sequences() int64 {
	if req.NoEngine {
		return 0
	}
	return int64(min(max(1, req.Sequences), maxSequences))
}

// retrieves reports whether the request asks a backend for what it has in memory. It is
// sent there even if the backend is draining or about to stop.
func (req *Request) retrieves() bool { return req.Stored && req.NoEngine }

func (req *Request) class() queue.Class { return queue.ClassOf(req.Priority) }

// Why a backend was chosen, under the policy prefix. Under another policy the
// reason is the policy's name, or ReasonStored.
const (
	ReasonPrefix = "prefix" // it has the longest match
	ReasonSpill  = "spill"  // another holds more, but is too busy
	ReasonCold   = "cold"   // none holds any of it
	ReasonLoad   = "load"   // the request has no prefix to match
	ReasonOnly   = "only"   // no other could take it
	ReasonStored = "stored" // it holds the stored response to which the request refers
)

// Decision is a chosen backend, and a reservation on it that Release must end
// exactly once. Its methods are safe for concurrent use.
type Decision struct {
	Backend                    *backends.Backend
	Reason                     string
	MatchedBlocks, TotalBlocks int
	MatchedTokens              int           // of the prompt, likely held; about
	PromptTokens               int           // about
	QueueTime                  time.Duration // that the request was queued
	OutageTime                 time.Duration // the part of it without a ready backend; see QueueTimeouts
	// KVSession is what is to be sent to the replica as the request's session, by which its KV
	// events name the request; "": nothing in particular.
	KVSession string

	router     *Router
	health     *health // of the backend, for as long as it is in the fleet
	sentAt     time.Time
	request    sentRequest
	prediction estimate.Prediction
	pin        index.Pin
	kv         kvUse
	kvRequest  kvRequest
	watch      stallWatch

	// Guarded by router.mu.
	started  bool // its prefill is over
	released bool
}

// sentRequest holds what Release needs about a request.
type sentRequest struct {
	id              uint64         // by which other proxies know it; 0 if there are no other proxies
	ofPeer          bool           // a peer has sent it
	blocks          []prompt.Block // nil once the prefill is over
	adapter         string         // counted in the load; "": none
	class           queue.Class
	streams         bool
	noEngine        bool
	nonGenerative   bool
	maxOutputTokens int
	conversation    uint64 // its key; 0: none
}

// End is how a request ended on its backend.
type End int

const (
	Completed          End = iota // the answer came to its end
	NotProcessed                  // the engine never got to it: connect error, 4xx, 5xx, or the replica died before its first output
	ClientDisconnected            // the client closed the connection
	Truncated                     // the answer ended early
)

// Outcome describes a finished request. Zero fields are unknown.
type Outcome struct {
	End          End
	Failed       bool // the backend failed: no connection, no answer in time, 5xx, answer ended early
	QueueFull    bool // it failed with a 503: its queue may be full
	Stalled      bool // it made no progress for so long that another backend is tried
	Stopping     bool // the replica reports that it takes no more since it is about to stop
	OutputTokens int  // of all sequences together
	PromptTokens int  // as the engine counted them
	CachedTokens int  // of PromptTokens
	CachedKnown  bool // the replica reports CachedTokens, so 0 means none
	// Reply are the blocks that follow the prompt's when the next turn sends the
	// answer back.
	Reply []prompt.Block
	// ReplyTailBytes is how many bytes of the answer follow Reply.
	ReplyTailBytes int
}

// Sent returns when the backend was chosen, and how many uncached tokens had been
// sent to it before and were not yet computed, about.
func (d *Decision) Sent() (at time.Time, aheadTokens int) {
	return d.sentAt, int(d.prediction.QueuedAhead)
}

// RecordFirstEvent records the engine's first output: its prefill is done, so the
// prompt's blocks stay, and need not be kept for Release.
func (d *Decision) RecordFirstEvent() {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	now := r.now()
	if d.request.streams && !d.started {
		d.prediction.TTFT = now.Sub(d.sentAt)
	}
	d.recordPrefillDone(now)
	r.dispatchQueued(now)
}

// recordPrefillDone records, once, that the prefill of d is over.
func (d *Decision) recordPrefillDone(now time.Time) {
	if d.started || d.request.noEngine {
		return
	}
	d.started = true
	d.kvRequest.recordStart(now)
	d.health.removeStallWatch(d)
	d.request.blocks = nil
	d.router.reportPrefilled(d)
	if d.isOrphaned() {
		return
	}
	r, s := d.router, d.backendState()
	d.health.breaker.recordOutput(d, now)
	d.health.clearStoppingOnResponse(d)
	r.accountPrefillDone(d, now)
	d.health.recordFirstOutput(d, s.load.unstarted, now)
}

// accountPrefillDone is the part of recordPrefillDone that applies to requests of peers too.
func (r *Router) accountPrefillDone(d *Decision, now time.Time) {
	s := d.backendState()
	s.load.dropPrefilledUpTo(d, now)
	if !d.prediction.IsTooLong && !d.request.nonGenerative && r.countsInMeans(d, now) {
		r.estimates.RecordUncached(d.prediction.Model, d.prediction.Uncached)
	}
	r.estimates.RecordPrefillDone(d.Backend.Slot, &d.prediction, r.cacheInfo(d.Backend), now)
	s.kv.recordPrefillDone(d, r, now)
}

// Release ends the reservation. It panics on a second call: a wrong account is
// worse than one lost request.
func (d *Decision) Release(o Outcome) {
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if d.released {
		panic("router: Decision released twice")
	}
	d.released = true
	d.health.removeStallWatch(d)
	if d.request.noEngine {
		d.Backend.NoEngineInFlight.Add(-1)
		return
	}
	d.Backend.InFlight.Add(-d.prediction.Sequences)
	now := r.now()
	if d.isOrphaned() {
		r.interactive.RecordEnd(nil, d.request.class, d.prediction.Sequences, now)
	} else {
		r.interactive.RecordEnd(&d.backendState().classes, d.request.class, d.prediction.Sequences, now)
		d.recordEnd(&o, now)
	}
	r.reportEnded(d, &o)
	r.dispatchQueued(now)
}

func (d *Decision) recordEnd(o *Outcome, now time.Time) {
	r := d.router
	if o.End == Completed {
		d.recordPrefillDone(now)
	}
	if !d.isPlausibleOutputLength(o.OutputTokens) {
		o.OutputTokens = 0
	}
	d.health.recordEnd(d, o, now)
	r.grantFreeSlots(d.Backend)
	d.health.breaker.recordEnd(d, o, &r.settings.Breaker, now.Sub(d.health.workedAt) < maxWorkAge, now)
	r.accountEnd(d, o, now)
	d.request.blocks = nil
	r.recordEndForKVEvents(d, o, now)
}

// accountEnd is the part of recordEnd that applies to requests of peers too: it learns from the
// outcome and ends what the request takes in the accounts of its backend.
func (r *Router) accountEnd(d *Decision, o *Outcome, now time.Time) {
	s := d.backendState()
	switch {
	case o.End == Completed:
		r.learnFromCompletion(d, o, now)
		r.index.Release(&d.pin, o.Reply)
		r.keepForNextTurn(d, o.OutputTokens, now)
	case d.started: // the prompt was computed; the blocks are there
		r.index.Release(&d.pin, nil)
	case o.End == ClientDisconnected:
		s.load.removePending(d)
		r.index.Rollback(&d.pin, d.request.blocks, d.maxComputedBlocks(now))
	default:
		s.load.removePending(d)
		r.index.Rollback(&d.pin, d.request.blocks, 0)
	}
	s.load.recordEnd(d)
	s.kv.recordEnd(d, o, now.Sub(r.start))
}

// learnFromCompletion learns from an answer that came to its end.
func (r *Router) learnFromCompletion(d *Decision, o *Outcome, now time.Time) {
	slot := d.Backend.Slot
	if o.OutputTokens > 0 && r.countsInMeans(d, now) {
		r.estimates.RecordOutputLength(slot, o.OutputTokens, d.prediction.Sequences)
	}
	usage := estimate.Usage{PromptTokens: o.PromptTokens, CachedTokens: o.CachedTokens, CachedKnown: o.CachedKnown}
	r.estimates.LearnFromCompletion(slot, &d.prediction, usage, r.cacheInfo(d.Backend))
	changed := r.estimates.LearnLayout(&d.prediction, usage, r.cacheInfo(d.Backend))
	r.resizeIndex(slot)
	if changed {
		layouts := r.estimates.Layouts()
		r.layouts.Store(&layouts)
	}
}

// cacheInfo returns the facts about a backend's cache that the estimates need.
func (r *Router) cacheInfo(b *backends.Backend) estimate.CacheInfo {
	c := estimate.CacheInfo{Alignment: 1, Evicting: r.index.Evictions(b.Slot) > 0}
	if l := r.liveStateOf(b).load; l != nil && l.HitAlignment > 0 {
		c.Alignment = float64(l.HitAlignment)
	}
	return c
}

// countsInMeans reports whether a request and its answer count in the means that
// decisions use: batch requests would spoil them for recent interactive ones.
func (r *Router) countsInMeans(d *Decision, now time.Time) bool {
	return d.request.class != queue.Batch || !r.interactive.HasRecentRequests(now)
}

func (d *Decision) backendState() *backendState { return &d.router.states[d.Backend.Slot] }

// isOrphaned reports whether the backend was removed from the fleet since. Its Slot
// may be another's now.
func (d *Decision) isOrphaned() bool { return d.backendState().health != d.health }

// isPlausibleOutputLength reports whether the engine can have put out so many tokens for d.
func (d *Decision) isPlausibleOutputLength(tokens int) bool {
	return float64(tokens) <= d.maxOutputTokens()*float64(d.prediction.Sequences)
}

// EstimateOutputTokens returns about how many tokens the engine has generated for d by now, all
// sequences together and at most as many as the request allows: it generates at the backend's usual
// rate from when the prefill should have ended. Of a stream it is the counted tokens of its events and
// those since countedAt, when the last of these came: vLLM sends no events of reasoning that is hidden.
// It is 0 for a stream without events, which countedAt is zero for.
func (d *Decision) EstimateOutputTokens(counted int, countedAt time.Time) int {
	if d.request.streams && countedAt.IsZero() || d.request.noEngine || d.request.nonGenerative {
		return counted
	}
	r := d.router
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	decodeRate, prefillRate := float64(defaultDecodeRate), r.estimates.MedianPrefillRate()
	if !d.isOrphaned() {
		s := d.backendState()
		if d.request.streams && s.health.stalled {
			return counted // there are no events since nothing is generated
		}
		decodeRate, prefillRate = s.kv.decodeRate.Value, r.estimates.PrefillRate(d.Backend.Slot)
	}
	seconds := r.now().Sub(countedAt).Seconds()
	if !d.request.streams {
		seconds = r.now().Sub(d.sentAt).Seconds() - (d.prediction.QueuedAhead+d.prediction.Uncached)/prefillRate
	}
	tokens, sequences := decodeRate*max(0, seconds), float64(d.prediction.Sequences)
	return max(counted, int(math.Round(min(float64(counted)+tokens*sequences, d.maxOutputTokens()*sequences))))
}

// maxOutputTokens returns how many tokens one sequence of d can have.
func (d *Decision) maxOutputTokens() float64 {
	if d.request.maxOutputTokens > 0 {
		return min(estimate.MaxOutputTokens, float64(d.request.maxOutputTokens))
	}
	return estimate.MaxOutputTokens
}

// maxComputedBlocks returns how many blocks the engine can have computed by now, had it
// started at once.
func (d *Decision) maxComputedBlocks(now time.Time) int {
	r := d.router
	uncachedBytes := float64(d.prediction.Bytes - d.MatchedBlocks*r.blockBytes)
	computed := r.estimates.PrefillRate(d.Backend.Slot) * now.Sub(d.sentAt).Seconds() * uncachedBytes / d.prediction.Uncached
	return d.MatchedBlocks + int(computed)/r.blockBytes
}
