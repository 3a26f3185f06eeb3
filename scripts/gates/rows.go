package main

import (
	"fmt"
	"time"

	"warmroute/replay"
	"warmroute/router"
	"warmroute/sim/engine"
)

// row is a scenario, or a few to be compared, and the figures that judge it.
type row struct {
	name     string
	scenario replay.Scenario // but for the policy and the seed
	variants []variant       // of the scenario under prefix, instead of policies
	gates    []gate
}

// variant is a way to play a scenario; the one labelled prefix is judged.
type variant struct {
	label    string
	scenario replay.Scenario
}

// runs are what to play: the scenario under each policy, or its variants.
func (r row) runs(policies []string) []variant {
	if r.variants != nil {
		return r.variants
	}
	var all []variant
	for _, name := range policies {
		s := r.scenario
		s.Policy = name
		all = append(all, variant{name, s})
	}
	return all
}

const fleet = 8

// hold is the admission queue as config.yaml has it, but for its bound in time: a
// mean over those that were not given up would compare with nobody's.
func hold() router.QueueSettings {
	return router.QueueSettings{Requests: 1000, Bytes: 256 << 20}
}

func scenario(w replay.Workload, kvTokens int) replay.Scenario {
	return replay.Scenario{Backends: fleet, KVTokens: kvTokens, Queue: hold(), Workload: w}
}

// rows are those that must pass, then those that are to be known.
func rows(trace *replay.Trace) []row {
	all := mooncakeRows(trace)
	all = append(all, madeRows()...)
	all = append(all, fleetRows(trace)...)
	all = append(all, learningRows(trace)...)
	return append(all, otherSizes(trace)...)
}

// mooncakeRows are the conversation trace under three loads and three cache sizes.
func mooncakeRows(trace *replay.Trace) []row {
	f := func(kvTokens int, load, toBestOther float64, more ...gate) row {
		return row{
			name:     fmt.Sprintf("mooncake-%dk-%g", kvTokens/1000, load),
			scenario: scenario(replay.Traced{Trace: trace, Load: load}, kvTokens),
			gates:    append([]gate{toBest(ttft(), toBestOther), toBest(p99(), 1.08), work(1.15), noneLost()}, more...),
		}
	}
	near := toPooled(ttft(), 1.15, false)
	return []row{
		f(1_536_000, 0.7, 0.98, near, toPooled(hits(), 0.9, true)),
		f(1_536_000, 0.9, 0.92, near),
		f(1_536_000, 1.1, 0.85, near),
		f(400_000, 0.7, 0.98),
		f(400_000, 0.9, 0.8),
		f(204_800, 0.9, 0.5),
	}
}

// madeRows are the generated workloads.
func madeRows() []row {
	agentic := func(sessions int) row {
		return row{
			name:     fmt.Sprintf("agentic-%d", sessions),
			scenario: scenario(replay.Agentic{Concurrency: sessions}, 1_536_000),
			gates:    []gate{toBest(e2e(), 1.03), toBest(ttft(), 0), toBest(p99(), 0), noneLost()},
		}
	}
	hot := func(prompts int, rate float64) row {
		return row{
			name:     fmt.Sprintf("hot-%d-%g/s", prompts, rate),
			scenario: scenario(replay.Hot(prompts, rate), 1_536_000),
			gates:    []gate{toBest(e2e(), 1.08), inFlight(1.3), toBest(ttft(), 0), noneLost()},
		}
	}
	return []row{
		agentic(48), agentic(128), hot(1, 20), hot(1, 60), hot(8, 20), hot(8, 60),
		{
			name: "chats", scenario: scenario(replay.OpenChats(), 0),
			gates: []gate{toBest(e2e(), 1.03), toBest(ttftFrom50ms(), 1.1), noneLost()},
		},
		{
			name: "documents", scenario: scenario(replay.Documents{Load: 1.5}, 1_536_000),
			gates: []gate{toBest(e2e(), 0), toBest(ttft(), 0), noneLost()},
		},
	}
}

// fleetRows are the trace on fleets that are uneven, grow, or are seen late.
func fleetRows(trace *replay.Trace) []row {
	half := scenario(replay.Traced{Trace: trace, Load: 0.7}, 1_536_000)
	half.Speeds = []float64{1, 0.5, 1, 0.5, 1, 0.5, 1, 0.5}

	joins := scenario(replay.Traced{Trace: trace, Load: 0.9}, 1_536_000)
	joins.Changes = []replay.Change{{At: 20 * time.Minute, Backend: fleet - 1, Kind: replay.Join}}

	polled := scenario(replay.Traced{Trace: trace, Load: 0.9}, 1_536_000)
	polled.Policy, polled.PollInterval = ours, time.Second
	often := polled
	often.PollInterval = 100 * time.Millisecond

	return []row{
		{name: "half-speed", scenario: half, gates: []gate{toBest(ttft(), 0.9), toBest(p99(), 0), noneLost()}},
		{
			name: "joins", variants: []variant{{ours, withPolicy(joins, ours)}},
			gates: []gate{own("its work within two minutes / mean", func(s replay.Summary) float64 { return s.NewBackendShare }, 0.7, true)},
		},
		{
			name: "polling", variants: []variant{{ours, polled}, {"every 100 ms", often}},
			gates: []gate{toBest(ttft(), 1.03)},
		},
	}
}

func withPolicy(s replay.Scenario, name string) replay.Scenario {
	s.Policy = name
	return s
}

// learningRows are what learning wins back where the router is told the wrong
// size of the caches, or blocks vanish unseen. Requests are held, as they are by
// default: the queue makes up for much of it, of some mistakes for all.
func learningRows(trace *replay.Trace) []row {
	var all []row
	f := func(name string, wrong, right replay.Scenario) {
		for _, kvTokens := range []int{1_536_000, 400_000} {
			for _, usage := range []string{"", "-no-usage"} {
				play := func(s replay.Scenario, learning bool) replay.Scenario {
					s.Backends, s.KVTokens, s.Policy, s.Queue = fleet, kvTokens, ours, hold()
					s.Workload, s.NoUsage, s.NoLearning = replay.Traced{Trace: trace, Load: 0.9}, usage != "", !learning
					return s
				}
				all = append(all, row{
					name:     fmt.Sprintf("%s-%dk%s", name, kvTokens/1000, usage),
					variants: []variant{{ours, play(wrong, true)}, {unlearned, play(wrong, false)}, {told, play(right, false)}},
					gates:    []gate{cost(ttft()), wonBack(ttft(), 0.5)},
				})
			}
		}
	}
	f("told-half", replay.Scenario{IndexFactor: 0.5}, replay.Scenario{})
	f("told-double", replay.Scenario{IndexFactor: 2}, replay.Scenario{})
	// With a block lost for each one evicted, a cache is worth half its size.
	f("evicting", replay.Scenario{Evictions: 1}, replay.Scenario{Evictions: 1, IndexFactor: 0.5})
	return all
}

// otherSizes are to be known: a formula that was tuned to one fleet or one
// engine would show here.
func otherSizes(trace *replay.Trace) []row {
	known := []gate{toBest(ttft(), 0), toBest(p99(), 0), toBest(e2e(), 0), toPooled(ttft(), 0, false), work(0), noneLost()}
	var all []row
	for _, backends := range []int{2, 4, 16, 64} {
		s := scenario(replay.Traced{Trace: trace, Load: 0.9}, 1_536_000)
		s.Backends = backends
		all = append(all, row{name: fmt.Sprintf("fleet-of-%d", backends), scenario: s, gates: known})
	}
	f := func(name string, engine engine.Config) {
		s := scenario(replay.Traced{Trace: trace, Load: 0.9}, 1_536_000)
		s.Engine = engine
		all = append(all, row{name: name, scenario: s, gates: known})
	}
	// Prompts of 3 to 5 bytes a token, where the router guesses by 4.
	uneven := scenario(replay.Traced{Trace: trace, Load: 0.9}, 1_536_000)
	uneven.TextSpread = 0.25
	all = append(all, row{name: "uneven-text", scenario: uneven, gates: known})
	f("step-2048", engine.Config{StepTokens: 2048})
	f("quadratic", engine.Config{QuadraticDepth: 1.9e-5})
	return all
}
