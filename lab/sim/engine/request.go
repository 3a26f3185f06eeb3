package engine

import (
	"cmp"
	"time"
)

// Request is one sequence: a prompt and an output of a given length. The engine owns
// it from Add until it has ended.
type Request struct {
	Prompt int // tokens
	Output int // tokens, at least one

	// Blocks are the chained hashes of the leading full blocks of the prompt followed
	// by the output. Blocks beyond them are computed but not cached.
	Blocks []BlockHash

	Priority int // lower first; see Config.PriorityScheduling

	// PrefillRequest keeps the blocks pinned when the request has ended, for another engine to
	// read: until ReleasePinned, or the end of the lease.
	PrefillRequest bool

	// RemoteTokens is the number of leading prompt tokens whose KV another engine has pinned.
	// Those that the cache lacks are transferred, see EndTransfer. At least the last token of
	// the prompt is computed.
	RemoteTokens int

	Owner any // the caller's; not used by the engine

	// Set by the engine:
	Cached     int           // prompt tokens found in the cache or on the host
	Created    int           // prompt tokens computed and put into the cache; 0 until all are computed
	Arrived    time.Duration // Add
	Started    time.Duration // admitted first
	FirstToken time.Duration
	Preempted  time.Duration // last
	Finished   time.Duration

	Transferred int           // remote tokens that are transferred or were
	TransferEnd time.Duration // when they are there, unless the transfer fails
	Corrupt     bool          // its prompt's KV is not the prompt's, so that the output is wrong

	state     state
	arrival   int64         // number of its Add
	admission int64         // number of its last admission; 0: none
	computed  int           // tokens in the cache, by a hit or by prefill
	chunk     int           // tokens of the prompt to compute in this step
	full      int           // leading blocks that are full
	blocks    []int32       // blocks in use, in order
	running   []int32       // blocks in use that the other groups compute with
	keep      [2]int        // boundaries in blocks after which the other groups keep what continues the prompt; 0: none
	joined    int64         // step of the first token, had it not been preempted
	due       int64         // step that next needs a block or ends the output
	heapIndex int           // in the heap of decoding requests
	readyAt   time.Duration // when it leaves the API server
	tokens    int           // generated, while it is not decoding

	hostCached int           // of Cached, those loaded from the host tier
	loadedAt   time.Duration // when the last of its blocks is loaded
	leaseEnd   time.Duration // of its pinned blocks
}

type state int8

const (
	unknown  state = iota
	arriving       // at the API server
	waiting
	loading      // from the host tier
	transferring // from another engine
	prefilling
	decoding
	pinned // ended, with its blocks
	ended
)

// Ended reports whether r was aborted, or has ended and has no pinned blocks.
func (r *Request) Ended() bool { return r.state == ended }

// Computed returns how many prompt tokens are in the cache after the engine's last
// step; 0 before the request is admitted, and again after it was preempted.
func (r *Request) Computed() (promptTokens int) { return min(r.computed, r.Prompt) }

// contextTokens returns how many tokens r's prefill has to bring into the cache: the prompt,
// and what was generated before it was preempted.
func (r *Request) contextTokens() int { return r.Prompt + r.tokens }

// compareUrgency orders requests by priority and arrival.
func compareUrgency(a, b *Request) int {
	return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.arrival, b.arrival))
}

// Generated returns the number of output tokens after e's last step.
func (r *Request) Generated(e *Engine) int {
	if r.state == decoding {
		return int(e.step-r.joined) + 1
	}
	return r.tokens
}

// decodeHeap orders decoding requests by due.
type decodeHeap []*Request

// appendDue appends the requests in the subtree of index at that are due by a step.
func (h decodeHeap) appendDue(step int64, at int, into []*Request) []*Request {
	if at >= len(h) || h[at].due > step {
		return into
	}
	into = append(into, h[at])
	into = h.appendDue(step, 2*at+1, into)
	return h.appendDue(step, 2*at+2, into)
}

func (h decodeHeap) Len() int           { return len(h) }
func (h decodeHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h decodeHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = i, j
}

func (h *decodeHeap) Push(x any) {
	r := x.(*Request)
	r.heapIndex = len(*h)
	*h = append(*h, r)
}

func (h *decodeHeap) Pop() any {
	old := *h
	r := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return r
}
