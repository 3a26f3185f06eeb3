package index

import "slices"

// evictAhead is how many blocks beyond those that it needs one Add may evict
// when a capacity has shrunk: the caller holds a lock, and all of them at once
// could take a fifth of a second.
const evictAhead = 256

// dropped is what a backend held before it lost its cache, and what its bits in
// the sets still say. While any of it is left, the backend is matched by its
// own map.
type dropped struct {
	slot    int
	entries []entry // those not yet looked at
}

// SetCapacity says how many blocks a backend can hold. When the fleet's wishes
// together exceed the byte bound, small ones are met in full and the others get
// equal shares of the rest, so that one absurd wish costs nobody much. Blocks
// beyond a smaller capacity are evicted by and by, oldest first.
func (x *Index) SetCapacity(slot, blocks int) {
	if x.want[slot] == blocks {
		return
	}
	x.want[slot] = blocks
	share := x.share()
	for i, h := range x.held {
		h.capacity = min(x.want[i], share)
	}
}

// share is the most that one backend gets of what all may hold together.
func (x *Index) share() int {
	left := x.maxEntries
	for i, w := range slices.Sorted(slices.Values(x.want)) {
		if share := left / (len(x.want) - i); w > share {
			return share
		}
		left -= w
	}
	return x.maxEntries // all wishes are met
}

// Drop forgets all that a backend held: its replica lost its cache. Placements
// on it are over.
func (x *Index) Drop(slot int) {
	h := x.held[slot]
	fresh := newHeld()
	fresh.capacity, fresh.evictions = h.capacity, h.evictions
	x.held[slot] = fresh
	x.version++
	if h.size == 0 {
		return
	}
	x.dropped = append(x.dropped, dropped{slot, h.entries[1:]})
	x.unswept[slot/members] |= 1 << (slot % members)
	*h = held{} // a Placement may still point here, and need not keep what it held
}

// Clear makes a slot what Grow made it: its backend has left, and another may come.
func (x *Index) Clear(slot int) {
	x.Drop(slot)
	x.held[slot].evictions = 0
	x.SetCapacity(slot, 0)
}

// Upkeep does up to about n blocks of what Drop and SetCapacity left to be
// done, and reports whether any is left.
func (x *Index) Upkeep(n int) bool {
	for len(x.dropped) > 0 && n > 0 {
		n -= x.sweep(n)
	}
	left := len(x.dropped) > 0
	for slot, h := range x.held {
		over := h.size - h.capacity
		if over > 0 && n > 0 {
			evicted := x.evict(slot, min(over, n))
			over, n = over-evicted, n-evicted
		}
		left = left || over > 0
	}
	return left
}

// sweep clears the bits of up to n blocks of the first dropped part.
func (x *Index) sweep(n int) int {
	d := &x.dropped[0]
	n = min(n, len(d.entries))
	for _, e := range d.entries[:n] {
		if e.stamp == 0 {
			continue // not in use
		}
		x.entries--
		if x.find(d.slot, e.block) == 0 {
			x.hide(d.slot, e.block)
		}
	}
	if d.entries = d.entries[n:]; len(d.entries) > 0 {
		return n
	}
	slot := d.slot
	x.dropped = x.dropped[1:]
	for i := range x.dropped {
		if x.dropped[i].slot == slot {
			return n
		}
	}
	x.unswept[slot/members] &^= 1 << (slot % members)
	return n
}

// makeRoom evicts until so many more blocks fit, and some of what a shrunken
// capacity left over.
func (x *Index) makeRoom(slot, blocks int) {
	if len(x.dropped) > 0 {
		x.Upkeep(2*blocks + evictAhead)
	}
	h := x.held[slot]
	over := h.size + blocks - h.capacity
	if over <= 0 {
		return
	}
	x.evict(slot, min(over, 2*blocks+evictAhead))
}

// evict removes up to n blocks, oldest first. When those left are all in use,
// the backend has been sent more than it can hold, and what it was sent first
// counts as used already. Its blocks are taken out of the set so many at a time, as
// they are fetched.
func (x *Index) evict(slot, n int) (evicted int) {
	h := x.held[slot]
	s, _ := x.in(slot)
	for evicted < n {
		blocks := x.evicted[:min(len(x.evicted), n-evicted)]
		k := h.removeOldest(blocks)
		if k == 0 {
			if h.firstPlaced == nil {
				break
			}
			x.letGo(h.firstPlaced)
			continue
		}
		x.fetched ^= s.fetch(blocks[:k])
		for _, b := range blocks[:k] {
			x.hide(slot, b)
		}
		evicted += k
	}
	if evicted > 0 {
		h.evictions += uint64(evicted)
		x.entries -= evicted
		x.version++
	}
	return evicted
}
