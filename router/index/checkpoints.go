package index

import "warmroute/prompt"

// Checkpoint is a boundary in a prompt up to which a replica can reuse its cache. A model whose layers are not all of full
// attention keeps the states of the others at a few boundaries, and can reuse the blocks of full attention up to those only.
type Checkpoint struct {
	Tokens int // of the prompt before the boundary; 0: there is none
	Blocks int // of the prompt up to the one that has the boundary
	// Certain: the replica has reused it, or keeps one there after each prompt. Else it was concluded from a guess of how many
	// tokens of the prompt others share.
	Certain  bool
	LastUse  uint64 // as Pin.Use
	Distance int    // about how many blocks the backend has used since
	// Dense: each block after it can be reused as well, up to the last one that was searched; see Index.SetSlidingWindow.
	Dense bool
}

// checkpoints are those of one cache. They form a list, least recently used first, since a replica keeps the states in blocks
// of the same cache, which it frees before the other blocks of a request.
type checkpoints struct {
	list     []checkpoint // list[0] closes the list to a ring; nil: the replica can reuse each block
	free     int32        // the first that is unused, linked by newer; 0: none
	count    int          // of those in the list
	reported int          // of those that the replica has reported, which are not in the list
	cost     int          // in blocks, of each
	window   int          // in blocks; see SetSlidingWindow
	events   bool         // the replica reports checkpoints
}

type checkpoint struct {
	entry        int32 // of the block that has the boundary
	tokens       int32
	older, newer int32
	stamp        uint64 // of its last use
	certain      bool
	reported     bool // by the replica
}

// SetCheckpointCost says that a replica can reuse its cache up to checkpoints only, each of which takes the room of so many
// blocks; 0: up to each block.
func (x *Index) SetCheckpointCost(slot, blocks int) {
	c := x.caches[slot]
	if blocks == 0 && c.checkpoints.events {
		blocks = 1
	}
	if blocks == c.checkpoints.cost {
		return
	}
	x.version++
	if c.checkpoints.cost == 0 {
		x.withCheckpoints++
	}
	if blocks > 0 {
		c.checkpoints.setCost(blocks)
		return
	}
	x.withCheckpoints--
	for i := range c.entries {
		c.entries[i].checkpoint = 0
	}
	c.checkpoints = checkpoints{}
}

// SetSlidingWindow sets the length of the sliding window that the checkpoints of a replica are for; 0: they are for something else. If
// two checkpoints of a prompt are at most a window apart, the replica holds what each block between them needs, and can reuse it. The
// beginning of the prompt counts as a checkpoint.
func (x *Index) SetSlidingWindow(slot, blocks int) { x.caches[slot].checkpoints.window = blocks }

// HasCheckpoints reports whether a replica can reuse its cache up to checkpoints only.
func (x *Index) HasCheckpoints(slot int) bool { return x.caches[slot].checkpoints.cost > 0 }

// HasAnyCheckpoints reports whether HasCheckpoints is true of any replica.
func (x *Index) HasAnyCheckpoints() bool { return x.withCheckpoints > 0 }

// CountCheckpoints returns how many checkpoints a replica is thought to have.
func (x *Index) CountCheckpoints(slot int) int {
	return x.caches[slot].checkpoints.count + x.caches[slot].checkpoints.reported
}

// FindCheckpoint returns the deepest checkpoint in blocks, all of which the backend holds. Of blocks of which the replica has
// reported that it holds them it also reports the checkpoints, so that others do not count there, but for those that requests in
// flight are expected to leave.
func (x *Index) FindCheckpoint(slot int, blocks []prompt.Block) (p Checkpoint) {
	c := x.caches[slot]
	if c.checkpoints.count+c.checkpoints.reported == 0 {
		return p
	}
	scale := c.newReuseScale()
	tail, n := x.tailEntry(slot, blocks), len(blocks)
	p.Dense = n > 0
	for at := tail; at != 0; at = c.entries[at].parent {
		e := &c.entries[at]
		k := &c.checkpoints.list[e.checkpoint]
		if e.checkpoint != 0 && (k.reported || !x.reportsCheckpoint(c, e, k.tokens) || !k.certain && e.pins > 0) {
			return Checkpoint{int(k.tokens), n, k.certain, k.stamp, scale.distance(k.stamp), p.Dense && at != tail}
		}
		p.Dense = p.Dense && e.dense
		n--
	}
	if p.Dense {
		p.LastUse, p.Distance = c.entries[tail].stamp, scale.distance(c.entries[tail].stamp)
	}
	return p
}

// AddCheckpoint records that a replica has a checkpoint in a block of a request in flight, after so many tokens of its prompt.
// It is not certain if it was not reused and may be elsewhere. Blocks is not more than the prompt's. It reports false if there was
// one already.
func (x *Index) AddCheckpoint(p *Pin, blocks, tokens int, certain bool) (added bool) {
	at := x.pinnedEntry(p, blocks)
	if at == 0 || tokens <= 0 {
		return false
	}
	c := p.cache
	i := c.entries[at].checkpoint
	k := &c.checkpoints.list[i]
	switch {
	case certain && !k.reported && x.reportsCheckpoint(c, &c.entries[at], int32(tokens)):
		return false
	case i == 0:
		k = c.insertCheckpoint(at)
	case k.reported:
		k.stamp = c.uses
		return false
	case int(k.tokens) == tokens:
		certain = certain || k.certain
	case k.certain && !certain:
		return false // a guess does not replace it
	}
	if added = int(k.tokens) != tokens; added {
		x.version++
	}
	k.tokens, k.certain, k.stamp = int32(tokens), certain, c.uses
	c.checkpoints.moveToNewest(c.entries[at].checkpoint)
	c.markDense(at)
	return added
}

// markDense marks the blocks between the checkpoint of an entry and the one before it as dense, if these are at most a window apart.
func (c *cache) markDense(at int32) {
	if c.checkpoints.events { // the replica reports each of these as a checkpoint
		return
	}
	begin, n := c.entries[at].parent, 1
	for begin != 0 && c.entries[begin].checkpoint == 0 {
		begin = c.entries[begin].parent
		if n++; n > c.checkpoints.window {
			return
		}
	}
	for p := c.entries[at].parent; p != begin; p = c.entries[p].parent {
		c.entries[p].dense = true
	}
}

// AddReportedCheckpoint records that a replica reports that it can reuse the prefixes that end with a KV block, which it holds.
func (x *Index) AddReportedCheckpoint(slot int, k KVBlock) {
	if !x.holdsKV(slot, k) {
		return
	}
	if c := &x.caches[slot].checkpoints; !c.events {
		if c.cost == 0 {
			x.SetCheckpointCost(slot, 1) // a poll sets what it is
		}
		c.events = true
	}
	x.kv.checkpoints.add(slot, k)
	x.forEachLinkBackwards(k, func(l *link) { x.addReportedCheckpoint(slot, l) })
}

// RemoveReportedCheckpoint records that a replica cannot reuse the prefixes that end with a KV block any more.
func (x *Index) RemoveReportedCheckpoint(slot int, k KVBlock) {
	if x.kv.checkpoints.remove(slot, k) {
		x.forEachLinkBackwards(k, func(l *link) { x.removeReportedCheckpoint(slot, l) })
	}
}

// ForgetReportedCheckpoint records that it is not known any more whether a replica can reuse the prefixes that end with a KV block: it
// is assumed that it can.
func (x *Index) ForgetReportedCheckpoint(slot int, k KVBlock) {
	if !x.kv.checkpoints.remove(slot, k) {
		return
	}
	c := x.caches[slot]
	x.forEachLinkBackwards(k, func(l *link) {
		if at := x.findEntry(slot, l.block); at != 0 {
			c.checkpoints.makeApproximate(c.entries[at].checkpoint)
		}
	})
}

// ForgetCheckpointReports records that a replica does not report checkpoints any more.
func (x *Index) ForgetCheckpointReports(slot int) { x.caches[slot].checkpoints.events = false }

// reportsCheckpoint reports whether the replica has reported an entry's block, and would report a checkpoint of it after so many tokens.
// One after the end of the block, in what prompts that part there have in common, is reported of other blocks.
func (x *Index) reportsCheckpoint(c *cache, e *entry, tokens int32) bool {
	if !c.checkpoints.events || e.report != confirmed && e.report != removed {
		return false
	}
	at := x.kv.byBlock.get(e.block)
	return at == 0 || int(tokens) <= x.kv.links[at].to.Tokens
}

// removeAssumedCheckpoint removes the checkpoint of an entry, unless the replica has reported it or a request in flight is expected to
// leave it.
func (x *Index) removeAssumedCheckpoint(c *cache, at int32) {
	e := &c.entries[at]
	if k := &c.checkpoints.list[e.checkpoint]; !k.reported && (k.certain || e.pins == 0) {
		c.removeCheckpoint(at)
		x.version++
	}
}

// removeReportedCheckpoint removes the checkpoint that a replica has reported from the block of a link, and one that was assumed at the
// same place from the block before.
func (x *Index) removeReportedCheckpoint(slot int, l *link) {
	c := x.caches[slot]
	if c.checkpoints.list == nil {
		return
	}
	if at := x.findEntry(slot, l.block); at != 0 && c.checkpoints.list[c.entries[at].checkpoint].reported {
		c.removeCheckpoint(at)
		x.version++
	}
	if l.first {
		return
	}
	at := x.findEntry(slot, l.parent)
	if i := c.entries[at].checkpoint; i != 0 && int(c.checkpoints.list[i].tokens) == l.to.KVTokens {
		x.removeAssumedCheckpoint(c, at)
	}
}

// addReportedCheckpoint adds a checkpoint at the end of the KV block of a link to the block of the link, if the replica has that.
func (x *Index) addReportedCheckpoint(slot int, l *link) {
	at, c := x.findEntry(slot, l.block), x.caches[slot]
	if at == 0 || c.checkpoints.cost == 0 {
		return
	}
	i := c.entries[at].checkpoint
	k := &c.checkpoints.list[i]
	if i == 0 {
		k = c.insertCheckpoint(at)
		i = c.entries[at].checkpoint
		k.stamp = c.uses
	}
	if !k.reported {
		c.checkpoints.unlink(i)
		k.older, k.newer = i, i
		c.checkpoints.count--
		c.checkpoints.reported++
	}
	k.tokens, k.certain, k.reported = int32(l.to.KVTokens), true, true
	x.version++
}

// RemoveCheckpoints removes the checkpoints in the first blocks of a request in flight after more than so many tokens, which
// it did not reuse, and no longer counts the blocks there as dense. Checkpoints that were used after it was sent stay.
func (x *Index) RemoveCheckpoints(p *Pin, blocks, tokens int) {
	c := p.cache
	for at := x.pinnedEntry(p, blocks); at != 0; at = c.entries[at].parent {
		i := c.entries[at].checkpoint
		if i == 0 {
			c.entries[at].dense = false
			continue
		}
		if int(c.checkpoints.list[i].tokens) <= tokens {
			return
		}
		if c.checkpoints.list[i].stamp <= p.Use && !c.checkpoints.list[i].reported {
			c.removeCheckpoint(at)
			x.version++
		}
	}
}

// RemoveGuess removes the checkpoint that AddCheckpoint has added when a request was sent, unless it was confirmed since.
func (x *Index) RemoveGuess(p *Pin, blocks int) {
	at := x.pinnedEntry(p, blocks)
	if at == 0 || p.cache.entries[at].checkpoint == 0 {
		return
	}
	if k := &p.cache.checkpoints.list[p.cache.entries[at].checkpoint]; !k.certain && k.stamp == p.Use {
		p.cache.removeCheckpoint(at)
		x.version++
	}
}

// removeCheckpointsBefore removes the checkpoints of a cache with the last use before a Pin.Use, but for those that the replica reports.
func (c *cache) removeCheckpointsBefore(use uint64) {
	for k := &c.checkpoints; k.count > 0 && k.list[k.list[0].newer].stamp < use; {
		c.removeCheckpoint(k.list[k.list[0].newer].entry)
	}
}

// pinnedEntry returns the entry of a block of a request in flight, by its number from 1; 0 if it is not pinned any more, or
// beyond the backend's capacity.
func (x *Index) pinnedEntry(p *Pin, block int) (at int32) {
	if c := x.pinnedCache(p); c == nil || !p.pinned || c.checkpoints.cost == 0 || block <= 0 || block > p.blocks {
		return 0
	}
	at = p.tail
	for n := p.blocks; n > block; n-- {
		at = p.cache.entries[at].parent
	}
	return at
}

// insertCheckpoint adds a checkpoint in an entry that has none.
func (c *cache) insertCheckpoint(at int32) *checkpoint {
	i := c.checkpoints.insert(at)
	c.entries[at].checkpoint = i
	return &c.checkpoints.list[i]
}

// usedBlocks returns how many blocks a cache holds, with those that its checkpoints take.
func (c *cache) usedBlocks() int { return c.size + c.checkpoints.count*c.checkpoints.cost }

// removeCheckpoint removes the checkpoint of an entry, which has one.
func (c *cache) removeCheckpoint(at int32) {
	c.checkpoints.remove(c.entries[at].checkpoint)
	c.entries[at].checkpoint = 0
	for p := c.entries[at].parent; c.entries[p].dense; p = c.entries[p].parent {
		c.entries[p].dense = false
	}
}

// evictCheckpoint removes the least recently used checkpoint if it is older than the oldest block that may be evicted, and
// returns how many blocks that frees; 0: it was not.
func (c *cache) evictCheckpoint() (freed int) {
	k := &c.checkpoints
	if k.count == 0 {
		return 0
	}
	i := k.list[0].newer
	if oldest := c.oldest(); oldest != 0 && c.entries[oldest].stamp < k.list[i].stamp {
		return 0
	}
	c.removeCheckpoint(k.list[i].entry)
	return k.cost
}

// setCost sets the cost of each, which is not 0.
func (k *checkpoints) setCost(blocks int) {
	if k.cost = blocks; k.list == nil {
		k.list = make([]checkpoint, 1)
	}
}

// insert adds a checkpoint in an entry as the most recently used.
func (k *checkpoints) insert(entry int32) (i int32) {
	if i = k.free; i != 0 {
		k.free = k.list[i].newer
	} else {
		i = int32(len(k.list))
		k.list = append(k.list, checkpoint{})
	}
	k.list[i] = checkpoint{entry: entry, older: i, newer: i}
	k.count++
	return i
}

// moveToNewest makes a checkpoint the most recently used.
func (k *checkpoints) moveToNewest(i int32) {
	k.unlink(i)
	newest := k.list[0].older
	k.list[i].older, k.list[i].newer = newest, 0
	k.list[newest].newer, k.list[0].older = i, i
}

// moveToOldest makes a checkpoint the least recently used.
func (k *checkpoints) moveToOldest(i int32) {
	k.unlink(i)
	oldest := k.list[0].newer
	k.list[i].older, k.list[i].newer = 0, oldest
	k.list[oldest].older, k.list[0].newer = i, i
}

func (k *checkpoints) remove(i int32) {
	k.unlink(i)
	if k.list[i].reported {
		k.reported--
	} else {
		k.count--
	}
	k.list[i] = checkpoint{newer: k.free}
	k.free = i
}

// makeApproximate makes a checkpoint that the replica has reported one that it is assumed to have, the most recently used.
func (k *checkpoints) makeApproximate(i int32) {
	if i == 0 || !k.list[i].reported {
		return
	}
	k.list[i].reported = false
	k.reported--
	k.count++
	k.moveToNewest(i)
}

// unlink removes a checkpoint from the list. One that insert has returned is linked to itself.
func (k *checkpoints) unlink(i int32) {
	older, newer := k.list[i].older, k.list[i].newer
	k.list[older].newer, k.list[newer].older = newer, older
}
