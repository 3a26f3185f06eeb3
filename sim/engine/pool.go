package engine

// BlockHash stands for one full block of tokens and for everything before it:
// it is chained, so equal hashes mean equal prefixes. Zero stands for nothing
// and is never cached.
type BlockHash uint64

// blockPool is the KV cache as vLLM keeps it: a fixed number of blocks, each
// counted by the requests that use it, and a list of the free ones in the order
// in which they will be reused. A free block keeps its content, and can be hit,
// until it is given to someone else.
type blockPool struct {
	refs []int32
	hash []BlockHash
	// twin links blocks of equal content, which arise because the last token of
	// a prompt is always recomputed. The map holds the oldest of them.
	twin   []int32
	cached map[BlockHash]int32

	// The free list: oldest first. next and prev hold none at the ends and for
	// blocks in use.
	next, prev []int32
	head, tail int32
	free       int

	promised int    // free blocks that running answers will still take
	changes  uint64 // counts what may make room for a request that did not fit

	hidden float64 // further evictions for each block taken
	owed   float64 // of them, a part of one
}

const none int32 = -1

func newBlockPool(n int, hidden float64) *blockPool {
	p := &blockPool{
		refs: make([]int32, n), hash: make([]BlockHash, n), twin: make([]int32, n),
		next: make([]int32, n), prev: make([]int32, n),
		cached: make(map[BlockHash]int32, n),
		head:   none, tail: none,
		changes: 1, hidden: hidden,
	}
	for b := range int32(n) {
		p.twin[b] = none
		p.pushFree(b)
	}
	return p
}

// leading returns the blocks that hold hashes, from the first, up to a hole:
// a prefix is only reused unbroken.
func (p *blockPool) leading(hashes []BlockHash, into []int32) []int32 {
	for _, h := range hashes {
		b, ok := p.cached[h]
		if !ok {
			break
		}
		into = append(into, b)
	}
	return into
}

// idle counts those of blocks that nobody uses: taking them shrinks the free list.
func (p *blockPool) idle(blocks []int32) int {
	n := 0
	for _, b := range blocks {
		if p.refs[b] == 0 {
			n++
		}
	}
	return n
}

// share takes a reference to a block that was hit.
func (p *blockPool) share(b int32) {
	if p.refs[b] == 0 {
		p.removeFree(b)
	}
	p.refs[b]++
}

// take returns the block that was free for the longest time and forgets what it
// held. The caller has made sure that one is free.
func (p *blockPool) take() int32 {
	b := p.head
	p.removeFree(b)
	p.forget(b)
	p.refs[b] = 1
	// More than all of them cannot be evicted.
	for p.owed = min(p.owed+p.hidden, float64(len(p.refs))); p.owed >= 1; p.owed-- {
		p.evictUnseen()
	}
	return b
}

// evictUnseen takes the oldest free block for somebody else, who is done with
// it at once.
func (p *blockPool) evictUnseen() {
	if b := p.head; b != none {
		p.removeFree(b)
		p.forget(b)
		p.pushFree(b)
	}
}

// fill records that b now holds a full block, from which point it can be hit.
func (p *blockPool) fill(b int32, h BlockHash) {
	if h == 0 {
		return
	}
	p.changes++
	p.hash[b] = h
	first, ok := p.cached[h]
	if !ok {
		p.cached[h] = b
		return
	}
	for p.twin[first] != none {
		first = p.twin[first]
	}
	p.twin[first] = b
}

// release gives back a request's blocks, last first, so that eviction, oldest
// first, shortens a prefix from its tail.
func (p *blockPool) release(blocks []int32) {
	p.changes++
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if p.refs[b]--; p.refs[b] == 0 {
			p.pushFree(b)
		}
	}
}

// forget drops b's content from the map, leaving its twins.
func (p *blockPool) forget(b int32) {
	h := p.hash[b]
	if h == 0 {
		return
	}
	after := p.twin[b]
	p.hash[b], p.twin[b] = 0, none
	first := p.cached[h]
	if first != b {
		for p.twin[first] != b {
			first = p.twin[first]
		}
		p.twin[first] = after
		return
	}
	if after == none {
		delete(p.cached, h)
		return
	}
	p.cached[h] = after
}

func (p *blockPool) pushFree(b int32) {
	p.prev[b], p.next[b] = p.tail, none
	if p.tail == none {
		p.head = b
	} else {
		p.next[p.tail] = b
	}
	p.tail = b
	p.free++
}

func (p *blockPool) removeFree(b int32) {
	if p.prev[b] == none {
		p.head = p.next[b]
	} else {
		p.next[p.prev[b]] = p.next[b]
	}
	if p.next[b] == none {
		p.tail = p.prev[b]
	} else {
		p.prev[p.next[b]] = p.prev[b]
	}
	p.next[b], p.prev[b] = none, none
	p.free--
}
