package engine

import "time"

// BlockHash identifies a full block of tokens and all before it. Zero is not a block and
// never cached.
type BlockHash uint64

// blockPool is a KV cache like vLLM's: a fixed number of blocks with reference counts,
// and a list of free ones in the order of reuse. A free block keeps its content, and
// can be hit, until it is reused.
type blockPool struct {
	refs    []int32
	hash    []BlockHash
	corrupt []bool // the content is not what the hash says
	// twin links blocks of equal content, which exist because the last token of a
	// prompt is always recomputed. cached has the oldest of them.
	twin   []int32
	cached map[BlockHash]int32 // by full attention
	groups *groupTables        // nil: full attention is the only group

	// The free list: oldest first. next and prev hold noBlock at the ends and for
	// blocks in use.
	next, prev []int32
	head, tail int32
	free       int

	changes uint64 // incremented when a request that did not fit may fit

	// Of all engines that share the pool:
	arrivals, admissions, preemptions int64

	host *blockPool // the host tier, none of whose blocks is ever in use; nil: none
	// loadedAt is when the content of each block is there; nil without a host tier.
	loadedAt []time.Duration

	hiddenEvictions float64 // further evictions per allocation
	owed            float64 // hidden evictions not made yet

	log *eventLog // nil: no events are collected
}

const noBlock int32 = -1

func newBlockPool(blocks int, hiddenEvictions float64) *blockPool {
	p := &blockPool{
		refs: make([]int32, blocks), hash: make([]BlockHash, blocks), corrupt: make([]bool, blocks), twin: make([]int32, blocks),
		next: make([]int32, blocks), prev: make([]int32, blocks),
		cached: make(map[BlockHash]int32, blocks),
		head:   noBlock, tail: noBlock,
		changes: 1, hiddenEvictions: hiddenEvictions,
	}
	for b := range int32(blocks) {
		p.twin[b] = noBlock
		p.pushFree(b)
	}
	return p
}

// clear drops the content of all blocks, none of which may be in use.
func (p *blockPool) clear() {
	for b := range p.refs {
		p.hash[b], p.corrupt[b], p.twin[b] = 0, false, noBlock
	}
	clear(p.cached)
	p.groups.clear()
	p.changes++
	p.log.addCleared()
}

// lookupPrefix appends the blocks of hashes to into, up to the first that is not cached.
func (p *blockPool) lookupPrefix(hashes []BlockHash, into []int32) []int32 {
	for _, h := range hashes {
		b, ok := p.cached[h]
		if !ok {
			break
		}
		into = append(into, b)
	}
	return into
}

// countFree returns how many of blocks are free: sharing them shrinks the free list.
func (p *blockPool) countFree(blocks []int32) int {
	n := 0
	for _, b := range blocks {
		if p.refs[b] == 0 {
			n++
		}
	}
	return n
}

// addRef takes a reference to a block that was hit.
func (p *blockPool) addRef(b int32) {
	if p.refs[b] == 0 {
		p.removeFree(b)
	}
	p.refs[b]++
}

// allocate removes and returns the oldest free block, without its content. At least
// one block must be free.
func (p *blockPool) allocate() int32 {
	b := p.head
	p.removeFree(b)
	p.dropContent(b)
	p.refs[b] = 1
	if p.loadedAt != nil {
		p.loadedAt[b] = 0
	}
	for p.owed = min(p.owed+p.hiddenEvictions, float64(len(p.refs))); p.owed >= 1; p.owed-- {
		p.evictOldestFree()
	}
	return b
}

// evictOldestFree evicts the oldest free block.
func (p *blockPool) evictOldestFree() {
	if b := p.head; b != noBlock {
		p.removeFree(b)
		p.dropContent(b)
		p.pushFree(b)
	}
}

// setContent sets the content of b, which full attention can hit from now on.
func (p *blockPool) setContent(b int32, h BlockHash) {
	if p.groups != nil {
		p.groups.of[b] = p.groups.fullAttention()
	}
	p.addCached(p.cached, b, h)
}

// addCached makes h the content of b in a group's table.
func (p *blockPool) addCached(cached map[BlockHash]int32, b int32, h BlockHash) {
	if h == 0 {
		return
	}
	p.changes++
	p.hash[b] = h
	first, ok := cached[h]
	if !ok {
		cached[h] = b
		return
	}
	for p.twin[first] != noBlock {
		first = p.twin[first]
	}
	p.twin[first] = b
}

// release frees a request's blocks, last first, so that eviction shortens a prefix from
// its tail.
func (p *blockPool) release(blocks []int32) {
	p.changes++
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if p.refs[b]--; p.refs[b] == 0 {
			p.pushFree(b)
		}
	}
}

// dropContent removes b from the table of its group, leaving its twins.
func (p *blockPool) dropContent(b int32) {
	h := p.hash[b]
	if h == 0 {
		return
	}
	cached, group := p.cached, (*Group)(nil)
	if p.groups != nil {
		cached, group = p.groups.tableOf(b)
	}
	p.log.addRemoved(h, group)
	next := p.twin[b]
	p.hash[b], p.corrupt[b], p.twin[b] = 0, false, noBlock
	first := cached[h]
	if first != b {
		for p.twin[first] != b {
			first = p.twin[first]
		}
		p.twin[first] = next
		return
	}
	if next == noBlock {
		delete(cached, h)
		return
	}
	cached[h] = next
}

func (p *blockPool) pushFree(b int32) {
	p.prev[b], p.next[b] = p.tail, noBlock
	if p.tail == noBlock {
		p.head = b
	} else {
		p.next[p.tail] = b
	}
	p.tail = b
	p.free++
}

// pushFreeFirst frees a block without content, which is reused first.
func (p *blockPool) pushFreeFirst(b int32) {
	p.prev[b], p.next[b] = noBlock, p.head
	if p.head == noBlock {
		p.tail = b
	} else {
		p.prev[p.head] = b
	}
	p.head = b
	p.free++
}

func (p *blockPool) removeFree(b int32) {
	if p.prev[b] == noBlock {
		p.head = p.next[b]
	} else {
		p.next[p.prev[b]] = p.next[b]
	}
	if p.next[b] == noBlock {
		p.tail = p.prev[b]
	} else {
		p.prev[p.next[b]] = p.prev[b]
	}
	p.next[b], p.prev[b] = noBlock, noBlock
	p.free--
}
