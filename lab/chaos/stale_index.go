package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/lab/testbed"
)

const (
	restoredPrompts      = 80 // that the restored index knows
	restoredPromptTokens = 1024
	restoredInFlight     = 8
	restoredKVTokens     = 80_000 // of a replica: a quarter of its cache has been used when a prompt comes again
)

// restartOnEmptiedCaches restarts a proxy on its snapshot while the replicas' caches are emptied: it notices on each replica, and
// on none when it is restarted again and the caches are kept.
func restartOnEmptiedCaches(ctx context.Context, r *rig) (err error) {
	var replicas []*testbed.Replica
	for i := range len(r.replicas) {
		one, err := r.newReplica(fmt.Sprintf("emptied%d", i), "--kv-tokens", strconv.Itoa(restoredKVTokens))
		if err != nil {
			return err
		}
		if err := r.startAndAwaitHealthy(ctx, []*testbed.Replica{one}); err != nil { // or the next one would get its port
			return err
		}
		defer func() { err = errors.Join(err, testbed.KillAndWait(one)) }()
		replicas = append(replicas, one)
	}
	p, err := r.newProxy("stale-index", fmt.Sprintf("log: {level: warn}\nindex: {snapshot: %q}", filepath.Join(r.dir, "stale-index", "index")))
	if err != nil {
		return err
	}
	if err := p.WriteConfig(replicas); err != nil {
		return err
	}
	if err := p.StartAndAwait(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Terminate(restartTimeout)) }()
	r.playRestoredPrompts(ctx, p)
	for _, c := range []struct {
		what   string
		empty  bool
		resets float64 // to be noticed
		hits   float64 // ratio, at least
	}{
		{"caches emptied", true, float64(len(replicas)), 0},
		{"caches kept", false, 0, 0.9},
	} {
		if err := p.Terminate(restartTimeout); err != nil {
			return err
		}
		if c.empty {
			for _, one := range replicas {
				if err := resetPrefixCache(ctx, one); err != nil {
					return err
				}
			}
		}
		if err := p.StartAndAwait(ctx); err != nil {
			return err
		}
		sum := r.playRestoredPrompts(ctx, p)
		m, err := p.ReadMetrics(ctx)
		if err != nil {
			return err
		}
		resets := m.Sum("warmroute_index_resets_total")
		r.verdict.addMeasurement("%s: hit ratio %.3f, %.0f resets noticed", c.what, sum.HitRatio, resets)
		r.verdict.require(sum.Lost == 0, "%s: %d requests lost", c.what, sum.Lost)
		r.verdict.require(resets == c.resets, "%s: %.0f resets were noticed, want %.0f", c.what, resets, c.resets)
		r.verdict.require(sum.HitRatio >= c.hits, "%s: hit ratio %.3f, want %.3f at least", c.what, sum.HitRatio, c.hits)
	}
	return nil
}

// playRestoredPrompts sends the prompts of restartOnEmptiedCaches.
func (r *rig) playRestoredPrompts(ctx context.Context, p *testbed.Proxy) replay.Summary {
	trace := &replay.Trace{BlockTokens: restoredPromptTokens}
	for i := range uint64(restoredPrompts) {
		trace.Requests = append(trace.Requests, replay.TraceRequest{PromptTokens: restoredPromptTokens, OutputTokens: 2, Blocks: []uint64{i + 1}})
	}
	var tally replay.Tally
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	clients := loadgen.Client{
		URL: p.URL, Model: "sim", Speed: 1, Timeout: restartTimeout, HTTP: client, MaxInFlight: restoredInFlight, OnResult: tally.Add,
	}
	clients.RunTrace(ctx, trace)
	return tally.Summary("", 0)
}

// resetPrefixCache empties the cache of a replica without requests.
func resetPrefixCache(ctx context.Context, one *testbed.Replica) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, one.URL+"/reset_prefix_cache", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1000))
	if err != nil || resp.StatusCode != http.StatusOK {
		return errors.Join(err, fmt.Errorf("replica %s: empty its cache: status %d, %s", one.Name, resp.StatusCode, text))
	}
	return nil
}
