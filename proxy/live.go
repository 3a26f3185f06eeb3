package proxy

import (
	"cmp"
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

// Phase is how far a request in flight has come.
type Phase int32

const (
	Uploading  Phase = iota // its body is read
	Held                    // it waits for a backend
	FirstToken              // it was sent, and nothing of its answer was relayed
	Answering               // the client gets its answer
)

func (p Phase) String() string {
	return [...]string{"upload", "held", "first token", "answering"}[p]
}

// errCancelled is the cause with which the wait of a request ends that an operator
// has cancelled.
var errCancelled = errors.New("an operator has cancelled the request")

// liveShards is how many locks the requests in flight are spread over.
const liveShards = 8

// lastWords is how long the client of a cancelled request has to take the error
// that says so.
const lastWords = 2 * time.Second

// Live is what operators see of the requests in flight, and of those that were.
// Safe for concurrent use.
type Live struct {
	numbers   atomic.Uint64
	shards    [liveShards]liveShard
	decisions decisionRing
	pulse     pulse
}

// liveShard is some of the requests in flight, in the order of their arrival: the
// ring's root is no request.
type liveShard struct {
	mu    sync.Mutex
	root  presence
	count int
}

func newLive() *Live {
	l := &Live{pulse: newPulse()}
	// Not from 1: what an operator saw before a restart must name nobody after it.
	l.numbers.Store(rand.Uint64())
	for i := range l.shards {
		root := &l.shards[i].root
		root.prev, root.next = root, root
	}
	return l
}

// presence is one exchange among those in flight. It is part of the exchange, so
// that it costs no memory of its own.
type presence struct {
	number    uint64
	phase     atomic.Int32 // a Phase
	cancelled atomic.Bool

	// Guarded by the shard's mu.
	prev, next *presence
	exchange   *exchange // of it only what never changes is read, and its connection's deadlines set
	reading    bool      // its body, so that a read deadline ends it
	cut        bool      // its body was, by such a deadline
	wait       *wait     // ends it; nil: it has not come so far
	model, key string
	backend    *backends.Backend
	matched    int
	prompt     int
	attempts   int
}

func (l *Live) shard(number uint64) *liveShard { return &l.shards[number%liveShards] }

// enter puts an exchange among those in flight, until leave.
func (l *Live) enter(x *exchange) {
	p := &x.presence
	p.number, p.exchange = l.numbers.Add(1), x
	s := l.shard(p.number)
	s.mu.Lock()
	p.prev, p.next = s.root.prev, &s.root
	p.prev.next, p.next.prev = p, p
	s.count++
	s.mu.Unlock()
}

// leave ends enter. Afterwards the exchange cannot be cancelled.
func (l *Live) leave(p *presence) {
	s := l.shard(p.number)
	s.mu.Lock()
	if p.next != nil {
		p.prev.next, p.next.prev = p.next, p.prev
		p.prev, p.next = nil, nil
		s.count--
	}
	s.mu.Unlock()
}

// reads notes that the body of an exchange is read, until hasRead. One that was
// cancelled before has paced to see that.
func (l *Live) reads(p *presence) {
	s := l.shard(p.number)
	s.mu.Lock()
	p.reading = true
	s.mu.Unlock()
}

// hasRead ends reads, and reports whether it was cancelled in between. From here on
// nothing but the server sets read deadlines: it takes one that passes for the end of
// the client, and every later request on the connection for one that nobody waits for.
func (l *Live) hasRead(p *presence) (cut bool) {
	s := l.shard(p.number)
	s.mu.Lock()
	p.reading, cut = false, p.cut
	s.mu.Unlock()
	return cut
}

// waits notes that the exchange asks for a backend, and its wait. One that was
// cancelled before is ended at once.
func (l *Live) waits(x *exchange) {
	p := &x.presence
	s := l.shard(p.number)
	s.mu.Lock()
	p.wait, p.model = x.wait, x.outcome.Model
	if x.holder != nil {
		p.key = x.holder.Name
	}
	p.phase.Store(int32(Held))
	if p.cancelled.Load() {
		x.wait.End(errCancelled)
	}
	s.mu.Unlock()
}

// sent notes where the exchange is sent.
func (l *Live) sent(x *exchange, d *router.Decision) {
	p := &x.presence
	s := l.shard(p.number)
	s.mu.Lock()
	p.backend, p.matched, p.prompt, p.attempts = d.Backend, d.MatchedTokens, d.PromptTokens, x.attempts
	p.phase.Store(int32(FirstToken))
	s.mu.Unlock()
	l.decisions.add(x, d)
}

// InFlight is one request as Requests lists it. There is nothing in it of what it asks or of its key.
type InFlight struct {
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

// Listing is the requests in flight as Requests lists them, oldest first.
type Listing struct {
	Oldest []InFlight
	Held   []InFlight // the oldest that wait for a backend; some of them may be in Oldest too
	All    int        // how many there are
}

// mostWalked bounds for how long a shard is locked by who looks at it.
const mostWalked = 2048

// Requests lists the oldest requests in flight, most of them, and as many held ones.
func (l *Live) Requests(most, mostHeld int) Listing {
	var out Listing
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		out.All += s.count
		held := 0
		for n, p := 0, s.root.next; n < mostWalked && p != &s.root; n, p = n+1, p.next {
			if n < most {
				out.Oldest = append(out.Oldest, p.shown())
			}
			if held < mostHeld && Phase(p.phase.Load()) == Held {
				held++
				out.Held = append(out.Held, p.shown())
			}
		}
		s.mu.Unlock()
	}
	out.Oldest, out.Held = oldest(out.Oldest, most), oldest(out.Held, mostHeld)
	return out
}

func oldest(list []InFlight, most int) []InFlight {
	slices.SortFunc(list, func(a, b InFlight) int {
		return cmp.Or(a.Arrived.Compare(b.Arrived), cmp.Compare(a.Handle, b.Handle))
	})
	return list[:min(most, len(list))]
}

// shown is called under the shard's lock.
func (p *presence) shown() InFlight {
	x := p.exchange
	f := InFlight{
		Handle: handle(p.number), RequestID: x.id, Phase: Phase(p.phase.Load()), Endpoint: x.endpoint.path,
		Model: p.model, Key: p.key, Arrived: x.arrived, PromptTokens: p.prompt, Attempts: p.attempts,
	}
	if p.backend != nil && f.Phase != Held {
		f.Backend, f.MatchedTokens = p.backend.Name, p.matched
	}
	return f
}

func handle(number uint64) string { return strconv.FormatUint(number, 36) }

// Cancel ends the request that has the handle: its replica's connection is closed,
// and its client is told. It reports whether there was one in flight.
func (l *Live) Cancel(h string) bool {
	number, err := strconv.ParseUint(h, 36, 64)
	if err != nil || handle(number) != h {
		return false
	}
	s := l.shard(number)
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := s.root.next; p != &s.root; p = p.next {
		if p.number == number {
			p.end()
			return true
		}
	}
	return false
}

// end is Cancel, under the shard's lock: the exchange cannot leave meanwhile, so
// the connection is still its own.
func (p *presence) end() {
	if p.cancelled.Swap(true) {
		return
	}
	conn := &p.exchange.w.conn
	if p.reading {
		p.cut = true
		_ = conn.SetReadDeadline(time.Unix(1, 0)) // fails where there are none; then the body has to end by itself
		return
	}
	if p.wait != nil {
		p.wait.End(errCancelled)
	}
	_ = conn.SetWriteDeadline(time.Now().Add(lastWords)) // it may be waiting for a client that does not read
}
