// Package index approximates every replica's prefix cache from the prompts that it was sent, and from what it
// reports of its KV blocks: which backend likely holds which block.
package index

import (
	"math/bits"

	"warmroute/prompt"
)

// entryBytes bounds the memory of one held block, with its part of the tables; see TestMemoryBound.
const entryBytes = 128

// Index mirrors the prefix caches of a fleet. It is not safe for concurrent use: the
// Router calls it under its own lock.
//
// What a backend holds is closed under prefixes: with a block, all blocks before it.
type Index struct {
	maxEntries   int
	caches       []*cache
	requested    []int          // capacity asked for in blocks, by slot
	holders      []*holderTable // one for each maxMembers slots
	entries      int            // in all caches, and dropped ones not yet swept
	version      uint64
	prefetchSink prompt.Block     // see table.prefetch
	evictBuffer  [64]prompt.Block // scratch of evict
	kv           kvBlocks

	withCheckpoints int // backends whose replica can reuse its cache up to checkpoints only

	dropped []droppedCache
	stale   []uint64 // bits of the backends with a dropped cache, by holder table
}

// New returns an index with room for slots backends that takes at most about
// maxBytes of memory, whatever the capacities of the backends.
func New(slots int, maxBytes int64) *Index {
	x := &Index{maxEntries: int(maxBytes / entryBytes)}
	x.Grow(slots)
	return x
}

// Grow makes room for so many slots. New ones have capacity 0.
func (x *Index) Grow(slots int) {
	for len(x.caches) < slots {
		x.caches = append(x.caches, newCache())
		x.requested = append(x.requested, 0)
	}
	for maxMembers*len(x.holders) < slots {
		x.holders = append(x.holders, new(holderTable))
		x.stale = append(x.stale, 0)
	}
	x.version++
}

// Match sets depth[slot] to the number of leading blocks that each backend holds.
//
// What backends hold is closed under prefixes, so the sets of holders only shrink
// along a prompt, and between two blocks with equal sets nothing changes. So Match
// costs about log2(len(blocks)) lookups for each distinct depth.
func (x *Index) Match(blocks []prompt.Block, depth []int) {
	for g, s := range x.holders {
		first := maxMembers * g
		live := (1<<min(maxMembers, len(x.caches)-first) - 1) &^ x.stale[g]
		last := live
		if len(blocks) > 0 {
			last &= s.holderBits(blocks[len(blocks)-1])
		}
		s.setDepthsInRange(blocks, 0, len(blocks), live, last, live, depth[first:])
		setDepths(last, len(blocks), depth[first:])
		for left := x.stale[g]; left != 0; left &= left - 1 {
			slot := first + bits.TrailingZeros64(left)
			depth[slot] = x.matchOneBackend(slot, blocks)
		}
	}
}

// Version returns a number that changes whenever results of Match may. It is never 0.
func (x *Index) Version() uint64 { return x.version + 1 }

// Len returns the number of blocks that a backend holds.
func (x *Index) Len(slot int) int { return x.caches[slot].size }

// Capacity returns the number of blocks that a backend may hold, within the memory bound.
func (x *Index) Capacity(slot int) int { return x.caches[slot].capacity }

// RequestedCapacity returns the capacity last passed to SetRequestedCapacity.
func (x *Index) RequestedCapacity(slot int) int { return x.requested[slot] }

// Evictions returns how many blocks of a backend were evicted to make room.
func (x *Index) Evictions(slot int) uint64 { return x.caches[slot].evictions }

// Uses returns how often requests have used a backend's cache, the last Pin.Use.
func (x *Index) Uses(slot int) uint64 { return x.caches[slot].uses }

// Bytes returns about how much memory the held blocks, KV blocks and links take.
func (x *Index) Bytes() int64 {
	return int64(x.entries+x.kv.heldLen+max(0, len(x.kv.links)-1)) * entryBytes
}

// removeEntry removes a block that is in a backend's list, and those before it that the
// replica does not hold any more.
func (x *Index) removeEntry(slot int, at int32) {
	c := x.caches[slot]
	for at != 0 {
		x.removeHolder(slot, c.entries[at].block)
		at = c.remove(at)
		x.entries--
	}
	x.version++
}

// insertPinned adds blocks after the entry parent, pinned once, and returns the entry of
// the last, or parent if there are none.
func (x *Index) insertPinned(slot int, blocks []prompt.Block, parent int32, stamp uint64) (last int32) {
	c := x.caches[slot]
	s, _ := x.holderTableOf(slot)
	x.prefetchSink ^= s.prefetch(blocks)
	for _, b := range blocks {
		parent = c.insertPinned(b, parent, stamp)
		x.addHolder(slot, b, parent)
	}
	x.entries += len(blocks)
	if len(blocks) > 0 {
		x.version++
	}
	return parent
}
