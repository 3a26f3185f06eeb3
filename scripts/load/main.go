// Command load plays the first requests of a recorded trace against a server
// and prints what they saw. It serves scripts/compare.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"warmroute/loadgen"
	"warmroute/replay"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	url := flag.String("url", "http://127.0.0.1:8080", "server to send to, without /v1")
	model := flag.String("model", "sim", "model to name in requests")
	path := flag.String("trace", "", "trace in Mooncake's format, or recorded by a proxy")
	requests := flag.Int("requests", 0, "play only the first so many; 0: all")
	load := flag.Float64("load", 0.9, "prompt tokens offered, over what the replicas could prefill without a cache; 0: as recorded")
	replicas := flag.Int("backends", 8, "how many replicas serve the URL")
	speed := flag.Float64("speed", 1, "how many times faster than real the replicas run")
	timeout := flag.Duration("timeout", 10*time.Minute, "give a request up after this")
	policy := flag.String("policy", "", "name to print in the results")
	asJSON := flag.Bool("json", false, "print one JSON object")
	flag.Parse()

	trace, err := readTrace(*path)
	if err != nil {
		return err
	}
	if *requests > 0 {
		trace.Truncate(*requests)
	}
	if *load > 0 {
		trace.ScaleToLoad(*load, *replicas)
	}

	var tally replay.Tally
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	player := &loadgen.Client{
		URL: *url, Model: *model, HTTP: client,
		Speed: *speed, Timeout: *timeout, OnResult: tally.Add,
	}
	start := time.Now()
	player.RunTrace(ctx, trace)
	elapsed := time.Duration(float64(time.Since(start)) * *speed)

	report := replay.Report{
		Trace: filepath.Base(*path), Backends: *replicas, Load: trace.Load(*replicas),
		Results: []replay.Summary{tally.Summary(*policy, elapsed)},
	}
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(report)
	}
	return report.WriteTable(os.Stdout)
}

func readTrace(path string) (*replay.Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	trace, err := replay.ParseTrace(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	// The seed stands here, so that every run plays the same arrivals.
	trace.SpreadTimestamps(1)
	return trace, nil
}
