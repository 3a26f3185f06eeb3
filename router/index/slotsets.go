package index

import (
	"math/bits"

	"warmroute/prompt"
)

// slotSets maps KV blocks to sets of backends, as bits: a table for each maxMembers slots.
type slotSets []*table[uint64]

// add adds a backend to the set of a KV block, and reports whether it was not in it.
func (s *slotSets) add(slot int, k KVBlock) (added bool) {
	for len(*s) <= slot/maxMembers {
		*s = append(*s, new(table[uint64]))
	}
	word, bit := (*s)[slot/maxMembers].getOrAdd(prompt.Block(k)), uint64(1)<<(slot%maxMembers)
	added = *word&bit == 0
	*word |= bit
	return added
}

// remove removes a backend from the set of a KV block, and reports whether it was in it.
func (s slotSets) remove(slot int, k KVBlock) (removed bool) {
	if slot/maxMembers >= len(s) {
		return false
	}
	t, bit := s[slot/maxMembers], uint64(1)<<(slot%maxMembers)
	p, bucket, place := t.findBlock(prompt.Block(k))
	if p == nil || p.buckets[bucket].values[place]&bit == 0 {
		return false
	}
	word := &p.buckets[bucket].values[place]
	if *word &^= bit; *word == 0 {
		t.removeSlot(p, bucket, place)
	}
	return true
}

// has reports whether a backend is in the set of a KV block.
func (s slotSets) has(slot int, k KVBlock) bool {
	group := slot / maxMembers
	return group < len(s) && s[group].get(prompt.Block(k))&(1<<(slot%maxMembers)) != 0
}

// forEach calls f with the slot of each backend in the set of a KV block.
func (s slotSets) forEach(k KVBlock, f func(slot int)) {
	for group, t := range s {
		for m := t.get(prompt.Block(k)); m != 0; m &= m - 1 {
			f(group*maxMembers + bits.TrailingZeros64(m))
		}
	}
}
