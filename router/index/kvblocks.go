package index

import (
	"math/bits"

	"warmroute/router/prompt"
)

// KVBlock identifies a KV block of the engines by its content: a hash of its tokens, and
// of all before them.
type KVBlock uint64

// Link says which is the last KV block that a block of a prompt completes, alone or with those
// before it: what follows the block does not change it.
type Link struct {
	KV       KVBlock // 0: there is none yet
	KVTokens int     // of the prompt up to the end of the KV block
	Tokens   int     // of the prompt up to the end of the block
}

const (
	// A KV block that a backend holds takes less memory than an entry, its record in a
	// kvblocks.Tracker included.
	kvEntriesShare = 1 // of kvShares, for the KV blocks that backends hold
	linkShare      = 1 // for links
	cacheShare     = 2 // for the caches
	kvShares       = kvEntriesShare + linkShare + cacheShare

	maxSameKV = 64 // links to one KV block
)

// kvBlocks relates the KV blocks that replicas report to the blocks of prompts. A link
// holds for all replicas, so that one request shows what all of them hold.
type kvBlocks struct {
	held    []*table[uint64] // KV block → bits of the backends that hold it, one for each maxMembers slots
	heldLen int              // pairs of a KV block and a backend
	maxHeld int              // 0: no KV blocks are followed

	links    []link       // links[0] is unused
	byBlock  table[int32] // block → its link
	byKV     table[int32] // KV block → the first link to it
	maxLinks int
	clock    int // the next link to be replaced
}

type link struct {
	block, parent prompt.Block // parent is meaningless if first
	to            Link
	next          int32 // another link to the same KV block, further from the beginning; 0: none
	first         bool
}

func (l *link) isUnused() bool { return l.block == 0 && l.to == Link{} }

// FollowKV makes room for KV blocks within the memory bound: the caches have less from
// now on.
func (x *Index) FollowKV() {
	if x.kv.maxHeld > 0 {
		return
	}
	total := x.maxEntries
	x.maxEntries = total * cacheShare / kvShares
	x.kv.maxHeld, x.kv.maxLinks = total*kvEntriesShare/kvShares, total*linkShare/kvShares
	x.kv.links = make([]link, 1)
	x.shareCapacity()
}

// MaxKVBlocks returns how many KV blocks are followed at most, for all backends.
func (x *Index) MaxKVBlocks() int { return x.kv.maxHeld }

// StoreKV records that a replica reports a KV block as stored. It reports false, and does
// nothing, if there is no room for more.
func (x *Index) StoreKV(slot int, k KVBlock) (stored bool) {
	kv := &x.kv
	if kv.heldLen >= kv.maxHeld {
		return false
	}
	for len(kv.held) <= slot/maxMembers {
		kv.held = append(kv.held, new(table[uint64]))
	}
	word, bit := kv.held[slot/maxMembers].getOrAdd(prompt.Block(k)), uint64(1)<<(slot%maxMembers)
	if *word&bit == 0 {
		*word |= bit
		kv.heldLen++
	}
	for at := kv.byKV.get(prompt.Block(k)); at != 0; at = kv.links[at].next {
		x.confirm(slot, &kv.links[at])
	}
	return true
}

// RemoveKV records that a replica does not hold a KV block any more. Successors are to be
// removed before their predecessors.
func (x *Index) RemoveKV(slot int, k KVBlock) {
	if x.clearHeld(slot, k) {
		x.forEachLinkBackwards(k, func(l *link) { x.removeConfirmed(slot, l.block) })
	}
}

// ForgetKV records that it is not known any more whether a replica holds a KV block: its
// blocks are approximate again. Successors are to be forgotten before their predecessors.
func (x *Index) ForgetKV(slot int, k KVBlock) {
	if x.clearHeld(slot, k) {
		x.forEachLinkBackwards(k, func(l *link) { x.unconfirm(slot, l.block) })
	}
}

// clearHeld reports whether a backend held a KV block, which it does not any more.
func (x *Index) clearHeld(slot int, k KVBlock) (held bool) {
	if !x.holdsKV(slot, k) {
		return false
	}
	t := x.kv.held[slot/maxMembers]
	word := t.getOrAdd(prompt.Block(k))
	if *word &^= 1 << (slot % maxMembers); *word == 0 {
		t.remove(prompt.Block(k))
	}
	x.kv.heldLen--
	return true
}

func (x *Index) holdsKV(slot int, k KVBlock) bool {
	group := slot / maxMembers
	return group < len(x.kv.held) && x.kv.held[group].get(prompt.Block(k))&(1<<(slot%maxMembers)) != 0
}

// forEachLinkBackwards calls f with the links to a KV block, the last one first.
func (x *Index) forEachLinkBackwards(k KVBlock, f func(*link)) {
	var all [maxSameKV]int32
	n := 0
	for at := x.kv.byKV.get(prompt.Block(k)); at != 0 && n < len(all); at = x.kv.links[at].next {
		all[n] = at
		n++
	}
	for n--; n >= 0; n-- {
		f(&x.kv.links[all[n]])
	}
}

// Link returns the link of a block.
func (x *Index) Link(b prompt.Block) (l Link, known bool) {
	at := x.kv.byBlock.get(b)
	if at == 0 {
		return Link{}, false
	}
	return x.kv.links[at].to, true
}

// AddLink links one of the blocks of a prompt, those before it having been linked before, as one
// backend has shown. The backends that hold the KV block hold the block from now on. It reports
// false if there is no room, or another link is kept: that of other backends, unless more of
// them hold the new one's KV block. So a replica that publishes nonsense does not make others
// worse.
func (x *Index) AddLink(slot int, blocks []prompt.Block, i int, to Link) (added bool) {
	b := blocks[i]
	kv := &x.kv
	if at := kv.byBlock.get(b); at != 0 {
		l := &kv.links[at]
		if l.to.KV == to.KV {
			l.to = to
			return true
		}
		all, others := x.countKVHolders(l.to.KV, slot)
		if now, _ := x.countKVHolders(to.KV, slot); others > 0 && all >= now {
			return false
		}
		x.removeLink(at)
	}
	at := x.freeLink()
	if at == 0 {
		return false
	}
	if to.KV != 0 {
		end := kv.byKV.getOrAdd(prompt.Block(to.KV))
		for n := 0; *end != 0; end = &kv.links[*end].next {
			if n++; n == maxSameKV {
				return false
			}
		}
		*end = at
	}
	kv.links[at] = link{block: b, first: i == 0, to: to}
	if i > 0 {
		kv.links[at].parent = blocks[i-1]
	}
	*kv.byBlock.getOrAdd(b) = at
	x.forEachKVHolder(to.KV, func(slot int) { x.confirm(slot, &kv.links[at]) })
	return true
}

// forEachKVHolder calls f with the slot of each backend that holds a KV block.
func (x *Index) forEachKVHolder(k KVBlock, f func(slot int)) {
	for group, t := range x.kv.held {
		for m := t.get(prompt.Block(k)); m != 0; m &= m - 1 {
			f(group*maxMembers + bits.TrailingZeros64(m))
		}
	}
}

// countKVHolders returns how many backends hold a KV block, and how many other than one.
func (x *Index) countKVHolders(k KVBlock, except int) (all, others int) {
	x.forEachKVHolder(k, func(slot int) {
		if all++; slot != except {
			others++
		}
	})
	return all, others
}

// freeLink returns an unused link. When there are no more, it is one whose block no backend
// holds; 0 if none of those looked at is.
func (x *Index) freeLink() (at int32) {
	kv := &x.kv
	if len(kv.links) <= kv.maxLinks {
		kv.links = append(kv.links, link{})
		return int32(len(kv.links) - 1)
	}
	for range 64 {
		if kv.clock++; kv.clock >= len(kv.links) {
			kv.clock = 1
		}
		l := &kv.links[kv.clock]
		switch {
		case l.isUnused():
			return int32(kv.clock)
		case !x.isHeldAnywhere(l.to.KV):
			x.removeLink(int32(kv.clock))
			return int32(kv.clock)
		}
	}
	return 0
}

func (x *Index) isHeldAnywhere(k KVBlock) bool {
	for _, t := range x.kv.held {
		if t.get(prompt.Block(k)) != 0 {
			return true
		}
	}
	return false
}

// removeLink removes a link. What backends hold of its block is approximate again.
func (x *Index) removeLink(at int32) {
	kv := &x.kv
	l := kv.links[at]
	kv.byBlock.remove(l.block)
	kv.links[at] = link{}
	if l.to.KV == 0 {
		return
	}
	x.forEachKVHolder(l.to.KV, func(slot int) { x.removeConfirmed(slot, l.block) })
	first := kv.byKV.getOrAdd(prompt.Block(l.to.KV))
	end := first
	for *end != at {
		end = &kv.links[*end].next
	}
	if *end = l.next; *first == 0 {
		kv.byKV.remove(prompt.Block(l.to.KV))
	}
}

// confirm records that a replica holds a linked block. It has no effect where the block's
// predecessor is not confirmed.
func (x *Index) confirm(slot int, l *link) {
	parent, known := x.confirmedParent(slot, l)
	if known {
		x.report(slot, l.block, parent, confirmed)
	}
}

// confirmedParent returns a backend's entry of the block before a linked one, 0 if that is the
// first. It reports false if the replica may not hold that block. It does if there was no whole
// KV block up to there: it stays as long as blocks follow it.
func (x *Index) confirmedParent(slot int, l *link) (parent int32, known bool) {
	if l.first {
		return 0, true
	}
	if parent = x.findEntry(slot, l.parent); parent != 0 && x.caches[slot].entries[parent].report != unreported {
		return parent, true
	}
	at := x.kv.byBlock.get(l.parent)
	if at == 0 || x.kv.links[at].to.KV != 0 {
		return 0, false
	}
	before, known := x.confirmedParent(slot, &x.kv.links[at])
	if !known {
		return 0, false
	}
	return x.report(slot, l.parent, before, removed)
}

// report records what a replica has said of a block, which is added after the entry parent
// if the backend does not have it. It reports false if there is no room.
func (x *Index) report(slot int, b prompt.Block, parent int32, r report) (at int32, done bool) {
	c := x.caches[slot]
	if at = x.findEntry(slot, b); at == 0 {
		if x.entries >= x.maxEntries && x.evict(slot, 1) == 0 {
			return 0, false
		}
		at = c.insertPinned(b, parent, max(1, c.uses))
		c.pinned--
		c.entries[at].pins = 0
		x.addHolder(slot, b, at)
		x.entries++
		x.version++
	} else if c.entries[at].isListed() {
		c.unlink(at)
	}
	c.setReport(&c.entries[at], r)
	return at, true
}

// removeConfirmed removes a confirmed block that a replica does not hold any more; while
// requests in flight use it, or blocks follow it, it stays.
func (x *Index) removeConfirmed(slot int, b prompt.Block) {
	c, at := x.caches[slot], x.findEntry(slot, b)
	if at == 0 || c.entries[at].report == unreported {
		return
	}
	e := &c.entries[at]
	c.setReport(e, removed)
	if e.pins == 0 && e.successors == 0 {
		c.setReport(e, unreported)
		c.linkOldest(at)
		c.listForgotten(at)
		x.removeEntry(slot, at)
	}
}

// unconfirm makes a confirmed block approximate.
func (x *Index) unconfirm(slot int, b prompt.Block) {
	c, at := x.caches[slot], x.findEntry(slot, b)
	if at == 0 || c.entries[at].report == unreported {
		return
	}
	e := &c.entries[at]
	if e.reported > 0 {
		c.setReport(e, forgotten)
	} else {
		if c.setReport(e, unreported); e.pins == 0 {
			c.linkNewest(at)
		}
		c.listForgotten(at)
	}
}

// RemoveUnconfirmed removes blocks that a backend was thought to hold, from the last back
// to the first that is confirmed, in use or followed by others.
func (x *Index) RemoveUnconfirmed(slot int, blocks []prompt.Block) {
	c := x.caches[slot]
	for i := len(blocks) - 1; i >= 0; i-- {
		at := x.findEntry(slot, blocks[i])
		if at == 0 {
			continue
		}
		if e := &c.entries[at]; !e.isListed() || e.successors > 0 {
			return
		}
		x.removeEntry(slot, at)
	}
}

// CountConfirmed returns how many of a backend's blocks its replica has reported.
func (x *Index) CountConfirmed(slot int) int { return x.caches[slot].confirmed }
