package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"warmroute/lab/testbed"
)

// measurement is a group of figures that are measured between start and stop of a contender.
type measurement struct {
	name     string
	replicas int
	once     bool     // only in the first round, because it is slow
	only     []string // contenders; nil: all (smg cannot open 9,000 streams)
	measure  func(b *bench, ctx context.Context, name string, f *contender) error
}

var measurements = []measurement{
	{name: "requests", replicas: 4, measure: (*bench).measureRequests},
	{name: "latency", replicas: 4, measure: (*bench).measureLatency},
	{name: "chunks", replicas: 4, measure: (*bench).measureStreamedChunks},
	{name: "memory", replicas: 4, measure: (*bench).measureStreamMemory, once: true, only: []string{warmroute, baseline, nginx, sglang}},
	{name: "split", replicas: 4, measure: (*bench).measureSplitRequests, only: []string{warmroute, splitting}},
	{name: "idle", replicas: 100, measure: (*bench).measureIdle, only: []string{warmroute}},
}

var (
	sizes = []int{1, 8, 32, 512} // KB
	kinds = []string{hot, cold, shared}
)

// The names of figures.
func cpuPerRequestFigure(kb int, kind string) string {
	return fmt.Sprintf("CPU/request, %d KB, %s, µs", kb, kind)
}
func requestRateFigure(kb int, kind string) string {
	return fmt.Sprintf("requests/s, %d KB, %s", kb, kind)
}
func latencyFigure(clients int) string { return fmt.Sprintf("p50, 8 KB, %d clients, µs", clients) }
func memoryPerStreamFigure(streams int) string {
	return fmt.Sprintf("memory/stream, %d open, KB", streams)
}

const (
	delayP50  = "chunk delay p50, 20/s, ms"
	delayP99  = "chunk delay p99, 20/s, ms"
	rateAt20  = "chunks/s of 20,000"
	perChunk  = "CPU/chunk, 50/s, µs"
	rateAt50  = "chunks/s of 50,000"
	delayAt50 = "chunk delay p99, 50/s, ms"
	rssAfter  = "RSS after the streams, MB"
	// perSplitRequest is of the contender splitting; of warmroute it is that of a whole request.
	perSplitRequest = "CPU/request, 32 KB, split or not, µs"
	idleShare       = "idle, 100 backends, % of a core"
)

// cpuTimeDuring returns the CPU time that a contender uses while do runs.
func cpuTimeDuring(f *contender, do func() error) (time.Duration, error) {
	if f.process == nil {
		return 0, do()
	}
	before, err := f.cpuTime()
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	after, err := f.cpuTime()
	return after - before, err
}

// measureRequests measures CPU time per request and throughput with 16 clients.
func (b *bench) measureRequests(ctx context.Context, name string, f *contender) error {
	for _, kb := range sizes {
		for _, kind := range kinds {
			var got loadResult
			used, err := cpuTimeDuring(f, func() (err error) {
				got, err = b.runLoadClient(ctx, f, 16, kb<<10, kind, b.window)
				return err
			})
			if err != nil {
				return fmt.Errorf("%d KB, %s: %w", kb, kind, err)
			}
			if f.process != nil {
				b.results.add(name, cpuPerRequestFigure(kb, kind), micros(used)/float64(got.Requests))
			}
			b.results.add(name, requestRateFigure(kb, kind), float64(got.Requests)/b.window.Seconds())
		}
	}
	return nil
}

// measureSplitRequests measures CPU time per request, of which splitting splits all.
func (b *bench) measureSplitRequests(ctx context.Context, name string, f *contender) error {
	var got loadResult
	used, err := cpuTimeDuring(f, func() (err error) {
		got, err = b.runLoadClient(ctx, f, 16, 32<<10, cold, b.window)
		return err
	})
	if err != nil {
		return err
	}
	b.results.add(name, perSplitRequest, micros(used)/float64(got.Requests))
	if name != splitting {
		return nil
	}
	resp, err := http.Get(f.admin + "/metrics")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(page), "\nwarmroute_split_requests_total{result=\"split\"} ")
	value, _, _ := strings.Cut(rest, "\n")
	if split, err := strconv.ParseFloat(value, 64); err != nil || split < float64(got.Requests) {
		return fmt.Errorf("%q of %d requests were split", value, got.Requests)
	}
	return nil
}

// measureLatency measures the median latency of requests.
func (b *bench) measureLatency(ctx context.Context, name string, f *contender) error {
	for _, clients := range []int{1, 64} {
		got, err := b.runLoadClient(ctx, f, clients, 8<<10, shared, b.window)
		if err != nil {
			return err
		}
		b.results.add(name, latencyFigure(clients), got.P50)
	}
	return nil
}

// measureStreamedChunks measures the delay of a chunk at 20 chunks/s per stream, and its
// CPU time at 50: on saturated cores delays mean nothing.
func (b *bench) measureStreamedChunks(ctx context.Context, name string, f *contender) error {
	const streams = 1000
	window := 3 * b.window
	pace := func(perSecond int) (used time.Duration, got streamResult, err error) {
		v, err := b.openStreams(ctx, f, streams, 60*perSecond, time.Second/time.Duration(perSecond), time.Minute)
		if err != nil {
			return 0, got, err
		}
		defer v.closeAndWait()
		if err := testbed.Sleep(ctx, time.Second); err != nil {
			return 0, got, err
		}
		if _, err := v.requestReport(); err != nil {
			return 0, got, err
		}
		used, err = cpuTimeDuring(f, func() error {
			if err := testbed.Sleep(ctx, window); err != nil {
				return err
			}
			got, err = v.requestReport()
			return err
		})
		if err == nil && got.Chunks == 0 {
			err = fmt.Errorf("no chunk received in %v", window)
		}
		return used, got, err
	}
	_, got, err := pace(20)
	if err != nil {
		return err
	}
	b.results.add(name, delayP50, got.P50/1000)
	b.results.add(name, delayP99, got.P99/1000)
	b.results.add(name, rateAt20, float64(got.Chunks)/window.Seconds())
	if err := testbed.Sleep(ctx, time.Second); err != nil { // until the first streams are closed
		return err
	}
	used, got, err := pace(50)
	if err != nil {
		return err
	}
	b.results.add(name, rateAt50, float64(got.Chunks)/window.Seconds())
	b.results.add(name, delayAt50, got.P99/1000)
	if f.process == nil {
		return nil
	}
	b.results.add(name, perChunk, micros(used)/float64(got.Chunks))
	bytes, err := f.rss()
	b.results.add(name, rssAfter, float64(bytes)/1e6)
	return err
}

// measureStreamMemory measures the growth of the process's memory per open stream.
func (b *bench) measureStreamMemory(ctx context.Context, name string, f *contender) error {
	before, err := f.rss()
	if err != nil {
		return err
	}
	for _, streams := range []int{1000, 9000} {
		if err := func() error {
			v, err := b.openStreams(ctx, f, streams, 120, time.Second, 2*time.Minute)
			if err != nil {
				return err
			}
			defer v.closeAndWait()
			if err := testbed.Sleep(ctx, 5*time.Second); err != nil {
				return err
			}
			if _, err := v.requestReport(); err != nil {
				return err
			}
			bytes, err := f.rss()
			b.results.add(name, memoryPerStreamFigure(streams), float64(bytes-before)/float64(streams)/1024)
			return err
		}(); err != nil {
			return fmt.Errorf("%d streams: %w", streams, err)
		}
		if err := testbed.Sleep(ctx, 2*time.Second); err != nil {
			return err
		}
	}
	return nil
}

// measureIdle measures the CPU time of polling idle replicas.
func (b *bench) measureIdle(ctx context.Context, name string, f *contender) error {
	window := 5 * b.window
	used, err := cpuTimeDuring(f, func() error { return testbed.Sleep(ctx, window) })
	b.results.add(name, idleShare, 100*used.Seconds()/window.Seconds())
	return err
}

// testEndurance keeps 9,000 streams open through warmroute for length, with one chunk per
// second each, and returns what failed.
func (b *bench) testEndurance(ctx context.Context, replicas []string, length time.Duration) (failures []string, err error) {
	const streams, maxKB = 9000, 40.0
	f, err := b.startContender(ctx, warmroute, replicas)
	if err != nil {
		return nil, err
	}
	defer f.stop()
	if _, err := b.runLoadClient(ctx, f, 16, 1<<10, cold, b.warm); err != nil {
		return nil, err
	}
	before, err := f.rss()
	if err != nil {
		return nil, err
	}
	chunks := int(length.Seconds())
	v, err := b.openStreams(ctx, f, streams, chunks, time.Second, length+3*time.Minute)
	if err != nil {
		return nil, err
	}
	defer v.closeAndWait()
	var maxEach float64
	for limit := time.Now().Add(length + 2*time.Minute); ; {
		if err := testbed.Sleep(ctx, 5*time.Second); err != nil {
			return nil, err
		}
		s, err := v.requestReport()
		if err != nil {
			return append(failures, err.Error()), nil
		}
		bytes, err := f.rss()
		if err != nil {
			return nil, err
		}
		each := float64(bytes-before) / streams / 1024
		maxEach = max(maxEach, each)
		fmt.Fprintf(b.progress, "%d open, %d complete, %d chunks in 5 s, delay p99 %.0f ms, %.1f KB each\n", s.Open-s.Complete, s.Complete,
			s.Chunks, s.P99/1000, each)
		if s.Complete == streams {
			break
		}
		if time.Now().After(limit) {
			return append(failures, fmt.Sprintf("%d of %d streams did not end", streams-s.Complete, streams)), nil
		}
	}
	if maxEach > maxKB {
		failures = append(failures, fmt.Sprintf("%.1f KB per stream, maximum %.0f", maxEach, maxKB))
	}
	if err := f.await(ctx, 10*time.Second, func() bool { return len(fetchNonzeroInFlight(f.admin)) == 0 }); err != nil {
		failures = append(failures, fmt.Sprintf("in flight after all streams have ended: %v", fetchNonzeroInFlight(f.admin)))
	}
	fmt.Fprintf(b.progress, "%d streams of %d chunks complete, maximum %.1f KB each\n", streams, chunks, maxEach)
	return failures, nil
}

// fetchNonzeroInFlight reads warmroute's /metrics and returns the metrics lines of requests in
// flight that are not 0, or a line with the error.
func fetchNonzeroInFlight(adminURL string) (lines []string) {
	resp, err := http.Get(adminURL + "/metrics")
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
