package estimate

import (
	"math"
	"testing"
)

func TestMissingHits(t *testing.T) {
	type response struct{ expected, cached, prompt float64 }
	repeat := func(n int, r response) (all []response) {
		for range n {
			all = append(all, r)
		}
		return all
	}
	for _, c := range []struct {
		name                   string
		responses              []response
		ofExpected, ofComputed float64
	}{
		{"none", nil, 0, 0},
		{"all is there", repeat(50, response{9000, 9000, 10_000}), 0, 0},
		{"more than expected", repeat(50, response{5000, 9000, 10_000}), 0, 0},
		{"bytes are no exact measure", repeat(50, response{10_000, 9900, 11_000}), 0, 0},
		{"half is missing", repeat(50, response{80_000, 40_000, 81_000}), 0.5, 0.9},
		{"half is missing, of little", repeat(50, response{2000, 1000, 11_000}), 0.47, 0.1},
		{"nothing was expected", repeat(50, response{0, 0, 10_000}), 0, 0},
		{"found again", append(repeat(50, response{80_000, 40_000, 81_000}), repeat(30, response{80_000, 80_000, 81_000})...), 0, 0},
		{"not expected any more", append(repeat(50, response{80_000, 40_000, 81_000}), repeat(80, response{0, 0, 10_000})...), 0, 0},
	} {
		var m missingHits
		for _, r := range c.responses {
			m.addResponse(r.expected, r.cached, r.prompt)
		}
		ofExpected, ofComputed := m.missingShares()
		if math.Abs(ofExpected-c.ofExpected) > 0.01 || math.Abs(ofComputed-c.ofComputed) > 0.01 {
			t.Errorf("%s: %.2f of the expected and %.2f of the computed tokens, want %.2f and %.2f", c.name, ofExpected, ofComputed, c.ofExpected, c.ofComputed)
		}
	}
}

func TestMissingHitsWithoutLearning(t *testing.T) {
	f := newTestEstimates(1)
	f.backends[0].missing.addResponse(80_000, 40_000, 81_000)
	if ofExpected, ofComputed := f.MissingHits(0); ofExpected == 0 || ofComputed == 0 {
		t.Fatalf("%.2f and %.2f are missing", ofExpected, ofComputed)
	}
	f.SetLearningDisabled(true)
	if ofExpected, ofComputed := f.MissingHits(0); ofExpected != 0 || ofComputed != 0 {
		t.Errorf("%.2f and %.2f are missing without learning", ofExpected, ofComputed)
	}
}
