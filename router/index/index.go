// Package index remembers which backend likely holds which block of which
// prompt: an approximation of every replica's prefix cache, kept up by what we
// sent where.
package index

import (
	"math/bits"

	"warmroute/router/prompt"
)

// entryBytes is what one held block costs at most: its entry, its slot in the
// backends' set, and where several hold it its slot in its backend's table. Measured
// by TestBytesBoundHolds.
const entryBytes = 128

// Index mirrors the prefix caches of a fleet. It is not safe for concurrent
// use: the Router calls it under its own lock, so that matching and inserting
// are one step.
//
// For each backend it holds a set of blocks that is closed under prefixes:
// with a block, all blocks before it. Match relies on that.
type Index struct {
	maxEntries int
	held       []*held
	want       []int  // capacity asked for, by slot, in blocks
	sets       []*set // one for each so many members
	entries    int    // held, or dropped and not yet swept
	version    uint64
	fetched    prompt.Block     // means nothing: see fetch
	evicted    [64]prompt.Block // scratch of evict

	dropped []dropped
	unswept []uint64 // the backends with a dropped part, as in sets
}

// New makes an index for slots backends that takes at most about maxBytes of
// memory, however many blocks the backends could hold.
func New(slots int, maxBytes int64) *Index {
	x := &Index{maxEntries: int(maxBytes / entryBytes)}
	x.Grow(slots)
	return x
}

// Grow makes room for so many slots. A new one may hold nothing yet.
func (x *Index) Grow(slots int) {
	for len(x.held) < slots {
		x.held = append(x.held, newHeld())
		x.want = append(x.want, 0)
	}
	for members*len(x.sets) < slots {
		x.sets = append(x.sets, new(set))
		x.unswept = append(x.unswept, 0)
	}
	x.version++
}

// Match writes to depth[slot] how many leading blocks each backend holds.
//
// Sets only shrink along a prompt, since each backend's part is closed under
// prefixes. So between two blocks with equal sets nothing changes, and the
// whole costs about log2(len(blocks)) lookups for each distinct depth, not one
// for each block.
func (x *Index) Match(blocks []prompt.Block, depth []int) {
	for g, s := range x.sets {
		first := members * g
		live := (1<<min(members, len(x.held)-first) - 1) &^ x.unswept[g]
		last := live
		if len(blocks) > 0 {
			last &= s.holders(blocks[len(blocks)-1])
		}
		s.match(blocks, 0, len(blocks), live, last, live, depth[first:])
		record(last, len(blocks), depth[first:])
		for left := x.unswept[g]; left != 0; left &= left - 1 {
			slot := first + bits.TrailingZeros64(left)
			depth[slot] = x.leading(slot, blocks)
		}
	}
}

// Version changes whenever Match may answer differently. It is never 0.
func (x *Index) Version() uint64 { return x.version + 1 }

// Len is the number of blocks that a backend holds.
func (x *Index) Len(slot int) int { return x.held[slot].size }

// Capacity is the number of blocks that a backend may hold here.
func (x *Index) Capacity(slot int) int { return x.held[slot].capacity }

// Wanted is the capacity that was last asked for.
func (x *Index) Wanted(slot int) int { return x.want[slot] }

// Evictions counts the blocks that a backend's part gave up to make room.
func (x *Index) Evictions(slot int) uint64 { return x.held[slot].evictions }

// Bytes is about what the blocks held take in memory.
func (x *Index) Bytes() int64 { return int64(x.entries) * entryBytes }

func (x *Index) remove(slot int, at int32) {
	h := x.held[slot]
	x.hide(slot, h.entries[at].block)
	h.remove(at)
	x.entries--
	x.version++
}

// insert adds blocks after the entry parent, in use by one, and returns the last
// one's entry.
func (x *Index) insert(slot int, blocks []prompt.Block, parent int32, stamp uint64) int32 {
	h := x.held[slot]
	s, _ := x.in(slot)
	x.fetched ^= s.fetch(blocks)
	for _, b := range blocks {
		parent = h.insert(b, parent, stamp)
		x.show(slot, b, parent)
	}
	x.entries += len(blocks)
	if len(blocks) > 0 {
		x.version++
	}
	return parent
}
