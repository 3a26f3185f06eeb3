package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"warmroute/replay"
)

// demoScreen shows the state of a demo: in place on a terminal, as a line now
// and then elsewhere. Not safe for concurrent use.
type demoScreen struct {
	out      io.Writer
	terminal bool
	height   int  // lines of the frame that stands on the terminal
	over     bool // the figures are the last
}

// demoState is what a demo is at.
func demoState(elapsed time.Duration, over bool, results []replay.Summary) string {
	switch {
	case over:
		return fmt.Sprintf("After %.0f s:", elapsed.Seconds())
	case results[0].Requests == 0 && results[len(results)-1].Requests == 0:
		return "The first answers are on their way. Ctrl-C ends."
	case elapsed < 10*time.Second:
		return fmt.Sprintf("%.0f s; the caches are still filling. Ctrl-C ends.", elapsed.Seconds())
	}
	return fmt.Sprintf("%.0f s. Ctrl-C ends.", elapsed.Seconds())
}

func newDemoScreen(out io.Writer) *demoScreen {
	return &demoScreen{out: out, terminal: isTerminal(out)}
}

// interval is how often update should be called.
func (s *demoScreen) interval() time.Duration {
	if s.terminal {
		return 500 * time.Millisecond
	}
	return 5 * time.Second
}

// update shows the results so far.
func (s *demoScreen) update(elapsed time.Duration, results []replay.Summary) {
	if !s.terminal {
		fmt.Fprintf(s.out, "%3.0f s", elapsed.Seconds())
		for _, r := range results {
			fmt.Fprintf(s.out, "   %s: %d requests, hit ratio %.2f, TTFT %.0f ms",
				r.Policy, r.Requests, r.HitRatio, r.TTFTMean*1000)
		}
		fmt.Fprintln(s.out)
		return
	}
	// In one write with the clearing of the last frame, so that nothing
	// flickers, and without wrapping, or lines could not be counted. From the
	// line's beginning: a terminal shows ^C where the cursor stood.
	var frame bytes.Buffer
	frame.WriteString("\r\x1b[?7l")
	if s.height > 0 {
		fmt.Fprintf(&frame, "\x1b[%dA\x1b[J", s.height)
	}
	fmt.Fprintf(&frame, "%s\n", demoState(elapsed, s.over, results))
	writeComparison(&frame, results, terminalStyle())
	frame.WriteString("\x1b[?7h")
	s.height = bytes.Count(frame.Bytes(), []byte("\n"))
	s.out.Write(frame.Bytes())
}

// finish shows the final results.
func (s *demoScreen) finish(elapsed time.Duration, results []replay.Summary) {
	if s.over = true; s.terminal {
		s.update(elapsed, results)
		return
	}
	fmt.Fprintln(s.out)
	writeComparison(s.out, results, style{})
}

// style is how the comparison looks: plain text, or what a terminal can show.
type style struct{ colour, blocks bool }

// terminalStyle asks the environment what the terminal shows: no colour where
// NO_COLOR is set (no-color.org) or nothing but text is understood.
func terminalStyle() style {
	locale := strings.ToLower(cmp.Or(os.Getenv("LC_ALL"), os.Getenv("LC_CTYPE"), os.Getenv("LANG")))
	term := os.Getenv("TERM")
	return style{
		colour: os.Getenv("NO_COLOR") == "" && term != "dumb" && term != "",
		blocks: strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8"),
	}
}

// barWidth is how long the longest bar is, in columns.
const barWidth = 32

// bar is as long as share, 0 to 1.
func (s style) bar(share float64, ours bool) string {
	full := strings.Repeat("#", int(share*barWidth+0.5))
	if s.blocks {
		full = strings.ReplaceAll(full, "#", "█")
	}
	if s.colour && ours {
		return "\x1b[32m" + full + "\x1b[0m"
	}
	return full
}

// demoRow is one figure of the comparison; 0 is not known yet.
type demoRow struct {
	label    string
	decimals int
	of       func(replay.Summary) float64
}

func demoRows() []demoRow {
	return []demoRow{
		{"answers", 0, func(s replay.Summary) float64 { return float64(s.Requests) }},
		{"hit ratio", 3, func(s replay.Summary) float64 { return s.HitRatio }},
		{"TTFT ms, mean", 0, func(s replay.Summary) float64 { return s.TTFTMean * 1000 }},
		{"  p50", 0, func(s replay.Summary) float64 { return s.TTFTP50 * 1000 }},
		{"  p99", 0, func(s replay.Summary) float64 { return s.TTFTP99 * 1000 }},
		{"TPOT ms, mean", 1, func(s replay.Summary) float64 { return s.TPOTMean * 1000 }},
		{"E2E ms, mean", 0, func(s replay.Summary) float64 { return s.E2EMean * 1000 }},
	}
}

// writeComparison writes the first policy's figures and the last one's side by
// side, what the last makes of the first's, and the two that matter as bars.
func writeComparison(w io.Writer, results []replay.Summary, look style) {
	base, ours := results[0], results[len(results)-1]
	fmt.Fprintf(w, "%-15s%13s%13s\n", "", base.Policy, ours.Policy)
	for _, row := range demoRows() {
		b, o := row.of(base), row.of(ours)
		fmt.Fprintf(w, "%-15s%13s%13s", row.label, row.show(b), row.show(o))
		if b > 0 && o > 0 {
			fmt.Fprintf(w, "    × %.2f", o/b)
		}
		fmt.Fprintln(w)
	}
	if lost := base.Lost + ours.Lost; lost > 0 {
		fmt.Fprintf(w, "%-15s%13d%13d\n", "lost", base.Lost, ours.Lost)
	}
	fmt.Fprintln(w)
	bar := func(label string, r replay.Summary, share float64, value string) {
		if r.Requests == 0 {
			value = "-"
		}
		fmt.Fprintf(w, "%-21s%-11s  %s %s\n", label, r.Policy, look.bar(share, r.Policy == ours.Policy), value)
	}
	most := max(base.TTFTMean, ours.TTFTMean, 1e-9)
	for _, r := range []replay.Summary{base, ours} {
		bar("time to first token", r, r.TTFTMean/most, fmt.Sprintf("%.0f ms", r.TTFTMean*1000))
	}
	for _, r := range []replay.Summary{base, ours} {
		bar("prompt from cache", r, r.HitRatio, fmt.Sprintf("%.0f %%", r.HitRatio*100))
	}
}

func (r demoRow) show(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.*f", r.decimals, v)
}
