// Command chaos runs a proxy and replicas under load and injects failures: replicas are
// killed, restarted, hung, slowed and disconnected. Every request must be completed, or
// fail in a way that the failure table allows (lab/docs/internals.md).
//
//	go run ./lab/chaos                        all scenarios with simulated replicas, about seven minutes
//	go run ./lab/chaos --only kill,outage
//	go run ./lab/chaos --real                 vLLM on this machine's CPU (scripts/vllm-cpu/setup.sh first)
//	go run ./lab/chaos --only proxy-restart   hit ratio before and after a restart of the proxy, about nine minutes
//	go run ./lab/chaos --only split --split 5m   replicas for prefill and for decode are killed in turn
//	go run ./lab/chaos --only stress --stress 1000000   looks for requests that hang
//	go run ./lab/chaos --soak 10m             mixed traffic; fails if memory, goroutines or descriptors grow
//	go run ./lab/chaos --soak 10m --tls       the same with TLS, a third of the clients over HTTP/2
//
// It builds the binary; the proxy, with its default settings, and the replicas are
// processes. Every output is compared with that of an undisturbed replica. Exit status
// 1: a request was lost or an output was wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

func main() { testbed.Main("chaos", parseFlagsAndRun) }

// options are the flags.
type options struct {
	binary   string
	real     bool
	replicas int
	clients  int
	length   time.Duration
	asJSON   bool

	lowPriorityRequests int
	stressRequests      int
	window              time.Duration
	split               time.Duration
	soak                time.Duration
	tls                 bool
}

// parseFlagsAndRun runs the scenarios or the soak that the flags choose. ok is false if a
// requirement was violated.
func parseFlagsAndRun(ctx context.Context) (ok bool, err error) {
	var o options
	flag.StringVar(&o.binary, "binary", "", "warmroute `FILE` to test; default: build it from the working directory")
	flag.BoolVar(&o.real, "real", false, "run real vLLM replicas on the CPU, 2 GB each")
	flag.IntVar(&o.replicas, "replicas", 4, "number of replicas; 2 or 3 with -real")
	flag.IntVar(&o.clients, "clients", 32, "number of concurrent clients; half of their requests stream")
	only := flag.String("only", "", "scenarios to run, separated by commas; default: all but proxy-restart, stale-index, stress and turns")
	flag.DurationVar(&o.length, "for", 0, "repeat the scenarios until `DURATION` has passed; 0: once")
	flag.IntVar(&o.lowPriorityRequests, "low-priority", 2000, "number of requests of the scenario low-priority; 10000 take two minutes")
	flag.IntVar(&o.stressRequests, "stress", 20_000, "requests of the scenario stress")
	flag.DurationVar(&o.window, "window", time.Minute, "measured time before and after the restart in the scenario proxy-restart")
	flag.DurationVar(&o.split, "split", 0, "how long the scenario split kills replicas; 0: one of each kind")
	flag.DurationVar(&o.soak, "soak", 0, "instead of scenarios, send mixed traffic for `DURATION` and check that nothing grows")
	flag.BoolVar(&o.tls, "tls", false, "with -soak: clients use TLS, a third of them HTTP/2")
	list := flag.Bool("list", false, "list the scenarios and exit")
	flag.BoolVar(&o.asJSON, "json", false, "print one JSON object at the end")
	flag.Parse()
	if *list {
		for _, s := range o.scenarios() {
			fmt.Printf("%-16s %s\n", s.name, s.about)
		}
		return true, nil
	}
	var names []string
	if *only != "" {
		names = strings.Split(*only, ",")
	}
	chosen, unknown := chooseScenarios(o.scenarios(), names, o.real)
	if len(unknown) > 0 {
		return false, fmt.Errorf("unknown scenario: %s; -list lists them", strings.Join(unknown, ", "))
	}
	if o.replicas < 2 || o.real && o.replicas > 3 {
		return false, errors.New("-replicas must be at least 2, and at most 3 with -real")
	}
	dir, err := os.MkdirTemp("", "chaos")
	if err != nil {
		return false, err
	}
	if o.binary == "" {
		o.binary = filepath.Join(dir, "warmroute")
		if err := testbed.Build(ctx, o.binary); err != nil {
			return false, err
		}
	}
	if o.soak != 0 {
		ok, err = o.runSoak(ctx, dir)
	} else {
		ok, err = o.runScenarios(ctx, dir, chosen)
	}
	if ok {
		err = os.RemoveAll(dir)
	} else {
		fmt.Fprintln(os.Stderr, "logs are in", dir)
	}
	return ok, err
}

// runScenarios starts the fleet, runs the scenarios and prints the report.
func (o *options) runScenarios(ctx context.Context, dir string, chosen []scenario) (ok bool, err error) {
	r, err := o.startRig(ctx, dir)
	defer func() { err = errors.Join(err, r.endProcesses()) }()
	if err != nil {
		return false, err
	}
	load := &clients{url: r.proxy.URL, model: "sim", number: o.clients}
	if o.real {
		load.model, load.number = "tiny", min(o.clients, 12)
		load.prompts, err = recordPrompts(ctx, r.replicas[0].URL, load.model, 32, newChats(loadgen.Range{Min: 20, Max: 120}))
	} else {
		load.prompts, err = recordSimulatedPrompts(ctx, 256)
	}
	if err != nil {
		return false, err
	}
	r.load = load
	idle, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return false, err
	}
	report := report{out: os.Stdout, quiet: o.asJSON}
	for began := time.Now(); ; {
		for _, s := range chosen {
			row, err := r.runScenario(ctx, s, load)
			if err != nil {
				return false, err
			}
			report.addAndPrint(row)
		}
		if time.Since(began) >= o.length {
			break
		}
	}
	if err := report.checkLeaks(ctx, r.proxy, idle); err != nil {
		return false, err
	}
	return report.OK, report.printSummary(o.asJSON)
}

// newRig returns a rig without processes.
func (o *options) newRig(dir string) *rig {
	r := &rig{real: o.real, dir: dir}
	r.newReplica = func(name string, args ...string) (*testbed.Replica, error) {
		ports, err := testbed.FreePorts(1)
		if err != nil {
			return nil, err
		}
		return testbed.NewSimulatedReplica(o.binary, dir, name, ports[0], false, args...), nil
	}
	r.newProxy = func(name, settings string) (*testbed.Proxy, error) {
		ports, err := testbed.FreePorts(2)
		if err != nil {
			return nil, err
		}
		own := filepath.Join(dir, name)
		if err := os.MkdirAll(own, 0o700); err != nil {
			return nil, err
		}
		return testbed.NewProxy(o.binary, own, ports[0], ports[1], settings), nil
	}
	return r
}

// startRig returns a rig whose proxy and replicas run. The caller must call
// endProcesses, also after an error.
func (o *options) startRig(ctx context.Context, dir string) (*rig, error) {
	r := o.newRig(dir)
	ports, err := testbed.FreePorts(o.replicas + 2)
	if err != nil {
		return r, err
	}
	for i, port := range ports[2:] {
		// Every second replica drains on SIGTERM, since some fleets do and others do not.
		name, drains := fmt.Sprint("r", i), i%2 == 1
		if o.real {
			r.replicas = append(r.replicas, testbed.NewVLLMReplica(".", dir, name, port, drains))
		} else {
			r.replicas = append(r.replicas, testbed.NewSimulatedReplica(o.binary, dir, name, port, drains, "--kv-tokens", "200000"))
		}
	}
	r.proxy = testbed.NewProxy(o.binary, dir, ports[0], ports[1], "log: {level: info}")
	return r, r.startAndAwaitAll(ctx)
}

// startAndAwaitAll starts the replicas and then the proxy, and waits until all are ready.
func (r *rig) startAndAwaitAll(ctx context.Context) error {
	if err := r.startAndAwaitHealthy(ctx, r.replicas); err != nil {
		return err
	}
	if err := r.proxy.WriteConfig(r.replicas); err != nil {
		return err
	}
	if err := r.proxy.StartAndAwait(ctx); err != nil {
		return err
	}
	return r.awaitReadyBackends(ctx, len(r.replicas))
}

// startAndAwaitHealthy starts replicas at once and waits until each responds to its health check.
func (r *rig) startAndAwaitHealthy(ctx context.Context, replicas []*testbed.Replica) error {
	for _, one := range replicas {
		if err := one.Start(); err != nil {
			return err
		}
	}
	for _, one := range replicas {
		if err := one.AwaitHealthy(ctx); err != nil {
			return err
		}
	}
	return nil
}

// endProcesses terminates the proxy and kills the replicas, and waits for them.
func (r *rig) endProcesses() error {
	var errs []error
	if r.proxy != nil {
		errs = append(errs, r.proxy.Terminate(waitTimeout))
	}
	for _, one := range r.replicas {
		if one.Running() {
			errs = append(errs, testbed.KillAndWait(one))
		}
	}
	return errors.Join(errs...)
}
