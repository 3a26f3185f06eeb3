package index

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"warmroute/prompt"
)

// chain returns one chained block for each byte of s: "abc" and "abd" share two.
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
	d := make([]int, len(x.caches))
	x.Match(chain(s), d)
	return d
}

func add(x *Index, slot int, s string) *Pin {
	var p Pin
	x.Add(&p, slot, chain(s), depths(x, s)[slot])
	return &p
}

// use is a request from its beginning to its end.
func use(x *Index, slot int, s string) { x.Release(add(x, slot, s), nil) }

func fleet(slots, capacity int) *Index {
	x := New(slots, 1<<30)
	for i := range slots {
		x.SetRequestedCapacity(i, capacity)
	}
	return x
}

func TestMatch(t *testing.T) {
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

func TestMatchBeyond64Backends(t *testing.T) {
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

func TestEvictionOrder(t *testing.T) {
	x := fleet(1, 6)
	use(x, 0, "abcd")
	use(x, 0, "wx")
	use(x, 0, "m")
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: got %d, want %d", s, got, want)
		}
	}
	f("abcd", 3)
	f("wx", 2)
	use(x, 0, "abc") // used again: now "wx" is the oldest
	use(x, 0, "no")
	f("abc", 3)
	f("wx", 0)
	if got := x.Evictions(0); got != 3 {
		t.Errorf("got %d evictions, want 3", got)
	}
}

func TestPromptBeyondCapacity(t *testing.T) {
	x := fleet(1, 3)
	use(x, 0, "zz")
	use(x, 0, "abcdef")
	if got := depths(x, "abcdef")[0]; got != 3 {
		t.Errorf("got %d leading blocks, want 3", got)
	}
}

func TestRollbackKeepsSharedBlocks(t *testing.T) {
	x := fleet(1, 100)
	add(x, 0, "ab")
	failed := add(x, 0, "abcdef")
	add(x, 0, "abcx")
	x.Rollback(failed, chain("abcdef"), 0)
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: got %d, want %d", s, got, want)
		}
	}
	f("abcdef", 3) // "c" stays: "abcx" follows it
	f("abcx", 4)
	f("ab", 2)
}

func TestRollbackKeepsComputedBlocks(t *testing.T) {
	x := fleet(1, 100)
	left := add(x, 0, "abcdef")
	x.Rollback(left, chain("abcdef"), 4)
	if got := depths(x, "abcdef")[0]; got != 4 {
		t.Errorf("got %d, want 4", got)
	}
}

func TestDrop(t *testing.T) {
	x := fleet(2, 100)
	add(x, 0, "abc")
	add(x, 1, "ab")
	x.DropCache(0)
	if got := depths(x, "abc"); !slices.Equal(got, []int{0, 2}) {
		t.Errorf("got %v, want [0 2]", got)
	}
	add(x, 0, "abc")
	if got := depths(x, "abc"); !slices.Equal(got, []int{3, 2}) {
		t.Errorf("after adding again: got %v, want [3 2]", got)
	}
}

func TestCapacityShares(t *testing.T) {
	for _, c := range []struct{ want, got []int }{
		{[]int{50, 40, 10}, []int{50, 40, 10}},
		{[]int{50, 50, 50}, []int{33, 33, 33}},
		{[]int{1 << 40, 20, 30}, []int{50, 20, 30}}, // one that reports nonsense
		{[]int{80, 90, 20}, []int{40, 40, 20}},
		{[]int{0, 200, 0}, []int{0, 100, 0}},
	} {
		x := New(3, 100*entryBytes)
		for slot, n := range c.want {
			x.SetRequestedCapacity(slot, n)
		}
		for slot, n := range c.got {
			if x.Capacity(slot) != n {
				t.Errorf("requested %v: backend %d gets %d, want %d", c.want, slot, x.Capacity(slot), n)
			}
		}
	}
}

// Measures the heap grown by a full index whose backends share nothing, and by one
// in which each block has two holders, the most expensive number.
func TestMemoryBound(t *testing.T) {
	for _, holders := range []int{1, 2} {
		const bound = 32 << 20
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x := New(8, bound)
		for slot := range 8 {
			x.SetRequestedCapacity(slot, 1<<30)
		}
		b := make([]prompt.Block, 1000)
		rng := rand.New(rand.NewPCG(1, 2))
		for range 1000 / holders {
			for i := range b {
				b[i] = prompt.Block(rng.Uint64())
			}
			first := rng.IntN(8)
			for slot := range holders {
				var p Pin
				x.Add(&p, (first+slot)%8, b, 0)
				x.Release(&p, nil)
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		grown := int64(after.HeapAlloc) - int64(before.HeapAlloc)
		t.Logf("%d blocks: %d bytes of heap, %d a block; Bytes returns %d", x.entries, grown, grown/int64(x.entries), x.Bytes())
		if x.Bytes() > bound || grown > bound {
			t.Errorf("%d holders: the index takes %d bytes (Bytes returns %d), more than its bound of %d", holders, grown, x.Bytes(), bound)
		}
		runtime.KeepAlive(x)
	}
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
					var p Pin
					x.Add(&p, slot, blocks[:n-slot*n/slots/2], 0)
					x.Release(&p, nil)
				}
				var p Pin
				b.ReportAllocs()
				for b.Loop() {
					x.Match(blocks, depth)
					x.Add(&p, 0, blocks, depth[0])
					x.Release(&p, nil)
				}
			})
		}
	}
}

func TestPinnedCountsBlocksOnce(t *testing.T) {
	x := fleet(1, 100)
	f := func(name string, want int) {
		t.Helper()
		if got := x.CountPinned(0); got != want {
			t.Errorf("%s: %d blocks in use, want %d", name, got, want)
		}
	}
	first, second, third := add(x, 0, "abcd"), add(x, 0, "abxy"), add(x, 0, "ab")
	f("abcd, abxy and ab share two", 6)
	if got := x.CountUnpinned(0, chain("abcd")); got != 0 {
		t.Errorf("%d blocks of abcd idle", got)
	}
	x.Release(first, nil)
	f("without abcd", 4)
	if got := x.CountUnpinned(0, chain("abcd")); got != 2 {
		t.Errorf("%d blocks of abcd idle, want 2", got)
	}
	x.Release(second, nil)
	f("ab alone", 2)
	x.Rollback(third, chain("ab"), 0)
	f("none", 0)
}

// A backend that was sent more than it can hold computes it in the order sent.
func TestPinnedBlocksAreEvictedLast(t *testing.T) {
	x := fleet(1, 8)
	early := add(x, 0, "abc")
	use(x, 0, "uvw")
	late := add(x, 0, "klm")
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: %d leading blocks, want %d", s, got, want)
		}
	}
	f("abc", 3)
	f("uvw", 2)
	last := add(x, 0, "qrst")
	f("uvw", 0)
	f("abc", 1)
	f("klm", 3)
	if got := x.CountPinned(0); got != 10 {
		t.Errorf("%d blocks in use of three requests with 10", got)
	}
	for _, p := range []*Pin{early, late, last} {
		x.Release(p, nil)
	}
	if got := x.CountPinned(0); got != 0 {
		t.Errorf("%d blocks in use at the end", got)
	}
}

func TestReleaseOrder(t *testing.T) {
	x := fleet(1, 6)
	first := add(x, 0, "abc")
	use(x, 0, "xyz")
	x.Release(first, nil)
	use(x, 0, "mn")
	if a, b := depths(x, "abc")[0], depths(x, "xyz")[0]; a != 3 || b != 1 {
		t.Errorf("%d blocks of the prompt that ended last and %d of the other, want 3 and 1", a, b)
	}
}

func TestReleaseWithReply(t *testing.T) {
	x := fleet(1, 8)
	turn := func(prompt, reply string) {
		x.Release(add(x, 0, prompt), chain(prompt + reply)[len(prompt):])
	}
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: %d leading blocks, want %d", s, got, want)
		}
	}
	turn("ab", "cd")
	f("abcdef", 4)
	turn("ab", "cde") // the same answer, and more
	f("abcdef", 5)
	use(x, 0, "uvwx")
	f("abcdef", 4) // evicted from the reply's end
	turn("abcd", "")
	turn("abcd", "123456789")
	f("abcd123456789", 8) // as much as there is room for
	check(t, x, nil, "at the end")
}

func TestSweep(t *testing.T) {
	x := fleet(2, 3000)
	long := make([]byte, 2000)
	for i := range long {
		long[i] = byte('a' + i%20)
	}
	use(x, 0, string(long))
	use(x, 1, string(long[:300]))
	x.DropCache(0)
	use(x, 0, string(long[:7]))
	pieces := 1
	for ; x.SweepAndEvict(50); pieces++ {
		if got := depths(x, string(long)); !slices.Equal(got, []int{7, 300}) {
			t.Fatalf("after %d pieces: got %v, want [7 300]", pieces, got)
		}
	}
	if pieces < 20 {
		t.Errorf("2,000 blocks were swept in %d pieces of 50", pieces)
	}
	check(t, x, nil, "swept")
}

func TestClear(t *testing.T) {
	x := fleet(2, 4)
	open := add(x, 1, "abc")
	use(x, 1, "vwxyz") // evicts
	use(x, 0, "ab")
	if x.Evictions(1) == 0 {
		t.Fatal("nothing was evicted")
	}
	x.ResetSlot(1)
	if x.Len(1) != 0 || x.Capacity(1) != 0 || x.Evictions(1) != 0 || x.CountPinned(1) != 0 {
		t.Errorf("%d blocks of %d, %d evictions, %d in use", x.Len(1), x.Capacity(1), x.Evictions(1), x.CountPinned(1))
	}
	if got := depths(x, "abc"); !slices.Equal(got, []int{2, 0}) {
		t.Errorf("got %v, want [2 0]", got)
	}
	x.SetRequestedCapacity(1, 4) // the next owner's
	add(x, 1, "ax")
	x.Release(open, chain("abcd"))
	if got := depths(x, "axb"); !slices.Equal(got, []int{1, 2}) || x.Len(1) != 2 {
		t.Errorf("after the release of what was there before: %v, %d blocks", got, x.Len(1))
	}
	for x.SweepAndEvict(3) {
	}
	if want := int64(4 * entryBytes); x.Bytes() != want {
		t.Errorf("%d bytes, want %d", x.Bytes(), want)
	}
}

func TestClearFreesShare(t *testing.T) {
	x := New(2, 100*entryBytes)
	x.SetRequestedCapacity(0, 80)
	x.SetRequestedCapacity(1, 80)
	x.ResetSlot(1)
	if got := x.Capacity(0); got != 80 {
		t.Errorf("capacity %d, want all that was asked for", got)
	}
}

func TestGrow(t *testing.T) {
	x := fleet(1, 100)
	open := add(x, 0, "abc")
	version := x.Version()
	x.Grow(130)
	if x.Version() == version {
		t.Error("depths read before count for the slots that came since")
	}
	for slot := 1; slot < 130; slot++ {
		x.SetRequestedCapacity(slot, 100)
		add(x, slot, "abcdef"[:slot%7])
	}
	for slot, d := range depths(x, "abcdefg") {
		if want := slot % 7; slot > 0 && d != want || slot == 0 && d != 3 {
			t.Errorf("slot %d: %d", slot, d)
		}
	}
	x.Release(open, nil)
}

// Blocks that were used since stay, with those before them, and so do those of requests in flight.
func TestDropUnusedSince(t *testing.T) {
	x := fleet(2, 100)
	use(x, 0, "abcdef")
	use(x, 0, "xyz")
	use(x, 1, "abcdef")
	inFlight := add(x, 0, "mnop")
	since := add(x, 0, "abcq")
	x.Release(since, nil)
	x.DropUnusedSince(0, since.Use)
	for text, want := range map[string][]int{"abcdef": {3, 6}, "abcq": {4, 3}, "xyz": {0, 0}, "mnop": {4, 0}} {
		if got := depths(x, text); !slices.Equal(got, want) {
			t.Errorf("%s: %v blocks are held, want %v", text, got, want)
		}
	}
	if n := x.Len(0); n != 8 || x.Evictions(0) != 0 {
		t.Errorf("%d blocks are held and %d evicted", n, x.Evictions(0))
	}
	x.Release(inFlight, nil)
	x.DropUnusedSince(0, x.Uses(0)+1)
	if n := x.Len(0); n != 0 {
		t.Errorf("%d blocks are left", n)
	}
}

func TestReusedSpans(t *testing.T) {
	x := fleet(1, 100)
	use(x, 0, "system+conversation")
	use(x, 0, "system+other")
	first, second := x.Uses(0)-2, x.Uses(0) // the last uses, which are the ends
	p := add(x, 0, "system+conversation, later")
	want := [MaxReusedSpans]ReusedSpan{{Blocks: len("conversation"), LastUse: first}, {Blocks: len("system+"), LastUse: second}}
	for i := range want {
		if got := p.Reused[i]; got.Blocks != want[i].Blocks || got.LastUse != want[i].LastUse {
			t.Errorf("span %d: %+v, want %+v", i, got, want[i])
		}
	}
	if p.Use <= second {
		t.Errorf("use %d after %d", p.Use, second)
	}
	if again := add(x, 0, "system+conversation"); again.Reused[0] != (ReusedSpan{}) {
		t.Errorf("blocks of a request in flight: %+v", again.Reused)
	}
}

func TestCountUnusedSince(t *testing.T) {
	x := fleet(2, 100)
	use(x, 0, "abcdef")
	use(x, 0, "abcx")
	since := x.Uses(0) + 1
	count := func(text string) int {
		t.Helper()
		return x.CountUnusedSince(0, chain(text), since)
	}
	if got := count("abcdef"); got != 6 {
		t.Errorf("%d of 6 blocks were not used", got)
	}
	use(x, 0, "abcdy")
	inFlight := add(x, 0, "abcx")
	for text, want := range map[string]int{"abcdef": 2, "abcx": 0, "abc": 0, "": 0, "abcdy": 0} {
		if got := count(text); got != want {
			t.Errorf("%s: %d blocks were not used, want %d", text, got, want)
		}
	}
	x.Release(inFlight, nil)
	use(x, 0, "abcdef")
	if got := count("abcdef"); got != 0 {
		t.Errorf("%d blocks were not used", got)
	}
}

func TestUseAtDistance(t *testing.T) {
	x := fleet(1, 100)
	if use := x.UseAtDistance(0, 0); use != 0 {
		t.Errorf("an empty cache: use %d", use)
	}
	prompts := []string{"aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff", "gggg", "hhhh"}
	for _, s := range prompts {
		use(x, 0, s)
	}
	inFlight := add(x, 0, "aaaa")
	for _, distance := range []int{0, 4, 8, 10, 16, 24, 31, 32, 100} {
		since := x.UseAtDistance(0, distance)
		if got := x.CountUnusedSince(0, chain("aaaa"), since); got != 0 {
			t.Errorf("distance %d: %d blocks of a request in flight are beyond it", distance, got)
		}
		for i, s := range prompts[1:] {
			got, used := x.CountUnusedSince(0, chain(s), since), 4*(len(prompts)-i) // those of the request in flight too
			if used > distance+4 && got != 4 || used < distance-4 && got != 0 {
				t.Errorf("distance %d: %d blocks of %s are beyond it, after which %d were used", distance, got, s, used)
			}
		}
	}
	x.Release(inFlight, nil)
}
