package chart

import (
	"math"
	"strconv"

	"gonum.org/v1/plot"
)

// bounds is what a panel has to show of one quantity.
type bounds struct{ low, high float64 }

func newBounds() bounds { return bounds{math.Inf(1), math.Inf(-1)} }

func (b *bounds) include(values ...float64) {
	for _, v := range values {
		b.low, b.high = min(b.low, v), max(b.high, v)
	}
}

// mostDecades is how much of a logarithmic axis one policy that is far from all
// others may take from them, mostBalance the same of a linear one.
const (
	mostDecades = 2.3
	mostBalance = 3
)

// cut bounds what is shown, so that one policy far beyond the others does not
// press them together, and returns what to say of it behind the title. What is
// beyond is drawn at the edge.
func (b *bounds) cut(most float64) (note string) {
	if b.high <= most {
		return ""
	}
	b.high = most
	return " (cut at " + label(most) + ")"
}

// cutDecades is cut for a logarithmic axis.
func (b *bounds) cutDecades() string {
	if !(b.low > 0) {
		return ""
	}
	// A round figure of two digits.
	most := b.low * math.Pow(10, mostDecades)
	unit := math.Pow(10, math.Floor(math.Log10(most))-1)
	return b.cut(math.Round(most/unit) * unit)
}

// linear makes axis a linear one from `from` to a little above what b holds.
func (b bounds) linear(axis *plot.Axis, from float64) {
	axis.Min, axis.Max = from, from+1.06*(b.high-from)
	if !(axis.Max > axis.Min) {
		axis.Max = from + 0.1
	}
	axis.Tick.Marker = plot.TickerFunc(linearTicks)
}

// logarithmic makes axis one of decades, with a little room around what b holds.
func (b bounds) logarithmic(axis *plot.Axis) {
	low, high := b.low, b.high
	if !(low > 0) || math.IsInf(low, 1) {
		low, high = 0.001, max(high, 0.01)
	}
	room := math.Pow(high/low, 0.04) * 1.02
	axis.Min, axis.Max = low/room, high*room
	axis.Scale = plot.LogScale{}
	axis.Tick.Marker = plot.TickerFunc(logTicks)
}

// linearTicks are about five round values.
func linearTicks(low, high float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10((high-low)/2)))
	for _, factor := range []float64{2, 2.5, 2, 2} { // 1, 2, 5, 10, 20
		if (high-low)/step <= 6 {
			break
		}
		step *= factor
	}
	var ticks []plot.Tick
	first := math.Ceil(low/step-1e-9) + 0 // + 0 makes of -0 a 0
	for k := first; k*step <= high*(1+1e-9); k++ {
		ticks = append(ticks, tick(k*step))
	}
	return ticks
}

// logTicks are 1, 2 and 5 of each decade, more of them within one decade, and
// over more than three the decades alone.
func logTicks(low, high float64) []plot.Tick {
	parts := []float64{1, 2, 5}
	switch {
	case high/low > 1000:
		parts = []float64{1}
	case high/low < 8:
		parts = []float64{1, 1.5, 2, 3, 4, 5, 7}
	}
	var ticks []plot.Tick
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for _, part := range parts {
			if v := part * decade; v >= low && v <= high {
				ticks = append(ticks, tick(v))
			}
		}
	}
	return ticks
}

func tick(v float64) plot.Tick { return plot.Tick{Value: v, Label: label(v)} }

// label writes three digits, which hide what adding up steps leaves behind, or
// a whole number.
func label(v float64) string {
	if v >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}
