package policies

import (
	"iter"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sort"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"warmroute/prompt"
	"warmroute/router/policy"
)

// maxTableBlocks bounds what a policy remembers, in blocks times backends, even
// where the router that it comes from has no bound: about 300 MB. With blocks of
// 256 bytes and eight backends it is 64 MiB of text for each.
const maxTableBlocks = 1 << 21

// blockSets records which backends were sent a block. It is not bounded.
//
// It stands for the trees and tables of text that other routers keep. A block is
// a chained hash, so equal blocks mean equal prompts up to their end: walking
// down a radix tree of text is looking up one block after another. Where a rule
// counts characters, a block counts for Request.BlockTokens × 4.
type blockSets struct {
	sets []blockSet // one for each 64 slots

	wanted  []uint64 // scratch: bit set of the candidates' slots
	bySlot  []int    // scratch
	matched []int    // scratch, by candidate
}

// blockSet maps a block to a bit set of 64 slots.
type blockSet map[prompt.Block]uint64

func (s *blockSets) insert(b prompt.Block, slot int) {
	for len(s.sets) <= slot/64 {
		s.sets = append(s.sets, blockSet{})
	}
	s.sets[slot/64][b] |= 1 << (slot % 64)
}

// remove removes a block of one backend.
func (s *blockSets) remove(b prompt.Block, slot int) {
	set := s.sets[slot/64]
	if left := set[b] &^ (1 << (slot % 64)); left != 0 {
		set[b] = left
	} else {
		delete(set, b)
	}
}

// removeFromAll removes a block of all backends.
func (s *blockSets) removeFromAll(b prompt.Block) {
	for _, set := range s.sets {
		delete(set, b)
	}
}

// countPrefixMatches returns for each candidate how many blocks it has without a gap
// from the first. The result is valid until the next call.
func (s *blockSets) countPrefixMatches(blocks []prompt.Block, candidates []policy.Candidate) (counts []int) {
	s.resetScratch(candidates)
	for group, set := range s.sets {
		if group >= len(s.wanted) {
			break
		}
		left := s.wanted[group]
		for depth, b := range blocks {
			if left == 0 {
				break
			}
			having := left & set[b]
			s.setMatched(group, left&^having, depth)
			left = having
		}
		s.setMatched(group, left, len(blocks))
	}
	return s.matchedByCandidate(candidates)
}

// countScatteredMatches returns for each candidate how many blocks it has, with gaps or
// not, up to the first block that no backend has, candidate or not. The result is
// valid until the next call.
func (s *blockSets) countScatteredMatches(blocks []prompt.Block, candidates []policy.Candidate) (counts []int) {
	s.resetScratch(candidates)
	for _, b := range blocks {
		found := false
		for group, set := range s.sets {
			for having := set[b]; having != 0; having &= having - 1 {
				found = true
				s.bySlot[64*group+bits.TrailingZeros64(having)]++
			}
		}
		if !found {
			break
		}
	}
	return s.matchedByCandidate(candidates)
}

// resetScratch clears the scratch fields and sets wanted.
func (s *blockSets) resetScratch(candidates []policy.Candidate) {
	groups := len(s.sets)
	for i := range candidates {
		groups = max(groups, candidates[i].Slot/64+1)
	}
	if len(s.wanted) < groups {
		s.wanted, s.bySlot = make([]uint64, groups), make([]int, 64*groups)
	}
	clear(s.wanted)
	clear(s.bySlot)
	for i := range candidates {
		slot := candidates[i].Slot
		s.wanted[slot/64] |= 1 << (slot % 64)
	}
}

func (s *blockSets) setMatched(group int, slotBits uint64, matched int) {
	for ; slotBits != 0; slotBits &= slotBits - 1 {
		s.bySlot[64*group+bits.TrailingZeros64(slotBits)] = matched
	}
}

func (s *blockSets) matchedByCandidate(candidates []policy.Candidate) []int {
	s.matched = s.matched[:0]
	for i := range candidates {
		s.matched = append(s.matched, s.bySlot[candidates[i].Slot])
	}
	return s.matched
}

// lru lists blocks, the least recently used first, each with the time of its last
// use in nanoseconds.
type lru = simplelru.LRU[prompt.Block, int64]

func newLRU(maxBlocks int, onEvict func(prompt.Block)) *lru {
	l, err := simplelru.NewLRU(max(1, maxBlocks), func(b prompt.Block, _ int64) { onEvict(b) })
	if err != nil {
		panic(err) // it fails for sizes below 1 only
	}
	return l
}

// evictUnusedSince removes the blocks whose last use was before t.
func evictUnusedSince(l *lru, t time.Time) {
	for {
		_, used, ok := l.GetOldest()
		if !ok || used >= t.UnixNano() {
			return
		}
		l.RemoveOldest()
	}
}

// countUsedSince returns how many of the first blocks of a prompt, all of which are in l, were used at t or
// later. A block is used whenever one that follows it is, so the others are at the end.
func countUsedSince(l *lru, blocks []prompt.Block, t time.Time) int {
	return sort.Search(len(blocks), func(i int) bool {
		used, _ := l.Peek(blocks[i])
		return used < t.UnixNano()
	})
}

// useOrder yields the blocks of a prompt in the order in which they are used, and
// so in which they are evicted.
type useOrder func([]prompt.Block) iter.Seq2[int, prompt.Block]

// tailFirst yields the first block last: the oldest block is always the end of a
// prefix, as in a tree whose leaves are pruned.
func tailFirst(blocks []prompt.Block) iter.Seq2[int, prompt.Block] { return slices.Backward(blocks) }

// headFirst yields the first block first: it is evicted before the rest of its
// prefix.
func headFirst(blocks []prompt.Block) iter.Seq2[int, prompt.Block] { return slices.All(blocks) }

// prefixTable records the blocks that each backend was sent, each backend's in an
// LRU of its own.
type prefixTable struct {
	blockSets
	maxBlocks int // of all backends
	order     useOrder
	parts     []tablePart // by slot
	used      int         // parts with an LRU
}

// tablePart is the part of one backend.
type tablePart struct {
	lru       *lru // nil until it is sent something
	maxBlocks int  // 0: no limit of its own
}

func newPrefixTable(maxBlocks int, order useOrder) *prefixTable {
	return &prefixTable{maxBlocks: maxBlocks, order: order}
}

// RecordSent implements Recorder for the policies that embed a prefixTable.
func (t *prefixTable) RecordSent(r *policy.Request, c *policy.Candidate) {
	t.addBlocks(c.Slot, r.Blocks, r.Now)
}

func (t *prefixTable) addBlocks(slot int, blocks []prompt.Block, now time.Time) {
	p := t.ensurePart(slot)
	if p.lru == nil {
		t.used++
		p.lru = newLRU(t.maxBlocks, func(b prompt.Block) { t.remove(b, slot) })
		t.resizeParts()
	}
	for _, b := range t.order(blocks) {
		t.insert(b, slot)
		p.lru.Add(b, now.UnixNano())
	}
}

// limitBlocks bounds the blocks of one backend from now on, and evicts those beyond.
func (t *prefixTable) limitBlocks(slot, maxBlocks int) {
	if p := t.ensurePart(slot); p.maxBlocks != maxBlocks {
		p.maxBlocks = maxBlocks
		t.resizePart(p)
	}
}

// ensurePart returns the part of a backend, and makes an empty one if there is none.
func (t *prefixTable) ensurePart(slot int) *tablePart {
	for len(t.parts) <= slot {
		t.parts = append(t.parts, tablePart{})
	}
	return &t.parts[slot]
}

func (t *prefixTable) resizeParts() {
	for i := range t.parts {
		t.resizePart(&t.parts[i])
	}
}

// resizePart gives a part its limit, within an equal share of the table.
func (t *prefixTable) resizePart(p *tablePart) {
	if p.lru == nil {
		return
	}
	room := max(1, t.maxBlocks/t.used)
	if p.maxBlocks > 0 {
		room = min(room, p.maxBlocks)
	}
	p.lru.Resize(room)
}

// blockCount returns the number of a backend's blocks.
func (t *prefixTable) blockCount(slot int) int {
	if slot >= len(t.parts) || t.parts[slot].lru == nil {
		return 0
	}
	return t.parts[slot].lru.Len()
}

// countPrefixMatchesSince is countPrefixMatches without the blocks whose last use was before since.
func (t *prefixTable) countPrefixMatchesSince(blocks []prompt.Block, candidates []policy.Candidate, since time.Time) (counts []int) {
	counts = t.countPrefixMatches(blocks, candidates)
	for i, n := range counts {
		if n > 0 {
			counts[i] = countUsedSince(t.parts[candidates[i].Slot].lru, blocks[:n], since)
		}
	}
	return counts
}

// evictUnused removes the blocks whose last use was before since.
func (t *prefixTable) evictUnused(since time.Time) {
	for _, p := range t.parts {
		if p.lru != nil {
			evictUnusedSince(p.lru, since)
		}
	}
}

// evictDownTo evicts the least recently used blocks of each backend that has more
// than blocksPerSlot. Unlike a limit, it does so once.
func (t *prefixTable) evictDownTo(blocksPerSlot int) {
	for _, p := range t.parts {
		for p.lru != nil && p.lru.Len() > blocksPerSlot {
			p.lru.RemoveOldest()
		}
	}
}

// ForgetBackend implements Forgetter for the policies that embed a prefixTable.
func (t *prefixTable) ForgetBackend(slot int) {
	if slot >= len(t.parts) || t.parts[slot].lru == nil {
		return
	}
	t.parts[slot].lru.Purge()
	t.parts[slot] = tablePart{}
	t.used--
	t.resizeParts()
}

// pickFewestBlocks picks the candidate with the fewest blocks.
func (t *prefixTable) pickFewestBlocks(r *policy.Request, candidates []policy.Candidate, rng *rand.Rand) (index int) {
	return pickLowest(r, "blocks of any prompt sent to it before", len(candidates), rng, func(i int) float64 {
		return float64(t.blockCount(candidates[i].Slot))
	})
}

// sharedTable records the blocks that each backend was sent, in one LRU for all:
// a block is remembered with every backend that was sent it, or not at all.
type sharedTable struct {
	blockSets
	order useOrder
	lru   *lru
}

func newSharedTable(maxBlocks int, order useOrder) *sharedTable {
	t := &sharedTable{order: order}
	t.lru = newLRU(maxBlocks, t.removeFromAll)
	return t
}

// RecordSent implements Recorder for the policies that embed a sharedTable.
func (t *sharedTable) RecordSent(r *policy.Request, c *policy.Candidate) {
	t.addBlocks(c.Slot, r.Blocks, r.Now)
}

func (t *sharedTable) addBlocks(slot int, blocks []prompt.Block, now time.Time) {
	for _, b := range t.order(blocks) {
		t.insert(b, slot)
		t.lru.Add(b, now.UnixNano())
	}
}

// countPrefixMatchesSince is countPrefixMatches without the blocks whose last use was before since.
func (t *sharedTable) countPrefixMatchesSince(blocks []prompt.Block, candidates []policy.Candidate, since time.Time) (counts []int) {
	counts = t.countPrefixMatches(blocks, candidates)
	if longest := slices.Max(counts); longest > 0 {
		used := countUsedSince(t.lru, blocks[:longest], since)
		for i, n := range counts {
			counts[i] = min(n, used)
		}
	}
	return counts
}

// ForgetBackend implements Forgetter for the policies that embed a sharedTable. Blocks
// that no backend has any more stay in the LRU until they are the oldest.
func (t *sharedTable) ForgetBackend(slot int) {
	if slot/64 >= len(t.sets) {
		return
	}
	for b := range t.sets[slot/64] {
		t.remove(b, slot)
	}
}

// timer measures the time between what is done periodically. The zero value is one that was not started.
type timer struct{ start time.Time }

// restartIfExpired starts the timer if it was not, restarts it if the interval has passed, and reports whether it has.
func (t *timer) restartIfExpired(now time.Time, interval time.Duration) (expired bool) {
	if expired = !t.start.IsZero() && now.Sub(t.start) >= interval; expired || t.start.IsZero() {
		t.start = now
	}
	return expired
}

const (
	sglangTreeTokens   = 67_108_864 / 4 // of one backend
	sglangTreeInterval = 120 * time.Second
)

// sglangTree is the radix tree of sglang-router, vllm-router and SMG. It has no
// limit between its periodic truncations.
type sglangTree struct {
	prefixTable
	truncation timer
}

func newSGLangTree(maxBlocks int) *sglangTree {
	return &sglangTree{prefixTable: *newPrefixTable(maxBlocks, tailFirst)}
}

// RecordSent implements Recorder for the policies that embed a sglangTree. It truncates
// the tree when that is due.
func (t *sglangTree) RecordSent(r *policy.Request, c *policy.Candidate) {
	t.addBlocks(c.Slot, r.Blocks, r.Now)
	if t.truncation.restartIfExpired(r.Now, sglangTreeInterval) {
		t.evictDownTo(toBlocks(r, sglangTreeTokens))
	}
}

// Bounds of the endpoint picker's table, in tokens: its blocks have 64.
const (
	maxEPPTableTokens  = 31_250 * 64 // of one backend whose cache size is unknown
	maxEPPPromptTokens = 2_048 * 64  // of a prompt that are matched
)

// eppTable is the prefix table of the endpoint picker (EPP) of the Gateway API
// and of llm-d. A block counts whether or not those before it are there: the
// heads of prefixes are evicted first, and what is left still counts. Nothing is
// ever corrected.
type eppTable struct{ prefixTable }

func newEPPTable(maxBlocks int) eppTable { return eppTable{*newPrefixTable(maxBlocks, headFirst)} }

// countMatches returns how many blocks of the prompt each candidate is credited with, and of how many: at least
// one. The result is valid until the next call.
func (t *eppTable) countMatches(r *policy.Request, candidates []policy.Candidate) (counts []int, of float64) {
	blocks := r.Blocks[:min(len(r.Blocks), toBlocks(r, maxEPPPromptTokens))]
	return t.countScatteredMatches(blocks, candidates), float64(max(1, len(blocks)))
}

// RecordSent implements Recorder for the policies that embed an eppTable.
func (t *eppTable) RecordSent(r *policy.Request, c *policy.Candidate) {
	tokens := c.CacheTokens
	if tokens <= 0 {
		tokens = maxEPPTableTokens
	}
	t.limitBlocks(c.Slot, toBlocks(r, tokens))
	t.addBlocks(c.Slot, r.Blocks[:min(len(r.Blocks), toBlocks(r, maxEPPPromptTokens))], r.Now)
}
