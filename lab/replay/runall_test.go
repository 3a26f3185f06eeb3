package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// steadyTrace is so many requests, two a second.
func steadyTrace(t *testing.T, requests int) Traced {
	t.Helper()
	var lines strings.Builder
	for i := range requests {
		fmt.Fprintf(&lines, `{"timestamp": %d, "input_length": 600, "output_length": 10, "hash_ids": [%d, %d]}`+"\n", i*500, i%3, 100+i)
	}
	trace, err := ParseTrace(strings.NewReader(lines.String()))
	if err != nil {
		t.Fatal(err)
	}
	return Traced{Trace: trace}
}

func TestRunAllKeepsOrder(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	var scenarios []Scenario
	for i := range 20 {
		scenarios = append(scenarios, Scenario{Backends: 2, Policy: "random", Workload: steadyTrace(t, 1+i)})
	}
	var shares []float64
	results, err := RunAll(t.Context(), scenarios, func(share float64) { shares = append(shares, share) })
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range results {
		if s.Requests != 1+i {
			t.Errorf("run %d completed %d requests", i, s.Requests)
		}
	}
	if !slices.IsSorted(shares) || len(shares) < len(scenarios) || shares[len(shares)-1] < 0.999 {
		t.Errorf("progress %v", shares)
	}
}

func TestRunAllEndsAtFirstFailure(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	scenarios := make([]Scenario, 50)
	for i := range scenarios {
		scenarios[i] = Scenario{Backends: 2, Policy: "random", Workload: steadyTrace(t, 5)}
	}
	scenarios[3].Policy = "nonsense"
	_, err := RunAll(t.Context(), scenarios, nil)
	if err == nil || errors.Is(err, context.Canceled) || !strings.HasPrefix(err.Error(), "nonsense: ") {
		t.Errorf("got %v, want what was wrong with the fourth", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := RunAll(ctx, scenarios[:3], nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v after an interruption", err)
	}
}

func TestMean(t *testing.T) {
	one := Summary{Policy: "prefix", Requests: 100, TTFTMean: 1, TTFTP99: 4, HitRatio: 0.5, E2EMean: 7, Lost: 1,
		Errors: map[string]int{"status 429": 1}}
	two := Summary{Policy: "prefix", Requests: 101, TTFTMean: 2, TTFTP99: 3, HitRatio: 0.25, E2EMean: 8, Lost: 2,
		Errors: map[string]int{"status 429": 1, "timeout": 1}}
	got := Mean([]Summary{one, two})
	if got.Policy != "prefix" || got.Requests != 101 || got.TTFTMean != 1.5 || got.TTFTP99 != 3.5 || got.HitRatio != 0.375 ||
		got.E2EMean != 7.5 {
		t.Errorf("got %+v", got)
	}
	if got.Lost != 2 || got.Errors["status 429"] != 1 || got.Errors["timeout"] != 1 {
		t.Errorf("lost %d: %v", got.Lost, got.Errors)
	}
	want := Variation{HitRatio: MinMax{0.25, 0.5}, TTFTMean: MinMax{1, 2}, TTFTP99: MinMax{3, 4}, E2EMean: MinMax{7, 8}}
	if got.Variation == nil || *got.Variation != want {
		t.Errorf("spread %v, want %v", got.Variation, want)
	}
	if single := Mean([]Summary{one}); single.Variation != nil || single.TTFTMean != 1 {
		t.Errorf("the mean of one run is %+v", single)
	}
}

func TestLowestOther(t *testing.T) {
	r := Report{Results: []Summary{
		{Policy: "prefix", Requests: 1, TTFTMean: 2}, {Policy: Pooled, Requests: 1, TTFTMean: 1},
		{Policy: "chwbl", Requests: 1, TTFTMean: 4}, {Policy: "random", Requests: 1, TTFTMean: 3}, {Policy: "ray"},
	}}
	best, ok := r.LowestOther("prefix", func(s Summary) float64 { return s.TTFTMean })
	if !ok || best.Policy != "random" {
		t.Errorf("got %+v", best)
	}
	r.Results = r.Results[:2]
	if best, ok := r.LowestOther("prefix", func(s Summary) float64 { return s.TTFTMean }); ok {
		t.Errorf("got %+v of none", best)
	}
}
