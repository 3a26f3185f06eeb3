package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"warmroute/lab/replay"
	"warmroute/lab/replay/chart"
)

// writeReplayJSON writes one object per line and load.
func writeReplayJSON(w io.Writer, reports []replay.Report) error {
	e := json.NewEncoder(w)
	for _, r := range reports {
		if err := e.Encode(r); err != nil {
			return err
		}
	}
	return nil
}

func writeReplayTables(w io.Writer, reports []replay.Report) error {
	for i, r := range reports {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s, %d backends", r.Trace, r.Backends)
		if r.Load > 0 {
			fmt.Fprintf(w, ", load %.3g", r.Load)
		}
		if r.Seeds > 1 {
			fmt.Fprintf(w, ", mean of %d seeds", r.Seeds)
		}
		fmt.Fprint(w, "\n\n")
		if err := r.WriteTable(w); err != nil {
			return err
		}
		if slices.ContainsFunc(r.Results, func(s replay.Summary) bool { return s.Recomputed != nil }) {
			fmt.Fprintln(w)
			if err := r.WriteRecomputed(w); err != nil {
				return err
			}
		}
		writePrefixPolicyRatios(w, r)
	}
	if len(reports) < 2 {
		return nil
	}
	return replay.WriteFixedChoices(w, reports)
}

// writePrefixPolicyRatios writes the ratio of the policy prefix to the best other
// policy in each figure, and to the reference.
func writePrefixPolicyRatios(w io.Writer, r replay.Report) {
	prefix, ok := r.Find("prefix")
	if !ok || prefix.Requests == 0 {
		return
	}
	var ratios []string
	for _, figure := range []struct {
		name  string
		value func(replay.Summary) float64
	}{
		{"TTFT", func(s replay.Summary) float64 { return s.TTFTMean }},
		{"p99", func(s replay.Summary) float64 { return s.TTFTP99 }},
		{"E2E", func(s replay.Summary) float64 { return s.E2EMean }},
	} {
		if best, ok := r.LowestOther("prefix", figure.value); ok && figure.value(best) > 0 {
			ratios = append(ratios, fmt.Sprintf("%s × %.2f (%s)", figure.name, figure.value(prefix)/figure.value(best), best.Policy))
		}
	}
	if len(ratios) > 0 {
		fmt.Fprintf(w, "\nprefix / best other policy: %s\n", strings.Join(ratios, ", "))
	}
	if reference, ok := r.Find(replay.Pooled); ok && reference.TTFTMean > 0 && reference.HitRatio > 0 {
		fmt.Fprintf(w, "prefix / pooled (one cache of the fleet's size): TTFT × %.2f, hit ratio × %.2f\n",
			prefix.TTFTMean/reference.TTFTMean, prefix.HitRatio/reference.HitRatio)
	}
}

// plotFile is the file that --plot names. It is opened before the runs, so that an
// unwritable path is an error at once, and truncated only when they are done.
type plotFile struct{ file *os.File }

// openPlotFile opens or creates the file. Without a path, the methods of the result
// do nothing.
func openPlotFile(path string) (*plotFile, error) {
	if path == "" {
		return &plotFile{}, nil
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("--plot: %w", err)
	}
	return &plotFile{file}, nil
}

func (p *plotFile) draw(reports []replay.Report) error {
	if p.file == nil {
		return nil
	}
	if err := p.file.Truncate(0); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	if err := chart.WriteSVG(p.file, reports); err != nil {
		return fmt.Errorf("draw %s: %w", p.file.Name(), err)
	}
	return nil
}

// closeAndRemoveEmpty closes the file, and removes it if it is empty.
func (p *plotFile) closeAndRemoveEmpty() error {
	if p.file == nil {
		return nil
	}
	if info, err := p.file.Stat(); err == nil && info.Mode().IsRegular() && info.Size() == 0 {
		os.Remove(p.file.Name())
	}
	if err := p.file.Close(); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	return nil
}
