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

	stamp        uint64 // of the block before
	since, until uint64 // the stamps that are this Import's own
}

// Import begins to give a backend back n blocks at most.
func (x *Index) Import(slot, n int) *Import {
	before := x.adds
	x.adds += uint64(n)
	return &Import{x, slot, x.held[slot], x.adds + 1, before + 1, x.adds}
}

// More takes the next blocks, the latest used first, a predecessor before what
// follows it. It returns how many it took, and false when no more can be taken:
// the backend's part is full, or was dropped meanwhile.
func (i *Import) More(blocks []Restored) (taken int, more bool) {
	h := i.index.held[i.slot]
	s, bit := i.index.bit(i.slot)
	for _, b := range blocks {
		if h != i.of || len(h.find) >= h.capacity {
			return taken, false
		}
		i.stamp--
		if _, held := h.find[b.Block]; held {
			continue
		}
		parent := int32(0)
		if !b.First {
			if parent = h.find[b.Parent]; parent == 0 {
				continue // evicted between two parts
			}
			if p := &h.entries[parent]; p.stamp < i.since || p.stamp > i.until {
				// As if an Add had used it since: TakeBack must not remove
				// what something stands on.
				i.index.adds++
				p.stamp = i.index.adds
			}
		}
		// Before the oldest: its predecessor is there already, so used later.
		at := h.insert(b.Block, 0, i.stamp)
		h.entries[at].parent = parent
		h.unlink(at)
		h.linkBefore(at, h.oldest())
		s[b.Block] |= bit
		i.index.entries++
		taken++
	}
	return taken, true
}
