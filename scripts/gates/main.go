// Command gates plays the scenarios that the routing is judged by and prints
// each figure beside what it must be: is the routing still as good as it was
// said to be, on more than one workload?
//
//	go run ./scripts/gates --trace mooncake-conversation.jsonl
//	go run ./scripts/gates --trace … --rows 'mooncake|chats' --seeds 1 -v
//	go run ./scripts/gates --trace … --rivals /tmp/rivals.json
//
// The last keeps the other policies' figures, and plays only prefix from the
// second time on: what a change of its formula did is known in seconds. Remove
// the file when anything changes that the others use too.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/schollz/progressbar/v3"

	"warmroute/replay"
	"warmroute/router/policy"
)

// ours is the policy that the gates are about.
const ours = "prefix"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch failed, err := run(ctx); {
	case err != nil:
		fmt.Fprintln(os.Stderr, "gates:", err)
		os.Exit(2)
	case failed > 0:
		os.Exit(1)
	}
}

// run returns how many figures are not what they must be.
func run(ctx context.Context) (failed int, err error) {
	path := flag.String("trace", "", "trace in Mooncake's format")
	pattern := flag.String("rows", "", "play only rows whose names this regular expression matches")
	policies := flag.String("policy", strings.Join(append(policy.Names(), replay.Pooled), ","), "policies to compare")
	seeds := flag.Int("seeds", 5, "runs with seeds of their own, of which the mean counts")
	rivals := flag.String("rivals", "", "file to keep the other policies' figures in")
	verbose := flag.Bool("v", false, "print every policy's figures")
	flag.Parse()

	if *seeds < 1 {
		return 0, fmt.Errorf("-seeds %d is below 1", *seeds)
	}
	chosen, err := regexp.Compile(*pattern)
	if err != nil {
		return 0, fmt.Errorf("-rows: %w", err)
	}
	trace, err := readTrace(*path)
	if err != nil {
		return 0, err
	}
	kept, err := openRivals(*rivals)
	if err != nil {
		return 0, err
	}
	out := newTable(os.Stdout)
	for _, r := range rows(trace) {
		if !chosen.MatchString(r.name) {
			continue
		}
		report, err := r.play(ctx, strings.Split(*policies, ","), *seeds, kept)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", r.name, err)
		}
		failed += out.row(r, report)
		if *verbose {
			out.results(report)
		}
	}
	out.end()
	return failed, nil
}

func readTrace(path string) (*replay.Trace, error) {
	if path == "" {
		return nil, errors.New("-trace FILE is missing; Mooncake's conversation trace is the one that the rows are stated for")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return replay.ParseTrace(f)
}

// play runs all of a row that is not kept, and keeps it.
func (r row) play(ctx context.Context, policies []string, seeds int, kept *rivals) (replay.Report, error) {
	var report replay.Report
	runs := r.runs(policies)
	known := make([]bool, len(runs))
	var scenarios []replay.Scenario
	for i, one := range runs {
		mean, ok := kept.find(r.name, one, seeds)
		report.Results, known[i] = append(report.Results, mean), ok
		for seed := 1; seed <= seeds && !ok; seed++ {
			s := one.scenario
			s.Seed = uint64(seed)
			scenarios = append(scenarios, s)
		}
	}
	bar := progressbar.NewOptions(1000, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription(r.name),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetVisibility(isTerminal(os.Stderr)))
	played, err := replay.RunAll(ctx, scenarios, func(share float64) { _ = bar.Set(int(share * 1000)) })
	_ = bar.Clear()
	if err != nil {
		return report, err
	}
	for i, one := range runs {
		if known[i] {
			continue
		}
		mean := replay.Mean(played[:seeds])
		played = played[seeds:]
		mean.Policy = one.label
		report.Results[i] = mean
		kept.add(r.name, one, seeds, mean)
	}
	return report, kept.save()
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
