package index

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"warmroute/router/prompt"
)

// chain makes the blocks of a prompt that is written as a string, one byte a
// block, so that "abc" and "abd" share two.
func chain(s string) []prompt.Block {
	var out []prompt.Block
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
		out = append(out, prompt.Block(h))
	}
	return out
}

func depths(x *Index, s string) []int {
	d := make([]int, len(x.held))
	x.Match(chain(s), d)
	return d
}

func add(x *Index, slot int, s string) Placement {
	return x.Add(slot, chain(s), depths(x, s)[slot])
}

func fleet(slots, capacity int) *Index {
	x := New(slots, 1<<30)
	for i := range slots {
		x.SetCapacity(i, capacity)
	}
	return x
}

func TestMatchCountsLeadingBlocksOfEveryBackend(t *testing.T) {
	x := fleet(4, 100)
	add(x, 0, "abcdef")
	add(x, 1, "abcx")
	add(x, 2, "q")
	f := func(s string, want ...int) {
		t.Helper()
		if got := depths(x, s); !slices.Equal(got, want) {
			t.Errorf("%q: got %v, want %v", s, got, want)
		}
	}
	f("abcdef", 6, 3, 0, 0)
	f("abcdefgh", 6, 3, 0, 0)
	f("abcxyz", 3, 4, 0, 0)
	f("ab", 2, 2, 0, 0)
	f("q", 0, 0, 1, 0)
	f("zzz", 0, 0, 0, 0)
	f("", 0, 0, 0, 0)
}

func TestMoreThan64Backends(t *testing.T) {
	x := fleet(150, 100)
	for slot := range 150 {
		add(x, slot, "abcdefghij"[:slot%11])
	}
	got := depths(x, "abcdefghijk")
	for slot, d := range got {
		if d != slot%11 {
			t.Errorf("backend %d: got %d leading blocks, want %d", slot, d, slot%11)
		}
	}
}

func TestEvictionShortensTheOldestPrefixFromItsTail(t *testing.T) {
	x := fleet(1, 6)
	add(x, 0, "abcd")
	add(x, 0, "wx")
	add(x, 0, "m")
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: got %d, want %d", s, got, want)
		}
	}
	f("abcd", 3)
	f("wx", 2)
	add(x, 0, "abc") // used again: now "wx" is the oldest
	add(x, 0, "no")
	f("abc", 3)
	f("wx", 0)
	if got := x.Evictions(0); got != 3 {
		t.Errorf("got %d evictions, want 3", got)
	}
}

func TestAPromptLongerThanTheCacheKeepsItsHead(t *testing.T) {
	x := fleet(1, 3)
	add(x, 0, "zz")
	add(x, 0, "abcdef")
	if got := depths(x, "abcdef")[0]; got != 3 {
		t.Errorf("got %d leading blocks, want 3", got)
	}
}

func TestTakeBackLeavesWhatOthersStandOn(t *testing.T) {
	x := fleet(1, 100)
	add(x, 0, "ab")
	failed := add(x, 0, "abcdef")
	add(x, 0, "abcx")
	x.TakeBack(failed, chain("abcdef"), 0)
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: got %d, want %d", s, got, want)
		}
	}
	f("abcdef", 3) // "c" stays: "abcx" stands on it
	f("abcx", 4)
	f("ab", 2)
}

func TestTakeBackKeepsWhatTheEngineReached(t *testing.T) {
	x := fleet(1, 100)
	left := add(x, 0, "abcdef")
	x.TakeBack(left, chain("abcdef"), 4)
	if got := depths(x, "abcdef")[0]; got != 4 {
		t.Errorf("got %d, want 4", got)
	}
}

func TestDropForgetsOneBackendAlone(t *testing.T) {
	x := fleet(2, 100)
	add(x, 0, "abc")
	add(x, 1, "ab")
	x.Drop(0)
	if got := depths(x, "abc"); !slices.Equal(got, []int{0, 2}) {
		t.Errorf("got %v, want [0 2]", got)
	}
	add(x, 0, "abc")
	if got := depths(x, "abc"); !slices.Equal(got, []int{3, 2}) {
		t.Errorf("after adding again: got %v, want [3 2]", got)
	}
}

func TestCapacitiesShareTheByteBound(t *testing.T) {
	x := New(2, 100*entryBytes)
	x.SetCapacity(0, 300)
	x.SetCapacity(1, 100)
	if a, b := x.Capacity(0), x.Capacity(1); a != 75 || b != 25 {
		t.Errorf("got capacities %d and %d, want 75 and 25", a, b)
	}
}

// naive is the same index written for obviousness: per backend a list of held
// blocks, newest last.
type naive struct{ order []prompt.Block }

func (n *naive) use(blocks []prompt.Block, capacity int) {
	blocks = blocks[:min(len(blocks), capacity)]
	n.order = slices.DeleteFunc(n.order, func(b prompt.Block) bool { return slices.Contains(blocks, b) })
	for _, b := range slices.Backward(blocks) {
		n.order = append(n.order, b)
	}
	n.order = n.order[max(0, len(n.order)-capacity):]
}

func (n *naive) leading(blocks []prompt.Block) int {
	for i, b := range blocks {
		if !slices.Contains(n.order, b) {
			return i
		}
	}
	return len(blocks)
}

// Random inserts, take-backs, drops and shrinking capacities, against the naive
// index, with a look for holes after every step.
func TestNoHolesEver(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 1))
		slots := 1 + rng.IntN(70)
		x, plain := fleet(slots, 40), make([]naive, slots)
		capacity := 40
		preds := map[prompt.Block]prompt.Block{}
		type open struct {
			p      Placement
			prompt string
		}
		var failed []open
		for step := range 400 {
			s := make([]byte, 1+rng.IntN(12))
			for i := range s {
				s[i] = "ab"[rng.IntN(2)]
			}
			blocks := chain(string(s))
			for i := 1; i < len(blocks); i++ {
				preds[blocks[i]] = blocks[i-1]
			}
			slot := []int{0, slots / 2, slots - 1}[rng.IntN(3)] // few, so that they meet
			switch op := rng.IntN(10); {
			case op < 7:
				p := add(x, slot, string(s))
				plain[slot].use(blocks, capacity)
				if rng.IntN(4) == 0 {
					failed = append(failed, open{p, string(s)})
				}
			case op < 9 && len(failed) > 0:
				f := failed[0]
				failed = failed[1:]
				before := x.Len(f.p.slot)
				x.TakeBack(f.p, chain(f.prompt), rng.IntN(len(f.prompt)+1))
				if x.Len(f.p.slot) > before {
					t.Fatal("TakeBack added blocks")
				}
				mirror(x, f.p.slot, &plain[f.p.slot])
			case rng.IntN(20) == 0:
				x.Drop(slot)
				plain[slot].order = nil
			case rng.IntN(20) == 0:
				capacity = 5 + rng.IntN(40)
				for i := range slots {
					x.SetCapacity(i, capacity)
					o := plain[i].order
					plain[i].order = o[max(0, len(o)-capacity):]
				}
			}
			check(t, x, preds, fmt.Sprintf("seed %d step %d", seed, step))
			for i, d := range depths(x, string(s)) {
				if want := plain[i].leading(blocks); d != want {
					t.Fatalf("seed %d step %d: backend %d: Match says %d, the naive index %d", seed, step, i, d, want)
				}
			}
		}
	}
}

// mirror makes the naive index forget what a TakeBack removed.
func mirror(x *Index, slot int, n *naive) {
	n.order = slices.DeleteFunc(n.order, func(b prompt.Block) bool {
		_, ok := x.held[slot].find[b]
		return !ok
	})
}

func check(t *testing.T, x *Index, preds map[prompt.Block]prompt.Block, when string) {
	t.Helper()
	total := 0
	for slot, h := range x.held {
		if len(h.find) > max(h.capacity, h.used) {
			t.Fatalf("%s: backend %d holds %d blocks of at most %d", when, slot, len(h.find), h.capacity)
		}
		total += len(h.find)
		listed := 0
		for at := h.oldest(); at != 0; at = h.entries[at].newer {
			listed++
		}
		if listed != len(h.find) {
			t.Fatalf("%s: backend %d lists %d blocks and finds %d", when, slot, listed, len(h.find))
		}
		s, bit := x.bit(slot)
		for b := range h.find {
			if s[b]&bit == 0 {
				t.Fatalf("%s: backend %d holds a block that its set does not show", when, slot)
			}
			if p, ok := preds[b]; ok {
				if _, ok := h.find[p]; !ok {
					t.Fatalf("%s: backend %d has a hole: a block without its predecessor", when, slot)
				}
			}
		}
	}
	shown := 0
	for _, s := range x.sets {
		for _, m := range s {
			for ; m != 0; m &= m - 1 {
				shown++
			}
		}
	}
	if shown != total || x.entries != total {
		t.Fatalf("%s: %d blocks held, %d shown in sets, %d counted", when, total, shown, x.entries)
	}
}

// The bound is in bytes, so the bytes are looked at: the heap grown by a full
// index whose backends share nothing, which is the worst case.
func TestBytesBoundHolds(t *testing.T) {
	const bound = 32 << 20
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := New(8, bound)
	for slot := range 8 {
		x.SetCapacity(slot, 1<<30)
	}
	b := make([]prompt.Block, 1000)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		for i := range b {
			b[i] = prompt.Block(rng.Uint64())
		}
		x.Add(rng.IntN(8), b, 0)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	grown := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d blocks: %d bytes of heap, %d a block; Bytes says %d", x.entries, grown, grown/int64(x.entries), x.Bytes())
	if x.Bytes() > bound || grown > bound {
		t.Errorf("the index takes %d bytes (it says %d), more than its bound of %d", grown, x.Bytes(), bound)
	}
	runtime.KeepAlive(x)
}

func BenchmarkMatchAndAddWarm(b *testing.B) {
	for _, slots := range []int{8, 64} {
		for _, n := range []int{128, 2048} {
			b.Run(fmt.Sprintf("backends=%d/blocks=%d", slots, n), func(b *testing.B) {
				x := fleet(slots, 1<<16)
				blocks := make([]prompt.Block, n)
				for i := range blocks {
					blocks[i] = prompt.Block(rand.Uint64())
				}
				depth := make([]int, slots)
				for slot := range slots {
					x.Match(blocks, depth)
					x.Add(slot, blocks[:n-slot*n/slots/2], 0)
				}
				b.ReportAllocs()
				for b.Loop() {
					x.Match(blocks, depth)
					x.Add(0, blocks, depth[0])
				}
			})
		}
	}
}
