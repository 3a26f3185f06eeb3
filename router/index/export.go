package index

import "warmroute/router/prompt"

// Copied is one held block as it leaves the index, in the place where it was
// found. A Used of 0 marks a place that held none.
type Copied struct {
	Block  prompt.Block
	Parent prompt.Block // its predecessor; says nothing when Place is 0
	Place  int32        // where the predecessor was; 0: it is a first block
	Used   uint64       // the higher, the later
}

// Export copies out what one backend holds, a part at a time, so that nobody
// has to wait for the whole. Between two parts the index may change: a block
// may be there that was evicted since, or lack one that came since, and a
// Place may have been given to another block by the time it is copied. So a
// Parent counts only if the Place was copied with it.
type Export struct {
	index *Index
	slot  int
	of    *held
	next  int
}

// Export begins to copy out what a backend holds.
func (x *Index) Export(slot int) *Export {
	return &Export{index: x, slot: slot, of: x.held[slot], next: 1}
}

// More appends up to n places to all and reports whether there are more to
// come. It is called with what the call before returned, at first with an empty
// slice, so that places are the same here as there. When the backend's part was
// dropped meanwhile, it begins anew with what came since.
func (e *Export) More(all []Copied, n int) ([]Copied, bool) {
	if h := e.index.held[e.slot]; h != e.of {
		e.of, e.next, all = h, 1, all[:0]
	}
	if len(all) == 0 {
		all = append(all, Copied{}) // the place that closes the ring
	}
	entries := e.of.entries
	end := min(len(entries), e.next+n)
	for _, at := range entries[e.next:end] {
		all = append(all, Copied{at.block, entries[at.parent].block, at.parent, at.stamp})
	}
	e.next = end
	return all, end < len(entries)
}

// Restored is one block on its way back into the index.
type Restored struct {
	Block  prompt.Block
	Parent prompt.Block // its predecessor; says nothing when First
	First  bool
}

// Import gives a backend back what it held once, a part at a time. What came
// meanwhile counts as used later.
type Import struct {
	index *Index
	slot  int
	of    *held

	last         prompt.Block // taken
	stamp        uint64       // of it
	since, until uint64       // the stamps that are this Import's own
}

// Import begins to give a backend back n blocks at most.
func (x *Index) Import(slot, n int) *Import {
	h := x.held[slot]
	since := h.uses + 1
	h.uses += uint64(n)
	return &Import{index: x, slot: slot, of: h, stamp: h.uses + 1, since: since, until: h.uses}
}

// More takes the next blocks, the latest used first, a predecessor before what
// follows it. It returns how many it took, and false when no more can be taken:
// the backend's part is full, or was dropped meanwhile.
func (i *Import) More(blocks []Restored) (taken int, more bool) {
	h := i.index.held[i.slot]
	for _, b := range blocks {
		if h != i.of || h.size >= h.capacity {
			return taken, false
		}
		if i.index.find(i.slot, b.Block) != 0 {
			continue
		}
		parent := int32(0)
		if !b.First {
			if parent = i.index.find(i.slot, b.Parent); parent == 0 {
				continue // evicted between two parts
			}
			if p := &h.entries[parent]; p.stamp < i.since || p.stamp > i.until {
				// As if it had been used since: TakeBack must not remove what
				// something stands on.
				h.uses++
				p.stamp = h.uses
			}
		}
		if b.First || b.Parent != i.last {
			i.stamp-- // another path, used earlier
		}
		i.last = b.Block
		i.index.show(i.slot, b.Block, h.insertOldest(b.Block, parent, i.stamp))
		i.index.entries++
		taken++
	}
	return taken, true
}

// insertOldest adds a block that nobody uses after the entry parent, which is in
// use or was used later than all that will be evicted before it.
func (h *held) insertOldest(b prompt.Block, parent int32, stamp uint64) int32 {
	at := h.insert(b, parent, stamp)
	h.inUse--
	e, oldest := &h.entries[at], h.oldest()
	e.users = 0
	e.older, e.newer = 0, oldest
	h.entries[oldest].older = at
	h.entries[0].newer = at
	return at
}
