package kvevents

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/zeebo/xxh3"

	"warmroute/kvevents/wire"
	"warmroute/router/index"
)

const (
	maxEngines    = 256
	maxGroups     = 64 // KV cache groups that an engine's account keeps apart
	maxCopies     = 8  // of a block that are counted; a client can have blocks announced again
	maxSequences  = 16 << 10
	changesBuffer = 1024 // changes that are kept for reuse
)

// op is what happened to a KV block.
type op uint8

const (
	kvStored    op = iota // the replica holds it
	kvRemoved             // it does not any more
	kvForgotten           // it is not known any more whether it does
	kvCleared             // it holds no blocks at all; kv is 0
)

// change is one change of what a replica holds.
type change struct {
	kv index.KVBlock
	op op
}

// sequenceBlock is a KV block of a sequence.
type sequenceBlock struct {
	kv     index.KVBlock
	tokens int // of the sequence up to its end
	size   int // in tokens
}

// tracker follows which KV blocks one replica holds, in all its data-parallel engines and all media.
// It names the blocks by their tokens, so that equal blocks of all replicas have one name
// whatever hashes their engines use. It is not safe for concurrent use.
type tracker struct {
	seed        uint64                           // equal blocks have equal names in all trackers with the same
	prefix      string                           // of the sessions whose sequences are remembered
	engineCount int                              // data-parallel ones that the replica has at least
	room        *atomic.Int64                    // for how many more blocks there is memory in all trackers that share it
	engines     []*engine                        // by rank
	blocks      int                              // held, in all engines; one that several hold counts for each
	places      int                              // taken by these and by blocks that are kept for others
	holders     map[index.KVBlock]int            // engines that hold a block; nil while there is one engine
	sequences   *simplelru.LRU[string, sequence] // by session: the last block that each of the latest requests has stored

	changes []change
	buf     []byte
}

// engine is the account of one data-parallel engine.
type engine struct {
	complete  bool             // it announces all that it holds
	hadBlocks bool             // before the last restart that was not complete
	offloads  bool             // it has announced blocks of another medium than the GPU
	byHash    map[uint64]int32 // the publisher's hash → place of the block
	blocks    []block          // blocks[0] stands before the first block of a sequence
	free      int32            // the first unused place, linked by parent; 0: none
	groups    map[int]bool     // whether blocks of a group mean a usable prefix
}

// block is one KV block of an engine. It outlives its removal while blocks follow it, or a
// sequence that is remembered ends there.
type block struct {
	kv         index.KVBlock
	parent     int32
	tokens     int32 // of the sequence up to its end
	successors int32 // and sequences that end there
	gpu, other uint8 // copies
}

func (b *block) isHeld() bool { return b.gpu > 0 || b.other > 0 }

// sequence ends with a block of an engine.
type sequence struct {
	rank int
	at   int32
}

func newTracker(seed uint64, prefix string, engines int, room *atomic.Int64) *tracker {
	t := &tracker{seed: seed, prefix: prefix, engineCount: engines, room: room}
	t.sequences, _ = simplelru.NewLRU(maxSequences, func(_ string, q sequence) { // fails without a size alone
		e := t.engines[q.rank]
		e.blocks[q.at].successors--
		t.freeUnused(e, q.at)
	})
	return t
}

// isComplete reports whether all that the replica holds is known.
func (t *tracker) isComplete() bool {
	return len(t.engines) >= t.engineCount && !slices.ContainsFunc(t.engines, func(e *engine) bool { return !e.complete })
}

// restart records that what an engine announced before does not count any more: it has been
// started again, or events were lost. complete says that it announces all that it holds from
// now on. The changes are valid until the next call.
func (t *tracker) restart(rank int, complete bool) []change {
	t.changes = t.changes[:0]
	e, what := t.engine(rank), kvForgotten
	if e == nil {
		return nil
	}
	if complete {
		what = kvRemoved
	}
	hadBlocks := e.hadBlocks || len(e.byHash) > 0
	t.removeAll(e, what, false)
	t.forgetSessionEnds(rank)
	*e = *newEngine()
	e.complete, e.hadBlocks = complete, hadBlocks && !complete
	if hadBlocks && t.blocks == 0 && t.isComplete() {
		t.changes = append(t.changes, change{0, kvCleared})
	}
	return t.changes
}

// heldAsStored returns all blocks that the replica holds as if they were stored now, predecessors
// before their successors. The changes are valid until the next call.
func (t *tracker) heldAsStored() []change {
	t.changes = t.changes[:0]
	for _, e := range t.engines {
		places := slices.SortedFunc(maps.Values(e.byHash), func(a, b int32) int {
			return cmp.Compare(e.blocks[a].tokens, e.blocks[b].tokens)
		})
		for _, at := range places {
			t.changes = append(t.changes, change{e.blocks[at].kv, kvStored})
		}
	}
	return t.changes
}

// forgetAll forgets what all engines hold. The changes are valid until the next call.
func (t *tracker) forgetAll() []change {
	t.changes = t.changes[:0]
	for i, e := range t.engines {
		t.removeAll(e, kvForgotten, false)
		t.forgetSessionEnds(i)
		t.engines[i] = newEngine()
	}
	return t.changes
}

// apply applies an engine's next events, and returns what has changed, a predecessor before its successors
// where they are stored, and after them where all are removed. The changes are valid until the next call.
func (t *tracker) apply(rank int, events []wire.Event) []change {
	if cap(t.changes) > changesBuffer {
		t.changes = nil
	}
	t.changes = t.changes[:0]
	e := t.engine(rank)
	if e == nil {
		return nil
	}
	for i := range events {
		switch ev := &events[i]; ev.Kind {
		case wire.Stored:
			t.store(rank, e, ev)
		case wire.Removed:
			t.remove(e, ev)
		case wire.Cleared:
			t.removeAll(e, kvRemoved, true)
			e.complete = e.complete || !e.offloads
			if t.blocks == 0 && t.isComplete() {
				t.changes = append(t.changes, change{0, kvCleared})
			}
		}
	}
	return t.changes
}

// removeSequence removes a session, and returns the blocks that its request has stored: those that begin with
// from, or all of them if from is not among them.
func (t *tracker) removeSequence(session string, from index.KVBlock) (blocks []sequenceBlock) {
	s, known := t.sequences.Peek(session)
	if !known {
		return nil
	}
	defer t.sequences.Remove(session)
	e := t.engines[s.rank]
	for at := s.at; at != 0; at = e.blocks[at].parent {
		tokens := e.blocks[at].tokens
		blocks = append(blocks, sequenceBlock{e.blocks[at].kv, int(tokens), int(tokens - e.blocks[e.blocks[at].parent].tokens)})
		if e.blocks[at].kv == from {
			break
		}
	}
	slices.Reverse(blocks)
	return blocks
}

// engine returns the account of a rank; nil if there are too many.
func (t *tracker) engine(rank int) *engine {
	if rank < 0 || rank >= maxEngines {
		return nil
	}
	for len(t.engines) <= rank {
		t.engines = append(t.engines, newEngine())
	}
	if len(t.engines) > 1 && t.holders == nil {
		t.holders = map[index.KVBlock]int{}
		for _, at := range t.engines[0].byHash { // the others hold nothing yet
			t.holders[t.engines[0].blocks[at].kv]++
		}
	}
	return t.engines[rank]
}

func newEngine() *engine {
	return &engine{byHash: map[uint64]int32{}, blocks: make([]block, 1), groups: map[int]bool{}}
}

// store applies a Stored event. The account is incomplete after an event whose predecessor is
// unknown, and after one that does not fit.
func (t *tracker) store(rank int, e *engine, ev *wire.Event) {
	if ev.Remote || !e.isUsable(ev) {
		return
	}
	e.offloads = e.offloads || ev.Offloaded
	if len(ev.Tokens) == 0 { // an event of the GPU had them
		for _, h := range ev.Hashes {
			if at := e.byHash[h]; at != 0 {
				e.blocks[at].addCopies(ev.Offloaded, 1)
			}
		}
		return
	}
	size := ev.BlockSize
	if len(ev.Tokens) != size*len(ev.Hashes) || len(ev.Hashes) == 0 {
		e.complete = false // blocks without content were left out: which tokens a block has is not known
		return
	}
	at := int32(0)
	if ev.HasParent {
		if at = e.byHash[ev.Parent]; at == 0 {
			e.complete = false
			return
		}
	}
	for i, h := range ev.Hashes {
		var extra uint64
		if i < len(ev.Extra) {
			extra = ev.Extra[i]
		}
		kv := t.name(e.blocks[at].kv, ev.Tokens[i*size:(i+1)*size], extra, ev.LoRA)
		if at = t.storeBlock(e, h, kv, at, size, ev.Offloaded); at == 0 {
			e.complete = false
			return
		}
	}
	if strings.HasPrefix(ev.Session, t.prefix) && t.prefix != "" {
		e.blocks[at].successors++
		t.sequences.Remove(ev.Session) // an earlier end of it
		t.sequences.Add(ev.Session, sequence{rank, at})
	}
}

// storeBlock counts one more copy of a block and returns its place. It returns 0 if there is no room.
func (t *tracker) storeBlock(e *engine, hash uint64, kv index.KVBlock, parent int32, size int, offloaded bool) (at int32) {
	if at = e.byHash[hash]; at != 0 {
		e.blocks[at].addCopies(offloaded, 1)
		return at
	}
	if !t.takeRoom() {
		t.sequences.Purge() // which keep blocks that were removed
		if !t.takeRoom() {
			return 0
		}
	}
	t.places++
	if at = e.free; at != 0 {
		e.free = e.blocks[at].parent
	} else {
		at = int32(len(e.blocks))
		e.blocks = append(e.blocks, block{})
	}
	b := &e.blocks[at]
	*b = block{kv: kv, parent: parent, tokens: e.blocks[parent].tokens + int32(size)}
	b.addCopies(offloaded, 1)
	e.blocks[parent].successors++
	e.byHash[hash] = at
	t.blocks++
	if t.holders != nil {
		if t.holders[kv]++; t.holders[kv] > 1 {
			return at
		}
	}
	t.changes = append(t.changes, change{kv, kvStored})
	return at
}

// takeRoom takes room for a block, and reports false if there is none.
func (t *tracker) takeRoom() bool {
	if t.room.Add(-1) >= 0 {
		return true
	}
	t.room.Add(1)
	return false
}

// addCopies adds n to the copies on the GPU, or to those elsewhere.
func (b *block) addCopies(offloaded bool, n int) {
	copies := &b.gpu
	if offloaded {
		copies = &b.other
	}
	*copies = uint8(min(maxCopies, max(0, int(*copies)+n)))
}

// isUsable reports whether the blocks of a Stored event's group mean a prefix that can be
// reused. Of several groups that do, which have equal blocks, it is the first.
func (e *engine) isUsable(ev *wire.Event) bool {
	if known, ok := e.groups[ev.Group]; ok {
		return known
	}
	usable := !ev.NoPrefix
	for _, other := range e.groups {
		usable = usable && !other
	}
	if len(e.groups) < maxGroups {
		e.groups[ev.Group] = usable
	}
	return usable
}

// remove applies a Removed event.
func (t *tracker) remove(e *engine, ev *wire.Event) {
	if ev.Remote || !e.groups[ev.Group] {
		return
	}
	for _, h := range ev.Hashes {
		at := e.byHash[h]
		if at == 0 {
			continue
		}
		if e.blocks[at].addCopies(ev.Offloaded, -1); !e.blocks[at].isHeld() {
			t.removeBlock(e, h, at, kvRemoved)
		}
	}
}

// removeBlock records that an engine does not hold a block any more, of which no copies are left.
func (t *tracker) removeBlock(e *engine, hash uint64, at int32, what op) {
	kv := e.blocks[at].kv
	delete(e.byHash, hash)
	t.blocks--
	t.freeUnused(e, at)
	if t.holders != nil {
		if t.holders[kv]--; t.holders[kv] > 0 {
			return
		}
		delete(t.holders, kv)
	}
	t.changes = append(t.changes, change{kv, what})
}

// freeUnused frees a block that is not held and that nothing follows, and those before it that
// were only kept for it.
func (t *tracker) freeUnused(e *engine, at int32) {
	for at != 0 && e.blocks[at].successors == 0 && !e.blocks[at].isHeld() {
		t.places--
		t.room.Add(1)
		parent := e.blocks[at].parent
		e.blocks[at] = block{parent: e.free}
		e.free = at
		at = parent
		e.blocks[at].successors--
	}
}

// removeAll removes all blocks, but for copies in other media if gpuOnly, successors before their predecessors.
func (t *tracker) removeAll(e *engine, what op, gpuOnly bool) {
	type place struct {
		hash uint64
		at   int32
	}
	var gone []place
	for h, at := range e.byHash {
		if b := &e.blocks[at]; gpuOnly && b.other > 0 {
			b.gpu = 0
		} else {
			gone = append(gone, place{h, at})
		}
	}
	slices.SortFunc(gone, func(a, b place) int { return cmp.Compare(e.blocks[b.at].tokens, e.blocks[a.at].tokens) })
	for _, p := range gone {
		e.blocks[p.at].gpu, e.blocks[p.at].other = 0, 0
		t.removeBlock(e, p.hash, p.at, what)
	}
}

// name returns the name of a block: a hash of its tokens and of what its engine's hash contains
// besides, chained to its predecessor's.
func (t *tracker) name(parent index.KVBlock, tokens []uint32, extra uint64, lora string) index.KVBlock {
	t.buf = t.buf[:0]
	for _, id := range tokens {
		t.buf = binary.LittleEndian.AppendUint32(t.buf, id)
	}
	if extra != 0 {
		t.buf = binary.LittleEndian.AppendUint64(t.buf, extra)
	}
	if parent == 0 {
		t.buf = append(t.buf, lora...)
	}
	return index.KVBlock(max(1, xxh3.HashSeed(t.buf, t.seed^uint64(parent))))
}

// forgetSessionEnds forgets which blocks the sessions on an engine end with.
func (t *tracker) forgetSessionEnds(rank int) {
	for _, session := range t.sequences.Keys() {
		if q, _ := t.sequences.Peek(session); q.rank == rank {
			t.sequences.Remove(session)
		}
	}
}
