//go:build gates

package replay_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"warmroute/lab/policies"
	"warmroute/lab/replay"
)

var (
	// Not -trace, which go test takes as its own and overwrites.
	gateTrace = flag.String("tracefile", "../conversation_trace.jsonl",
		"Mooncake's conversation trace, of which README.md says where to download it, or one of agents' sessions")
	gateRows     = flag.String("rows", "", "run only rows whose names match this regular expression")
	gatePolicies = flag.String("policy", strings.Join(append(policies.All().Names(), replay.Pooled), ","), "policies to compare")
	gateSeeds    = flag.Int("seeds", 5, "runs of which the mean counts")
	gateRivals   = flag.String("rivals", "",
		"take the figures of the other policies from this file as far as it has them, and write the further ones to it: they change with the "+
			"engine, the trace and the seeds only")
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
	rivals, err := readRivals(*gateRivals)
	if err != nil {
		t.Fatalf("-rivals: %v", err)
	}
	out := newTable(os.Stdout)
	failed := 0
	for _, r := range rows(trace) {
		if !chosen.MatchString(r.name) {
			continue
		}
		report, err := r.play(t.Context(), strings.Split(*gatePolicies, ","), *gateSeeds, rivals)
		if err == nil && *gateRivals != "" {
			err = rivals.write(*gateRivals)
		}
		if err != nil {
			t.Fatalf("%s: %v", r.name, err)
		}
		failed += out.row(r, report)
		if testing.Verbose() {
			out.results(report)
		}
	}
	failed += out.end()
	if failed > 0 {
		t.Errorf("%d gates failed", failed)
	}
}

// rivalFigures has the figures of policies other than prefix, by row and policy.
type rivalFigures map[string]map[string]replay.Summary

// readRivals reads the figures in a file of write. It returns none if the file does not exist.
func readRivals(path string) (rivalFigures, error) {
	all := rivalFigures{}
	data, err := os.ReadFile(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	return all, json.Unmarshal(data, &all)
}

func (f rivalFigures) write(path string) error {
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

// play runs a row with several seeds and returns the means. Policies other than prefix that rivals has are not run
// again, and the others are added to it.
func (r row) play(ctx context.Context, policies []string, seeds int, rivals rivalFigures) (replay.Report, error) {
	var report replay.Report
	var scenarios []replay.Scenario
	known := rivals[r.name]
	runs := slices.DeleteFunc(r.runs(policies), func(v variant) bool {
		_, isKnown := known[v.label]
		return isKnown && r.variants == nil && v.label != highlight
	})
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
	if known == nil {
		known = map[string]replay.Summary{}
		rivals[r.name] = known
	}
	for i, v := range runs {
		mean := replay.Mean(results[i*seeds : (i+1)*seeds])
		mean.Policy = v.label
		known[v.label] = mean
	}
	for _, v := range r.runs(policies) {
		report.Results = append(report.Results, known[v.label])
	}
	return report, nil
}
