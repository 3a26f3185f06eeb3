package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Histogram counts durations, for Prometheus's classic buckets and its native ones
// at once. The library's own takes a lookup and an allocation for each native
// bucket that it counts in, which is too dear for every chunk of every stream: here
// the range is fixed, so an observation is two additions. Safe for concurrent use.
type Histogram struct {
	layout *layout
	cells  []atomic.Uint64
	sum    atomic.Int64 // nanoseconds
	latest []atomic.Pointer[exemplar]
}

func newHistogram(l *layout) *Histogram {
	return &Histogram{layout: l, cells: make([]atomic.Uint64, len(l.bounds)+1), latest: make([]atomic.Pointer[exemplar], len(l.classic)+1)}
}

// Observe counts one duration. One below zero counts as zero.
func (h *Histogram) Observe(d time.Duration) { h.observe(max(d, 0)) }

func (h *Histogram) observe(d time.Duration) (cell int) {
	cell = h.layout.cell(d)
	h.cells[cell].Add(1)
	h.sum.Add(int64(d))
	return cell
}

// of counts one duration, and may show the request with that id for it.
func (h *Histogram) of(d time.Duration, id string, now time.Time) {
	h.show(h.layout.inClassic[h.observe(max(d, 0))], d, id, now)
}

// read is what was counted so far. While others count, the sum may be an
// observation ahead of the count, or behind it.
func (h *Histogram) read() *dto.Histogram {
	l := h.layout
	classic := make([]uint64, len(l.classic)+1)
	var small, count uint64 // small: of the native bucket around zero
	var native spans
	for cell := range h.cells {
		n := h.cells[cell].Load()
		count += n
		classic[l.inClassic[cell]] += n
		if key := l.inNative[cell]; key > l.lowest {
			native.add(key, n)
		} else {
			small += n
		}
	}
	sum, schema, threshold := time.Duration(h.sum.Load()).Seconds(), int32(nativeSchema), nativeBound(l.lowest)
	out := &dto.Histogram{SampleCount: &count, SampleSum: &sum, Schema: &schema, ZeroThreshold: &threshold, ZeroCount: &small}
	out.PositiveSpan, out.PositiveDelta = native.encoded()
	h.readClassic(out, classic)
	return out
}

// series is a Histogram with its name and its labels.
type series struct {
	*Histogram
	desc   *prometheus.Desc
	labels []string // values
}

// Desc implements prometheus.Metric.
func (s series) Desc() *prometheus.Desc { return s.desc }

// Write implements prometheus.Metric.
func (s series) Write(out *dto.Metric) error {
	out.Label = prometheus.MakeLabelPairs(s.desc, s.labels)
	out.Histogram = s.read()
	return nil
}

// Describe implements prometheus.Collector, for a series that stands alone.
func (s series) Describe(ch chan<- *prometheus.Desc) { ch <- s.desc }

// Collect implements prometheus.Collector.
func (s series) Collect(ch chan<- prometheus.Metric) { ch <- s }
