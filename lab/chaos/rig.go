package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/testbed"
)

// waitTimeout bounds waits for events that always happen. recoveryTimeout bounds the time
// until a recovered replica gets traffic: its breaker tries it after at most 4 s.
const (
	waitTimeout     = 30 * time.Second
	recoveryTimeout = 5 * time.Second
)

// rig is the proxy and the replicas that scenarios act upon under load.
type rig struct {
	proxy    *testbed.Proxy
	replicas []*testbed.Replica
	real     bool
	// newReplica returns a further simulated replica, not started, with extra arguments.
	newReplica func(name string, args ...string) (*testbed.Replica, error)
	// newProxy returns a further proxy, not started, with its own settings.
	newProxy  func(name, settings string) (*testbed.Proxy, error)
	dir       string                   // for logs and configurations
	load      *clients                 // that send the load
	verdict   *verdict                 // of the running scenario
	recovered map[string]time.Duration // by replica, the longest time from its recovery to its first traffic

	// countExecutions is set by a scenario during which the replicas must not execute
	// more requests than the clients sent plus the retries that the proxy counted.
	countExecutions bool
}

// readExecutions returns how many requests the simulated replicas have executed, except in
// processes that were killed.
func (r *rig) readExecutions(ctx context.Context) (n float64, err error) {
	for _, one := range r.replicas {
		m, err := testbed.ReadMetrics(ctx, one.URL+"/metrics")
		if err != nil {
			return 0, err
		}
		n += m.Sum("vllm:request_success_total")
	}
	return n, nil
}

// waitUntil waits at most limit for cond. what completes "waiting for …".
func waitUntil(ctx context.Context, limit time.Duration, what string, cond func() (bool, error)) error {
	var last error
	for end := time.Now().Add(limit); ; {
		ok, err := cond()
		if ok && err == nil {
			return nil
		}
		last = err
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("timeout after %v waiting for %s", limit, what), last)
		}
		if err := testbed.Sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// awaitResponses waits until n more requests were completed.
func (r *rig) awaitResponses(ctx context.Context, n int) error {
	want := r.verdict.responseCount() + n
	return waitUntil(ctx, waitTimeout, fmt.Sprint(n, " more responses"), func() (bool, error) {
		return r.verdict.responseCount() >= want, nil
	})
}

// startAndAwaitTraffic starts replicas whose processes have ended, all at once, and waits until
// each has traffic again.
func (r *rig) startAndAwaitTraffic(ctx context.Context, replicas ...*testbed.Replica) error {
	if err := r.startAndAwaitHealthy(ctx, replicas); err != nil {
		return err
	}
	return r.awaitTraffic(ctx, replicas...)
}

// awaitTraffic waits until replicas that have just recovered have traffic again, and
// requires that within recoveryTimeout: a quarter of the clients send prompts that no
// cache holds, so there is always a request for an idle replica.
func (r *rig) awaitTraffic(ctx context.Context, replicas ...*testbed.Replica) error {
	began := time.Now()
	had := r.verdict.lastFirstToken
	if r.real {
		had = r.verdict.lastRespondedSentAt // a response takes seconds on a CPU
	}
	// All at once, so that one replica's time does not include the wait for another.
	waiting := slices.Clone(replicas)
	for len(waiting) > 0 {
		err := waitUntil(ctx, waitTimeout, "traffic for "+waiting[0].Name, func() (bool, error) {
			n := len(waiting)
			waiting = slices.DeleteFunc(waiting, func(one *testbed.Replica) bool {
				took := had(one.Name).Sub(began)
				if took <= 0 {
					return false
				}
				r.recovered[one.Name] = max(r.recovered[one.Name], took)
				r.verdict.require(took <= recoveryTimeout, "%s had no traffic for %.1f s after it recovered", one.Name, took.Seconds())
				return true
			})
			return len(waiting) < n, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// faultAndAwaitTraffic injects a fault into replicas, waits until it has ended and they
// have traffic.
// The replicas end it themselves: one that refuses connections cannot be told to.
func (r *rig) faultAndAwaitTraffic(ctx context.Context, duration time.Duration, f sim.Fault, replicas ...*testbed.Replica) error {
	f.Seconds = duration.Seconds()
	for _, one := range replicas {
		if err := one.InjectFault(f); err != nil {
			return err
		}
	}
	if err := testbed.Sleep(ctx, duration); err != nil {
		return err
	}
	for _, one := range replicas {
		if err := one.AwaitHealthy(ctx); err != nil {
			return err
		}
	}
	return r.awaitTraffic(ctx, replicas...)
}

// awaitReadyBackends waits until n backends of the proxy are ready.
func (r *rig) awaitReadyBackends(ctx context.Context, n int) error {
	return waitUntil(ctx, waitTimeout, fmt.Sprint(n, " ready backends"), func() (bool, error) {
		m, err := r.proxy.ReadMetrics(ctx)
		return m.Sum("warmroute_backend_ready") == float64(n), err
	})
}

// awaitProxyIdle waits until the proxy has no request in flight or queued.
func (r *rig) awaitProxyIdle(ctx context.Context) error {
	return waitUntil(ctx, waitTimeout, "the proxy to become idle", func() (bool, error) {
		m, err := r.proxy.ReadMetrics(ctx)
		return m.Sum("warmroute_backend_in_flight") == 0 && m.Sum("warmroute_queue_requests") == 0, err
	})
}

// restoreReplicas starts, resumes and clears the faults of all replicas.
func (r *rig) restoreReplicas(ctx context.Context) error {
	for _, one := range r.replicas {
		if !one.Running() {
			if err := one.Start(); err != nil {
				return err
			}
		}
		if err := one.Resume(); err != nil {
			return err
		}
		if err := one.AwaitHealthy(ctx); err != nil {
			return err
		}
		if r.real {
			continue
		}
		if err := one.InjectFault(sim.Fault{Kind: sim.Clear}); err != nil {
			return err
		}
	}
	return r.awaitReadyBackends(ctx, len(r.replicas))
}
