package replay

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Report is what a tool prints of its runs, as JSON or as a table.
type Report struct {
	Trace    string    `json:"trace,omitempty"`
	Backends int       `json:"backends,omitempty"`
	Load     float64   `json:"load,omitempty"`
	Seeds    int       `json:"seeds,omitempty"` // runs that each result is the mean of
	Results  []Summary `json:"results"`
}

// WriteTable writes the results, a line each, with times in milliseconds.
func (r Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\trequests\thits\tTTFT ms\tp50\tp90\tp99\tTPOT ms\tE2E ms\treq/s\tlost\t")
	for _, s := range r.Results {
		fmt.Fprintf(t, "%s\t%d\t%.3f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.0f\t%.1f\t%d\t\n", s.Policy, s.Requests, s.HitRatio,
			s.TTFTMean*1000, s.TTFTP50*1000, s.TTFTP90*1000, s.TTFTP99*1000,
			s.TPOTMean*1000, s.E2EMean*1000, s.Throughput, s.Lost)
	}
	return t.Flush()
}
