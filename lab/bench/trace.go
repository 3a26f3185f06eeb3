package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	neturl "net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
)

// runTrace sends the requests of a trace to one server and prints what the client
// measured as one JSON object (replay.Report).
func runTrace(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("trace", flag.ExitOnError)
	url := flags.String("url", "http://127.0.0.1:8080",
		"server to send to, without /v1; several, separated by commas, get the requests at random")
	path := flags.String("trace", "", "trace in Mooncake's format, or recorded by a proxy")
	requests := flags.Int("requests", 0, "send only the first `N` requests; 0: all")
	load := flags.Float64("load", 0.9, "offered prompt tokens as a share of what the replicas can prefill without a cache; 0: as recorded")
	replicas := flags.Int("backends", 8, "number of replicas behind the URL")
	speed := flags.Float64("speed", 1, "how many times faster than real time the replicas run")
	policy := flags.String("policy", "", "name of the result")
	flags.Parse(args)

	trace, err := readScaledTrace(*path, 1, *requests, *load, *replicas) // with the same seed, all runs have the same arrivals
	if err != nil {
		return err
	}
	var tally replay.Tally
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	servers := strings.Split(*url, ",")
	if httpClient.Transport, err = newRandomBalancer(servers, httpClient.Transport); err != nil {
		return err
	}
	client := &loadgen.Client{
		URL: servers[0], Model: "sim", HTTP: httpClient,
		Speed: *speed, Timeout: 10 * time.Minute, OnResult: tally.Add,
	}
	start := time.Now()
	client.RunTrace(ctx, trace)
	elapsed := time.Duration(float64(time.Since(start)) * *speed)
	return json.NewEncoder(os.Stdout).Encode(replay.Report{
		Trace: filepath.Base(*path), Backends: *replicas, Load: trace.Load(*replicas),
		Results: []replay.Summary{tally.Summary(*policy, elapsed)},
	})
}

// readScaledTrace reads the first requests of a trace, or all if requests is 0. Their arrivals are scaled to the load of so many
// replicas, or are as recorded if it is 0. The seed draws the arrivals within one timestamp.
func readScaledTrace(path string, seed uint64, requests int, load float64, replicas int) (*replay.Trace, error) {
	trace, err := readTrace(path)
	if err != nil {
		return nil, err
	}
	trace.SpreadTimestamps(seed)
	if requests > 0 {
		trace.Truncate(requests)
	}
	if load > 0 {
		trace.ScaleToLoad(load, replicas)
	}
	return trace, nil
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
	return trace, nil
}

// randomBalancer sends each request to one of several servers, as a load balancer in front of
// several proxies does. The same seed gives the same choices to requests in the same order.
type randomBalancer struct {
	http.RoundTripper
	hosts []string

	mu   sync.Mutex // guards rand
	rand *rand.Rand
}

func newRandomBalancer(servers []string, to http.RoundTripper) (*randomBalancer, error) {
	b := &randomBalancer{RoundTripper: to, rand: rand.New(rand.NewPCG(1, 1))}
	for _, server := range servers {
		u, err := neturl.Parse(server)
		if err != nil {
			return nil, err
		}
		b.hosts = append(b.hosts, u.Host)
	}
	return b, nil
}

// RoundTrip implements http.RoundTripper.
func (b *randomBalancer) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.URL.Host = b.hosts[b.next()]
	return b.RoundTripper.RoundTrip(req)
}

// CloseIdleConnections makes http.Client.CloseIdleConnections reach the transport.
func (b *randomBalancer) CloseIdleConnections() {
	(&http.Client{Transport: b.RoundTripper}).CloseIdleConnections()
}

func (b *randomBalancer) next() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rand.IntN(len(b.hosts))
}
