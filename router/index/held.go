package index

import (
	"math/bits"

	"warmroute/router/prompt"
)

// held is one backend's blocks, least recently used first. Its invariant: a
// block's predecessor is held too, and was used later. So the oldest entry is
// always the tail of every prefix it belongs to, and eviction shortens a prefix
// from its tail and never beheads it, as vLLM's own free list does.
type held struct {
	capacity  int
	evictions uint64
	used      int // entries with uses
	find      map[prompt.Block]int32
	entries   []entry // entries[0] closes the ring: its newer is the oldest, its older the newest
	free      int32   // first of the unused entries, linked by newer; 0: none
}

// entry is one block. Links are places in entries.
type entry struct {
	block        prompt.Block
	stamp        uint64 // the Add that used it last
	parent       int32  // the predecessor's entry; 0 for a first block
	older, newer int32
	uses         int32 // requests that end here, and entries in use that follow; see Use
}

func newHeld() *held {
	return &held{find: map[prompt.Block]int32{}, entries: make([]entry, 1)}
}

func (h *held) oldest() int32 { return h.entries[0].newer }

// touch makes blocks, all of them held, the most recently used, the first of
// them most of all. It returns the last one's entry, or 0 for no blocks. Only
// that one is looked up: the others are found along the parents.
func (h *held) touch(blocks []prompt.Block, stamp uint64) int32 {
	if len(blocks) == 0 {
		return 0
	}
	tail := h.find[blocks[len(blocks)-1]]
	for at := tail; at != 0; at = h.entries[at].parent {
		h.unlink(at)
		h.linkBefore(at, 0)
		h.entries[at].stamp = stamp
	}
	return tail
}

// renew makes an entry and all before it the most recently used.
func (h *held) renew(at int32) {
	for ; at != 0; at = h.entries[at].parent {
		h.unlink(at)
		h.linkBefore(at, 0)
	}
}

// insert adds a block after the entry parent, which the same Add has just
// touched or inserted, and makes it used just before its parent.
func (h *held) insert(b prompt.Block, parent int32, stamp uint64) int32 {
	at := h.free
	if at != 0 {
		h.free = h.entries[at].newer
	} else {
		at = int32(len(h.entries))
		h.entries = append(h.entries, entry{})
	}
	h.entries[at] = entry{block: b, stamp: stamp, parent: parent}
	h.linkBefore(at, parent)
	h.find[b] = at
	return at
}

func (h *held) remove(at int32) {
	delete(h.find, h.entries[at].block)
	h.unlink(at)
	h.entries[at] = entry{newer: h.free}
	h.free = at
}

// linkBefore puts an entry just older than next; next 0 makes it the newest.
func (h *held) linkBefore(at, next int32) {
	prev := h.entries[next].older
	h.entries[at].older, h.entries[at].newer = prev, next
	h.entries[prev].newer = at
	h.entries[next].older = at
}

func (h *held) unlink(at int32) {
	e := &h.entries[at]
	h.entries[e.older].newer = e.newer
	h.entries[e.newer].older = e.older
}

// record writes d for every backend in the set.
func record(backends uint64, d int, depth []int) {
	for ; backends != 0; backends &= backends - 1 {
		depth[bits.TrailingZeros64(backends)] = d
	}
}
