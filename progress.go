package main

import (
	"io"
	"time"

	"github.com/schollz/progressbar/v3"
)

// progressBar shows on a terminal how far a replay or a bench is, and nothing elsewhere.
type progressBar struct {
	bar *progressbar.ProgressBar // nil: nobody looks
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

// set shows the share that is done. The bar's own write errors are of no
// interest: the results matter, and go elsewhere.
func (p progressBar) set(share float64) {
	if p.bar != nil {
		_ = p.bar.Set(int(share * progressSteps))
	}
}

// describe says what is being done.
func (p progressBar) describe(what string) {
	if p.bar != nil {
		p.bar.Describe(what)
	}
}

// clear takes the bar off the screen, and with it the ^C that a terminal may have
// written behind it.
func (p progressBar) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
		io.WriteString(p.out, "\r\x1b[K")
	}
}
