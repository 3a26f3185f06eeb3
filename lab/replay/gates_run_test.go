//go:build gates

package replay_test

import (
	"context"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"warmroute/lab/policies"
	"warmroute/lab/replay"
)

var (
	// Not -trace, which go test takes as its own and overwrites.
	gateTrace    = flag.String("tracefile", "../conversation_trace.jsonl", "Mooncake's conversation trace; README.md says where to download it")
	gateRows     = flag.String("rows", "", "run only rows whose names match this regular expression")
	gatePolicies = flag.String("policy", strings.Join(append(policies.All().Names(), replay.Pooled), ","), "policies to compare")
	gateSeeds    = flag.Int("seeds", 5, "runs of which the mean counts")
)

// TestGates runs the scenarios that judge the routing and compares their figures with
// the bounds in rows:
//
//	go test -tags gates ./lab/replay -run Gates -v -timeout 0 -tracefile FILE
func TestGates(t *testing.T) {
	chosen, err := regexp.Compile(*gateRows)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(*gateTrace)
	if err != nil {
		t.Fatalf("-tracefile: %v", err)
	}
	defer f.Close()
	trace, err := replay.ParseTrace(f)
	if err != nil {
		t.Fatal(err)
	}
	out := newTable(os.Stdout)
	failed := 0
	for _, r := range rows(trace) {
		if !chosen.MatchString(r.name) {
			continue
		}
		report, err := r.play(t.Context(), strings.Split(*gatePolicies, ","), *gateSeeds)
		if err != nil {
			t.Fatalf("%s: %v", r.name, err)
		}
		failed += out.row(r, report)
		if testing.Verbose() {
			out.results(report)
		}
	}
	out.end()
	if failed > 0 {
		t.Errorf("%d gates failed", failed)
	}
}

// play runs a row with several seeds and returns the means.
func (r row) play(ctx context.Context, policies []string, seeds int) (replay.Report, error) {
	var report replay.Report
	var scenarios []replay.Scenario
	runs := r.runs(policies)
	for _, v := range runs {
		for seed := 1; seed <= seeds; seed++ {
			s := v.scenario
			s.Seed = uint64(seed)
			scenarios = append(scenarios, s)
		}
	}
	results, err := replay.RunAll(ctx, scenarios, nil)
	if err != nil {
		return report, err
	}
	for i, v := range runs {
		mean := replay.Mean(results[i*seeds : (i+1)*seeds])
		mean.Policy = v.label
		report.Results = append(report.Results, mean)
	}
	return report, nil
}
