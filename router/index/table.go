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
	firstSize = 2 // buckets of a part's beginning
	together  = 4 // blocks in a bucket
)

// table maps blocks to values that are not zero: zero is what a block has that is
// not in it. Blocks stand in buckets, one of which is a line of the processor's
// cache where values are words; one that is full passes what else belongs into it
// on to the next. A block is a hash already, and finding, adding and removing one
// each look at a single bucket mostly, which fetch can ask for ahead of time. And
// they look at it as a whole: the jumps of a search from slot to slot are foreseen
// by no processor, and took longer than memory did. The zero table is empty.
type table[V int32 | uint64] struct {
	parts []part[V] // nil until something is added
	// seed keeps clients from choosing prompts whose blocks would meet in one place.
	seed uint64
	size int
}

type part[V int32 | uint64] struct {
	buckets []bucket[V]
	used    int
}

type bucket[V int32 | uint64] struct {
	blocks [together]prompt.Block // 0: the slot is free
	values [together]V
}

// slot is where a block stands in a bucket, or 0 where one is free; together: nowhere.
func (k *bucket[V]) slot(b prompt.Block) int {
	i := together
	if k.blocks[3] == b {
		i = 3
	}
	if k.blocks[2] == b {
		i = 2
	}
	if k.blocks[1] == b {
		i = 1
	}
	if k.blocks[0] == b {
		i = 0
	}
	return i
}

func (k *bucket[V]) full() bool { return k.slot(0) == together }

func (t *table[V]) len() int { return t.size }

// place is a block's part and its hash in it.
func (t *table[V]) place(b prompt.Block) (*part[V], uint64) {
	high, low := bits.Mul64(uint64(b)^t.seed, 0x9e3779b97f4a7c15)
	mixed := high ^ low
	return &t.parts[mixed&(1<<parts-1)], mixed
}

// home is the bucket where the search for a block with this hash begins.
func (p *part[V]) home(mixed uint64) int {
	high, _ := bits.Mul64(mixed, uint64(len(p.buckets)))
	return int(high)
}

// next is the bucket after another.
func (p *part[V]) next(i int) int {
	if i++; i < len(p.buckets) {
		return i
	}
	return 0
}

// find is the bucket that has a block, and the block's slot; else the one that has
// room for it, and together.
func (p *part[V]) find(b prompt.Block, mixed uint64) (int, int) {
	for i := p.home(mixed); ; i = p.next(i) {
		k := &p.buckets[i]
		if at := k.slot(b); at < together || !k.full() {
			return i, at
		}
	}
}

// get is the value of a block, 0 if it has none.
func (t *table[V]) get(b prompt.Block) (v V) {
	if t.size == 0 {
		return v
	}
	b = some(b)
	p, mixed := t.place(b)
	if p.used == 0 {
		return v
	}
	k := &p.buckets[p.home(mixed)]
	at := k.slot(b)
	if at == together && k.full() {
		var i int
		i, at = p.find(b, mixed)
		k = &p.buckets[i]
	}
	if at < together {
		v = k.values[at]
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
			sum ^= p.buckets[p.home(mixed)].blocks[0]
		}
	}
	return sum
}

// add is at for a block that is not in the table, with its value. It reports false,
// and has done nothing, where there is more to do than with nearly every new block:
// the block is there, its bucket is full, or the part has to grow.
func (t *table[V]) add(b prompt.Block, v V) bool {
	if t.parts == nil {
		return false
	}
	b = some(b)
	p, mixed := t.place(b)
	if 2*(p.used+1) > together*len(p.buckets) {
		return false
	}
	k := &p.buckets[p.home(mixed)]
	at := k.slot(0)
	if at == together || k.slot(b) < together {
		return false
	}
	k.blocks[at], k.values[at] = b, v
	p.used++
	t.size++
	return true
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
	if 2*(p.used+1) > together*len(p.buckets) { // fuller, too many buckets are: one of seven at a half
		t.grow(p)
	}
	i, at := p.find(b, mixed)
	k := &p.buckets[i]
	if at == together {
		at = k.slot(0)
		k.blocks[at] = b
		p.used++
		t.size++
	}
	return &k.values[at]
}

// remove takes a block out, if it is there.
func (t *table[V]) remove(b prompt.Block) {
	if p, i, at := t.search(b); p != nil {
		t.cut(p, i, at)
	}
}

// search is where a block lies: its part, bucket and slot; nil if it is not there.
func (t *table[V]) search(b prompt.Block) (*part[V], int, int) {
	if t.size == 0 {
		return nil, 0, 0
	}
	b = some(b)
	p, mixed := t.place(b)
	if p.used == 0 {
		return nil, 0, 0
	}
	i, at := p.find(b, mixed)
	if at == together {
		return nil, 0, 0
	}
	return p, i, at
}

// cut takes out the block in a slot. Where its bucket was full, others may have gone
// on to the next for want of room, and would not be found there any more: one of
// them takes the place, and so on with the bucket that it leaves.
func (t *table[V]) cut(p *part[V], gap, at int) {
	k := &p.buckets[gap]
	for i, full := gap, k.full(); full; {
		i = p.next(i)
		other := &p.buckets[i]
		full = other.full()
		if from := t.passedOn(p, gap, i); from < together {
			k.blocks[at], k.values[at] = other.blocks[from], other.values[from]
			k, gap, at = other, i, from
		}
	}
	k.blocks[at], k.values[at] = 0, 0
	p.used--
	t.size--
}

// passedOn is the slot of a block in bucket i that would stand in gap, or before
// it, had there been room; together: there is none.
func (t *table[V]) passedOn(p *part[V], gap, i int) int {
	for at, b := range p.buckets[i].blocks {
		if b == 0 {
			continue
		}
		_, mixed := t.place(b)
		if p.behind(p.home(mixed), i) >= p.behind(gap, i) {
			return at
		}
	}
	return together
}

// behind is how many buckets i comes after another, around the end.
func (p *part[V]) behind(other, i int) int {
	if i < other {
		return i - other + len(p.buckets)
	}
	return i - other
}

// grow makes a part half as large again: doubling would waste too much of the
// index's bytes.
func (t *table[V]) grow(p *part[V]) {
	old := p.buckets
	p.buckets = make([]bucket[V], max(firstSize, len(old)+len(old)/2))
	for i := range old {
		for at, b := range old[i].blocks {
			if b == 0 {
				continue
			}
			_, mixed := t.place(b)
			to, _ := p.find(b, mixed)
			k := &p.buckets[to]
			free := k.slot(0)
			k.blocks[free], k.values[free] = b, old[i].values[at]
		}
	}
}

// some keeps the one block that is no block apart from a free slot.
func some(b prompt.Block) prompt.Block { return max(b, 1) }
