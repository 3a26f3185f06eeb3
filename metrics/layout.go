package metrics

import (
	"math"
	"math/bits"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// nativeSchema has eight native buckets for each doubling, each 9 % wider than the
// one before.
const (
	nativeSchema = 3
	perDoubling  = 1 << nativeSchema
)

// nativeBound is the upper bound, in seconds, of the native bucket with a key.
func nativeBound(key int) float64 { return math.Exp2(float64(key) / perDoubling) }

// layout is how a histogram's range is cut into cells: at the bounds of its classic
// buckets and at those of its native ones, so that each cell lies in one of each.
type layout struct {
	classic   []float64 // upper bounds, in seconds; above the last is one more bucket
	lowest    int       // key of the native bucket up to which everything counts as about zero
	bounds    []int64   // upper bounds of the cells, in nanoseconds; above the last is one more cell
	inClassic []int     // for each cell, its classic bucket
	inNative  []int     // and the key of its native one
	first     [64]int   // the cell to begin the search at, by the length of the duration in bits
}

// newLayout cuts the range from 2^from to 2^to seconds finely. What is longer counts
// in the native buckets as if it were hardly longer than that, and nothing else does.
func newLayout(from, to int, classic ...float64) *layout {
	l := &layout{classic: classic, lowest: from * perDoubling}
	for key := l.lowest; key <= to*perDoubling; key++ {
		l.bounds = append(l.bounds, int64(nativeBound(key)*1e9))
	}
	for _, seconds := range classic {
		l.bounds = append(l.bounds, int64(math.Round(seconds*1e9)))
	}
	slices.Sort(l.bounds)
	l.bounds = slices.Compact(l.bounds)
	in, key := 0, l.lowest
	for _, bound := range append(slices.Clone(l.bounds), math.MaxInt64) {
		for in < len(classic) && bound > int64(math.Round(classic[in]*1e9)) {
			in++
		}
		for key <= to*perDoubling && bound > int64(nativeBound(key)*1e9) {
			key++
		}
		l.inClassic, l.inNative = append(l.inClassic, in), append(l.inNative, key)
	}
	for length := 1; length < len(l.first); length++ {
		l.first[length], _ = slices.BinarySearch(l.bounds, 1<<(length-1))
	}
	return l
}

// cell is where d, at least 0, is counted: a few steps from where durations of its
// length in bits begin.
func (l *layout) cell(d time.Duration) int {
	i := l.first[bits.Len64(uint64(d))]
	for i < len(l.bounds) && int64(d) > l.bounds[i] {
		i++
	}
	return i
}

// spans are native buckets, added in the order of their keys.
type spans struct {
	keys   []int
	counts []int64
}

func (s *spans) add(key int, n uint64) {
	if n == 0 {
		return
	}
	if last := len(s.keys) - 1; last >= 0 && s.keys[last] == key {
		s.counts[last] += int64(n)
		return
	}
	s.keys, s.counts = append(s.keys, key), append(s.counts, int64(n))
}

// encoded is how the exposition has them: runs of neighbours, each with its distance
// from the one before, and each count as its difference from the one before.
func (s *spans) encoded() (runs []*dto.BucketSpan, deltas []int64) {
	next, before := 0, int64(0)
	for i, key := range s.keys {
		if i == 0 || key != next {
			offset, length := int32(key-next), uint32(0)
			runs = append(runs, &dto.BucketSpan{Offset: &offset, Length: &length})
		}
		*runs[len(runs)-1].Length++
		deltas = append(deltas, s.counts[i]-before)
		next, before = key+1, s.counts[i]
	}
	return runs, deltas
}
