package estimate

import (
	"math"
	"testing"
)

func TestMissingHits(t *testing.T) {
	type response struct{ expected, cached float64 }
	repeat := func(n int, r response) (all []response) {
		for range n {
			all = append(all, r)
		}
		return all
	}
	for _, c := range []struct {
		name      string
		responses []response
		share     float64
	}{
		{"none", nil, 0},
		{"all is there", repeat(50, response{9000, 9000}), 0},
		{"more than expected", repeat(50, response{5000, 9000}), 0},
		{"bytes are no exact measure", repeat(50, response{10_000, 9900}), 0},
		{"half is missing", repeat(50, response{80_000, 40_000}), 0.5},
		{"half is missing, of little", repeat(50, response{2000, 1000}), 0.47},
		{"nothing was expected", repeat(50, response{0, 0}), 0},
		{"found again", append(repeat(50, response{80_000, 40_000}), repeat(30, response{80_000, 80_000})...), 0},
		{"not expected any more", append(repeat(50, response{80_000, 40_000}), repeat(80, response{0, 0})...), 0},
	} {
		var m missingHits
		for _, r := range c.responses {
			m.addResponse(r.expected, r.cached)
		}
		if got := m.share(); math.Abs(got-c.share) > 0.01 {
			t.Errorf("%s: %.2f of the expected tokens, want %.2f", c.name, got, c.share)
		}
	}
}

func TestMissingHitsWithoutLearning(t *testing.T) {
	f := newTestEstimates(1)
	f.backends[0].missing.addResponse(80_000, 40_000)
	if f.MissingHits(0) == 0 {
		t.Fatal("none are missing")
	}
	f.SetLearningDisabled(true)
	if got := f.MissingHits(0); got != 0 {
		t.Errorf("%.2f are missing without learning", got)
	}
}
