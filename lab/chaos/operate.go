package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/testbed"
)

// removeAndAddBackend removes a backend that has requests and adds it again.
func removeAndAddBackend(ctx context.Context, r *rig) error {
	last := len(r.replicas) - 1
	if err := r.proxy.Reload(ctx, "ok", r.replicas[:last]); err != nil {
		return err
	}
	if err := r.addViolationIfTraffic(ctx, r.replicas[last]); err != nil {
		return err
	}
	if err := r.proxy.Reload(ctx, "ok", r.replicas); err != nil {
		return err
	}
	if err := r.awaitTraffic(ctx, r.replicas[last]); err != nil {
		return err
	}
	if err := r.proxy.Reload(ctx, "failed", r.replicas, "no_such_setting: 1"); err != nil {
		return err
	}
	if err := r.awaitResponses(ctx, 20); err != nil {
		return err
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// maxDescriptors leaves about a dozen for connections to replicas, beside those of the
// clients. While replicas close idle connections each request needs a new one.
const maxDescriptors = 64

// limitDescriptors leaves the proxy too few file descriptors for 6 s.
func limitDescriptors(ctx context.Context, r *rig) error {
	const opens = "warmroute_backend_breaker_opens_total"
	before, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	count := func(text string) int {
		log, err := os.ReadFile(r.proxy.Log)
		r.verdict.require(err == nil, "the proxy's log: %v", err)
		return strings.Count(string(log), text)
	}
	const message, down = "out of file descriptors", "state=down"
	messages, downs := count(message), count(down)
	undo, err := r.proxy.LimitDescriptors(ctx, maxDescriptors)
	if err != nil {
		return err
	}
	err = r.faultAndAwaitTraffic(ctx, 6*time.Second, sim.Fault{Kind: sim.CloseIdle}, r.replicas...)
	if err := errors.Join(err, undo()); err != nil {
		return err
	}
	after, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	messages, downs = count(message)-messages, count(down)-downs
	r.verdict.require(messages > 0, "the log does not report that descriptors ran out")
	r.verdict.require(messages <= 1+int(time.Since(began)/time.Minute), "the log reports %d times that descriptors ran out", messages)
	r.verdict.require(downs == 0, "backends went down %d times because descriptors ran out", downs)
	r.verdict.require(after.Sum(opens) == before.Sum(opens), "breakers opened because descriptors ran out")
	return nil
}

// maxIdleDescriptors leaves descriptors for the clients and their requests, beside a few dozen idle
// connections.
const maxIdleDescriptors = 160

// openIdleConnections opens twice as many idle connections as the proxy has file descriptors.
func openIdleConnections(ctx context.Context, r *rig) error {
	undo, err := r.proxy.LimitDescriptors(ctx, maxIdleDescriptors)
	if err != nil {
		return err
	}
	err = errors.Join(r.openIdleConnectionsAndAsk(ctx), undo())
	return errors.Join(err, r.proxy.Reload(ctx, "ok", r.replicas))
}

// openIdleConnectionsAndAsk opens idle connections and, while they are open, asks both listeners over
// new ones.
func (r *rig) openIdleConnectionsAndAsk(ctx context.Context) error {
	if err := r.proxy.Reload(ctx, "ok", r.replicas); err != nil { // so that the proxy reads the limit
		return err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: waitTimeout}
	for range 4 {
		for range maxIdleDescriptors / 2 {
			var dialer net.Dialer
			idle, err := dialer.DialContext(ctx, "tcp", strings.TrimPrefix(r.proxy.URL, "http://"))
			if err != nil {
				return err
			}
			defer idle.Close()
		}
		for _, url := range []string{r.proxy.URL + "/v1/models", r.proxy.Admin + "/metrics"} {
			resp, err := client.Get(url)
			if err != nil {
				return err
			}
			resp.Body.Close()
			r.verdict.require(resp.StatusCode == http.StatusOK, "%s: status %d", url, resp.StatusCode)
		}
		if err := r.awaitResponses(ctx, 50); err != nil {
			return err
		}
	}
	return nil
}

// addProxyAsBackend adds the proxy itself as a backend.
func addProxyAsBackend(ctx context.Context, r *rig) error {
	r.countExecutions = true
	self := &testbed.Replica{Name: "self", URL: r.proxy.URL}
	if err := r.proxy.Reload(ctx, "ok", append(slices.Clone(r.replicas), self)); err != nil {
		return err
	}
	for range 20 {
		if err := r.awaitResponses(ctx, 10); err != nil {
			return err
		}
		m, err := r.proxy.ReadMetrics(ctx)
		if err != nil {
			return err
		}
		r.verdict.require(m.Sum("warmroute_backend_ready", "backend", self.Name) == 0, "the proxy is ready as its own backend")
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// drainAndUndrain drains a backend by the admin API and undrains it.
func drainAndUndrain(ctx context.Context, r *rig) error {
	one := r.replicas[0]
	path := "/api/backends/" + one.Name
	if err := r.proxy.PostAdmin(ctx, path+"/drain"); err != nil {
		return err
	}
	if err := r.addViolationIfTraffic(ctx, one); err != nil {
		return err
	}
	if err := r.proxy.PostAdmin(ctx, path+"/undrain"); err != nil {
		return err
	}
	return r.awaitTraffic(ctx, one)
}

// addViolationIfTraffic waits for responses of the others, and adds a violation if a removed
// or drained backend got a request meanwhile.
func (r *rig) addViolationIfTraffic(ctx context.Context, removed *testbed.Replica) error {
	// A request that the proxy has just routed may still be in transit, and a replica
	// counts it when a step of its engine ends.
	if err := testbed.Sleep(ctx, time.Second); err != nil {
		return err
	}
	var before float64
	err := waitUntil(ctx, waitTimeout, "no request to wait at "+removed.Name, func() (bool, error) {
		queried, waiting, err := readPromptLoad(ctx, removed)
		before = queried
		return waiting == 0, err
	})
	if err != nil {
		return err
	}
	if err := r.awaitResponses(ctx, 4*len(r.replicas)*10); err != nil {
		return err
	}
	queried, waiting, err := readPromptLoad(ctx, removed)
	r.verdict.require(queried == before && waiting == 0, "%s got prompts after it was removed: %v tokens begun, %v requests waiting",
		removed.Name, queried-before, waiting)
	return err
}

// readPromptLoad returns the replica's own counts of the prompt tokens that it has begun and
// of waiting requests. Clients do not see attempts that were retried elsewhere.
func readPromptLoad(ctx context.Context, replica *testbed.Replica) (begunTokens, waiting float64, err error) {
	m, err := testbed.ReadMetrics(ctx, replica.URL+"/metrics")
	return m.Sum("vllm:prefix_cache_queries_total"), m.Sum("vllm:num_requests_waiting"), err
}

// upgradeTimeout bounds the time in which the old process completes its requests.
const upgradeTimeout = 2 * time.Minute

// upgradeProxy does a binary upgrade of the proxy.
func upgradeProxy(ctx context.Context, r *rig) error {
	if err := r.proxy.Upgrade(ctx, upgradeTimeout); err != nil {
		return err
	}
	return r.awaitTraffic(ctx, r.replicas...)
}
