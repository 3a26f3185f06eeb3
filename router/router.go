// Package router decides which backend takes a request, and keeps account of
// what each was sent. It records no metrics and knows no HTTP.
package router

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/router/index"
	"warmroute/router/policy"
	"warmroute/router/prompt"
)

const (
	answerTokens  = 250  // mean answer, until learned
	answerPrior   = 10   // answers that the guess above is worth
	leastUncached = 16   // tokens; even a full hit recomputes the last block
	mostSequences = 1024 // that one request counts for; a client may ask for any number
	cacheTokens   = 400_000
	cacheMargin   = 1.2  // an index somewhat too large costs little, one too small much
	upkeepBlocks  = 4096 // that a poll does of the index's upkeep: well below a millisecond under the lock
)

// ErrNoneReady says that no backend that serves the model may take the request
// now, those already tried left out.
var ErrNoneReady = errors.New("no backend is ready")

// Options are what a Router is made of.
type Options struct {
	Backends       []*backends.Backend // there at first, by Slot
	Policy         string              // one of policy.Names()
	PolicySettings policy.Settings
	Queue          QueueSettings
	Breaker        BreakerSettings
	SLO            time.Duration // TTFT to be met where it can be, by the policy prefix; 0: none
	BlockBytes     int           // bytes of canonical prompt in a block
	IndexMaxBytes  int64
	IndexMargin    float64          // the index's size over that of the caches it mirrors; 0: 1.2
	PollInterval   time.Duration    // how old a fresh Load may be
	Now            func() time.Time // the wall clock's, or a simulation's
	Rand           *rand.Rand
	// Catalog is what the fleet serves by now; requests follow it when it changes.
	// nil: they may be sent to their Backends only.
	Catalog func() *backends.Catalog
	// NoLearning takes what replicas report, and the guesses, for the truth.
	NoLearning bool
}

// Router picks backends. Safe for concurrent use.
type Router struct {
	blockBytes  int
	indexMargin float64
	now         func() time.Time
	rand        *rand.Rand
	made        time.Time
	catalog     func() *backends.Catalog
	began       chan struct{} // to Run: the queue is not empty any more

	// deciding guards all below: matching, choosing and reserving are one step,
	// so that two requests arriving together cannot both see the same backend idle.
	deciding     sync.Mutex
	stallNotices []stallNotice // due when the lock is released; see unlock
	policy       policy.Policy
	policyDef    policy.Definition
	settings     policy.Settings
	holding      QueueSettings
	breaking     BreakerSettings
	late         bool // requests wait until a backend can start them soon
	noLearning   bool

	pollInterval time.Duration

	followed   *backends.Catalog   // the one that held requests follow
	fleet      []*backends.Backend // by slot; nil: nobody has it
	names      []uint64            // hash of each backend's name, by slot
	progress   []*progress         // by slot
	index      *index.Index
	accounts   []account
	uncached   average // u of what was prefilled
	caches     []cache // by slot
	queue      holdQueue
	departures departures       // from queue
	aside      [classes]waiting // requests that wait elsewhere than in queue: for their turn to be tried again, or a check
	places     []*SlotWait      // first come, first served
	fair       fairness
	stopping   bool

	interactivePrefill average      // seconds of prefill of an interactive request
	interactive        int          // interactive requests in flight
	interactiveSeen    time.Time    // when the last of them ended
	loads              []*classLoad // scratch of headroomOf

	reserved   []reservation // scratch of dispatch, by slot
	room       []float64     // scratch of dispatch, by slot
	matched    []int         // scratch of Pick, by slot
	depth      []int         // matched blocks of the request that is scored, by slot
	lessons    []lessons     // by slot
	texts      texts
	fleetRate  float64   // tokens of prefill a second of the backends that are no faster or slower than most
	sorted     []float64 // scratch of medians
	candidates []policy.Candidate
	asked      policy.Request
	slots      []*backends.Backend // of candidates
}

// New makes a Router for a fleet.
func New(o Options) (*Router, error) {
	r := &Router{
		blockBytes:  o.BlockBytes,
		indexMargin: cmp.Or(o.IndexMargin, cacheMargin),
		now:         o.Now,
		rand:        o.Rand,
		made:        o.Now(),
		catalog:     o.Catalog,
		index:       index.New(0, o.IndexMaxBytes),
		began:       make(chan struct{}, 1),
		texts:       newTexts(),
		fleetRate:   prefillRate,
	}
	if err := r.Configure(o); err != nil {
		return nil, err
	}
	r.grow(len(o.Backends))
	for _, b := range o.Backends {
		r.join(b)
	}
	return r, nil
}

// Request is what the decision needs of one request.
//
// Where the router has a catalog, Backends is brought up to date when they could
// not take the request, or it is asked for again.
type Request struct {
	Backends      []*backends.Backend // those that serve its model
	CatalogID     string              // its model's ID in the catalog; "": Backends stay as they are
	Blocks        []prompt.Block      // unchanged until the Decision's Release
	Bytes         int                 // of canonical prompt, every sequence counted
	Sequences     int                 // that the engine will run for it
	Streams       bool                // its first event can be seen
	Media         bool                // part of its Bytes stands for no text
	NoEngine      bool                // no engine works on it: it is never held and counts nowhere
	NonGenerative bool                // its endpoint generates no text: what it takes says nothing of those that do

	MaxPromptTokens int // that a prompt may have at most, by the word of the replicas; 0: not known

	MaxAnswerTokens int           // the longest that the answer may be; 0: nothing said
	BodyBytes       int           // of memory that it keeps while it is held
	Model           string        // as the engine knows it; what is learned of tokens is kept by it
	Adapter         string        // LoRA adapter that it is for; "": none
	PromptKey       uint64        // hash of the model and the beginning of the first user message; 0: none
	Session         uint64        // hash of what names its session; 0: nothing does
	Tenant          uint64        // hash of who sends it, for fairness; 0: nobody in particular
	Priority        int           // lower first; 0 is plain, above it is a batch request
	QueueTimeout    time.Duration // for which it may wait; 0: QueueSettings.Timeout

	promoted bool // a batch request that has waited for half of its time

	// Stalls, if not nil, is told when the chosen backend makes no progress, and again
	// while that lasts, until the Decision's Commit, RecordFirstEvent or Release.
	Stalls StallListener
}

// sequences is what the request counts for.
func (req *Request) sequences() int64 {
	if req.NoEngine {
		return 0
	}
	return int64(min(max(1, req.Sequences), mostSequences))
}

// tokens is how long a request's prompt is, about.
func (r *Router) tokens(req *Request) float64 {
	return float64(req.Bytes) / r.texts.bytesPerToken(req.Model)
}

// score chooses one of candidates, which it gathers, for the request whose
// matched blocks are in depth. Backends that were tried are left out. reserve
// follows in the same critical section, or nothing.
func (r *Router) score(req *Request, tried []*backends.Backend, now time.Time) (chosen int, err error) {
	if err := r.gather(req, tried, now); err != nil {
		return 0, err
	}
	r.pose(req, now)
	return r.policy.Choose(&r.asked, r.candidates), nil
}

// pose fills asked with what policies know of req.
func (r *Router) pose(req *Request, now time.Time) {
	pr, perToken := &r.asked, r.texts.bytesPerToken(req.Model)
	*pr = policy.Request{
		Now: now, Blocks: req.Blocks, BlockTokens: float64(r.blockBytes) / perToken, PromptTokens: float64(req.Bytes) / perToken,
		PromptKey: req.PromptKey, Session: req.Session,
		MeanAnswerTokens: r.answerTokens(), MeanUncachedTokens: r.uncached.value,
	}
}

func (r *Router) reserve(req *Request, tried []*backends.Backend, chosen int, now time.Time) *Decision {
	c, b := &r.candidates[chosen], r.slots[chosen]
	depth := r.depth[b.Slot]
	d := &Decision{
		Backend:       b,
		Reason:        r.reason(req, chosen),
		MatchedBlocks: depth,
		TotalBlocks:   len(req.Blocks),
		MatchedTokens: int(c.MatchedTokens),
		PromptTokens:  int(r.asked.PromptTokens),
		router:        r,
		progress:      r.progress[b.Slot],
		blocks:        req.Blocks,
		sequences:     req.sequences(),
		class:         req.class(),
		uncached:      c.UncachedTokens,
		streams:       req.Streams,
		model:         req.Model,
		adapter:       req.Adapter,
		plain:         req.Sequences <= 1 && !req.Media && len(req.Blocks) > 0,
		bytes:         req.Bytes,
		maxTokens:     req.MaxAnswerTokens,
		tokens:        r.asked.PromptTokens,
		ahead:         r.accounts[b.Slot].waiting(now, r.rate(b.Slot)),
		sentAt:        now,
		instant:       req.NoEngine,
		tooLong:       r.tooLong(req, b.Slot),
		aside:         req.NonGenerative,
		backends:      req.Backends,
		tried:         tried,
		stalls:        req.Stalls,
	}
	d.progress.watched.add(d)
	if d.instant {
		b.NoEngineInFlight.Add(1)
		return d
	}
	if d.tooLong {
		d.blocks, d.uncached = nil, leastUncached
	} else {
		r.index.Add(&d.placed, b.Slot, req.Blocks, depth)
	}
	r.accounts[b.Slot].sent(d, now)
	r.countSent(d, c.PrefillRate, now)
	d.progress.sent(d, b.InFlight.Add(d.sequences) == d.sequences, now)
	d.progress.breaker.sent(d, now)
	d.progress.tries(now)
	r.cacheSent(d, req, now)
	return d
}

// reason says in a word why the candidate was chosen.
func (r *Router) reason(req *Request, chosen int) string {
	if !r.policyDef.ExplainsChoice {
		return r.policyDef.Name
	}
	most := 0.0
	for i := range r.candidates {
		most = max(most, r.candidates[i].MatchedTokens)
	}
	switch {
	case len(r.candidates) == 1:
		return ReasonOnly
	case len(req.Blocks) == 0:
		return ReasonLoad
	case most == 0:
		return ReasonCold
	case r.candidates[chosen].MatchedTokens < most:
		return ReasonSpill
	}
	return ReasonPrefix
}
