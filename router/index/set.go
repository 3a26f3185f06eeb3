package index

import (
	"math/bits"

	"warmroute/router/prompt"
)

// set says which backends hold a block, of members side by side: a fleet of more
// has several sets, so that what is said of a block stays one word, which the
// garbage collector never looks into.
//
// The word is the members' bits. Or, as long as a single one holds the block, it is
// that one's number and the place of its entry. So a block that nobody else holds,
// as most are of prompts that nobody has sent before, is looked up in this table
// alone: a table beside it that says where entries are doubled what one waits for
// memory. Only blocks that several hold have their places there.
type set struct{ table[uint64] }

const (
	members = 63
	single  = 1 << members // in a word: it is a single holder's
)

// singly is the word of a block that a single member holds, in an entry at a place.
func singly(member int, at int32) uint64 { return single | uint64(member)<<32 | uint64(at) }

// holder is the member in the word of a single one.
func holder(word uint64) int { return int(word>>32) % (members + 1) }

// holders are the bits of those that hold a block.
func (s *set) holders(b prompt.Block) uint64 { return bitsOf(s.get(b)) }

func bitsOf(word uint64) uint64 {
	if word&single != 0 {
		return 1 << holder(word)
	}
	return word
}

// match finds the depths from lo up to, not including, hi, of the backends in
// live. atLo and atHi are those of them that hold at least that many blocks.
func (s *set) match(blocks []prompt.Block, lo, hi int, atLo, atHi, live uint64, depth []int) {
	for atLo != atHi {
		if hi == lo+1 {
			record(atLo&^atHi, lo, depth)
			return
		}
		mid := (lo + hi) / 2
		atMid := s.holders(blocks[mid-1]) & live
		s.match(blocks, lo, mid, atLo, atMid, live, depth)
		lo, atLo = mid, atMid
	}
}

// record writes d for every backend in the set.
func record(backends uint64, d int, depth []int) {
	for ; backends != 0; backends &= backends - 1 {
		depth[bits.TrailingZeros64(backends)] = d
	}
}

// in is a backend's set, and its number there.
func (x *Index) in(slot int) (*set, int) { return x.sets[slot/members], slot % members }

// find is the place of a backend's entry of a block; 0: it does not hold the block.
func (x *Index) find(slot int, b prompt.Block) int32 {
	s, member := x.in(slot)
	h, word := x.held[slot], s.get(b)
	switch {
	case word&single == 0:
		return h.shared.get(b)
	case holder(word) == member && h.has(int32(word), b):
		return int32(word)
	}
	return 0
}

// show enters that a backend holds a block, in an entry at a place.
func (x *Index) show(slot int, b prompt.Block, at int32) {
	s, member := x.in(slot)
	if s.add(b, singly(member, at)) {
		return
	}
	word := s.at(b)
	switch other := holder(*word); {
	case *word == 0,
		*word&single != 0 && other == member: // left of a part that was dropped
		*word = singly(member, at)
		return
	case *word&single != 0:
		if h := x.held[slot-member+other]; h.has(int32(*word), b) { // else it is left of such a part
			*h.shared.at(b) = int32(*word)
		}
		*word = 1 << other
	}
	*word |= 1 << member
	*x.held[slot].shared.at(b) = at
}

// hide undoes show.
func (x *Index) hide(slot int, b prompt.Block) {
	s, member := x.in(slot)
	p, i, at := s.search(b)
	if p == nil {
		return
	}
	word := &p.buckets[i].values[at]
	if *word&single == 0 {
		*word &^= 1 << member
		x.held[slot].shared.remove(b)
	} else if holder(*word) == member {
		*word = 0
	}
	if *word == 0 {
		s.cut(p, i, at)
	}
}
