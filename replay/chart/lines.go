package chart

import (
	"cmp"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"warmroute/replay"
)

const (
	linesWidth  = vg.Length(1080)
	linesHeight = vg.Length(600)
	legendWidth = vg.Length(170)
	legendRow   = vg.Length(19)
)

// measure is one quantity to draw over load.
type measure struct {
	name string
	of   func(replay.Summary) float64
	axis func(*bounds, *plot.Axis) (note string)
}

func logAxis(b *bounds, axis *plot.Axis) string {
	note := b.cutDecades()
	b.logarithmic(axis)
	return note
}

func ratioAxis(b *bounds, axis *plot.Axis) string {
	b.linear(axis, 0)
	return ""
}

func balanceAxis(b *bounds, axis *plot.Axis) string {
	note := b.cut(mostBalance)
	b.linear(axis, 1)
	return note
}

func measures() [][]measure {
	return [][]measure{{
		{"hit ratio", func(s replay.Summary) float64 { return s.HitRatio }, ratioAxis},
		{"TTFT mean, seconds", func(s replay.Summary) float64 { return s.TTFTMean }, logAxis},
		{"prefill work, most loaded over mean", func(s replay.Summary) float64 { return s.WorkMaxOverMean }, balanceAxis},
	}, {
		{"TTFT p50, seconds", func(s replay.Summary) float64 { return s.TTFTP50 }, logAxis},
		{"TTFT p99, seconds", func(s replay.Summary) float64 { return s.TTFTP99 }, logAxis},
		{"in flight, most loaded over mean", func(s replay.Summary) float64 { return s.InFlightMaxOverMean }, balanceAxis},
	}}
}

// drawLines draws a panel for each measure, with load from left to right, and
// one legend.
func drawLines(reports []replay.Report, order []series, heading string) *vgsvg.Canvas {
	reports = slices.Clone(reports)
	slices.SortStableFunc(reports, func(a, b replay.Report) int { return cmp.Compare(a.Load, b.Load) })

	height := max(linesHeight, titleHeight+2*margin+legendRow*vg.Length(len(order)+2))
	svg, canvas := page(linesWidth, height, heading)
	drawLegend(draw.Crop(canvas, canvas.Size().X-legendWidth, 0, 0, 0), order)

	var panels [][]*plot.Plot
	for _, row := range measures() {
		var line []*plot.Plot
		for _, m := range row {
			line = append(line, linesPanel(m, reports, order))
		}
		panels = append(panels, line)
	}
	tiles := draw.Tiles{Rows: len(panels), Cols: len(panels[0]), PadX: 22, PadY: 22}
	for i, row := range plot.Align(panels, tiles, draw.Crop(canvas, 0, -legendWidth-16, 0, 0)) {
		for k, c := range row {
			panels[i][k].Draw(c)
		}
	}
	return svg
}

// drawLegend names each line, and all that are grey together.
func drawLegend(c draw.Canvas, order []series) {
	label := textStyle(10)
	label.YAlign = draw.YCenter
	y, others := c.Max.Y-legendRow/2, false
	for _, s := range order {
		switch {
		case !s.others:
			c.StrokeLine2(s.line, c.Min.X, y, c.Min.X+30, y)
			c.DrawGlyphNoClip(s.glyph, vg.Point{X: c.Min.X + 15, Y: y})
		case !others:
			others, label.Color = true, faint
			c.StrokeLine2(s.line, c.Min.X, y, c.Min.X+30, y)
		}
		c.FillText(label, vg.Point{X: c.Min.X + 37, Y: y}, named(s.policy, s.lost))
		y -= legendRow
	}
}

// linesPanel draws one measure of the policies; the first in order is drawn last,
// above the others.
func linesPanel(m measure, reports []replay.Report, order []series) *plot.Plot {
	p := newPlot(m.name)
	shown := newBounds()
	for _, r := range reports {
		for _, s := range r.Results {
			shown.include(m.of(s))
		}
	}
	p.Title.Text += m.axis(&shown, &p.Y)
	p.X.Label.Text = "load"
	var loads plot.ConstantTicks
	for _, r := range reports {
		loads = append(loads, plot.Tick{Value: r.Load, Label: strconv.FormatFloat(r.Load, 'g', 3, 64)})
	}
	p.X.Min, p.X.Max = loads[0].Value, loads[len(loads)-1].Value
	p.X.Tick.Marker = loads
	p.Add(horizontals())
	for _, s := range slices.Backward(order) {
		p.Add(policyLine(m, reports, s))
	}
	return p
}

func policyLine(m measure, reports []replay.Report, of series) drawing {
	return func(c draw.Canvas, p *plot.Plot) {
		x, y := p.Transforms(&c)
		var points []vg.Point
		for _, r := range reports {
			for _, s := range r.Results {
				if s.Policy == of.policy {
					points = append(points, vg.Point{X: x(r.Load), Y: y(min(max(m.of(s), p.Y.Min), p.Y.Max))})
				}
			}
		}
		c.StrokeLines(of.line, points)
		for _, at := range points {
			if !of.others {
				c.DrawGlyphNoClip(of.glyph, at)
			}
		}
	}
}

// horizontals draws a faint line at each value of the vertical axis.
func horizontals() drawing {
	return func(c draw.Canvas, p *plot.Plot) {
		_, y := p.Transforms(&c)
		for _, t := range p.Y.Tick.Marker.Ticks(p.Y.Min, p.Y.Max) {
			c.StrokeLine2(draw.LineStyle{Color: grid, Width: 0.7}, c.Min.X, y(t.Value), c.Max.X, y(t.Value))
		}
	}
}
