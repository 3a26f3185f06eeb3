package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"warmroute/replay"
	"warmroute/router/policy"
	"warmroute/sim/engine"
)

// replayOptions are the flags of replay.
type replayOptions struct {
	trace, workload string
	sessions        int // 0: not said, as below
	prompts         int
	rate            float64
	loads           []float64

	backends int
	kvTokens int
	speeds   []float64
	engine   engine.Config
	changes  []string

	config   string
	policies []string
	hold     bool
	slo      time.Duration
	seeds    int
	seed     uint64

	poll, pollLag time.Duration
	nonStreaming  float64
	noUsage       bool
	indexFactor   float64
	learning      bool
	evictions     float64

	json bool
	plot string
}

func (o *replayOptions) addTo(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVar(&o.trace, "trace", "", "recorded requests to play, a JSON object a line, from `FILE`")
	f.StringVar(&o.workload, "workload", "", "generated requests to play, by `NAME`: "+strings.Join(workloadNames(), ", "))
	f.IntVar(&o.sessions, "sessions", 0, "agentic: `K` sessions open at once (default 48)")
	f.IntVar(&o.prompts, "prompts", 0, "hot: `N` prompts that requests share (default 1)")
	f.Float64Var(&o.rate, "rate", 0, "hot: `R` requests a second (default 20)")
	f.Float64SliceVar(&o.loads, "load", nil, "bring arrivals to each of `LOADS`, like 0.7,0.9: a report for each (default: a trace as recorded, hot by --rate, chats and documents 1.5)")
	f.StringSliceVar(&o.policies, "policy", usualPolicies(), "`POLICIES` to compare, or all")
	f.IntVar(&o.backends, "backends", 8, "`N` simulated replicas")
	f.IntVar(&o.kvTokens, "kv-tokens", 0, "KV cache of each replica, `N` tokens (default 1,536,000; chats 153,600)")
	f.IntVar(&o.seeds, "seeds", 1, "run with `N` seeds, and print the mean")
	f.Uint64Var(&o.seed, "seed", 1, "the first of these seeds, `S`")

	f.Float64SliceVar(&o.speeds, "speeds", nil, "`SPEEDS` of the replicas, repeated over the fleet: 1,0.5 makes every second one half as fast")
	f.IntVar(&o.engine.StepTokens, "step-tokens", 8192, "`N` tokens that an engine takes in a step at most")
	f.Float64Var(&o.engine.QuadraticDepth, "quadratic", 0, "`SHARE` by which a prompt token costs more for each token before it; 1.9e-5 is realistic")
	f.StringArrayVar(&o.changes, "change", nil, "`join:N@AT`, leave:N@AT or restart:N@AT: backend N, from 0, after AT, like 20m; a restart takes a minute (repeatable)")
	f.BoolVar(&o.hold, "queue", true, "queue requests that no backend can start soon; --queue=false sends them on; only policy prefix queues")
	f.StringVar(&o.config, "config", "", "take the admission queue, the policies' gates, slo and poll from the configuration `FILE`")
	f.DurationVar(&o.slo, "slo", 0, "keep the time to first token below `DURATION` (default as configured: none)")
	f.DurationVar(&o.poll, "poll", 0, "read the replicas' metrics every `DURATION` (default 1s, for weighted 50ms as at its home, for all what --config says)")
	f.DurationVar(&o.pollLag, "poll-lag", 0, "see them `DURATION` late")
	f.Float64Var(&o.nonStreaming, "non-streaming", 0, "`SHARE` of the requests whose answers do not stream")
	f.BoolVar(&o.noUsage, "no-usage", false, "answers do not say how much of the prompt was cached")
	f.Float64Var(&o.indexFactor, "index-factor", 1, "tell the router `F` times the KV cache's true size")
	f.BoolVar(&o.learning, "learning", true, "let the router find out what its replicas do not tell, or tell wrongly")
	f.Float64Var(&o.evictions, "evictions", 0, "evict `F` more blocks unseen for each that the cache evicts")
	f.BoolVar(&o.json, "json", false, "print JSON: an object a line, one for each load")
	f.StringVar(&o.plot, "plot", "", "draw the results to `FILE`, as SVG")
}

// check finds the first mistake in the flags, and says how to mend it.
func (o *replayOptions) check(flags *pflag.FlagSet) error {
	known := replayPolicies()
	switch {
	case len(o.policies) == 0:
		return fmt.Errorf("--policy is empty: name at least one policy, or all")
	case slices.Equal(o.policies, []string{"all"}):
		o.policies = known
	case len(o.changes) > 0 && flags.Changed("policy") && slices.Contains(o.policies, replay.Pooled):
		return fmt.Errorf("--change: the policy %s has no backends that could change; leave it out of --policy", replay.Pooled)
	}
	if len(o.changes) > 0 {
		o.policies = slices.DeleteFunc(o.policies, func(name string) bool { return name == replay.Pooled })
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
	switch {
	case o.backends < 1 || o.backends > 1024:
		return fmt.Errorf("--backends %d is not between 1 and 1,024", o.backends)
	case o.kvTokens != 0 && o.kvTokens < 1024 || o.kvTokens > 1<<30:
		return fmt.Errorf("--kv-tokens %d is not between 1,024 and 2^30", o.kvTokens)
	case o.seeds < 1 || o.seeds > 1000:
		return fmt.Errorf("--seeds %d is not between 1 and 1,000", o.seeds)
	case !(o.nonStreaming >= 0 && o.nonStreaming <= 1):
		return fmt.Errorf("--non-streaming %g is not a share between 0 and 1", o.nonStreaming)
	case !(o.indexFactor >= 0.001 && o.indexFactor <= 1000):
		return fmt.Errorf("--index-factor %g is not between 0.001 and 1,000; 1 tells the truth", o.indexFactor)
	case !(o.evictions >= 0 && o.evictions <= 1000):
		return fmt.Errorf("--evictions %g is not between 0 and 1,000 for each eviction of the cache's own", o.evictions)
	case o.engine.StepTokens < 1 || o.engine.StepTokens > 1<<20:
		return fmt.Errorf("--step-tokens %d is not between 1 and 2^20", o.engine.StepTokens)
	case !(o.engine.QuadraticDepth >= 0 && o.engine.QuadraticDepth <= 1):
		return fmt.Errorf("--quadratic %g is not between 0 and 1; 1.9e-5 is realistic", o.engine.QuadraticDepth)
	case o.slo < 0:
		return fmt.Errorf("--slo %v is below 0; 0 is none", o.slo)
	case o.poll != 0 && (o.poll < time.Millisecond || o.poll > time.Hour):
		return fmt.Errorf("--poll %v is not between 1ms and 1h", o.poll)
	case o.pollLag < 0 || o.pollLag > time.Hour:
		return fmt.Errorf("--poll-lag %v is not between 0 and 1h", o.pollLag)
	}
	if err := o.checkLists(); err != nil {
		return err
	}
	if err := o.checkWorkload(); err != nil {
		return err
	}
	_, err := o.parseChanges()
	return err
}

// checkLists is check for what the flags with several values hold.
func (o *replayOptions) checkLists() error {
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
	if len(o.speeds) > o.backends {
		return fmt.Errorf("--speeds names %d, for %d backends", len(o.speeds), o.backends)
	}
	return nil
}

// usualPolicies are compared where none is named.
func usualPolicies() []string { return []string{"prefix", "least-load", "round-robin", replay.Pooled} }

// replayPolicies are those of production and the reference.
func replayPolicies() []string {
	return append(policy.Names(), replay.Pooled)
}

// parseChanges reads what happens to the fleet.
func (o *replayOptions) parseChanges() ([]replay.Change, error) {
	var changes []replay.Change
	for _, text := range o.changes {
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
		c.At, c.What, c.Away = when, what, time.Minute
		changes = append(changes, c)
	}
	return changes, nil
}
