// Command bench measures the cost of warmroute's data plane, compared with nginx and
// other routers, all on this machine and in one run:
//
//	go run ./lab/bench --peers
//
// Mock replicas and load clients are separate processes; a contender's CPU time and
// memory are those that the kernel accounts to its processes. Each round restarts every
// contender for each measurement, in another order. The table shows medians of the
// rounds. Absolute times depend on the machine: compare the ratios. With four
// contenders besides warmroute and three rounds it takes 15 to 20 minutes.
//
//	go run ./lab/bench --baseline ./old-warmroute --contenders warmroute --only requests,chunks --rounds 6
//
// compares with another build of warmroute, here the CPU time per request and per chunk. lab/docs/benchmarks-history.md has what
// the difference to 9c8c211 is spent on.
//
//	go run ./lab/bench --endure 5m
//
// keeps 9,000 streams open through warmroute instead, with one chunk per second each.
//
//	go run ./lab/bench trace --url URL --trace FILE
//
// sends a recorded trace to one server and prints what the client measured.
//
//	go run ./lab/bench agents --url URL --api messages
//
// plays coding agents' conversations, with --trace the text of recorded ones.
//
//	go run ./lab/bench export --trace FILE --load 0.9 --seed 1
//
// writes a trace, scaled to a load, for other load generators.
//
// Exit status 1: a budget is missed. Exit status 2: a measurement failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	// Pdeathsig kills children when the thread that started them ends.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	roles := map[string]func(context.Context, []string) error{"mock": runMock, "load": runLoad, "streams": runStreams, "trace": runTrace,
		"agents": runAgents, "export": runExport}
	if len(os.Args) > 1 && roles[os.Args[1]] != nil {
		if err := roles[os.Args[1]](ctx, os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, os.Args[1]+":", err)
			os.Exit(1)
		}
		return
	}
	switch missed, err := runBench(ctx); {
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	case missed:
		os.Exit(1)
	}
}

// options are the command's flags.
type options struct {
	peers, quick, json bool
	only               string
	rounds             int
	endure             time.Duration
	contenders         string
	baseline           string
}

func parseFlags() (o options, err error) {
	flag.BoolVar(&o.peers, "peers", false, "measure sglang-router, smg and vllm-router too; they are installed from PyPI")
	flag.IntVar(&o.rounds, "rounds", 3, "number of rounds")
	flag.BoolVar(&o.quick, "quick", false, "one short round, for a rough result")
	flag.StringVar(&o.only, "only", "", "measurements to run, separated by commas: requests, latency, chunks, memory, split, idle")
	flag.StringVar(&o.contenders, "contenders", "", "contenders to measure, separated by commas, such as warmroute,nginx")
	flag.StringVar(&o.baseline, "baseline", "", "another build of warmroute to compare with")
	flag.BoolVar(&o.json, "json", false, "print one JSON object")
	flag.DurationVar(&o.endure, "endure", 0, "only keep 9,000 streams open through warmroute for `DURATION`")
	flag.Parse()
	if o.quick {
		o.rounds = 1
	}
	if o.rounds < 1 {
		return o, fmt.Errorf("-rounds %d is below 1", o.rounds)
	}
	for name := range strings.SplitSeq(o.only, ",") {
		if name != "" && !slices.ContainsFunc(measurements, func(m measurement) bool { return m.name == name }) {
			return o, fmt.Errorf("-only: unknown measurement %s", name)
		}
	}
	return o, nil
}

// runBench takes the measurements that the flags name and prints the results.
func runBench(ctx context.Context) (budgetMissed bool, err error) {
	o, err := parseFlags()
	if err != nil {
		return false, err
	}
	contenders := []string{direct, warmroute, splitting, nginx}
	if o.peers {
		contenders = append(contenders, peers...)
	}
	if o.contenders != "" {
		contenders = strings.Split(o.contenders, ",")
	}
	if o.baseline != "" {
		contenders = append(contenders, baseline)
	}
	b := &bench{baseline: o.baseline, warm: 500 * time.Millisecond, window: 1500 * time.Millisecond, results: newResults(),
		progress: os.Stderr}
	if o.quick {
		b.window = 500 * time.Millisecond
	}
	if err := b.resolvePaths(); err != nil {
		return false, err
	}
	if b.dir, err = os.MkdirTemp("", "bench"); err != nil {
		return false, err
	}
	defer os.RemoveAll(b.dir)
	if err := b.installContenders(ctx, slices.ContainsFunc(contenders, func(c string) bool { return slices.Contains(peers, c) })); err != nil {
		return false, err
	}
	if o.endure > 0 {
		return b.runEnduranceTest(ctx, o.endure)
	}
	for round := range o.rounds {
		for _, m := range measurements {
			if o.only != "" && !slices.Contains(strings.Split(o.only, ","), m.name) || m.once && round > 0 {
				continue
			}
			if err := b.measureContenders(ctx, m, round, contenders); err != nil {
				return false, err
			}
		}
	}
	if o.json {
		err = b.results.printJSON(os.Stdout, contenders)
	} else {
		b.results.printTable(os.Stdout, contenders)
	}
	if err == nil && len(b.results.failures) > 0 {
		err = errors.New("a measurement failed")
	}
	return slices.ContainsFunc(b.results.checkBudgets(), func(v budgetResult) bool { return v.Missed }), err
}

// resolvePaths sets the paths of the repository, of this program and of the peers.
func (b *bench) resolvePaths() error {
	module, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return fmt.Errorf("go env: %w", err)
	}
	b.repo = filepath.Dir(strings.TrimSpace(string(module)))
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return err
	}
	b.compare = filepath.Join(home, ".cache", "warmroute-compare")
	if root := os.Getenv("COMPARE_ROOT"); root != "" {
		b.compare = root
	}
	return nil
}

// measureContenders takes one measurement of every contender. It records failures of
// contenders and continues; it returns errors of the replicas and of ctx.
func (b *bench) measureContenders(ctx context.Context, m measurement, round int, contenders []string) error {
	mock, replicas, err := b.startMockReplicas(ctx, m.replicas)
	if err != nil {
		return err
	}
	defer mock.stop()
	for i := range contenders {
		name := contenders[(i+round)%len(contenders)]
		if m.only != nil && !slices.Contains(m.only, name) || m.only == nil && name == splitting {
			continue
		}
		began := time.Now()
		err := b.measureContender(ctx, m, name, replicas)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			b.results.failures = append(b.results.failures, failure{name, m.name, err.Error(), round + 1})
		}
		fmt.Fprintf(b.progress, "round %d, %s, %s: %.0f s", round+1, m.name, name, time.Since(began).Seconds())
		if err != nil {
			fmt.Fprintf(b.progress, ": %v", err)
		}
		fmt.Fprintln(b.progress)
	}
	return nil
}

// measureContender starts a contender, takes one measurement of it and stops it.
func (b *bench) measureContender(ctx context.Context, m measurement, name string, replicas []string) error {
	f, err := b.startContender(ctx, name, replicas)
	if err != nil {
		return err
	}
	defer f.stop()
	if _, err := b.runLoadClient(ctx, f, 16, 1<<10, cold, b.warm); err != nil {
		return err
	}
	return m.measure(b, ctx, name, f)
}

func (b *bench) runEnduranceTest(ctx context.Context, length time.Duration) (failed bool, err error) {
	mock, replicas, err := b.startMockReplicas(ctx, 4)
	if err != nil {
		return false, err
	}
	defer mock.stop()
	failures, err := b.testEndurance(ctx, replicas, length)
	for _, f := range failures {
		fmt.Fprintln(b.progress, "FAILED:", f)
	}
	return len(failures) > 0, err
}
