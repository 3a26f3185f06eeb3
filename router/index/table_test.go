package index

import (
	"iter"
	"math/rand/v2"
	"testing"

	"warmroute/router/prompt"
)

// all is what a table holds, in no order.
func all[V int32 | uint64](t *table[V]) iter.Seq2[prompt.Block, V] {
	return func(yield func(prompt.Block, V) bool) {
		for _, p := range t.parts {
			for _, s := range p.slots {
				if s.block != 0 && !yield(s.block, s.value) {
					return
				}
			}
		}
	}
}

// A table behaves like a map, whatever comes in which order, through growth and
// through removals from the middle of a run.
func TestTableIsAMap(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var have table[uint64]
		want := map[prompt.Block]uint64{}
		blocks := make([]prompt.Block, 1+rng.IntN(3000))
		for i := range blocks {
			blocks[i] = prompt.Block(rng.Uint64() >> rng.IntN(64)) // some are small and alike, one perhaps 0
		}
		for range 20 * len(blocks) {
			b := blocks[rng.IntN(len(blocks))]
			if b == 0 {
				b = 1 // they are one
			}
			switch rng.IntN(3) {
			case 0:
				have.remove(b)
				delete(want, b)
			case 1:
				v := 1 + rng.Uint64N(100)
				*have.at(b) = v
				want[b] = v
			}
			if have.get(b) != want[b] || have.len() != len(want) {
				t.Fatalf("seed %d: block %d has %d of %d, want %d of %d", seed, b, have.get(b), have.len(), want[b], len(want))
			}
		}
		n := 0
		for b, v := range all(&have) {
			n++
			if want[b] != v {
				t.Fatalf("seed %d: block %d has %d, want %d", seed, b, v, want[b])
			}
		}
		if n != len(want) {
			t.Fatalf("seed %d: %d blocks are there, want %d", seed, n, len(want))
		}
	}
}

func TestTableTakesTheBlockThatIsZero(t *testing.T) {
	var have table[int32]
	if have.get(0) != 0 {
		t.Error("an empty table has it")
	}
	*have.at(0) = 7
	if have.get(0) != 7 || have.len() != 1 {
		t.Errorf("it has %d, of %d", have.get(0), have.len())
	}
	have.remove(0)
	if have.get(0) != 0 || have.len() != 0 {
		t.Errorf("once removed it has %d, of %d", have.get(0), have.len())
	}
}

// BenchmarkChurn is what prompts that nobody has seen do to a full index: each
// block makes room for itself, for one backend of eight.
func BenchmarkChurn(b *testing.B) {
	const n = 128
	x := fleet(8, 40_000)
	blocks := make([]prompt.Block, n)
	rng := rand.New(rand.NewPCG(1, 1))
	send := func(slot int) {
		for i := range blocks {
			blocks[i] = prompt.Block(rng.Uint64())
		}
		var p Placement
		x.Add(&p, slot, blocks, 0)
		x.Release(&p, nil)
	}
	for i := range 8 * 40_000 / n {
		send(i % 8)
	}
	i := 0
	for b.Loop() {
		send(i % 8)
		i++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/block")
}
