package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"warmroute/scripts/testbed"
	"warmroute/sim"
)

// unseenTimeout is what requests wait at most in hangUnseen for a replica without
// progress.
const unseenTimeout = 2 * time.Second

// hangUnseen lets one replica hang that passes its checks and has no metrics, so that
// nothing but time tells.
func hangUnseen(ctx context.Context, r *rig) error {
	err := r.proxy.Reload(ctx, "ok", r.replicas, "timeouts: {response: "+unseenTimeout.String()+", first_byte: "+unseenTimeout.String()+"}")
	if err != nil {
		return err
	}
	one := r.replicas[0]
	if err := one.Fault(sim.Fault{Kind: sim.MetricsGone}); err != nil {
		return err
	}
	// So that the stall guard, which goes by them, is off before the replica hangs.
	err = waitUntil(ctx, waitTimeout, "the metrics of "+one.Name+" are known to be gone", func() (bool, error) {
		m, err := r.proxy.Scrape(ctx)
		known := slices.ContainsFunc(m["warmroute_backend_running"], func(s testbed.Sample) bool { return s.Labels["backend"] == one.Name })
		return err == nil && !known, err
	})
	if err != nil {
		return err
	}
	if err := one.Fault(sim.Fault{Kind: sim.Hang}); err != nil {
		return err
	}
	if err := requireOthersProgress(ctx, r); err != nil {
		return err
	}
	if err := one.Fault(sim.Fault{Kind: sim.Clear}); err != nil {
		return err
	}
	// What hangs there is not answered any more.
	if err := sleep(ctx, unseenTimeout); err != nil {
		return err
	}
	r.verdict.require(r.verdict.failures("status 504 (whole") > 0, "no request without a stream was ended by timeouts.response")
	if err := r.awaitTraffic(ctx, one); err != nil {
		return err
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// failures is how many requests failed by causes that begin so.
func (v *verdict) failures(cause string) (n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for c, times := range v.failed {
		if strings.HasPrefix(c, cause) {
			n += times
		}
	}
	return n
}
