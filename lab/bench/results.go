package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// results are the figures of a run, with one sample per round.
type results struct {
	samples  map[string]map[string][]float64 // by figure, by contender
	order    []string                        // of the figures
	failures []failure
}

// failure is why a contender has no figures of a measurement in a round.
type failure struct {
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

// median returns NaN if the figure was not measured.
func (r *results) median(contender, figure string) float64 {
	s := slices.Sorted(slices.Values(r.samples[figure][contender]))
	if len(s) == 0 {
		return math.NaN()
	}
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// budget bounds a figure of a contender, as a multiple of another contender's or absolutely.
type budget struct {
	what      string
	against   string // contender; "": absolute
	must, aim float64
	figures   []string
	combine   func([]float64) float64 // what counts of the figures
	minus     string                  // figure of direct that is subtracted first; "": none
	of        string                  // contender
}

var budgets = []budget{
	{"CPU per request, 1 KB", sglang, 0.6, 0.5, cpuPerRequestFigures(1), worst, "", warmroute},
	{"CPU per request, 1 KB", nginx, 0, 2, cpuPerRequestFigures(1), worst, "", warmroute},
	{"CPU per request, 32 KB", sglang, 0.6, 0.5, cpuPerRequestFigures(32), worst, "", warmroute},
	{"CPU per request, 32 KB", nginx, 0, 2.5, cpuPerRequestFigures(32), worst, "", warmroute},
	{"added p50, 1 client, 8 KB", sglang, 0.7, 0.5, []string{latencyFigure(1)}, worst, latencyFigure(1), warmroute},
	{"CPU per streamed chunk", sglang, 0.85, 0.8, []string{perChunk}, worst, "", warmroute},
	{"CPU per streamed chunk", nginx, 0, 1.2, []string{perChunk}, worst, "", warmroute},
	{"chunk delay p99 at 20/s", sglang, 1, 0, []string{delayP99}, worst, "", warmroute},
	{"chunk delay p99 at 20/s", nginx, 0, 2, []string{delayP99}, worst, "", warmroute},
	{"memory per open stream, 9,000, KB", "", 40, 24, []string{memoryPerStreamFigure(9000)}, worst, "", warmroute},
	{"idle, 100 backends, % of a core", "", 5, 0, []string{idleShare}, worst, "", warmroute},
	{"CPU per split request, 32 KB", warmroute, 2.2, 0, []string{perSplitRequest}, worst, "", splitting},
	{"CPU per request, 1 KB", baseline, 0, 0, cpuPerRequestFigures(1), geometricMean, "", warmroute},
	{"CPU per request, 32 KB", baseline, 0, 0, cpuPerRequestFigures(32), geometricMean, "", warmroute},
	{"CPU per streamed chunk", baseline, 0, 0, []string{perChunk}, geometricMean, "", warmroute},
	{"geometric mean of these three", baseline, 1.03, 1, cpuFigures(), geometricMean, "", warmroute},
}

func cpuPerRequestFigures(kb int) (figures []string) {
	for _, kind := range kinds {
		figures = append(figures, cpuPerRequestFigure(kb, kind))
	}
	return figures
}

// cpuFigures returns the CPU time per request of 1 and 32 KB and per chunk, as three parts of equal weight.
func cpuFigures() []string {
	return slices.Concat(cpuPerRequestFigures(1), cpuPerRequestFigures(32), slices.Repeat([]string{perChunk}, len(kinds)))
}

// worst returns the largest value, or NaN if one is NaN.
func worst(values []float64) float64 { return slices.Max(values) }

func geometricMean(values []float64) float64 {
	product := 1.0
	for _, v := range values {
		product *= v
	}
	return math.Pow(product, 1/float64(len(values)))
}

// value returns the value that the budget bounds, or NaN if it was not measured.
func (b budget) value(r *results) float64 {
	var ratios []float64
	for _, figure := range b.figures {
		is, of, less := r.median(b.of, figure), 1.0, 0.0
		if b.against != "" {
			of = r.median(b.against, figure)
		}
		if b.minus != "" {
			less = r.median(direct, b.minus)
		}
		ratios = append(ratios, (is-less)/(of-less))
	}
	return b.combine(ratios) // NaN if one of them is
}

// clientLimitedFigures returns the figures that may measure the clients and mock replicas
// rather than a contender, since these without a proxy are hardly faster.
func (r *results) clientLimitedFigures() (figures []string) {
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
			rates[requestRateFigure(kb, kind)] = true
		}
	}
	return rates
}()

// budgetResult is a budget and the measured value.
type budgetResult struct {
	What    string   `json:"what"`
	Against string   `json:"against,omitempty"`
	Is      *float64 `json:"is"` // nil: not measured
	Must    float64  `json:"must,omitempty"`
	Aim     float64  `json:"aim,omitempty"`
	Missed  bool     `json:"missed,omitempty"`
}

// checkBudgets returns each budget with the measured value, and whether it was missed.
func (r *results) checkBudgets() (all []budgetResult) {
	for _, b := range budgets {
		v := budgetResult{What: b.what, Against: b.against, Must: b.must, Aim: b.aim}
		if is := b.value(r); !math.IsNaN(is) {
			v.Is = &is
			v.Missed = b.must > 0 && is > b.must
		}
		all = append(all, v)
	}
	return all
}

// printTable writes a table of the medians, with a column per contender, and the budgets.
func (r *results) printTable(out io.Writer, contenders []string) {
	fmt.Fprintf(out, "%-36s", "medians")
	for _, c := range contenders {
		fmt.Fprintf(out, "%15s", c)
	}
	fmt.Fprintln(out)
	for _, figure := range r.order {
		fmt.Fprint(out, padRight(figure, 36))
		for _, c := range contenders {
			fmt.Fprintf(out, "%15s", formatFigure(r.median(c, figure)))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "\n%-36s%-16s%8s%8s%8s\n", "budgets", "over", "is", "must", "aim")
	for _, v := range r.checkBudgets() {
		is, remark := "–", ""
		switch {
		case v.Is == nil:
		case v.Missed:
			is, remark = fmt.Sprintf("%.2f", *v.Is), "  MISSED"
		case v.Aim > 0 && *v.Is <= v.Aim:
			is, remark = fmt.Sprintf("%.2f", *v.Is), "  aim"
		default:
			is = fmt.Sprintf("%.2f", *v.Is)
		}
		fmt.Fprintf(out, "%s%-16s%s%8s%8s%s\n", padRight(v.What, 36), v.Against, strings.Repeat(" ", 8-len([]rune(is)))+is, formatBound(v.Must),
			formatBound(v.Aim), remark)
	}
	fmt.Fprintln(out, "\nlab/bench/decision measures the decision.")
	for _, f := range r.failures {
		fmt.Fprintf(out, "not measured: %s, %s, round %d: %s\n", f.Contender, f.Measurement, f.Round, f.Error)
	}
	for _, figure := range r.clientLimitedFigures() {
		fmt.Fprintf(out, "the clients may be the limit: %s without a proxy is %s\n", figure, formatFigure(r.median(direct, figure)))
	}
}

// padRight pads s to width characters; fmt would count bytes.
func padRight(s string, width int) string {
	return s + strings.Repeat(" ", max(1, width-len([]rune(s))))
}

func formatBound(v float64) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf("%g", v)
}

// formatFigure formats v with three significant digits, larger numbers without fraction.
func formatFigure(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case math.Abs(v) >= 100:
		return fmt.Sprintf("%.0f", v)
	case math.Abs(v) >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// printJSON writes all samples, medians and budgets as one JSON object.
func (r *results) printJSON(out io.Writer, contenders []string) error {
	medians := map[string]map[string]float64{}
	for figure, by := range r.samples {
		medians[figure] = map[string]float64{}
		for contender := range by {
			medians[figure][contender] = r.median(contender, figure)
		}
	}
	return json.NewEncoder(out).Encode(struct {
		Contenders    []string                        `json:"contenders"`
		Medians       map[string]map[string]float64   `json:"medians"`
		Samples       map[string]map[string][]float64 `json:"samples"`
		Budgets       []budgetResult                  `json:"budgets"`
		Failures      []failure                       `json:"failures"`
		ClientLimited []string                        `json:"client_limited"`
	}{contenders, medians, r.samples, r.checkBudgets(), slices.Clip(r.failures), r.clientLimitedFigures()})
}
