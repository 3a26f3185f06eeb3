package engine

import (
	"errors"
	"fmt"
	"slices"
)

// Groups are the KV cache groups that a hybrid model has beside that of full attention. All groups take blocks of one
// pool. A prompt can be continued only where each group has what it needs, so a cache hit can end before the last block
// that full attention has. The zero Groups are those of a model with full attention only.
type Groups struct {
	States  int // groups of linear attention or Mamba 2, which need the state at the end of the hit
	Windows int // groups of sliding window attention, which need the blocks of Window tokens before the end of the hit
	Window  int // tokens
	// RetentionInterval is 0 if states and windows are kept only where vLLM expects a hit: at the end of the prompt's last
	// full block, and where full attention matched more than all groups together. Above 0 they are kept also where a chunk
	// of a prompt ends.
	RetentionInterval int
}

// GroupKind is the kind of attention in a KV cache group.
type GroupKind uint8

const (
	FullAttention GroupKind = iota
	State                   // linear attention or Mamba 2
	SlidingWindow
)

// Group is one of the KV cache groups of a hybrid model.
type Group struct {
	Index  int // as in KV events; full attention has the highest
	Kind   GroupKind
	Window int // tokens, of a SlidingWindow
	blocks int // before the end of a hit that it needs, if it is not FullAttention
}

// IsHybrid reports whether there are groups beside that of full attention.
func (g Groups) IsHybrid() bool { return g.States+g.Windows > 0 }

// groups returns the groups of the model, that of full attention last.
func (c *Config) groups() []Group {
	var all []Group
	for range c.Groups.States {
		all = append(all, Group{Index: len(all), Kind: State, blocks: 1})
	}
	for range c.Groups.Windows {
		all = append(all, Group{Index: len(all), Kind: SlidingWindow, Window: c.Groups.Window, blocks: c.windowBlocks()})
	}
	return append(all, Group{Index: len(all), Kind: FullAttention})
}

// windowBlocks returns how many blocks a group of a sliding window needs before the end of a hit.
func (c *Config) windowBlocks() int { return divideUp(c.Groups.Window-1, c.BlockSize) }

// runningBlocks returns how many blocks a running request uses in the groups other than full attention: the state before
// a block and the one after it, and the blocks that a window touches.
func (c *Config) runningBlocks() int {
	return 2*c.Groups.States + c.Groups.Windows*(c.windowBlocks()+1)
}

// MaxRequestTokens returns how many tokens the prompt and the output of a request can have together.
func (c Config) MaxRequestTokens() int {
	return (c.KVTokens/c.BlockSize - c.runningBlocks()) * c.BlockSize
}

// ReportedKVTokens returns how many tokens of requests of the maximum length the KV cache can hold at once, as vLLM
// reports it. With groups it is less than the blocks hold: each such request needs blocks in every group.
func (c Config) ReportedKVTokens(maxModelLen int) int {
	blocks := c.KVTokens / c.BlockSize
	if !c.Groups.IsHybrid() {
		return blocks * c.BlockSize
	}
	ofWindow := divideUp(min(c.Groups.Window-1+c.StepTokens, maxModelLen), c.BlockSize) + 1
	return blocks * maxModelLen / (divideUp(maxModelLen, c.BlockSize) + 2*c.Groups.States + c.Groups.Windows*ofWindow)
}

// ValidateGroups returns an error unless the groups are possible with the block size and the step's token budget.
func (c Config) ValidateGroups() error {
	g := c.Groups
	switch {
	case g.States < 0 || g.Windows < 0 || g.RetentionInterval < 0 || g.States+g.Windows > 100:
		return errors.New("KV cache groups and the retention interval must not be negative, and at most 100 groups are possible")
	case g.Windows > 0 && g.Window < 2:
		return errors.New("groups of a sliding window need a window of at least 2 tokens")
	case g.States > 0 && c.StepTokens < c.BlockSize:
		return errors.New("a model with states needs a step's token budget of at least a block: states are kept at the ends of blocks")
	case g.IsHybrid() && c.MaxRequestTokens() <= 0:
		return fmt.Errorf("KV tokens %d are fewer than one request uses in all KV cache groups", c.KVTokens)
	case g.IsHybrid() && c.HostKVTokens > 0:
		return errors.New("a model with several KV cache groups cannot have a cache in host memory here: choose one of them")
	}
	return nil
}

func divideUp(n, by int) int { return (n + by - 1) / by }

// groupTables are the parts of a blockPool for a model with several groups. Blocks of all groups are in the pool's free
// list. Those of states and windows are in use only while a request computes with them.
type groupTables struct {
	groups []Group
	cached []map[BlockHash]int32 // by group, as blockPool.cached, which is the last one
	of     []uint8               // the group of each block's content
}

// addGroups gives the pool the tables of the groups that a model has beside full attention.
func (p *blockPool) addGroups(c *Config) {
	if !c.Groups.IsHybrid() {
		return
	}
	p.groups = &groupTables{groups: c.groups(), of: make([]uint8, len(p.refs))}
	for range p.groups.fullAttention() {
		p.groups.cached = append(p.groups.cached, make(map[BlockHash]int32))
	}
	p.groups.cached = append(p.groups.cached, p.cached)
}

// fullAttention returns the index of the group of full attention.
func (t *groupTables) fullAttention() uint8 { return uint8(len(t.groups) - 1) }

// tableOf returns the group of a block's content, and its table.
func (t *groupTables) tableOf(b int32) (cached map[BlockHash]int32, group *Group) {
	return t.cached[t.of[b]], &t.groups[t.of[b]]
}

// clear empties all tables. It has no effect on nil.
func (t *groupTables) clear() {
	if t != nil {
		for _, cached := range t.cached {
			clear(cached)
		}
	}
}

// countUsableBlocks returns after how many of the hashes, which full attention has, all groups can continue.
func (t *groupTables) countUsableBlocks(hashes []BlockHash) int {
	end := len(hashes)
	for end > 0 {
		missing := t.findMissing(hashes[:end])
		if missing < 0 {
			break
		}
		end = missing // any later end needs that block, too
	}
	return end
}

// findMissing returns the index of a block that a group needs after the hashes and does not have; -1: there is none.
func (t *groupTables) findMissing(hashes []BlockHash) int {
	for g, cached := range t.cached[:t.fullAttention()] {
		for i := len(hashes) - 1; i >= max(0, len(hashes)-t.groups[g].blocks); i-- {
			if _, ok := cached[hashes[i]]; !ok {
				return i
			}
		}
	}
	return -1
}

// touchGroups makes what the groups need after the hashes the last to be evicted.
func (p *blockPool) touchGroups(hashes []BlockHash) {
	for g, cached := range p.groups.cached[:p.groups.fullAttention()] {
		for _, h := range hashes[max(0, len(hashes)-p.groups.groups[g].blocks):] {
			b := cached[h]
			p.removeFree(b)
			p.pushFree(b)
		}
	}
}

// startGroups touches what the groups other than full attention have at the end of r's hit, gives r the blocks that they
// compute with, and sets r.keep. matched is how many blocks of the prompt full attention has.
func (e *Engine) startGroups(r *Request, matched int) {
	p := e.pool
	hits := len(r.blocks)
	p.touchGroups(r.Blocks[:hits])
	for range e.cfg.runningBlocks() {
		r.running = append(r.running, p.allocate())
	}
	r.keep = [2]int{}
	if e.cfg.NoPrefixCache {
		return
	}
	if matched > hits {
		r.keep[0] = matched // other prompts branch off here, too
	}
	r.keep[1] = (r.contextTokens() - 1) / e.cfg.BlockSize
}

// nextChunk returns how many tokens of r's prefill the next step computes, at most budget. A state can be kept only where
// a chunk ends, so chunks end at the ends of blocks, and do not extend beyond one of r.keep.
func (e *Engine) nextChunk(r *Request, budget int) (tokens int) {
	tokens = min(r.contextTokens()-r.computed, budget)
	if e.cfg.Groups.States == 0 {
		return tokens
	}
	end := r.computed + tokens
	for _, blocks := range r.keep {
		if boundary := blocks * e.cfg.BlockSize; r.computed < boundary && boundary <= end {
			return boundary - r.computed
		}
	}
	if last := r.keep[1] * e.cfg.BlockSize; end < last {
		tokens = max(0, end-end%e.cfg.BlockSize-r.computed)
	}
	return tokens
}

// keepInGroups caches in the groups other than full attention what they keep of r's full blocks from index first on, and
// records the events of all groups. What is kept is free at once, so that it is evicted before r's blocks.
func (e *Engine) keepInGroups(r *Request, first int) {
	end := min(r.full, len(r.Blocks))
	if first >= end {
		return
	}
	t := e.pool.groups
	kept := make([][]BlockHash, t.fullAttention())
	for g := range kept {
		if g > 0 && t.groups[g].blocks == t.groups[g-1].blocks {
			kept[g] = kept[g-1]
		} else {
			kept[g] = e.keptBlocks(r, first, end, t.groups[g].blocks)
		}
		e.pool.log.addKept(r, first, end, kept[g], &t.groups[g])
	}
	e.pool.log.addStored(r, first, end, &t.groups[t.fullAttention()])
	used := 0
	for g := range kept {
		for _, h := range kept[g] {
			e.pool.keepInGroup(&r.running[used%len(r.running)], h, uint8(g))
			used++
		}
	}
}

// keptBlocks returns which of r's blocks from index first up to end a group keeps that needs so many blocks before the end
// of a hit.
func (e *Engine) keptBlocks(r *Request, first, end, needed int) (kept []BlockHash) {
	boundaries := append([]int{}, r.keep[:]...)
	if e.cfg.Groups.RetentionInterval > 0 && r.full <= r.keep[1] {
		boundaries = append(boundaries, r.full)
	}
	for i := first; i < end; i++ {
		if r.Blocks[i] != 0 && slices.ContainsFunc(boundaries, func(b int) bool { return b-needed <= i && i < b }) {
			kept = append(kept, r.Blocks[i])
		}
	}
	return kept
}

// keepInGroup makes h the content of a running request's block in a group, frees it, and replaces it by another one.
func (p *blockPool) keepInGroup(running *int32, h BlockHash, group uint8) {
	p.groups.of[*running] = group
	p.addCached(p.groups.cached[group], *running, h)
	p.release([]int32{*running})
	*running = p.allocate()
}
