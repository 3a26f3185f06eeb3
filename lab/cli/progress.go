package cli

import (
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
)

// progressBar shows the progress of a replay or a bench, on a terminal only.
type progressBar struct {
	bar *progressbar.ProgressBar // nil: not a terminal
	out io.Writer
}

const progressSteps = 1000

func newProgressBar(w io.Writer) progressBar {
	if !isTerminal(w) {
		return progressBar{}
	}
	return progressBar{out: w, bar: progressbar.NewOptions(progressSteps,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetDescription("replay"),
		progressbar.OptionSetWidth(40),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

// set shows the share of the work that is done, ignoring write errors.
func (p progressBar) set(share float64) {
	if p.bar != nil {
		_ = p.bar.Set(int(share * progressSteps))
	}
}

// describe sets the text before the bar.
func (p progressBar) describe(text string) {
	if p.bar != nil {
		p.bar.Describe(text)
	}
}

// clear erases the bar, together with the ^C that a terminal may have echoed.
func (p progressBar) clear() {
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
