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
	maxGroups     = 64   // KV cache groups that an engine's account keeps apart
	maxUnplaced   = 4096 // blocks of other groups than the first one of full attention that wait for that one's event
	maxCopies     = 8    // of a block that are counted; a client can have blocks announced again
	maxSequences  = 16 << 10
	changesBuffer = 1024 // changes that are kept for reuse
)

// op is what happened to a KV block.
type op uint8

const (
	kvStored          op = iota // the replica holds it
	kvRemoved                   // it does not any more
	kvForgotten                 // it is not known any more whether it does
	kvCleared                   // it holds no blocks at all; kv is 0
	kvUsable                    // all of its groups hold the block, so that a prefix can be reused up to its end
	kvUnusable                  // not all do any more
	kvUsableForgotten           // it is not known any more whether all do
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
	seed          uint64                           // equal blocks have equal names in all trackers with the same
	prefix        string                           // of the sessions whose sequences are remembered
	engineCount   int                              // data-parallel ones that the replica has at least
	room          *atomic.Int64                    // for how many more blocks there is memory in all trackers that share it
	engines       []*engine                        // by rank
	blocks        int                              // held, in all engines; one that several hold counts for each
	usable        map[index.KVBlock]int            // engines of which all groups hold a block; nil before the first one
	places        int                              // taken by these and by blocks that are kept for others
	holders       map[index.KVBlock]int            // engines that hold a block; nil while there is one engine
	kvBlockTokens int                              // in a KV block of the event before; 0: there was none
	sequences     *simplelru.LRU[string, sequence] // by session: the last block that each of the latest requests has stored

	changes []change
	buf     []byte
}

// engine is the account of one data-parallel engine.
type engine struct {
	complete      bool             // it announces all that it holds
	hadBlocks     bool             // before the last restart that was not complete
	offloads      bool             // it has announced blocks of another medium than the GPU
	byHash        map[uint64]int32 // the publisher's hash → place of the block
	blocks        []block          // blocks[0] stands before the first block of a sequence
	free          int32            // the first unused place, linked by parent; 0: none
	groups        map[int]group    // by their numbers
	others        groupSet         // the groups beside the first one of full attention
	windows       []window
	unplaced      map[uint64]groupSet // by hash: groups that hold blocks of which no event of full attention was seen yet
	usable        map[uint64]bool     // hashes of the blocks that all groups hold
	windowRemoved bool                // a group of a window has removed blocks since the last update
	touched       []uint64            // hashes of blocks that other groups have stored or removed since the last update of checkpoints
}

// group is a KV cache group of an engine.
type group struct {
	isPrimary bool     // it is the first one of full attention, whose blocks the account follows
	bit       groupSet // of another one
}

// groupSet is a set of the groups beside the primary one.
type groupSet uint64

// window is a group of sliding-window attention: a prefix can be reused if the group holds the last blocks of it.
type window struct {
	bit    groupSet
	tokens int
}

// block is one KV block of an engine. It outlives its removal while blocks follow it, or a
// sequence that is remembered ends there.
type block struct {
	kv         index.KVBlock
	parent     int32
	tokens     int32    // of the sequence up to its end
	successors int32    // and sequences that end there
	gpu, other uint8    // copies
	groups     groupSet // that hold it, beside the primary one
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
	for kv := range t.usable {
		t.changes = append(t.changes, change{kv, kvUsable})
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
	t.updateUsable(e)
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
	return &engine{byHash: map[uint64]int32{}, blocks: make([]block, 1), groups: map[int]group{}, usable: map[uint64]bool{}}
}

// store applies a Stored event. The account is incomplete after an event whose predecessor is
// unknown, and after one that does not fit.
func (t *tracker) store(rank int, e *engine, ev *wire.Event) {
	if ev.Remote {
		return
	}
	if g := e.findOrAddGroup(ev); !g.isPrimary {
		e.storeOther(g, ev)
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
	t.kvBlockTokens = size
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
	*b = block{kv: kv, parent: parent, tokens: e.blocks[parent].tokens + int32(size), groups: e.unplaced[hash]}
	if b.groups != 0 {
		delete(e.unplaced, hash)
		e.touched = append(e.touched, hash)
	}
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

// findOrAddGroup returns the group of a Stored event. Blocks of equal content have equal hashes in all groups.
func (e *engine) findOrAddGroup(ev *wire.Event) group {
	if g, ok := e.groups[ev.Group]; ok {
		return g
	}
	g := group{isPrimary: !ev.NoPrefix}
	for _, other := range e.groups {
		g.isPrimary = g.isPrimary && !other.isPrimary
	}
	if len(e.groups) >= maxGroups {
		return group{}
	}
	if !g.isPrimary {
		g.bit = 1 << len(e.groups)
		e.others |= g.bit
		if ev.Window > 0 {
			e.windows = append(e.windows, window{g.bit, ev.Window})
		}
	}
	e.groups[ev.Group] = g
	return g
}

// storeOther applies a Stored event of a group beside the primary one, whose event for the same blocks may follow.
func (e *engine) storeOther(g group, ev *wire.Event) {
	if ev.Offloaded {
		return // the hit that it allows is not known
	}
	for _, h := range ev.Hashes {
		if at := e.byHash[h]; at != 0 {
			e.blocks[at].groups |= g.bit
			e.touched = append(e.touched, h)
			continue
		}
		if e.unplaced == nil {
			e.unplaced = map[uint64]groupSet{}
		}
		if _, known := e.unplaced[h]; known || len(e.unplaced) < maxUnplaced {
			e.unplaced[h] |= g.bit
		}
	}
}

// removeOther applies a Removed event of a group beside the primary one to a block, whose place is 0 if the primary one does not hold it.
func (e *engine) removeOther(g group, hash uint64, at int32, offloaded bool) {
	switch {
	case offloaded:
	case at == 0:
		if groups, known := e.unplaced[hash]; known {
			e.unplaced[hash] = groups &^ g.bit
		}
	default:
		e.blocks[at].groups &^= g.bit
		e.touched = append(e.touched, hash)
		if slices.ContainsFunc(e.windows, func(w window) bool { return w.bit == g.bit }) {
			e.windowRemoved = true
		}
	}
}

// updateUsable updates which of the touched blocks are held by all groups, after the events of one message.
func (t *tracker) updateUsable(e *engine) {
	if e.windowRemoved { // also a block before the end of a prefix is needed
		e.windowRemoved = false
		e.touched = slices.AppendSeq(e.touched, maps.Keys(e.usable))
	}
	for _, h := range e.touched {
		at := e.byHash[h]
		if at == 0 {
			continue
		}
		switch usable := e.isUsable(at); {
		case usable && !e.usable[h]:
			t.addUsable(e, h, e.blocks[at].kv)
		case !usable && e.usable[h]:
			t.removeUsable(e, h, e.blocks[at].kv, kvUnusable)
		}
	}
	e.touched = e.touched[:0]
	clear(e.unplaced)
}

// isUsable reports whether a prefix that ends with a block, which the primary group holds, can be reused.
func (e *engine) isUsable(at int32) bool {
	if e.others == 0 || e.blocks[at].groups != e.others {
		return false
	}
	for _, w := range e.windows {
		end := int(e.blocks[at].tokens)
		for i := at; i != 0 && int(e.blocks[i].tokens) > end-w.tokens+1; i = e.blocks[i].parent {
			if e.blocks[i].groups&w.bit == 0 {
				return false
			}
		}
	}
	return true
}

// addUsable records that all groups of an engine hold a block.
func (t *tracker) addUsable(e *engine, hash uint64, kv index.KVBlock) {
	e.usable[hash] = true
	if t.usable == nil {
		t.usable = map[index.KVBlock]int{}
	}
	if t.usable[kv]++; t.usable[kv] == 1 {
		t.changes = append(t.changes, change{kv, kvUsable})
	}
}

// removeUsable records that not all groups of an engine hold a block any more. What is the change if it was the last engine.
func (t *tracker) removeUsable(e *engine, hash uint64, kv index.KVBlock, what op) {
	delete(e.usable, hash)
	if t.usable[kv]--; t.usable[kv] == 0 {
		delete(t.usable, kv)
		t.changes = append(t.changes, change{kv, what})
	}
}

// remove applies a Removed event.
func (t *tracker) remove(e *engine, ev *wire.Event) {
	g, known := e.groups[ev.Group]
	if ev.Remote || !known {
		return
	}
	for _, h := range ev.Hashes {
		at := e.byHash[h]
		if !g.isPrimary {
			e.removeOther(g, h, at, ev.Offloaded)
			continue
		}
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
	if e.blocks[at].groups = 0; e.usable[hash] {
		whatOfUsable := kvUnusable
		if what == kvForgotten {
			whatOfUsable = kvUsableForgotten
		}
		t.removeUsable(e, hash, kv, whatOfUsable)
	}
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
			b.groups = 0
			e.touched = append(e.touched, h)
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
