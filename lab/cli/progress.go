package cli

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
)

// progressInterval is the time between two lines of progress where the output is not a terminal.
const progressInterval = 10 * time.Second

// progressBar shows the progress of a replay or a bench: as a bar on a terminal, else as a line now and then. It is not
// safe for concurrent use.
type progressBar struct {
	out  io.Writer
	bar  *progressbar.ProgressBar // nil: not a terminal
	text string                   // what is in progress
	next time.Time                // of a line
}

const progressSteps = 1000

// newProgressBar returns a progressBar that writes to w. It writes nothing before set or describe.
func newProgressBar(w io.Writer, text string) *progressBar {
	p := &progressBar{out: w, text: text, next: time.Now().Add(progressInterval)}
	if isTerminal(w) {
		p.bar = progressbar.NewOptions(progressSteps,
			progressbar.OptionSetWriter(w),
			progressbar.OptionSetDescription(text),
			progressbar.OptionSetWidth(40),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionClearOnFinish(),
		)
	}
	return p
}

// set shows the share of the work that is done, ignoring write errors.
func (p *progressBar) set(share float64) {
	if p.bar != nil {
		_ = p.bar.Set(int(share * progressSteps))
		return
	}
	if now := time.Now(); !now.Before(p.next) {
		p.next = now.Add(progressInterval)
		fmt.Fprintf(p.out, "%s, %.0f %% done\n", p.text, 100*share)
	}
}

// describe shows what is in progress from now on.
func (p *progressBar) describe(text string) {
	p.text = text
	if p.bar != nil {
		p.bar.Describe(text)
		return
	}
	p.next = time.Now().Add(progressInterval)
	fmt.Fprintln(p.out, text)
}

// clear erases the bar, together with the ^C that a terminal may have echoed.
func (p *progressBar) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
		io.WriteString(p.out, "\r\x1b[K")
	}
}

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
