// Command restart measures what a restart of the proxy under load costs: the
// share of prompt tokens that come from the replicas' caches in the minute after
// it, against the minute before, with a snapshot of the index and without.
//
//	go build -o /tmp/warmroute . && go run ./scripts/restart -binary /tmp/warmroute
//
// The replicas are simulated ones that outlive the proxy, the traffic is the
// demo's with more users who think for longer (a minute has few turns of each,
// so what the first of them costs can be seen), and a client that finds nobody
// listening tries again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/loadgen"
	"warmroute/replay"
	"warmroute/scripts/testbed"
	"warmroute/sim"
	"warmroute/sim/engine"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "restart:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	binary := flag.String("binary", "", "warmroute, built")
	replicas := flag.Int("backends", 4, "simulated replicas")
	window := flag.Duration("window", time.Minute, "how long to look, before and after")
	flag.Parse()
	if *binary == "" {
		return errors.New("-binary is missing; build one with go build -o /tmp/warmroute")
	}
	fmt.Printf("%-18s %8s %8s %8s %14s %10s\n", "", "before", "after", "cost", "requests after", "away")
	for _, snapshot := range []bool{true, false} {
		m, err := measure(ctx, *binary, *replicas, *window, snapshot)
		if err != nil {
			return err
		}
		name := "with a snapshot"
		if !snapshot {
			name = "without"
		}
		fmt.Printf("%-18s %8.3f %8.3f %8.3f %14d %10v\n", name,
			m.before.HitRatio, m.after.HitRatio, m.before.HitRatio-m.after.HitRatio, m.after.Requests, m.away.Round(time.Millisecond))
	}
	return nil
}

// measurement is what one restart was like.
type measurement struct {
	before, after replay.Summary
	away          time.Duration // from the signal until the next proxy was ready
}

// answerLimit is for one answer, and so for a proxy that lets them finish.
const answerLimit = 5 * time.Minute

func measure(ctx context.Context, binary string, replicas int, window time.Duration, snapshot bool) (m measurement, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var backends []*testbed.Replica
	for i := range replicas {
		s := sim.NewServer(sim.Config{Engine: engine.Config{KVTokens: 200_000}}) // room for the conversations of its users, not of all
		if err := s.Listen("127.0.0.1:0"); err != nil {
			return m, err
		}
		running.Go(func() { _ = s.Run(ctx) })
		backends = append(backends, &testbed.Replica{Name: fmt.Sprint("r", i), URL: s.URL()})
	}
	dir, err := os.MkdirTemp("", "restart")
	if err != nil {
		return m, err
	}
	defer func() {
		if err == nil { // else its log says why
			err = os.RemoveAll(dir)
		}
	}()
	ports, err := testbed.FreePorts(2)
	if err != nil {
		return m, err
	}
	settings := "log: {level: warn}"
	if snapshot {
		settings += fmt.Sprintf("\nindex: {snapshot: %q}", filepath.Join(dir, "index"))
	}
	p := testbed.NewProxy(binary, dir, ports[0], ports[1], settings)
	if err := p.Configure(backends); err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, p.End(answerLimit)) }()
	if err := p.Start(ctx); err != nil {
		return m, err
	}

	var tally atomic.Pointer[replay.Tally]
	tally.Store(new(replay.Tally))
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	player := loadgen.Client{
		URL: p.URL, Model: "sim", Speed: 1, Timeout: answerLimit,
		HTTP:     &http.Client{Transport: patient{client.Transport}},
		OnResult: func(r replay.Result) { tally.Load().Add(r) },
	}
	running.Go(func() { player.RunChats(ctx, chats(replicas)) })

	look := func(length time.Duration) (replay.Summary, error) {
		seen := new(replay.Tally)
		tally.Store(seen)
		select {
		case <-time.After(length):
		case <-ctx.Done():
		}
		return seen.Summary("prefix", length), ctx.Err()
	}
	if _, err := look(2 * window); err != nil { // the caches fill
		return m, err
	}
	if m.before, err = look(window); err != nil {
		return m, err
	}
	began := time.Now()
	if err := p.End(answerLimit); err != nil {
		return m, err
	}
	if err := p.Start(ctx); err != nil {
		return m, err
	}
	m.away = time.Since(began)
	m.after, err = look(window)
	return m, err
}

// chats are conversations of thirty users for each replica.
func chats(backends int) *loadgen.Chats {
	return &loadgen.Chats{
		Seed: 1, Concurrency: 30 * backends, SystemPrompts: 10 * backends, SystemTokens: 1200, Zipf: 0.8,
		Turns: loadgen.Range{Min: 6, Max: 14}, UserTokens: loadgen.Range{Min: 200, Max: 600},
		AnswerTokens: loadgen.Range{Min: 30, Max: 90}, Think: 15 * time.Second,
	}
}

// patient tries again while nobody listens, as a client behind a load balancer
// of its own would, so that no conversation ends for the restart.
type patient struct{ http.RoundTripper }

func (p patient) RoundTrip(r *http.Request) (*http.Response, error) {
	for {
		attempt := r.Clone(r.Context())
		var err error
		if attempt.Body, err = r.GetBody(); err != nil {
			return nil, err
		}
		resp, err := p.RoundTripper.RoundTrip(attempt)
		if err == nil && resp.StatusCode != http.StatusServiceUnavailable || r.Context().Err() != nil {
			return resp, err
		}
		if err == nil {
			resp.Body.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
}
