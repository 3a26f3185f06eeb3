package index

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"warmroute/prompt"
)

// copyOut exports a backend's blocks, a few places at a time, calling between
// after each part, and brings them in Import's order as a snapshot does.
func copyOut(x *Index, slot, n int, between func()) []ImportedBlock {
	e := x.Export(slot)
	var all []ExportedBlock
	for more := true; more; between() {
		all, more = e.AppendNext(all, n)
	}
	places := make([]int, len(all))
	for i := range places {
		places[i] = i
	}
	slices.SortStableFunc(places, func(a, b int) int { return int(all[b].Used) - int(all[a].Used) })
	var out []ImportedBlock
	done := map[prompt.Block]bool{}
	var emit func(at int) bool
	emit = func(at int) bool {
		c := all[at]
		if c.Used == 0 {
			return false
		}
		if done[c.Block] {
			return true
		}
		if c.ParentPlace != 0 && (int(c.ParentPlace) >= len(all) || all[c.ParentPlace].Block != c.Parent || !emit(int(c.ParentPlace))) {
			return false
		}
		done[c.Block] = true
		out = append(out, ImportedBlock{c.Block, c.Parent, c.ParentPlace == 0, c.Checkpoint})
		return true
	}
	for _, at := range places {
		emit(at)
	}
	return out
}

func restore(x *Index, slot int, blocks []ImportedBlock, n int, between func()) int {
	i := x.Import(slot, len(blocks))
	taken := 0
	for part := range slices.Chunk(blocks, n) {
		k, more := i.Add(part)
		taken += k
		if !more {
			break
		}
		between()
	}
	return taken
}

func nothing() {}

func TestExportImport(t *testing.T) {
	x := fleet(3, 100)
	use(x, 1, "abcdef")
	use(x, 1, "abcxy")
	add(x, 1, "pq") // continues
	use(x, 2, "abc")
	y := fleet(3, 100)
	if n := restore(y, 1, copyOut(x, 1, 2, nothing), 2, nothing); n != 10 || y.Len(1) != 10 {
		t.Errorf("%d blocks taken, %d held, want 10", n, y.Len(1))
	}
	f := func(s string, want int) {
		t.Helper()
		if got := depths(y, s); got[1] != want || got[0]+got[2] != 0 {
			t.Errorf("%q: got %v, want %d on backend 1", s, got, want)
		}
	}
	f("abcdef", 6)
	f("abcxyz", 5)
	f("pq", 2)
	f("zz", 0)
}

func TestImportKeepsOrder(t *testing.T) {
	x := fleet(1, 100)
	for _, s := range []string{"aaaa", "bbbb", "cccc", "aaaa"} {
		use(x, 0, s)
	}
	y := fleet(1, 100)
	restore(y, 0, copyOut(x, 0, 3, nothing), 3, nothing)
	y.SetRequestedCapacity(0, 5)
	y.SweepAndEvict(100)
	if a, b, c := depths(y, "aaaa")[0], depths(y, "bbbb")[0], depths(y, "cccc")[0]; a != 4 || b != 0 || c != 1 {
		t.Errorf("of 5 places the three prompts have %d, %d and %d; want 4 for the latest, 1 for the one before", a, b, c)
	}
}

func TestImportCapacity(t *testing.T) {
	x := fleet(1, 100)
	use(x, 0, "abcdef")
	use(x, 0, "uvwxyz")
	y := fleet(1, 8)
	add(y, 0, "n") // what came meanwhile stays
	if n := restore(y, 0, copyOut(x, 0, 100, nothing), 4, nothing); n != 7 {
		t.Errorf("%d blocks taken, want 7", n)
	}
	for s, want := range map[string]int{"n": 1, "uvwxyz": 6, "abcdef": 1} {
		if got := depths(y, s)[0]; got != want {
			t.Errorf("%q: %d, want %d", s, got, want)
		}
	}
}

func TestRollbackKeepsImportedParents(t *testing.T) {
	x := fleet(1, 100)
	use(x, 0, "abcdef")
	blocks := copyOut(x, 0, 100, nothing)
	for _, live := range []int{0, 3} { // parts imported before the request comes
		y := fleet(1, 100)
		i := y.Import(0, len(blocks))
		i.Add(blocks[:live])
		p := add(y, 0, "abcdxx")
		i.Add(blocks[live:])
		y.Rollback(p, chain("abcdxx"), 0)
		// If "abcd" were removed, "ef" would have no predecessor.
		if got := depths(y, "abcdef")[0]; got != 6 {
			t.Errorf("after %d blocks: depth %d, want 6", live, got)
		}
		check(t, y, predecessors("abcdef", "abcdxx"), fmt.Sprintf("after %d blocks", live))
	}
}

func TestDropDuringExportAndImport(t *testing.T) {
	x := fleet(1, 100)
	add(x, 0, "abcdefgh")
	lost := false
	got := copyOut(x, 0, 3, func() {
		if !lost {
			lost = true
			x.DropCache(0)
			add(x, 0, "pq")
		}
	})
	if len(got) != 2 {
		t.Errorf("%d blocks exported, want the 2 that came after the loss", len(got))
	}
	y := fleet(1, 100)
	n := restore(y, 0, got, 1, func() { y.DropCache(0) })
	if n != 1 || y.Len(0) != 0 {
		t.Errorf("%d blocks taken and %d held after a loss, want 1 and 0", n, y.Len(0))
	}
}

// predecessors maps each block of these prompts to the one before it.
func predecessors(prompts ...string) map[prompt.Block]prompt.Block {
	before := map[prompt.Block]prompt.Block{}
	for _, s := range prompts {
		blocks := chain(s)
		for i := 1; i < len(blocks); i++ {
			before[blocks[i]] = blocks[i-1]
		}
	}
	return before
}

// Random traffic continues between the parts of an export and of an import.
func TestExportAndImportUnderTraffic(t *testing.T) {
	var prompts []string
	for i := range 256 {
		prompts = append(prompts, fmt.Sprintf("%08b", i))
	}
	preds := predecessors(prompts...)
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 0))
		x, y := fleet(2, 60), fleet(2, 40)
		traffic := func(x *Index) func() {
			type sent struct {
				*Pin
				blocks []prompt.Block
			}
			var open []sent
			return func() {
				for range rng.IntN(4) {
					s := prompts[rng.IntN(256)][:1+rng.IntN(8)]
					open = append(open, sent{add(x, 0, s), chain(s)})
				}
				for len(open) > rng.IntN(8) {
					if rng.IntN(3) == 0 {
						x.Rollback(open[0].Pin, open[0].blocks, rng.IntN(3))
					} else {
						x.Release(open[0].Pin, nil)
					}
					open = open[1:]
				}
			}
		}
		before, after := traffic(x), traffic(y)
		for range 20 {
			before()
		}
		blocks := copyOut(x, 0, 1+rng.IntN(9), before)
		for i, b := range blocks {
			if !b.First && !slices.ContainsFunc(blocks[:i], func(r ImportedBlock) bool { return r.Block == b.Parent }) {
				t.Fatalf("seed %d: block %d comes before the one it follows", seed, i)
			}
			if p, ok := preds[b.Block]; ok == b.First || !b.First && p != b.Parent {
				t.Fatalf("seed %d: block %d follows another one than it did", seed, i)
			}
		}
		restore(y, 0, blocks, 1+rng.IntN(5), func() {
			after()
			check(t, y, preds, fmt.Sprintf("seed %d", seed))
		})
	}
}
