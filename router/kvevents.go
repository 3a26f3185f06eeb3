package router

import (
	"cmp"
	"crypto/rand"
	"math"
	mathrand "math/rand/v2"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends"
	"warmroute/kvevents/kvblocks"
	"warmroute/kvevents/wire"
	"warmroute/prompt"
	"warmroute/router/decide"
	"warmroute/router/index"
)

const (
	// confirmTimeout is how long after its first output what a request was expected to leave in a
	// cache counts where the replica has not reported it.
	confirmTimeout = 2 * time.Second
	// maxFinishedRequests of a backend wait for their events to be read. What more there are
	// stays approximate.
	maxFinishedRequests = 4096
	maxChangesPerLock   = 256 // KV blocks: it takes as long as a few decisions
)

// kvEvents is what the followers of all backends share.
type kvEvents struct {
	seed      uint64 // of the names of KV blocks
	prefix    string // of this proxy's sessions
	sessions  uint64 // given so far
	followers int
	room      *kvblocks.Room // nil before the first follower
}

func newKVEvents() kvEvents {
	return kvEvents{seed: mathrand.Uint64(), prefix: "warmroute-" + rand.Text()[:12] + "-"}
}

// KVFollower applies the KV events of one backend's replica to the index: what the replica
// reports replaces what is assumed of its cache. To relate KV blocks to blocks of prompts,
// requests are sent with a session of their own, which the events repeat. Safe for
// concurrent use.
type KVFollower struct {
	router  *Router
	backend *backends.Backend

	mu      sync.Mutex // locked before Router.mu, so that changes are applied in order
	tracker *kvblocks.Tracker
	closed  bool

	// cacheLost: the replica was found to have lost its cache. Unless its events soon tell the same,
	// they are of a process that has ended.
	cacheLost bool

	blocks   atomic.Int64 // of tracker
	complete atomic.Bool  // likewise

	finished []finishedRequest // oldest first; guarded by Router.mu
}

// kvRequest is what a Reservation keeps of its request for the KV events.
type kvRequest struct {
	blocks    []prompt.Block // nil: the request is not related to events
	bytes     int
	startedAt time.Time // of its first output
}

// recordStart records the first output. The blocks may be another request's from now on.
func (q *kvRequest) recordStart(now time.Time) {
	q.blocks, q.startedAt = slices.Clone(q.blocks), now
}

// finishedRequest is a request whose blocks are to be related to KV blocks.
type finishedRequest struct {
	session      string
	blocks       []prompt.Block // of the prompt and of the answer
	bytes        int            // of the prompt
	replyBytes   int
	promptTokens int // 0: not known
	outputTokens int // likewise, or the request was not completed
	due          time.Time
}

// FollowKVEvents returns the follower of a backend, which must have none, and whose replica has so
// many data-parallel engines at least; nil if it is not in the fleet. The caller closes it.
func (r *Router) FollowKVEvents(b *backends.Backend, engines int) *KVFollower {
	r.mu.Lock()
	defer r.unlockAndRunCallbacks()
	if !r.fleet.has(b) {
		return nil
	}
	k := &r.fleet.kvEvents
	if k.room == nil {
		r.fleet.index.FollowKV()
		k.room = kvblocks.NewRoom(r.fleet.index.MaxKVBlocks())
	}
	model := ""
	if models := b.Models(); len(models) > 0 {
		model = cmp.Or(models[0].Root, models[0].ID)
	}
	f := &KVFollower{router: r, backend: b, tracker: kvblocks.New(kvblocks.Options{
		Seed: k.seed ^ xxh3.HashString(model), Engines: engines, Room: k.room, Prefix: k.prefix,
	})}
	r.fleet.states[b.Slot].follower = f
	k.followers++
	return f
}

// SetEngines sets how many data-parallel engines the replica has at least. All that it holds is
// known only if all of them publish events.
func (f *KVFollower) SetEngines(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tracker.SetEngines(n)
	f.complete.Store(f.tracker.IsComplete())
}

// Apply applies an engine's next events.
func (f *KVFollower) Apply(rank int, events []wire.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.applyChanges(f.tracker.Apply(rank, events))
	}
}

// Restart records that what an engine has announced does not count any more. complete says
// that it announces all that it holds from now on.
func (f *KVFollower) Restart(rank int, complete bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.applyChanges(f.tracker.Restart(rank, complete))
	f.dropIfLost(complete)
}

// dropIfLost drops what the replica held if it was found to have lost that, and its events, which
// do not count any more, did not say so. known: they say now what it holds.
func (f *KVFollower) dropIfLost(known bool) {
	if f.cacheLost && !known {
		f.router.withLock(func() {
			if f.router.fleet.has(f.backend) {
				f.router.fleet.index.DropCache(f.backend.Slot)
			}
		})
	}
	f.cacheLost = false
}

// Close ends the follower: what the replica has reported is approximate again.
func (f *KVFollower) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	f.applyChanges(f.tracker.ForgetAll())
	f.dropIfLost(false)
	f.router.withLock(func() {
		if s := &f.router.fleet.states[f.backend.Slot]; s.follower == f {
			s.follower = nil
		}
		f.router.fleet.kvEvents.followers--
	})
}

// followerOf returns the follower of a backend, nil if it has none.
func (r *Router) followerOf(b *backends.Backend) (f *KVFollower) {
	r.withLock(func() {
		if r.fleet.has(b) {
			f = r.fleet.states[b.Slot].follower
		}
	})
	return f
}

// closeFollower closes the follower of a backend, if it has one.
func (r *Router) closeFollower(b *backends.Backend) {
	if f := r.followerOf(b); f != nil {
		f.Close()
	}
}

// confirmAgain restores what KV events say a backend holds, after its cache was dropped.
func (r *Router) confirmAgain(b *backends.Backend) {
	f := r.followerOf(b)
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.cacheLost = true
		f.applyChanges(f.tracker.HeldAsStored())
	}
}

// KVStatus is what a backend's replica has reported by KV events.
type KVStatus struct {
	KVBlocks  int  // that it holds
	Confirmed int  // blocks of prompts that it holds according to these
	Complete  bool // all that it holds is known
}

// status returns the state of the follower. Router.mu is held.
func (f *KVFollower) status() *KVStatus {
	return &KVStatus{int(f.blocks.Load()), f.router.fleet.index.CountConfirmed(f.backend.Slot), f.complete.Load()}
}

// applyChanges applies the tracker's changes to the index, a few at a time.
func (f *KVFollower) applyChanges(changes []kvblocks.Change) {
	r, slot := f.router, f.backend.Slot
	f.blocks.Store(int64(f.tracker.Len()))
	f.complete.Store(f.tracker.IsComplete())
	for part := range slices.Chunk(changes, maxChangesPerLock) {
		r.withLock(func() {
			if !r.fleet.has(f.backend) {
				return
			}
			for _, c := range part {
				switch c.Op {
				case kvblocks.Stored:
					r.fleet.index.StoreKV(slot, c.KV)
				case kvblocks.Removed:
					r.fleet.index.RemoveKV(slot, c.KV)
				case kvblocks.Forgotten:
					r.fleet.index.ForgetKV(slot, c.KV)
				case kvblocks.Cleared:
					r.fleet.index.DropCache(slot)
				}
			}
		})
		runtime.Gosched() // else this goroutine would have the lock again before those that wait for it
	}
}

// nameForKVEvents gives a request a session by which the KV events of its backend name it.
func (f *fleet) nameForKVEvents(d *Reservation, req *Request) {
	if f.states[d.Backend.Slot].follower == nil || req.NoEngine || req.Stored || req.Media || req.Sequences > 1 || len(req.Blocks) == 0 {
		return
	}
	f.kvEvents.sessions++
	d.KVSession = f.kvEvents.prefix + strconv.FormatUint(f.kvEvents.sessions, 36)
	d.kv = kvRequest{blocks: req.Blocks, bytes: req.Bytes}
}

// recordEndForKVEvents keeps what Settle needs of a request that has ended.
func (f *fleet) recordEndForKVEvents(d *Reservation, o *Outcome, now time.Time) {
	q := &d.kv
	follower := f.states[d.Backend.Slot].follower
	if follower == nil || q.blocks == nil || o.End == NotProcessed || len(follower.finished) >= maxFinishedRequests {
		q.blocks = nil
		return
	}
	done := finishedRequest{
		session: d.KVSession, bytes: q.bytes, promptTokens: o.PromptTokens,
		due: now.Add(confirmTimeout),
	}
	if d.entry.IsPrefilled() && now.Sub(q.startedAt) > confirmTimeout {
		done.due = now
	} else if d.entry.IsPrefilled() {
		done.due = q.startedAt.Add(confirmTimeout)
	}
	if done.blocks = q.blocks; !d.entry.IsPrefilled() {
		done.blocks = slices.Clone(q.blocks)
	}
	if o.End == Completed {
		done.outputTokens = o.OutputTokens
	}
	if o.End == Completed && len(o.Reply) > 0 && o.OutputTokens > 0 {
		done.blocks = append(done.blocks, o.Reply...)
		done.replyBytes = len(done.blocks)*f.blockBytes + o.ReplyTailBytes - q.bytes
	}
	q.blocks = nil
	follower.finished = append(follower.finished, done)
}

// Settle relates the blocks of requests that have ended to the KV blocks that they used, and
// removes what they were expected to leave in the cache and have not.
func (f *KVFollower) Settle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for !f.closed {
		q, end, more := f.nextFinished()
		if !more {
			return
		}
		if q.contradicts(end, f.router.fleet.blockBytes) {
			end = linkedEnd{}
		}
		sequence := f.tracker.TakeSequence(q.session, end.link.KV)
		if !q.knowsTokens() {
			continue
		}
		if end.blocks > 0 && len(sequence) > 0 && sequence[0].KV != end.link.KV {
			end = f.findCommonEnd(q.blocks[:end.blocks], sequence)
		}
		if f.addLinks(&q, end, sequence) {
			f.removeApproximate(&q, len(sequence) > 0)
		}
	}
}

// knowsTokens reports whether it is known how many tokens the prompt has: the replica said so, or
// how many the answer has, which the last KV block of the sequence follows.
func (q *finishedRequest) knowsTokens() bool { return q.promptTokens > 0 || q.outputTokens > 0 }

// contradicts reports whether the prompt has so many tokens that the place of the end cannot be
// right.
func (q *finishedRequest) contradicts(end linkedEnd, blockBytes int) bool {
	bytes := end.blocks * blockBytes
	if q.promptTokens == 0 || end.blocks == 0 || bytes > q.bytes {
		return false
	}
	const most = 1.3 // times what is expected: the tokens of one part of a prompt can be shorter than those of the rest
	tokens, expected := float64(end.link.Tokens), float64(q.promptTokens)*float64(bytes)/float64(q.bytes)
	isNearlyAll := q.bytes-bytes < q.bytes/10
	return end.link.Tokens > q.promptTokens || isNearlyAll && (tokens > most*expected || most*tokens < expected)
}

// linkedEnd is where the linked part of a prompt ends.
type linkedEnd struct {
	blocks int
	link   index.Link // of the last of them
}

// nextFinished returns the next request that is due, and where its linked part ends.
func (f *KVFollower) nextFinished() (q finishedRequest, end linkedEnd, more bool) {
	r := f.router
	r.withLock(func() {
		if len(f.finished) == 0 || f.finished[0].due.After(r.now()) {
			return
		}
		q, more = f.finished[0], true
		f.finished[0] = finishedRequest{}
		if f.finished = f.finished[1:]; len(f.finished) == 0 {
			f.finished = nil
		}
		end = r.fleet.findLinkedEnd(q.blocks)
	})
	return q, end, more
}

// findLinkedEnd returns where the linked part of a prompt ends. With a block, all blocks before
// it are linked.
func (f *fleet) findLinkedEnd(blocks []prompt.Block) (end linkedEnd) {
	return f.findEnd(blocks, func(index.Link) bool { return true })
}

// findCommonEnd returns where the part of blocks ends that is linked to KV blocks of a sequence.
func (f *KVFollower) findCommonEnd(blocks []prompt.Block, sequence []kvblocks.Block) (end linkedEnd) {
	common := make(map[index.KVBlock]bool, len(sequence))
	for _, b := range sequence {
		common[b.KV] = true
	}
	f.router.withLock(func() {
		end = f.router.fleet.findEnd(blocks, func(l index.Link) bool { return l.KV == 0 || common[l.KV] })
	})
	return end
}

// findEnd returns where the part of a prompt ends whose links are such that isPart is true.
func (f *fleet) findEnd(blocks []prompt.Block, isPart func(index.Link) bool) (end linkedEnd) {
	end.blocks = sort.Search(len(blocks), func(i int) bool {
		l, known := f.index.Link(blocks[i])
		return !known || !isPart(l)
	})
	if end.blocks > 0 {
		end.link, _ = f.index.Link(blocks[end.blocks-1])
	}
	return end
}

// addLinks links the blocks after an end to the KV blocks of a sequence. It reports false if some
// could not be linked.
func (f *KVFollower) addLinks(q *finishedRequest, end linkedEnd, sequence []kvblocks.Block) (ok bool) {
	r := f.router
	ok = true
	links := q.locate(end, sequence, r.fleet.blockBytes)
	for at := 0; ok && at < len(links); runtime.Gosched() {
		r.withLock(func() {
			for last := min(len(links), at+maxChangesPerLock); ok && at < last; at++ {
				ok = r.fleet.index.AddLink(f.backend.Slot, q.blocks, end.blocks+at, links[at])
			}
		})
	}
	return ok
}

// locate returns the links of the blocks after an end, as far as the sequence has the KV blocks
// that they complete. Places between those whose number of tokens is known (the end, the end of
// the prompt, and that of the answer) are interpolated.
func (q *finishedRequest) locate(end linkedEnd, sequence []kvblocks.Block, blockBytes int) (links []index.Link) {
	if len(sequence) == 0 {
		return nil
	}
	last := sequence[len(sequence)-1]
	promptTokens := float64(q.promptTokens)
	if q.promptTokens == 0 { // its last block is in the midst of the last KV block, in the mean
		promptTokens = float64(last.Tokens + last.Size/2 - q.outputTokens)
	}
	known, knownBytes := float64(end.link.Tokens), end.blocks*blockBytes
	var to index.Link
	for i := end.blocks; i < len(q.blocks); i++ {
		at := (i + 1) * blockBytes
		var tokens float64
		if at <= q.bytes {
			tokens = known + (promptTokens-known)*float64(at-knownBytes)/float64(q.bytes-knownBytes)
		} else {
			begin := max(q.bytes, knownBytes) // the end may be in the answer
			from := promptTokens
			if knownBytes > q.bytes {
				from = known
			}
			tokens = from + (promptTokens+float64(q.outputTokens)-from)*float64(at-begin)/float64(q.bytes+q.replyBytes-begin)
		}
		to.Tokens = int(math.Round(tokens))
		for len(sequence) > 0 && sequence[0].Tokens <= to.Tokens {
			to.KV, to.KVTokens = sequence[0].KV, sequence[0].Tokens
			sequence = sequence[1:]
		}
		if to.Tokens > last.Tokens+last.Size {
			break
		}
		links = append(links, to)
	}
	return links
}

// removeApproximate removes the blocks of a request that the replica does not hold, if that is
// known. hasStored says that events named the request.
func (f *KVFollower) removeApproximate(q *finishedRequest, hasStored bool) {
	r := f.router
	if !f.tracker.IsComplete() {
		return
	}
	r.withLock(func() {
		if !r.fleet.has(f.backend) {
			return
		}
		end := r.fleet.findLinkedEnd(q.blocks)
		// Without events, all of the prompt may have been cached but for less than one KV block.
		if unlinked := len(q.blocks) - end.blocks; hasStored || unlinked <= 2 {
			r.fleet.index.RemoveApproximate(f.backend.Slot, q.blocks)
		}
	})
}

// findLinked returns the longest prefix of a matched request that a backend holds and whose
// tokens are known.
func (f *fleet) findLinked(req *Request, matched []int) (linked decide.LinkedPrefix) {
	if f.kvEvents.followers == 0 {
		return decide.LinkedPrefix{}
	}
	most := 0
	for _, b := range req.Backends {
		if b.Slot < len(matched) {
			most = max(most, matched[b.Slot])
		}
	}
	if most == 0 {
		return decide.LinkedPrefix{}
	}
	l, known := f.index.Link(req.Blocks[most-1])
	if !known {
		end := f.findLinkedEnd(req.Blocks[:most])
		most, l = end.blocks, end.link
	}
	return decide.LinkedPrefix{Blocks: most, Bytes: most * f.blockBytes, Tokens: float64(l.Tokens), KVTokens: float64(l.KVTokens)}
}

// kvLinks are the links of an index.
type kvLinks struct{ index *index.Index }

// KVTokens implements decide.Links.
func (l kvLinks) KVTokens(b prompt.Block) (tokens int, known bool) {
	link, known := l.index.Link(b)
	return link.KVTokens, known
}
