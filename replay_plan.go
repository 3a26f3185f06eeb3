package main

import (
	"cmp"
	"math"

	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/replay"
)

// replayPlan is what to run: for each report its policies, and for each of
// these its seeds.
type replayPlan struct {
	reports   []replay.Report // one a load, without results
	policies  int             // that each report compares
	scenarios []replay.Scenario
}

func (o *replayOptions) plan() (*replayPlan, error) {
	w, err := o.open()
	if err != nil {
		return nil, err
	}
	changes, err := o.parseChanges()
	if err != nil {
		return nil, err
	}
	c, err := o.settings()
	if err != nil {
		return nil, err
	}
	base := replay.Scenario{
		Backends: o.backends, KVTokens: o.kvTokens, Engine: o.engine, Speeds: o.fleetSpeeds(), Changes: changes,
		Settings: policySettings(c.Routing), SLO: cmp.Or(o.slo, c.SLO.TTFT),
		PollInterval: o.poll, PollLag: o.pollLag,
		NonStreaming: o.nonStreaming, NoUsage: o.noUsage, IndexFactor: o.indexFactor, NoLearning: !o.learning, Evictions: o.evictions,
	}
	if o.config != "" && o.poll == 0 {
		base.PollInterval = c.Poll.Interval
	}
	if o.hold {
		base.Hold = holdOptions(c.Routing)
	}
	loads := o.loads
	if len(loads) == 0 {
		loads = []float64{0}
	}
	p := &replayPlan{policies: len(o.policies)}
	for _, load := range loads {
		report := replay.Report{Trace: w.name, Backends: o.backends, Load: load, Seeds: o.seeds}
		if load == 0 {
			// Three digits: the rest depends on how a coarse clock's stamps are spread.
			report.Load = math.Round(w.load*1000) / 1000
		}
		p.reports = append(p.reports, report)
		s := base
		s.Workload = w.at(load)
		for _, s.Policy = range o.policies {
			for i := range o.seeds {
				s.Seed = o.seed + uint64(i)
				p.scenarios = append(p.scenarios, s)
			}
		}
	}
	return p, nil
}

// settings are those of --config, or the defaults; the backends in them are of no
// interest here.
func (o *replayOptions) settings() (*config.Config, error) {
	flags := pflag.NewFlagSet("replay", pflag.ContinueOnError)
	flags.String("config", o.config, "")
	return config.Load(defaultConfig, flags, []string{"http://replica"})
}

// fleetSpeeds repeats the speeds over the fleet.
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

// fill gives the reports their results, of runs in the order of the scenarios.
func (p *replayPlan) fill(runs []replay.Summary) []replay.Report {
	for i := range p.reports {
		r := &p.reports[i]
		for range p.policies {
			r.Results = append(r.Results, replay.Mean(runs[:r.Seeds]))
			runs = runs[r.Seeds:]
		}
	}
	return p.reports
}
