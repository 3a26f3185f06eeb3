package index

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"testing"
	"time"

	"warmroute/prompt"
)

// all returns the contents of a table.
func all[V int32 | uint64](t *table[V]) iter.Seq2[prompt.Block, V] {
	return func(yield func(prompt.Block, V) bool) {
		for _, p := range t.parts {
			for _, k := range p.buckets {
				for i, b := range k.blocks {
					if b != 0 && !yield(b, k.values[i]) {
						return
					}
				}
			}
		}
	}
}

// A table behaves like a map through random operations, growth and removals.
func TestTable(t *testing.T) {
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
				if rng.IntN(2) == 0 || !have.tryAdd(b, v) {
					*have.getOrAdd(b) = v
				}
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

func TestTableZeroBlock(t *testing.T) {
	var have table[int32]
	if have.get(0) != 0 {
		t.Error("an empty table has it")
	}
	*have.getOrAdd(0) = 7
	if have.get(0) != 7 || have.len() != 1 {
		t.Errorf("it has %d, of %d", have.get(0), have.len())
	}
	have.remove(0)
	if have.get(0) != 0 || have.len() != 0 {
		t.Errorf("once removed it has %d, of %d", have.get(0), have.len())
	}
}

// All blocks hash to the last bucket, so they overflow around the end.
func TestTableCollisions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var have table[int32]
	*have.getOrAdd(1) = 1
	have.remove(1)
	var blocks []prompt.Block
	for len(blocks) < 40 {
		b := prompt.Block(rng.Uint64())
		if _, mixed := have.locatePart(b); mixed>>57 == 1<<7-1 && mixed%(1<<partBits) == 0 {
			blocks = append(blocks, b)
		}
	}
	want := map[prompt.Block]int32{}
	for range 10_000 {
		b := blocks[rng.IntN(len(blocks))]
		if rng.IntN(2) == 0 {
			have.remove(b)
			delete(want, b)
		} else {
			want[b] = 1 + rng.Int32N(100)
			if rng.IntN(2) == 0 || !have.tryAdd(b, want[b]) {
				*have.getOrAdd(b) = want[b]
			}
		}
		for _, b := range blocks {
			if have.get(b) != want[b] {
				t.Fatalf("block %d has %d, want %d", b, have.get(b), want[b])
			}
		}
		if have.len() != len(want) {
			t.Fatalf("%d blocks, want %d", have.len(), len(want))
		}
	}
}

// BenchmarkChurn adds prompts that match nothing to a full index, which evicts a
// block for each. Between them a megabyte of other memory is read, outside the
// measured time, as a proxy would.
func BenchmarkChurn(b *testing.B) {
	const n = 128
	for _, f := range []struct{ backends, capacity int }{{4, 16_384}, {4, 37_500}, {8, 100_000}} {
		b.Run(fmt.Sprintf("backends=%d/blocks=%d", f.backends, f.capacity), func(b *testing.B) {
			x := fleet(f.backends, f.capacity)
			rng := rand.New(rand.NewPCG(1, 1))
			blocks, depth := make([]prompt.Block, n), make([]int, f.backends)
			other, next := make([]byte, 64<<20), 0
			send := func() time.Duration {
				for range 1 << 20 / 64 {
					other[next]++
					next = (next + 64) % len(other)
				}
				for i := range blocks {
					blocks[i] = prompt.Block(rng.Uint64())
				}
				began := time.Now()
				x.Match(blocks, depth)
				var p Pin
				x.Add(&p, rng.IntN(f.backends), blocks, 0)
				x.Release(&p, nil)
				return time.Since(began)
			}
			for range 2 * f.backends * f.capacity / n {
				send()
			}
			var spent time.Duration
			for b.Loop() {
				spent += send()
			}
			b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N*n), "ns/block")
		})
	}
}
