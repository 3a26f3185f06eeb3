package estimate

import (
	"math"
	"testing"
)

func TestKVTransferTimesAreLearned(t *testing.T) {
	for _, tc := range []struct {
		name           string
		base, perToken float64
		sizes          []float64
	}{
		{"a slow start", 0.5, 10e-6, []float64{1000, 30_000, 5000, 100_000}},
		{"a slow network", 0.05, 200e-6, []float64{1000, 30_000, 5000, 100_000}},
		{"short prompts alone", 0.2, 20e-6, []float64{500, 900, 700}},
		{"no constant", 0, 50e-6, []float64{1000, 30_000, 100_000}},
	} {
		h := newKVTransferTimes()
		for i := range 300 {
			tokens := tc.sizes[i%len(tc.sizes)]
			h.add(tokens, tc.base+tc.perToken*tokens)
		}
		for _, tokens := range tc.sizes {
			want := tc.base + tc.perToken*tokens
			if got := h.predict(tokens); math.Abs(got/want-1) > 0.1 {
				t.Errorf("%s: %g tokens take %.3f s, want %.3f", tc.name, tokens, got, want)
			}
		}
	}
}

func TestKVTransferSamplesAreBounded(t *testing.T) {
	h := newKVTransferTimes()
	before := h
	for _, seconds := range []float64{-1, math.NaN(), math.Inf(1), maxKVTransferSeconds + 1} {
		h.add(1000, seconds)
		h.add(seconds, 1)
	}
	h.add(1000, math.NaN())
	if h.predict(1000) < 0 || math.IsNaN(h.predict(1000)) {
		t.Errorf("1000 tokens take %v s", h.predict(1000))
	}
	if before != newKVTransferTimes() {
		t.Error("the defaults changed")
	}
	for range 1000 { // shorter transfers of longer prompts
		h.add(1000, 1)
		h.add(50_000, 0.1)
	}
	if got := h.predict(200_000); got < 0 {
		t.Errorf("200,000 tokens take %v s", got)
	}
}
