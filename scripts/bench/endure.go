package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// endure keeps 9,000 streams open through warmroute, a chunk a second each, for
// as long as length, and says what is wrong with the result, if anything is.
func (b *bench) endure(ctx context.Context, replicas []string, length time.Duration) (faults []string, err error) {
	const streams, mostKB = 9000, 40.0
	f, err := b.open(ctx, ours, replicas)
	if err != nil {
		return nil, err
	}
	defer f.stop()
	if _, err := b.load(ctx, f, 16, 1<<10, cold, b.warm); err != nil {
		return nil, err
	}
	before, err := f.rss()
	if err != nil {
		return nil, err
	}
	chunks := int(length.Seconds())
	v, err := b.view(ctx, f, streams, chunks, time.Second, length+3*time.Minute)
	if err != nil {
		return nil, err
	}
	defer v.close()
	var most float64
	for limit := time.Now().Add(length + 2*time.Minute); ; {
		if err := pause(ctx, 5*time.Second); err != nil {
			return nil, err
		}
		s, err := v.report()
		if err != nil {
			return append(faults, err.Error()), nil
		}
		bytes, err := f.rss()
		if err != nil {
			return nil, err
		}
		each := float64(bytes-before) / streams / 1024
		most = max(most, each)
		fmt.Fprintf(b.progress, "%d open, %d complete, %d chunks in 5 s, delay p99 %.0f ms, %.1f KB each\n", s.Open-s.Complete, s.Complete, s.Chunks, s.P99/1000, each)
		if s.Complete == streams {
			break
		}
		if time.Now().After(limit) {
			return append(faults, fmt.Sprintf("%d of %d streams did not end", streams-s.Complete, streams)), nil
		}
	}
	if most > mostKB {
		faults = append(faults, fmt.Sprintf("%.1f KB for a stream, at most %.0f", most, mostKB))
	}
	if err := f.await(ctx, 10*time.Second, func() bool { return len(inFlight(f.admin)) == 0 }); err != nil {
		faults = append(faults, fmt.Sprintf("still in flight when all had ended: %v", inFlight(f.admin)))
	}
	fmt.Fprintf(b.progress, "%d streams of %d chunks complete, at most %.1f KB each\n", streams, chunks, most)
	return faults, nil
}

// inFlight is the lines of warmroute's metrics that say that something is.
func inFlight(admin string) (lines []string) {
	resp, err := http.Get(admin + "/metrics")
	if err != nil {
		return []string{err.Error()}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return []string{"no metrics: " + resp.Status}
	}
	seen := false
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "warmroute_backend_in_flight") {
			seen = true
			if !strings.HasSuffix(line, " 0\n") {
				lines = append(lines, line)
			}
		}
	}
	if !seen {
		lines = append(lines, "no warmroute_backend_in_flight in the metrics")
	}
	return lines
}
