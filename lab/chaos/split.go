package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	splitPrefill, splitDecode = 2, 4 // replicas
	splitLease                = 4 * time.Second
	splitResponses            = 60 // that are awaited while a replica is down, and after it has returned
)

// splitFleet is replicas for prefill and for decode behind a proxy of their own, under their own load.
type splitFleet struct {
	*rig
	proxy           *testbed.Proxy
	prefill, decode []*testbed.Replica
	completed       atomic.Int64
}

// killSplitReplicas kills a replica for prefill and one for decode in turn, and starts each again, for as long as the
// option says. Every request is split: those whose first content was not sent are completed, with the right text.
func (o *options) killSplitReplicas(ctx context.Context, r *rig) (err error) {
	f := &splitFleet{rig: r}
	defer func() {
		for _, one := range f.replicas() {
			if one.Running() {
				err = errors.Join(err, testbed.KillAndWait(one))
			}
		}
	}()
	if err := f.start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.proxy.Terminate(waitTimeout)) }()
	if err := f.runUnderLoad(ctx, o.split); err != nil {
		return err
	}
	m, err := f.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	split, fallback := m.Sum("warmroute_split_requests_total", "result", "split"), m.Sum("warmroute_split_requests_total")
	r.verdict.require(split > fallback/2, "%v of %v requests were split", split, fallback)
	r.verdict.addMeasurement("%v of %v requests were split", split, fallback)
	return waitUntil(ctx, splitLease+waitTimeout, "the blocks of all requests to be free", func() (bool, error) {
		used := 0.0
		for _, one := range f.replicas() {
			m, err := testbed.ReadMetrics(ctx, one.URL+"/metrics")
			if err != nil {
				return false, err
			}
			late := m.Sum("vllm:nixl_num_notifications_after_expiry_total")
			r.verdict.require(late == 0, "%s: %v KV caches were read after their lease", one.Name, late)
			used += m.Sum("vllm:kv_cache_usage_perc")
		}
		return used == 0, nil
	})
}

func (f *splitFleet) replicas() []*testbed.Replica {
	return append(append([]*testbed.Replica{}, f.prefill...), f.decode...)
}

// start starts the replicas and the proxy, and waits until they are ready.
func (f *splitFleet) start(ctx context.Context) error {
	for i := range splitPrefill + splitDecode {
		// What happens where a KV cache cannot be read differs between fleets.
		onFailure := []string{"recompute", "fail"}[i%2]
		one, err := f.newReplica(fmt.Sprint("split-", i), "--kv-tokens", "200000", "--kv-connector",
			"--kv-load-failure-policy", onFailure, "--kv-lease", splitLease.String(), "--kv-transfer-time", "20ms")
		if err != nil {
			return err
		}
		if i < splitPrefill {
			one.Settings = "role: prefill"
			f.prefill = append(f.prefill, one)
		} else {
			one.Settings = "role: decode"
			f.decode = append(f.decode, one)
		}
		if err := f.startAndAwaitHealthy(ctx, []*testbed.Replica{one}); err != nil { // or the next one would get its port
			return err
		}
	}
	var err error
	if f.proxy, err = f.newProxy("split", fmt.Sprintf("disaggregation: {kv_lease: %v, min_uncached_tokens: 1}", splitLease)); err != nil {
		return err
	}
	if err := f.proxy.WriteConfig(f.replicas()); err != nil {
		return err
	}
	return f.proxy.StartAndAwait(ctx)
}

// runUnderLoad kills and restarts replicas in turn under load, until a time has passed and each kind was killed once.
func (f *splitFleet) runUnderLoad(ctx context.Context, length time.Duration) error {
	load := &clients{url: f.proxy.URL, model: f.load.model, number: f.load.number, prompts: f.load.prompts}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		load.sendUntil(ctx, stop, func(q *prompt, streams bool, response loadgen.Response) {
			f.verdict.checkAndCount(q, streams, response)
			if response.Err == "" {
				f.completed.Add(1)
			}
		})
	}()
	defer func() { close(stop); <-stopped }()
	if err := f.awaitSplitResponses(ctx); err != nil {
		return err
	}
	began := time.Now()
	for round := 0; round == 0 || time.Since(began) < length; round++ {
		for _, victim := range []*testbed.Replica{f.prefill[round%splitPrefill], f.decode[round%splitDecode]} {
			if err := testbed.KillAndWait(victim); err != nil {
				return err
			}
			if err := f.awaitSplitResponses(ctx); err != nil {
				return err
			}
			if err := f.startAndAwaitHealthy(ctx, []*testbed.Replica{victim}); err != nil {
				return err
			}
			err := waitUntil(ctx, waitTimeout, "all replicas of the split fleet to be ready", func() (bool, error) {
				m, err := f.proxy.ReadMetrics(ctx)
				return m.Sum("warmroute_backend_ready") == splitPrefill+splitDecode, err
			})
			if err != nil {
				return err
			}
			if err := f.awaitSplitResponses(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// awaitSplitResponses waits until splitResponses more requests were completed.
func (f *splitFleet) awaitSplitResponses(ctx context.Context) error {
	want := f.completed.Load() + splitResponses
	return waitUntil(ctx, waitTimeout, "responses of the split fleet", func() (bool, error) { return f.completed.Load() >= want, nil })
}
