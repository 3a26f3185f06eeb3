package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"warmroute/replay"
)

// writeReplayJSON writes an object a line, one for each load: a script reads
// one load as it reads several.
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
		writeStanding(w, r)
	}
	return nil
}

// writeStanding writes how prefix compares with the best of the other policies,
// which is another one in each figure, and with the reference.
func writeStanding(w io.Writer, r replay.Report) {
	ours, ok := r.Find("prefix")
	if !ok || ours.Requests == 0 {
		return
	}
	var parts []string
	for _, c := range []struct {
		name string
		of   func(replay.Summary) float64
	}{
		{"TTFT", func(s replay.Summary) float64 { return s.TTFTMean }},
		{"p99", func(s replay.Summary) float64 { return s.TTFTP99 }},
		{"E2E", func(s replay.Summary) float64 { return s.E2EMean }},
	} {
		if best, ok := r.BestOther("prefix", c.of); ok && c.of(best) > 0 {
			parts = append(parts, fmt.Sprintf("%s × %.2f (%s)", c.name, c.of(ours)/c.of(best), best.Policy))
		}
	}
	if len(parts) > 0 {
		fmt.Fprintf(w, "\nprefix / the best other: %s\n", strings.Join(parts, ", "))
	}
	if reference, ok := r.Find(replay.Pooled); ok && reference.TTFTMean > 0 && reference.HitRatio > 0 {
		fmt.Fprintf(w, "prefix / pooled, one cache of the fleet's size: TTFT × %.2f, hits × %.2f\n",
			ours.TTFTMean/reference.TTFTMean, ours.HitRatio/reference.HitRatio)
	}
}
