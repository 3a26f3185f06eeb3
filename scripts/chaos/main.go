// Command chaos puts a fleet under load and hurts it: replicas are killed,
// restarted, hung, slowed, cut off and garbled, and every request has to be
// answered, or to fail in a way that the failure table (docs/architecture.md, "Attempts") allows.
//
//	go run ./scripts/chaos                    simulated replicas, about four minutes
//	go run ./scripts/chaos --only kill,outage
//	go run ./scripts/chaos --real             vLLM on this machine's CPU (scripts/vllm-cpu/setup.sh first)
//
// It builds the binary, and everything runs as a process of its own: the proxy
// with its default settings, and the replicas. Every answer is compared with what
// a replica without trouble says. Exit status 1: something was lost or wrong.
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

	"warmroute/loadgen"
	"warmroute/scripts/testbed"
)

func main() { testbed.Main("chaos", run) }

// options are what the flags say.
type options struct {
	binary   string
	real     bool
	replicas int
	clients  int
	length   time.Duration
	asJSON   bool

	batchRequests int
}

func run(ctx context.Context) (ok bool, err error) {
	var o options
	flag.StringVar(&o.binary, "binary", "", "warmroute, built; none: it is built from this directory")
	flag.BoolVar(&o.real, "real", false, "real vLLM replicas on the CPU, 2 GB each")
	flag.IntVar(&o.replicas, "replicas", 4, "how many; with -real 2 are enough, and 3 the most")
	flag.IntVar(&o.clients, "clients", 32, "that ask one question after another, half of them for streams")
	only := flag.String("only", "", "scenarios to play, comma-separated; none: all")
	flag.DurationVar(&o.length, "for", 0, "begin again with the first scenario until this has passed; 0: once through")
	flag.IntVar(&o.batchRequests, "batch", 2000, "batch requests of the scenario batch; 10000 take two minutes")
	list := flag.Bool("list", false, "name the scenarios and exit")
	flag.BoolVar(&o.asJSON, "json", false, "print one JSON object at the end")
	flag.Parse()
	var names []string
	if *only != "" {
		names = strings.Split(*only, ",")
	}
	chosen, unknown := named(o.scenarios(), names, o.real)
	if len(unknown) > 0 {
		return false, fmt.Errorf("no such scenario: %s; -list names them", strings.Join(unknown, ", "))
	}
	if *list {
		for _, s := range chosen {
			fmt.Printf("%-16s %s\n", s.name, s.about)
		}
		return true, nil
	}
	if o.replicas < 2 || o.real && o.replicas > 3 {
		return false, errors.New("-replicas must be 2 at least, and 3 at most with -real")
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
	ok, err = o.play(ctx, dir, chosen)
	if ok {
		err = os.RemoveAll(dir)
	} else {
		fmt.Fprintln(os.Stderr, "logs are in", dir)
	}
	return ok, err
}

// play runs the fleet, plays the scenarios and reports.
func (o *options) play(ctx context.Context, dir string, chosen []scenario) (ok bool, err error) {
	r, err := o.start(ctx, dir)
	defer func() { err = errors.Join(err, r.end()) }()
	if err != nil {
		return false, err
	}
	load := &clients{url: r.proxy.URL, model: "sim", number: o.clients}
	if o.real {
		load.model, load.number = "tiny", min(o.clients, 12)
		load.questions, err = newQuestions(ctx, r.replicas[0].URL, load.model, 32, conversations(loadgen.Range{Min: 20, Max: 120}))
	} else {
		load.questions, err = simulatedQuestions(ctx, 256)
	}
	if err != nil {
		return false, err
	}
	r.load = load
	idle, err := r.proxy.Scrape(ctx)
	if err != nil {
		return false, err
	}
	report := report{out: os.Stdout, quiet: o.asJSON}
	for began := time.Now(); ; {
		for _, s := range chosen {
			row, err := r.scene(ctx, s, load)
			if err != nil {
				return false, err
			}
			report.add(row)
		}
		if time.Since(began) >= o.length {
			break
		}
	}
	if err := report.end(ctx, r.proxy, idle); err != nil {
		return false, err
	}
	return report.OK, report.finish(o.asJSON)
}

// start brings replicas and proxy up. What it returns has to be ended.
func (o *options) start(ctx context.Context, dir string) (*rig, error) {
	r := &rig{real: o.real, dir: dir}
	r.newReplica = func(name string, args ...string) (*testbed.Replica, error) {
		ports, err := testbed.FreePorts(1)
		if err != nil {
			return nil, err
		}
		return testbed.Simulated(o.binary, dir, name, ports[0], false, args...), nil
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
	ports, err := testbed.FreePorts(o.replicas + 2)
	if err != nil {
		return r, err
	}
	for i, port := range ports[2:] {
		// Every second one drains, as some fleets do and others do not.
		name, drains := fmt.Sprint("r", i), i%2 == 1
		if o.real {
			r.replicas = append(r.replicas, testbed.VLLM(".", dir, name, port, drains))
		} else {
			r.replicas = append(r.replicas, testbed.Simulated(o.binary, dir, name, port, drains, "--kv-tokens", "200000"))
		}
	}
	for _, one := range r.replicas {
		if err := one.Start(); err != nil {
			return r, err
		}
	}
	for _, one := range r.replicas {
		if err := one.AwaitHealthy(ctx); err != nil {
			return r, err
		}
	}
	r.proxy = testbed.NewProxy(o.binary, dir, ports[0], ports[1], "log: {level: info}")
	if err := r.proxy.Configure(r.replicas); err != nil {
		return r, err
	}
	if err := r.proxy.Start(ctx); err != nil {
		return r, err
	}
	return r, r.awaitReady(ctx, len(r.replicas))
}

// end ends what start started.
func (r *rig) end() error {
	var errs []error
	if r.proxy != nil {
		errs = append(errs, r.proxy.End(failsafe))
	}
	for _, one := range r.replicas {
		if one.Runs() {
			errs = append(errs, testbed.Kill(one))
		}
	}
	return errors.Join(errs...)
}
