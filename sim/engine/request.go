package engine

import "time"

// Request is one sequence: a prompt and an answer of a given length. The engine owns
// it from Add until it has ended.
type Request struct {
	Prompt int // tokens
	Answer int // tokens, at least one

	// Blocks are the chained hashes of the leading full blocks of the prompt followed
	// by the answer. Blocks beyond them are computed but not cached.
	Blocks []BlockHash

	Priority int // lower first; see Config.PriorityScheduling

	Owner any // the caller's; not used by the engine

	// Set by the engine:
	Cached     int           // prompt tokens found in the cache
	Created    int           // prompt tokens computed and put into the cache; 0 until all are computed
	Arrived    time.Duration // Add
	Started    time.Duration // admitted
	FirstToken time.Duration
	Finished   time.Duration

	state     state
	computed  int     // prompt tokens in the cache, by a hit or by prefill
	full      int     // leading blocks that are full
	blocks    []int32 // blocks in use, in order
	reserved  int     // blocks reserved for the rest of the answer
	joined    int64   // step of the first token
	due       int64   // step that next fills a block or ends the answer
	heapIndex int     // in the heap of decoding requests
	tokens    int     // generated, once it has ended
}

type state int8

const (
	unknown state = iota
	waiting
	prefilling
	decoding
	ended
)

// Computed returns how many prompt tokens are in the cache after the engine's last
// step; 0 before the request is admitted.
func (r *Request) Computed() (promptTokens int) { return r.computed }

// Generated returns the number of answer tokens after e's last step.
func (r *Request) Generated(e *Engine) int {
	if r.state == decoding {
		return int(e.step-r.joined) + 1
	}
	return r.tokens
}

// decodeHeap orders decoding requests by due.
type decodeHeap []*Request

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
