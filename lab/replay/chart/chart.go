// Package chart draws the results of a replay as an SVG: hit ratio, time to first
// token and balance of each policy.
package chart

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"warmroute/lab/replay"
)

// WriteSVG draws the reports: of one report a row for each policy, of several a line
// for each policy over load. Policies without an answered request have no
// figures and are only named in the title.
func WriteSVG(w io.Writer, reports []replay.Report) error {
	if len(reports) == 0 || len(reports[0].Results) == 0 {
		return errors.New("no results to draw")
	}
	heading := title(reports)
	reports, order, unanswered := rankPolicies(reports)
	if len(unanswered) > 0 {
		heading += " · no request answered: " + strings.Join(unanswered, ", ")
	}
	size := vg.Point{X: 1080, Y: 600}
	if len(reports) == 1 {
		size = vg.Point{X: 960, Y: vg.Length(112 + 19*len(order))}
	}
	svg := vgsvg.New(size.X, size.Y)
	canvas := draw.New(svg)
	canvas.SetColor(color.White)
	canvas.Fill(canvas.Path())
	style := textStyle(13)
	style.YAlign = draw.YTop
	canvas.FillText(style, vg.Point{X: 12, Y: size.Y - 12}, heading)
	canvas = draw.Crop(canvas, 12, -12, 12, -38)
	switch {
	case len(order) == 0:
	case len(reports) == 1:
		drawPanels(canvas, rowPanelsByPolicy(reports[0].Results, order))
	default:
		legend := plot.NewLegend()
		legend.Top, legend.Left, legend.Padding, legend.ThumbnailWidth, legend.TextStyle = true, true, 7, 30, textStyle(10)
		for _, s := range order {
			legend.Add(s.label, &plotter.Line{LineStyle: s.line}, &plotter.Scatter{GlyphStyle: s.glyph})
		}
		legend.Draw(draw.Crop(canvas, canvas.Size().X-170, 0, 0, 0))
		drawPanels(draw.Crop(canvas, 0, -186, 0, 0), linePanelsOverLoad(reports, order))
	}
	var out bytes.Buffer
	if _, err := svg.WriteTo(&out); err != nil {
		return err
	}
	// Name alternatives to the font that the text was measured in.
	_, err := w.Write(bytes.ReplaceAll(out.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")))
	return err
}

func drawPanels(c draw.Canvas, panels [][]*plot.Plot) {
	tiles := draw.Tiles{Rows: len(panels), Cols: len(panels[0]), PadX: 20, PadY: 22}
	for i, row := range plot.Align(panels, tiles, c) {
		for k, c := range row {
			panels[i][k].Draw(c)
		}
	}
}

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
	line          draw.LineStyle
	glyph         draw.GlyphStyle
	grey          bool
}

// rankPolicies returns the reports in order of load without results that have no
// figures, the policies by mean TTFT at the highest load, and the policies without
// figures.
func rankPolicies(reports []replay.Report) (sorted []replay.Report, ranked []series, unanswered []string) {
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
			unanswered = append(unanswered, s.Policy)
		}
	}
	slices.SortStableFunc(ranked, func(a, b series) int { return cmp.Compare(a.ttft, b.ttft) })
	setStyles(ranked)
	return sorted, ranked, unanswered
}

// setStyles gives colors to the highlighted policies and the best of the others.
// All but the last color are Okabe and Ito's, for color-blind readers.
func setStyles(ranked []series) {
	colors := []color.Color{rgb(0, 114, 178), rgb(230, 159, 0), rgb(0, 158, 115), rgb(204, 121, 167), rgb(86, 180, 233), rgb(120, 80, 40)}
	shapes := []draw.GlyphDrawer{draw.SquareGlyph{}, draw.PyramidGlyph{}, draw.CrossGlyph{}, draw.RingGlyph{}}
	used := 0
	for i := range ranked {
		s := &ranked[i]
		s.line, s.glyph = draw.LineStyle{Width: 1.1}, draw.GlyphStyle{Radius: 3, Shape: draw.CircleGlyph{}}
		switch {
		case s.policy == highlight:
			s.line.Width, s.line.Color, s.glyph.Radius = 3, rgb(213, 94, 0), 4
		case s.policy == reference:
			s.line.Width, s.line.Color, s.line.Dashes = 2.5, color.Gray{Y: 20}, []vg.Length{6, 3}
		case used == maxColors-2 && len(ranked) > maxColors:
			s.grey, s.line.Width, s.line.Color, s.glyph.Radius = true, 0.8, color.Gray{Y: 190}, 0
		default:
			s.line.Color, s.glyph.Shape = colors[used%len(colors)], shapes[used%len(shapes)]
			used++
		}
		s.glyph.Color = s.line.Color
	}
}

func rgb(r, g, b uint8) color.Color { return color.RGBA{R: r, G: g, B: b, A: 255} }

// scaleLinear shows from 0 to the values' maximum.
func scaleLinear(a *plot.Axis, values []float64) {
	a.Min, a.Max = 0, max(1.06*slices.Max(values), 0.1)
}

// scaleLog shows the values on a logarithmic axis.
func scaleLog(a *plot.Axis, values []float64) {
	low, high := slices.Min(values), slices.Max(values)
	room := math.Pow(high/low, 0.04) * 1.02
	a.Min, a.Max, a.Scale, a.Tick.Marker = low/room, high*room, plot.LogScale{}, plot.TickerFunc(logTicks)
}

// clampPositive returns v, or a value that a logarithmic axis can show.
func clampPositive(v float64) float64 { return max(v, 0.001) }

// logTicks returns 1, 2 and 5 of each decade, of more than three decades only 1,
// and of less than one more values in between.
func logTicks(low, high float64) (ticks []plot.Tick) {
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for k, part := range []float64{1, 2, 5, 1.5, 3, 4, 7, 1.2} {
			v := part * decade
			if v >= low && v <= high && (k < 1 || high/low <= 1000) && (k < 3 || high/low < 8) {
				ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(math.Round(v*1000)/1000, 'f', -1, 64)})
			}
		}
	}
	return ticks
}

func textStyle(size float64) text.Style {
	return text.Style{
		Color: color.Gray{Y: 20}, Handler: text.Plain{Fonts: font.DefaultCache},
		Font: font.Font{Typeface: "Liberation", Variant: "Sans", Size: vg.Points(size)},
	}
}

func newPanel(title string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	p.Title.Text, p.Title.Padding = title, 5
	p.Title.TextStyle.Font, p.Title.TextStyle.Handler = textStyle(11).Font, textStyle(11).Handler
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		for _, s := range []*text.Style{&a.Tick.Label, &a.Label.TextStyle} {
			s.Font, s.Handler = textStyle(10).Font, textStyle(10).Handler
		}
	}
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{Y: 225}, color.Gray{Y: 225}
	p.Add(grid)
	return p
}

// linePanelsOverLoad has a panel for each figure, with load from left to right.
func linePanelsOverLoad(reports []replay.Report, ranked []series) (panels [][]*plot.Plot) {
	for i, m := range []struct {
		name  string
		of    func(replay.Summary) float64
		scale func(*plot.Axis, []float64)
	}{
		{"hit ratio", func(s replay.Summary) float64 { return s.HitRatio }, scaleLinear},
		{"TTFT mean, seconds", func(s replay.Summary) float64 { return clampPositive(s.TTFTMean) }, scaleLog},
		{"prefill work, most loaded over mean", func(s replay.Summary) float64 { return max(s.WorkMaxOverMean, 1) }, scaleLog},
		{"TTFT p50, seconds", func(s replay.Summary) float64 { return clampPositive(s.TTFTP50) }, scaleLog},
		{"TTFT p99, seconds", func(s replay.Summary) float64 { return clampPositive(s.TTFTP99) }, scaleLog},
		{"in flight, most loaded over mean", func(s replay.Summary) float64 { return max(s.InFlightMaxOverMean, 1) }, scaleLog},
	} {
		p := newPanel(m.name)
		var values []float64
		var loads plot.ConstantTicks
		for _, r := range reports {
			for _, s := range r.Results {
				values = append(values, m.of(s))
			}
			loads = append(loads, plot.Tick{Value: r.Load, Label: strconv.FormatFloat(r.Load, 'g', 3, 64)})
		}
		m.scale(&p.Y, values)
		for _, o := range slices.Backward(ranked) { // the best is drawn last, above the others
			var points plotter.XYs
			for _, r := range reports {
				if s, ok := r.Find(o.policy); ok {
					points = append(points, plotter.XY{X: r.Load, Y: m.of(s)})
				}
			}
			p.Add(&plotter.Line{XYs: points, LineStyle: o.line}, &plotter.Scatter{XYs: points, GlyphStyle: o.glyph})
		}
		p.X.Label.Text, p.X.Tick.Marker = "load", loads
		p.X.Min, p.X.Max = loads[0].Value, loads[len(loads)-1].Value
		if i%3 == 0 {
			panels = append(panels, nil)
		}
		panels[i/3] = append(panels[i/3], p)
	}
	return panels
}

// rowPanelsByPolicy has three panels that share a row for each policy, the lowest mean
// TTFT on top.
func rowPanelsByPolicy(results []replay.Summary, ranked []series) [][]*plot.Plot {
	hits := newPanel("hit ratio\n ")
	ttft := newPanel("TTFT, seconds\nbar: p50 to p90, line: to p99, dot: mean")
	balance := newPanel("most loaded backend over mean\ndot: prefill work, ring: in flight")
	var ratios, seconds, balances []float64
	for _, s := range results {
		ratios = append(ratios, s.HitRatio*1.15) // room for the label
		seconds = append(seconds, clampPositive(s.TTFTP50), clampPositive(s.TTFTMean), clampPositive(s.TTFTP99))
		balances = append(balances, max(s.WorkMaxOverMean, 1), max(s.InFlightMaxOverMean, 1))
	}
	scaleLinear(&hits.X, ratios)
	scaleLog(&ttft.X, seconds)
	scaleLog(&balance.X, balances)

	slices.SortStableFunc(results, func(a, b replay.Summary) int { return cmp.Compare(b.TTFTMean, a.TTFTMean) })
	var names plot.ConstantTicks
	figures := &plotter.Labels{Offset: vg.Point{X: 3}}
	for i, s := range results {
		row := float64(i)
		o := ranked[slices.IndexFunc(ranked, func(o series) bool { return o.policy == s.Policy })]
		names = append(names, plot.Tick{Value: row, Label: o.label})
		rowColor := color.Color(color.Gray{Y: 150})
		if s.Policy == highlight || s.Policy == reference {
			rowColor = o.line.Color
		}
		line := func(width vg.Length, from, to float64) plot.Plotter {
			return &plotter.Line{XYs: plotter.XYs{{X: from, Y: row}, {X: to, Y: row}}, LineStyle: draw.LineStyle{Color: rowColor, Width: width}}
		}
		dot := func(at float64, c color.Color, shape draw.GlyphDrawer) plot.Plotter {
			return &plotter.Scatter{XYs: plotter.XYs{{X: at, Y: row}}, GlyphStyle: draw.GlyphStyle{Color: c, Radius: 3.5, Shape: shape}}
		}
		hits.Add(line(11, 0, s.HitRatio))
		figures.XYs = append(figures.XYs, plotter.XY{X: s.HitRatio, Y: row})
		figures.Labels = append(figures.Labels, fmt.Sprintf("%.3f", s.HitRatio))
		style := textStyle(9)
		style.YAlign = draw.YCenter
		figures.TextStyle = append(figures.TextStyle, style)
		p50, p90, p99 := clampPositive(s.TTFTP50), clampPositive(s.TTFTP90), clampPositive(s.TTFTP99)
		ttft.Add(line(11, p50, p90), line(1.5, p90, p99), dot(clampPositive(s.TTFTMean), color.Black, draw.CircleGlyph{}))
		balance.Add(dot(max(s.WorkMaxOverMean, 1), rowColor, draw.CircleGlyph{}), dot(max(s.InFlightMaxOverMean, 1), rowColor, draw.RingGlyph{}))
	}
	hits.Add(figures)
	for _, p := range []*plot.Plot{hits, ttft, balance} {
		p.Y.Min, p.Y.Max = -0.6, float64(len(results))-0.4
		p.Y.LineStyle.Width, p.Y.Tick.LineStyle.Width, p.Y.Tick.Length, p.Y.Padding = 0, 0, 0, 14
		p.Y.Tick.Marker = plot.ConstantTicks(nil)
	}
	hits.Y.Tick.Marker = names
	return [][]*plot.Plot{{hits, ttft, balance}}
}
