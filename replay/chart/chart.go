// Package chart draws what a replay found as an SVG: hit ratio, time to first
// token and balance of each policy.
package chart

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"warmroute/replay"
)

// Write draws the reports as one picture: a row for each policy where there is
// one report; over load, a line for each policy, where there are several. A
// policy of which no request was answered has no figures: only the title names it.
func Write(w io.Writer, reports []replay.Report) error {
	if len(reports) == 0 || len(reports[0].Results) == 0 {
		return errors.New("there is no result to draw")
	}
	heading := title(reports)
	reports, silent := answered(reports)
	if len(silent) > 0 {
		heading += " · no request answered: " + strings.Join(silent, ", ")
	}
	var canvas *vgsvg.Canvas
	switch order := rank(reports); {
	case len(order) == 0:
		canvas, _ = page(rowsWidth, rowsAround, heading)
	case len(reports) == 1:
		canvas = drawRows(reports[0], heading)
	default:
		canvas = drawLines(reports, order, heading)
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

// answered is the reports without the results that have no figures, and the
// policies that have none in any of them.
func answered(reports []replay.Report) (kept []replay.Report, silent []string) {
	for _, r := range reports {
		all := r.Results
		r.Results = nil
		for _, s := range all {
			if s.Requests > 0 {
				r.Results = append(r.Results, s)
			}
		}
		kept = append(kept, r)
	}
	for _, s := range reports[0].Results {
		if !slices.ContainsFunc(kept, func(r replay.Report) bool { _, ok := r.Find(s.Policy); return ok }) {
			silent = append(silent, s.Policy)
		}
	}
	return kept, silent
}

// named is a policy's name with how many of its requests were lost, if any were.
func named(policy string, lost int) string {
	if lost == 0 {
		return policy
	}
	return fmt.Sprintf("%s (%d lost)", policy, lost)
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
