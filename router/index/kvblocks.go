package index

import (
	"slices"
	"sort"

	"warmroute/prompt"
)

// KVBlock identifies a KV block of the engines by its content: a hash of its tokens, and of all before them.
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
	held    slotSets // the backends that hold a KV block
	heldLen int      // pairs of a KV block and a backend
	// checkpoints has the backends that report that they can reuse the prefixes that end with a KV block.
	checkpoints slotSets
	maxHeld     int // 0: no KV blocks are followed

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
	followers     int32 // links of blocks after this one
	first         bool
	// implied: the block completes no KV block that its predecessors have not. It is held where
	// blocks after it are.
	implied bool
}

func (l *link) isUnused() bool { return l.block == 0 && l.to == Link{} }

// FollowKV makes room for KV blocks within the memory bound: the caches have less from now on.
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

// StoreKV records that a replica reports a KV block as stored. It does nothing if there is no room for more.
func (x *Index) StoreKV(slot int, k KVBlock) {
	kv := &x.kv
	if kv.heldLen >= kv.maxHeld {
		if !x.holdsKV(slot, k) {
			return
		}
	} else if kv.held.add(slot, k) {
		kv.heldLen++
	}
	for at := kv.byKV.get(prompt.Block(k)); at != 0; at = kv.links[at].next {
		x.confirm(slot, &kv.links[at])
	}
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
		x.forEachLinkBackwards(k, func(l *link) { x.makeApproximate(slot, l.block) })
	}
}

// clearHeld reports whether a backend held a KV block, which it does not any more.
func (x *Index) clearHeld(slot int, k KVBlock) (held bool) {
	if held = x.kv.held.remove(slot, k); held {
		x.kv.heldLen--
	}
	return held
}

func (x *Index) holdsKV(slot int, k KVBlock) bool { return x.kv.held.has(slot, k) }

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

// LinkedPrefix is a prefix of a prompt whose blocks are linked.
type LinkedPrefix struct {
	Blocks int
	Link   // of the last of them
}

// LinkedPrefix returns the longest prefix of a prompt that is linked, and to KV blocks for which
// isPart is true; nil: to any. With a block, all blocks before it are linked.
func (x *Index) LinkedPrefix(blocks []prompt.Block, isPart func(Link) bool) (p LinkedPrefix) {
	isLinked := func(b prompt.Block) bool {
		l, known := x.Link(b)
		return known && (isPart == nil || isPart(l))
	}
	n := len(blocks)
	if n == 0 || isPart != nil || !isLinked(blocks[n-1]) { // mostly all are linked
		n = sort.Search(n, func(i int) bool { return !isLinked(blocks[i]) })
	}
	if p.Blocks = n; n > 0 {
		p.Link, _ = x.Link(blocks[n-1])
	}
	return p
}

// AddLink links one of the blocks of a prompt, those before it having been linked before, as one
// backend has shown. The backends that hold the KV block hold the block from now on. It reports
// false if there is no room, or another link is kept: see mayReplace.
func (x *Index) AddLink(slot int, blocks []prompt.Block, i int, to Link) (added bool) {
	kv := &x.kv
	l := link{block: blocks[i], first: i == 0, to: to}
	var before *link
	if i > 0 {
		at := kv.byBlock.get(blocks[i-1])
		if at == 0 {
			return false
		}
		before, l.parent = &kv.links[at], blocks[i-1]
	}
	l.implied = to.KV == 0 || before != nil && before.to.KV == to.KV
	if at := kv.byBlock.get(l.block); at != 0 {
		old := &kv.links[at]
		if old.to.KV == to.KV {
			old.to = to
			return true
		}
		if !x.mayReplace(slot, old.to.KV, to.KV) {
			return false
		}
		l.followers = old.followers
		x.removeLink(at)
	}
	at := x.freeLink(l.parent)
	if at == 0 || !l.implied && !x.insertSameKV(at, to) {
		return false
	}
	if i > 0 {
		before = &kv.links[kv.byBlock.get(l.parent)] // links may have moved
		before.followers++
	}
	l.next = kv.links[at].next
	kv.links[at] = l
	*kv.byBlock.getOrAdd(l.block) = at
	if !l.implied {
		x.kv.held.forEach(to.KV, func(slot int) { x.confirm(slot, &kv.links[at]) })
		kv.checkpoints.forEach(to.KV, func(slot int) { x.addReportedCheckpoint(slot, &kv.links[at]) })
	}
	return true
}

// mayReplace reports whether a link to one KV block may be replaced by one to another, which a
// backend has shown. It may unless other backends hold the KV block, and not fewer of them. So a
// replica that publishes nonsense does not make others worse.
func (x *Index) mayReplace(slot int, old, by KVBlock) bool {
	all, others := x.countKVHolders(old, slot)
	now, _ := x.countKVHolders(by, slot)
	return others == 0 || all < now
}

// insertSameKV inserts a link to a KV block among the others to it, in the order of the prompt. It
// reports false if there are too many.
func (x *Index) insertSameKV(at int32, to Link) (inserted bool) {
	kv := &x.kv
	n := 0
	for other := kv.byKV.get(prompt.Block(to.KV)); other != 0; other = kv.links[other].next {
		if n++; n == maxSameKV {
			return false
		}
	}
	end := kv.byKV.getOrAdd(prompt.Block(to.KV))
	for *end != 0 && kv.links[*end].to.Tokens <= to.Tokens {
		end = &kv.links[*end].next
	}
	kv.links[at].next, *end = *end, at
	return true
}

// countKVHolders returns how many backends hold a KV block, and how many other than one.
func (x *Index) countKVHolders(k KVBlock, except int) (all, others int) {
	x.kv.held.forEach(k, func(slot int) {
		if all++; slot != except {
			others++
		}
	})
	return all, others
}

// freeLink returns an unused link. When there are no more, it is one whose block no backend
// holds and that no link follows; 0 if none of those looked at is. The link of except stays.
func (x *Index) freeLink(except prompt.Block) (at int32) {
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
		case l.followers == 0 && l.block != except && (l.implied || !x.isHeldAnywhere(l.to.KV)):
			x.removeLink(int32(kv.clock))
			return int32(kv.clock)
		}
	}
	return 0
}

func (x *Index) isHeldAnywhere(k KVBlock) bool {
	return slices.ContainsFunc(x.kv.held, func(t *table[uint64]) bool { return t.get(prompt.Block(k)) != 0 })
}

// removeLink removes a link. Its block is not confirmed any more.
func (x *Index) removeLink(at int32) {
	kv := &x.kv
	l := kv.links[at]
	kv.byBlock.remove(l.block)
	if before := kv.byBlock.get(l.parent); !l.first && before != 0 {
		kv.links[before].followers--
	}
	if !l.implied {
		kv.checkpoints.forEach(l.to.KV, func(slot int) { x.removeReportedCheckpoint(slot, &l) })
		x.kv.held.forEach(l.to.KV, func(slot int) { x.removeConfirmed(slot, l.block) })
		first := kv.byKV.getOrAdd(prompt.Block(l.to.KV))
		end := first
		for *end != at {
			end = &kv.links[*end].next
		}
		if *end = l.next; *first == 0 {
			kv.byKV.remove(prompt.Block(l.to.KV))
		}
	}
	kv.links[at] = link{}
}

// confirm records that a replica holds a linked block. It has no effect where the block's
// predecessor is not confirmed, or there is no room.
func (x *Index) confirm(slot int, l *link) {
	if x.entries >= x.maxEntries {
		if x.evict(slot, evictAhead, false); x.entries >= x.maxEntries {
			return
		}
	}
	if parent, known := x.confirmedParent(slot, l); known {
		x.recordReport(slot, l.block, parent, confirmed)
	}
}

// confirmedParent returns a backend's entry of the block before a linked one, 0 if that is the
// first. It reports false if the replica may not hold that block.
func (x *Index) confirmedParent(slot int, l *link) (parent int32, known bool) {
	if l.first {
		return 0, true
	}
	if parent = x.findEntry(slot, l.parent); parent != 0 && x.caches[slot].entries[parent].report != unreported {
		return parent, true
	}
	at := x.kv.byBlock.get(l.parent)
	if at == 0 || !x.kv.links[at].implied {
		return 0, false
	}
	before, known := x.confirmedParent(slot, &x.kv.links[at])
	if !known {
		return 0, false
	}
	return x.recordReport(slot, l.parent, before, removed), true
}

// recordReport records what a replica has said of a block, which is added after the entry parent
// if the backend does not have it, and returns its entry.
func (x *Index) recordReport(slot int, b prompt.Block, parent int32, r report) (at int32) {
	c := x.caches[slot]
	if at = x.findEntry(slot, b); at == 0 {
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
	if i := c.entries[at].checkpoint; i != 0 && x.reportsCheckpoint(c, &c.entries[at], c.checkpoints.list[i].tokens) {
		x.removeAssumedCheckpoint(c, at)
	}
	return at
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
	if e.checkpoint != 0 {
		x.removeAssumedCheckpoint(c, at)
	}
	if e.pins == 0 && e.successors == 0 {
		c.setReport(e, unreported)
		c.linkOldest(at)
		c.listForgotten(at)
		x.removeEntry(slot, at)
	}
}

// makeApproximate makes a confirmed block one that the backend is only assumed to hold.
func (x *Index) makeApproximate(slot int, b prompt.Block) {
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

// RemoveApproximate removes blocks that a backend was assumed to hold, from the last back
// to the first that is confirmed, in use or followed by others.
func (x *Index) RemoveApproximate(slot int, blocks []prompt.Block) {
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
