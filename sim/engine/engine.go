// Package engine models a vLLM engine in virtual time: the scheduler, the prefix
// cache, and the duration of a step.
package engine

import (
	"cmp"
	"container/heap"
	"fmt"
	"slices"
	"time"
)

// Config describes the simulated GPU and scheduler. Zero fields take their defaults,
// which are those of an 8B-class model on one GPU.
type Config struct {
	BlockSize int // tokens; default 16
	KVTokens  int // size of the KV cache, rounded down to whole blocks; default 400,000

	StepTokens int // token budget of a step, decodes and prefill together; default 8,192
	MaxSeqs    int // requests running at once; default 256

	StepTime       time.Duration // of a step without work; default 8 ms
	PrefillRate    float64       // prompt tokens per second; default 8,000
	DecodeTime     time.Duration // for each decoding request; default 40 µs
	ContextTime    time.Duration // for each token of context decoded over; default 24 ns
	QuadraticDepth float64       // share by which each previous token makes a prompt token more expensive; default 0, 1.9e-5 is realistic
	Speed          float64       // divides every duration; default 1

	NoPrefixCache bool // disables the prefix cache

	// PriorityScheduling starts waiting requests in the order of Request.Priority instead
	// of arrival. Unlike vLLM's, it preempts no running request.
	PriorityScheduling bool

	// HiddenEvictions is the number of further blocks that each allocation evicts, as if
	// by another tenant; default 0.
	HiddenEvictions float64
}

func (c Config) WithDefaults() Config {
	c.BlockSize = cmp.Or(c.BlockSize, 16)
	c.KVTokens = cmp.Or(c.KVTokens, 400_000)
	c.StepTokens = cmp.Or(c.StepTokens, 8192)
	c.MaxSeqs = cmp.Or(c.MaxSeqs, 256)
	c.StepTime = cmp.Or(c.StepTime, 8*time.Millisecond)
	c.PrefillRate = cmp.Or(c.PrefillRate, 8000)
	c.DecodeTime = cmp.Or(c.DecodeTime, 40*time.Microsecond)
	c.ContextTime = cmp.Or(c.ContextTime, 24*time.Nanosecond)
	c.Speed = cmp.Or(c.Speed, 1)
	return c
}

// Engine is a vLLM engine in virtual time: the caller adds requests and calls Step
// again and again. Times are durations since a start that the caller chooses. Not
// safe for concurrent use.
//
// Every decoding request gets exactly one token in every step, since a request is
// admitted only if the blocks of its whole answer fit. So a step takes time only for
// the requests that start, end or fill a block in it.
type Engine struct {
	cfg  Config
	pool *blockPool

	waiting  []*Request // in the order in which they start
	partial  *Request   // admitted, with a prompt that exceeded the budget of its step
	decoding decodeHeap

	step    int64 // steps taken
	context int   // tokens in the contexts of all decoding requests

	// blockedAt is pool.changes when the first waiting request did not fit: it cannot
	// fit before the next change. 0: not tried.
	blockedAt uint64

	scratch []int32
	stats   Stats
}

// StepResult is the outcome of one step. Its slices are new with each step.
type StepResult struct {
	End      time.Duration // when the outputs exist
	First    []*Request    // got the first token of their answer
	Finished []*Request    // got the last one; a request can be in both
	Decoded  int           // number of requests that got a further token

	Prefilled int // prompt tokens computed
}

// New returns an idle engine with an empty cache.
func New(cfg Config) *Engine {
	cfg = cfg.WithDefaults()
	return &Engine{cfg: cfg, pool: newBlockPool(cfg.KVTokens/cfg.BlockSize, cfg.HiddenEvictions)}
}

// NewWithSharedCache returns idle engines that share one KV cache of their total size. The
// first one's block size applies to all.
func NewWithSharedCache(cfgs ...Config) []*Engine {
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

// SetSpeed sets Config.Speed from the next step on.
func (e *Engine) SetSpeed(speed float64) { e.cfg.Speed = speed }

// Idle reports whether there are no requests.
func (e *Engine) Idle() bool {
	return len(e.waiting) == 0 && e.partial == nil && len(e.decoding) == 0
}

// Add queues r. It fails when r could never be admitted.
func (e *Engine) Add(r *Request, now time.Duration) error {
	if r.Prompt < 1 || r.Answer < 1 {
		return fmt.Errorf("request of %d prompt and %d answer tokens: both must be above 0", r.Prompt, r.Answer)
	}
	if need, have := e.blocksFor(r.Prompt+r.Answer), len(e.pool.refs); need > have {
		return fmt.Errorf("prompt and answer need %d blocks, the KV cache has %d", need, have)
	}
	r.Arrived = now
	r.state = waiting
	e.insertWaiting(r)
	return nil
}

// insertWaiting queues r behind all others, or with PriorityScheduling behind those with the
// same or a lower Priority.
func (e *Engine) insertWaiting(r *Request) {
	at := len(e.waiting)
	for e.cfg.PriorityScheduling && at > 0 && e.waiting[at-1].Priority > r.Priority {
		at--
	}
	if at == 0 {
		e.blockedAt = 0 // another one is first now
	}
	e.waiting = slices.Insert(e.waiting, at, r)
}

// Abort removes r and frees its blocks, whose content stays cached. It has no effect
// on a request that has ended or was never added.
func (e *Engine) Abort(r *Request) {
	switch r.state {
	case waiting:
		for i, w := range e.waiting {
			if w == r {
				e.waiting = append(e.waiting[:i], e.waiting[i+1:]...)
				break
			}
		}
		e.blockedAt = 0 // another one is first now
	case prefilling:
		e.partial = nil
		e.freeBlocks(r)
	case decoding:
		r.tokens = r.Generated(e)
		heap.Remove(&e.decoding, r.heapIndex)
		e.context -= r.Prompt + r.tokens
		e.freeBlocks(r)
	}
	r.state = ended
}

// ResetPrefixCache clears the cache if no request runs, as vLLM does, and reports
// whether it did.
func (e *Engine) ResetPrefixCache() (cleared bool) {
	if e.pool.free < len(e.pool.refs) {
		return false
	}
	changes := e.pool.changes
	*e.pool = *newBlockPool(len(e.pool.refs), e.cfg.HiddenEvictions)
	e.pool.changes = changes + 1
	return true
}

// CachedTokens returns how many tokens of a prompt are in the cache.
func (e *Engine) CachedTokens(promptTokens int, blocks []BlockHash) int {
	e.scratch = e.appendCachedPrefix(promptTokens, blocks, e.scratch[:0])
	return len(e.scratch) * e.cfg.BlockSize
}

// Step admits waiting requests that fit and computes one step that starts at now.
// Requests added before its end wait for the next step.
func (e *Engine) Step(now time.Duration) StepResult {
	if e.Idle() {
		return StepResult{End: now}
	}
	e.step++
	decodes := len(e.decoding)
	budget := e.cfg.StepTokens - decodes
	cost := e.costWithoutPrefill(decodes)

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

	// Last, since the scheduler learns only at the step's end which answers ended:
	// their blocks are free from the next step on.
	e.context += decodes
	done.Finished = e.advanceDecoding()

	done.Decoded, done.Prefilled = decodes, prefilled
	done.End = now + time.Duration(cost/e.cfg.Speed)
	e.countStep(decodes, prefilled, len(done.First))
	e.setTimes(&done)
	return done
}

// running returns the number of admitted requests that have not ended.
func (e *Engine) running() int {
	n := len(e.decoding)
	if e.partial != nil {
		n++
	}
	return n
}

// costWithoutPrefill returns the cost of a step without prefill, in nanoseconds.
func (e *Engine) costWithoutPrefill(decodes int) (nanos float64) {
	return float64(e.cfg.StepTime) + float64(decodes)*float64(e.cfg.DecodeTime) + float64(e.context)*float64(e.cfg.ContextTime)
}

// advanceDecoding handles the requests that filled a block with this step's token, and returns
// those for which it was the last one.
func (e *Engine) advanceDecoding() (finished []*Request) {
	for len(e.decoding) > 0 && e.decoding[0].due <= e.step {
		r := e.decoding[0]
		n := r.Generated(e)
		e.cacheFullBlocks(r, r.Prompt+n-1)
		if n >= r.Answer {
			heap.Pop(&e.decoding)
			e.context -= r.Prompt + n
			r.tokens, r.state = n, ended
			e.freeBlocks(r)
			finished = append(finished, r)
			continue
		}
		r.due = e.nextBlockOrEnd(r)
		heap.Fix(&e.decoding, 0)
	}
	return finished
}

// admit gives r the cached blocks of its prompt and new ones for the rest, if those
// and the answer's fit beside the blocks reserved for others.
func (e *Engine) admit(r *Request, now time.Duration) (admitted bool) {
	e.scratch = e.appendCachedPrefix(r.Prompt, r.Blocks, e.scratch[:0])
	hits := e.scratch
	total := e.blocksFor(r.Prompt + r.Answer)
	if total-len(hits)+e.pool.countFree(hits) > e.pool.free-e.pool.reserved {
		return false
	}
	r.blocks = make([]int32, 0, total)
	for _, b := range hits {
		e.pool.addRef(b)
	}
	r.blocks = append(r.blocks, hits...)
	for len(r.blocks) < e.blocksFor(r.Prompt) {
		r.blocks = append(r.blocks, e.pool.allocate())
	}
	r.reserved = total - len(r.blocks)
	e.pool.reserved += r.reserved

	r.Cached = len(hits) * e.cfg.BlockSize
	r.computed, r.full = r.Cached, len(hits)
	r.Started = now
	r.state = prefilling
	e.stats.PrefixQueries += int64(r.Prompt)
	e.stats.PrefixHits += int64(r.Cached)
	return true
}

// appendCachedPrefix returns the cached blocks at the beginning of a prompt.
func (e *Engine) appendCachedPrefix(promptTokens int, blocks []BlockHash, into []int32) []int32 {
	if e.cfg.NoPrefixCache {
		return into
	}
	// The last token is always recomputed, for its output.
	n := min((promptTokens-1)/e.cfg.BlockSize, len(blocks))
	return e.pool.lookupPrefix(blocks[:n], into)
}

// prefill computes up to budget tokens of r's prompt and returns their number and cost
// in nanoseconds.
func (e *Engine) prefill(r *Request, budget int, done *StepResult) (tokens int, nanos float64) {
	n := min(r.Prompt-r.computed, budget)
	depth := float64(r.computed) + float64(n)/2
	nanos = float64(n) * 1e9 / e.cfg.PrefillRate * (1 + e.cfg.QuadraticDepth*depth)
	r.computed += n
	// Full blocks can be hit from now on, also by a later request of this step: within a
	// layer keys are written before they are read.
	e.cacheFullBlocks(r, r.computed)
	if r.computed < r.Prompt {
		e.partial, r.state = r, prefilling
		return n, nanos
	}
	e.partial = nil
	if !e.cfg.NoPrefixCache {
		r.Created = r.full*e.cfg.BlockSize - r.Cached
	}
	done.First = append(done.First, r)
	r.joined, r.state = e.step, decoding
	e.context += r.Prompt + 1
	r.due = e.nextBlockOrEnd(r)
	heap.Push(&e.decoding, r)
	return n, nanos
}

// cacheFullBlocks makes the blocks of r's first tokens available to others and allocates
// one for the next token of the answer if needed.
func (e *Engine) cacheFullBlocks(r *Request, tokens int) {
	for ; r.full < tokens/e.cfg.BlockSize; r.full++ {
		if r.full < len(r.Blocks) && !e.cfg.NoPrefixCache {
			e.pool.setContent(r.blocks[r.full], r.Blocks[r.full])
		}
	}
	if tokens >= r.Prompt && r.reserved > 0 && len(r.blocks) == r.full {
		r.blocks = append(r.blocks, e.pool.allocate())
		r.reserved--
		e.pool.reserved--
	}
}

// nextBlockOrEnd returns the step in which r next fills a block or ends. In the k-th step
// after its first token, token k of the answer is computed and token k+1 sampled.
func (e *Engine) nextBlockOrEnd(r *Request) (step int64) {
	toFull := (r.full+1)*e.cfg.BlockSize - r.Prompt
	return r.joined + int64(min(toFull, r.Answer-1))
}

func (e *Engine) freeBlocks(r *Request) {
	e.pool.release(r.blocks)
	e.pool.reserved -= r.reserved
	r.blocks, r.reserved = nil, 0
}

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.cfg.BlockSize - 1) / e.cfg.BlockSize
}

// Stats are the engine's counters and gauges, in vLLM's units.
type Stats struct {
	Running, Waiting int
	KVUsage          float64 // blocks in use over all blocks, 0 to 1

	PrefixQueries, PrefixHits      int64 // tokens
	PromptTokens, GenerationTokens int64
	Steps                          int64
	// StepTokens counts steps by computed tokens in StepBuckets; the last one counts
	// those above all bounds.
	StepTokens    [len(StepBuckets) + 1]int64
	StepTokensSum int64
}

// StepBuckets are the upper bounds of vllm:iteration_tokens_total.
var StepBuckets = [...]float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}

func (e *Engine) countStep(decodes, prefilled, firstTokens int) {
	s := &e.stats
	s.Steps++
	s.GenerationTokens += int64(decodes + firstTokens)
	tokens := decodes + prefilled
	s.StepTokensSum += int64(tokens)
	i := 0
	for i < len(StepBuckets) && float64(tokens) > StepBuckets[i] {
		i++
	}
	s.StepTokens[i]++
}

func (e *Engine) setTimes(done *StepResult) {
	for _, r := range done.First {
		r.FirstToken = done.End
		e.stats.PromptTokens += int64(r.Prompt)
	}
	for _, r := range done.Finished {
		r.Finished = done.End
	}
}

// Stats returns the counters and gauges after the last step.
func (e *Engine) Stats() Stats {
	s := e.stats
	s.Running, s.Waiting = e.running(), len(e.waiting)
	s.KVUsage = float64(len(e.pool.refs)-e.pool.free) / float64(len(e.pool.refs))
	return s
}

// LargestStepBucket returns the upper bound of the highest non-empty bucket of StepTokens, or
// the highest bound when a step was above it.
func (s *Stats) LargestStepBucket() (tokens int) {
	for i := len(s.StepTokens) - 1; i >= 0; i-- {
		if s.StepTokens[i] > 0 {
			return int(StepBuckets[min(i, len(StepBuckets)-1)])
		}
	}
	return 0
}
