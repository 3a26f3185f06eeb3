package metrics

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// within are durations all over a layout's fine range, and some on its bounds.
func within(l *layout, n int) (out []time.Duration) {
	chance := rand.New(rand.NewPCG(3, 4))
	low, high := math.Log2(nativeBound(l.lowest)*1.01), math.Log2(float64(l.bounds[len(l.bounds)-1])/1e9)
	for range n {
		out = append(out, time.Duration(math.Exp2(low+(high-low)*chance.Float64())*1e9))
	}
	for _, seconds := range l.classic {
		out = append(out, time.Duration(math.Round(seconds*1e9)))
	}
	return out
}

// counts are the native buckets with something in them, by key.
func counts(h *dto.Histogram) map[int]int64 {
	out, key, n, next := map[int]int64{}, 0, int64(0), 0
	for _, span := range h.PositiveSpan {
		key += int(span.GetOffset())
		for range span.GetLength() {
			n += h.PositiveDelta[next]
			if n != 0 {
				out[key] = n
			}
			key++
			next++
		}
	}
	return out
}

func allLayouts() map[string]*layout {
	l := newLatencies().layouts
	return map[string]*layout{"duration": l[duration], "ttft": l[ttft], "itl": l[itl], "overhead": newOverhead().layout, "hold": newHold().layout}
}

// The library's own histogram is what ours has to count like.
func TestHistogramsCountAsTheLibrarysDo(t *testing.T) {
	for name, l := range allLayouts() {
		t.Run(name, func(t *testing.T) {
			ours := newHistogram(l)
			library := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "x", Help: "x", Buckets: l.classic, NativeHistogramBucketFactor: 1.1})
			for _, d := range within(l, 20_000) {
				ours.Observe(d)
				library.Observe(d.Seconds())
			}
			var want dto.Metric
			if err := library.Write(&want); err != nil {
				t.Fatal(err)
			}
			got := ours.read()
			if got.GetSchema() != want.Histogram.GetSchema() || got.GetSampleCount() != want.Histogram.GetSampleCount() {
				t.Fatalf("schema %d, count %d; the library has %d, %d", got.GetSchema(), got.GetSampleCount(), want.Histogram.GetSchema(), want.Histogram.GetSampleCount())
			}
			if sum, theirs := got.GetSampleSum(), want.Histogram.GetSampleSum(); math.Abs(sum-theirs) > 1e-6*theirs {
				t.Errorf("sum %v, the library has %v", sum, theirs)
			}
			for i, b := range want.Histogram.Bucket {
				if g := got.Bucket[i]; g.GetUpperBound() != b.GetUpperBound() || g.GetCumulativeCount() != b.GetCumulativeCount() {
					t.Errorf("classic bucket %v; the library has %v", g, b)
				}
			}
			has, theirs := counts(got), counts(want.Histogram)
			for key, n := range theirs {
				if has[key] != n {
					t.Errorf("native bucket %d has %d, the library's %d", key, has[key], n)
				}
			}
			if len(has) != len(theirs) {
				t.Errorf("%d native buckets, the library has %d", len(has), len(theirs))
			}
		})
	}
}

func TestWhatIsOutOfAHistogramsRangeIsCountedAtItsEnds(t *testing.T) {
	for name, l := range allLayouts() {
		h := newHistogram(l)
		for _, d := range []time.Duration{-time.Second, 0, 1} {
			h.Observe(d)
		}
		for _, d := range []time.Duration{24 * time.Hour, math.MaxInt64 / 4} {
			h.Observe(d)
		}
		got := h.read()
		if n := got.GetSampleCount(); n != 5 {
			t.Errorf("%s: count %d", name, n)
		}
		if n := got.GetZeroCount(); n != 3 || got.GetZeroThreshold() <= 0 {
			t.Errorf("%s: %d about zero, up to %v", name, n, got.GetZeroThreshold())
		}
		if n := counts(got); len(n) != 1 || !slices.Contains([]int64{2}, n[l.inNative[len(l.inNative)-1]]) {
			t.Errorf("%s: native buckets %v", name, n)
		}
		for _, b := range got.Bucket {
			if b.GetCumulativeCount() != 3 {
				t.Errorf("%s: %v up to %v", name, b.GetCumulativeCount(), b.GetUpperBound())
			}
		}
	}
}

func TestHistogramsLoseNothingWhenManyCount(t *testing.T) {
	h := newHistogram(newLatencies().layouts[itl])
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range 1000 {
				h.of(time.Duration(i)*time.Millisecond, "id", time.Unix(int64(i), 0))
				h.read()
			}
		})
	}
	all.Wait()
	if got := h.read(); got.GetSampleCount() != 8000 || math.Abs(got.GetSampleSum()-8*499.5) > 1e-6 {
		t.Errorf("count %d, sum %v", got.GetSampleCount(), got.GetSampleSum())
	}
}

func BenchmarkObserve(b *testing.B) {
	h := newHistogram(newLatencies().layouts[itl])
	all := within(h.layout, 1000)
	b.Run("gap", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			h.Observe(all[i%len(all)])
		}
	})
	library := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "x", Help: "x", Buckets: h.layout.classic, NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160})
	b.Run("library", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			library.Observe(all[i%len(all)].Seconds())
		}
	})
}
