package chart

import (
	"cmp"
	"fmt"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"warmroute/replay"
)

const (
	rowHeight  = vg.Length(19)
	rowsWidth  = vg.Length(960)
	rowsAround = vg.Length(112) // titles and axes, above and below the rows
	// namePadding leaves room for a font that is wider than the one measured.
	namePadding = vg.Length(14)
)

// drawRows draws three panels side by side that share their rows: a row a
// policy, the shortest mean TTFT on top.
func drawRows(report replay.Report, heading string) *vgsvg.Canvas {
	results := slices.Clone(report.Results)
	// The first row of a plot is its lowest.
	slices.SortStableFunc(results, func(a, b replay.Summary) int { return cmp.Compare(b.TTFTMean, a.TTFTMean) })
	svg, canvas := page(rowsWidth, rowsAround+rowHeight*vg.Length(len(results)), heading)

	panels := []*plot.Plot{hitRows(results), ttftRows(results), balanceRows(results)}
	for i, p := range panels {
		p.Y.Min, p.Y.Max = -0.6, float64(len(results))-0.4
		p.Y.LineStyle.Width, p.Y.Tick.LineStyle.Width, p.Y.Tick.Length = 0, 0, 0
		p.Y.Padding = namePadding
		p.Y.Tick.Marker = plot.ConstantTicks(nil)
		if i == 0 {
			p.Y.Tick.Marker = rowNames(results)
		}
	}
	tiles := draw.Tiles{Rows: 1, Cols: len(panels), PadX: 18}
	for i, c := range plot.Align([][]*plot.Plot{panels}, tiles, canvas)[0] {
		panels[i].Draw(c)
	}
	return svg
}

func rowNames(results []replay.Summary) plot.ConstantTicks {
	var names plot.ConstantTicks
	for i, s := range results {
		names = append(names, plot.Tick{Value: float64(i), Label: named(s.Policy, s.Lost)})
	}
	return names
}

// hitRows draws a bar as long as the hit ratio, with the figure beside it.
func hitRows(results []replay.Summary) *plot.Plot {
	p := newPlot("hit ratio\n ")
	shown := newBounds()
	for _, s := range results {
		shown.include(s.HitRatio * 1.15) // room for the figure
	}
	ratioAxis(&shown, &p.X)
	p.Add(verticals(), drawing(func(c draw.Canvas, p *plot.Plot) {
		x, y := p.Transforms(&c)
		label := textStyle(9)
		label.YAlign = draw.YCenter
		for i, s := range results {
			c.FillPolygon(rowColor(s.Policy), box(x(0), x(s.HitRatio), y(float64(i)), rowHeight*0.3))
			c.FillText(label, vg.Point{X: x(s.HitRatio) + 3, Y: y(float64(i))}, fmt.Sprintf("%.3f", s.HitRatio))
		}
	}))
	return p
}

// ttftRows draws a bar from the median to the 90th percentile, a line on to the
// 99th, and a dot for the mean.
func ttftRows(results []replay.Summary) *plot.Plot {
	p := newPlot("TTFT, seconds\nbar: p50 to p90, line: to p99, dot: mean")
	shown := newBounds()
	for _, s := range results {
		shown.include(s.TTFTP50, s.TTFTMean, s.TTFTP99)
	}
	p.Title.Text += logAxis(&shown, &p.X)
	p.Add(verticals(), drawing(func(c draw.Canvas, p *plot.Plot) {
		x, y := p.Transforms(&c)
		for i, s := range results {
			row, color := y(float64(i)), rowColor(s.Policy)
			at := func(seconds float64) vg.Length { return x(min(max(seconds, p.X.Min), p.X.Max)) }
			c.StrokeLine2(draw.LineStyle{Color: color, Width: 1.5}, at(s.TTFTP90), row, at(s.TTFTP99), row)
			c.StrokeLine2(draw.LineStyle{Color: color, Width: 1.5}, at(s.TTFTP99), row-3.5, at(s.TTFTP99), row+3.5)
			c.FillPolygon(color, box(at(s.TTFTP50), at(s.TTFTP90), row, rowHeight*0.3))
			dot(c, vg.Point{X: at(s.TTFTMean), Y: row}, draw.GlyphStyle{Color: black, Radius: 3, Shape: draw.CircleGlyph{}})
		}
	}))
	return p
}

// balanceRows draws the most loaded backend over the mean: by prefill work a
// dot, by requests in flight a ring.
func balanceRows(results []replay.Summary) *plot.Plot {
	p := newPlot("most loaded backend over mean\ndot: prefill work, ring: in flight")
	shown := newBounds()
	for _, s := range results {
		shown.include(s.WorkMaxOverMean, s.InFlightMaxOverMean)
	}
	p.Title.Text += balanceAxis(&shown, &p.X)
	p.Add(verticals(), drawing(func(c draw.Canvas, p *plot.Plot) {
		x, y := p.Transforms(&c)
		for i, s := range results {
			row, color := y(float64(i)), rowColor(s.Policy)
			at := func(ratio float64) vg.Length { return x(min(max(ratio, 1), p.X.Max)) }
			work, inFlight := at(s.WorkMaxOverMean), at(s.InFlightMaxOverMean)
			c.StrokeLine2(draw.LineStyle{Color: grid, Width: 1}, x(1), row, max(work, inFlight), row)
			dot(c, vg.Point{X: work, Y: row}, draw.GlyphStyle{Color: color, Radius: 4, Shape: draw.CircleGlyph{}})
			dot(c, vg.Point{X: inFlight, Y: row}, draw.GlyphStyle{Color: color, Radius: 4, Shape: draw.RingGlyph{}})
		}
	}))
	return p
}

// dot draws a glyph even where half of it lies beyond the axis.
func dot(c draw.Canvas, at vg.Point, style draw.GlyphStyle) { c.DrawGlyphNoClip(style, at) }

// box is the outline of a bar.
func box(left, right, middle, half vg.Length) []vg.Point {
	return []vg.Point{{X: left, Y: middle - half}, {X: right, Y: middle - half}, {X: right, Y: middle + half}, {X: left, Y: middle + half}}
}

// verticals draws a faint line at each value of the horizontal axis.
func verticals() drawing {
	return func(c draw.Canvas, p *plot.Plot) {
		x, _ := p.Transforms(&c)
		for _, t := range p.X.Tick.Marker.Ticks(p.X.Min, p.X.Max) {
			c.StrokeLine2(draw.LineStyle{Color: grid, Width: 0.7}, x(t.Value), c.Min.Y, x(t.Value), c.Max.Y)
		}
	}
}
