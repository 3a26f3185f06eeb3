package policy

import (
	"math/bits"

	"warmroute/router/prompt"
)

// owners tells which backends were sent a block.
//
// It stands for all the tables and trees of text that the rules of other routers
// keep. A block is a chained hash, so equal blocks mean equal prompts up to
// their end: in whole blocks, a radix tree of text is a map from a block to the
// backends ("tenants") that are in its node, and walking down the tree is
// looking up one block after another. Where a rule counts characters, a block
// counts for as many as it has: Request.BlockTokens × 4.
type owners struct {
	sets  []set // one for each 64 backends
	count []int // scratch, by slot
	out   []int // scratch, by candidate
	asked []uint64
}

// set has a bit for each of 64 backends.
type set map[prompt.Block]uint64

func (o *owners) note(b prompt.Block, slot int) {
	for len(o.sets) <= slot/64 {
		o.sets = append(o.sets, set{})
	}
	o.sets[slot/64][b] |= 1 << (slot % 64)
}

// forget takes a block away from one backend.
func (o *owners) forget(b prompt.Block, slot int) {
	s := o.sets[slot/64]
	if left := s[b] &^ (1 << (slot % 64)); left != 0 {
		s[b] = left
	} else {
		delete(s, b)
	}
}

// drop takes a block away from all of them.
func (o *owners) drop(b prompt.Block) {
	for _, s := range o.sets {
		delete(s, b)
	}
}

// leading is, for each candidate, how many blocks it owns without a break from
// the first. Valid until the next call.
func (o *owners) leading(blocks []prompt.Block, candidates []Candidate) []int {
	o.clear(candidates)
	for g, s := range o.sets {
		if g >= len(o.asked) {
			break
		}
		left := o.asked[g]
		for depth, b := range blocks {
			if left == 0 {
				break
			}
			owning := left & s[b]
			o.record(g, left&^owning, depth)
			left = owning
		}
		o.record(g, left, len(blocks))
	}
	return o.collect(candidates)
}

// scattered is, for each candidate, how many blocks it owns, breaks or not, up
// to the first block that nobody owns, candidate or not. Valid until the next
// call.
func (o *owners) scattered(blocks []prompt.Block, candidates []Candidate) []int {
	o.clear(candidates)
	for _, b := range blocks {
		owned := false
		for g, s := range o.sets {
			for owning := s[b]; owning != 0; owning &= owning - 1 {
				owned = true
				o.count[64*g+bits.TrailingZeros64(owning)]++
			}
		}
		if !owned {
			break
		}
	}
	return o.collect(candidates)
}

func (o *owners) clear(candidates []Candidate) {
	groups := len(o.sets)
	for i := range candidates {
		groups = max(groups, candidates[i].Slot/64+1)
	}
	if len(o.asked) < groups {
		o.asked, o.count = make([]uint64, groups), make([]int, 64*groups)
	}
	clear(o.asked)
	clear(o.count)
	for i := range candidates {
		slot := candidates[i].Slot
		o.asked[slot/64] |= 1 << (slot % 64)
	}
}

func (o *owners) record(group int, backends uint64, n int) {
	for ; backends != 0; backends &= backends - 1 {
		o.count[64*group+bits.TrailingZeros64(backends)] = n
	}
}

func (o *owners) collect(candidates []Candidate) []int {
	o.out = o.out[:0]
	for i := range candidates {
		o.out = append(o.out, o.count[candidates[i].Slot])
	}
	return o.out
}
