// Package activity is what operators see of requests: those in flight, which they can cancel, the latest decisions,
// the latest that have ended, and figures of the last hour.
package activity

import (
	"cmp"
	"context"
	"errors"
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

// ErrCancelled is the cause of the context of a request that an operator has cancelled.
var ErrCancelled = errors.New("cancelled by an operator")

// inFlightShards is how many locks the requests in flight are spread over.
const inFlightShards = 8

// CancelGrace is how long the client of a cancelled request has to read the error.
const CancelGrace = 2 * time.Second

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
	root  Request
	count int
}

// New returns an Activity without requests.
func New() *Activity {
	a := &Activity{finished: newFinishedRequests(), stats: newStatsWindow()}
	// Not from 1: a handle from before a restart must not name another request after it.
	a.numbers.Store(rand.Uint64())
	for i := range a.shards {
		root := &a.shards[i].root
		root.prev, root.next = root, root
	}
	return a
}

// Deadliner sets the deadlines of a client's connection, as http.ResponseController does.
type Deadliner interface {
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// Request is a request in flight, between Add and Remove.
type Request struct {
	// Set before Add, and not modified afterwards.
	ID       string
	Endpoint string
	Arrived  time.Time
	Conn     Deadliner // of the client

	number    uint64
	phase     atomic.Int32 // a Phase
	cancelled atomic.Bool

	// Guarded by the shard's mu.
	prev, next        *Request
	uploading         bool                    // its body is being read, which a read deadline ends
	uploadInterrupted bool                    // by such a deadline
	cancel            context.CancelCauseFunc // ends its latest attempt; nil: it has not come so far
	inBackground      bool                    // it has its response, and its connection may be another request's
	model, key        string
	backend           *backends.Backend
	matched           int
	prompt            int
	attempts          int
}

// IsCancelled reports whether an operator has cancelled the request.
func (r *Request) IsCancelled() bool { return r.cancelled.Load() }

// BeginResponding records that the client gets its response.
func (r *Request) BeginResponding() { r.phase.Store(int32(Responding)) }

func (a *Activity) shard(requestNumber uint64) *inFlightShard {
	return &a.shards[requestNumber%inFlightShards]
}

// Add lists a request, until Remove.
func (a *Activity) Add(r *Request) {
	r.number = a.numbers.Add(1)
	s := a.shard(r.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	r.prev, r.next = s.root.prev, &s.root
	r.prev.next, r.next.prev = r, r
	s.count++
}

// Remove ends Add. Afterwards the request cannot be cancelled. A second call does nothing.
func (a *Activity) Remove(r *Request) {
	s := a.shard(r.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.next != nil {
		r.prev.next, r.next.prev = r.next, r.prev
		r.prev, r.next = nil, nil
		s.count--
	}
}

// BeginUpload records that the body of a request is being read, which Cancel interrupts by a read deadline, until
// EndUpload. The reader has to look whether the request was cancelled before.
func (a *Activity) BeginUpload(r *Request) {
	s := a.shard(r.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	r.uploading = true
}

// EndUpload ends BeginUpload, and reports whether the request was cancelled in between. From here on only
// the server sets read deadlines: it takes one that passes for a disconnect.
func (a *Activity) EndUpload(r *Request) (cancelled bool) {
	s := a.shard(r.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	r.uploading = false
	return r.uploadInterrupted
}

// BeginQueued records that a request waits for a backend, and how it is cancelled. It calls cancel if the request was
// cancelled before.
func (a *Activity) BeginQueued(r *Request, model, key string, cancel context.CancelCauseFunc) {
	s := a.shard(r.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	r.model, r.key, r.cancel = model, key, cancel
	r.phase.Store(int32(Queued))
	if r.cancelled.Load() {
		cancel(ErrCancelled)
	}
}

// BeginBackground records that the client has its response, which the replica has yet to generate, and how that is
// cancelled. It calls cancel if the request was cancelled before.
func (a *Activity) BeginBackground(r *Request, cancel context.CancelCauseFunc) {
	s := a.shard(r.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	r.inBackground, r.cancel = true, cancel
	if r.cancelled.Load() {
		cancel(ErrCancelled)
	}
}

// RecordDecision records that a request for a model, whose name may have become known while it waited, is sent to a backend, for the
// nth time, after it has been queued for so long in all.
func (a *Activity) RecordDecision(r *Request, d *router.Reservation, model string, attempt int, queued time.Duration) {
	s := a.shard(r.number)
	s.mu.Lock()
	r.model, r.backend, r.matched, r.prompt, r.attempts = model, d.Backend, d.MatchedTokens, d.PromptTokens, attempt
	r.phase.Store(int32(FirstToken))
	s.mu.Unlock()
	at, ahead := d.Sent()
	a.decisions.add(DecisionRecord{
		At: at, RequestID: r.ID, Model: model, Backend: d.Backend.Name, Reason: d.Reason,
		MatchedTokens: d.MatchedTokens, PromptTokens: d.PromptTokens, AheadTokens: ahead, QueueTime: queued, Attempt: attempt,
	})
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

// InFlight are the requests in flight, oldest first.
type InFlight struct {
	Oldest []InFlightRequest
	Queued []InFlightRequest // the oldest that wait for a backend; some of them may be in Oldest too
	Total  int               // in flight
}

// maxScannedEntries bounds for how long listing requests locks a shard.
const maxScannedEntries = 2048

// OldestRequests lists up to limit of the oldest requests in flight, and up to queuedLimit of the
// oldest queued ones.
func (a *Activity) OldestRequests(limit, queuedLimit int) InFlight {
	var out InFlight
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		out.Total += s.count
		queued := 0
		for n, r := 0, s.root.next; n < maxScannedEntries && r != &s.root; n, r = n+1, r.next {
			if n < limit {
				out.Oldest = append(out.Oldest, r.infoLocked())
			}
			if queued < queuedLimit && Phase(r.phase.Load()) == Queued {
				queued++
				out.Queued = append(out.Queued, r.infoLocked())
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
		for n, r := 0, s.root.next; n < maxScannedEntries && r != &s.root; n, r = n+1, r.next {
			if r.model != "" && Phase(r.phase.Load()) == Queued {
				out[r.model]++
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

// infoLocked returns r for operators. The shard's lock is held.
func (r *Request) infoLocked() InFlightRequest {
	f := InFlightRequest{
		Handle: formatHandle(r.number), RequestID: r.ID, Phase: Phase(r.phase.Load()), Endpoint: r.Endpoint,
		Model: r.model, Key: r.key, Arrived: r.Arrived, PromptTokens: r.prompt, Attempts: r.attempts,
	}
	if r.backend != nil && f.Phase != Queued {
		f.Backend, f.MatchedTokens = r.backend.Name, r.matched
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
	for r := s.root.next; r != &s.root; r = r.next {
		if r.number == number {
			r.cancelLocked()
			return true
		}
	}
	return false
}

// cancelLocked is Cancel for r. The shard's lock is held, so that the connection is still the request's own.
func (r *Request) cancelLocked() {
	if r.cancelled.Swap(true) {
		return
	}
	if r.uploading {
		r.uploadInterrupted = true
		_ = r.Conn.SetReadDeadline(time.Unix(1, 0)) // fails where there are none; then the body has to end by itself
		return
	}
	if r.cancel != nil {
		r.cancel(ErrCancelled)
	}
	if r.inBackground {
		return
	}
	_ = r.Conn.SetWriteDeadline(time.Now().Add(CancelGrace)) // it may be waiting for a client that does not read
}
