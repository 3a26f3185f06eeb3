package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// Phase is how far a request in flight has come.
type Phase int32

const (
	Uploading  Phase = iota // its body is read
	Queued                  // it waits for a backend
	FirstToken              // it was sent, and nothing of its answer was relayed
	Responding              // the client gets its answer
)

func (p Phase) String() string {
	return [...]string{"upload", "queued", "first token", "answering"}[p]
}

// errCancelled is the cause with which the wait of a request ends that an operator
// has cancelled.
var errCancelled = errors.New("an operator has cancelled the request")

// inFlightShards is how many locks the requests in flight are spread over.
const inFlightShards = 8

// cancelGrace is how long the client of a cancelled request has to take the error
// that says so.
const cancelGrace = 2 * time.Second

// Activity is what operators see of the requests in flight, and of those that were.
// Safe for concurrent use.
type Activity struct {
	numbers   atomic.Uint64
	shards    [inFlightShards]inFlightShard
	decisions decisionRing
	stats     statsWindow
}

// inFlightShard is some of the requests in flight, in the order of their arrival: the
// ring's root is no request.
type inFlightShard struct {
	mu    sync.Mutex
	root  inFlightEntry
	count int
}

func newActivity() *Activity {
	l := &Activity{stats: newStatsWindow()}
	// Not from 1: what an operator saw before a restart must name nobody after it.
	l.numbers.Store(rand.Uint64())
	for i := range l.shards {
		root := &l.shards[i].root
		root.prev, root.next = root, root
	}
	return l
}

// inFlightEntry is one exchange among those in flight. It is part of the exchange, so
// that it costs no memory of its own.
type inFlightEntry struct {
	number    uint64
	phase     atomic.Int32 // a Phase
	cancelled atomic.Bool

	// Guarded by the shard's mu.
	prev, next      *inFlightEntry
	request         *request        // of it only what never changes is read, and its connection's deadlines set
	readingBody     bool            // its body, so that a read deadline ends it
	bodyInterrupted bool            // its body was, by such a deadline
	context         *attemptContext // of its latest attempt, cancelled with the request; nil: it has not come so far
	model, key      string
	backend         *backends.Backend
	matched         int
	prompt          int
	attempts        int
}

func (l *Activity) shard(number uint64) *inFlightShard { return &l.shards[number%inFlightShards] }

// add puts an exchange among those in flight, until leave.
func (l *Activity) add(x *request) {
	p := &x.inFlight
	p.number, p.request = l.numbers.Add(1), x
	s := l.shard(p.number)
	s.mu.Lock()
	p.prev, p.next = s.root.prev, &s.root
	p.prev.next, p.next.prev = p, p
	s.count++
	s.mu.Unlock()
}

// remove ends enter. Afterwards the exchange cannot be cancelled.
func (l *Activity) remove(p *inFlightEntry) {
	s := l.shard(p.number)
	s.mu.Lock()
	if p.next != nil {
		p.prev.next, p.next.prev = p.next, p.prev
		p.prev, p.next = nil, nil
		s.count--
	}
	s.mu.Unlock()
}

// beginBody notes that the body of an exchange is read, until endBody. One that was
// cancelled before has paced to see that.
func (l *Activity) beginBody(p *inFlightEntry) {
	s := l.shard(p.number)
	s.mu.Lock()
	p.readingBody = true
	s.mu.Unlock()
}

// endBody ends reads, and reports whether it was cancelled in between. From here on
// nothing but the server sets read deadlines: it takes one that passes for the end of
// the client, and every later request on the connection for one that nobody waits for.
func (l *Activity) endBody(p *inFlightEntry) (cut bool) {
	s := l.shard(p.number)
	s.mu.Lock()
	p.readingBody, cut = false, p.bodyInterrupted
	s.mu.Unlock()
	return cut
}

// beginWait notes that the exchange asks for a backend, and its wait. One that was
// cancelled before is ended at once.
func (l *Activity) beginWait(x *request) {
	p := &x.inFlight
	s := l.shard(p.number)
	s.mu.Lock()
	p.context, p.model = x.context, x.outcome.Model
	if x.holder != nil {
		p.key = x.holder.Name
	}
	p.phase.Store(int32(Queued))
	if p.cancelled.Load() {
		x.context.cancel(errCancelled)
	}
	s.mu.Unlock()
}

// recordAttempt notes where the exchange is sent.
func (l *Activity) recordAttempt(x *request, d *router.Decision) {
	p := &x.inFlight
	s := l.shard(p.number)
	s.mu.Lock()
	p.backend, p.matched, p.prompt, p.attempts = d.Backend, d.MatchedTokens, d.PromptTokens, x.history.sent
	p.phase.Store(int32(FirstToken))
	s.mu.Unlock()
	l.decisions.add(x, d)
}

// InFlightRequest is one request as Requests lists it. There is nothing in it of what it asks or of its key.
type InFlightRequest struct {
	Handle    string // names it for Cancel, and no other request
	RequestID string // as the client named it, or was told
	Phase     Phase
	Endpoint  string
	Model     string // empty until the body was read
	Key       string // name of the API key's holder; empty: none
	Backend   string // empty unless it was sent there, and that has not failed
	Arrived   time.Time

	MatchedTokens, PromptTokens int // of the decision for Backend, and of the latest one
	Attempts                    int // made so far
}

// Requests is the requests in flight as Requests lists them, oldest first.
type Requests struct {
	Oldest []InFlightRequest
	Queued []InFlightRequest // the oldest that wait for a backend; some of them may be in Oldest too
	Total  int               // how many there are
}

// maxScannedEntries bounds for how long a shard is locked by who looks at it.
const maxScannedEntries = 2048

// Requests lists the oldest requests in flight, most of them, and as many held ones.
func (l *Activity) Requests(most, mostHeld int) Requests {
	var out Requests
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		out.Total += s.count
		held := 0
		for n, p := 0, s.root.next; n < maxScannedEntries && p != &s.root; n, p = n+1, p.next {
			if n < most {
				out.Oldest = append(out.Oldest, p.info())
			}
			if held < mostHeld && Phase(p.phase.Load()) == Queued {
				held++
				out.Queued = append(out.Queued, p.info())
			}
		}
		s.mu.Unlock()
	}
	out.Oldest, out.Queued = oldest(out.Oldest, most), oldest(out.Queued, mostHeld)
	return out
}

func oldest(list []InFlightRequest, most int) []InFlightRequest {
	slices.SortFunc(list, func(a, b InFlightRequest) int {
		return cmp.Or(a.Arrived.Compare(b.Arrived), cmp.Compare(a.Handle, b.Handle))
	})
	return list[:min(most, len(list))]
}

// info is called under the shard's lock.
func (p *inFlightEntry) info() InFlightRequest {
	x := p.request
	f := InFlightRequest{
		Handle: handle(p.number), RequestID: x.id, Phase: Phase(p.phase.Load()), Endpoint: x.endpoint.path,
		Model: p.model, Key: p.key, Arrived: x.arrivedAt, PromptTokens: p.prompt, Attempts: p.attempts,
	}
	if p.backend != nil && f.Phase != Queued {
		f.Backend, f.MatchedTokens = p.backend.Name, p.matched
	}
	return f
}

func handle(number uint64) string { return strconv.FormatUint(number, 36) }

// Cancel ends the request that has the handle: its replica's connection is closed,
// and its client is told. It reports whether there was one in flight.
func (l *Activity) Cancel(h string) bool {
	number, err := strconv.ParseUint(h, 36, 64)
	if err != nil || handle(number) != h {
		return false
	}
	s := l.shard(number)
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := s.root.next; p != &s.root; p = p.next {
		if p.number == number {
			p.cancel()
			return true
		}
	}
	return false
}

// cancel is Cancel, under the shard's lock: the exchange cannot leave meanwhile, so
// the connection is still its own.
func (p *inFlightEntry) cancel() {
	if p.cancelled.Swap(true) {
		return
	}
	conn := &p.request.client.conn
	if p.readingBody {
		p.bodyInterrupted = true
		_ = conn.SetReadDeadline(time.Unix(1, 0)) // fails where there are none; then the body has to end by itself
		return
	}
	if p.context != nil {
		p.context.cancel(errCancelled)
	}
	_ = conn.SetWriteDeadline(time.Now().Add(cancelGrace)) // it may be waiting for a client that does not read
}

// maxDecisions is how many of the last decisions operators see.
const maxDecisions = 64

// DecisionRecord is where a request was sent, and why.
type DecisionRecord struct {
	Number    uint64 // counts all of them, from 1
	At        time.Time
	Handle    string // of the request
	RequestID string
	Model     string
	Backend   string
	Reason    string // as in the response's header

	MatchedTokens, PromptTokens int
	AheadTokens                 int           // uncached ones sent to the backend before, and not yet computed
	QueueTime                   time.Duration // that the request waited
	Attempt                     int           // from 1
}

// decisionRing keeps the last decisions.
type decisionRing struct {
	mu    sync.Mutex
	all   uint64
	slots [maxDecisions]decisionEntry
}

// decisionEntry is what is noted of a decision while its request waits to be sent.
type decisionEntry struct {
	at                         time.Time
	number                     uint64 // of the request
	id, model, backend, reason string
	matched, prompt, ahead     int
	queueTime                  time.Duration
	attempt                    int
}

func (r *decisionRing) add(x *request, d *router.Decision) {
	at, ahead := d.Sent()
	r.mu.Lock()
	r.slots[r.all%maxDecisions] = decisionEntry{
		at, x.inFlight.number, x.id, x.outcome.Model, d.Backend.Name, d.Reason, d.MatchedTokens, d.PromptTokens, ahead, x.history.queueTime, x.history.sent,
	}
	r.all++
	r.mu.Unlock()
}

// Decisions lists the last decisions, newest first.
func (l *Activity) Decisions() []DecisionRecord {
	r := &l.decisions
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []DecisionRecord
	for n := r.all; n > 0 && n+maxDecisions > r.all; n-- {
		d := &r.slots[(n-1)%maxDecisions]
		out = append(out, DecisionRecord{
			Number: n, At: d.at, Handle: handle(d.number), RequestID: d.id, Model: d.model, Backend: d.backend, Reason: d.reason,
			MatchedTokens: d.matched, PromptTokens: d.prompt, AheadTokens: d.ahead, QueueTime: d.queueTime, Attempt: d.attempt,
		})
	}
	return out
}

// Explanation says why the backend was chosen.
func (d *DecisionRecord) Explanation() string {
	var s strings.Builder
	switch d.Reason {
	case router.ReasonPrefix:
		s.WriteString("holds the most of the prompt")
	case router.ReasonSpill:
		s.WriteString("another holds more of the prompt, but has too much to do")
	case router.ReasonCold:
		s.WriteString("no backend holds any of the prompt; this one has the least to do")
	case router.ReasonLoad:
		s.WriteString("there is no prompt to go by; this one has the least to do")
	case router.ReasonOnly:
		s.WriteString("no other backend could take it")
	default:
		s.WriteString("policy " + d.Reason)
	}
	if d.AheadTokens > 0 {
		fmt.Fprintf(&s, ", behind %d uncached tokens sent before", d.AheadTokens)
	}
	if d.QueueTime > 0 {
		fmt.Fprintf(&s, "; queued for %v", d.QueueTime.Round(time.Millisecond))
	}
	if d.Attempt > 1 {
		fmt.Fprintf(&s, "; attempt %d", d.Attempt)
	}
	return s.String()
}
