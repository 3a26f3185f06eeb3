// Package engine models a vLLM engine in virtual time: the scheduler, the prefix
// cache, and the duration of a step.
package engine

import (
	"cmp"
	"container/heap"
	"fmt"
	"time"
)

// Engine is a vLLM engine as a state machine in virtual time: the caller adds
// requests and asks for one step after the other. Times are durations since a
// start that the caller chooses. Not safe for concurrent use.
//
// Every decoding request gets exactly one token in every step, since a request
// is admitted only when blocks for its whole answer fit. So nothing is stored
// for a token: a step costs the requests that start, end or fill a block in it.
type Engine struct {
	cfg  Config
	pool *blockPool

	waiting  []*Request // first come, first served
	partial  *Request   // admitted, its prompt not done: the budget ran out in its midst
	decoding decodeHeap

	step    int64 // steps taken
	context int   // tokens in the contexts of all decoding requests

	// blockedAt is the pool's count of changes when the first waiting request did
	// not fit: asking again is useless until something was freed or became
	// shareable. 0: it was not asked for.
	blockedAt uint64

	scratch []int32
	stats   Stats
}

// StepResult is what one step brought. Its slices are new with each step.
type StepResult struct {
	End      time.Duration // when the step ends, and its outputs exist
	First    []*Request    // these got the first token of their answer
	Finished []*Request    // these got the last one; a request can be in both
	Decoded  int           // how many got a token that was not their first
	// Prefilled is how many prompt tokens were computed.
	Prefilled int
}

// New returns an idle engine with an empty cache.
func New(cfg Config) *Engine {
	cfg = cfg.WithDefaults()
	return &Engine{cfg: cfg, pool: newBlockPool(cfg.KVTokens/cfg.BlockSize, cfg.HiddenEvictions)}
}

// NewPooled returns idle engines that share one KV cache of their sizes
// together, as no real fleet does: what one has computed, all can hit. The
// first one's block size holds for all.
func NewPooled(cfgs ...Config) []*Engine {
	engines := make([]*Engine, len(cfgs))
	blocks := 0
	for i, cfg := range cfgs {
		cfg = cfg.WithDefaults()
		cfg.BlockSize = cmp.Or(cfgs[0].BlockSize, cfg.BlockSize)
		blocks += cfg.KVTokens / cfg.BlockSize
		engines[i] = &Engine{cfg: cfg}
	}
	pool := newBlockPool(blocks, cfgs[0].HiddenEvictions)
	for _, e := range engines {
		e.pool = pool
	}
	return engines
}

// SetSpeed changes the factor that divides every duration, from the next step on.
func (e *Engine) SetSpeed(speed float64) { e.cfg.Speed = speed }

// Idle reports that a step would do nothing.
func (e *Engine) Idle() bool {
	return len(e.waiting) == 0 && e.partial == nil && len(e.decoding) == 0
}

// Add queues r. It fails when r could never be admitted.
func (e *Engine) Add(r *Request, now time.Duration) error {
	if r.Prompt < 1 || r.Answer < 1 {
		return fmt.Errorf("a request needs at least one token of prompt and one of answer, not %d and %d", r.Prompt, r.Answer)
	}
	if need, have := e.blocksFor(r.Prompt+r.Answer), len(e.pool.refs); need > have {
		return fmt.Errorf("prompt and answer need %d blocks of KV cache, which has %d", need, have)
	}
	r.Arrived = now
	r.state = waiting
	e.waiting = append(e.waiting, r)
	return nil
}

// Abort removes r, wherever it is, and frees its blocks; what they hold stays
// cached. Aborting a request that has ended, or was never added, does nothing.
func (e *Engine) Abort(r *Request) {
	switch r.state {
	case waiting:
		for i, w := range e.waiting {
			if w == r {
				e.waiting = append(e.waiting[:i], e.waiting[i+1:]...)
				break
			}
		}
		e.blockedAt = 0 // another is first now
	case prefilling:
		e.partial = nil
		e.free(r)
	case decoding:
		r.tokens = r.Generated(e)
		heap.Remove(&e.decoding, r.place)
		e.context -= r.Prompt + r.tokens
		e.free(r)
	}
	r.state = ended
}

// ResetPrefixCache forgets all cached blocks. Like vLLM it does so only while
// no request runs, and reports whether it did.
func (e *Engine) ResetPrefixCache() bool {
	if e.pool.free < len(e.pool.refs) {
		return false
	}
	changes := e.pool.changes
	*e.pool = *newBlockPool(len(e.pool.refs), e.cfg.HiddenEvictions)
	e.pool.changes = changes + 1
	return true
}

// Hit returns how many tokens of a prompt would be found in the cache now.
func (e *Engine) Hit(prompt int, blocks []BlockHash) int {
	e.scratch = e.leading(prompt, blocks, e.scratch[:0])
	return len(e.scratch) * e.cfg.BlockSize
}

// Step admits what fits, computes one step that starts at now, and says when it
// ends. Requests added before that end have to wait for the next step.
func (e *Engine) Step(now time.Duration) StepResult {
	if e.Idle() {
		return StepResult{End: now}
	}
	e.step++
	decodes := len(e.decoding)
	budget := e.cfg.StepTokens - decodes
	cost := e.stepCost(decodes)

	var done StepResult
	prefilled := 0
	if r := e.partial; r != nil && budget > 0 {
		n, t := e.prefill(r, budget, &done)
		prefilled, cost = prefilled+n, cost+t
	}
	for e.partial == nil && prefilled < budget && len(e.waiting) > 0 && e.running() < e.cfg.MaxSeqs {
		r := e.waiting[0]
		if e.blockedAt == e.pool.changes || !e.admit(r, now) {
			e.blockedAt = e.pool.changes
			break
		}
		e.waiting = e.waiting[1:]
		n, t := e.prefill(r, budget-prefilled, &done)
		prefilled, cost = prefilled+n, cost+t
	}

	// Last, since the scheduler learns only at the step's end which answers
	// ended: their blocks and places are not free before the next one.
	e.context += decodes
	done.Finished = e.finish()

	done.Decoded, done.Prefilled = decodes, prefilled
	done.End = now + time.Duration(cost/e.cfg.Speed)
	e.count(decodes, prefilled, len(done.First))
	e.stamp(&done)
	return done
}

// running counts the requests that were admitted and have not ended.
func (e *Engine) running() int {
	n := len(e.decoding)
	if e.partial != nil {
		n++
	}
	return n
}

// stepCost is the part of a step's cost, in nanoseconds, that does not depend
// on prefill.
func (e *Engine) stepCost(decodes int) float64 {
	return float64(e.cfg.StepTime) + float64(decodes)*float64(e.cfg.DecodeTime) + float64(e.context)*float64(e.cfg.ContextTime)
}

// finish looks after the requests that filled a block with this step's token,
// and returns those for which it was the last one.
func (e *Engine) finish() []*Request {
	var finished []*Request
	for len(e.decoding) > 0 && e.decoding[0].due <= e.step {
		r := e.decoding[0]
		n := r.Generated(e)
		e.fillBlocks(r, r.Prompt+n-1)
		if n >= r.Answer {
			heap.Pop(&e.decoding)
			e.context -= r.Prompt + n
			r.tokens, r.state = n, ended
			e.free(r)
			finished = append(finished, r)
			continue
		}
		r.due = e.nextDue(r)
		heap.Fix(&e.decoding, 0)
	}
	return finished
}

// admit gives r the cached blocks of its prompt and new ones for the rest of
// it, if those and the answer's fit beside what was promised to others.
func (e *Engine) admit(r *Request, now time.Duration) bool {
	e.scratch = e.leading(r.Prompt, r.Blocks, e.scratch[:0])
	hits := e.scratch
	total := e.blocksFor(r.Prompt + r.Answer)
	if total-len(hits)+e.pool.idle(hits) > e.pool.free-e.pool.promised {
		return false
	}
	r.held = make([]int32, 0, total)
	for _, b := range hits {
		e.pool.share(b)
	}
	r.held = append(r.held, hits...)
	for len(r.held) < e.blocksFor(r.Prompt) {
		r.held = append(r.held, e.pool.take())
	}
	r.reserved = total - len(r.held)
	e.pool.promised += r.reserved

	r.Cached = len(hits) * e.cfg.BlockSize
	r.computed, r.full = r.Cached, len(hits)
	r.Started = now
	r.state = prefilling
	e.stats.PrefixQueries += int64(r.Prompt)
	e.stats.PrefixHits += int64(r.Cached)
	return true
}

// leading returns the cached blocks that a prompt begins with.
func (e *Engine) leading(prompt int, blocks []BlockHash, into []int32) []int32 {
	if e.cfg.NoPrefixCache {
		return into
	}
	// The last token is always recomputed: its output is what is wanted.
	most := min((prompt-1)/e.cfg.BlockSize, len(blocks))
	return e.pool.leading(blocks[:most], into)
}

// prefill computes up to budget tokens of r's prompt and returns how many and
// what they cost in nanoseconds.
func (e *Engine) prefill(r *Request, budget int, done *StepResult) (tokens int, cost float64) {
	n := min(r.Prompt-r.computed, budget)
	depth := float64(r.computed) + float64(n)/2
	cost = float64(n) * 1e9 / e.cfg.PrefillRate * (1 + e.cfg.QuadraticDepth*depth)
	r.computed += n
	// Full blocks can be hit from here on, by a request later in this very step
	// too: within a layer the keys are written before anyone attends to them.
	e.fillBlocks(r, r.computed)
	if r.computed < r.Prompt {
		e.partial, r.state = r, prefilling
		return n, cost
	}
	e.partial = nil
	if !e.cfg.NoPrefixCache {
		r.Created = r.full*e.cfg.BlockSize - r.Cached
	}
	done.First = append(done.First, r)
	r.joined, r.state = e.step, decoding
	e.context += r.Prompt + 1
	r.due = e.nextDue(r)
	heap.Push(&e.decoding, r)
	return n, cost
}

// fillBlocks makes the blocks that r has filled with its first n tokens
// available to others and takes a new one for the next token of the answer.
func (e *Engine) fillBlocks(r *Request, n int) {
	for ; r.full < n/e.cfg.BlockSize; r.full++ {
		if r.full < len(r.Blocks) && !e.cfg.NoPrefixCache {
			e.pool.fill(r.held[r.full], r.Blocks[r.full])
		}
	}
	if n >= r.Prompt && r.reserved > 0 && len(r.held) == r.full {
		r.held = append(r.held, e.pool.take())
		r.reserved--
		e.pool.promised--
	}
}

// nextDue is the step in which r next fills a block or ends. In the step k
// after its first token, token k of the answer is computed and token k+1 found.
func (e *Engine) nextDue(r *Request) int64 {
	toFull := (r.full+1)*e.cfg.BlockSize - r.Prompt
	return r.joined + int64(min(toFull, r.Answer-1))
}

func (e *Engine) free(r *Request) {
	e.pool.release(r.held)
	e.pool.promised -= r.reserved
	r.held, r.reserved = nil, 0
}

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.cfg.BlockSize - 1) / e.cfg.BlockSize
}
