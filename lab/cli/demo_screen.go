package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"warmroute/lab/replay"
)

// demoScreen shows the results of a demo: updated in place on a terminal, else one
// line per update. It is not safe for concurrent use.
type demoScreen struct {
	out      io.Writer
	terminal bool
	height   int  // lines of the frame on the terminal
	final    bool // the results will not change
	nextLine time.Duration
}

// demoStatusLine returns the line above the results.
func demoStatusLine(elapsed time.Duration, isFinal, hasResponses bool) string {
	switch {
	case isFinal:
		return fmt.Sprintf("After %.0f s:", elapsed.Seconds())
	case !hasResponses:
		return "Waiting for the first responses. Press Ctrl-C to stop."
	case elapsed < 10*time.Second:
		return fmt.Sprintf("%.0f s, caches are still filling. Press Ctrl-C to stop.", elapsed.Seconds())
	}
	return fmt.Sprintf("%.0f s. Press Ctrl-C to stop.", elapsed.Seconds())
}

func newDemoScreen(out io.Writer) *demoScreen {
	return &demoScreen{out: out, terminal: isTerminal(out)}
}

const (
	firstLineDelay = 2 * time.Second
	lineInterval   = 5 * time.Second
)

// isUpdateDue reports whether to call update: always on a terminal, else now and then. It counts as called if it is.
func (s *demoScreen) isUpdateDue(elapsed time.Duration) bool {
	if s.terminal {
		return true
	}
	if elapsed < max(s.nextLine, firstLineDelay) {
		return false
	}
	s.nextLine = elapsed.Truncate(lineInterval) + lineInterval
	return true
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
	// Erase the last frame and write the new one in a single write, so that nothing
	// flickers, and with line wrap off, so that the height is right. Start at the
	// first column, since the terminal may have echoed ^C.
	var frame bytes.Buffer
	frame.WriteString("\r\x1b[?7l")
	if s.height > 0 {
		fmt.Fprintf(&frame, "\x1b[%dA\x1b[J", s.height)
	}
	hasResponses := slices.ContainsFunc(results, func(r replay.Summary) bool { return r.Requests > 0 })
	fmt.Fprintf(&frame, "%s\n", demoStatusLine(elapsed, s.final, hasResponses))
	writeComparison(&frame, results[0], results[len(results)-1], terminalStyle())
	frame.WriteString("\x1b[?7h")
	s.height = bytes.Count(frame.Bytes(), []byte("\n"))
	s.out.Write(frame.Bytes())
}

// showFinal shows the final results.
func (s *demoScreen) showFinal(elapsed time.Duration, results []replay.Summary) {
	if s.final = true; s.terminal {
		s.update(elapsed, results)
		return
	}
	fmt.Fprintln(s.out)
	writeComparison(s.out, results[0], results[len(results)-1], barStyle{})
}

// barStyle says whether bars have colours and block characters.
type barStyle struct{ color, blocks bool }

// terminalStyle returns what the terminal supports, according to the environment.
// NO_COLOR turns colours off (no-color.org).
func terminalStyle() barStyle {
	locale := strings.ToLower(cmp.Or(os.Getenv("LC_ALL"), os.Getenv("LC_CTYPE"), os.Getenv("LANG")))
	term := os.Getenv("TERM")
	return barStyle{
		color:  os.Getenv("NO_COLOR") == "" && term != "dumb" && term != "",
		blocks: strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8"),
	}
}

// maxBarWidth is in columns.
const maxBarWidth = 32

// bar returns a bar whose length is share, from 0 to 1, of the maximum.
func (s barStyle) bar(share float64, highlight bool) string {
	full := strings.Repeat("#", int(share*maxBarWidth+0.5))
	if s.blocks {
		full = strings.ReplaceAll(full, "#", "█")
	}
	if s.color && highlight {
		return "\x1b[32m" + full + "\x1b[0m"
	}
	return full
}

// demoRow is one figure of the comparison; a value of 0 is unknown.
type demoRow struct {
	label    string
	decimals int
	value    func(replay.Summary) float64
}

func demoRows() []demoRow {
	return []demoRow{
		{"responses", 0, func(s replay.Summary) float64 { return float64(s.Requests) }},
		{"hit ratio", 3, func(s replay.Summary) float64 { return s.HitRatio }},
		{"TTFT ms, mean", 0, func(s replay.Summary) float64 { return s.TTFTMean * 1000 }},
		{"  p50", 0, func(s replay.Summary) float64 { return s.TTFTP50 * 1000 }},
		{"  p99", 0, func(s replay.Summary) float64 { return s.TTFTP99 * 1000 }},
		{"TPOT ms, mean", 1, func(s replay.Summary) float64 { return s.TPOTMean * 1000 }},
		{"ITL ms, p99", 0, func(s replay.Summary) float64 { return s.ITLP99 * 1000 }},
		{"E2E ms, mean", 0, func(s replay.Summary) float64 { return s.E2EMean * 1000 }},
	}
}

// writeComparison writes the figures of two policies side by side, their ratio, and the
// two most important ones as bars.
func writeComparison(w io.Writer, base, ours replay.Summary, style barStyle) {
	fmt.Fprintf(w, "%-15s%13s%13s\n", "", base.Policy, ours.Policy)
	for _, row := range demoRows() {
		b, o := row.value(base), row.value(ours)
		fmt.Fprintf(w, "%-15s%13s%13s", row.label, row.format(b), row.format(o))
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
		fmt.Fprintf(w, "%-21s%-11s  %s %s\n", label, r.Policy, style.bar(share, r.Policy == ours.Policy), value)
	}
	maxTTFT := max(base.TTFTMean, ours.TTFTMean, 1e-9)
	for _, r := range []replay.Summary{base, ours} {
		bar("time to first token", r, r.TTFTMean/maxTTFT, fmt.Sprintf("%.0f ms", r.TTFTMean*1000))
	}
	for _, r := range []replay.Summary{base, ours} {
		bar("prompt from cache", r, r.HitRatio, fmt.Sprintf("%.0f %%", r.HitRatio*100))
	}
}

func (r demoRow) format(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.*f", r.decimals, v)
}
