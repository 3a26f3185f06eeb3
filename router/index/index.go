// Package index remembers which backend likely holds which block of which
// prompt: an approximation of every replica's prefix cache, kept up by what we
// sent where.
package index

import "warmroute/router/prompt"

// entryBytes is what one held block costs at most: its entry, its place in its
// backend's map, and its place in the map that all share. Measured by
// TestBytesBoundHolds.
const entryBytes = 128

// Index mirrors the prefix caches of a fleet. It is not safe for concurrent
// use: the Router calls it under its own lock, so that matching and inserting
// are one step.
//
// For each backend it holds a set of blocks that is closed under prefixes:
// with a block, all blocks before it. Match relies on that.
type Index struct {
	maxEntries int
	held       []*held
	want       []int // capacity asked for, by slot, in blocks
	sets       []set // one for each 64 backends
	adds       uint64
	entries    int
}

// set maps a block to the backends that hold it, one bit each, of 64 backends
// side by side. A fleet of more has several, so that the value stays a plain
// word which the garbage collector never looks into.
type set map[prompt.Block]uint64

// Placement is what one Add did. TakeBack undoes it.
type Placement struct {
	slot  int
	from  int // blocks before it were held already
	stamp uint64
	tail  int32 // entry of the last of its blocks; 0: none
	held  *held // where Use counted it

	// Left is how many blocks found no place: beyond the capacity, or all of it
	// is in use.
	Left int
}

// New makes an index for slots backends that takes at most about maxBytes of
// memory, however many blocks the backends could hold.
func New(slots int, maxBytes int64) *Index {
	x := &Index{
		maxEntries: int(maxBytes / entryBytes),
		held:       make([]*held, slots),
		want:       make([]int, slots),
		sets:       make([]set, (slots+63)/64),
	}
	for i := range x.held {
		x.held[i] = newHeld()
	}
	for i := range x.sets {
		x.sets[i] = set{}
	}
	return x
}

// SetCapacity says how many blocks a backend can hold. When the fleet's wishes
// together exceed the byte bound, each gets its proportional share. Blocks
// beyond a smaller capacity are evicted at once, oldest first.
func (x *Index) SetCapacity(slot, blocks int) {
	if x.want[slot] == blocks {
		return
	}
	x.want[slot] = blocks
	total := 0
	for _, w := range x.want {
		total += w
	}
	share := 1.0
	if total > x.maxEntries {
		share = float64(x.maxEntries) / float64(total)
	}
	for i, h := range x.held {
		h.capacity = int(share * float64(x.want[i]))
		x.makeRoom(i, 0)
	}
}

// Match writes to depth[slot] how many leading blocks each backend holds.
//
// Sets only shrink along a prompt, since each backend's part is closed under
// prefixes. So between two blocks with equal sets nothing changes, and the
// whole costs about log2(len(blocks)) lookups for each distinct depth, not one
// for each block.
func (x *Index) Match(blocks []prompt.Block, depth []int) {
	for g, s := range x.sets {
		members := min(64, len(x.held)-64*g)
		all := ^uint64(0) >> (64 - members)
		last := all
		if len(blocks) > 0 {
			last = s[blocks[len(blocks)-1]]
		}
		s.match(blocks, 0, len(blocks), all, last, depth[64*g:])
		record(last, len(blocks), depth[64*g:])
	}
}

// match finds the depths from lo up to, not including, hi. atLo and atHi are
// the backends that hold at least that many blocks.
func (s set) match(blocks []prompt.Block, lo, hi int, atLo, atHi uint64, depth []int) {
	for atLo != atHi {
		if hi == lo+1 {
			record(atLo&^atHi, lo, depth)
			return
		}
		mid := (lo + hi) / 2
		atMid := s[blocks[mid-1]]
		s.match(blocks, lo, mid, atLo, atMid, depth)
		lo, atLo = mid, atMid
	}
}

// Add records that a backend was sent a prompt of which it held the first
// matched blocks already, as Match said. The oldest that are not in use make
// room for the new; new ones for which there is none are left out.
func (x *Index) Add(slot int, blocks []prompt.Block, matched int) Placement {
	h := x.held[slot]
	x.adds++
	p := Placement{slot: slot, from: matched, stamp: x.adds}
	p.tail = h.touch(blocks[:matched], p.stamp)
	room := x.makeRoom(slot, len(blocks)-matched)
	s, bit := x.bit(slot)
	for _, b := range blocks[matched : matched+room] {
		p.tail = h.insert(b, p.tail, p.stamp)
		s[b] |= bit
	}
	x.entries += room
	p.Left = len(blocks) - matched - room
	return p
}

// TakeBack removes what an Add of these blocks created, from block keep on,
// because the engine never got to it. It goes tail first and ends at the first
// block that a later Add touched or stands on, so that nobody's prefix loses
// its head.
func (x *Index) TakeBack(p Placement, blocks []prompt.Block, keep int) {
	h := x.held[p.slot]
	for i := len(blocks) - 1; i >= max(p.from, keep); i-- {
		at, ok := h.find[blocks[i]]
		if !ok {
			continue // evicted meanwhile, or beyond the capacity
		}
		if h.entries[at].stamp != p.stamp {
			return
		}
		x.remove(p.slot, at)
	}
}

// Drop forgets all that a backend held: its replica lost its cache.
func (x *Index) Drop(slot int) {
	s, bit := x.bit(slot)
	h := x.held[slot]
	for b := range h.find {
		s.clear(b, bit)
	}
	x.entries -= len(h.find)
	fresh := newHeld()
	fresh.capacity, fresh.evictions = h.capacity, h.evictions
	x.held[slot] = fresh
}

// Len is the number of blocks that a backend holds.
func (x *Index) Len(slot int) int { return len(x.held[slot].find) }

// Capacity is the number of blocks that a backend may hold here.
func (x *Index) Capacity(slot int) int { return x.held[slot].capacity }

// Evictions counts the blocks that a backend's part gave up to make room.
func (x *Index) Evictions(slot int) uint64 { return x.held[slot].evictions }

// Bytes is about what the blocks held take in memory.
func (x *Index) Bytes() int64 { return int64(x.entries) * entryBytes }

// makeRoom evicts, oldest first, until so many blocks fit, and returns how many
// of them do. Neither what is in use is evicted nor what the latest Add touched.
func (x *Index) makeRoom(slot, blocks int) int {
	h := x.held[slot]
	blocks = min(blocks, h.capacity)
	for len(h.find)+blocks > h.capacity && h.used < len(h.find) {
		oldest := h.oldest()
		switch e := &h.entries[oldest]; {
		case blocks > 0 && e.stamp == x.adds:
			return max(0, h.capacity-len(h.find))
		case e.uses > 0:
			h.renew(oldest)
		default:
			x.remove(slot, oldest)
			h.evictions++
		}
	}
	return min(blocks, max(0, h.capacity-len(h.find)))
}

func (x *Index) remove(slot int, at int32) {
	h := x.held[slot]
	s, bit := x.bit(slot)
	s.clear(h.entries[at].block, bit)
	h.remove(at)
	x.entries--
}

func (x *Index) bit(slot int) (set, uint64) {
	return x.sets[slot/64], 1 << (slot % 64)
}

func (s set) clear(b prompt.Block, bit uint64) {
	if left := s[b] &^ bit; left != 0 {
		s[b] = left
	} else {
		delete(s, b)
	}
}
