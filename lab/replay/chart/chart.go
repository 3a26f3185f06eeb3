// Package chart draws the results of a replay as an SVG: hit ratio, time to first
// token and balance of each policy.
package chart

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"warmroute/lab/replay"
)

// WriteSVG draws the reports: of one report a row for each policy, of several a line
// for each policy over load. Policies without a completed request have no
// figures and are only named in the title.
func WriteSVG(w io.Writer, reports []replay.Report) error {
	if len(reports) == 0 || len(reports[0].Results) == 0 {
		return errors.New("no results to draw")
	}
	heading := title(reports)
	reports, order, failed := rankPolicies(reports)
	if len(failed) > 0 {
		heading += " · no request completed: " + strings.Join(failed, ", ")
	}
	width, height := 1080.0, 600.0
	if len(reports) == 1 {
		width, height = 960, float64(112+rowHeight*len(order))
	}
	p := newPicture(width, height)
	p.text(point{margin, 24}, "start", 13, heading)
	switch {
	case len(order) == 0:
	case len(reports) == 1:
		p.drawRows(reports[0].Results, order, width)
	default:
		p.drawLegend(order, point{width - 170, 47})
		p.drawLines(reports, order, point{width - 180, height})
	}
	_, err := w.Write(p.end())
	return err
}

const (
	margin       = 12  // of a picture
	panelsTop    = 44  // below the heading
	tickWidth    = 46  // left of a panel, for the labels of an axis
	rowHeight    = 19  // of a policy
	maxCharWidth = 5.6 // of text of 10 px, about
)

// title returns what was measured.
func title(reports []replay.Report) string {
	r := reports[0]
	parts := []string{r.Trace, fmt.Sprintf("%d backends", r.Backends)}
	if len(reports) == 1 && r.Load > 0 {
		parts = append(parts, fmt.Sprintf("load %.3g", r.Load))
	}
	if r.Seeds > 1 {
		parts = append(parts, fmt.Sprintf("mean of %d seeds", r.Seeds))
	}
	return strings.Join(parts, " · ")
}

const (
	maxColors = 8 // distinguishable lines; further ones are grey
	highlight = "prefix"
	reference = "pooled" // what no router of separate caches reaches
)

// series is the style of one policy.
type series struct {
	policy, label string
	lost          int     // at all loads
	ttft          float64 // mean, at the highest load
	line          stroke
	mark          mark
	grey          bool
}

// rankPolicies returns the reports in order of load without results that have no
// figures, the policies by mean TTFT at the highest load, and the policies without
// figures.
func rankPolicies(reports []replay.Report) (sorted []replay.Report, ranked []series, failed []string) {
	sorted = slices.Clone(reports)
	slices.SortStableFunc(sorted, func(a, b replay.Report) int { return cmp.Compare(a.Load, b.Load) })
	for i, r := range sorted {
		sorted[i].Results = nil
		for _, s := range r.Results {
			if s.Requests == 0 {
				continue
			}
			sorted[i].Results = append(sorted[i].Results, s)
			at := slices.IndexFunc(ranked, func(o series) bool { return o.policy == s.Policy })
			if at < 0 {
				at, ranked = len(ranked), append(ranked, series{policy: s.Policy})
			}
			ranked[at].lost += s.Lost
		}
	}
	for i := range ranked {
		o := &ranked[i]
		o.label, o.ttft = o.policy, math.Inf(1)
		if o.lost > 0 {
			o.label = fmt.Sprintf("%s (%d lost)", o.policy, o.lost)
		}
		if s, ok := sorted[len(sorted)-1].Find(o.policy); ok {
			o.ttft = s.TTFTMean
		}
	}
	for _, s := range reports[0].Results {
		if !slices.ContainsFunc(ranked, func(o series) bool { return o.policy == s.Policy }) {
			failed = append(failed, s.Policy)
		}
	}
	slices.SortStableFunc(ranked, func(a, b series) int { return cmp.Compare(a.ttft, b.ttft) })
	setStyles(ranked)
	return sorted, ranked, failed
}

// setStyles gives colors to the highlighted policies and the best of the others.
// All but the last color are Okabe and Ito's, for color-blind readers.
func setStyles(ranked []series) {
	colors := []string{"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#785028"}
	shapes := []shape{square, triangle, cross, ring}
	used := 0
	for i := range ranked {
		s := &ranked[i]
		s.line, s.mark = stroke{width: 1.1}, mark{radius: 3}
		switch {
		case s.policy == highlight:
			s.line.width, s.line.color, s.mark.radius = 3, "#d55e00", 4
		case s.policy == reference:
			s.line = stroke{color: black, width: 2.5, dash: "6,3"}
		case used == maxColors-2 && len(ranked) > maxColors:
			s.grey, s.line.width, s.line.color, s.mark.radius = true, 0.8, lineGrey, 0
		default:
			s.line.color, s.mark.shape = colors[used%len(colors)], shapes[used%len(shapes)]
			used++
		}
		s.mark.color = s.line.color
	}
}

// clampPositive returns v, or a value that a logarithmic axis can show.
func clampPositive(v float64) float64 { return max(v, 0.001) }

// drawLegend names the line of each policy.
func (p *picture) drawLegend(ranked []series, at point) {
	for i, o := range ranked {
		y := at.y + 15*float64(i)
		p.line(o.line, point{at.x, y}, point{at.x + 30, y})
		p.mark(o.mark, point{at.x + 15, y})
		p.text(point{at.x + 36, y + 3.5}, "start", 10, o.label)
	}
}

// drawLines draws a panel for each figure, with load from left to right, up to the lower right
// corner end.
func (p *picture) drawLines(reports []replay.Report, ranked []series, end point) {
	const columns, rows = 3, 2
	width, height := (end.x-margin)/columns, (end.y-panelsTop)/rows
	for i, m := range []struct {
		name  string
		of    func(replay.Summary) float64
		scale func([]float64) axis
	}{
		{"hit ratio", func(s replay.Summary) float64 { return s.HitRatio }, linearAxis},
		{"TTFT mean, seconds", func(s replay.Summary) float64 { return clampPositive(s.TTFTMean) }, logAxis},
		{"prefill work, most loaded over mean", func(s replay.Summary) float64 { return max(s.WorkMaxOverMean, 1) }, logAxis},
		{"TTFT p50, seconds", func(s replay.Summary) float64 { return clampPositive(s.TTFTP50) }, logAxis},
		{"TTFT p99, seconds", func(s replay.Summary) float64 { return clampPositive(s.TTFTP99) }, logAxis},
		{"in flight, most loaded over mean", func(s replay.Summary) float64 { return max(s.InFlightMaxOverMean, 1) }, logAxis},
	} {
		left, top := margin+width*float64(i%columns)+tickWidth, panelsTop+height*float64(i/columns)+14
		right, bottom := left+width-tickWidth-20, top+height-68
		var values []float64
		x := axis{low: reports[0].Load, high: reports[len(reports)-1].Load}.between(left, right)
		if x.low == x.high {
			x.low, x.high = x.low-1, x.high+1
		}
		for _, r := range reports {
			for _, s := range r.Results {
				values = append(values, m.of(s))
			}
			x.ticks = append(x.ticks, tick{r.Load, strconv.FormatFloat(r.Load, 'g', 3, 64)})
		}
		y := m.scale(values).between(bottom, top)
		p.text(point{(left + right) / 2, top - 8}, "middle", 11, m.name)
		p.drawXAxis(x, top, bottom)
		p.drawYAxis(y, left, right)
		p.text(point{(left + right) / 2, bottom + 34}, "middle", 10, "load")
		for _, o := range slices.Backward(ranked) { // the best is drawn last, above the others
			var points []point
			for _, r := range reports {
				if s, ok := r.Find(o.policy); ok {
					points = append(points, point{x.at(r.Load), y.at(m.of(s))})
				}
			}
			p.line(o.line, points...)
			for _, at := range points {
				p.mark(o.mark, at)
			}
		}
	}
}

// drawRows draws three panels that share a row for each policy, the lowest mean TTFT on top.
func (p *picture) drawRows(results []replay.Summary, ranked []series, width float64) {
	var ratios, seconds, balances []float64
	names := 0.0 // width of the longest
	for _, s := range results {
		ratios = append(ratios, s.HitRatio*1.15) // room for the label
		seconds = append(seconds, clampPositive(s.TTFTP50), clampPositive(s.TTFTMean), clampPositive(s.TTFTP99))
		balances = append(balances, max(s.WorkMaxOverMean, 1), max(s.InFlightMaxOverMean, 1))
	}
	for _, o := range ranked {
		names = max(names, maxCharWidth*float64(utf8.RuneCountInString(o.label)))
	}
	const top, gap = panelsTop + 24, 34
	bottom := float64(top + rowHeight*len(results))
	first := margin + names + 18
	panel := (width - margin - first - 2*gap) / 3
	place := func(i int, a axis, titles ...string) axis {
		left := first + (panel+gap)*float64(i)
		for k, line := range titles {
			p.text(point{left + panel/2, float64(panelsTop + 4 + 11*k)}, "middle", 11, line)
		}
		a = a.between(left, left+panel)
		p.drawXAxis(a, top, bottom)
		return a
	}
	hits := place(0, linearAxis(ratios), "hit ratio")
	ttft := place(1, logAxis(seconds), "TTFT, seconds", "bar: p50 to p90, line: to p99, dot: mean")
	balance := place(2, logAxis(balances), "most loaded backend over mean", "dot: prefill work, ring: in flight")

	for i, o := range ranked {
		s := results[slices.IndexFunc(results, func(s replay.Summary) bool { return s.Policy == o.policy })]
		y, color := float64(top+rowHeight*i)+rowHeight/2.0, barGrey
		if s.Policy == highlight || s.Policy == reference {
			color = o.line.color
		}
		bar := func(from, to float64) { p.bar(point{from, y - 5.5}, point{to, y + 5.5}, color) }
		p.text(point{first - 18, y + 3.5}, "end", 10, o.label)
		bar(hits.start, hits.at(s.HitRatio))
		p.text(point{hits.at(s.HitRatio) + 3, y + 3.5}, "start", 9, fmt.Sprintf("%.3f", s.HitRatio))
		p50, p90, p99 := ttft.at(clampPositive(s.TTFTP50)), ttft.at(clampPositive(s.TTFTP90)), ttft.at(clampPositive(s.TTFTP99))
		bar(p50, p90)
		p.line(stroke{color: color, width: 1.5}, point{p90, y}, point{p99, y})
		p.mark(mark{color: "#000000", radius: 3.5}, point{ttft.at(clampPositive(s.TTFTMean)), y})
		p.mark(mark{color: color, radius: 3.5}, point{balance.at(max(s.WorkMaxOverMean, 1)), y})
		p.mark(mark{shape: ring, color: color, radius: 3.5}, point{balance.at(max(s.InFlightMaxOverMean, 1)), y})
	}
}
