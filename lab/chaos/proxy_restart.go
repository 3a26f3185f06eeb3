package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/lab/testbed"
)

// restartTimeout bounds one request while the proxy restarts, and the proxy's shutdown.
const restartTimeout = 5 * time.Minute

// compareRestartHitRatios compares what a restart of the proxy under load costs: the share of
// prompt tokens that come from the replicas' caches in the window after it, against
// the window before, with a snapshot of the index and without. The users think for
// longer than the demo's and are more, so that the first turns after the restart
// are a visible share of the window.
func (o *options) compareRestartHitRatios(ctx context.Context, r *rig) error {
	for _, snapshot := range []bool{true, false} {
		// Both runs start with cold caches.
		if err := testbed.KillAndWait(r.replicas...); err != nil {
			return err
		}
		if err := r.startAndAwaitHealthy(ctx, r.replicas); err != nil {
			return err
		}
		m, err := r.measureRestart(ctx, o.window, snapshot)
		if err != nil {
			return err
		}
		name := "without a snapshot"
		if snapshot {
			name = "with a snapshot"
		}
		before, after := m.before.HitRatio, m.after.HitRatio
		r.verdict.addMeasurement("%s: hit ratio before %.3f, after %.3f, difference %.3f; %d requests after, not ready for %v",
			name, before, after, before-after, m.after.Requests, m.unready.Round(time.Millisecond))
		r.verdict.require(m.before.Lost+m.after.Lost == 0, "%s: %d requests lost", name, m.before.Lost+m.after.Lost)
	}
	return nil
}

// restartMeasurement is what clients saw before and after a restart of the proxy.
type restartMeasurement struct {
	before, after replay.Summary
	unready       time.Duration // from SIGTERM until the next process was ready
}

// measureRestart starts a proxy of its own, restarts it under chats, and measures for
// window before and after.
func (r *rig) measureRestart(ctx context.Context, window time.Duration, withSnapshot bool) (m restartMeasurement, err error) {
	settings := "log: {level: warn}"
	name := fmt.Sprint("restart-snapshot-", withSnapshot)
	if withSnapshot {
		settings += fmt.Sprintf("\nindex: {snapshot: %q}", filepath.Join(r.dir, name, "index"))
	}
	p, err := r.newProxy(name, settings)
	if err != nil {
		return m, err
	}
	if err := p.WriteConfig(r.replicas); err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, p.Terminate(restartTimeout)) }()
	if err := p.StartAndAwait(ctx); err != nil {
		return m, err
	}

	var tally atomic.Pointer[replay.Tally]
	tally.Store(new(replay.Tally))
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	users := loadgen.Client{
		URL: p.URL, Model: "sim", Speed: 1, Timeout: restartTimeout,
		HTTP:     &http.Client{Transport: retryTransport{client.Transport}},
		OnResult: func(r replay.Result) { tally.Load().Add(r) },
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { users.RunChats(ctx, newRestartChats(len(r.replicas))) })

	measure := func(length time.Duration) (replay.Summary, error) {
		measured := new(replay.Tally)
		tally.Store(measured)
		err := testbed.Sleep(ctx, length)
		return measured.Summary("", length), err
	}
	if _, err := measure(2 * window); err != nil { // fills the caches
		return m, err
	}
	if m.before, err = measure(window); err != nil {
		return m, err
	}
	stopped := time.Now()
	if err := p.Terminate(restartTimeout); err != nil {
		return m, err
	}
	if err := p.StartAndAwait(ctx); err != nil {
		return m, err
	}
	m.unready = time.Since(stopped)
	m.after, err = measure(window)
	return m, err
}

// newRestartChats returns conversations of thirty users per replica.
func newRestartChats(replicas int) *loadgen.Chats {
	return &loadgen.Chats{
		Seed: 1, Concurrency: 30 * replicas, SystemPrompts: 10 * replicas, SystemTokens: 1200, Zipf: 0.8,
		Turns: loadgen.Range{Min: 6, Max: 14}, UserTokens: loadgen.Range{Min: 200, Max: 600},
		OutputTokens: loadgen.Range{Min: 30, Max: 90}, Think: 15 * time.Second,
	}
}

// retryTransport sends a request again while the connection is refused or the status
// is 503, as a client behind a load balancer would, so that a restart ends no
// conversation.
type retryTransport struct{ http.RoundTripper }

func (t retryTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	for {
		attempt := r.Clone(r.Context())
		var err error
		if attempt.Body, err = r.GetBody(); err != nil {
			return nil, err
		}
		resp, err := t.RoundTripper.RoundTrip(attempt)
		if err == nil && resp.StatusCode != http.StatusServiceUnavailable || r.Context().Err() != nil {
			return resp, err
		}
		if err == nil {
			resp.Body.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
}
