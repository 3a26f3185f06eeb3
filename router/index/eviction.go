package index

import (
	"slices"
	"sort"

	"warmroute/prompt"
)

// evictAhead is how many blocks more than needed one Add may evict after a capacity
// has shrunk. To evict all at once could take 0.2 s under the caller's lock.
const evictAhead = 256

// minApproximateShare is the part of a backend's capacity that blocks without a report have at
// least beside those with one: one of so many.
const minApproximateShare = 8

// droppedCache is what a backend held before it lost its cache, and the holder tables
// still list. While any of it is left, the backend is matched by matchOneBackend.
type droppedCache struct {
	slot    int
	entries []entry // not yet swept
}

// SetRequestedCapacity sets how many blocks a backend can hold. If all backends' capacities together exceed the
// memory bound, small ones are granted in full and the others get equal shares of the rest. Blocks beyond a
// smaller capacity are evicted gradually, oldest first.
func (x *Index) SetRequestedCapacity(slot, blocks int) {
	if x.requested[slot] == blocks {
		return
	}
	x.requested[slot] = blocks
	x.shareCapacity()
}

// shareCapacity sets the capacities to those requested, as far as they fit the memory bound.
func (x *Index) shareCapacity() {
	share := x.maxBackendBlocks()
	for i, c := range x.caches {
		c.capacity = min(x.requested[i], share)
	}
}

// maxBackendBlocks returns the number of blocks that each backend may hold so that all of
// them fit the bound of the index.
func (x *Index) maxBackendBlocks() int {
	left := x.maxEntries
	for _, c := range x.caches {
		left -= c.maxSize() - c.capacity
	}
	left = max(0, left)
	for i, w := range slices.Sorted(slices.Values(x.requested)) {
		if share := left / (len(x.requested) - i); w > share {
			return share
		}
		left -= w
	}
	return x.maxEntries
}

// DropCache removes all that a backend holds, because its replica lost its cache. Its pins end.
func (x *Index) DropCache(slot int) {
	c := x.caches[slot]
	fresh := newCache()
	fresh.capacity, fresh.evictions, fresh.uses = c.capacity, c.evictions, c.uses
	if c.checkpoints.cost > 0 {
		fresh.checkpoints.setCost(c.checkpoints.cost)
		fresh.checkpoints.events = c.checkpoints.events
	}
	x.caches[slot] = fresh
	x.version++
	if c.size == 0 {
		return
	}
	x.dropped = append(x.dropped, droppedCache{slot, c.entries[1:]})
	x.stale[slot/maxMembers] |= 1 << (slot % maxMembers)
	*c = cache{} // a Pin may still point here
}

// DropUnusedSince removes the blocks that a backend holds and whose last use was before a Pin.Use, because its
// replica lost its cache by then. Those of requests in flight stay, and those that the replica has reported.
func (x *Index) DropUnusedSince(slot int, use uint64) {
	c := x.caches[slot]
	c.removeCheckpointsBefore(use)
	for at := c.oldest(); at != 0 && c.entries[at].stamp < use; at = c.oldest() {
		x.removeEntry(slot, at)
	}
}

// CountUnusedSince returns how many of blocks, all of which the backend holds, were last used before a Pin.Use, without those
// that requests in flight use and those that the replica has reported. These are the last ones, since what is before a block is in
// use too, was used later, or has a report.
func (x *Index) CountUnusedSince(slot int, blocks []prompt.Block, use uint64) int {
	c := x.caches[slot]
	if at := c.oldest(); at == 0 || c.entries[at].stamp >= use {
		return 0
	}
	return len(blocks) - sort.Search(len(blocks), func(i int) bool {
		e := &c.entries[x.findEntry(slot, blocks[i])]
		return e.stamp < use && e.isListed()
	})
}

// ResetSlot resets a slot whose backend was removed, for another to use.
func (x *Index) ResetSlot(slot int) {
	x.DropCache(slot)
	x.caches[slot].evictions = 0
	x.caches[slot].checkpoints.events = false
	x.SetCheckpointCost(slot, 0)
	x.SetRequestedCapacity(slot, 0)
}

// SweepAndEvict removes up to about maxBlocks of the blocks that DropCache and
// SetRequestedCapacity left behind, and reports whether more are left.
func (x *Index) SweepAndEvict(maxBlocks int) (more bool) {
	for len(x.dropped) > 0 && maxBlocks > 0 {
		maxBlocks -= x.sweepDropped(maxBlocks)
	}
	left := len(x.dropped) > 0
	if x.kv.maxHeld > 0 {
		x.shareCapacity() // of what blocks with a report leave of the bound
	}
	for slot, c := range x.caches {
		over := c.usedBlocks() - c.maxSize()
		if over > 0 && maxBlocks > 0 {
			evicted := x.evict(slot, min(over, maxBlocks), true)
			over, maxBlocks = over-evicted, maxBlocks-evicted
		}
		left = left || over > 0
	}
	return left
}

// sweepDropped removes up to n blocks of the first dropped cache from the holder tables,
// and returns how many entries it examined.
func (x *Index) sweepDropped(n int) (swept int) {
	d := &x.dropped[0]
	n = min(n, len(d.entries))
	for _, e := range d.entries[:n] {
		if e.stamp == 0 {
			continue // no block
		}
		x.entries--
		if x.findEntry(d.slot, e.block) == 0 {
			x.removeHolder(d.slot, e.block)
		}
	}
	if d.entries = d.entries[n:]; len(d.entries) > 0 {
		return n
	}
	slot := d.slot
	x.dropped = x.dropped[1:]
	for i := range x.dropped {
		if x.dropped[i].slot == slot {
			return n
		}
	}
	x.stale[slot/maxMembers] &^= 1 << (slot % maxMembers)
	return n
}

// makeRoom evicts until blocks more of them fit, and some of those beyond a capacity that has shrunk.
func (x *Index) makeRoom(slot, blocks int) {
	if len(x.dropped) > 0 {
		x.SweepAndEvict(2*blocks + evictAhead)
	}
	c := x.caches[slot]
	over := c.usedBlocks() + blocks - c.maxSize()
	if over <= 0 {
		return
	}
	x.evict(slot, min(over, 2*blocks+evictAhead), true)
}

// maxSize returns how many blocks the backend may hold: as many as its capacity, or a few beside
// those with a report.
func (c *cache) maxSize() int { return max(c.capacity, c.reported+c.capacity/minApproximateShare) }

// evict removes up to n blocks, oldest first, and returns how many; a checkpoint counts for the blocks that it takes.
// When all that are left are pinned, the
// backend was sent more than it can hold, and the oldest pin is unpinned, if it may be.
func (x *Index) evict(slot, n int, mayUnpin bool) (evicted int) {
	c := x.caches[slot]
	s, _ := x.holderTableOf(slot)
	for evicted < n {
		if freed := c.evictCheckpoint(); freed > 0 {
			evicted += freed
			continue
		}
		blocks := x.evictBuffer[:min(len(x.evictBuffer), n-evicted)]
		k := c.removeOldest(blocks)
		if k == 0 {
			if c.firstPin == nil || !mayUnpin {
				break
			}
			x.unpin(c.firstPin)
			continue
		}
		x.prefetchSink ^= s.prefetch(blocks[:k])
		for _, b := range blocks[:k] {
			x.removeHolder(slot, b)
		}
		evicted += k
		x.entries -= k
	}
	if evicted > 0 {
		c.evictions += uint64(evicted)
		x.version++
	}
	return evicted
}
