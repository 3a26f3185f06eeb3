package index

import (
	"math"

	"warmroute/prompt"
)

// ExportedBlock is one entry of a cache as Export copied it. Used is 0 for an entry without a block.
type ExportedBlock struct {
	Block       prompt.Block
	Parent      prompt.Block // its predecessor; meaningless if ParentPlace is 0
	ParentPlace int32        // index of the predecessor; 0: it is a first block
	Used        uint64       // grows with the time of its last use
	Checkpoint  int          // tokens before the checkpoint in it; 0: it has none that is certain
}

// Export copies the blocks of one backend, a part at a time, so that the caller's lock need not be held for the
// whole. Between two parts the index may change: a block may be in the result that was evicted since, or not be
// in it that was added since, and an entry may hold another block by the time it is copied. So a Parent is
// valid only if the block at ParentPlace is that one.
type Export struct {
	index *Index
	slot  int
	of    *cache
	next  int
}

// Export starts to copy the blocks of a backend.
func (x *Index) Export(slot int) *Export {
	return &Export{index: x, slot: slot, of: x.caches[slot], next: 1}
}

// AppendNext appends up to n blocks to all and reports whether there are more. It is called
// with the result of the call before, at first with an empty slice. If the backend's
// cache is dropped meanwhile, it starts again with an empty one.
func (e *Export) AppendNext(all []ExportedBlock, n int) (_ []ExportedBlock, more bool) {
	if c := e.index.caches[e.slot]; c != e.of {
		e.of, e.next, all = c, 1, all[:0]
	}
	if len(all) == 0 {
		all = append(all, ExportedBlock{}) // stands for entries[0], so that indexes are the same
	}
	entries := e.of.entries
	end := min(len(entries), e.next+n)
	for _, at := range entries[e.next:end] {
		checkpoint := 0
		if at.checkpoint != 0 && e.of.checkpoints.list[at.checkpoint].certain {
			checkpoint = int(e.of.checkpoints.list[at.checkpoint].tokens)
		}
		all = append(all, ExportedBlock{at.block, entries[at.parent].block, at.parent, at.stamp, checkpoint})
	}
	e.next = end
	return all, end < len(entries)
}

// ImportedBlock is a block to be restored by Import.
type ImportedBlock struct {
	Block  prompt.Block
	Parent prompt.Block // its predecessor; meaningless if First
	First  bool

	Checkpoint int // tokens before the checkpoint in it; 0: it has none
}

// Import restores blocks of a backend, a part at a time. Blocks that were added meanwhile count as used later.
type Import struct {
	index *Index
	slot  int
	of    *cache

	last         prompt.Block // restored
	stamp        uint64       // of last
	since, until uint64       // stamps of restored blocks
}

// Import starts to restore up to n blocks of a backend.
func (x *Index) Import(slot, n int) *Import {
	c := x.caches[slot]
	since := c.uses + 1
	c.uses += uint64(n)
	return &Import{index: x, slot: slot, of: c, stamp: c.uses + 1, since: since, until: c.uses}
}

// LastUse returns until when the restored blocks count as used, as Pin.Use.
func (i *Import) LastUse() uint64 { return i.until }

// Add restores the next blocks, the most recently used first, a predecessor before its successors. It returns
// how many it restored, and false when the backend's cache is full or was dropped meanwhile.
func (i *Import) Add(blocks []ImportedBlock) (restored int, more bool) {
	c := i.index.caches[i.slot]
	for _, b := range blocks {
		if c != i.of || c.usedBlocks() >= c.capacity {
			return restored, false
		}
		if i.index.findEntry(i.slot, b.Block) != 0 {
			continue
		}
		parent := int32(0)
		if !b.First {
			if parent = i.index.findEntry(i.slot, b.Parent); parent == 0 {
				continue // evicted between two parts
			}
			if p := &c.entries[parent]; p.stamp < i.since || p.stamp > i.until {
				// Added meanwhile: stamped so that Rollback does not remove it.
				c.uses++
				p.stamp = c.uses
			}
		}
		if b.First || b.Parent != i.last {
			i.stamp-- // another prefix, used earlier
		}
		i.last = b.Block
		at := c.insertOldest(b.Block, parent, i.stamp)
		i.index.addHolder(i.slot, b.Block, at)
		i.index.entries++
		restored++
		if b.Checkpoint > 0 {
			i.addCheckpoint(at, b.Checkpoint)
		}
	}
	return restored, true
}

// addCheckpoint adds a restored checkpoint in an entry.
func (i *Import) addCheckpoint(at int32, tokens int) {
	c := i.of
	if c.checkpoints.cost == 0 {
		i.index.SetCheckpointCost(i.slot, 1) // the next poll sets what it is, or that there are none
	}
	k := c.insertCheckpoint(at)
	k.tokens, k.stamp, k.certain = int32(min(tokens, math.MaxInt32)), i.stamp, true
	c.checkpoints.moveToOldest(c.entries[at].checkpoint)
}

// insertOldest adds a block after the entry parent, not pinned and older than all others.
func (c *cache) insertOldest(b prompt.Block, parent int32, stamp uint64) (at int32) {
	at = c.insertPinned(b, parent, stamp)
	c.pinned--
	c.entries[at].pins = 0
	c.linkOldest(at)
	return at
}
