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
	Results  []Summary `json:"results"`
}

// WriteTable writes the results, a line each.
func (r Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\trequests\thit ratio\tTTFT mean\tp50\tp90\tp99\tper token\tend to end\treq/s\tlost\t")
	for _, s := range r.Results {
		fmt.Fprintf(t, "%s\t%d\t%.3f\t%s\t%s\t%s\t%s\t%s\t%s\t%.1f\t%d\t\n", s.Policy, s.Requests, s.HitRatio,
			millis(s.TTFTMean), millis(s.TTFTP50), millis(s.TTFTP90), millis(s.TTFTP99),
			millis(s.TPOTMean), millis(s.E2EMean), s.Throughput, s.Lost)
	}
	return t.Flush()
}

func millis(seconds float64) string { return fmt.Sprintf("%.0f ms", seconds*1000) }
