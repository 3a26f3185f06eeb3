package index

import "warmroute/router/prompt"

// Placement is what one Add did: a prompt's blocks on one backend, in use until
// Release or TakeBack. It must not be copied meanwhile.
type Placement struct {
	// Distance is about how many blocks the backend has used since the last use
	// of the deepest block that matched: the size of a cache that still holds it.
	// 0 when nothing matched, or it was in use.
	Distance int
	// Left is how many blocks are beyond the backend's capacity.
	Left int

	held   *held
	slot   int
	from   int // blocks before it were held already
	stamp  uint64
	gaveUp int  // blocks that became evictable once it was not inUse
	inUse  bool // false once its place was needed while all blocks were in use

	tail      int32 // the last block's entry; 0: no blocks
	tailBlock prompt.Block

	earlier, later *Placement // in use on the same backend
}

// Add records that a backend was sent a prompt of which it held the first
// matched blocks already, as Match said, and puts its blocks in use. Blocks
// beyond the backend's capacity are left out, and the oldest make room for the
// new. p is overwritten.
func (x *Index) Add(p *Placement, slot int, blocks []prompt.Block, matched int) {
	h := x.held[slot]
	h.uses++
	fitting := blocks[:min(len(blocks), h.capacity)]
	matched = min(matched, len(fitting))
	tail := x.last(slot, fitting[:matched])
	*p = Placement{
		Distance: h.distance(tail), Left: len(blocks) - len(fitting),
		held: h, slot: slot, from: matched, stamp: h.uses, inUse: true,
	}
	h.take(tail, p.stamp)
	x.makeRoom(slot, len(fitting)-matched)
	p.tail = x.insert(slot, fitting[matched:], tail, p.stamp)
	if len(fitting) > 0 {
		p.tailBlock = fitting[len(fitting)-1]
	}
	h.listPlaced(p)
}

// Release ends the use of an Add's blocks, after an answer that the next turn
// will send back as the blocks of reply. The backend holds all of them: they
// are now the most recently used, the first most of all, since vLLM frees a
// request's blocks at its end, last first.
func (x *Index) Release(p *Placement, reply []prompt.Block) {
	h := x.current(p)
	if h == nil {
		return
	}
	h.uses++
	p.held = nil
	if p.inUse {
		h.unlistPlaced(p)
	} else {
		h.gaveUp -= p.gaveUp
		if p.tail = x.find(p.slot, p.tailBlock); p.tail == 0 {
			return // evicted meanwhile
		}
		h.take(p.tail, h.uses)
	}
	tail := p.tail
	if p.Left == 0 {
		tail = x.extend(p.slot, tail, reply)
	}
	h.leave(tail, h.uses)
}

// extend lets a request that ends at the entry tail end at the last block of its
// answer instead, and returns that one's entry.
func (x *Index) extend(slot int, tail int32, reply []prompt.Block) int32 {
	h := x.held[slot]
	reply = reply[:min(len(reply), max(0, h.capacity-h.inUse))]
	known := x.leading(slot, reply)
	if known > 0 { // the same answer was given before
		last := x.last(slot, reply[:known])
		h.take(last, h.uses)
		h.leave(tail, h.uses)
		tail = last
	}
	x.makeRoom(slot, len(reply)-known)
	return x.insert(slot, reply[known:], tail, h.uses)
}

// TakeBack ends the use of an Add's blocks and removes what the Add created,
// from block keep on, because the engine never got to it. It goes tail first
// and ends at the first block that a later Add touched or stands on, so that
// nobody's prefix loses its head.
func (x *Index) TakeBack(p *Placement, blocks []prompt.Block, keep int) {
	h := x.current(p)
	if h == nil {
		return
	}
	x.letGo(p)
	h.gaveUp -= p.gaveUp
	p.held = nil
	for i := len(blocks) - 1; i >= max(p.from, keep); i-- {
		at := x.find(p.slot, blocks[i])
		if at == 0 {
			continue // evicted meanwhile, or beyond the capacity
		}
		if e := &h.entries[at]; e.stamp != p.stamp || e.users > 0 {
			return
		}
		x.remove(p.slot, at)
	}
}

// InUse is how many blocks of a backend requests in flight stand on, each
// counted once: its replica cannot give their place to another.
func (x *Index) InUse(slot int) int { return x.held[slot].inUse + x.held[slot].gaveUp }

// Idle is how many of blocks, all of them held by the backend, nobody uses.
func (x *Index) Idle(slot int, blocks []prompt.Block) int {
	h, n := x.held[slot], 0
	for at := x.last(slot, blocks); at != 0 && h.entries[at].users == 0; at = h.entries[at].parent {
		n++
	}
	return n
}

// current is the part of the index that p stands on; nil once it was ended or
// its backend was dropped.
func (x *Index) current(p *Placement) *held {
	if p.held == nil || p.held != x.held[p.slot] || p.tail == 0 {
		return nil
	}
	return p.held
}

// letGo makes the blocks of p evictable where nobody else uses them.
func (x *Index) letGo(p *Placement) {
	if h := p.held; p.inUse {
		p.inUse = false
		h.unlistPlaced(p)
		p.gaveUp = h.inUse
		h.leave(p.tail, 0)
		p.gaveUp -= h.inUse
		h.gaveUp += p.gaveUp
	}
}

func (h *held) listPlaced(p *Placement) {
	if p.tail == 0 {
		return
	}
	p.earlier = h.lastPlaced
	if p.earlier == nil {
		h.firstPlaced = p
	} else {
		p.earlier.later = p
	}
	h.lastPlaced = p
}

func (h *held) unlistPlaced(p *Placement) {
	if p.earlier == nil {
		h.firstPlaced = p.later
	} else {
		p.earlier.later = p.later
	}
	if p.later == nil {
		h.lastPlaced = p.earlier
	} else {
		p.later.earlier = p.earlier
	}
	p.earlier, p.later = nil, nil
}
