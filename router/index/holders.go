package index

import (
	"math/bits"

	"warmroute/prompt"
)

// holderTable maps a block to the backends that hold it, of maxMembers consecutive slots; a larger fleet has
// several tables. The value is one word, so that the garbage collector skips the table: the members' bits or,
// while a single member holds the block, soleBit, its number and the index of its entry. So a block with one
// holder, as most are, costs one lookup; only blocks with several holders need a second table for their entries
// (cache.shared).
type holderTable struct{ table[uint64] }

const (
	maxMembers = 63
	soleBit    = 1 << maxMembers
)

// soleHolderWord returns the word of a block that a single member holds.
func soleHolderWord(member int, at int32) (word uint64) {
	return soleBit | uint64(member)<<32 | uint64(at)
}

// soleMember returns the member of such a word.
func soleMember(word uint64) (member int) { return int(word>>32) % (maxMembers + 1) }

// holderBits returns the bits of the members that hold a block.
func (s *holderTable) holderBits(b prompt.Block) uint64 { return membersOf(s.get(b)) }

// membersOf returns the bits of the members that a word of the table stands for.
func membersOf(word uint64) uint64 {
	if word&soleBit != 0 {
		return 1 << soleMember(word)
	}
	return word
}

// setDepthsInRange sets the depths from lo up to, not including, hi of the members in
// live. loHolders and hiHolders are those that hold at least lo and hi blocks.
func (s *holderTable) setDepthsInRange(blocks []prompt.Block, lo, hi int, loHolders, hiHolders, live uint64, depth []int) {
	for loHolders != hiHolders {
		if hi == lo+1 {
			setDepths(loHolders&^hiHolders, lo, depth)
			return
		}
		mid := (lo + hi) / 2
		atMid := s.holderBits(blocks[mid-1]) & live
		s.setDepthsInRange(blocks, lo, mid, loHolders, atMid, live, depth)
		lo, loHolders = mid, atMid
	}
}

// setDepths sets the depth of every member in a bit set.
func setDepths(members uint64, d int, depth []int) {
	for ; members != 0; members &= members - 1 {
		depth[bits.TrailingZeros64(members)] = d
	}
}

// holderTableOf returns a backend's holder table and its member number.
func (x *Index) holderTableOf(slot int) (t *holderTable, member int) {
	return x.holders[slot/maxMembers], slot % maxMembers
}

// findEntry returns a backend's entry of a block, or 0.
func (x *Index) findEntry(slot int, b prompt.Block) (at int32) {
	s, member := x.holderTableOf(slot)
	c, word := x.caches[slot], s.get(b)
	switch {
	case word&soleBit == 0:
		return c.shared.get(b)
	case soleMember(word) == member && c.holdsAt(int32(word), b):
		return int32(word)
	}
	return 0
}

// addHolder records that a backend holds a block in an entry.
func (x *Index) addHolder(slot int, b prompt.Block, entry int32) {
	s, member := x.holderTableOf(slot)
	if s.tryAdd(b, soleHolderWord(member, entry)) {
		return
	}
	word := s.getOrAdd(b)
	switch other := soleMember(*word); {
	case *word == 0,
		*word&soleBit != 0 && other == member: // left over from a dropped cache
		*word = soleHolderWord(member, entry)
		return
	case *word&soleBit != 0:
		if c := x.caches[slot-member+other]; c.holdsAt(int32(*word), b) { // else it is left over likewise
			*c.shared.getOrAdd(b) = int32(*word)
		}
		*word = 1 << other
	}
	*word |= 1 << member
	*x.caches[slot].shared.getOrAdd(b) = entry
}

// removeHolder undoes addHolder.
func (x *Index) removeHolder(slot int, b prompt.Block) {
	s, member := x.holderTableOf(slot)
	p, i, at := s.findBlock(b)
	if p == nil {
		return
	}
	word := &p.buckets[i].values[at]
	if *word&soleBit == 0 {
		*word &^= 1 << member
		x.caches[slot].shared.remove(b)
	} else if soleMember(*word) == member {
		*word = 0
	}
	if *word == 0 {
		s.removeSlot(p, i, at)
	}
}
