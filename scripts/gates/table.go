package main

import (
	"fmt"
	"io"
	"math"

	"warmroute/replay"
)

// table prints a line for each figure, as soon as it is known.
type table struct {
	out            io.Writer
	passed, judged int
}

func newTable(out io.Writer) *table {
	fmt.Fprintf(out, "%-27s  %-52s %9s  %s\n", "row", "figure", "is", "must be")
	return &table{out: out}
}

// row prints the figures of a row and returns how many are not what they must be.
func (t *table) row(r row, report replay.Report) (failed int) {
	name := r.name
	for _, g := range r.gates {
		value, of, ok := g.figure(report)
		if !ok {
			continue // the policies to compare with were not asked for
		}
		if of != "" {
			of = " (" + of + ")"
		}
		is, verdict := fmt.Sprintf("%.3f", value), "-"
		switch {
		case math.IsNaN(value):
			is, verdict = "", "cost nothing"
		case g.must == 0:
		case g.atLeast && value >= g.must, !g.atLeast && value <= g.must:
			verdict = fmt.Sprintf("%s %-5g pass", g.sign(), g.must)
			t.passed++
			t.judged++
		default:
			verdict = fmt.Sprintf("%s %-5g FAIL", g.sign(), g.must)
			failed++
			t.judged++
		}
		fmt.Fprintf(t.out, "%-27s  %-52s %9s  %s\n", name, g.what+of, is, verdict)
		name = ""
	}
	return failed
}

// results prints every policy's figures.
func (t *table) results(report replay.Report) {
	fmt.Fprintln(t.out)
	_ = report.WriteTable(t.out)
	fmt.Fprintln(t.out)
}

func (t *table) end() { fmt.Fprintf(t.out, "\n%d of %d pass\n", t.passed, t.judged) }
