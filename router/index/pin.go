package index

import (
	"sort"

	"warmroute/prompt"
)

// Pin is the result of one Add: the blocks of a request in flight, pinned on one
// backend until Release or Rollback. It must not be copied meanwhile.
type Pin struct {
	// ReuseDistance is about how many blocks the backend has used since the last use of the deepest matched
	// block: a cache of that size still holds it. 0 if nothing matched or that block was pinned.
	ReuseDistance int
	// Omitted is how many blocks are beyond the backend's capacity.
	Omitted int
	// Use is the number of the Add among the uses of the backend's cache.
	Use uint64
	// Reused are the matched blocks that no other request used, deepest first, grouped by their last use. A
	// span without blocks ends it. Those of more spans than it has room for are left out.
	Reused [MaxReusedSpans]ReusedSpan

	cache    *cache
	slot     int
	blocks   int  // pinned ones
	matched  int  // blocks that were held before
	unpinned int  // blocks that the early end of its pin made evictable
	pinned   bool // false once the pin was ended early, because all blocks were pinned and room was needed

	tail      int32 // the last block's entry; 0: no blocks
	tailBlock prompt.Block

	prev, next *Pin // on the same backend, in the order of their Adds
}

// MaxReusedSpans is how many spans of a prompt Pin.Reused has room for.
const MaxReusedSpans = 4

// ReusedSpan is consecutive blocks of a prompt that were last used together.
type ReusedSpan struct {
	Blocks   int
	LastUse  uint64 // as Pin.Use
	Distance int    // about how many blocks the backend has used since
}

// Add records in p that a backend was sent a prompt, of which it held the first
// matched blocks by Match, and pins the prompt's blocks. Blocks beyond the backend's
// capacity are omitted, and the oldest blocks make room for the new.
func (x *Index) Add(p *Pin, slot int, blocks []prompt.Block, matched int) {
	c := x.caches[slot]
	c.uses++
	fitting := blocks[:min(len(blocks), c.capacity)]
	matched = min(matched, len(fitting))
	tail := x.tailEntry(slot, fitting[:matched])
	*p = Pin{
		Omitted: len(blocks) - len(fitting),
		cache:   c, slot: slot, blocks: len(fitting), matched: matched, Use: c.uses, pinned: true,
	}
	c.pinAndMeasureReuse(p, tail)
	p.ReuseDistance = p.Reused[0].Distance
	x.makeRoom(slot, len(fitting)-matched)
	p.tail = x.insertPinned(slot, fitting[matched:], tail, p.Use)
	if len(fitting) > 0 {
		p.tailBlock = fitting[len(fitting)-1]
	}
	c.linkPin(p)
}

// pinAndMeasureReuse is pin for the matched blocks of an Add, up to tail, and sets p.Reused.
func (c *cache) pinAndMeasureReuse(p *Pin, tail int32) {
	scale, spans := c.newReuseScale(), 0
	var last uint64 // use of the last span; 0: there is none, or no more room
	for at := tail; at != 0; at = c.entries[at].parent {
		e := &c.entries[at]
		lastUse := e.stamp
		if !c.pinEntry(at, p.Use) {
			return
		}
		if lastUse != last && spans < len(p.Reused) {
			p.Reused[spans] = ReusedSpan{LastUse: lastUse, Distance: scale.distance(lastUse)}
			spans++
			last = lastUse
		}
		if lastUse == last {
			p.Reused[spans-1].Blocks++
		} else {
			last = 0
		}
	}
}

// Release unpins the blocks of an Add, after an output that the next turn will send back as the blocks of
// reply, which the backend holds too. All of them are now the most recently used, the first most of all, since
// vLLM frees a request's blocks at its end, last first.
func (x *Index) Release(p *Pin, reply []prompt.Block) {
	c := x.pinnedCache(p)
	if c == nil {
		return
	}
	c.uses++
	p.cache = nil
	if p.pinned {
		c.unlinkPin(p)
	} else {
		c.unpinned -= p.unpinned
		if p.tail = x.findEntry(p.slot, p.tailBlock); p.tail == 0 {
			return // evicted meanwhile
		}
		c.pin(p.tail, c.uses)
	}
	tail := p.tail
	if p.Omitted == 0 {
		tail = x.insertPinnedReply(p.slot, tail, reply)
	}
	c.unpin(tail, c.uses)
}

// insertPinnedReply adds the blocks of an output to a request that ends at the entry tail, as many as fit. It
// moves the request's pin to the last of them and returns its entry.
func (x *Index) insertPinnedReply(slot int, tail int32, reply []prompt.Block) (last int32) {
	c := x.caches[slot]
	reply = reply[:min(len(reply), max(0, c.capacity-c.pinned))]
	known := x.matchOneBackend(slot, reply)
	if known > 0 { // an equal output was added before
		last := x.tailEntry(slot, reply[:known])
		c.pin(last, c.uses)
		c.unpin(tail, c.uses)
		tail = last
	}
	x.makeRoom(slot, len(reply)-known)
	return x.insertPinned(slot, reply[known:], tail, c.uses)
}

// Rollback unpins the blocks of an Add and removes what the Add created, from block
// keep on, because the engine never computed it. It removes tails first and stops at
// the first block that a later Add used or that has successors.
func (x *Index) Rollback(p *Pin, blocks []prompt.Block, keep int) {
	c := x.pinnedCache(p)
	if c == nil {
		return
	}
	x.unpin(p)
	c.unpinned -= p.unpinned
	p.cache = nil
	for i := len(blocks) - 1; i >= max(p.matched, keep); i-- {
		at := x.findEntry(p.slot, blocks[i])
		if at == 0 {
			continue // evicted meanwhile, or beyond the capacity
		}
		if e := &c.entries[at]; e.stamp != p.Use || !e.isListed() {
			return
		}
		x.removeEntry(p.slot, at)
	}
}

// CountPinned returns how many blocks of a backend requests in flight use, each block
// counted once. Its replica cannot evict them.
func (x *Index) CountPinned(slot int) int { return x.caches[slot].pinned + x.caches[slot].unpinned }

// CountUnpinned returns how many of blocks, all of which the backend holds, no request in flight uses. With a
// pinned block all blocks before it are pinned, so a binary search finds the first that is not.
func (x *Index) CountUnpinned(slot int, blocks []prompt.Block) int {
	c := x.caches[slot]
	return len(blocks) - sort.Search(len(blocks), func(i int) bool {
		return c.entries[x.findEntry(slot, blocks[i])].pins == 0
	})
}

// pinnedCache returns the cache in which p pins blocks; nil once p is released or the
// cache was dropped, and for a pin without blocks.
func (x *Index) pinnedCache(p *Pin) *cache {
	if p.cache == nil || p.cache != x.caches[p.slot] || p.tail == 0 {
		return nil
	}
	return p.cache
}

// unpin makes the blocks of p evictable, unless other requests use them.
func (x *Index) unpin(p *Pin) {
	if c := p.cache; p.pinned {
		p.pinned = false
		c.unlinkPin(p)
		p.unpinned = c.pinned
		c.unpin(p.tail, 0)
		p.unpinned -= c.pinned
		c.unpinned += p.unpinned
	}
}

// linkPin appends p to the list of pins, unless it has no blocks.
func (c *cache) linkPin(p *Pin) {
	if p.tail == 0 {
		return
	}
	p.prev = c.lastPin
	if p.prev == nil {
		c.firstPin = p
	} else {
		p.prev.next = p
	}
	c.lastPin = p
}

// unlinkPin removes p from the list of pins.
func (c *cache) unlinkPin(p *Pin) {
	if p.prev == nil {
		c.firstPin = p.next
	} else {
		p.prev.next = p.next
	}
	if p.next == nil {
		c.lastPin = p.prev
	} else {
		p.next.prev = p.prev
	}
	p.prev, p.next = nil, nil
}
