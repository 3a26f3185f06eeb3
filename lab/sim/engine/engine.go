// Package engine models a vLLM engine in virtual time: the scheduler, the prefix
// cache, and the duration of a step.
package engine

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Config describes the simulated GPU and scheduler. Zero fields take their defaults,
// which are the times of Llama 3.1 8B in bf16 on an H200, as measured with vLLM 0.26.
type Config struct {
	BlockSize int // tokens; default 16
	KVTokens  int // size of the KV cache, rounded down to whole blocks; default 400,000

	StepTokens int // token budget of a step, decodes and prefill together; default 8,192
	MaxSeqs    int // requests running at once; default 256

	StepTime    time.Duration // of a step without work; default 5.07 ms
	PrefillRate float64       // prompt tokens per second; default DefaultPrefillRate
	DecodeTime  time.Duration // for each decoding request; default 5 µs
	ContextTime time.Duration // for each token of context decoded over; default 22 ns
	// share by which each previous token makes a prompt token more expensive; default DefaultQuadraticDepth, or LinearPrefill
	QuadraticDepth float64
	CachedDepth    float64 // QuadraticDepth for the previous tokens that the cache had; default QuadraticDepth, or LinearPrefill
	Speed          float64 // divides every duration; default 1

	// PromptTokenTime is how long the server's API server takes for each token of a prompt; default 1.7 µs, or
	// NoAPIServer. It handles one prompt after another, each before it reaches the scheduler.
	PromptTokenTime time.Duration

	// DecodeInterference is the share by which each decoding request makes the prefill in
	// its step slower; default 0.
	DecodeInterference float64

	// Jitter is the share by which the duration of a step varies at random, in both
	// directions; default 0. Seed determines the sequence.
	Jitter float64
	Seed   uint64

	NoPrefixCache bool   // disables the prefix cache
	Groups        Groups // none by default

	// HostKVTokens is the size of a second cache in host memory; default 0, none. Blocks are
	// copied to it as they fill, and loaded from it at HostLoadRate when the KV cache has
	// lost them.
	HostKVTokens int
	SharedHost   *HostTier // instead of one of its own; its events are not collected
	HostLoadRate float64   // tokens per second; default 200,000: 131,072 bytes a token, as in Llama 3.1 8B, over PCIe 4.0

	// A transfer of Request.RemoteTokens takes TransferTime and that of the copy: TransferTokenBytes for each token at
	// TransferBandwidth. Copies follow each other.
	TransferTime       time.Duration // default 170 ms: 197 ms were published, of which the copy took 29 ms
	TransferTokenBytes int           // default 131,072
	TransferBandwidth  float64       // bytes per second; default 10 GB/s

	// Lease is how long the blocks of a prefill request stay pinned after its end, unless they are released or the lease is
	// renewed; default 30 s. Speed does not divide it.
	Lease time.Duration

	// PriorityScheduling starts waiting requests in the order of Request.Priority instead
	// of arrival, and preempts running ones in the opposite order.
	PriorityScheduling bool

	// HiddenEvictions is the number of further blocks that each allocation evicts, as if
	// by another tenant; default 0.
	HiddenEvictions float64

	// KVEvents fills StepResult.KVEvents.
	KVEvents bool
}

// The H200's prefill. With the other times of a step, and those of the API server, DefaultPrefillRate makes the
// 38,500 prompt tokens per second that were measured in steps of 2,048 tokens. The operations of the model's
// architecture would make a DefaultQuadraticDepth of 3.3e-5.
const (
	DefaultPrefillRate    = 44_000
	DefaultQuadraticDepth = 2.8e-5
)

const (
	LinearPrefill = -1 // as QuadraticDepth makes all prompt tokens equally expensive
	NoAPIServer   = -1 // as PromptTokenTime
)

// PrefillSeconds returns how long tokens of a prompt take to compute that follow cached ones and computed ones.
func (c Config) PrefillSeconds(cached, computed, tokens float64) float64 {
	return tokens / c.PrefillRate * (1 + max(0, c.CachedDepth)*cached + max(0, c.QuadraticDepth)*(computed+tokens/2))
}

// ValidateShares returns an error unless each share is between 0 and 1, or LinearPrefill where that has a meaning.
func (c Config) ValidateShares() error {
	for _, share := range []struct {
		name        string
		value, none float64
	}{
		{"quadratic term", c.QuadraticDepth, LinearPrefill}, {"quadratic term of cached tokens", c.CachedDepth, LinearPrefill},
		{"decode interference", c.DecodeInterference, 0}, {"jitter", c.Jitter, 0},
	} {
		if v := share.value; v != share.none && !(v >= 0 && v <= 1) {
			return fmt.Errorf("%s %g is not between 0 and 1", share.name, v)
		}
	}
	return nil
}

func (c Config) WithDefaults() Config {
	c.BlockSize = cmp.Or(c.BlockSize, 16)
	c.KVTokens = cmp.Or(c.KVTokens, 400_000)
	c.StepTokens = cmp.Or(c.StepTokens, 8192)
	c.MaxSeqs = cmp.Or(c.MaxSeqs, 256)
	c.StepTime = cmp.Or(c.StepTime, 5070*time.Microsecond)
	c.PrefillRate = cmp.Or(c.PrefillRate, DefaultPrefillRate)
	c.DecodeTime = cmp.Or(c.DecodeTime, 5*time.Microsecond)
	c.ContextTime = cmp.Or(c.ContextTime, 22*time.Nanosecond)
	c.QuadraticDepth = cmp.Or(c.QuadraticDepth, DefaultQuadraticDepth)
	c.CachedDepth = cmp.Or(c.CachedDepth, c.QuadraticDepth)
	c.PromptTokenTime = cmp.Or(c.PromptTokenTime, 1700*time.Nanosecond)
	c.HostLoadRate = cmp.Or(c.HostLoadRate, 200_000)
	c.TransferTime = cmp.Or(c.TransferTime, 170*time.Millisecond)
	c.TransferTokenBytes = cmp.Or(c.TransferTokenBytes, 131_072)
	c.TransferBandwidth = cmp.Or(c.TransferBandwidth, 10e9)
	c.Lease = cmp.Or(c.Lease, 30*time.Second)
	c.Speed = cmp.Or(c.Speed, 1)
	return c
}

// Engine is a vLLM engine in virtual time: the caller adds requests and calls Step
// again and again. Times are durations since a start that the caller chooses. Not
// safe for concurrent use, nor are engines that share a cache.
//
// It schedules as vLLM does. Running requests come first, in the order of their admission:
// each decoding one gets a token, each partial prompt its next chunk. A request that needs a
// block when none is free preempts the one that was admitted last, which may be itself.
// Then waiting requests are admitted whose prompts fit into the free blocks, unless the
// step preempted any.
//
// A step takes time only for the requests that start, end or need a block in it, since all
// others get exactly one token.
type Engine struct {
	cfg     Config
	pool    *blockPool
	sharing []*Engine // the engines that share pool, this one included
	api     *apiServer
	random  *rand.Rand

	arriving   []*Request // at the API server, in order of arrival
	waiting    []*Request // in the order in which they start
	prefilling []*Request // admitted, with a prompt that is partly computed, being loaded or transferred, in order of admission
	decoding   decodeHeap
	pinned     []*Request // prefill requests that have ended and keep their blocks

	step    int64 // steps taken
	context int   // tokens in the contexts of all decoding requests

	// blockedAt is pool.changes when the first waiting request did not fit: it cannot
	// fit before the next change. 0: not tried.
	blockedAt uint64

	loadEnd time.Duration // of the last load from the host tier
	copyEnd time.Duration // of the last copy of a transfer

	admissionPaused bool

	hits    []int32    // reused by lookups
	scratch []*Request // reused by allocateForDecodes and allocateForPrefills
	stats   Stats
}

// StepResult is the outcome of one step. Its slices are new with each step.
type StepResult struct {
	End      time.Duration // when the outputs exist
	First    []*Request    // got the first token of their output
	Resumed  []*Request    // got a further token, the first since they were preempted
	Finished []*Request    // got the last one; a request can be in several lists
	Decoded  int           // number of requests that got a further token

	Prefilled int // tokens computed of prompts, and again after a preemption

	Transferring []*Request // began to wait for the transfer of their remote tokens

	// KVEvents are the changes of the caches since the last step, of whichever engine if some
	// share them, in their order; those of the host tier follow those of the KV cache.
	KVEvents []KVEvent
}

// New returns an idle engine with an empty cache.
func New(cfg Config) *Engine {
	cfg = cfg.WithDefaults()
	e := newWithoutCache(cfg)
	e.pool = newBlockPool(cfg.KVTokens/cfg.BlockSize, cfg.HiddenEvictions)
	e.pool.addGroups(&cfg)
	e.pool.addHostTier(cfg.HostKVTokens / cfg.BlockSize)
	if cfg.SharedHost != nil {
		e.pool.setHostTier(cfg.SharedHost.pool)
	}
	if cfg.KVEvents {
		e.pool.recordEvents()
	}
	e.sharing = []*Engine{e}
	return e
}

// NewWithSharedCache returns idle engines that share one KV cache of their total size. The
// first one's block size, groups, hidden evictions and events apply to all. They preempt as one engine
// would: the request that was admitted last of all. So the one that was admitted first always
// proceeds.
func NewWithSharedCache(cfgs ...Config) []*Engine {
	engines := make([]*Engine, len(cfgs))
	blocks, hostBlocks := 0, 0
	for i, cfg := range cfgs {
		cfg = cfg.WithDefaults()
		cfg.BlockSize, cfg.Groups = cmp.Or(cfgs[0].BlockSize, cfg.BlockSize), cfgs[0].Groups
		blocks += cfg.KVTokens / cfg.BlockSize
		hostBlocks += cfg.HostKVTokens / cfg.BlockSize
		engines[i] = newWithoutCache(cfg)
	}
	pool := newBlockPool(blocks, cfgs[0].HiddenEvictions)
	pool.addGroups(&engines[0].cfg)
	pool.addHostTier(hostBlocks)
	if cfgs[0].KVEvents {
		pool.recordEvents()
	}
	for _, e := range engines {
		e.pool, e.sharing = pool, engines
	}
	return engines
}

func newWithoutCache(cfg Config) *Engine {
	return &Engine{
		cfg:    cfg,
		api:    &apiServer{tokenTime: float64(max(0, cfg.PromptTokenTime)) / cfg.Speed},
		random: rand.New(rand.NewPCG(cfg.Seed, 0)),
	}
}

// SetSpeed sets Config.Speed from the next step on. The API server keeps its speed.
func (e *Engine) SetSpeed(speed float64) { e.cfg.Speed = speed }

// Idle reports whether there are no requests.
func (e *Engine) Idle() bool {
	return len(e.arriving)+len(e.waiting)+e.running() == 0
}

// Add queues r. It fails when the cache could never hold r's prompt and output, as vLLM
// refuses what exceeds its context length.
func (e *Engine) Add(r *Request, now time.Duration) error {
	if r.Prompt < 1 || r.Output < 1 {
		return fmt.Errorf("request of %d prompt and %d output tokens: both must be above 0", r.Prompt, r.Output)
	}
	if need, have := e.blocksFor(r.Prompt+r.Output)+e.cfg.runningBlocks(), len(e.pool.refs); need > have {
		return fmt.Errorf("prompt and output need %d blocks, the KV cache has %d", need, have)
	}
	r.Arrived = now
	e.pool.arrivals++
	r.arrival = e.pool.arrivals
	r.state, r.readyAt = arriving, e.api.handlePrompt(r.Prompt, now)
	e.arriving = append(e.arriving, r)
	e.acceptArrived(now)
	return nil
}

// acceptArrived queues the requests that have left the API server.
func (e *Engine) acceptArrived(now time.Duration) {
	for len(e.arriving) > 0 && e.arriving[0].readyAt <= now {
		e.insertWaiting(e.arriving[0], len(e.waiting))
		e.arriving = slices.Delete(e.arriving, 0, 1)
	}
}

// insertWaiting queues r at a position, or with PriorityScheduling by priority and arrival.
func (e *Engine) insertWaiting(r *Request, at int) {
	if e.cfg.PriorityScheduling {
		for at = len(e.waiting); at > 0 && compareUrgency(r, e.waiting[at-1]) < 0; at-- {
		}
	}
	if at == 0 {
		e.blockedAt = 0 // another one is first now
	}
	r.state = waiting
	e.waiting = slices.Insert(e.waiting, at, r)
}

// Abort removes r and frees its blocks, pinned ones too, whose content stays cached. It has no
// effect on any other request that has ended, or that was never added.
func (e *Engine) Abort(r *Request) {
	switch r.state {
	case arriving:
		at := slices.Index(e.arriving, r)
		e.arriving = slices.Delete(e.arriving, at, at+1)
	case waiting:
		at := slices.Index(e.waiting, r)
		e.waiting = slices.Delete(e.waiting, at, at+1)
		e.blockedAt = 0 // another one is first now
	case loading, transferring, prefilling, decoding:
		e.removeFromBatch(r)
		e.freeBlocks(r)
	case pinned:
		e.ReleasePinned(r)
	}
	r.state = ended
}

// removeFromBatch takes a running request out of the batch. It keeps its blocks.
func (e *Engine) removeFromBatch(r *Request) {
	if r.state != decoding {
		e.removePrefilling(r)
	} else {
		r.tokens = r.Generated(e)
		heap.Remove(&e.decoding, r.heapIndex)
		e.context -= r.Prompt + r.tokens
		e.cacheFullBlocks(r, r.Prompt+r.tokens-1)
	}
}

// freeBlocks frees the blocks of r, whose content stays cached.
func (e *Engine) freeBlocks(r *Request) {
	for _, b := range r.running {
		e.pool.refs[b] = 0
		e.pool.pushFreeFirst(b)
	}
	e.pool.release(r.blocks)
	r.blocks, r.running = nil, nil
}

// ResetPrefixCache clears the KV cache if no request runs and no blocks are pinned, as vLLM does,
// and reports whether it did. The host tier stays.
func (e *Engine) ResetPrefixCache() (cleared bool) {
	if e.pool.free < len(e.pool.refs) {
		return false
	}
	e.pool.clear()
	return true
}

// PauseAdmission keeps waiting requests waiting while those that run continue, until it is called with false.
func (e *Engine) PauseAdmission(paused bool) { e.admissionPaused = paused }

// DiscardCache clears the KV cache after it has preempted all running requests, failed their
// transfers and released pinned blocks. The engine must not share the cache.
func (e *Engine) DiscardCache(now time.Duration) {
	for _, r := range slices.Clone(e.pinned) {
		e.ReleasePinned(r)
	}
	for _, r := range e.prefilling {
		e.EndTransfer(r, TransferFailed)
	}
	for e.running() > 0 {
		_, r := e.leastUrgentRunning()
		e.preempt(r, now)
	}
	e.pool.clear()
}

// CachedTokens returns how many tokens of a prompt are in the cache.
func (e *Engine) CachedTokens(promptTokens int, blocks []BlockHash) int {
	e.hits, _ = e.appendCachedPrefix(promptTokens, blocks, e.hits[:0])
	return (len(e.hits) + e.countHostPrefix(promptTokens, blocks, len(e.hits))) * e.cfg.BlockSize
}

// HeldTokens returns how many leading tokens of a prompt are in the cache, also if the prompt cannot be continued after them.
func (e *Engine) HeldTokens(promptTokens int, blocks []BlockHash) int {
	var held int
	e.hits, held = e.appendCachedPrefix(promptTokens+1, blocks, e.hits[:0]) // all of its full blocks
	return (held + e.countHostPrefix(promptTokens+1, blocks, held)) * e.cfg.BlockSize
}

// Step schedules and computes one step that starts at now. Requests added before its end
// wait for the next step.
func (e *Engine) Step(now time.Duration) StepResult {
	if e.Idle() {
		return StepResult{End: now}
	}
	e.acceptArrived(now)
	for _, o := range e.sharing {
		o.ExpireLeases(now)
	}
	preemptions := e.pool.preemptions
	e.allocateForDecodes(now)
	partial := e.allocateForPrefills(now)
	decodes := len(e.decoding)
	budget := e.cfg.StepTokens - decodes
	cost := e.costWithoutPrefill(decodes)
	e.step++

	var done StepResult
	prefill := 0.0
	for _, r := range partial {
		if r.chunk > 0 {
			prefill += e.prefill(r, r.chunk, &done)
		}
	}
	clear(partial)
	if e.pool.preemptions == preemptions && !e.admissionPaused {
		prefill += e.admitWaiting(budget, now, &done)
	}
	cost += prefill * (1 + e.cfg.DecodeInterference*float64(decodes))
	cost *= 1 + e.cfg.Jitter*(2*e.random.Float64()-1)
	done.Decoded = decodes + len(done.Resumed)

	// Last, since the scheduler learns only at the step's end which outputs ended:
	// their blocks are free from the next step on.
	e.context += decodes
	done.Finished = e.finishOutputs()

	done.End = now + time.Duration(cost/e.cfg.Speed)
	if done.Decoded+done.Prefilled == 0 {
		done.End = min(done.End, e.nextLoaded(now))
		if len(e.arriving) > 0 {
			done.End = min(done.End, e.arriving[0].readyAt)
		}
	}
	done.KVEvents = e.pool.takeEvents()
	e.countStep(&done)
	e.stats.Gaps += int64(done.Decoded)
	e.stats.GapSeconds += float64(done.Decoded) * (done.End - now).Seconds()
	e.setTimes(&done)
	return done
}

// running returns the number of admitted requests that have not ended.
func (e *Engine) running() int {
	return len(e.decoding) + len(e.prefilling)
}

// costWithoutPrefill returns the cost of a step without prefill, in nanoseconds.
func (e *Engine) costWithoutPrefill(decodes int) (nanos float64) {
	return float64(e.cfg.StepTime) + float64(decodes)*float64(e.cfg.DecodeTime) + float64(e.context)*float64(e.cfg.ContextTime)
}

// allocateForDecodes gives each decoding request that has filled its last block another one
// for the token that the next step computes.
func (e *Engine) allocateForDecodes(now time.Duration) {
	due := e.decoding.appendDue(e.step+1, 0, e.scratch[:0])
	slices.SortFunc(due, func(a, b *Request) int { return cmp.Compare(a.admission, b.admission) })
	for _, r := range due {
		if r.state != decoding {
			continue // preempted by one before it
		}
		computed := r.Prompt + r.Generated(e) - 1
		if computed < len(r.blocks)*e.cfg.BlockSize {
			continue // the step only ends its output
		}
		e.cacheFullBlocks(r, computed)
		if e.extendBlocks(r, computed+1, now) {
			r.due = e.nextBlockOrEnd(r)
			heap.Fix(&e.decoding, r.heapIndex)
		}
	}
	clear(due)
	e.scratch = due[:0]
}

// allocateForPrefills gives partial prompts blocks for their next chunks, and returns them
// with Request.chunk set. A chunk is 0 when the step's budget is used up, when the prompt is
// being loaded or transferred, or when the request was preempted for lack of blocks.
func (e *Engine) allocateForPrefills(now time.Duration) (partial []*Request) {
	partial = append(e.scratch[:0], e.prefilling...)
	e.scratch = partial[:0]
	budget := e.cfg.StepTokens - len(e.decoding)
	for _, r := range partial {
		if r.state == loading && r.loadedAt <= now {
			r.state = prefilling
		}
		tokens := e.nextChunk(r, budget)
		if r.state == prefilling && tokens > 0 && e.extendBlocks(r, r.computed+tokens, now) {
			r.chunk = tokens
			budget -= tokens
		}
	}
	return partial
}

// removePrefilling removes r from the partial prompts.
func (e *Engine) removePrefilling(r *Request) {
	at := slices.Index(e.prefilling, r)
	e.prefilling = slices.Delete(e.prefilling, at, at+1)
	r.chunk = 0
}

// extendBlocks gives r blocks for its first tokens. While the cache lacks free ones it
// preempts running requests; it returns false when r was one of them.
func (e *Engine) extendBlocks(r *Request, tokens int, now time.Duration) (ok bool) {
	need := e.blocksFor(tokens) - len(r.blocks)
	for e.pool.free < need {
		owner, victim := e.leastUrgentRunning()
		owner.preempt(victim, now)
		if victim == r {
			return false
		}
	}
	for range need {
		r.blocks = append(r.blocks, e.pool.allocate())
	}
	return true
}

// leastUrgentRunning returns the running request to preempt, and its engine: the one that was
// admitted last, or with PriorityScheduling the one that would start last. It is not one that
// waits for a transfer.
func (e *Engine) leastUrgentRunning() (owner *Engine, last *Request) {
	consider := func(o *Engine, r *Request) {
		if r.state == transferring {
			return
		}
		if last == nil || e.cfg.PriorityScheduling && compareUrgency(r, last) > 0 || !e.cfg.PriorityScheduling && r.admission > last.admission {
			owner, last = o, r
		}
	}
	for _, o := range e.sharing {
		for _, r := range o.prefilling {
			consider(o, r)
		}
		for _, r := range o.decoding {
			consider(o, r)
		}
	}
	return owner, last
}

// preempt frees the blocks of a running request, whose content stays cached, and puts the
// request back to the front of the queue.
func (e *Engine) preempt(r *Request, now time.Duration) {
	e.removeFromBatch(r)
	e.freeBlocks(r)
	r.computed, r.full = 0, 0
	r.Preempted = now
	e.stats.Preemptions++
	e.pool.preemptions++
	e.insertWaiting(r, 0)
}

// admitWaiting admits the first waiting requests that fit, computes up to budget tokens of
// their prompts and returns the cost in nanoseconds.
func (e *Engine) admitWaiting(budget int, now time.Duration, done *StepResult) (nanos float64) {
	for done.Prefilled < budget && len(e.waiting) > 0 && e.running() < e.cfg.MaxSeqs {
		r := e.waiting[0]
		if e.blockedAt == e.pool.changes || !e.admit(r, now) {
			e.blockedAt = e.pool.changes
			break
		}
		e.waiting = e.waiting[1:]
		e.prefilling = append(e.prefilling, r)
		if r.state == transferring {
			done.Transferring = append(done.Transferring, r)
		}
		if r.state != prefilling {
			continue
		}
		tokens := e.nextChunk(r, budget-done.Prefilled)
		if tokens == 0 {
			break // the rest of the budget is too small
		}
		e.extendBlocks(r, r.computed+tokens, now) // admit has seen that they are free
		nanos += e.prefill(r, tokens, done)
	}
	return nanos
}

// finishOutputs ends the requests for which this step's token was the last one and returns
// them. Prefill requests keep their blocks.
func (e *Engine) finishOutputs() (finished []*Request) {
	for len(e.decoding) > 0 && e.decoding[0].due <= e.step {
		r := e.decoding[0]
		e.removeFromBatch(r)
		if r.PrefillRequest {
			r.state = pinned
			e.pinned = append(e.pinned, r)
		} else {
			r.state = ended
			e.freeBlocks(r)
		}
		finished = append(finished, r)
	}
	return finished
}

// admit gives r the cached blocks of its prompt, if the others that its prompt needs are free.
// A request that was preempted needs them for the output so far, too.
func (e *Engine) admit(r *Request, now time.Duration) (admitted bool) {
	tokens := r.contextTokens()
	hits, matched := e.appendCachedPrefix(tokens, r.Blocks, e.hits[:0])
	e.hits = hits
	fromHost := e.countHostPrefix(tokens, r.Blocks, len(hits))
	if e.blocksFor(tokens)-len(hits)+e.pool.countFree(hits)+e.cfg.runningBlocks() > e.pool.free {
		return false
	}
	r.blocks = make([]int32, 0, e.blocksFor(r.Prompt+r.Output))
	for _, b := range hits {
		e.pool.addRef(b)
		r.Corrupt = r.Corrupt || e.pool.corrupt[b]
	}
	r.blocks = append(r.blocks, hits...)
	r.state = prefilling
	if e.pool.host != nil {
		e.loadFromHost(r, fromHost, now)
	}
	if e.pool.groups != nil {
		e.startGroups(r, matched)
	}
	r.full = len(r.blocks)
	r.computed = r.full * e.cfg.BlockSize
	if r.admission == 0 { // vLLM counts no further ones
		r.Cached, r.hostCached = r.computed, fromHost*e.cfg.BlockSize
		r.Started = now
		e.stats.PrefixQueries += int64(r.Prompt)
		e.stats.PrefixHits += int64(r.Cached - r.hostCached)
		e.stats.HostHits += int64(r.hostCached)
		if remote := min(r.RemoteTokens, r.Prompt) - r.computed; remote > 0 {
			e.beginTransfer(r, remote, now)
		}
	}
	e.pool.admissions++
	r.admission = e.pool.admissions
	return true
}

// appendCachedPrefix returns the cached blocks at the beginning of a prompt after which it can be continued, and how many
// of its blocks full attention has.
func (e *Engine) appendCachedPrefix(promptTokens int, blocks []BlockHash, into []int32) (hits []int32, matched int) {
	hashes := e.cacheableBlocks(promptTokens, blocks)
	hits = e.pool.lookupPrefix(hashes, into)
	matched = len(hits)
	if e.pool.groups != nil {
		hits = hits[:e.pool.groups.countUsableBlocks(hashes[:matched])]
	}
	return hits, matched
}

// cacheableBlocks returns the blocks of a prompt that can be hit. The last token is always
// recomputed, for its output.
func (e *Engine) cacheableBlocks(promptTokens int, blocks []BlockHash) []BlockHash {
	if e.cfg.NoPrefixCache {
		return nil
	}
	return blocks[:min((promptTokens-1)/e.cfg.BlockSize, len(blocks))]
}

// prefill computes tokens of r, for which it has blocks, and returns the cost in nanoseconds.
func (e *Engine) prefill(r *Request, tokens int, done *StepResult) (nanos float64) {
	cached := min(r.Cached+r.Transferred, r.computed)
	nanos = 1e9 * e.cfg.PrefillSeconds(float64(cached), float64(r.computed-cached), float64(tokens))
	r.computed += tokens
	r.chunk = 0
	done.Prefilled += tokens
	// Full blocks can be hit from now on, also by a later request of this step: within a
	// layer keys are written before they are read.
	e.cacheFullBlocks(r, r.computed)
	if r.computed < r.contextTokens() {
		return nanos
	}
	e.removePrefilling(r)
	e.context += r.computed + 1
	if r.tokens > 0 {
		done.Resumed = append(done.Resumed, r)
	} else {
		if !e.cfg.NoPrefixCache {
			r.Created = max(0, r.full*e.cfg.BlockSize-r.Cached-r.Transferred)
		}
		done.First = append(done.First, r)
	}
	r.joined, r.state = e.step-int64(r.tokens), decoding
	r.due = e.nextBlockOrEnd(r)
	heap.Push(&e.decoding, r)
	return nanos
}

// cacheFullBlocks makes the full blocks of r's first tokens available to others.
func (e *Engine) cacheFullBlocks(r *Request, tokens int) {
	first := r.full
	for ; r.full < tokens/e.cfg.BlockSize; r.full++ {
		if r.full < len(r.Blocks) && !e.cfg.NoPrefixCache {
			e.pool.setContent(r.blocks[r.full], r.Blocks[r.full])
			e.pool.corrupt[r.blocks[r.full]] = r.Corrupt
			e.pool.storeOnHost(r.Blocks[r.full])
		}
	}
	switch {
	case e.cfg.NoPrefixCache:
	case e.pool.groups != nil:
		e.keepInGroups(r, first)
	default:
		e.pool.log.addStored(r, first, min(r.full, len(r.Blocks)), nil)
	}
}

// nextBlockOrEnd returns the step in which r next needs a block or ends. In the k-th step
// after its first token, token k of the output is computed and token k+1 sampled.
func (e *Engine) nextBlockOrEnd(r *Request) (step int64) {
	toBlock := len(r.blocks)*e.cfg.BlockSize - r.Prompt + 1
	return r.joined + int64(min(toBlock, r.Output-1))
}

func (e *Engine) blocksFor(tokens int) int {
	return divideUp(tokens, e.cfg.BlockSize)
}
