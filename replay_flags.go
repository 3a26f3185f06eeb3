package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"warmroute/backends/vllmsim"
	"warmroute/replay"
	"warmroute/router/policy"
)

// replayOptions are the flags of replay.
type replayOptions struct {
	trace string
	loads []float64

	backends int
	kvTokens int
	speeds   []float64
	engine   vllmsim.EngineConfig
	changes  []string

	policies []string
	hold     bool
	slo      time.Duration
	seeds    int
	seed     uint64

	poll, pollLag time.Duration
	nonStreaming  float64
	noUsage       bool
	indexFactor   float64
	evictions     float64

	json bool
	plot string
}

func (o *replayOptions) addTo(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVar(&o.trace, "trace", "", "recorded requests to play, a JSON object a line")
	f.Float64SliceVar(&o.loads, "load", nil, "load to stretch or squeeze arrivals to, or several: 0.7,0.9; without it they come as recorded")
	f.StringSliceVar(&o.policies, "policy", []string{"prefix", "least-load", "round-robin", replay.Pooled}, `policies to compare, or "all"`)
	f.IntVar(&o.backends, "backends", 8, "simulated replicas")
	f.IntVar(&o.kvTokens, "kv-tokens", 1_536_000, "size of each replica's KV cache in tokens")
	f.IntVar(&o.seeds, "seeds", 1, "runs with seeds of their own, of which the mean is printed")
	f.Uint64Var(&o.seed, "seed", 1, "the first of these seeds")
	f.BoolVar(&o.json, "json", false, "print JSON: an object a line, one for each load")
	f.StringVar(&o.plot, "plot", "", "draw the results to this file, as SVG")

	f.Float64SliceVar(&o.speeds, "speeds", nil, "speeds of the replicas, repeated over the fleet: 1,0.5 makes every second one half as fast")
	f.IntVar(&o.engine.StepTokens, "step-tokens", 8192, "token budget of an engine step")
	f.Float64Var(&o.engine.QuadraticDepth, "quadratic", 0, "share by which a prompt token costs more for each token before it; 1.9e-5 is realistic")
	f.StringArrayVar(&o.changes, "change", nil, "join:N@AT, leave:N@AT or restart:N@AT, where N is a backend from 0: join:7@20m (repeatable)")
	f.BoolVar(&o.hold, "hold", true, "hold requests that no backend can start soon; prefix alone does")
	f.DurationVar(&o.slo, "slo", 0, "time to first token to keep within; 0: none")
	f.DurationVar(&o.poll, "poll", time.Second, "how often the replicas' metrics are read")
	f.DurationVar(&o.pollLag, "poll-lag", 0, "how old they are by then")
	f.Float64Var(&o.nonStreaming, "non-streaming", 0, "share of the requests whose answers do not stream")
	f.BoolVar(&o.noUsage, "no-usage", false, "answers do not say how much was cached")
	f.Float64Var(&o.indexFactor, "index-factor", 1, "size of the KV cache that the router is told, as a multiple of the true one")
	f.Float64Var(&o.evictions, "evictions", 0, "blocks evicted unseen, for each that the cache evicts itself")
}

// check finds the first mistake in the flags, and says how to mend it.
func (o *replayOptions) check() error {
	known := replayPolicies()
	if slices.Equal(o.policies, []string{"all"}) {
		o.policies = known
	}
	seen := make(map[string]bool)
	for _, name := range o.policies {
		switch {
		case !slices.Contains(known, name):
			return fmt.Errorf("--policy %s: there is none of that name; choose of %s, or all", name, strings.Join(known, ", "))
		case seen[name]:
			return fmt.Errorf("--policy names %s twice", name)
		}
		seen[name] = true
	}
	for _, load := range o.loads {
		if !(load > 0 && load <= 100) {
			return fmt.Errorf("--load %g is not between 0 and 100; 1 is what the fleet could prefill without a cache", load)
		}
	}
	for _, speed := range o.speeds {
		if !(speed >= 0.01 && speed <= 100) {
			return fmt.Errorf("--speeds: %g is not between 0.01 and 100; 1 is the described GPU", speed)
		}
	}
	switch {
	case o.trace == "":
		return fmt.Errorf("name the requests to play: --trace FILE")
	case len(o.policies) == 0:
		return fmt.Errorf("--policy names none; choose of %s, or all", strings.Join(known, ", "))
	case o.backends < 1 || o.backends > 1024:
		return fmt.Errorf("--backends %d is not between 1 and 1,024", o.backends)
	case o.kvTokens < 1024 || o.kvTokens > 1<<30:
		return fmt.Errorf("--kv-tokens %d is not between 1,024 and 2^30", o.kvTokens)
	case o.seeds < 1 || o.seeds > 1000:
		return fmt.Errorf("--seeds %d is not between 1 and 1,000", o.seeds)
	case len(o.speeds) > o.backends:
		return fmt.Errorf("--speeds names %d, for %d backends", len(o.speeds), o.backends)
	case !(o.nonStreaming >= 0 && o.nonStreaming <= 1):
		return fmt.Errorf("--non-streaming %g is not a share between 0 and 1", o.nonStreaming)
	case !(o.indexFactor > 0):
		return fmt.Errorf("--index-factor %g is not above 0", o.indexFactor)
	case !(o.evictions >= 0):
		return fmt.Errorf("--evictions %g is below 0", o.evictions)
	case o.engine.StepTokens < 1:
		return fmt.Errorf("--step-tokens %d is below 1", o.engine.StepTokens)
	case !(o.engine.QuadraticDepth >= 0):
		return fmt.Errorf("--quadratic %g is below 0", o.engine.QuadraticDepth)
	case o.slo < 0:
		return fmt.Errorf("--slo %v is below 0; 0 is none", o.slo)
	case o.poll <= 0 || o.pollLag < 0:
		return fmt.Errorf("--poll %v --poll-lag %v: the first has to be above 0, the second not below", o.poll, o.pollLag)
	}
	_, err := o.parseChanges()
	return err
}

// replayPolicies are those of production and the reference.
func replayPolicies() []string {
	return append(slices.Clone(policy.Names), replay.Pooled)
}

// parseChanges reads what happens to the fleet.
func (o *replayOptions) parseChanges() ([]replay.Change, error) {
	var changes []replay.Change
	for _, text := range o.changes {
		var kind string
		var c replay.Change
		event, at, found := strings.Cut(text, "@")
		kind, place, named := strings.Cut(event, ":")
		when, err := time.ParseDuration(at)
		if _, e := fmt.Sscanf(place+"\n", "%d\n", &c.Backend); !found || !named || e != nil || err != nil || when < 0 {
			return nil, fmt.Errorf("--change %s is not like join:7@20m, leave:0@600s or restart:3@1h", text)
		}
		what, ok := map[string]replay.WhatChanges{"join": replay.Join, "leave": replay.Leave, "restart": replay.Restart}[kind]
		switch {
		case !ok:
			return nil, fmt.Errorf("--change %s: a backend can join, leave or restart", text)
		case c.Backend < 0 || c.Backend >= o.backends:
			return nil, fmt.Errorf("--change %s: the fleet's backends are 0 to %d", text, o.backends-1)
		}
		c.At, c.What = when, what
		changes = append(changes, c)
	}
	if len(changes) > 0 && slices.Contains(o.policies, replay.Pooled) {
		return nil, fmt.Errorf("--change: the policy %s has no backends that could change; leave it out of --policy", replay.Pooled)
	}
	return changes, nil
}
