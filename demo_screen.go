package main

import (
	"bytes"
	"fmt"
	"io"
	"time"

	"warmroute/replay"
)

// demoScreen shows the state of a demo: in place on a terminal, as a line now
// and then elsewhere. Not safe for concurrent use.
type demoScreen struct {
	out      io.Writer
	terminal bool
	height   int // lines of the frame that stands on the terminal
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
	// flickers, and without wrapping, or lines could not be counted.
	var frame bytes.Buffer
	frame.WriteString("\x1b[?7l")
	if s.height > 0 {
		fmt.Fprintf(&frame, "\x1b[%dA\x1b[J", s.height)
	}
	fmt.Fprintf(&frame, "%.0f s, Ctrl-C ends\n\n", elapsed.Seconds())
	writeComparison(&frame, results)
	frame.WriteString("\x1b[?7h")
	s.height = bytes.Count(frame.Bytes(), []byte("\n"))
	s.out.Write(frame.Bytes())
}

// finish shows the final results.
func (s *demoScreen) finish(elapsed time.Duration, results []replay.Summary) {
	if s.terminal {
		s.update(elapsed, results)
		return
	}
	fmt.Fprintln(s.out)
	writeComparison(s.out, results)
}

// writeComparison writes the table and what the last policy makes of the first's figures.
func writeComparison(w io.Writer, results []replay.Summary) {
	replay.Report{Results: results}.WriteTable(w)
	base, ours := results[0], results[len(results)-1]
	if base.HitRatio == 0 || base.TTFTMean == 0 {
		return // too early to compare
	}
	fmt.Fprintf(w, "\n%s / %s: hits × %.2f, TTFT × %.2f (p50 %.2f, p99 %.2f), E2E × %.2f\n",
		ours.Policy, base.Policy,
		ours.HitRatio/base.HitRatio, ours.TTFTMean/base.TTFTMean, ours.TTFTP50/base.TTFTP50,
		ours.TTFTP99/base.TTFTP99, ours.E2EMean/base.E2EMean)
}
