package replay

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Report is what a tool prints of its runs, as JSON or as a table.
type Report struct {
	Trace    string    `json:"trace,omitempty"`
	Backends int       `json:"backends,omitempty"`
	Load     float64   `json:"load"`            // 0: a closed loop, which has none
	Seeds    int       `json:"seeds,omitempty"` // runs that each result is the mean of
	Results  []Summary `json:"results"`
}

// WriteTable writes the results, a line each, with times in milliseconds, and
// where it is known how evenly work and requests in flight lay on the backends:
// the most loaded one over the mean.
func (r Report) WriteTable(w io.Writer) error {
	balance := slices.ContainsFunc(r.Results, func(s Summary) bool { return s.WorkMaxOverMean > 0 })
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "policy\trequests\thits\tTTFT ms\tp50\tp90\tp99\tTPOT ms\tE2E ms\treq/s\tlost\t")
	if balance {
		fmt.Fprint(t, "work\tin flight\t")
	}
	fmt.Fprintln(t)
	for _, s := range r.Results {
		fmt.Fprintf(t, "%s\t%d\t%.3f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.0f\t%.1f\t%d\t", s.Policy, s.Requests, s.HitRatio,
			s.TTFTMean*1000, s.TTFTP50*1000, s.TTFTP90*1000, s.TTFTP99*1000,
			s.TPOTMean*1000, s.E2EMean*1000, s.Throughput, s.Lost)
		if balance {
			fmt.Fprintf(t, "%.2f\t%.2f\t", s.WorkMaxOverMean, s.InFlightMaxOverMean)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// Find returns the result of one policy.
func (r Report) Find(policy string) (Summary, bool) {
	for _, s := range r.Results {
		if s.Policy == policy {
			return s, true
		}
	}
	return Summary{}, false
}

// BestOther returns the result with the lowest figure among the policies that
// are neither this one nor the reference, which no router can follow.
func (r Report) BestOther(policy string, of func(Summary) float64) (best Summary, ok bool) {
	for _, s := range r.Results {
		if s.Policy != policy && s.Policy != Pooled && s.Requests > 0 && (!ok || of(s) < of(best)) {
			best, ok = s, true
		}
	}
	return best, ok
}
