package chart

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
)

// The greys of a picture; the other colors are those of policies.
const (
	black     = "#141414"
	barGrey   = "#969696"
	lineGrey  = "#bebebe"
	gridGrey  = "#e1e1e1"
	fontNames = "Liberation Sans,Arial,Helvetica,sans-serif"
)

// picture is an SVG that is being drawn. The origin is its upper left corner.
type picture struct{ out bytes.Buffer }

// point is a place in a picture.
type point struct{ x, y float64 }

func newPicture(width, height float64) *picture {
	p := &picture{}
	p.add(`<svg xmlns="http://www.w3.org/2000/svg" width="%gpt" height="%gpt" viewBox="0 0 %[1]g %[2]g" font-family="%s" fill="%s">`,
		width, height, fontNames, black)
	p.bar(point{0, 0}, point{width, height}, "#ffffff")
	return p
}

func (p *picture) add(format string, args ...any) { fmt.Fprintf(&p.out, format+"\n", args...) }

// end returns the complete SVG.
func (p *picture) end() []byte {
	p.add("</svg>")
	return p.out.Bytes()
}

// bar fills the rectangle between two corners.
func (p *picture) bar(from, to point, color string) {
	p.add(`<rect x="%.2f" y="%.2f" width="%.2f" height="%.2f" fill="%s"/>`, from.x, from.y, to.x-from.x, to.y-from.y, color)
}

// stroke is how a line looks.
type stroke struct {
	color string
	width float64
	dash  string // as in SVG; empty: none
}

// line connects points.
func (p *picture) line(s stroke, points ...point) {
	var path []byte
	for i, at := range points {
		path = fmt.Appendf(path, "%c%.2f,%.2f", "ML"[min(i, 1)], at.x, at.y)
	}
	p.add(`<path d="%s" fill="none" stroke="%s" stroke-width="%g" stroke-dasharray="%s"/>`, path, s.color, s.width, s.dash)
}

// mark is how a value looks.
type mark struct {
	shape  shape
	color  string
	radius float64 // 0: nothing is drawn
}

type shape int

const (
	disc shape = iota
	ring
	square
	triangle
	cross
)

func (p *picture) mark(m mark, at point) {
	x, y, r := at.x, at.y, m.radius
	outline := fmt.Sprintf(`fill="none" stroke="%s" stroke-width="0.7"`, m.color)
	switch {
	case r == 0:
	case m.shape == disc:
		p.add(`<circle cx="%.2f" cy="%.2f" r="%g" fill="%s"/>`, x, y, r, m.color)
	case m.shape == ring:
		p.add(`<circle cx="%.2f" cy="%.2f" r="%g" %s/>`, x, y, r, outline)
	case m.shape == square:
		p.add(`<rect x="%.2f" y="%.2f" width="%g" height="%[3]g" %s/>`, x-r, y-r, 2*r, outline)
	case m.shape == triangle:
		p.add(`<path d="M%.2f,%.2fl%g,%gh%gZ" fill="%s"/>`, x, y-r, r, 1.7*r, -2*r, m.color)
	case m.shape == cross:
		p.add(`<path d="M%.2f,%.2fl%g,%gm0,%gl%g,%g" %s/>`, x-r, y-r, 2*r, 2*r, -2*r, -2*r, 2*r, outline)
	}
}

// text writes a line of text, whose start, middle or end, as named by anchor, is at a point on
// its baseline.
func (p *picture) text(at point, anchor string, size float64, text string) {
	p.add(`<text x="%.2f" y="%.2f" text-anchor="%s" font-size="%gpx">%s</text>`, at.x, at.y, anchor, size, html.EscapeString(text))
}

// axis maps values to a coordinate.
type axis struct {
	low, high   float64 // values
	isLog       bool
	ticks       []tick
	start, stop float64 // coordinates of low and high
}

// tick is a value that an axis names.
type tick struct {
	value float64
	label string
}

// between returns the axis with the coordinates of its ends.
func (a axis) between(start, stop float64) axis {
	a.start, a.stop = start, stop
	return a
}

func (a *axis) at(value float64) (coordinate float64) {
	share := (value - a.low) / (a.high - a.low)
	if a.isLog {
		share = math.Log(value/a.low) / math.Log(a.high/a.low)
	}
	return a.start + share*(a.stop-a.start)
}

// linearAxis shows from 0 to the values' maximum.
func linearAxis(values []float64) axis {
	high := max(1.06*slices.Max(values), 0.1)
	step := math.Pow(10, math.Floor(math.Log10(high)))
	for _, part := range []float64{0.2, 0.5, 1, 2} {
		if high/(part*step) <= 6 {
			step *= part
			break
		}
	}
	a := axis{high: high}
	for i := 0; float64(i)*step <= high; i++ {
		a.ticks = append(a.ticks, newTick(float64(i)*step))
	}
	return a
}

// logAxis shows the values on a logarithmic scale.
func logAxis(values []float64) axis {
	low, high := slices.Min(values), slices.Max(values)
	room := math.Pow(high/low, 0.04) * 1.02
	a := axis{low: low / room, high: high * room, isLog: true}
	a.ticks = logTicks(a.low, a.high)
	return a
}

// logTicks returns 1, 2 and 5 of each decade, of more than three decades only 1,
// and of less than one more values in between.
func logTicks(low, high float64) (ticks []tick) {
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for k, part := range []float64{1, 2, 5, 1.5, 3, 4, 7, 1.2} {
			v := part * decade
			if v >= low && v <= high && (k < 1 || high/low <= 1000) && (k < 3 || high/low < 8) {
				ticks = append(ticks, newTick(v))
			}
		}
	}
	return ticks
}

func newTick(value float64) tick {
	return tick{value, strconv.FormatFloat(math.Round(value*1000)/1000, 'f', -1, 64)}
}

// drawXAxis draws an axis at the lower edge of a panel, and its grid up to the upper one.
func (p *picture) drawXAxis(a axis, top, bottom float64) {
	edge := bottom + 6
	p.line(stroke{color: black, width: 0.5}, point{a.start, edge}, point{a.stop, edge})
	for _, t := range a.ticks {
		x := a.at(t.value)
		p.line(stroke{color: gridGrey, width: 0.5}, point{x, top}, point{x, bottom})
		p.line(stroke{color: black, width: 0.5}, point{x, edge}, point{x, edge + 5})
		p.text(point{x, edge + 16}, "middle", 10, t.label)
	}
}

// drawYAxis draws an axis at the left edge of a panel, and its grid up to the right one.
func (p *picture) drawYAxis(a axis, left, right float64) {
	edge := left - 6
	p.line(stroke{color: black, width: 0.5}, point{edge, a.start}, point{edge, a.stop})
	for _, t := range a.ticks {
		y := a.at(t.value)
		p.line(stroke{color: gridGrey, width: 0.5}, point{left, y}, point{right, y})
		p.line(stroke{color: black, width: 0.5}, point{edge - 5, y}, point{edge, y})
		p.text(point{edge - 8, y + 3.5}, "end", 10, t.label)
	}
}
