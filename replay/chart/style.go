package chart

import (
	"image/color"

	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// The colours but brown are Okabe and Ito's, which the colour-blind can tell apart.
var (
	white = color.Gray{Y: 255}
	black = color.Gray{Y: 20}
	faint = color.Gray{Y: 120}
	grid  = color.Gray{Y: 225}
	plain = color.Gray{Y: 150} // a policy among others
	thin  = color.Gray{Y: 190} // the line of one among too many

	vermillion = color.RGBA{R: 213, G: 94, A: 255}
	blue       = color.RGBA{G: 114, B: 178, A: 255}
	orange     = color.RGBA{R: 230, G: 159, A: 255}
	sky        = color.RGBA{R: 86, G: 180, B: 233, A: 255}
	green      = color.RGBA{G: 158, B: 115, A: 255}
	purple     = color.RGBA{R: 204, G: 121, B: 167, A: 255}
	brown      = color.RGBA{R: 120, G: 80, B: 40, A: 255}
)

// The two that stand out: ours, and what no router of separate caches reaches.
const (
	ours      = "prefix"
	reference = "pooled"
)

func textStyle(size float64) text.Style {
	return text.Style{
		Color:   black,
		Font:    font.Font{Typeface: "Liberation", Variant: "Sans", Size: vg.Points(size)},
		Handler: text.Plain{Fonts: font.DefaultCache},
	}
}

// rowColor is a policy's where its name stands beside it.
func rowColor(policy string) color.Color {
	switch policy {
	case ours:
		return vermillion
	case reference:
		return blue
	}
	return plain
}

// lineStyle is a policy's among others, the k-th of those that don't stand
// out: no two of six have the same colour.
func lineStyle(policy string, k int) (draw.LineStyle, draw.GlyphStyle) {
	line := draw.LineStyle{Width: 1.1}
	glyph := draw.GlyphStyle{Radius: 3, Shape: draw.CircleGlyph{}}
	switch policy {
	case ours:
		line.Width, line.Color, glyph.Radius = 3, vermillion, 4
	case reference:
		line.Width, line.Color, line.Dashes = 2.5, color.Color(black), []vg.Length{6, 3}
	default:
		colors := []color.Color{blue, orange, green, purple, sky, brown}
		shapes := []draw.GlyphDrawer{draw.SquareGlyph{}, draw.PyramidGlyph{}, draw.CrossGlyph{}, draw.RingGlyph{}}
		line.Color = colors[k%len(colors)]
		glyph.Shape = shapes[k%len(shapes)]
	}
	glyph.Color = line.Color
	return line, glyph
}
