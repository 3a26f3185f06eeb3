package replay_test

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/lab/replay"
	"warmroute/lab/sim/engine"
	"warmroute/router"
)

// highlight is the policy that the gates judge.
const highlight = "prefix"

// gate is one figure of a row and its bound.
type gate struct {
	what    string
	must    float64 // 0: informative only
	atLeast bool    // must is a lower bound, else an upper bound
	// figure returns the value and the policy it is compared with, or false when that
	// one was not run. NaN: the error that learning should correct cost nothing.
	figure func(replay.Report) (value float64, against string, ok bool)
}

func (g gate) sign() string {
	if g.atLeast {
		return "≥"
	}
	return "≤"
}

// measure is one quantity of a result.
type measure struct {
	name string
	of   func(replay.Summary) float64
}

func ttft() measure {
	return measure{"mean TTFT", func(s replay.Summary) float64 { return s.TTFTMean }}
}
func p99() measure { return measure{"p99 TTFT", func(s replay.Summary) float64 { return s.TTFTP99 }} }
func e2e() measure { return measure{"end to end", func(s replay.Summary) float64 { return s.E2EMean }} }
func longest() measure {
	return measure{"TTFT of longest tenth", func(s replay.Summary) float64 { return s.TTFTLongest }}
}
func sessionTime() measure {
	return measure{"time of a session", func(s replay.Summary) float64 { return s.ConversationTime }}
}
func wallTime() measure {
	return measure{"wall time", func(s replay.Summary) float64 { return s.WallTime }}
}
func gaps() measure {
	return measure{"p99 of gaps", func(s replay.Summary) float64 { return s.ITLP99 }}
}
func hits() measure {
	return measure{"hit ratio", func(s replay.Summary) float64 { return s.HitRatio }}
}

// ttftFrom50ms avoids ratios of very short times.
func ttftFrom50ms() measure {
	return measure{"mean TTFT + 50 ms", func(s replay.Summary) float64 { return s.TTFTMean + 0.05 }}
}

// toBest is prefix over the best other policy.
func toBest(m measure, must float64) gate {
	return gate{what: m.name + " / best other", must: must, figure: func(r replay.Report) (float64, string, bool) {
		us, found := r.Find(highlight)
		best, ok := r.LowestOther(highlight, m.of)
		return m.of(us) / m.of(best), best.Policy, ok && found
	}}
}

// toPooled is prefix over the reference.
func toPooled(m measure, must float64, atLeast bool) gate {
	return gate{what: m.name + " / pooled", must: must, atLeast: atLeast, figure: func(r replay.Report) (float64, string, bool) {
		us, found := r.Find(highlight)
		reference, ok := r.Find(replay.Pooled)
		return m.of(us) / m.of(reference), "", ok && found
	}}
}

// toSplits is prefix over the better or the worse of the variants in which all requests are split, or none.
func toSplits(m measure, must float64, which string, of func(always, never float64) float64) gate {
	return gate{what: m.name + " / " + which + " of always and never split", must: must, figure: func(r replay.Report) (float64, string,
		bool) {
		us, _ := r.Find(highlight)
		always, ok := r.Find(splitAlways)
		never, found := r.Find(splitNever)
		return m.of(us) / of(m.of(always), m.of(never)), "", ok && found
	}}
}

// own is a figure of prefix alone.
func own(what string, of func(replay.Summary) float64, must float64, atLeast bool) gate {
	return gate{what: what, must: must, atLeast: atLeast, figure: func(r replay.Report) (float64, string, bool) {
		us, ok := r.Find(highlight)
		return of(us), "", ok
	}}
}

func work(must float64) gate {
	return own("prefill work, most loaded / mean", func(s replay.Summary) float64 { return s.WorkMaxOverMean }, must, false)
}

func inFlight(must float64) gate {
	return own("in flight, most loaded / mean", func(s replay.Summary) float64 { return s.InFlightMaxOverMean }, must, false)
}

// The variants of a row about learning, besides prefix itself.
const (
	unlearned = "unlearned" // the same error without learning
	correct   = "correct"   // no error
)

// cost is the cost of an error without learning.
func cost(m measure) gate {
	return gate{what: m.name + ", unlearned / correct size reported", figure: func(r replay.Report) (float64, string, bool) {
		wrong, ok := r.Find(unlearned)
		right, found := r.Find(correct)
		return m.of(wrong) / m.of(right), "", ok && found
	}}
}

// wonBack is the share of that cost that learning saves; NaN if there is none.
func wonBack(m measure, must float64) gate {
	return gate{what: "won back by learning", must: must, atLeast: true, figure: func(r replay.Report) (float64, string, bool) {
		us, _ := r.Find(highlight)
		wrong, ok := r.Find(unlearned)
		right, found := r.Find(correct)
		if m.of(wrong) <= 1.02*m.of(right) {
			return math.NaN(), "", ok && found
		}
		return (m.of(wrong) - m.of(us)) / (m.of(wrong) - m.of(right)), "", ok && found
	}}
}

// noneLost requires that every request was completed.
func noneLost() gate {
	return own("completed, of all", func(s replay.Summary) float64 {
		return float64(s.Requests) / float64(max(1, s.Requests+s.Lost))
	}, 1, true)
}

// row is a scenario, or several variants of it, and its gates.
type row struct {
	name     string
	scenario replay.Scenario // without policy and seed
	variants []variant       // of the scenario under prefix, instead of policies
	rivals   []string        // the policies that prefix is judged by; nil: all
	gates    []gate

	// group names rows whose ratios are averaged geometrically; "": none. groupBounds has the bounds, by the gate's
	// text.
	group       string
	groupBounds map[string]float64
}

// variant is a scenario to run; the one labeled prefix is judged.
type variant struct {
	label    string
	scenario replay.Scenario
}

// runs returns the variants, or the scenario under each policy.
func (r row) runs(policies []string) []variant {
	if r.variants != nil {
		return r.variants
	}
	var all []variant
	for _, name := range policies {
		if r.rivals != nil && !slices.Contains(append(r.rivals, highlight, replay.Pooled, watched), name) {
			continue
		}
		s := r.scenario
		s.Policy = name
		all = append(all, variant{name, s})
	}
	return all
}

const fleet = 8

// queue is that of config.yaml without a timeout, so that the means are over all
// requests.
func queue() router.QueueSettings {
	return router.QueueSettings{Requests: 10_000, Bytes: 512 << 20}
}

// linear is the engine of the rows, which were tuned with it.
var linear = engine.Config{
	StepTime: 8 * time.Millisecond, PrefillRate: 8000, DecodeTime: 40 * time.Microsecond, ContextTime: 24 * time.Nanosecond,
	QuadraticDepth: engine.LinearPrefill, PromptTokenTime: engine.NoAPIServer,
}

// traced plays a trace whose prompts are that share of what replicas with that engine can prefill.
func traced(trace *replay.Trace, load float64) replay.Traced {
	prompts := &replay.Trace{BlockTokens: trace.BlockTokens, Requests: slices.Clone(trace.Requests)}
	for i := range prompts.Requests {
		prompts.Requests[i].OutputTokens = 0
	}
	return replay.Traced{Trace: trace, Load: linearLoad(load) * trace.Load(fleet) / prompts.Load(fleet)}
}

// linearLoad returns the load that is the same share of what replicas with that engine can prefill.
func linearLoad(load float64) float64 { return load * linear.PrefillRate / engine.DefaultPrefillRate }

func chatsOnSmallCaches() replay.SharedPrompts {
	w := replay.ChatsOnSmallCaches()
	w.Load = linearLoad(w.Load)
	return w
}

func scenario(w replay.Workload, kvTokens int) replay.Scenario {
	return replay.Scenario{Backends: fleet, KVTokens: kvTokens, Engine: linear, Queue: queue(), Workload: w}
}

// watched is played beside the rivals of a row, and does not judge.
const watched = "lmetric"

// rows returns the rows for a trace: of agents' sessions or Mooncake's, informative ones last.
func rows(trace *replay.Trace) []row {
	if trace.HasSessions() {
		return agentsRows(trace)
	}
	all := mooncakeRows(trace)
	all = append(all, generatedRows()...)
	all = append(all, fleetRows(trace)...)
	all = append(all, rankRows(trace)...)
	all = append(all, splitRows("mooncake", trace, 0.5, 0.7, 0.9)...)
	all = append(all, learningRows(trace)...)
	return append(all, otherSizes(trace)...)
}

// mooncakeRows play the conversation trace under three loads and three cache sizes.
func mooncakeRows(trace *replay.Trace) []row {
	f := func(kvTokens int, load, toBestOther float64, more ...gate) row {
		return row{
			name:     fmt.Sprintf("mooncake-%dk-%g", kvTokens/1000, load),
			scenario: scenario(traced(trace, load), kvTokens),
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

// agentsRows play the sessions of agents as an open loop, under several loads and cache sizes, and as a closed loop.
func agentsRows(trace *replay.Trace) []row {
	rivals := []string{"smetric", "llmd-guide", "weighted", "smg", "cache-threshold", "sticky-least-loaded", "dynamo"}
	agents := func(w replay.Workload, kvTokens int) replay.Scenario {
		// The queue is that of config.yaml: a request that waits longer is lost.
		return replay.Scenario{Backends: fleet, KVTokens: kvTokens, Workload: w, Queue: router.QueueSettings{
			Requests: 10_000, Bytes: 512 << 20, NoneReadyTimeout: time.Minute, BusyTimeout: 10 * time.Minute,
		}}
	}
	open := func(kvTokens int, load float64) row {
		return row{
			name:     fmt.Sprintf("agents-%dk-%g", kvTokens/1000, load),
			scenario: agents(replay.Traced{Trace: trace, Load: load}, kvTokens), rivals: rivals,
			gates: []gate{toBest(e2e(), 0.98), toBest(ttft(), 0.95), toBest(p99(), 1), toBest(longest(), 1), noneLost()},
			group: "agents, open loop", groupBounds: map[string]float64{toBest(e2e(), 0).what: 0.95},
		}
	}
	closed := func(kvTokens int) row {
		return row{
			name:     fmt.Sprintf("agents-%dk-closed", kvTokens/1000),
			scenario: agents(replay.ClosedLoop{Trace: trace, Concurrency: 64}, kvTokens), rivals: rivals,
			gates: []gate{toBest(sessionTime(), 0.97), toBest(ttft(), 0.9), toBest(wallTime(), 0), toBest(p99(), 0), toBest(longest(), 0),
				noneLost()},
			group: "agents, closed loop",
		}
	}
	overload := open(1_536_000, 1.5) // what waits fits into the queue
	overload.gates, overload.rivals, overload.group, overload.groupBounds = []gate{noneLost()}, []string{}, "", nil
	return append([]row{
		overload, open(1_536_000, 0.3), open(1_536_000, 0.5), open(1_536_000, 0.8), open(1_536_000, 1), open(600_000, 0.3), open(600_000, 0.5),
		closed(1_536_000), closed(600_000),
	}, splitRows("agents", trace, 0.3, 0.5, 0.8)...)
}

// The variants of a row about replicas for prefill and for decode, besides prefix itself, by which the cost decides
// whether a request is split.
const (
	splitAlways = "always split"
	splitNever  = "never split"
	both        = "both" // no replica has a role
)

// splitRows play a trace on two replicas for prefill and six for decode, and on eight that do both.
func splitRows(name string, trace *replay.Trace, loads ...float64) []row {
	var all []row
	for _, load := range loads {
		s := replay.Scenario{Backends: fleet, KVTokens: 1_536_000, Queue: queue(), Policy: highlight,
			Workload: replay.Traced{Trace: trace, Load: load}}
		roles := func(split replay.Split) replay.Scenario {
			s := s
			s.Prefills, s.Decodes, s.Split = 2, 6, split
			return s
		}
		all = append(all, row{
			name: fmt.Sprintf("split-%s-%g", name, load),
			variants: []variant{
				{highlight, roles(replay.SplitByCost)}, {splitAlways, roles(replay.SplitAlways)}, {splitNever, roles(replay.SplitNever)}, {both, s},
			},
			gates: []gate{
				toSplits(e2e(), 1.02, "better", math.Min), toSplits(ttft(), 1, "worse", math.Max), toSplits(gaps(), 1, "worse", math.Max),
				toVariant(e2e(), both, 0, false), toVariant(ttft(), both, 0, false), toVariant(gaps(), both, 0, false), noneLost(),
			},
		})
	}
	return all
}

// generatedRows play the generated workloads.
func generatedRows() []row {
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
			scenario: scenario(replay.HotPrompts(prompts, rate), 1_536_000),
			gates:    []gate{toBest(e2e(), 1.08), inFlight(1.3), toBest(ttft(), 0), noneLost()},
		}
	}
	return []row{
		agentic(48), agentic(128), hot(1, 20), hot(1, 60), hot(8, 20), hot(8, 60),
		{
			name: "chats", scenario: scenario(chatsOnSmallCaches(), 0),
			gates: []gate{toBest(e2e(), 1.03), toBest(ttftFrom50ms(), 1.1), noneLost()},
		},
		{
			name: "documents", scenario: scenario(replay.Documents{Load: linearLoad(1.5)}, 1_536_000),
			gates: []gate{toBest(e2e(), 0), toBest(ttft(), 0), noneLost()},
		},
	}
}

// fleetRows play the trace on fleets that are uneven, grow, or are polled at other
// intervals.
func fleetRows(trace *replay.Trace) []row {
	half := scenario(traced(trace, 0.7), 1_536_000)
	half.Speeds = []float64{1, 0.5, 1, 0.5, 1, 0.5, 1, 0.5}

	joins := scenario(traced(trace, 0.9), 1_536_000)
	joins.Changes = []replay.Change{{At: 20 * time.Minute, Backend: fleet - 1, Kind: replay.Join}}

	polled := scenario(traced(trace, 0.9), 1_536_000)
	polled.Policy, polled.PollInterval = highlight, time.Second
	often := polled
	often.PollInterval = 100 * time.Millisecond

	return []row{
		{name: "half-speed", scenario: half, gates: []gate{toBest(ttft(), 0.9), toBest(p99(), 0), noneLost()}},
		{
			name: "joins", variants: []variant{{highlight, withPolicy(joins, highlight)}},
			gates: []gate{own("its work within two minutes / mean", func(s replay.Summary) float64 { return s.NewBackendShare }, 0.7, true)},
		},
		{
			name: "polling", variants: []variant{{highlight, polled}, {"every 100 ms", often}},
			gates: []gate{toBest(ttft(), 1.03)},
		},
	}
}

// The variants of a row about data-parallel ranks, besides prefix itself, by which each rank is a backend.
const (
	balanced = "balanced by the server" // that has the same ranks
	separate = "separate replicas"      // as many as there are ranks
)

// toVariant is prefix over another variant.
func toVariant(m measure, name string, must float64, atLeast bool) gate {
	return gate{what: m.name + " / " + name, must: must, atLeast: atLeast, figure: func(r replay.Report) (float64, string, bool) {
		us, _ := r.Find(highlight)
		other, ok := r.Find(name)
		return m.of(us) / m.of(other), "", ok
	}}
}

// rankRows play the trace on one server of eight data-parallel ranks.
func rankRows(trace *replay.Trace) []row {
	f := func(load float64) row {
		server := scenario(traced(trace, fleet*load), 1_536_000)
		server.Policy, server.Backends, server.Ranks = highlight, 1, fleet
		routed := server
		routed.RankRouting = true
		return row{
			name: fmt.Sprintf("ranks-%g", load),
			variants: []variant{
				{highlight, routed}, {balanced, server},
				{separate, withPolicy(scenario(traced(trace, load), 1_536_000), highlight)},
			},
			gates: []gate{toVariant(ttft(), balanced, 0.7, false), toVariant(hits(), separate, 0.97, true), toVariant(ttft(), separate, 0, false),
				noneLost()},
		}
	}
	return []row{f(0.5), f(0.7), f(0.9)}
}

func withPolicy(s replay.Scenario, name string) replay.Scenario {
	s.Policy = name
	return s
}

// learningRows show what learning saves where replicas report a wrong cache size or
// evict further blocks. The admission queue, on by default, compensates much of it.
func learningRows(trace *replay.Trace) []row {
	var all []row
	f := func(name string, wrong, right replay.Scenario) {
		for _, kvTokens := range []int{1_536_000, 400_000} {
			for _, usage := range []string{"", "-no-usage"} {
				play := func(s replay.Scenario, learning bool) replay.Scenario {
					s.Backends, s.KVTokens, s.Engine, s.Policy, s.Queue = fleet, kvTokens, linear, highlight, queue()
					s.Workload, s.NoUsage, s.NoLearning = traced(trace, 0.9), usage != "", !learning
					return s
				}
				all = append(all, row{
					name:     fmt.Sprintf("%s-%dk%s", name, kvTokens/1000, usage),
					variants: []variant{{highlight, play(wrong, true)}, {unlearned, play(wrong, false)}, {correct, play(right, false)}},
					gates:    []gate{cost(ttft()), wonBack(ttft(), 0.5)},
				})
			}
		}
	}
	f("reported-half", replay.Scenario{IndexFactor: 0.5}, replay.Scenario{})
	f("reported-double", replay.Scenario{IndexFactor: 2}, replay.Scenario{})
	// With a block lost for each one evicted, a cache is worth half its size.
	f("evicting", replay.Scenario{Evictions: 1}, replay.Scenario{Evictions: 1, IndexFactor: 0.5})
	return all
}

// otherSizes are informative: a formula tuned to one fleet or engine would show here.
func otherSizes(trace *replay.Trace) []row {
	known := []gate{toBest(ttft(), 0), toBest(p99(), 0), toBest(e2e(), 0), toPooled(ttft(), 0, false), work(0), noneLost()}
	var all []row
	for _, backends := range []int{2, 4, 16, 64} {
		s := scenario(traced(trace, 0.9), 1_536_000)
		s.Backends = backends
		all = append(all, row{name: fmt.Sprintf("fleet-of-%d", backends), scenario: s, gates: known})
	}
	f := func(name string, change func(*engine.Config)) {
		s := scenario(traced(trace, 0.9), 1_536_000)
		change(&s.Engine)
		all = append(all, row{name: name, scenario: s, gates: known})
	}
	// Prompts of 3 to 5 bytes a token, where the router guesses by 4.
	uneven := scenario(traced(trace, 0.9), 1_536_000)
	uneven.TextSpread = 0.25
	all = append(all, row{name: "uneven-text", scenario: uneven, gates: known})
	f("step-2048", func(c *engine.Config) { c.StepTokens = 2048 })
	f("quadratic", func(c *engine.Config) { c.QuadraticDepth = 1.9e-5 })
	return all
}

// table prints a line for each figure.
type table struct {
	out            io.Writer
	passed, judged int

	group   row // a row of the group that is printed
	values  map[string][]float64
	reports []replay.Report
}

func newTable(out io.Writer) *table {
	fmt.Fprintf(out, "%-27s  %-52s %9s  %s\n", "row", "figure", "is", "must be")
	return &table{out: out, values: map[string][]float64{}}
}

// row prints the figures of a row, and before it those of the group of rows that has ended, and returns the number of
// failed gates.
func (t *table) row(r row, report replay.Report) (failed int) {
	if r.group != t.group.group {
		failed = t.endGroup()
	}
	t.group = r
	t.reports = append(t.reports, report)
	judges := report
	judges.Results = slices.DeleteFunc(slices.Clone(report.Results), func(s replay.Summary) bool {
		return r.rivals != nil && s.Policy == watched
	})
	name := r.name
	for _, g := range r.gates {
		value, of, ok := g.figure(judges)
		if !ok {
			continue // the policy to compare with was not run
		}
		if of != "" {
			of = " (" + of + ")"
		}
		failed += t.figure(name, g.what+of, value, g)
		name = ""
		if r.group != "" {
			t.values[g.what] = append(t.values[g.what], value)
		}
	}
	return failed
}

// figure prints a line, and returns 1 if the figure fails the gate.
func (t *table) figure(name, what string, value float64, g gate) (failed int) {
	is, verdict := fmt.Sprintf("%.3f", value), "-"
	switch {
	case math.IsNaN(value):
		is, verdict = "", "cost nothing"
	case g.must == 0:
	case g.atLeast && value >= g.must, !g.atLeast && value <= g.must:
		verdict = fmt.Sprintf("%s %-5g pass", g.sign(), g.must)
		t.passed++
		t.judged++
	default:
		verdict = fmt.Sprintf("%s %-5g FAIL", g.sign(), g.must)
		failed++
		t.judged++
	}
	fmt.Fprintf(t.out, "%-27s  %-52s %9s  %s\n", name, what, is, verdict)
	return failed
}

// endGroup prints the means of the rows of the group, and how prefix compares over them with each policy as a fixed
// choice.
func (t *table) endGroup() (failed int) {
	if t.group.group != "" {
		name := t.group.group
		for _, g := range t.group.gates {
			values := t.values[g.what]
			if g.atLeast || len(values) == 0 {
				continue
			}
			sum := 0.0
			for _, v := range values {
				sum += math.Log(v) / float64(len(values))
			}
			failed += t.figure(name, g.what+", geometric mean", math.Exp(sum), gate{must: t.group.groupBounds[g.what]})
			name = ""
		}
		_ = replay.WriteFixedChoices(t.out, t.reports)
		fmt.Fprintln(t.out)
	}
	t.values, t.reports = map[string][]float64{}, nil
	return failed
}

// results prints every policy's figures.
func (t *table) results(report replay.Report) {
	fmt.Fprintln(t.out)
	_ = report.WriteTable(t.out)
	fmt.Fprintln(t.out)
}

// end prints the figures of the last group, and how many gates pass.
func (t *table) end() (failed int) {
	failed = t.endGroup()
	fmt.Fprintf(t.out, "\n%d of %d pass\n", t.passed, t.judged)
	return failed
}

func TestGateVerdict(t *testing.T) {
	report := replay.Report{Results: []replay.Summary{
		{Policy: highlight, Requests: 99, Lost: 1, TTFTMean: 0.9, E2EMean: 2, HitRatio: 0.3},
		{Policy: "random", Requests: 100, TTFTMean: 2, E2EMean: 1},
		{Policy: "chwbl", Requests: 100, TTFTMean: 1, E2EMean: 4},
		{Policy: replay.Pooled, Requests: 100, TTFTMean: 0.5, E2EMean: 0.5, HitRatio: 0.4},
	}}
	f := func(g gate, failed int, want ...string) {
		t.Helper()
		var out bytes.Buffer
		if got := newTable(&out).row(row{name: "row", gates: []gate{g}}, report); got != failed {
			t.Errorf("%s: %d failed, want %d", g.what, got, failed)
		}
		for _, w := range want {
			if !strings.Contains(out.String(), w) {
				t.Errorf("no %q in %s", w, &out)
			}
		}
	}
	f(toBest(ttft(), 0.9), 0, "(chwbl)", "0.900", "pass")
	f(toBest(ttft(), 0.89), 1, "(chwbl)", "FAIL")
	f(toBest(e2e(), 0), 0, "(random)", "2.000", " -\n")
	f(toPooled(hits(), 0.7, true), 0, "0.750", "≥ 0.7", "pass")
	f(toPooled(hits(), 0.8, true), 1, "FAIL")
	f(noneLost(), 1, "0.990", "FAIL")
	learning := func(us, wrong, right float64) {
		report.Results = []replay.Summary{{Policy: highlight, TTFTMean: us}, {Policy: unlearned, TTFTMean: wrong},
			{Policy: correct, TTFTMean: right}}
	}
	learning(1.25, 2, 1)
	f(wonBack(ttft(), 0.5), 0, "0.750", "pass")
	learning(1.75, 2, 1)
	f(wonBack(ttft(), 0.5), 1, "0.250", "FAIL")
	learning(1, 1.01, 1)
	f(wonBack(ttft(), 0.5), 0, "won back", "cost nothing")
	report.Results = report.Results[:1]
	f(toBest(ttft(), 0.9), 0) // nobody to compare with: no line
}

func TestGateGroups(t *testing.T) {
	report := func(ours float64) replay.Report {
		return replay.Report{Results: []replay.Summary{
			{Policy: highlight, Requests: 1, E2EMean: ours}, {Policy: "smg", Requests: 1, E2EMean: 1}, {Policy: watched, Requests: 1, E2EMean: 0.1},
		}}
	}
	bound := toBest(e2e(), 0.98)
	r := row{name: "row", gates: []gate{bound}, rivals: []string{"smg"}, group: "both", groupBounds: map[string]float64{bound.what: 0.6}}
	var out bytes.Buffer
	table := newTable(&out)
	if failed := table.row(r, report(0.25)) + table.row(r, report(1)); failed != 1 {
		t.Errorf("%d rows failed, want that of 1.0: what is watched does not judge", failed)
	}
	if failed := table.end(); failed != 0 || !strings.Contains(out.String(), "0.500  ≤ 0.6   pass") ||
		!strings.Contains(out.String(), watched) {
		t.Errorf("%d groups failed, want a mean of 0.5 and a line of %s in\n%s", failed, watched, &out)
	}
}
