package index

import (
	"sort"

	"warmroute/prompt"
)

// cache is the mirror of one backend's prefix cache. Blocks that requests in flight use are pinned, and of some
// the replica has reported that it holds them or does not any more; the others form a list, least recently used
// first. Invariant: a block's predecessor is held too, and is pinned, has a report or was used later. So the
// oldest entry is the tail of every prefix it belongs to, and eviction shortens prefixes from their tails, as
// in vLLM's own free list.
type cache struct {
	capacity  int
	evictions uint64
	uses      uint64       // Adds and Releases so far, the clock of the stamps
	shared    table[int32] // entries of the blocks that have, or had, several holders
	entries   []entry      // entries[0] closes the list to a ring: its newer is the oldest, its older the newest
	size      int          // entries that hold a block
	reported  int          // of these, those with a report
	confirmed int          // of these, those that the replica holds
	free      int32        // first of the unused entries, linked by newer; 0: none
	pinned    int          // entries with pins
	unpinned  int          // blocks of requests in flight that had to be unpinned

	checkpoints checkpoints

	firstPin, lastPin *Pin // in the order of their Adds
}

// entry is one block. Links are indexes of entries.
type entry struct {
	block        prompt.Block
	stamp        uint64 // of its last use; 0: no block
	parent       int32  // entry of its predecessor; 0: it is a first block
	pins         int32  // requests in flight that end at it, and pinned successors; if any, it is not in the list
	older, newer int32
	successors   int32
	reported     int32 // of these, those with a report
	report       report
	dense        bool  // a prompt that leaves here can reuse it, though it has no checkpoint; see Index.SetSlidingWindow
	checkpoint   int32 // in the block, of cache.checkpoints; 0: none
}

// report is what a replica has said of an entry's block.
type report uint8

const (
	unreported report = iota
	confirmed         // it holds the block: the entry is not in the list
	// it does not any more, or only with blocks that follow: the entry is removed with its last successor, and not in the list until then
	removed
	forgotten // it is not known any more: the entry is not in the list while blocks with a report follow it
)

// isListed reports whether the entry is in the list of those that may be evicted.
func (e *entry) isListed() bool { return e.pins == 0 && e.report == unreported }

func newCache() *cache {
	return &cache{entries: make([]entry, 1)}
}

func (c *cache) oldest() int32 { return c.entries[0].newer }

// matchOneBackend returns how many leading blocks of a prompt a backend holds.
func (x *Index) matchOneBackend(slot int, blocks []prompt.Block) (depth int) {
	return sort.Search(len(blocks), func(i int) bool {
		return x.findEntry(slot, blocks[i]) == 0
	})
}

// tailEntry returns the entry of the last of blocks, all of which the backend holds;
// 0 for no blocks. The others follow from it by parent.
func (x *Index) tailEntry(slot int, blocks []prompt.Block) (at int32) {
	if len(blocks) == 0 {
		return 0
	}
	return x.findEntry(slot, blocks[len(blocks)-1])
}

// holdsAt reports whether an entry is a block's. An index in a holder table may be left
// over from before the backend lost its cache.
func (c *cache) holdsAt(at int32, b prompt.Block) bool {
	return int(at) < len(c.entries) && c.entries[at].block == b && c.entries[at].stamp != 0
}

// reuseScale is what reuse distances are measured by.
type reuseScale struct {
	uses, span   uint64 // so far, and since the oldest entry of the list was used
	pinned, size int
}

// newReuseScale returns the scale before a request's blocks are pinned.
func (c *cache) newReuseScale() reuseScale {
	oldest := c.oldest()
	if oldest == 0 {
		return reuseScale{}
	}
	return reuseScale{uses: c.uses, span: c.uses - c.entries[oldest].stamp, pinned: c.pinned, size: c.size}
}

// distance returns about how many blocks were used since an entry of the list that was last used at a time.
func (s *reuseScale) distance(lastUse uint64) int {
	if s.span == 0 {
		return s.pinned
	}
	return s.pinned + int(float64(s.size-s.pinned)*min(1, float64(s.uses-lastUse)/float64(s.span)))
}

// UseAtDistance returns the Pin.Use before which the blocks of a backend were last used whose reuse distance is more than so many
// blocks; 0 if it holds none of these.
func (x *Index) UseAtDistance(slot, distance int) (use uint64) {
	s := x.caches[slot].newReuseScale()
	switch {
	case s.span == 0 || distance >= s.size:
		return 0
	case distance <= s.pinned:
		return s.uses + 1
	}
	return s.uses - uint64(float64(s.span)*float64(distance-s.pinned)/float64(s.size-s.pinned))
}

// pin pins the blocks up to tail for one more request. Pinned blocks are closed under prefixes, so an entry
// counts the requests that end at it and its pinned successors, and pinning stops at the first block that is
// pinned already. That one is stamped too, for Rollback to stop at.
func (c *cache) pin(tail int32, stamp uint64) {
	for at := tail; at != 0 && c.pinEntry(at, stamp); at = c.entries[at].parent {
	}
}

// pinEntry pins one entry, and reports whether no request had pinned it.
func (c *cache) pinEntry(at int32, stamp uint64) (isFirst bool) {
	e := &c.entries[at]
	e.stamp = stamp
	if e.pins++; e.pins > 1 {
		return false
	}
	if e.report == unreported {
		c.unlink(at)
	}
	c.pinned++
	return true
}

// unpin undoes a pin. Blocks that are not pinned any more become the most recently
// used, the first of them most of all, with a new stamp unless it is 0.
func (c *cache) unpin(tail int32, stamp uint64) {
	for at := tail; at != 0; at = c.entries[at].parent {
		e := &c.entries[at]
		if e.pins--; e.pins > 0 {
			return
		}
		c.pinned--
		if e.report == removed && e.successors == 0 {
			c.setReport(e, unreported) // it was not computed again, or not reported yet
		}
		if e.report == unreported {
			c.linkNewest(at)
			c.listForgotten(at)
		}
		if stamp != 0 {
			e.stamp = stamp
		}
	}
}

// insertPinned adds a pinned block after the entry parent, which the request has pinned,
// and makes it the one at which the request ends.
func (c *cache) insertPinned(b prompt.Block, parent int32, stamp uint64) (at int32) {
	at = c.free
	if at != 0 {
		c.free = c.entries[at].newer
	} else {
		at = int32(len(c.entries))
		c.entries = append(c.entries, entry{})
	}
	c.entries[at] = entry{block: b, stamp: stamp, parent: parent, pins: 1}
	c.entries[parent].successors++
	c.pinned++
	c.size++
	return at
}

// setReport sets what the replica has said of an entry, which is not in the list. The caller
// links it if it is to be, and calls listForgotten.
func (c *cache) setReport(e *entry, r report) {
	before, parent := e.report, &c.entries[e.parent]
	e.report = r
	switch {
	case before == unreported && r != unreported:
		c.reported++
		parent.reported++
	case before != unreported && r == unreported:
		c.reported--
		parent.reported--
	}
	if before == confirmed {
		c.confirmed--
	}
	if r == confirmed {
		c.confirmed++
	}
}

// listForgotten lists the blocks before an entry that were forgotten and are followed by no
// block with a report any more, now that the entry is in the list itself.
func (c *cache) listForgotten(at int32) {
	for at = c.entries[at].parent; at != 0; at = c.entries[at].parent {
		e := &c.entries[at]
		if e.report != forgotten || e.reported > 0 {
			return
		}
		if c.setReport(e, unreported); e.pins == 0 {
			c.linkNewest(at)
		}
	}
}

// remove removes an entry that is in the list. It returns its predecessor's, if that is
// to be removed as well because the replica does not hold it any more, else 0.
func (c *cache) remove(at int32) (next int32) {
	c.unlink(at)
	c.size--
	next = c.removeSuccessor(c.entries[at].parent)
	if c.entries[at].checkpoint != 0 {
		c.removeCheckpoint(at)
	}
	c.entries[at] = entry{newer: c.free}
	c.free = at
	return next
}

// removeSuccessor counts one successor less of an entry. If the replica does not hold it any more and that was
// the last one, the entry becomes the oldest of the list and is returned, else 0.
func (c *cache) removeSuccessor(at int32) (listed int32) {
	e := &c.entries[at]
	if e.successors--; at == 0 || e.successors > 0 || e.report != removed || e.pins > 0 {
		return 0
	}
	c.setReport(e, unreported)
	c.linkOldest(at)
	c.listForgotten(at)
	return at
}

// removeOldest removes up to len(blocks) of the oldest entries that are not pinned,
// writes their blocks to blocks, and returns how many.
func (c *cache) removeOldest(blocks []prompt.Block) (n int) {
	at := c.oldest()
	for ; n < len(blocks) && at != 0; n++ {
		e := &c.entries[at]
		blocks[n] = e.block
		parent, next := e.parent, e.newer
		if e.checkpoint != 0 {
			c.removeCheckpoint(at)
		}
		*e = entry{newer: c.free}
		c.free = at
		c.entries[0].newer, c.entries[next].older = next, 0
		if listed := c.removeSuccessor(parent); listed != 0 {
			next = listed
		}
		at = next
	}
	c.size -= n
	return n
}

// linkOldest adds an entry to the list as the least recently used.
func (c *cache) linkOldest(at int32) {
	oldest := c.oldest()
	c.entries[at].older, c.entries[at].newer = 0, oldest
	c.entries[oldest].older = at
	c.entries[0].newer = at
}

// linkNewest adds an entry to the list as the most recently used.
func (c *cache) linkNewest(at int32) {
	newest := c.entries[0].older
	c.entries[at].older, c.entries[at].newer = newest, 0
	c.entries[newest].newer = at
	c.entries[0].older = at
}

// unlink removes an entry from the list.
func (c *cache) unlink(at int32) {
	e := &c.entries[at]
	c.entries[e.older].newer = e.newer
	c.entries[e.newer].older = e.older
}
