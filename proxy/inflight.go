package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// Phase is a stage of a request in flight.
type Phase int32

const (
	Uploading  Phase = iota // its body is being read
	Queued                  // it waits for a backend, or for another attempt
	FirstToken              // it was sent, and nothing of its response was relayed
	Responding              // the client gets its response
)

func (p Phase) String() string {
	return [...]string{"upload", "queued", "first token", "responding"}[p]
}

// errCancelled is the cause of the context of a request that an operator has cancelled.
var errCancelled = errors.New("cancelled by an operator")

// inFlightShards is how many locks the requests in flight are spread over.
const inFlightShards = 8

// cancelGrace is how long the client of a cancelled request has to read the error.
const cancelGrace = 2 * time.Second

// Activity is what operators see of the requests in flight and of recent ones. Safe for
// concurrent use.
type Activity struct {
	numbers   atomic.Uint64
	shards    [inFlightShards]inFlightShard
	decisions decisionRing
	finished  finishedRequests
	stats     statsWindow
}

// inFlightShard is some of the requests in flight, oldest first. The root of the ring is not a request.
type inFlightShard struct {
	mu    sync.Mutex
	root  inFlightEntry
	count int
}

func newActivity() *Activity {
	l := &Activity{finished: newFinishedRequests(), stats: newStatsWindow()}
	// Not from 1: a handle from before a restart must not name another request after it.
	l.numbers.Store(rand.Uint64())
	for i := range l.shards {
		root := &l.shards[i].root
		root.prev, root.next = root, root
	}
	return l
}

// inFlightEntry is a request among those in flight. It is part of the request.
type inFlightEntry struct {
	number    uint64
	phase     atomic.Int32 // a Phase
	cancelled atomic.Bool

	// Guarded by the shard's mu.
	prev, next        *inFlightEntry
	request           *request        // only what never changes of it is read, and its connection's deadlines are set
	uploading         bool            // its body is being read, which a read deadline ends
	uploadInterrupted bool            // by such a deadline
	context           *attemptContext // of its latest attempt, cancelled with the request; nil: it has not come so far
	inBackground      bool            // it has its response, and its connection may be another request's
	model, key        string
	backend           *backends.Backend
	matched           int
	prompt            int
	attempts          int
}

func (a *Activity) shard(requestNumber uint64) *inFlightShard {
	return &a.shards[requestNumber%inFlightShards]
}

// add lists a request, until remove.
func (a *Activity) add(x *request) {
	p := &x.inFlight
	p.number, p.request = a.numbers.Add(1), x
	s := a.shard(p.number)
	s.mu.Lock()
	p.prev, p.next = s.root.prev, &s.root
	p.prev.next, p.next.prev = p, p
	s.count++
	s.mu.Unlock()
}

// remove ends add. Afterwards the request cannot be cancelled.
func (a *Activity) remove(p *inFlightEntry) {
	s := a.shard(p.number)
	s.mu.Lock()
	if p.next != nil {
		p.prev.next, p.next.prev = p.next, p.prev
		p.prev, p.next = nil, nil
		s.count--
	}
	s.mu.Unlock()
}

// beginUploadPhase records that the body of a request is being read, which Cancel interrupts, until endUploadPhase.
// deadlineReader notices whether it was cancelled before.
func (a *Activity) beginUploadPhase(p *inFlightEntry) {
	s := a.shard(p.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	p.uploading = true
}

// endUploadPhase ends beginUploadPhase, and reports whether the request was cancelled in between. From here on only
// the server sets read deadlines: it takes one that passes for a disconnect.
func (a *Activity) endUploadPhase(p *inFlightEntry) (cancelled bool) {
	s := a.shard(p.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	p.uploading = false
	return p.uploadInterrupted
}

// beginQueuedPhase records that a request waits for a backend, and the context to cancel it with, which it cancels if
// the request was cancelled before.
func (a *Activity) beginQueuedPhase(x *request) {
	p := &x.inFlight
	s := a.shard(p.number)
	s.mu.Lock()
	p.context, p.model = x.context, x.outcome.Model
	if x.account != nil {
		p.key = x.account.Name
	}
	p.phase.Store(int32(Queued))
	if p.cancelled.Load() {
		x.context.cancel(errCancelled)
	}
	s.mu.Unlock()
}

// beginBackgroundPhase records that the client has its response, which the replica has yet to generate.
func (a *Activity) beginBackgroundPhase(x *request) {
	p := &x.inFlight
	s := a.shard(p.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	p.inBackground, p.context = true, x.background.context
	if p.cancelled.Load() {
		p.context.cancel(errCancelled)
	}
}

func (a *Activity) recordAttemptAndDecision(x *request, d *router.Reservation) {
	p := &x.inFlight
	s := a.shard(p.number)
	s.mu.Lock()
	p.backend, p.matched, p.prompt, p.attempts = d.Backend, d.MatchedTokens, d.PromptTokens, x.history.sent
	p.phase.Store(int32(FirstToken))
	s.mu.Unlock()
	a.decisions.add(x, d)
}

// InFlightRequest is a request as Activity.OldestRequests lists it, without its contents and its key.
type InFlightRequest struct {
	Handle    string // names it for Cancel, and no other request
	RequestID string // the client's or the proxy's
	Phase     Phase
	Endpoint  string
	Model     string // empty until the body was read
	Key       string // name of the API key's holder; empty: none
	Backend   string // empty unless it was sent there, and that has not failed
	Arrived   time.Time

	MatchedTokens, PromptTokens int // of the decision for Backend, and of the latest one
	Attempts                    int // made so far
}

// Requests are the requests in flight, oldest first.
type Requests struct {
	Oldest []InFlightRequest
	Queued []InFlightRequest // the oldest that wait for a backend; some of them may be in Oldest too
	Total  int               // in flight
}

// maxScannedEntries bounds for how long listing requests locks a shard.
const maxScannedEntries = 2048

// OldestRequests lists up to limit of the oldest requests in flight, and up to queuedLimit of the
// oldest queued ones.
func (a *Activity) OldestRequests(limit, queuedLimit int) Requests {
	var out Requests
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		out.Total += s.count
		queued := 0
		for n, p := 0, s.root.next; n < maxScannedEntries && p != &s.root; n, p = n+1, p.next {
			if n < limit {
				out.Oldest = append(out.Oldest, p.infoLocked())
			}
			if queued < queuedLimit && Phase(p.phase.Load()) == Queued {
				queued++
				out.Queued = append(out.Queued, p.infoLocked())
			}
		}
		s.mu.Unlock()
	}
	out.Oldest, out.Queued = sortByArrival(out.Oldest, limit), sortByArrival(out.Queued, queuedLimit)
	return out
}

// countQueuedByModel returns how many requests for each model are queued, as far as they are among the oldest in flight.
func (a *Activity) countQueuedByModel() map[string]int {
	out := map[string]int{}
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		for n, p := 0, s.root.next; n < maxScannedEntries && p != &s.root; n, p = n+1, p.next {
			if p.model != "" && Phase(p.phase.Load()) == Queued {
				out[p.model]++
			}
		}
		s.mu.Unlock()
	}
	return out
}

// sortByArrival sorts the list in place, and returns up to limit of the oldest.
func sortByArrival(list []InFlightRequest, limit int) []InFlightRequest {
	slices.SortFunc(list, func(a, b InFlightRequest) int {
		return cmp.Or(a.Arrived.Compare(b.Arrived), cmp.Compare(a.Handle, b.Handle))
	})
	return list[:min(limit, len(list))]
}

// infoLocked returns p for operators. The shard's lock is held.
func (p *inFlightEntry) infoLocked() InFlightRequest {
	x := p.request
	f := InFlightRequest{
		Handle: formatHandle(p.number), RequestID: x.id, Phase: Phase(p.phase.Load()), Endpoint: x.endpoint.path,
		Model: p.model, Key: p.key, Arrived: x.arrivedAt, PromptTokens: p.prompt, Attempts: p.attempts,
	}
	if p.backend != nil && f.Phase != Queued {
		f.Backend, f.MatchedTokens = p.backend.Name, p.matched
	}
	return f
}

func formatHandle(requestNumber uint64) string { return strconv.FormatUint(requestNumber, 36) }

// Cancel ends the request with the handle: it closes the connection to the replica, and sends
// the client an error. It reports whether there was one in flight.
func (a *Activity) Cancel(handle string) (found bool) {
	number, err := strconv.ParseUint(handle, 36, 64)
	if err != nil || formatHandle(number) != handle {
		return false
	}
	s := a.shard(number)
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := s.root.next; p != &s.root; p = p.next {
		if p.number == number {
			p.cancelLocked()
			return true
		}
	}
	return false
}

// cancelLocked is Cancel for p. The shard's lock is held, so that the connection is still the request's own.
func (p *inFlightEntry) cancelLocked() {
	if p.cancelled.Swap(true) {
		return
	}
	conn := &p.request.client.conn
	if p.uploading {
		p.uploadInterrupted = true
		_ = conn.SetReadDeadline(time.Unix(1, 0)) // fails where there are none; then the body has to end by itself
		return
	}
	if p.context != nil {
		p.context.cancel(errCancelled)
	}
	if p.inBackground {
		return
	}
	_ = conn.SetWriteDeadline(time.Now().Add(cancelGrace)) // it may be waiting for a client that does not read
}

// maxDecisions is how many decisions operators see.
const maxDecisions = 64

// DecisionRecord says where a request was sent, and why.
type DecisionRecord struct {
	Number    uint64 // counts all of them, from 1
	At        time.Time
	RequestID string
	Model     string
	Backend   string
	Reason    string // as in the response's header

	MatchedTokens, PromptTokens int
	AheadTokens                 int           // uncached ones sent to the backend before, and not yet computed
	QueueTime                   time.Duration // that the request waited
	Attempt                     int           // from 1
}

// decisionRing keeps the latest decisions.
type decisionRing struct {
	mu    sync.Mutex
	all   uint64
	slots [maxDecisions]DecisionRecord
}

func (r *decisionRing) add(x *request, d *router.Reservation) {
	at, ahead := d.Sent()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots[r.all%maxDecisions] = DecisionRecord{
		Number: r.all + 1, At: at, RequestID: x.id, Model: x.outcome.Model, Backend: d.Backend.Name, Reason: d.Reason,
		MatchedTokens: d.MatchedTokens, PromptTokens: d.PromptTokens, AheadTokens: ahead,
		QueueTime: x.history.waited.Total(), Attempt: x.history.sent,
	}
	r.all++
}

// Decisions returns the latest decisions, newest first.
func (a *Activity) Decisions() []DecisionRecord {
	r := &a.decisions
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []DecisionRecord
	for n := r.all; n > 0 && n+maxDecisions > r.all; n-- {
		out = append(out, r.slots[(n-1)%maxDecisions])
	}
	return out
}

// Explanation returns why the backend was picked, in a sentence.
func (d *DecisionRecord) Explanation() string {
	sentence := cmp.Or(map[string]string{
		router.ReasonPrefix: "longest match",
		router.ReasonSpill:  "another backend has a longer match but is too busy",
		router.ReasonCold:   "no backend has a match; this one is the least busy",
		router.ReasonLoad:   "the request has no prompt, or one shorter than a block; this one is the least busy",
		router.ReasonOnly:   "no other backend could accept it",
	}[d.Reason], "policy "+d.Reason)
	if d.AheadTokens > 0 {
		sentence += fmt.Sprintf(", behind %d queued prefill tokens", d.AheadTokens)
	}
	if d.QueueTime > 0 {
		sentence += fmt.Sprintf("; queued for %v", d.QueueTime.Round(time.Millisecond))
	}
	if d.Attempt > 1 {
		sentence += fmt.Sprintf("; attempt %d", d.Attempt)
	}
	return sentence
}
