package index

import (
	"math/bits"
	"math/rand/v2"

	"warmroute/router/prompt"
)

const (
	// parts is how many pieces a table has, as a power of two: they grow one by
	// one, so that nobody holds the router's lock while a whole table is moved.
	parts     = 6
	firstSize = 8 // slots of a part's beginning
	// beside is how far behind the slot where the search for a block begins one is
	// read, too, to take out or put in the block: often in the next cache line.
	beside = 3
)

// table maps blocks to values that are not zero: zero is what a block has that is
// not in it. It is open-addressed with linear probing. A block is a hash already,
// and finding, adding and removing one each touch a single cache line mostly, which
// fetch can ask for ahead of time: for prompts that nobody has seen, Go's map made
// a request of 32 KB cost a tenth more. The zero table is empty.
type table[V int32 | uint64] struct {
	parts []part[V] // nil until something is added
	// seed keeps clients from choosing prompts whose blocks would meet in one place.
	seed uint64
	size int
}

type part[V int32 | uint64] struct {
	slots []slot[V]
	used  int
}

type slot[V int32 | uint64] struct {
	block prompt.Block // 0: the slot is free
	value V
}

func (t *table[V]) len() int { return t.size }

// place is a block's part and its hash in it.
func (t *table[V]) place(b prompt.Block) (*part[V], uint64) {
	high, low := bits.Mul64(uint64(b)^t.seed, 0x9e3779b97f4a7c15)
	mixed := high ^ low
	return &t.parts[mixed&(1<<parts-1)], mixed
}

// home is where the search for a block with this hash begins.
func (p *part[V]) home(mixed uint64) int {
	high, _ := bits.Mul64(mixed, uint64(len(p.slots)))
	return int(high)
}

// find is the slot that a block has, or else would have.
func (p *part[V]) find(b prompt.Block, mixed uint64) int {
	i := p.home(mixed)
	for p.slots[i].block != b && p.slots[i].block != 0 {
		if i++; i == len(p.slots) {
			i = 0
		}
	}
	return i
}

// get is the value of a block, 0 if it has none.
func (t *table[V]) get(b prompt.Block) (v V) {
	if t.size == 0 {
		return v
	}
	p, mixed := t.place(some(b))
	if p.used == 0 {
		return v
	}
	if at := &p.slots[p.find(some(b), mixed)]; at.block != 0 {
		return at.value
	}
	return v
}

// fetch reads where the search for each block would begin. All of it is in flight
// to the processor at once then, where searches that follow each other would wait
// for memory one by one. What it returns is for the compiler, or there would be
// nothing to read.
func (t *table[V]) fetch(blocks []prompt.Block) (sum prompt.Block) {
	if t.size == 0 {
		return 0
	}
	for _, b := range blocks {
		if p, mixed := t.place(some(b)); p.used > 0 {
			home := p.home(mixed)
			sum ^= p.slots[home].block ^ p.slots[min(home+beside, len(p.slots)-1)].block
		}
	}
	return sum
}

// at is where the value of a block lies, which is added if it was not there. It is
// to be made something else than 0, before the table is used again.
func (t *table[V]) at(b prompt.Block) *V {
	if t.parts == nil {
		t.parts = make([]part[V], 1<<parts)
		t.seed = rand.Uint64()
	}
	b = some(b)
	p, mixed := t.place(b)
	if 2*(p.used+1) > len(p.slots) { // fuller, runs grow long: four blocks to look at behind a gap, at seven tenths
		t.grow(p)
	}
	at := &p.slots[p.find(b, mixed)]
	if at.block == 0 {
		*at = slot[V]{block: b}
		p.used++
		t.size++
	}
	return &at.value
}

// remove takes a block out, if it is there.
func (t *table[V]) remove(b prompt.Block) {
	if p, i := t.search(b); p != nil {
		t.cut(p, i)
	}
}

// search is where a block lies; nil if it is not there.
func (t *table[V]) search(b prompt.Block) (*part[V], int) {
	if t.size == 0 {
		return nil, 0
	}
	b = some(b)
	p, mixed := t.place(b)
	if p.used == 0 {
		return nil, 0
	}
	i := p.find(b, mixed)
	if p.slots[i].block == 0 {
		return nil, 0
	}
	return p, i
}

// cut takes out the block in a slot, and moves up those behind it that would not be
// found across the gap.
func (t *table[V]) cut(p *part[V], gap int) {
	for i := gap; ; {
		if i++; i == len(p.slots) {
			i = 0
		}
		s := p.slots[i]
		if s.block == 0 {
			break
		}
		_, mixed := t.place(s.block)
		// It may move if its home is not between the gap and where it is now.
		if p.behind(p.home(mixed), i) >= p.behind(gap, i) {
			p.slots[gap], gap = s, i
		}
	}
	p.slots[gap] = slot[V]{}
	p.used--
	t.size--
}

// behind is how many slots i comes after another, around the end. A division would
// take longer than all else that removing a block does.
func (p *part[V]) behind(other, i int) int {
	if i < other {
		return i - other + len(p.slots)
	}
	return i - other
}

// grow makes a part half as large again: doubling would waste too much of the
// index's bytes.
func (t *table[V]) grow(p *part[V]) {
	old := p.slots
	p.slots = make([]slot[V], max(firstSize, len(old)+len(old)/2))
	for _, s := range old {
		if s.block != 0 {
			_, mixed := t.place(s.block)
			p.slots[p.find(s.block, mixed)] = s
		}
	}
}

// some keeps the one block that is no block apart from a free slot.
func some(b prompt.Block) prompt.Block { return max(b, 1) }
