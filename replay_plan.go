package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"warmroute/replay"
	"warmroute/router"
)

// replayWorkload is what the flags ask to be played.
type replayWorkload struct {
	name   string
	atLoad func(load float64) replay.Workload // 0: as it comes
	// load is what it offers so many backends as it comes; nil where a closed
	// loop has no such thing.
	load func(backends int) float64
}

// open reads the trace or describes the workload.
func (o *replayOptions) open() (*replayWorkload, error) {
	file, err := os.Open(o.trace)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	trace, err := replay.ParseTrace(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.trace, err)
	}
	return &replayWorkload{
		name:   filepath.Base(o.trace),
		atLoad: func(load float64) replay.Workload { return replay.Traced{Trace: trace, Load: load} },
		load:   trace.Load,
	}, nil
}

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
	base := replay.Scenario{
		Backends: o.backends, KVTokens: o.kvTokens, Engine: o.engine, Speeds: o.fleetSpeeds(), Changes: changes,
		SLO: o.slo, PollInterval: o.poll, PollLag: o.pollLag,
		NonStreaming: o.nonStreaming, NoUsage: o.noUsage, IndexFactor: o.indexFactor, Evictions: o.evictions,
	}
	if o.hold {
		base.Hold = router.HoldOptions{Requests: 1000, Bytes: 256 << 20, Time: time.Minute}
	}
	loads := o.loads
	if len(loads) == 0 {
		loads = []float64{0}
	}
	p := &replayPlan{policies: len(o.policies)}
	for _, load := range loads {
		report := replay.Report{Trace: w.name, Backends: o.backends, Load: load, Seeds: o.seeds}
		if load == 0 && w.load != nil {
			// Three digits: the rest depends on how a coarse clock's stamps are spread.
			report.Load = math.Round(w.load(o.backends)*1000) / 1000
		}
		p.reports = append(p.reports, report)
		s := base
		s.Workload = w.atLoad(load)
		for _, s.Policy = range o.policies {
			for i := range o.seeds {
				s.Seed = o.seed + uint64(i)
				p.scenarios = append(p.scenarios, s)
			}
		}
	}
	return p, nil
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
