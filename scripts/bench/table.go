package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// verdict is a budget and how it was kept.
type verdict struct {
	What    string   `json:"what"`
	Against string   `json:"against,omitempty"`
	Is      *float64 `json:"is"` // nil: not measured
	Must    float64  `json:"must,omitempty"`
	Aim     float64  `json:"aim,omitempty"`
	Missed  bool     `json:"missed,omitempty"`
}

func (r *results) verdicts() (all []verdict) {
	for _, b := range budgets {
		v := verdict{What: b.what, Against: b.against, Must: b.must, Aim: b.aim}
		if is := b.value(r); !math.IsNaN(is) {
			v.Is = &is
			v.Missed = b.must > 0 && is > b.must
		}
		all = append(all, v)
	}
	return all
}

// print writes the medians, a column for each contender, and the budgets.
func (r *results) print(out io.Writer, contenders []string) {
	fmt.Fprintf(out, "%-36s", "medians")
	for _, c := range contenders {
		fmt.Fprintf(out, "%15s", c)
	}
	fmt.Fprintln(out)
	for _, figure := range r.order {
		fmt.Fprint(out, padded(figure, 36))
		for _, c := range contenders {
			fmt.Fprintf(out, "%15s", plain(r.median(c, figure)))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "\n%-36s%-16s%8s%8s%8s\n", "budgets", "over", "is", "must", "aim")
	for _, v := range r.verdicts() {
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
		fmt.Fprintf(out, "%s%-16s%s%8s%8s%s\n", padded(v.What, 36), v.Against, strings.Repeat(" ", 8-len([]rune(is)))+is, bound(v.Must), bound(v.Aim), remark)
	}
	fmt.Fprintln(out, "\nThe decision's budgets are scripts/decision's.")
	for _, f := range r.faults {
		fmt.Fprintf(out, "not measured: %s, %s, round %d: %s\n", f.Contender, f.Measurement, f.Round, f.Error)
	}
	for _, figure := range r.slowEnds() {
		fmt.Fprintf(out, "the ends may be what was measured: %s without a proxy is %s\n", figure, plain(r.median(direct, figure)))
	}
}

// padded counts characters, where fmt would count bytes.
func padded(s string, width int) string {
	return s + strings.Repeat(" ", max(1, width-len([]rune(s))))
}

func bound(v float64) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf("%g", v)
}

// plain has three significant digits, or all of a larger number.
func plain(v float64) string {
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

// printJSON writes every sample, the medians and the budgets as one object.
func (r *results) printJSON(out io.Writer, contenders []string) error {
	medians := map[string]map[string]float64{}
	for figure, by := range r.samples {
		medians[figure] = map[string]float64{}
		for contender := range by {
			medians[figure][contender] = r.median(contender, figure)
		}
	}
	return json.NewEncoder(out).Encode(struct {
		Contenders []string                        `json:"contenders"`
		Medians    map[string]map[string]float64   `json:"medians"`
		Samples    map[string]map[string][]float64 `json:"samples"`
		Budgets    []verdict                       `json:"budgets"`
		Faults     []fault                         `json:"faults"`
		SlowEnds   []string                        `json:"slow_ends"`
	}{contenders, medians, r.samples, r.verdicts(), slices.Clip(r.faults), r.slowEnds()})
}
