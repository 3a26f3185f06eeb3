package index

import (
	"sort"

	"warmroute/router/prompt"
)

// held is one backend's blocks. Those in use by requests in flight stand apart;
// the others form a list, least recently used first. Its invariant: a block's
// predecessor is held too, and is in use or was used later. So the oldest entry
// is always the tail of every prefix it belongs to, and eviction shortens a
// prefix from its tail and never beheads it, as vLLM's own free list does.
type held struct {
	capacity  int
	evictions uint64
	uses      uint64       // Adds and Releases so far: the clock of the stamps
	shared    table[int32] // the places in entries of blocks that have several holders, or had: see set
	entries   []entry      // entries[0] closes the ring: its newer is the oldest, its older the newest
	size      int          // entries that hold a block
	free      int32        // first of the unused entries, linked by newer; 0: none
	inUse     int          // entries that have users
	gaveUp    int          // blocks of requests in flight that had to become evictable

	// Placements whose blocks are in use, in the order of their Adds.
	firstPlaced, lastPlaced *Placement
}

// entry is one block. Links are places in entries.
type entry struct {
	block        prompt.Block
	stamp        uint64 // the use of it that was the last; 0: there is no block here
	parent       int32  // the predecessor's entry; 0 for a first block
	users        int32  // requests in flight that end at it, and entries in use that follow; with any, it is in no list
	older, newer int32
}

func newHeld() *held {
	return &held{entries: make([]entry, 1)}
}

func (h *held) oldest() int32 { return h.entries[0].newer }

// leading is how many of blocks, from the first, a backend holds.
func (x *Index) leading(slot int, blocks []prompt.Block) int {
	return sort.Search(len(blocks), func(i int) bool {
		return x.find(slot, blocks[i]) == 0
	})
}

// last is the entry of the last of blocks, all of them held; 0 for no blocks.
// The others are found from it along the parents.
func (x *Index) last(slot int, blocks []prompt.Block) int32 {
	if len(blocks) == 0 {
		return 0
	}
	return x.find(slot, blocks[len(blocks)-1])
}

// has reports whether a block's entry is at a place: that may have been said before
// the backend lost its cache.
func (h *held) has(at int32, b prompt.Block) bool {
	return int(at) < len(h.entries) && h.entries[at].block == b && h.entries[at].stamp != 0
}

// distance is about how many blocks were used since an entry was: as many as a
// cache must have room for to hold it still.
func (h *held) distance(at int32) int {
	oldest := h.oldest()
	if at == 0 || oldest == 0 || h.entries[at].users > 0 {
		return 0
	}
	age, span := h.uses-h.entries[at].stamp, h.uses-h.entries[oldest].stamp
	if span == 0 {
		return h.inUse
	}
	return h.inUse + int(float64(h.size-h.inUse)*min(1, float64(age)/float64(span)))
}

// take puts the blocks up to tail in use for one request more. Blocks in use are
// closed under prefixes as those held are, so each entry counts the requests
// that end at it and the entries after it that are in use, and a request costs
// no more steps than it brings blocks into use. The one that was in use already
// is stamped too, for TakeBack to end at.
func (h *held) take(tail int32, stamp uint64) {
	for at := tail; at != 0; at = h.entries[at].parent {
		e := &h.entries[at]
		e.stamp = stamp
		if e.users++; e.users > 1 {
			return
		}
		h.unlink(at)
		h.inUse++
	}
}

// leave undoes a take. Blocks that nobody uses any more become the most recently
// used, the first of them most of all. Their stamp stays when stamp is 0.
func (h *held) leave(tail int32, stamp uint64) {
	for at := tail; at != 0; at = h.entries[at].parent {
		e := &h.entries[at]
		if e.users--; e.users > 0 {
			return
		}
		h.inUse--
		h.linkNewest(at)
		if stamp != 0 {
			e.stamp = stamp
		}
	}
}

// insert adds a block after the entry parent, which a request has taken, and
// makes it the one at which that request ends.
func (h *held) insert(b prompt.Block, parent int32, stamp uint64) int32 {
	at := h.free
	if at != 0 {
		h.free = h.entries[at].newer
	} else {
		at = int32(len(h.entries))
		h.entries = append(h.entries, entry{})
	}
	h.entries[at] = entry{block: b, stamp: stamp, parent: parent, users: 1}
	h.inUse++
	h.size++
	return at
}

// remove forgets an entry that nobody uses.
func (h *held) remove(at int32) {
	h.unlink(at)
	h.size--
	h.entries[at] = entry{newer: h.free}
	h.free = at
}

// removeOldest forgets the oldest entries that nobody uses, as many as there is room
// for in blocks, which it fills with theirs, and returns how many.
func (h *held) removeOldest(blocks []prompt.Block) (n int) {
	at := h.oldest()
	for ; n < len(blocks) && at != 0; n++ {
		e := &h.entries[at]
		blocks[n] = e.block
		next := e.newer
		*e = entry{newer: h.free}
		h.free, at = at, next
	}
	h.entries[0].newer, h.entries[at].older = at, 0
	h.size -= n
	return n
}

func (h *held) linkNewest(at int32) {
	newest := h.entries[0].older
	h.entries[at].older, h.entries[at].newer = newest, 0
	h.entries[newest].newer = at
	h.entries[0].older = at
}

func (h *held) unlink(at int32) {
	e := &h.entries[at]
	h.entries[e.older].newer = e.newer
	h.entries[e.newer].older = e.older
}
