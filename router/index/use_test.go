package index

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"warmroute/router/prompt"
)

func TestBlocksInUseAreCountedOnce(t *testing.T) {
	x := fleet(1, 100)
	use := func(s string) Placement {
		p := add(x, 0, s)
		x.Use(&p)
		return p
	}
	f := func(name string, want int) {
		t.Helper()
		if got := x.InUse(0); got != want {
			t.Errorf("%s: %d blocks in use, want %d", name, got, want)
		}
	}
	first, second, third := use("abcd"), use("abxy"), use("ab")
	f("abcd, abxy and ab share two", 6)
	if got := x.Idle(0, chain("abcd")); got != 0 {
		t.Errorf("%d blocks of abcd idle", got)
	}
	x.Done(&first)
	f("without abcd", 4)
	if got := x.Idle(0, chain("abcd")); got != 2 {
		t.Errorf("%d blocks of abcd idle, want 2", got)
	}
	x.Done(&second)
	f("ab alone", 2)
	x.Done(&third)
	f("none", 0)
}

func TestBlocksInUseAreNotEvicted(t *testing.T) {
	x := fleet(1, 6)
	p := add(x, 0, "abc")
	x.Use(&p)
	add(x, 0, "uvw")
	if got := add(x, 0, "klmno").Left; got != 2 {
		t.Errorf("%d blocks left out, want the 2 for which there is no room beside abc", got)
	}
	f := func(s string, want int) {
		t.Helper()
		if got := depths(x, s)[0]; got != want {
			t.Errorf("%q: %d leading blocks, want %d", s, got, want)
		}
	}
	f("abc", 3)
	f("uvw", 0)
	f("klmno", 3)
	x.SetCapacity(0, 2)
	f("abc", 3)
	f("klmno", 0)
	x.Done(&p)
	f("abc", 2)
}

func TestADroppedPartIsInNobodysUse(t *testing.T) {
	x := fleet(1, 6)
	p := add(x, 0, "abc")
	x.Use(&p)
	x.Drop(0)
	again := add(x, 0, "ab")
	x.Use(&again)
	x.Done(&p)
	if got := x.InUse(0); got != 2 {
		t.Errorf("%d blocks in use, want 2", got)
	}
}

// Random prompts with long and short uses and too little room: what is in use
// is held, counted once, and nothing is in use at the end.
func TestUsesAddUp(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 2))
		x := fleet(1, 30)
		type open struct {
			p      Placement
			blocks []prompt.Block
		}
		var running []open
		preds := map[prompt.Block]prompt.Block{}
		for step := range 400 {
			s := make([]byte, 1+rng.IntN(12))
			for i := range s {
				s[i] = "abc"[rng.IntN(3)]
			}
			blocks := chain(string(s))
			for i := 1; i < len(blocks); i++ {
				preds[blocks[i]] = blocks[i-1]
			}
			p := add(x, 0, string(s))
			if rng.IntN(3) > 0 {
				x.Use(&p)
				running = append(running, open{p, blocks[:len(blocks)-p.Left]})
			}
			for len(running) > 1 && (len(running) > 20 || rng.IntN(3) == 0) {
				i := rng.IntN(len(running))
				x.Done(&running[i].p)
				if rng.IntN(3) == 0 {
					x.TakeBack(running[i].p, running[i].blocks, 0)
				}
				running[i] = running[len(running)-1]
				running = running[:len(running)-1]
			}
			x.SetCapacity(0, 20+rng.IntN(3)*5)
			inUse := map[prompt.Block]bool{}
			for _, o := range running {
				for _, b := range o.blocks {
					inUse[b] = true
					if _, ok := x.held[0].find[b]; !ok {
						t.Fatalf("seed %d step %d: a block in use was evicted", seed, step)
					}
				}
			}
			if got := x.InUse(0); got != len(inUse) {
				t.Fatalf("seed %d step %d: %d blocks in use, want %d", seed, step, got, len(inUse))
			}
			check(t, x, preds, fmt.Sprintf("seed %d step %d", seed, step))
		}
		for i := range running {
			x.Done(&running[i].p)
		}
		if x.InUse(0) != 0 || x.Len(0) > x.Capacity(0) {
			t.Fatalf("seed %d: at the end %d blocks in use, %d held of %d", seed, x.InUse(0), x.Len(0), x.Capacity(0))
		}
	}
}
