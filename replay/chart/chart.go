// Package chart draws what a replay found as an SVG: hit ratio, time to first
// token and balance of each policy.
package chart

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"warmroute/replay"
)

// Write draws the reports as one picture: a row for each policy where there is
// one report; over load, a line for each policy, where there are several. All
// reports hold the same policies.
func Write(w io.Writer, reports []replay.Report) error {
	if len(reports) == 0 || len(reports[0].Results) == 0 {
		return errors.New("there is no result to draw")
	}
	var canvas *vgsvg.Canvas
	if len(reports) == 1 {
		canvas = drawRows(reports[0])
	} else {
		canvas = drawLines(reports)
	}
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return err
	}
	// Who lacks the font that the text was measured in gets one as wide.
	_, err := w.Write(bytes.ReplaceAll(svg.Bytes(),
		[]byte("font-family:Liberation Sans;"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")))
	return err
}

const (
	margin      = vg.Length(12)
	titleHeight = vg.Length(26)
)

// page is a white canvas with a title, and the part of it below the title.
func page(width, height vg.Length, title string) (*vgsvg.Canvas, draw.Canvas) {
	svg := vgsvg.New(width, height)
	all := draw.New(svg)
	all.FillPolygon(white, []vg.Point{{}, {X: width}, {X: width, Y: height}, {Y: height}})
	style := textStyle(13)
	style.YAlign = draw.YTop
	all.FillText(style, vg.Point{X: margin, Y: height - margin}, title)
	return svg, draw.Crop(all, margin, -margin, margin, -margin-titleHeight)
}

// title says what was measured, but for the load where a picture has several.
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

// newPlot is an empty panel in the picture's style.
func newPlot(title string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	p.Title.Text = title
	p.Title.TextStyle = textStyle(11)
	p.Title.TextStyle.XAlign = draw.XCenter
	p.Title.TextStyle.YAlign = draw.YTop
	p.Title.Padding = 5
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		x, y := axis.Tick.Label.XAlign, axis.Tick.Label.YAlign
		axis.Tick.Label = textStyle(10)
		axis.Tick.Label.XAlign, axis.Tick.Label.YAlign = x, y
		x, y = axis.Label.TextStyle.XAlign, axis.Label.TextStyle.YAlign
		axis.Label.TextStyle = textStyle(10)
		axis.Label.TextStyle.XAlign, axis.Label.TextStyle.YAlign = x, y
		axis.Color, axis.Tick.Color = faint, faint
		axis.LineStyle.Color, axis.Tick.LineStyle.Color = faint, faint
		axis.Tick.Length = 4
	}
	return p
}

// drawing is a plot.Plotter that is a func.
type drawing func(c draw.Canvas, p *plot.Plot)

func (d drawing) Plot(c draw.Canvas, p *plot.Plot) { d(c, p) }
