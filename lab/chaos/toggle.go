package main

import (
	"context"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/testbed"
)

const (
	toggleTime        = 6 * time.Second
	toggleMaxInFlight = "max_in_flight: 2" // of each replica: most of the clients' requests are queued
	toggleInterval    = 5 * time.Millisecond
	refuseTime        = 300 * time.Millisecond
	refuseInterval    = 500 * time.Millisecond // between the replicas, of which at most one refuses connections
)

// toggleStates changes the states of all backends many times a second while requests are queued. None may
// be lost, and nothing in the proxy may panic.
func toggleStates(ctx context.Context, r *rig) error {
	for _, one := range r.replicas {
		one.Settings = toggleMaxInFlight
		defer func() { one.Settings = "" }()
	}
	if err := r.proxy.Reload(ctx, "ok", r.replicas); err != nil {
		return err
	}
	queued, toggles, refusals := 0.0, 0, 0
	for began := time.Now(); time.Since(began) < toggleTime; toggles++ {
		if time.Since(began) > time.Duration(refusals)*refuseInterval {
			one := r.replicas[refusals%len(r.replicas)]
			if err := one.InjectFault(sim.Fault{Kind: sim.Refuse, Seconds: refuseTime.Seconds()}); err != nil {
				return err
			}
			refusals++
			m, err := r.proxy.ReadMetrics(ctx)
			if err != nil {
				return err
			}
			queued = max(queued, m.Sum("warmroute_queue_requests"))
		}
		if err := r.drainAndUndrainImmediately(ctx, r.replicas[toggles%len(r.replicas)]); err != nil {
			return err
		}
		if err := testbed.Sleep(ctx, toggleInterval); err != nil {
			return err
		}
	}
	r.verdict.addMeasurement("%d drains and undrains, %d times refused connections, up to %.0f requests queued", toggles, refusals, queued)
	r.verdict.require(queued > 0, "no request was queued: nothing was tested")
	m, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	r.verdict.require(m.Sum("warmroute_panics_total") == 0, "%v panics were recovered", m.Sum("warmroute_panics_total"))
	for _, one := range r.replicas {
		if err := one.AwaitHealthy(ctx); err != nil {
			return err
		}
	}
	if err := r.awaitTraffic(ctx, r.replicas...); err != nil {
		return err
	}
	for _, one := range r.replicas {
		one.Settings = ""
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// drainAndUndrainImmediately drains a backend by the admin API and undrains it at once.
func (r *rig) drainAndUndrainImmediately(ctx context.Context, one *testbed.Replica) error {
	path := "/api/backends/" + one.Name
	if err := r.proxy.PostAdmin(ctx, path+"/drain"); err != nil {
		return err
	}
	return r.proxy.PostAdmin(ctx, path+"/undrain")
}
