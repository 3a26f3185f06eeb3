// Package kvblocks follows which KV blocks a replica holds, from the events that it publishes.
// It names the blocks by their tokens, so that equal blocks of all replicas have one name
// whatever hashes their engines use.
package kvblocks

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

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

// Op is what happened to a KV block.
type Op uint8

const (
	Stored    Op = iota // the replica holds it
	Removed             // it does not any more
	Forgotten           // it is not known any more whether it does
	Cleared             // it holds no blocks at all; KV is 0
)

// Change is one change of what a replica holds.
type Change struct {
	KV index.KVBlock
	Op Op
}

// Block is a KV block of a sequence.
type Block struct {
	KV     index.KVBlock
	Tokens int // of the sequence up to its end
	Size   int // in tokens
}

// Tracker follows the KV blocks of one replica, in all its data-parallel engines and all media.
// It is not safe for concurrent use.
type Tracker struct {
	seed        uint64
	engineCount int
	room        *Room
	prefix      string                // of the sessions whose sequences are remembered
	engines     []*engine             // by rank
	blocks      int                   // held, in all engines
	places      int                   // taken by these and by blocks that are kept for others
	holders     map[index.KVBlock]int // engines that hold a block; nil while there is one engine
	sequences   sequences

	changes []Change
	buf     []byte
}

// engine is the account of one data-parallel engine.
type engine struct {
	complete  bool             // it announces all that it holds
	hadBlocks bool             // before the last Restart that was not complete
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

// Room is for how many blocks there is memory in all Trackers that share it. Safe for concurrent
// use.
type Room struct{ free atomic.Int64 }

// NewRoom returns room for so many blocks.
func NewRoom(blocks int) *Room {
	r := &Room{}
	r.free.Store(int64(blocks))
	return r
}

// take takes room for a block, and reports false if there is none.
func (r *Room) take() bool {
	if r.free.Add(-1) >= 0 {
		return true
	}
	r.free.Add(1)
	return false
}

// Options configure a Tracker.
type Options struct {
	Seed    uint64 // equal blocks have equal names in all Trackers with the same
	Engines int    // data-parallel ones that the replica has at least
	Room    *Room
	Prefix  string // what requests store is remembered for those whose session has it
}

// New returns a Tracker.
func New(o Options) *Tracker {
	return &Tracker{seed: o.Seed, engineCount: o.Engines, room: o.Room, prefix: o.Prefix, sequences: sequences{last: map[string]sequence{}}}
}

// Len returns how many blocks the replica holds, as far as is known. Blocks that several
// engines hold count for each.
func (t *Tracker) Len() int { return t.blocks }

// IsComplete reports whether all that the replica holds is known.
func (t *Tracker) IsComplete() bool {
	for _, e := range t.engines {
		if e == nil || !e.complete {
			return false
		}
	}
	return len(t.engines) >= t.engineCount
}

// SetEngines sets how many engines the replica has at least.
func (t *Tracker) SetEngines(n int) { t.engineCount = n }

// Restart records that what an engine announced before does not count any more: it has been
// started again, or events were lost. complete says that it announces all that it holds from
// now on. The changes are valid until the next call.
func (t *Tracker) Restart(rank int, complete bool) []Change {
	t.changes = t.changes[:0]
	e := t.engine(rank)
	if e == nil {
		return nil
	}
	op, hadBlocks := Forgotten, e.hadBlocks || len(e.byHash) > 0
	if complete {
		op = Removed
	}
	t.removeAll(e, op, func(*block) bool { return true })
	t.forgetSequences(rank)
	*e = *newEngine()
	e.complete, e.hadBlocks = complete, hadBlocks && !complete
	if hadBlocks && t.blocks == 0 && t.IsComplete() {
		t.changes = append(t.changes, Change{0, Cleared})
	}
	return t.changes
}

// HeldAsStored returns all blocks that the replica holds as if they were stored now, predecessors
// before their successors. The changes are valid until the next call.
func (t *Tracker) HeldAsStored() []Change {
	t.changes = t.changes[:0]
	for _, e := range t.engines {
		if e == nil {
			continue
		}
		places := slices.SortedFunc(maps.Values(e.byHash), func(a, b int32) int {
			return cmp.Compare(e.blocks[a].tokens, e.blocks[b].tokens)
		})
		for _, at := range places {
			t.changes = append(t.changes, Change{e.blocks[at].kv, Stored})
		}
	}
	return t.changes
}

// ForgetAll forgets what all engines hold. The changes are valid until the next call.
func (t *Tracker) ForgetAll() []Change {
	t.changes = t.changes[:0]
	for i, e := range t.engines {
		if e != nil {
			t.removeAll(e, Forgotten, func(*block) bool { return true })
			t.forgetSequences(i)
			t.engines[i] = newEngine()
		}
	}
	return t.changes
}

// Apply applies an engine's next events, and returns what has changed, a predecessor before its
// successors where they are stored, and after them where all are removed. The changes are valid
// until the next call.
func (t *Tracker) Apply(rank int, events []wire.Event) []Change {
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
			t.removeAll(e, Removed, func(b *block) bool { return b.other == 0 })
			for _, at := range e.byHash {
				e.blocks[at].gpu = 0
			}
			e.complete = e.complete || !e.offloads
			if t.blocks == 0 && t.IsComplete() {
				t.changes = append(t.changes, Change{0, Cleared})
			}
		}
	}
	return t.changes
}

// TakeSequence returns the blocks that the request of a session has used, and forgets the
// session: from the block named from on, or all of them if that is not among them. There are
// none if the request has stored none.
func (t *Tracker) TakeSequence(session string, from index.KVBlock) (blocks []Block) {
	s, known := t.sequences.last[session]
	if !known {
		return nil
	}
	defer t.forgetSequence(session)
	e := t.engines[s.rank]
	for at := s.at; at != 0; at = e.blocks[at].parent {
		tokens := e.blocks[at].tokens
		blocks = append(blocks, Block{e.blocks[at].kv, int(tokens), int(tokens - e.blocks[e.blocks[at].parent].tokens)})
		if e.blocks[at].kv == from {
			break
		}
	}
	slices.Reverse(blocks)
	return blocks
}

// engine returns the account of a rank; nil if there are too many.
func (t *Tracker) engine(rank int) *engine {
	if rank < 0 || rank >= maxEngines {
		return nil
	}
	for len(t.engines) <= rank {
		t.engines = append(t.engines, nil)
	}
	if t.engines[rank] == nil {
		t.engines[rank] = newEngine()
		if len(t.engines) > 1 && t.holders == nil {
			t.countHolders()
		}
	}
	return t.engines[rank]
}

func newEngine() *engine {
	return &engine{byHash: map[uint64]int32{}, blocks: make([]block, 1), groups: map[int]bool{}}
}

// countHolders begins to count the engines that hold each block.
func (t *Tracker) countHolders() {
	t.holders = map[index.KVBlock]int{}
	for _, e := range t.engines {
		if e == nil {
			continue
		}
		for _, at := range e.byHash {
			t.holders[e.blocks[at].kv]++
		}
	}
}

// store applies a Stored event. The account is incomplete after one whose predecessor is not
// known, or for which there is no room.
func (t *Tracker) store(rank int, e *engine, ev *wire.Event) {
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
		t.rememberSequence(ev.Session, sequence{rank, at})
	}
}

// storeBlock counts one more copy of a block and returns its place; 0 if there is no room.
func (t *Tracker) storeBlock(e *engine, hash uint64, kv index.KVBlock, parent int32, size int, offloaded bool) (at int32) {
	if at = e.byHash[hash]; at != 0 {
		e.blocks[at].addCopies(offloaded, 1)
		return at
	}
	if !t.room.take() {
		t.forgetAllSequences() // which keep blocks that were removed
		if !t.room.take() {
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
	t.changes = append(t.changes, Change{kv, Stored})
	return at
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
func (t *Tracker) remove(e *engine, ev *wire.Event) {
	if ev.Remote || !e.groups[ev.Group] {
		return
	}
	for _, h := range ev.Hashes {
		at := e.byHash[h]
		if at == 0 {
			continue
		}
		if b := &e.blocks[at]; b.isHeld() {
			if b.addCopies(ev.Offloaded, -1); !b.isHeld() {
				t.removeBlock(e, h, at, Removed)
			}
		}
	}
}

// removeBlock records that an engine does not hold a block any more, of which no copies are
// left.
func (t *Tracker) removeBlock(e *engine, hash uint64, at int32, op Op) {
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
	t.changes = append(t.changes, Change{kv, op})
}

// freeUnused frees a block that is not held and that nothing follows, and those before it that
// were only kept for it.
func (t *Tracker) freeUnused(e *engine, at int32) {
	for at != 0 && e.blocks[at].successors == 0 && !e.blocks[at].isHeld() {
		t.places--
		t.room.free.Add(1)
		parent := e.blocks[at].parent
		e.blocks[at] = block{parent: e.free}
		e.free = at
		at = parent
		e.blocks[at].successors--
	}
}

// removeAll removes the blocks that are gone, successors before their predecessors.
func (t *Tracker) removeAll(e *engine, op Op, isGone func(*block) bool) {
	type place struct {
		hash uint64
		at   int32
	}
	var gone []place
	for h, at := range e.byHash {
		if isGone(&e.blocks[at]) {
			gone = append(gone, place{h, at})
		}
	}
	slices.SortFunc(gone, func(a, b place) int { return cmp.Compare(e.blocks[b.at].tokens, e.blocks[a.at].tokens) })
	for _, p := range gone {
		e.blocks[p.at].gpu, e.blocks[p.at].other = 0, 0
		t.removeBlock(e, p.hash, p.at, op)
	}
}

// name returns the name of a block: a hash of its tokens and of what its engine's hash contains
// besides, chained to its predecessor's.
func (t *Tracker) name(parent index.KVBlock, tokens []uint32, extra uint64, lora string) index.KVBlock {
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

// sequences remembers the last block that each of the latest requests has stored.
type sequences struct {
	last   map[string]sequence // by session
	order  []string            // sessions by age, as a ring; some may be forgotten
	oldest int
}

type sequence struct {
	rank int
	at   int32
}

// rememberSequence replaces the last block of a session.
func (t *Tracker) rememberSequence(session string, q sequence) {
	s := &t.sequences
	t.engines[q.rank].blocks[q.at].successors++
	if _, known := s.last[session]; known {
		t.forgetSequence(session)
	} else if len(s.order) < maxSequences {
		s.order = append(s.order, session)
	} else {
		t.forgetSequence(s.order[s.oldest])
		s.order[s.oldest] = session
		s.oldest = (s.oldest + 1) % len(s.order)
	}
	s.last[session] = q
}

func (t *Tracker) forgetSequence(session string) {
	q, known := t.sequences.last[session]
	if !known {
		return
	}
	delete(t.sequences.last, session)
	e := t.engines[q.rank]
	e.blocks[q.at].successors--
	t.freeUnused(e, q.at)
}

// forgetSequences forgets the sequences of an engine.
func (t *Tracker) forgetSequences(rank int) {
	for session, q := range t.sequences.last {
		if q.rank == rank {
			t.forgetSequence(session)
		}
	}
}

func (t *Tracker) forgetAllSequences() {
	for session := range t.sequences.last {
		t.forgetSequence(session)
	}
}
