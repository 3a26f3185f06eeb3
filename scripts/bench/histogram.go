package main

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// fine is how many buckets a doubling has, as a power of two: a figure read from
// a histogram is less than 1 % off.
const fine = 7

// histogram counts durations. Safe for concurrent use.
type histogram struct {
	counts [(64 - fine) << fine]atomic.Int64
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucket(uint64(max(d, 0)))].Add(1)
}

// bucket is v itself while that is small, and then the leading bits of it beside
// its magnitude.
func bucket(v uint64) int {
	shift := max(0, bits.Len64(v)-fine-1)
	return shift<<fine + int(v>>shift)
}

// floor is the least value of a bucket.
func floor(bucket int) uint64 {
	shift := max(0, bucket>>fine-1)
	return uint64(bucket-shift<<fine) << shift
}

// quantile is the value that a share q of those counted does not exceed; 0 when
// there are none.
func (h *histogram) quantile(q float64) time.Duration {
	var total int64
	for i := range h.counts {
		total += h.counts[i].Load()
	}
	rest := int64(q * float64(total))
	for i := range h.counts {
		if rest -= h.counts[i].Load(); rest < 0 {
			return time.Duration(floor(i))
		}
	}
	return 0
}

// reset forgets all.
func (h *histogram) reset() {
	for i := range h.counts {
		h.counts[i].Store(0)
	}
}
