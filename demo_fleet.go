package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/pflag"

	"warmroute/cli"
	"warmroute/config"
	"warmroute/loadgen"
	"warmroute/replay"
	"warmroute/server"
	"warmroute/sim"
	"warmroute/sim/engine"
)

// demoKVTokens is the cache of one replica: small, so that 20 seconds of a few
// users' chats show what hours of many do to a large one.
const demoKVTokens = 32_000

// demoFleet is some simulated replicas behind a proxy of their own, and what
// the chats sent through it saw.
type demoFleet struct {
	policy string
	url    string // of the proxy, without /v1
	admin  string // base URL of its admin listener, if it has one
	tally  replay.Tally

	replicas []*sim.Server
	inFlight []float64 // sum of samples, by replica
}

// startDemoFleet starts replicas and a proxy and returns when the proxy has
// found a replica ready. run is called for each that has to run meanwhile.
func startDemoFleet(ctx context.Context, policy string, replicas int, address, admin string, run func(func(context.Context) error)) (*demoFleet, error) {
	f := &demoFleet{policy: policy, inFlight: make([]float64, replicas)}
	var urls []string
	for range replicas {
		replica := sim.NewServer(sim.Config{Engine: engine.Config{KVTokens: demoKVTokens}})
		if err := replica.Listen("127.0.0.1:0"); err != nil {
			return nil, err
		}
		run(replica.Run)
		f.replicas = append(f.replicas, replica)
		urls = append(urls, replica.URL())
	}
	c, err := demoConfig(policy, address, admin, urls)
	if err != nil {
		return nil, err
	}
	log, _ := server.NewLogger(c.Log, os.Stderr)
	s, err := server.New(server.Options{Config: c, Log: log, Version: cli.Version()})
	if err != nil {
		return nil, err
	}
	run(s.Run)
	f.url = baseURL(s.Addr())
	if s.AdminAddr() != nil {
		f.admin = baseURL(s.AdminAddr())
	}
	return f, f.waitReady(ctx)
}

// demoConfig is the default configuration, but for what the demo sets.
func demoConfig(policy, address, admin string, urls []string) (*config.Config, error) {
	flags := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	config.AddFlags(flags)
	for name, value := range map[string]string{
		"policy": policy,
		"listen": address,
		"admin":  admin,
		// The replicas come and go with the demo, which is no news.
		"log-level": "error",
	} {
		if err := flags.Set(name, value); err != nil {
			return nil, err
		}
	}
	return config.LoadWithoutFile(defaultConfig, flags, urls)
}

func baseURL(a net.Addr) string { return "http://" + config.LocalAddr(a.String()) }

// waitReady returns when the proxy has a replica to send requests to.
func (f *demoFleet) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for askHealth(ctx, f.url+"/readyz") != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the proxy in front of the %s fleet did not become ready: %w", f.policy, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// play sends the chats through the proxy until ctx is done.
func (f *demoFleet) play(ctx context.Context, chats *loadgen.Chats) {
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	player := &loadgen.Client{
		URL: f.url, Model: "sim", HTTP: client,
		Speed: 1, Timeout: demoTimeout, OnResult: f.tally.Add,
	}
	player.RunChats(ctx, chats)
}

// sample notes how many requests each replica has; called at even intervals.
func (f *demoFleet) sample() {
	for i, r := range f.replicas {
		stats := r.Stats()
		f.inFlight[i] += float64(stats.Running + stats.Waiting)
	}
}

// summary is the result so far, elapsed after the start. Not to be called
// while sample runs.
func (f *demoFleet) summary(elapsed time.Duration) replay.Summary {
	work := make([]float64, len(f.replicas))
	for i, r := range f.replicas {
		stats := r.Stats()
		work[i] = float64(stats.PrefixQueries - stats.PrefixHits)
	}
	s := f.tally.Summary(f.policy, elapsed)
	s.WorkMaxOverMean = replay.MaxOverMean(work)
	s.InFlightMaxOverMean = replay.MaxOverMean(f.inFlight)
	return s
}
