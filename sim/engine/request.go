package engine

import "time"

// Request is one sequence for an Engine: a prompt, and an answer whose length
// is settled beforehand. The engine owns it from Add until it has ended.
type Request struct {
	Prompt int // tokens
	Answer int // tokens, at least one

	// Blocks are the chained hashes of the leading full blocks of the prompt
	// followed by the answer. Blocks beyond its end are computed, but cached
	// for nobody.
	Blocks []BlockHash

	// Owner is the caller's; the engine leaves it alone.
	Owner any

	// What became of it, set by the engine.
	Cached     int           // prompt tokens found in the cache
	Created    int           // prompt tokens computed and put into the cache; 0 until all are computed
	Arrived    time.Duration // Add
	Started    time.Duration // admitted
	FirstToken time.Duration
	Finished   time.Duration

	state    state
	computed int     // prompt tokens in the cache, by a hit or by prefill
	full     int     // leading blocks that are full
	held     []int32 // blocks in use, in order
	reserved int     // blocks promised for the rest of the answer
	joined   int64   // step of the first token
	due      int64   // step in which a block is filled or the answer ends
	place    int     // in the heap of decoding requests
	tokens   int     // generated, once it has ended
}

type state int8

const (
	unknown state = iota
	waiting
	prefilling
	decoding
	ended
)

// Computed returns how many tokens of the prompt are in the cache after the
// engine's last step; 0 until it is admitted.
func (r *Request) Computed() int { return r.computed }

// Generated returns how many tokens of the answer exist after e's last step.
func (r *Request) Generated(e *Engine) int {
	if r.state == decoding {
		return int(e.step-r.joined) + 1
	}
	return r.tokens
}

// decodeHeap orders decoding requests by the step that next concerns them.
type decodeHeap []*Request

func (h decodeHeap) Len() int           { return len(h) }
func (h decodeHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h decodeHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

func (h *decodeHeap) Push(x any) {
	r := x.(*Request)
	r.place = len(*h)
	*h = append(*h, r)
}

func (h *decodeHeap) Pop() any {
	old := *h
	r := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return r
}
