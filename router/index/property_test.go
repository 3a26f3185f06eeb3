package index

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"warmroute/prompt"
)

// naive is a simple implementation of one backend's cache.
type naive struct {
	capacity int
	idle     []prompt.Block // newest last
	flights  []*flight      // in the order of their Adds
}

// flight is a request that has not ended.
type flight struct {
	p      *Pin
	slot   int
	text   string
	blocks []prompt.Block // of text, as many as the capacity took
	over   bool           // its backend was dropped
}

func (n *naive) used(b prompt.Block) bool {
	return slices.ContainsFunc(n.flights, func(f *flight) bool { return slices.Contains(f.blocks, b) })
}

func (n *naive) holds(b prompt.Block) bool { return n.used(b) || slices.Contains(n.idle, b) }

func (n *naive) inUse() int {
	distinct := map[prompt.Block]bool{}
	for _, f := range n.flights {
		for _, b := range f.blocks {
			distinct[b] = true
		}
	}
	return len(distinct)
}

func (n *naive) begin(f *flight) {
	f.blocks = f.blocks[:min(len(f.blocks), n.capacity)]
	n.idle = slices.DeleteFunc(n.idle, func(b prompt.Block) bool { return slices.Contains(f.blocks, b) })
	n.flights = append(n.flights, f)
	n.fit(f)
}

// fit evicts until all is within the capacity; keep's blocks stay.
func (n *naive) fit(keep *flight) {
	for n.inUse()+len(n.idle) > n.capacity {
		if len(n.idle) > 0 {
			n.idle = n.idle[1:]
			continue
		}
		n.leave(n.flights[slices.IndexFunc(n.flights, func(f *flight) bool { return f != keep })])
	}
}

func (n *naive) leave(f *flight) {
	n.flights = slices.DeleteFunc(n.flights, func(g *flight) bool { return g == f })
	for _, b := range slices.Backward(f.blocks) {
		if !n.used(b) {
			n.idle = append(n.idle, b)
		}
	}
}

func (n *naive) end(f *flight, reply []prompt.Block) {
	if len(f.blocks) == 0 {
		return
	}
	whole := len(f.blocks) == len(f.text)
	if !slices.Contains(n.flights, f) { // unpinned early
		if !n.holds(f.blocks[len(f.blocks)-1]) {
			return
		}
		n.begin(f)
	}
	if whole {
		reply = reply[:min(len(reply), max(0, n.capacity-n.inUse()))]
		f.blocks = append(slices.Clone(f.blocks), reply...)
		n.idle = slices.DeleteFunc(n.idle, func(b prompt.Block) bool { return slices.Contains(reply, b) })
		n.fit(f)
	}
	n.leave(f)
}

func (n *naive) leading(blocks []prompt.Block) int {
	for i, b := range blocks {
		if !n.holds(b) {
			return i
		}
	}
	return len(blocks)
}

func (n *naive) leadingInUse(blocks []prompt.Block) int {
	for i, b := range blocks {
		if !n.used(b) {
			return i
		}
	}
	return len(blocks)
}

// Random requests with every kind of end, drops and smaller capacities, compared with
// the naive index after every step.
func TestAgainstNaiveIndex(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 1))
		slots := 1 + rng.IntN(70)
		capacity := []int{40, 40, 12}[rng.IntN(3)] // the last one is less than what is in flight
		x, plain := fleet(slots, capacity), make([]naive, slots)
		for i := range plain {
			plain[i].capacity = capacity
		}
		preds := map[prompt.Block]prompt.Block{}
		text := func(atMost int) string {
			s := make([]byte, 1+rng.IntN(atMost))
			for i := range s {
				s[i] = "ab"[rng.IntN(2)]
			}
			return string(s)
		}
		blocksOf := func(s string) []prompt.Block {
			blocks := chain(s)
			for i := 1; i < len(blocks); i++ {
				preds[blocks[i]] = blocks[i-1]
			}
			return blocks
		}
		var open []*flight
		for step := range 500 {
			s := text(12)
			slot := []int{0, slots / 2, slots - 1}[rng.IntN(3)] // few, so that they meet
			switch op := rng.IntN(20); {
			case op < 9:
				f := &flight{p: add(x, slot, s), slot: slot, text: s, blocks: blocksOf(s)}
				plain[slot].begin(f)
				open = append(open, f)
			case op < 18 && len(open) > 0:
				i := rng.IntN(len(open))
				f := open[i]
				open = slices.Delete(open, i, i+1)
				if op < 16 {
					reply := blocksOf(f.text + text(6))[len(f.text):]
					x.Release(f.p, reply)
					if !f.over {
						plain[f.slot].end(f, reply)
					}
					break
				}
				before := x.Len(f.slot)
				x.Rollback(f.p, chain(f.text), rng.IntN(len(f.text)+1))
				if x.Len(f.slot) > before {
					t.Fatal("Rollback added blocks")
				}
				if n := &plain[f.slot]; !f.over {
					if slices.Contains(n.flights, f) {
						n.leave(f)
					}
					n.idle = slices.DeleteFunc(n.idle, func(b prompt.Block) bool {
						return x.findEntry(f.slot, b) == 0
					})
				}
			case op == 18 && rng.IntN(5) == 0:
				x.DropCache(slot)
				plain[slot] = naive{capacity: capacity}
				for _, f := range open {
					f.over = f.over || f.slot == slot
				}
			case op == 18:
				x.SweepAndEvict(1 + rng.IntN(8))
			case rng.IntN(10) == 0:
				capacity = 5 + rng.IntN(40)
				for i := range slots {
					x.SetRequestedCapacity(i, capacity)
					plain[i].capacity = capacity
					plain[i].fit(nil)
				}
				for more := true; more; {
					more = x.SweepAndEvict(3)
					check(t, x, preds, "shrinking")
				}
			}
			when := fmt.Sprintf("seed %d step %d", seed, step)
			check(t, x, preds, when)
			blocks := chain(s)
			for i, d := range depths(x, s) {
				if want := plain[i].leading(blocks); d != want {
					t.Fatalf("%s: backend %d: Match %d, naive index %d", when, i, d, want)
				}
				if got, want := x.caches[i].pinned, plain[i].inUse(); got != want {
					t.Fatalf("%s: backend %d: %d pinned, naive index %d", when, i, got, want)
				}
				if got, want := x.CountUnpinned(i, blocks[:d]), d-plain[i].leadingInUse(blocks[:d]); got != want {
					t.Fatalf("%s: backend %d: %d unpinned, naive index %d", when, i, got, want)
				}
				if n := x.Len(i); n > plain[i].capacity {
					t.Fatalf("%s: backend %d holds %d blocks of at most %d", when, i, n, plain[i].capacity)
				}
			}
		}
		for x.SweepAndEvict(5) {
		}
		check(t, x, preds, "all swept")
		for _, f := range open {
			x.Release(f.p, nil)
		}
		for i := range slots {
			if n := x.CountPinned(i); n != 0 {
				t.Fatalf("seed %d: backend %d has %d blocks in use at the end", seed, i, n)
			}
		}
	}
}

func check(t *testing.T, x *Index, preds map[prompt.Block]prompt.Block, when string) {
	t.Helper()
	total := 0
	for slot, h := range x.caches {
		total += h.size
		listed := h.pinned
		for at := h.oldest(); at != 0; at = h.entries[at].newer {
			if h.entries[at].pins != 0 {
				t.Fatalf("%s: backend %d would evict a block in use", when, slot)
			}
			listed++
		}
		reported, confirmedBlocks, successors := 0, 0, make([]int32, len(h.entries))
		reportedSuccessors := make([]int32, len(h.entries))
		for _, e := range h.entries[1:] {
			if e.stamp == 0 {
				continue
			}
			successors[e.parent]++
			if e.report == confirmed {
				confirmedBlocks++
			}
			if e.report != unreported {
				reported++
				reportedSuccessors[e.parent]++
				if p := h.entries[e.parent]; e.parent != 0 && p.report == unreported {
					t.Fatalf("%s: backend %d has a reported block after one that is not", when, slot)
				}
				if e.pins == 0 {
					listed++
				}
			}
		}
		if confirmedBlocks != h.confirmed {
			t.Fatalf("%s: backend %d has %d confirmed blocks and counts %d", when, slot, confirmedBlocks, h.confirmed)
		}
		if reported != h.reported {
			t.Fatalf("%s: backend %d has %d reported blocks and counts %d", when, slot, reported, h.reported)
		}
		for at, e := range h.entries[1:] {
			if e.stamp != 0 && (e.successors != successors[at+1] || e.reported != reportedSuccessors[at+1]) {
				t.Fatalf("%s: backend %d: a block has %d successors, %d of them reported, and counts %d and %d",
					when, slot, successors[at+1], reportedSuccessors[at+1], e.successors, e.reported)
			}
			if e.report == forgotten && e.reported == 0 {
				t.Fatalf("%s: backend %d: a forgotten block has no reported successor", when, slot)
			}
		}
		if listed != h.size {
			t.Fatalf("%s: backend %d has %d blocks in use or in its list and counts %d", when, slot, listed, h.size)
		}
		s, member := x.holderTableOf(slot)
		for at, e := range h.entries {
			if e.stamp == 0 {
				continue
			}
			if s.holderBits(e.block)&(1<<member) == 0 || x.findEntry(slot, e.block) != int32(at) {
				t.Fatalf("%s: backend %d holds a block that its set does not show", when, slot)
			}
			if p, ok := preds[e.block]; ok && x.findEntry(slot, p) == 0 {
				t.Fatalf("%s: backend %d has a hole: a block without its predecessor", when, slot)
			}
		}
		for b, at := range all(&h.shared) {
			if !h.holdsAt(at, b) {
				t.Fatalf("%s: backend %d has a place for a block that it does not hold", when, slot)
			}
		}
	}
	shown, unswept := 0, false
	for g, s := range x.holders {
		unswept = unswept || x.stale[g] != 0
		for _, word := range all(&s.table) {
			for m := membersOf(word); m != 0; m &= m - 1 {
				shown++
			}
		}
	}
	if !unswept && (shown != total || x.entries != total) {
		t.Fatalf("%s: %d blocks held, %d shown in sets, %d counted", when, total, shown, x.entries)
	}
	if shown < total || x.entries < total {
		t.Fatalf("%s: %d blocks held, only %d shown in sets, %d counted", when, total, shown, x.entries)
	}
}
