package engine

import (
	"math"
	"time"
)

// addHostTier gives the pool a second cache of so many blocks in host memory.
func (p *blockPool) addHostTier(blocks int) {
	if blocks > 0 {
		p.setHostTier(newBlockPool(blocks, 0))
	}
}

func (p *blockPool) setHostTier(host *blockPool) {
	p.host = host
	p.loadedAt = make([]time.Duration, len(p.refs))
}

// HostTier is a second cache that several engines share. It is not safe for concurrent use.
type HostTier struct{ pool *blockPool }

// NewHostTier returns an empty one of so many blocks.
func NewHostTier(blocks int) *HostTier { return &HostTier{newBlockPool(blocks, 0)} }

// storeOnHost copies a block to the host tier, where it is the last to be evicted then.
func (p *blockPool) storeOnHost(h BlockHash) {
	if p.host == nil || h == 0 {
		return
	}
	b, ok := p.host.cached[h]
	if ok {
		p.host.addRef(b)
	} else {
		b = p.host.allocate()
		p.host.setContent(b, h)
		p.host.log.addStoredOnHost(h)
	}
	p.host.release([]int32{b})
}

// countHostPrefix returns how many blocks of a prompt the host tier has after the first ones,
// which the KV cache has.
func (e *Engine) countHostPrefix(promptTokens int, blocks []BlockHash, first int) (n int) {
	if e.pool.host == nil {
		return 0
	}
	for _, h := range e.cacheableBlocks(promptTokens, blocks)[first:] {
		if _, ok := e.pool.host.cached[h]; !ok {
			break
		}
		n++
	}
	return n
}

// loadFromHost allocates blocks for the next ones of r, which the host tier has, and begins
// to load them. Loads follow each other. Until they have ended r is loading, as it is
// while another request's load of the blocks that it hit has not ended.
func (e *Engine) loadFromHost(r *Request, blocks int, now time.Duration) {
	p := e.pool
	r.loadedAt = 0
	for _, b := range r.blocks {
		r.loadedAt = max(r.loadedAt, p.loadedAt[b])
	}
	if blocks > 0 {
		seconds := float64(blocks*e.cfg.BlockSize) / e.cfg.HostLoadRate / e.cfg.Speed
		e.loadEnd = max(now, e.loadEnd) + time.Duration(seconds*float64(time.Second))
		r.loadedAt = max(r.loadedAt, e.loadEnd)
	}
	first := len(r.blocks)
	for range blocks {
		b := p.allocate()
		p.setContent(b, r.Blocks[len(r.blocks)])
		p.loadedAt[b] = e.loadEnd
		r.blocks = append(r.blocks, b)
	}
	p.log.addStored(r, first, len(r.blocks), nil)
	// Last, the first block, so that a prefix is evicted from its tail.
	for i := len(r.blocks) - 1; i >= 0; i-- {
		p.storeOnHost(r.Blocks[i])
	}
	if r.loadedAt > now {
		r.state = loading
	}
}

// nextLoaded returns when the first load ends that a request waits for, at now or later;
// never if none does.
func (e *Engine) nextLoaded(now time.Duration) (at time.Duration) {
	at = math.MaxInt64
	for _, r := range e.prefilling {
		if r.state == loading {
			at = min(at, max(now, r.loadedAt))
		}
	}
	return at
}
