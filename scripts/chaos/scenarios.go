package main

import (
	"context"
	"slices"
	"time"

	"warmroute/loadgen"
	"warmroute/scripts/testbed"
	"warmroute/sim"
)

// scenario is something that happens to the fleet under load.
type scenario struct {
	name    string
	about   string
	real    bool                              // also for a real vLLM
	alone   bool                              // without the clients' load, and only if named
	allowed func(bool, loadgen.Response) bool // failures that it may cause; nil: none
	act     func(context.Context, *rig) error
}

// scenarios returns all scenarios.
func (o *options) scenarios() []scenario {
	return append(slices.Clone(scenarios),
		scenario{name: "batch", about: "thousands of batch requests (-batch) wait beside the clients: none is lost, and the clients are hardly slower", act: o.batch},
		scenario{name: "proxy-restart", about: "the proxy is restarted under chats: hit ratio before and after, with index.snapshot and without", alone: true, act: o.proxyRestart})
}

var scenarios = []scenario{
	{name: "kill", about: "kill -9 one by one", real: true, allowed: endedWithErrorEvent, act: endEach(anyReplica, func(r *testbed.Replica) error { return testbed.Kill(r) })},
	{name: "restart", about: "SIGTERM one by one, which aborts what they do", real: true, allowed: endedWithErrorEvent, act: endEach(abortsOnStop, (*testbed.Replica).End)},
	{name: "restart-drain", about: "SIGTERM one by one with --shutdown-timeout: /health stays 200, new requests get a 500", real: true, act: endEach(drainsOnStop, (*testbed.Replica).End)},
	{name: "outage", about: "kill -9 all at once, down for 2 s", allowed: endedWithErrorEvent, act: outage},
	{name: "stop", about: "SIGSTOP one for 7 s", real: true, allowed: endedWithErrorEvent, act: stop},
	{name: "hang", about: "one accepts and never answers, for 7 s", allowed: endedWithErrorEvent, act: hang},
	{name: "hang-unseen", about: "one answers its checks, but no request, and has no metrics, for 7 s: timeouts.response and first_byte end what waits for it", allowed: status(504), act: hangUnseen},
	{name: "freeze", about: "the engine of one stands still for 7 s while its server answers", allowed: endedWithErrorEvent, act: injectFault(7*time.Second, 1, sim.Fault{Kind: sim.Freeze})},
	{name: "slow", about: "half of them 20 times slower for 4 s", act: injectFault(4*time.Second, 2, sim.Fault{Kind: sim.Slow, Factor: 20})},
	{name: "cut", about: "one ends every stream after three chunks, another before the first", allowed: endedWithErrorEvent, act: cut},
	{name: "abort", about: "the engine of one aborts each request after three tokens, then that of another each before its first", allowed: endedWithErrorEvent, act: abort},
	{name: "reset", about: "one resets connections before the status line, another after the headers", act: reset},
	{name: "reset-at-work", about: "one resets connections 0.3 s into the work, another after 0.7 s: no request is executed beyond its counted attempts", act: resetAtWork},
	{name: "refuse", about: "one refuses connections for 3 s", act: injectFault(3*time.Second, 1, sim.Fault{Kind: sim.Refuse})},
	{name: "close-idle", about: "all close every connection once it is idle", act: injectFault(4*time.Second, 0, sim.Fault{Kind: sim.CloseIdle})},
	{name: "500", about: "one answers 500 for 3 s", act: injectFault(3*time.Second, 1, sim.Fault{Kind: sim.Status, Status: 500})},
	{name: "503", about: "one answers 503 for 3 s", act: injectFault(3*time.Second, 1, sim.Fault{Kind: sim.Status, Status: 503})},
	{name: "503-all", about: "all answer 503 for 3 s: it is passed on, and retries keep to their budget", allowed: status(503), act: refuseAll},
	{name: "429", about: "one answers 429 for 3 s: it is its client's", allowed: status(429), act: injectFault(3*time.Second, 1, sim.Fault{Kind: sim.Status, Status: 429})},
	{name: "metrics-gone", about: "/metrics of all is a 404", act: injectFault(3*time.Second, 0, sim.Fault{Kind: sim.MetricsGone})},
	{name: "metrics-garbled", about: "/metrics of all is garbage", act: injectFault(3*time.Second, 0, sim.Fault{Kind: sim.MetricsGarbled})},
	{name: "metrics-huge", about: "/metrics of all has 50 MB", act: injectFault(3*time.Second, 0, sim.Fault{Kind: sim.MetricsHuge})},
	{name: "model-down", about: "the only replica of a second model is killed and comes back; the first model is not affected", act: modelDown},
	{name: "descriptors", about: "the proxy has no descriptors for half of the connections that it needs, for 6 s: requests wait, and no backend is blamed", act: descriptors},
	{name: "reload", about: "a reload removes a backend, another adds it, a third is faulty", real: true, act: reload},
	{name: "loop", about: "a reload adds the proxy itself as a backend: it is refused, and no request is sent twice", act: loop},
	{name: "drain", about: "an operator drains a backend, and takes it back", real: true, act: drain},
	{name: "rolling", about: "two proxies behind nginx are restarted (SIGTERM), one after the other and twice", act: rolling},
	{name: "hand-over", about: "the proxy hands its listeners to a new process (SIGUSR2)", real: true, act: handOver},
}

func anyReplica(*testbed.Replica) bool     { return true }
func drainsOnStop(r *testbed.Replica) bool { return r.Drains }
func abortsOnStop(r *testbed.Replica) bool { return !r.Drains }

// endEach ends each of some replicas, lets the others serve for a while, and
// starts it again.
func endEach(which func(*testbed.Replica) bool, end func(*testbed.Replica) error) func(context.Context, *rig) error {
	return func(ctx context.Context, r *rig) error {
		for _, one := range r.replicas {
			if !which(one) {
				continue
			}
			if err := end(one); err != nil {
				return err
			}
			if err := r.awaitAnswers(ctx, 20); err != nil {
				return err
			}
			if err := r.start(ctx, one); err != nil {
				return err
			}
		}
		return nil
	}
}

// injectFault lets the first n replicas have a fault, or all for 0.
func injectFault(d time.Duration, n int, f sim.Fault) func(context.Context, *rig) error {
	return func(ctx context.Context, r *rig) error {
		some := r.replicas
		if n > 0 {
			some = some[:n]
		}
		return r.fault(ctx, d, f, some...)
	}
}

func outage(ctx context.Context, r *rig) error {
	// At once: one after another would take a request through all of them.
	if err := testbed.Kill(r.replicas...); err != nil {
		return err
	}
	if err := sleep(ctx, 2*time.Second); err != nil {
		return err
	}
	return r.start(ctx, r.replicas...)
}

// stallTime is well above the 3 s of silence after which a replica counts as stalled.
const stallTime = 7 * time.Second

func stop(ctx context.Context, r *rig) error {
	one := r.replicas[0]
	if err := one.Stop(); err != nil {
		return err
	}
	err := requireOthersProgress(ctx, r)
	if err := one.Resume(); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	return r.awaitTraffic(ctx, one)
}

func hang(ctx context.Context, r *rig) error {
	one := r.replicas[0]
	if err := one.Fault(sim.Fault{Kind: sim.Hang, Everything: true}); err != nil {
		return err
	}
	if err := requireOthersProgress(ctx, r); err != nil {
		return err
	}
	if err := one.Fault(sim.Fault{Kind: sim.Clear}); err != nil {
		return err
	}
	return r.awaitTraffic(ctx, one)
}

// requireOthersProgress waits while a replica is, and holds that the others go on with
// all clients once it is known to be.
func requireOthersProgress(ctx context.Context, r *rig) error {
	if err := sleep(ctx, stallTime-time.Second); err != nil {
		return err
	}
	before := r.verdict.answerCount()
	if err := sleep(ctx, time.Second); err != nil {
		return err
	}
	n := r.verdict.answerCount() - before
	r.verdict.require(n > 0, "one stuck replica took the fleet with it: no answer in the seventh second")
	return nil
}

func cut(ctx context.Context, r *rig) error {
	if err := r.fault(ctx, 2*time.Second, sim.Fault{Kind: sim.Die, Chunks: 3}, r.replicas[0]); err != nil {
		return err
	}
	return r.fault(ctx, 2*time.Second, sim.Fault{Kind: sim.Die}, r.replicas[1])
}

func reset(ctx context.Context, r *rig) error {
	if err := r.fault(ctx, 2*time.Second, sim.Fault{Kind: sim.Reset}, r.replicas[0]); err != nil {
		return err
	}
	return r.fault(ctx, 2*time.Second, sim.Fault{Kind: sim.ResetLate}, r.replicas[1])
}

func resetAtWork(ctx context.Context, r *rig) error {
	r.countExecutions = true
	if err := r.replicas[0].Fault(sim.Fault{Kind: sim.ResetAtWork, Delay: 0.3, Seconds: 3}); err != nil {
		return err
	}
	return r.fault(ctx, 3*time.Second, sim.Fault{Kind: sim.ResetAtWork, Delay: 0.7}, r.replicas[1])
}

// What retries may come to, by default: a share of the requests of ten seconds,
// and so many a second always.
const (
	retryShare           = 0.2
	retriesPerSecond     = 10
	maxUncountedRequests = 100 // that have not ended and are not counted yet
)

func refuseAll(ctx context.Context, r *rig) error {
	// The share is of the requests of ten seconds: of this scenario's alone, then.
	if err := sleep(ctx, 10*time.Second); err != nil {
		return err
	}
	before, err := r.proxy.Scrape(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	err = r.fault(ctx, 3*time.Second, sim.Fault{Kind: sim.Status, Status: 503}, r.replicas...)
	if err != nil {
		return err
	}
	after, err := r.proxy.Scrape(ctx)
	if err != nil {
		return err
	}
	retried := after.Sum("warmroute_retries_total") - before.Sum("warmroute_retries_total")
	asked := float64(r.verdict.requestCount() + maxUncountedRequests)
	most := retryShare*asked + retriesPerSecond*(time.Since(began).Seconds()+1)
	r.verdict.require(retried <= most, "%v retries while all answered 503, of which the budget allows %.0f", retried, most)
	return nil
}

// named returns the scenarios to play.
func named(scenarios []scenario, names []string, real bool) (chosen []scenario, unknown []string) {
	for _, s := range scenarios {
		if (!real || s.real) && (len(names) == 0 && !s.alone || slices.Contains(names, s.name)) {
			chosen = append(chosen, s)
		}
	}
	for _, n := range names {
		if !slices.ContainsFunc(chosen, func(s scenario) bool { return s.name == n }) {
			unknown = append(unknown, n)
		}
	}
	return chosen, unknown
}
