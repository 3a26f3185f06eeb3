package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"warmroute/scripts/testbed"
	"warmroute/sim"
)

// waitTimeout bounds waits for what always comes; recoveryTimeout is what was promised to a
// replica that is well again: a breaker tries it after 4 s at the latest.
const (
	waitTimeout     = 30 * time.Second
	recoveryTimeout = 5 * time.Second
)

// rig is what scenarios act upon while the load plays.
type rig struct {
	proxy    *testbed.Proxy
	replicas []*testbed.Replica
	real     bool
	// newReplica makes a simulated replica beside those, with arguments for it.
	newReplica func(name string, args ...string) (*testbed.Replica, error)
	// newProxy makes a proxy beside the one, with settings of its own.
	newProxy  func(name, settings string) (*testbed.Proxy, error)
	dir       string                   // of logs and configurations
	load      *clients                 // that play
	verdict   *verdict                 // of the scenario under way
	recovered map[string]time.Duration // from a replica's first answer after its trouble to the first of the load's

	// countExecutions is set by a scenario after which the replicas must not have
	// begun more requests than the proxy was asked for and has counted as retries.
	countExecutions bool
}

// executions is how many requests the simulated replicas have begun and ended. Not
// those of a process that was killed.
func (r *rig) executions(ctx context.Context) (n float64, err error) {
	for _, one := range r.replicas {
		m, err := testbed.Scrape(ctx, one.URL+"/metrics")
		if err != nil {
			return 0, err
		}
		n += m.Sum("vllm:request_success_total")
	}
	return n, nil
}

// waitUntil waits for cond, as long as limit.
func waitUntil(ctx context.Context, limit time.Duration, what string, cond func() (bool, error)) error {
	var last error
	for end := time.Now().Add(limit); ; {
		ok, err := cond()
		if ok && err == nil {
			return nil
		}
		last = err
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("in %v never: %s", limit, what), last)
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitAnswers waits until n more requests were answered.
func (r *rig) awaitAnswers(ctx context.Context, n int) error {
	want := r.verdict.answerCount() + n
	return waitUntil(ctx, waitTimeout, fmt.Sprint(n, " more answers"), func() (bool, error) { return r.verdict.answerCount() >= want, nil })
}

// start starts replicas whose processes have ended, all at once, and waits until
// each has traffic again.
func (r *rig) start(ctx context.Context, replicas ...*testbed.Replica) error {
	if err := r.startReplicas(ctx, replicas); err != nil {
		return err
	}
	return r.awaitTraffic(ctx, replicas...)
}

// awaitTraffic waits until replicas that are well from now on have traffic again,
// which recoveryTimeout bounds: a quarter of the clients ask what no cache holds, so there
// always is something for a replica that has nothing to do.
func (r *rig) awaitTraffic(ctx context.Context, replicas ...*testbed.Replica) error {
	began := time.Now()
	had := r.verdict.lastServed
	if r.real {
		had = r.verdict.lastSent // an answer takes a CPU seconds, and none of these is held before
	}
	// All at once: each is measured by its first, not by how long others took.
	waiting := slices.Clone(replicas)
	for len(waiting) > 0 {
		err := waitUntil(ctx, waitTimeout, "traffic for "+waiting[0].Name+", which answers again", func() (bool, error) {
			n := len(waiting)
			waiting = slices.DeleteFunc(waiting, func(one *testbed.Replica) bool {
				took := had(one.Name).Sub(began)
				if took <= 0 {
					return false
				}
				r.recovered[one.Name] = max(r.recovered[one.Name], took)
				r.verdict.require(took <= recoveryTimeout, "%s, which answers again, had no traffic for %.1f s", one.Name, took.Seconds())
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

// fault makes replicas misbehave for so long. It ends by itself: one that refuses
// connections could not be told to.
func (r *rig) fault(ctx context.Context, d time.Duration, f sim.Fault, replicas ...*testbed.Replica) error {
	f.Seconds = d.Seconds()
	for _, one := range replicas {
		if err := one.Fault(f); err != nil {
			return err
		}
	}
	if err := sleep(ctx, d); err != nil {
		return err
	}
	for _, one := range replicas {
		if err := one.AwaitHealthy(ctx); err != nil {
			return err
		}
	}
	return r.awaitTraffic(ctx, replicas...)
}

// awaitReady waits until the proxy takes n replicas for ready.
func (r *rig) awaitReady(ctx context.Context, n int) error {
	return waitUntil(ctx, waitTimeout, fmt.Sprint(n, " replicas ready"), func() (bool, error) {
		m, err := r.proxy.Scrape(ctx)
		return m.Sum("warmroute_backend_ready") == float64(n), err
	})
}

// awaitIdle waits until the proxy has nothing of the load left.
func (r *rig) awaitIdle(ctx context.Context) error {
	return waitUntil(ctx, waitTimeout, "nothing in flight, nothing queued", func() (bool, error) {
		m, err := r.proxy.Scrape(ctx)
		return m.Sum("warmroute_backend_in_flight") == 0 && m.Sum("warmroute_queue_requests") == 0, err
	})
}

// restore makes the fleet whole, whatever became of it.
func (r *rig) restore(ctx context.Context) error {
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
		if err := one.Fault(sim.Fault{Kind: sim.Clear}); err != nil {
			return err
		}
	}
	return r.awaitReady(ctx, len(r.replicas))
}
