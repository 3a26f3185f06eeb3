package cli

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"warmroute/cli"
	"warmroute/config"
	"warmroute/lab/replay"
)

// replayPlan lists the runs: for each report its policies, and for each policy its
// seeds.
type replayPlan struct {
	description string          // of the traffic of a running proxy; empty: another workload
	reports     []replay.Report // one per load, without results
	policies    []string        // in each report
	scenarios   []replay.Scenario
}

// loadPlan reads the traffic, the trace and the configuration, if any, and returns the runs. isSet reports whether a flag
// was given.
func (o *replayOptions) loadPlan(ctx context.Context, configs config.Loader, isSet func(flag string) bool) (*replayPlan, error) {
	var traffic *liveTraffic
	var fleet *liveFleet
	if o.from != "" {
		var err error
		if traffic, err = o.readLiveTraffic(ctx, configs); err != nil {
			return nil, err
		}
		if fleet, err = newLiveFleet(traffic.header.Backends); err != nil {
			return nil, err
		}
		if !isSet("backends") {
			o.backends = len(fleet.backends)
			o.useRolesOf(fleet, isSet)
		}
		if !o.hasRoles() && slices.ContainsFunc(o.policies, usesRoles) {
			return nil, fmt.Errorf("--policy: a policy with %s requires --prefill and --decode: the proxy has no replicas for prefill", withRoles)
		}
		if fleet.servesSeveralModels() && !isSet("backends") {
			traffic.trace.AssignModels(fleet.groupOf)
			if len(traffic.trace.Requests) == 0 {
				return nil, errors.New("no ready backend serves the models of the recorded requests: wait until one is ready, or name --backends")
			}
			o.policies = slices.DeleteFunc(o.policies, func(name string) bool { return name == replay.Pooled }) // it has one cache for all
		}
	}
	w, err := o.loadWorkload(traffic)
	if err != nil {
		return nil, err
	}
	changes, err := o.parseChanges()
	if err != nil {
		return nil, err
	}
	engineConfig := o.engine
	if o.step != "" {
		if engineConfig, err = readStep(o.step, o.engine); err != nil {
			return nil, fmt.Errorf("--step: %w", err)
		}
	}
	flags := pflag.NewFlagSet("replay", pflag.ContinueOnError)
	flags.String("config", o.config, "")
	configs.ReplaceBackends = true // only the settings of routing are used
	c, err := configs.Load(flags, []string{"http://unused"})
	if err != nil {
		return nil, err
	}
	base := replay.Scenario{
		Backends: o.backends, KVTokens: o.kvTokens, Engine: engineConfig, Speeds: o.fleetSpeeds(), Devices: o.fleetDevices(), Changes: changes,
		Split:    replay.Split(o.split),
		Settings: c.Routing.Settings, SLO: o.slo,
		PollInterval: o.poll, PollLag: o.pollLag,
		NonStreaming: o.nonStreaming, NoUsage: o.noUsage, NamesConversations: o.conversationIDs, IndexFactor: o.indexFactor,
		NoLearning: !o.learning, Evictions: o.evictions,
		KVEvents: o.kvEvents, Bypass: o.bypass, CountRecomputed: o.recomputed,
	}
	base.SLO.TTFT, base.SLO.Refuse = cmp.Or(o.slo.TTFT, c.SLO.TTFT), o.slo.Refuse || c.SLO.Refuse
	p := &replayPlan{policies: o.policies}
	if fleet != nil {
		if err := fleet.apply(&base, isSet); err != nil {
			return nil, err
		}
		p.description = traffic.describe(fleet, &base)
	}
	if o.config != "" && o.poll == 0 {
		base.PollInterval = c.Poll.Interval
	}
	if o.queue {
		base.Queue = c.Routing.QueueSettings()
	}
	loads := o.loads
	if len(loads) == 0 {
		loads = []float64{0}
	}
	for _, load := range loads {
		report := replay.Report{Trace: w.name, Backends: o.backends, Load: load, Seeds: o.seeds}
		if load == 0 {
			// Further digits depend on the resolution of the trace's timestamps.
			report.Load = math.Round(w.defaultLoad*1000) / 1000
		}
		p.reports = append(p.reports, report)
		s := base
		s.Workload = w.atLoad(load)
		for _, name := range o.policies {
			s.Policy, s.Prefills, s.Decodes = name, 0, 0
			if rule, found := strings.CutSuffix(name, withRoles); found {
				s.Policy, s.Prefills, s.Decodes = rule, o.prefills, o.decodes
			}
			for i := range o.seeds {
				s.Seed = o.seed + uint64(i)
				p.scenarios = append(p.scenarios, s)
			}
		}
	}
	return p, nil
}

// useRolesOf gives the replicas the roles of those of a running proxy, unless flags give them some.
func (o *replayOptions) useRolesOf(f *liveFleet, isSet func(flag string) bool) {
	if f.prefills == 0 || isSet("prefill") || isSet("decode") {
		return
	}
	o.prefills, o.decodes = f.prefills, f.decodes
	if !slices.ContainsFunc(o.policies, usesRoles) {
		o.policies = append([]string{"prefix" + withRoles}, o.policies...)
	}
}

// fleetSpeeds repeats --speeds over the fleet.
func (o *replayOptions) fleetSpeeds() []float64 {
	if len(o.speeds) == 0 {
		return nil
	}
	speeds := make([]float64, o.backends)
	for i := range speeds {
		speeds[i] = o.speeds[i%len(o.speeds)]
	}
	return speeds
}

// fleetDevices puts each --per-device replicas after one another on one device.
func (o *replayOptions) fleetDevices() []int {
	if o.perDevice == 1 {
		return nil
	}
	devices := make([]int, o.backends)
	for i := range devices {
		devices[i] = i / o.perDevice
	}
	return devices
}

// addSeedMeans takes the results of the runs in the order of the scenarios, adds the
// mean over the seeds to the reports, and returns these.
func (p *replayPlan) addSeedMeans(runs []replay.Summary) []replay.Report {
	for i := range p.reports {
		r := &p.reports[i]
		for _, name := range p.policies {
			mean := replay.Mean(runs[:r.Seeds])
			mean.Policy = name
			r.Results = append(r.Results, mean)
			runs = runs[r.Seeds:]
		}
	}
	return p.reports
}

func workloadNames() []string { return []string{"agentic", "hot", "chats", "documents"} }

// replayWorkload is the workload that the flags name.
type replayWorkload struct {
	name        string
	defaultLoad float64                            // 0: a closed loop, which has none
	atLoad      func(load float64) replay.Workload // a load of 0 is the default
}

// loadWorkload returns the traffic, if it is not nil, or the generated workload, or reads the trace.
func (o *replayOptions) loadWorkload(traffic *liveTraffic) (*replayWorkload, error) {
	switch o.workload {
	case "agentic":
		agentic := replay.Agentic{Concurrency: cmp.Or(o.concurrency, 48)}
		return &replayWorkload{
			name:   fmt.Sprintf("agentic-%d", agentic.Concurrency),
			atLoad: func(float64) replay.Workload { return agentic },
		}, nil
	case "hot":
		hot := replay.HotPrompts(cmp.Or(o.prompts, 1), cmp.Or(o.rate, 20))
		return newSharedPromptsWorkload(fmt.Sprintf("hot-%d", hot.Prompts), hot, o.backends), nil
	case "chats":
		return newSharedPromptsWorkload("chats", replay.ChatsOnSmallCaches(), o.backends), nil
	case "documents":
		const defaultLoad = 1.5
		return &replayWorkload{
			name: "documents", defaultLoad: defaultLoad,
			atLoad: func(load float64) replay.Workload { return replay.Documents{Load: cmp.Or(load, defaultLoad)} },
		}, nil
	}
	if traffic != nil {
		return o.newTraceWorkload(strings.TrimPrefix(o.from, "http://"), traffic.trace), nil
	}
	trace, err := readTrace(o.trace)
	if err != nil {
		return nil, cli.UsageError{Err: fmt.Errorf("--trace: %w", err)}
	}
	return o.newTraceWorkload(filepath.Base(o.trace), trace), nil
}

// newTraceWorkload returns the workload of a trace.
func (o *replayOptions) newTraceWorkload(name string, trace *replay.Trace) *replayWorkload {
	if o.closedLoop {
		loop := replay.ClosedLoop{Trace: trace, Concurrency: cmp.Or(o.concurrency, 64)}
		return &replayWorkload{
			name:   fmt.Sprintf("%s, %d conversations at once", name, loop.Concurrency),
			atLoad: func(float64) replay.Workload { return loop },
		}
	}
	return &replayWorkload{
		name: name, defaultLoad: trace.Load(o.backends),
		atLoad: func(load float64) replay.Workload { return replay.Traced{Trace: trace, Load: load} },
	}
}

func newSharedPromptsWorkload(name string, w replay.SharedPrompts, backends int) *replayWorkload {
	return &replayWorkload{name: name, defaultLoad: w.LoadOn(backends), atLoad: func(load float64) replay.Workload {
		w := w
		if load > 0 {
			w.Rate, w.Load = 0, load
		}
		return w
	}}
}

// exportTrace writes the requests of --from or --trace in another format.
func (o *replayOptions) exportTrace(ctx context.Context, configs config.Loader, stdout io.Writer) error {
	var trace *replay.Trace
	if o.from != "" {
		traffic, err := o.readLiveTraffic(ctx, configs)
		if err != nil {
			return err
		}
		trace = traffic.trace
	} else {
		var err error
		if trace, err = readTrace(o.trace); err != nil {
			return cli.UsageError{Err: fmt.Errorf("--trace: %w", err)}
		}
	}
	out := bufio.NewWriter(stdout)
	return errors.Join(trace.WriteMooncake(out), out.Flush())
}

func readTrace(path string) (*replay.Trace, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	trace, err := replay.ParseTrace(file)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	return trace, nil
}
