package replay

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// fixedChoice is how a policy compares with another one over several runs, as if a user had chosen that one for all.
type fixedChoice struct {
	policy string
	means  []float64 // geometric, of the ratios of each of worldFigures; 0: the figure exists in no run
}

// compareFixedChoices compares policy own with each other one that was played in all worlds, the least favourable one
// in the first figure last.
func compareFixedChoices(own string, results []WorldResult) []fixedChoice {
	var all []fixedChoice
	if len(results) == 0 {
		return nil
	}
	for _, s := range results[0].Results {
		if !isPlainRival(s.Policy) || s.Policy == Pooled || s.HasRoles || !isPlayedInAll(s.Policy, results) || !isPlayedInAll(own, results) {
			continue
		}
		c := fixedChoice{policy: s.Policy, means: make([]float64, len(worldFigures))}
		only := comparison{ours: own, isRival: func(name string) bool { return name == s.Policy }}
		for i := range worldFigures {
			if ratios := ratiosOf(&only, &worldFigures[i], results); len(ratios) > 0 {
				c.means[i] = geometricMean(ratios)
			}
		}
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b fixedChoice) int { return cmp.Compare(a.means[0], b.means[0]) })
	return all
}

func isPlayedInAll(policy string, results []WorldResult) bool {
	return !slices.ContainsFunc(results, func(r WorldResult) bool {
		return !slices.ContainsFunc(r.Results, func(s Summary) bool { return s.Policy == policy })
	})
}

// writeFixedChoices writes a line for each of compareFixedChoices, and the greatest ratio of each figure.
func writeFixedChoices(t *tabwriter.Writer, own string, results []WorldResult) {
	all := compareFixedChoices(own, results)
	if len(all) == 0 {
		return
	}
	fmt.Fprintf(t, "\n%s / each other policy, geometric mean\t", own)
	for _, f := range worldFigures {
		fmt.Fprintf(t, "%s\t", f.name)
	}
	least := fixedChoice{policy: "least favourable", means: make([]float64, len(worldFigures))}
	for _, c := range all {
		for i, mean := range c.means {
			least.means[i] = max(least.means[i], mean)
		}
	}
	for _, c := range append(all, least) {
		fmt.Fprintf(t, "\n  %s\t", c.policy)
		for _, mean := range c.means {
			if mean > 0 {
				fmt.Fprintf(t, "%.3f\t", mean)
			} else {
				fmt.Fprint(t, "\t")
			}
		}
	}
	fmt.Fprintln(t)
}

// WriteFixedChoices writes how prefix compares over several reports with each other policy, as if a user had chosen
// that one for all of them: the geometric means of its figures over that policy's, and the least favourable of each. It
// writes nothing if prefix or all others are missing in a report.
func WriteFixedChoices(out io.Writer, reports []Report) error {
	var results []WorldResult
	for _, r := range reports {
		results = append(results, WorldResult{Streaming: true, Results: r.Results})
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	writeFixedChoices(t, ownRule, results)
	return t.Flush()
}
