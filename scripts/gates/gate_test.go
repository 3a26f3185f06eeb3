package main

import (
	"bytes"
	"strings"
	"testing"

	"warmroute/replay"
)

func TestGatesJudgeByTheBestOther(t *testing.T) {
	report := replay.Report{Results: []replay.Summary{
		{Policy: ours, Requests: 99, Lost: 1, TTFTMean: 0.9, E2EMean: 2, HitRatio: 0.3},
		{Policy: "random", Requests: 100, TTFTMean: 2, E2EMean: 1},
		{Policy: "chwbl", Requests: 100, TTFTMean: 1, E2EMean: 4},
		{Policy: replay.Pooled, Requests: 100, TTFTMean: 0.5, E2EMean: 0.5, HitRatio: 0.4},
	}}
	f := func(g gate, failed int, want ...string) {
		t.Helper()
		var out bytes.Buffer
		if got := newTable(&out).row(row{name: "row", gates: []gate{g}}, report); got != failed {
			t.Errorf("%s: %d failed, want %d", g.what, got, failed)
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("no %q in %s", w, &out)
			}
		}
	}
	f(toBest(ttft(), 0.9), 0, "(chwbl)", "0.900", "pass")
	f(toBest(ttft(), 0.89), 1, "(chwbl)", "FAIL")
	f(toBest(e2e(), 0), 0, "(random)", "2.000", " -\n")
	f(toPooled(hits(), 0.7, true), 0, "0.750", "≥ 0.7", "pass")
	f(toPooled(hits(), 0.8, true), 1, "FAIL")
	f(noneLost(), 1, "0.990", "FAIL")
	learning := func(us, wrong, right float64) {
		report.Results = []replay.Summary{{Policy: ours, TTFTMean: us}, {Policy: unlearned, TTFTMean: wrong}, {Policy: told, TTFTMean: right}}
	}
	learning(1.25, 2, 1)
	f(wonBack(ttft(), 0.5), 0, "0.750", "pass")
	learning(1.75, 2, 1)
	f(wonBack(ttft(), 0.5), 1, "0.250", "FAIL")
	learning(1, 1.01, 1)
	f(wonBack(ttft(), 0.5), 0, "won back", "cost nothing")
	report.Results = report.Results[:1]
	f(toBest(ttft(), 0.9), 0) // nobody to compare with: no line
}

func TestRivalsAreKeptByRowScenarioAndSeeds(t *testing.T) {
	path := t.TempDir() + "/rivals.json"
	kept, err := openRivals(path)
	if err != nil {
		t.Fatal(err)
	}
	// The trace is read anew in every run.
	playing := func(name string, load float64, blocks ...uint64) variant {
		trace := &replay.Trace{Requests: []replay.TraceRequest{{PromptTokens: 600, Blocks: blocks}}}
		return variant{name, replay.Scenario{Policy: name, Workload: replay.Traced{Trace: trace, Load: load}}}
	}
	of := func(name string, load float64) variant { return playing(name, load, 1, 2) }
	kept.add("row", of("chwbl", 0.9), 5, replay.Summary{Policy: "chwbl", TTFTMean: 2})
	kept.add("row", of(ours, 0.9), 5, replay.Summary{Policy: ours, TTFTMean: 1})
	if err := kept.save(); err != nil {
		t.Fatal(err)
	}
	if kept, err = openRivals(path); err != nil {
		t.Fatal(err)
	}
	f := func(row string, v variant, seeds int, want float64) {
		t.Helper()
		if got, ok := kept.find(row, v, seeds); got.TTFTMean != want || ok != (want > 0) {
			t.Errorf("%s, %+v, %d seeds: got %+v", row, v, seeds, got)
		}
	}
	f("row", of("chwbl", 0.9), 5, 2)
	f("row", of("chwbl", 0.9), 1, 0)
	f("row", of("chwbl", 1.1), 5, 0)
	f("row", playing("chwbl", 0.9, 1, 3), 5, 0)
	f("other", of("chwbl", 0.9), 5, 0)
	f("row", of(ours, 0.9), 5, 0) // played anew every time
}
