package main

import (
	"context"
	"fmt"
	"time"
)

// measurement is a group of figures that are taken in one life of a contender.
type measurement struct {
	name     string
	replicas int
	once     bool     // in the first round alone: it lasts
	only     []string // contenders; nil: all. smg does not open 9,000 streams
	take     func(b *bench, ctx context.Context, name string, f *front) error
}

var measurements = []measurement{
	{name: "requests", replicas: 4, take: (*bench).requests},
	{name: "latency", replicas: 4, take: (*bench).latency},
	{name: "chunks", replicas: 4, take: (*bench).streamedChunks},
	{name: "memory", replicas: 4, take: (*bench).memory, once: true, only: []string{ours, baseline, nginx, sglang}},
	{name: "idle", replicas: 100, take: (*bench).idle, only: []string{ours}},
}

var (
	sizes = []int{1, 8, 32, 512} // KB
	kinds = []string{hot, cold, shared}
)

// Names of figures; those of requests and latency are made by these.
func perRequest(kb int, kind string) string {
	return fmt.Sprintf("CPU/request, %d KB, %s, µs", kb, kind)
}
func rate(kb int, kind string) string { return fmt.Sprintf("requests/s, %d KB, %s", kb, kind) }
func p50At(clients int) string        { return fmt.Sprintf("p50, 8 KB, %d clients, µs", clients) }
func perStream(streams int) string    { return fmt.Sprintf("memory/stream, %d open, KB", streams) }

const (
	delayP50  = "chunk delay p50, 20/s, ms"
	delayP99  = "chunk delay p99, 20/s, ms"
	rateAt20  = "chunks/s of 20,000"
	perChunk  = "CPU/chunk, 50/s, µs"
	rateAt50  = "chunks/s of 50,000"
	delayAt50 = "chunk delay p99, 50/s, ms"
	rssAfter  = "RSS after the streams, MB"
	idleShare = "idle, 100 backends, % of a core"
)

// spent is the CPU time that a contender uses while do runs.
func spent(f *front, do func() error) (time.Duration, error) {
	if f.process == nil {
		return 0, do()
	}
	before, err := f.cpu()
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	after, err := f.cpu()
	return after - before, err
}

// requests measures the CPU time of one request, from 16 clients.
func (b *bench) requests(ctx context.Context, name string, f *front) error {
	for _, kb := range sizes {
		for _, kind := range kinds {
			var got loaded
			used, err := spent(f, func() (err error) {
				got, err = b.load(ctx, f, 16, kb<<10, kind, b.window)
				return err
			})
			if err != nil {
				return fmt.Errorf("%d KB, %s: %w", kb, kind, err)
			}
			if f.process != nil {
				b.results.add(name, perRequest(kb, kind), micros(used)/float64(got.Requests))
			}
			b.results.add(name, rate(kb, kind), float64(got.Requests)/b.window.Seconds())
		}
	}
	return nil
}

// latency measures how long a request takes.
func (b *bench) latency(ctx context.Context, name string, f *front) error {
	for _, clients := range []int{1, 64} {
		got, err := b.load(ctx, f, clients, 8<<10, shared, b.window)
		if err != nil {
			return err
		}
		b.results.add(name, p50At(clients), got.P50)
	}
	return nil
}

// streamedChunks measures delay and CPU time of a chunk, each at its own pace:
// where two cores are full, delays say nothing.
func (b *bench) streamedChunks(ctx context.Context, name string, f *front) error {
	const streams = 1000
	window := 3 * b.window
	pace := func(perSecond int) (used time.Duration, got streamed, err error) {
		v, err := b.view(ctx, f, streams, 60*perSecond, time.Second/time.Duration(perSecond), time.Minute)
		if err != nil {
			return 0, got, err
		}
		defer v.close()
		if err := pause(ctx, time.Second); err != nil {
			return 0, got, err
		}
		if _, err := v.report(); err != nil {
			return 0, got, err
		}
		used, err = spent(f, func() error {
			if err := pause(ctx, window); err != nil {
				return err
			}
			got, err = v.report()
			return err
		})
		if err == nil && got.Chunks == 0 {
			err = fmt.Errorf("no chunk came in %v", window)
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
	if err := pause(ctx, time.Second); err != nil { // the first thousand are closed
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

// memory measures what an open stream takes: what the process has more than
// before there was any, over their number.
func (b *bench) memory(ctx context.Context, name string, f *front) error {
	before, err := f.rss()
	if err != nil {
		return err
	}
	for _, streams := range []int{1000, 9000} {
		if err := func() error {
			v, err := b.view(ctx, f, streams, 120, time.Second, 2*time.Minute)
			if err != nil {
				return err
			}
			defer v.close()
			if err := pause(ctx, 5*time.Second); err != nil {
				return err
			}
			if _, err := v.report(); err != nil {
				return err
			}
			bytes, err := f.rss()
			b.results.add(name, perStream(streams), float64(bytes-before)/float64(streams)/1024)
			return err
		}(); err != nil {
			return fmt.Errorf("%d streams: %w", streams, err)
		}
		if err := pause(ctx, 2*time.Second); err != nil {
			return err
		}
	}
	return nil
}

// idle measures what the polls of replicas that do nothing cost.
func (b *bench) idle(ctx context.Context, name string, f *front) error {
	window := 5 * b.window
	used, err := spent(f, func() error { return pause(ctx, window) })
	b.results.add(name, idleShare, 100*used.Seconds()/window.Seconds())
	return err
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
