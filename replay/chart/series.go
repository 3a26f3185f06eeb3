package chart

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/plot/vg/draw"

	"warmroute/replay"
)

// mostColors is how many lines can be told apart; of more, the two that stand
// out and the best of the rest have colours, and all others are grey.
const mostColors = 8

// series is one policy's line.
type series struct {
	policy string
	lost   int     // at all loads
	ttft   float64 // mean, at the highest load; infinite where nothing was answered at it
	others bool    // one of those that are grey
	line   draw.LineStyle
	glyph  draw.GlyphStyle
}

// rank lists the policies by their mean TTFT at the highest load, the grey ones
// last, each with its style.
func rank(reports []replay.Report) []series {
	var order []series
	highest := slices.MaxFunc(reports, func(a, b replay.Report) int { return cmp.Compare(a.Load, b.Load) })
	for _, r := range reports {
		for _, s := range r.Results {
			i := slices.IndexFunc(order, func(o series) bool { return o.policy == s.Policy })
			if i < 0 {
				i = len(order)
				order = append(order, series{policy: s.Policy, ttft: math.Inf(1)})
			}
			order[i].lost += s.Lost
		}
	}
	for i := range order {
		if s, ok := highest.Find(order[i].policy); ok {
			order[i].ttft = s.TTFTMean
		}
	}
	slices.SortStableFunc(order, func(a, b series) int { return cmp.Compare(a.ttft, b.ttft) })
	var colored, grey []series
	plain := 0 // those in colour that don't stand out
	for _, s := range order {
		apart := s.policy == ours || s.policy == reference
		if !apart && plain == mostColors-2 && len(order) > mostColors {
			s.others, s.line = true, draw.LineStyle{Width: 0.8, Color: thin}
			grey = append(grey, s)
			continue
		}
		s.line, s.glyph = lineStyle(s.policy, plain)
		colored = append(colored, s)
		if !apart {
			plain++
		}
	}
	return append(colored, grey...)
}
