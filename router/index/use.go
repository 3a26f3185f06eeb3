package index

import "warmroute/router/prompt"

// A block is in use while a request that was sent with it runs: the replica
// cannot give its place to another. Blocks in use are closed under prefixes as
// those held are, so each entry counts the requests that end at it and the
// entries after it that are in use, and a request costs no more steps than it
// brings blocks into use.

// Use counts the blocks of an Add, made just before, as in use until Done.
func (x *Index) Use(p *Placement) {
	h := x.held[p.slot]
	p.held = h
	for at := p.tail; at != 0; at = h.entries[at].parent {
		e := &h.entries[at]
		if e.uses++; e.uses > 1 {
			return
		}
		h.used++
	}
}

// Done ends a Use. It comes before the TakeBack of the same placement.
func (x *Index) Done(p *Placement) {
	h := x.held[p.slot]
	if p.held != h {
		return // dropped meanwhile: a cache that was lost is in nobody's use
	}
	p.held = nil
	for at := p.tail; at != 0; at = h.entries[at].parent {
		e := &h.entries[at]
		if e.uses--; e.uses > 0 {
			break
		}
		h.used--
	}
	x.makeRoom(p.slot, 0) // what was in use may have held more than the capacity
}

// InUse is the number of blocks that a backend holds and cannot give up.
func (x *Index) InUse(slot int) int { return x.held[slot].used }

// Idle is how many of blocks, all of them held by the backend, nobody uses.
func (x *Index) Idle(slot int, blocks []prompt.Block) int {
	if len(blocks) == 0 {
		return 0
	}
	h, n := x.held[slot], 0
	for at := h.find[blocks[len(blocks)-1]]; at != 0 && h.entries[at].uses == 0; at = h.entries[at].parent {
		n++
	}
	return n
}
