package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/sim"
	"warmroute/lab/testbed"
)

// scenario is a series of actions on the fleet under load.
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
		scenario{name: "low-priority", about: "thousands of low-priority requests (-low-priority) wait beside the clients: none is lost, and " +
			"the clients are hardly slower", act: o.queueLowPriorityRequests},
		scenario{name: "split", about: "a replica for prefill and one for decode are killed in turn (-split: for how long), under their own " +
			"load: no text is wrong, and no block stays in use", allowed: endedWithErrorEvent, act: o.killSplitReplicas},
		scenario{name: "proxy-restart", about: "the proxy is restarted under chats: hit ratio before and after, with index.snapshot and without",
			alone: true, act: o.compareRestartHitRatios},
		scenario{name: "stale-index", about: "the proxy is restarted on its snapshot while the replicas' caches are emptied: it notices on " +
			"each, and on none if they are kept", alone: true, act: restartOnEmptiedCaches},
		scenario{name: "turns", about: "two keys on a replica with room for a few requests, of which one sends few-shot prompts, one session " +
			"for all, and conversations that grow: the other one gets its half", alone: true, act: sendLaterTurns},
		scenario{name: "stress", about: "many short requests (-stress) while processors and memory are short: none hangs", alone: true,
			act: o.stressConnections})
}

var scenarios = []scenario{
	{name: "kill", about: "kill -9 the replicas one by one", real: true, allowed: endedWithErrorEvent,
		act: endAndRestartEach(anyReplica, func(r *testbed.Replica) error { return testbed.KillAndWait(r) })},
	{name: "restart", about: "SIGTERM the replicas one by one; they abort their requests", real: true, allowed: endedWithErrorEvent,
		act: endAndRestartEach(abortsOnStop, (*testbed.Replica).TerminateAndWait)},
	{name: "restart-drain", about: "SIGTERM replicas with --shutdown-timeout one by one: /health stays 200, new requests get 500", real: true,
		act: endAndRestartEach(drainsOnStop, (*testbed.Replica).TerminateAndWait)},
	{name: "outage", about: "kill -9 all replicas at once, down for 2 s", allowed: endedWithErrorEvent, act: killAndRestartAll},
	{name: "stop", about: "SIGSTOP one replica for 7 s", real: true, allowed: endedWithErrorEvent, act: suspendAndResume},
	{name: "hang", about: "one replica accepts connections and never responds, for 7 s", allowed: endedWithErrorEvent, act: hangAndRecover},
	{name: "hang-unseen", about: "one replica without metrics responds to health checks but to no request, for 7 s: timeouts.response and " +
		"first_byte end its requests", allowed: allowStatuses(504), act: hangWithoutMetrics},
	{name: "freeze", about: "the engine of one replica stops for 7 s while its HTTP server responds", allowed: endedWithErrorEvent,
		act: faultFirstReplicas(7*time.Second, 1, sim.Fault{Kind: sim.Freeze})},
	{name: "slow", about: "two replicas are 20 times slower for 4 s",
		act: faultFirstReplicas(4*time.Second, 2, sim.Fault{Kind: sim.Slow, Factor: 20})},
	{name: "truncate", about: "one replica closes every stream after three chunks, then another before the first",
		allowed: endedWithErrorEvent, act: truncateResponses},
	{name: "abort", about: "the engine of one replica aborts each request after three tokens, then that of another before the first",
		allowed: endedWithErrorEvent, act: abortInEngine},
	{name: "reset", about: "one replica resets connections before the status line, then another after the headers", act: resetConnections},
	{name: "reset-at-work", about: "one replica resets connections 0.3 s into a request, another after 0.7 s: no request is executed more " +
		"often than its counted attempts", act: resetDuringRequest},
	{name: "surplus", about: "two replicas send a response too many on kept-alive connections for 4 s: no client gets another's",
		act: sendSurplusResponses},
	{name: "refuse", about: "one replica refuses connections for 3 s", act: faultFirstReplicas(3*time.Second, 1, sim.Fault{Kind: sim.Refuse})},
	{name: "close-idle", about: "all replicas close idle connections",
		act: faultFirstReplicas(4*time.Second, 0, sim.Fault{Kind: sim.CloseIdle})},
	{name: "500", about: "one replica responds with 500 for 3 s",
		act: faultFirstReplicas(3*time.Second, 1, sim.Fault{Kind: sim.Status, Status: 500})},
	{name: "503", about: "one replica responds with 503 for 3 s",
		act: faultFirstReplicas(3*time.Second, 1, sim.Fault{Kind: sim.Status, Status: 503})},
	{name: "503-all", about: "all replicas respond with 503 for 3 s: requests wait, and the replicas are asked now and then",
		act: respond503FromAll},
	{name: "full", about: "two replicas, and then all of them by turns, are full and refuse streams by an error event, others by a 503: no " +
		"request fails, and none counts as a crash", act: refuseInStreams},
	{name: "overfull", about: "all replicas take half as many requests as there are clients, for 6 s: no request fails, and next to none " +
		"is sent to be refused", act: fillReplicas},
	{name: "429", about: "one replica responds with 429 for 3 s: it is relayed", allowed: allowStatuses(429),
		act: faultFirstReplicas(3*time.Second, 1, sim.Fault{Kind: sim.Status, Status: 429})},
	{name: "metrics-gone", about: "/metrics of all replicas is 404",
		act: faultFirstReplicas(3*time.Second, 0, sim.Fault{Kind: sim.MetricsGone})},
	{name: "metrics-garbled", about: "/metrics of all replicas is invalid",
		act: faultFirstReplicas(3*time.Second, 0, sim.Fault{Kind: sim.MetricsGarbled})},
	{name: "metrics-huge", about: "/metrics of all replicas has 50 MB",
		act: faultFirstReplicas(3*time.Second, 0, sim.Fault{Kind: sim.MetricsHuge})},
	{name: "model-down", about: "the only replica of a second model is killed and started again: the first model is not affected",
		act: killOnlyReplica},
	{name: "context-length", about: "conversations outgrow the context of two replicas of a model; the third, with a longer one, is killed " +
		"and started again: no turn is lost or cut short", act: mixContextLengths},
	{name: "descriptors", about: "the proxy has too few file descriptors for 6 s: requests wait, and no backend goes down",
		act: limitDescriptors},
	{name: "descriptors-idle",
		about: "twice as many idle connections as the proxy has file descriptors: both listeners respond to new clients",
		act:   openIdleConnections},
	{name: "trickle", about: "40 connections of another address send large bodies that slow down to two bytes a second: no request of the " +
		"clients fails", act: trickleBodies},
	{name: "withhold", about: "150 connections of another address send headers and no bodies: no request of the clients fails",
		act: withholdBodies},
	{name: "reload", about: "a reload removes a backend, another adds it, a third is invalid", real: true, act: removeAndAddBackend},
	{name: "loop", about: "a reload adds the proxy itself as a backend: it is refused, and no request is sent twice", act: addProxyAsBackend},
	{name: "drain", about: "an operator drains and undrains a backend", real: true, act: drainAndUndrain},
	{name: "toggle", about: "for 6 s an operator drains and undrains backends, and replicas refuse connections, many times a second while " +
		"requests are queued at max_in_flight", act: toggleStates},
	{name: "rolling", about: "two proxies behind nginx are restarted (SIGTERM) in turn, twice", act: restartProxiesInTurn},
	{name: "redis", about: "two proxies behind nginx share over Redis, which is killed, suspended and filled up for 6 s each; then the " +
		"proxies are restarted in turn", act: breakRedis},
	{name: "binary-upgrade", about: "a new process takes over the listeners of the proxy (SIGUSR2)", real: true, act: upgradeProxy},
}

func anyReplica(*testbed.Replica) bool     { return true }
func drainsOnStop(r *testbed.Replica) bool { return r.Drains }
func abortsOnStop(r *testbed.Replica) bool { return !r.Drains }

// endAndRestartEach returns an action that ends each selected replica, waits for responses of
// the others, and starts it again.
func endAndRestartEach(selects func(*testbed.Replica) bool, end func(*testbed.Replica) error) (act func(context.Context, *rig) error) {
	return func(ctx context.Context, r *rig) error {
		for _, one := range r.replicas {
			if !selects(one) {
				continue
			}
			if err := end(one); err != nil {
				return err
			}
			if err := r.awaitResponses(ctx, 20); err != nil {
				return err
			}
			if err := r.startAndAwaitTraffic(ctx, one); err != nil {
				return err
			}
		}
		return nil
	}
}

// faultFirstReplicas returns an action that injects a fault into the first n replicas, or
// all for 0, and awaits its end.
func faultFirstReplicas(duration time.Duration, n int, f sim.Fault) (act func(context.Context, *rig) error) {
	return func(ctx context.Context, r *rig) error {
		some := r.replicas
		if n > 0 {
			some = some[:n]
		}
		return r.faultAndAwaitTraffic(ctx, duration, f, some...)
	}
}

// killAndRestartAll kills all replicas and starts them 2 s later.
func killAndRestartAll(ctx context.Context, r *rig) error {
	// At once: otherwise one request could be tried on all of them in turn.
	if err := testbed.KillAndWait(r.replicas...); err != nil {
		return err
	}
	if err := testbed.Sleep(ctx, 2*time.Second); err != nil {
		return err
	}
	return r.startAndAwaitTraffic(ctx, r.replicas...)
}

// stallTime is well above the 3 s without progress after which a replica is stalled.
const stallTime = 7 * time.Second

// suspendAndResume suspends one replica with SIGSTOP for stallTime.
func suspendAndResume(ctx context.Context, r *rig) error {
	one := r.replicas[0]
	if err := one.Suspend(); err != nil {
		return err
	}
	err := sleepAndRequireProgress(ctx, r)
	if err := one.Resume(); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	return r.awaitTraffic(ctx, one)
}

// hangAndRecover makes one replica respond to nothing for stallTime.
func hangAndRecover(ctx context.Context, r *rig) error {
	one := r.replicas[0]
	if err := one.InjectFault(sim.Fault{Kind: sim.Hang, Everything: true}); err != nil {
		return err
	}
	if err := sleepAndRequireProgress(ctx, r); err != nil {
		return err
	}
	if err := one.InjectFault(sim.Fault{Kind: sim.Clear}); err != nil {
		return err
	}
	return r.awaitTraffic(ctx, one)
}

// sleepAndRequireProgress waits for stallTime, and checks that in its last second the other
// replicas responded.
func sleepAndRequireProgress(ctx context.Context, r *rig) error {
	if err := testbed.Sleep(ctx, stallTime-time.Second); err != nil {
		return err
	}
	before := r.verdict.responseCount()
	if err := testbed.Sleep(ctx, time.Second); err != nil {
		return err
	}
	n := r.verdict.responseCount() - before
	r.verdict.require(n > 0, "one stalled replica blocked the fleet: no response in the seventh second")
	return nil
}

// truncateResponses makes one replica close each connection after three chunks, and then
// another before the first.
func truncateResponses(ctx context.Context, r *rig) error {
	if err := r.faultAndAwaitTraffic(ctx, 2*time.Second, sim.Fault{Kind: sim.Die, Chunks: 3}, r.replicas[0]); err != nil {
		return err
	}
	return r.faultAndAwaitTraffic(ctx, 2*time.Second, sim.Fault{Kind: sim.Die}, r.replicas[1])
}

// resetConnections makes one replica reset connections before the status line, and then
// another after the headers.
func resetConnections(ctx context.Context, r *rig) error {
	if err := r.faultAndAwaitTraffic(ctx, 2*time.Second, sim.Fault{Kind: sim.Reset}, r.replicas[0]); err != nil {
		return err
	}
	return r.faultAndAwaitTraffic(ctx, 2*time.Second, sim.Fault{Kind: sim.ResetLate}, r.replicas[1])
}

// resetDuringRequest makes two replicas reset connections while they work on a request,
// which may not be executed more often than its counted attempts.
func resetDuringRequest(ctx context.Context, r *rig) error {
	r.countExecutions = true
	if err := r.replicas[0].InjectFault(sim.Fault{Kind: sim.ResetAtWork, Delay: 0.3, Seconds: 3}); err != nil {
		return err
	}
	return r.faultAndAwaitTraffic(ctx, 3*time.Second, sim.Fault{Kind: sim.ResetAtWork, Delay: 0.7}, r.replicas[1])
}

// sendSurplusResponses makes two replicas send the response to the request before on the same
// connection once more. The clients check that each response is theirs.
func sendSurplusResponses(ctx context.Context, r *rig) error {
	const metric = "warmroute_backend_wrong_responses_total"
	before, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	if err := r.faultAndAwaitTraffic(ctx, 4*time.Second, sim.Fault{Kind: sim.Surplus}, r.replicas[:2]...); err != nil {
		return err
	}
	after, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	found := after.Sum(metric) - before.Sum(metric)
	r.verdict.addMeasurement("%.0f responses to other requests were recognized", found)
	r.verdict.require(found > 0, "no surplus response was recognized")
	return nil
}

// respond503FromAll makes all replicas refuse everything for 3 s. Requests wait, and the replicas are asked now and then.
func respond503FromAll(ctx context.Context, r *rig) error {
	refused, err := r.countRefusals(ctx, 3*time.Second, sim.Fault{Kind: sim.Status, Status: 503})
	if err != nil {
		return err
	}
	most := float64(2*r.load.number + 10*len(r.replicas))
	r.verdict.require(refused <= most, "%v requests were refused while all replicas responded with 503 for 3 s, want at most %v", refused,
		most)
	return nil
}

// fillReplicas makes the replicas take half as many requests as there are clients. All others wait, and next to none is
// sent to be refused.
func fillReplicas(ctx context.Context, r *rig) error {
	before := r.verdict.responseCount()
	fault := sim.Fault{Kind: sim.QueueFull, Limit: max(1, r.load.number/(2*len(r.replicas)))}
	refused, err := r.countRefusals(ctx, 6*time.Second, fault)
	if err != nil {
		return err
	}
	requests := r.verdict.responseCount() - before
	r.verdict.addMeasurement("%v refusals of %d requests by replicas that take %d each, beside %d clients", refused, requests, fault.Limit,
		r.load.number)
	// Each client's request at the beginning may be one of those that show how many they take.
	most := float64(r.load.number) + float64(requests)/10
	r.verdict.require(refused <= most, "%v requests were refused, want at most %v", refused, most)
	return nil
}

// countRefusals injects a fault into all replicas, by which they refuse requests, and awaits its end. It returns how many
// were refused.
func (r *rig) countRefusals(ctx context.Context, duration time.Duration, f sim.Fault) (refused float64, err error) {
	before, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return 0, err
	}
	if err := r.faultAndAwaitTraffic(ctx, duration, f, r.replicas...); err != nil {
		return 0, err
	}
	after, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return 0, err
	}
	for _, reason := range []string{"status_503", "error_event"} {
		refused += after.Sum("warmroute_retries_total", "reason", reason) - before.Sum("warmroute_retries_total", "reason", reason)
	}
	return refused, nil
}

// refuseInStreams makes two replicas refuse all requests, and then all replicas those beyond a number that
// leaves the fleet room for all clients, but hardly more.
func refuseInStreams(ctx context.Context, r *rig) error {
	before, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	if err := r.faultAndAwaitTraffic(ctx, 3*time.Second, sim.Fault{Kind: sim.QueueFull}, r.replicas[:2]...); err != nil {
		return err
	}
	limit := r.load.number/len(r.replicas) + 1
	if err := r.faultAndAwaitTraffic(ctx, 4*time.Second, sim.Fault{Kind: sim.QueueFull, Limit: limit}, r.replicas...); err != nil {
		return err
	}
	after, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	added := func(metric string, labels ...string) float64 {
		return after.Sum(metric, labels...) - before.Sum(metric, labels...)
	}
	refused := added("warmroute_retries_total", "reason", "error_event")
	r.verdict.addMeasurement("%.0f refused streams were sent again", refused)
	r.verdict.require(refused > 0, "no stream was refused")
	opened := added("warmroute_backend_breaker_opens_total")
	r.verdict.require(opened == 0, "%.0f breakers were opened by replicas that were full", opened)
	return nil
}

// chooseScenarios returns the scenarios to run, and the names that are unknown.
func chooseScenarios(scenarios []scenario, names []string, real bool) (chosen []scenario, unknown []string) {
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

// noMetricsTimeout is the response and first-byte timeout of hangWithoutMetrics.
const noMetricsTimeout = 2 * time.Second

// hangWithoutMetrics hangs a replica that passes its health checks and has no metrics, so that
// only timeouts detect it.
func hangWithoutMetrics(ctx context.Context, r *rig) error {
	err := r.proxy.Reload(ctx, "ok", r.replicas, "timeouts: {response: "+noMetricsTimeout.String()+", first_byte: "+noMetricsTimeout.String()+
		"}")
	if err != nil {
		return err
	}
	one := r.replicas[0]
	if err := one.InjectFault(sim.Fault{Kind: sim.MetricsGone}); err != nil {
		return err
	}
	// The stall detection uses the metrics: wait until it is off.
	err = waitUntil(ctx, waitTimeout, "the metrics of "+one.Name+" to expire", func() (bool, error) {
		m, err := r.proxy.ReadMetrics(ctx)
		known := slices.ContainsFunc(m["warmroute_backend_running"], func(s testbed.Sample) bool { return s.Labels["backend"] == one.Name })
		return err == nil && !known, err
	})
	if err != nil {
		return err
	}
	if err := one.InjectFault(sim.Fault{Kind: sim.Hang}); err != nil {
		return err
	}
	if err := sleepAndRequireProgress(ctx, r); err != nil {
		return err
	}
	if err := one.InjectFault(sim.Fault{Kind: sim.Clear}); err != nil {
		return err
	}
	// The hung requests are never completed.
	if err := testbed.Sleep(ctx, noMetricsTimeout); err != nil {
		return err
	}
	r.verdict.require(r.verdict.failureCount("status 504 (buffered") > 0, "timeouts.response ended no buffered request")
	if err := r.awaitTraffic(ctx, one); err != nil {
		return err
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// failureCount returns how many requests failed with a cause that begins with the given text.
func (v *verdict) failureCount(causePrefix string) (n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for c, times := range v.failed {
		if strings.HasPrefix(c, causePrefix) {
			n += times
		}
	}
	return n
}

const (
	// abortTime is how long replicas abort requests.
	abortTime = 3 * time.Second
	// maxAbortTime bounds how long, if no request for a message has come to the replica by then.
	maxAbortTime = 4 * abortTime
)

// abortInEngine makes the engine of one replica abort each request after three tokens, and
// then that of another before the first. Meanwhile it sends requests to /v1/messages
// and /v1/responses as well, since the clients send only chats.
func abortInEngine(ctx context.Context, r *rig) error {
	// Without breakers and with enough retries these replicas keep getting requests.
	if err := r.proxy.Reload(ctx, "ok", r.replicas, "breaker: {failures: 0}", "retry: {per_second: 10000}"); err != nil {
		return err
	}
	for i, tokens := range []int{3, 0} {
		one := r.replicas[i]
		before, err := r.readAborted(ctx, one)
		if err != nil {
			return err
		}
		if err := one.InjectFault(sim.Fault{Kind: sim.AbortEach, Chunks: tokens, Seconds: maxAbortTime.Seconds()}); err != nil {
			return err
		}
		aborted, began := 0, time.Now()
		for time.Since(began) < abortTime || tokens > 0 && aborted == 0 && time.Since(began) < maxAbortTime {
			n, err := r.requestOtherAPIs(ctx, tokens > 0)
			if err != nil {
				return err
			}
			aborted += n
		}
		if err := one.InjectFault(sim.Fault{Kind: sim.Clear}); err != nil {
			return err
		}
		after, err := r.readAborted(ctx, one)
		if err != nil {
			return err
		}
		r.verdict.require(after > before, "%s aborted requests, but the metrics count none", one.Name)
		r.verdict.require(tokens == 0 || aborted > 0, "no message was aborted after its first content")
		if err := r.awaitTraffic(ctx, one); err != nil {
			return err
		}
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// readAborted returns how many responses of a replica the proxy has counted as aborted.
func (r *rig) readAborted(ctx context.Context, replica *testbed.Replica) (responses float64, err error) {
	m, err := r.proxy.ReadMetrics(ctx)
	return m.Sum("warmroute_backend_aborted_responses_total", "backend", replica.Name), err
}

// requestOtherAPIs requests a message and a response, each streamed and buffered, and
// checks that each is complete. With mayAbort a message may have no stop_reason, since
// vLLM has none for an abort: it is relayed while the replica passes its checks. aborted is
// how many had none. vLLM does not report that it aborted a response after content.
func (r *rig) requestOtherAPIs(ctx context.Context, mayAbort bool) (aborted int, err error) {
	for _, c := range []struct{ path, body, end string }{
		{"/v1/messages", `{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"Hi"}],"stream":true}`, `"type":"message_stop"`},
		{"/v1/messages", `{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"Hi"}]}`, `"stop_reason":"`},
		{"/v1/responses", `{"model":"sim","max_output_tokens":20,"input":"Hi","stream":true}`, `"type":"response.completed"`},
		{"/v1/responses", `{"model":"sim","max_output_tokens":20,"input":"Hi"}`, `"type":"output_text"`},
	} {
		status, response, err := r.postJSON(ctx, c.path, c.body)
		if err != nil {
			return aborted, err
		}
		switch {
		case status == http.StatusOK && strings.Contains(response, c.end) && !strings.Contains(response, "event: error"):
			if mayAbort && strings.Contains(response, `"delta":{"stop_reason":null`) {
				aborted++
			}
		case mayAbort && status == http.StatusOK && c.path == "/v1/messages" && strings.HasSuffix(response, "}") &&
			!strings.Contains(response, `"stop_reason":`):
			aborted++
		default:
			r.verdict.require(false, "%s: status %d, %q", c.path, status, response)
		}
	}
	return aborted, nil
}

// postJSON posts body to the proxy and returns the whole response.
func (r *rig) postJSON(ctx context.Context, path, body string) (status int, response string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.proxy.URL+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Close = true
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, "", fmt.Errorf("POST %s: %w", path, err)
	}
	return resp.StatusCode, string(all), nil
}
