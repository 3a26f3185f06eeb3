package main

import (
	"math"
	"slices"
)

// results are the figures of a run, each as often as there were rounds.
type results struct {
	samples map[string]map[string][]float64 // by figure, by contender
	order   []string                        // figures as they came
	faults  []fault
}

// fault is why a contender has no figures of a measurement in a round.
type fault struct {
	Contender, Measurement, Error string
	Round                         int
}

func newResults() *results { return &results{samples: map[string]map[string][]float64{}} }

func (r *results) add(contender, figure string, value float64) {
	if r.samples[figure] == nil {
		r.samples[figure] = map[string][]float64{}
		r.order = append(r.order, figure)
	}
	r.samples[figure][contender] = append(r.samples[figure][contender], value)
}

// median is NaN for what was not measured.
func (r *results) median(contender, figure string) float64 {
	s := slices.Sorted(slices.Values(r.samples[figure][contender]))
	if len(s) == 0 {
		return math.NaN()
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// budget is what a figure of ours may be, as a multiple of another contender's
// or, without one, by itself.
type budget struct {
	what      string
	against   string // "": no one
	must, aim float64
	figures   []string // of several the worst counts
	beyond    string   // what is subtracted first, of direct; "": nothing
}

var budgets = []budget{
	{"CPU per request, 1 KB", sglang, 0.8, 0.5, allKinds(1), ""},
	{"CPU per request, 1 KB", nginx, 3, 2, allKinds(1), ""},
	{"CPU per request, 32 KB", sglang, 0.75, 0.5, allKinds(32), ""},
	{"CPU per request, 32 KB", nginx, 4, 2.5, allKinds(32), ""},
	{"added p50, 1 client, 8 KB", sglang, 0.7, 0.5, []string{p50At(1)}, p50At(1)},
	{"CPU per streamed chunk", sglang, 1.1, 0.8, []string{perChunk}, ""},
	{"CPU per streamed chunk", nginx, 1.6, 1.2, []string{perChunk}, ""},
	{"chunk delay p99 at 20/s", sglang, 1, 0, []string{delayP99}, ""},
	{"chunk delay p99 at 20/s", nginx, 0, 2, []string{delayP99}, ""},
	{"memory per open stream, 9,000, KB", "", 40, 24, []string{perStream(9000)}, ""},
	{"idle, 100 backends, % of a core", "", 5, 0, []string{idleShare}, ""},
}

func allKinds(kb int) (figures []string) {
	for _, kind := range kinds {
		figures = append(figures, perRequest(kb, kind))
	}
	return figures
}

// value is what the budget bounds, at its worst; NaN when it was not measured.
func (b budget) value(r *results) float64 {
	worst := math.Inf(-1)
	for _, figure := range b.figures {
		is, of, less := r.median(ours, figure), 1.0, 0.0
		if b.against != "" {
			of = r.median(b.against, figure)
		}
		if b.beyond != "" {
			less = r.median(direct, b.beyond)
		}
		worst = math.Max(worst, (is-less)/(of-less)) // which is NaN if either is
	}
	return worst
}

// slowEnds are the figures in which a contender came so close to what the ends
// do without any that it may be them that were measured.
func (r *results) slowEnds() (figures []string) {
	for _, figure := range r.order {
		least := 0.0
		switch {
		case figure == rateAt20:
			least = 20_000 * 0.97
		case isRate[figure]:
			for contender := range r.samples[figure] {
				if contender != direct {
					least = max(least, 1.15*r.median(contender, figure))
				}
			}
		}
		if r.median(direct, figure) < least {
			figures = append(figures, figure)
		}
	}
	return figures
}

var isRate = func() map[string]bool {
	rates := map[string]bool{}
	for _, kb := range sizes {
		for _, kind := range kinds {
			rates[rate(kb, kind)] = true
		}
	}
	return rates
}()
