package replay

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"warmroute/lab/policies"
	"warmroute/router"
	"warmroute/router/policy"
)

const (
	worldSeeds = 3 // with which each world is played

	ownRule    = "prefix"
	ownAlone   = "prefix without queue"
	queuedBest = 3 // others that are played with the queue as well
)

// worldRivals are the policies that prefix is compared with. Those that are left out are the
// best in no world: random choices, and earlier versions of others.
func worldRivals() []string {
	return slices.DeleteFunc(policies.All().Names(), func(name string) bool {
		return slices.Contains([]string{ownRule, "random", "round-robin", "power-of-two", "simhash", "cache-threshold-old"}, name)
	})
}

// worldQueue is the default of config.yaml without a bound in time, so that the means are
// over all requests.
func worldQueue() router.QueueSettings {
	return router.QueueSettings{Requests: 1 << 20, Bytes: 1 << 40}
}

// WorldResult has the figures of a world, each the mean over the seeds.
type WorldResult struct {
	Number     int         `json:"world"`
	Dimensions []Dimension `json:"dimensions"`
	Load       float64     `json:"load,omitzero"`
	Streaming  bool        `json:"streaming"` // some responses are streamed, so that a TTFT exists
	Results    []Summary   `json:"results"`
}

// Run plays a world: prefix with and without the admission queue, the other policies, and the
// best of these with the queue.
func (w World) Run(ctx context.Context) (WorldResult, error) {
	result, err := w.RunOwn(ctx)
	if err != nil {
		return result, err
	}
	if err := w.addRivals(ctx, &result); err != nil {
		return result, err
	}
	for _, name := range result.bestRivals() {
		name += policy.WithQueue
		if err := w.play(ctx, &result, name, name, worldQueue()); err != nil {
			return result, err
		}
	}
	return result, nil
}

// addRivals plays a world with the other policies, without our queue, and adds the means of their figures to a result.
func (w World) addRivals(ctx context.Context, into *WorldResult) error {
	for _, name := range worldRivals() {
		queue := router.QueueSettings{}
		if d, _ := policies.All().Lookup(name); d.UsesQueue {
			queue = worldQueue()
		}
		if err := w.play(ctx, into, name, name, queue); err != nil {
			return err
		}
	}
	return nil
}

// RunOwn plays a world with prefix only, with and without the admission queue.
func (w World) RunOwn(ctx context.Context) (WorldResult, error) {
	result := WorldResult{Number: w.Number, Dimensions: w.Dimensions, Load: w.Load, Streaming: w.Scenario.NonStreaming < 1}
	if err := w.play(ctx, &result, ownRule, ownRule, worldQueue()); err != nil {
		return result, err
	}
	return result, w.play(ctx, &result, ownAlone, ownRule, router.QueueSettings{})
}

// play plays a world under a policy, once for each seed, and adds the means of its figures to
// a result.
func (w World) play(ctx context.Context, into *WorldResult, label, name string, queue router.QueueSettings) error {
	var all []Scenario
	for seed := range uint64(worldSeeds) {
		s := w.Scenario
		s.Policy, s.Queue, s.Seed = name, queue, seed+1
		all = append(all, s)
	}
	runs, err := RunAll(ctx, all, nil)
	if err != nil {
		return err
	}
	m := Mean(runs)
	m.Policy, m.Variation = label, nil
	into.Results = append(into.Results, m)
	return nil
}

// bestRivals returns the rivals without a queue that have the lowest product of mean E2E and
// TTFT.
func (r WorldResult) bestRivals() []string {
	others := slices.DeleteFunc(slices.Clone(r.Results), func(s Summary) bool {
		d, err := policies.All().Lookup(s.Policy)
		return s.Policy == ownRule || err != nil || d.UsesQueue
	})
	slices.SortFunc(others, func(a, b Summary) int { return cmp.Compare(a.E2EMean*a.TTFTMean, b.E2EMean*b.TTFTMean) })
	var names []string
	for _, s := range others[:queuedBest] {
		names = append(names, s.Policy)
	}
	return names
}

// worldFigure is a figure by which policies are compared.
type worldFigure struct {
	name      string
	streaming bool // it exists only where responses are streamed
	of        func(Summary) float64
}

var worldFigures = []worldFigure{
	{"E2E mean", false, func(s Summary) float64 { return s.E2EMean }},
	{"TTFT mean", true, func(s Summary) float64 { return s.TTFTMean }},
	{"TTFT of the longest tenth", true, func(s Summary) float64 { return s.TTFTLongest }},
	{"TTFT p99", true, func(s Summary) float64 { return s.TTFTP99 }},
	{"E2E p99", false, func(s Summary) float64 { return s.E2EP99 }},
	{"wall time", false, func(s Summary) float64 { return 1 / s.Throughput }},
}

// comparison is one way to compare policies in a world.
type comparison struct {
	name string
	ours string
	// isRival reports whether ours is compared with a policy.
	isRival func(name string) bool
}

// comparisons say which part earns what: all of prefix, its rule, and its queue.
var comparisons = []comparison{
	{"prefix with the queue against the others", ownRule, isPlainRival},
	{"the policy alone against the others", ownAlone, func(name string) bool { return isPlainRival(name) && name != "skywalker" }},
	{"prefix with the queue against the best others with it", ownRule, func(name string) bool {
		rule, with := cutQueue(name)
		return with || rule == "skywalker"
	}},
	{"prefix with the queue against prefix without", ownRule, func(name string) bool { return name == ownAlone }},
}

func isPlainRival(name string) bool {
	_, withQueue := cutQueue(name)
	return name != ownRule && name != ownAlone && !withQueue
}

func cutQueue(name string) (rule string, withQueue bool) {
	d, err := policies.All().Lookup(name)
	return name, err == nil && d.UsesQueue && name != ownRule && name != "skywalker"
}

// ratio returns a figure of ours over the lowest of the rivals', and that rival's name.
func (c *comparison) ratio(r *WorldResult, f *worldFigure) (ratio float64, rival string, ok bool) {
	if f.streaming && !r.Streaming {
		return 0, "", false
	}
	own, least := 0.0, math.Inf(1)
	for _, s := range r.Results {
		switch {
		case s.Policy == c.ours:
			own = f.of(s)
		case c.isRival(s.Policy) && f.of(s) < least:
			least, rival = f.of(s), s.Policy
		}
	}
	return own / least, rival, own > 0 && least > 0 && !math.IsInf(least, 1)
}

// WorldRatio is what a world says of one figure.
type WorldRatio struct {
	World *WorldResult
	Ratio float64
	Rival string
}

// WriteWorldReport writes how prefix compares over many worlds: for each comparison and
// figure the geometric mean of the ratios, how many worlds are worse than some bounds and the
// worst one; then prefix against each policy as a fixed choice, and the figures of the first
// comparison by dimension.
func WriteWorldReport(out io.Writer, results []WorldResult) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, c := range comparisons {
		fmt.Fprintf(t, "\n%s\tmean\tbetter\t> 1.01\t> 1.02\t> 1.05\t> 1.10\tworst\tworld\t\n", c.name)
		for i := range worldFigures {
			f := &worldFigures[i]
			if ratios := ratiosOf(&c, f, results); len(ratios) > 0 {
				worst := ratios[len(ratios)-1]
				fmt.Fprintf(t, "  %s\t%.3f\t%s\t%s\t%s\t%s\t%s\t%.3f\t%d (%s)\t\n", f.name, geometricMean(ratios),
					share(ratios, func(x float64) bool {
						return x < 1
					}), share(ratios, above(1.01)), share(ratios, above(1.02)), share(ratios, above(1.05)), share(ratios, above(1.10)),
					worst.Ratio, worst.World.Number, worst.Rival)
			}
		}
	}
	writeFixedChoices(t, ownRule, results)
	for i := range worldFigures[:2] {
		f := &worldFigures[i]
		fmt.Fprintf(t, "\n%s by dimension\tworlds\tmean\t> 1.03\tworst\tworld\t\n", f.name)
		for _, d := range dimensionsOf(results) {
			some := slices.DeleteFunc(slices.Clone(results), func(r WorldResult) bool { return !slices.Contains(r.Dimensions, d) })
			if ratios := ratiosOf(&comparisons[0], f, some); len(ratios) > 0 {
				worst := ratios[len(ratios)-1]
				fmt.Fprintf(t, "  %s %s\t%d\t%.3f\t%s\t%.3f\t%d (%s)\t\n", d.Name, d.Value, len(ratios), geometricMean(ratios),
					share(ratios, above(1.03)), worst.Ratio, worst.World.Number, worst.Rival)
			}
		}
	}
	fmt.Fprintf(t, "\n%d worlds", len(results))
	for i := range results {
		if lost := results[i].lostMore(); lost > 0 {
			fmt.Fprintf(t, "; in world %d prefix lost %d requests more than the policy that lost the fewest", results[i].Number, lost)
		}
	}
	fmt.Fprintln(t)
	return t.Flush()
}

// lostMore returns how many requests prefix lost more than the policy that lost the fewest: some requests are too long
// for any replica.
func (r *WorldResult) lostMore() int {
	own, least := 0, math.MaxInt
	for _, s := range r.Results {
		switch {
		case s.Policy == ownRule:
			own = s.Lost
		case isPlainRival(s.Policy):
			least = min(least, s.Lost)
		}
	}
	return max(0, own-least)
}

// ratiosOf returns the ratios of all worlds that have the figure, the lowest first.
func ratiosOf(c *comparison, f *worldFigure, results []WorldResult) []WorldRatio {
	var all []WorldRatio
	for i := range results {
		if ratio, rival, ok := c.ratio(&results[i], f); ok {
			all = append(all, WorldRatio{&results[i], ratio, rival})
		}
	}
	slices.SortFunc(all, func(a, b WorldRatio) int { return cmp.Compare(a.Ratio, b.Ratio) })
	return all
}

func geometricMean(ratios []WorldRatio) float64 {
	sum := 0.0
	for _, r := range ratios {
		sum += math.Log(r.Ratio)
	}
	return math.Exp(sum / float64(len(ratios)))
}

func above(bound float64) func(float64) bool { return func(x float64) bool { return x > bound } }

// share returns the share of the ratios that is selected, in percent.
func share(ratios []WorldRatio, selects func(float64) bool) string {
	return fmt.Sprintf("%.1f %%", 100*shareOf(ratios, selects))
}

func shareOf(ratios []WorldRatio, selects func(float64) bool) float64 {
	n := 0
	for _, r := range ratios {
		if selects(r.Ratio) {
			n++
		}
	}
	return float64(n) / float64(len(ratios))
}

// dimensionsOf returns the dimensions of all worlds, each once.
func dimensionsOf(results []WorldResult) []Dimension {
	var all []Dimension
	for _, r := range results {
		for _, d := range r.Dimensions {
			if !slices.Contains(all, d) {
				all = append(all, d)
			}
		}
	}
	slices.SortFunc(all, func(a, b Dimension) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Value, b.Value))
	})
	return all
}
