package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/replay"
	"warmroute/lab/testbed"
)

const (
	lowPriorityRate    = 1200             // low-priority requests per second: more than three times what four replicas complete
	lowPriorityWindow  = 8 * time.Second  // measured time of the clients' requests, without low-priority requests and with them
	lowPriorityTimeout = 20 * time.Minute // for all low-priority requests to be completed
	// maxLowPriorityRatio bounds the p90 of the clients' TTFT and their mean end-to-end
	// latency with low-priority requests, relative to those without. The p99, which should
	// stay below 1.1, is printed only: everything here shares a few cores, so single
	// requests are late by chance. go test ./lab/replay -run LowPriority checks it in virtual time.
	maxLowPriorityRatio = 2.5
)

// queueLowPriorityRequests queues many low-priority requests beside the clients' requests: none may be
// lost, and the clients must be hardly slower.
func (o *options) queueLowPriorityRequests(ctx context.Context, r *rig) error {
	settings := fmt.Sprintf("routing: {queue: {busy_timeout: %v}}", lowPriorityTimeout)
	if err := r.proxy.Reload(ctx, "ok", r.replicas, settings); err != nil {
		return err
	}
	if err := r.awaitResponses(ctx, 4*r.load.number); err != nil { // warm the caches
		return err
	}
	without, err := r.measureClientTimes(ctx)
	if err != nil {
		return err
	}
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{
		URL: r.proxy.URL, Model: "sim", HTTP: httpClient, Speed: 1, Timeout: lowPriorityTimeout,
		Header: http.Header{"X-Warmroute-Priority": {"10"}},
	}
	var sent sync.WaitGroup
	send := time.NewTicker(time.Second / lowPriorityRate)
	defer send.Stop()
	for i := range o.lowPriorityRequests {
		sent.Go(func() {
			q := newUniquePrompt("sim", i)
			r.verdict.checkAndCountUnmeasured(q, client.Send(ctx, q.request(false)))
		})
		<-send.C
	}
	waiting, err := r.queuedLowPriorityRequests(ctx)
	if err != nil {
		return err
	}
	with, err := r.measureClientTimes(ctx)
	if err != nil {
		return err
	}
	still, err := r.queuedLowPriorityRequests(ctx)
	if err != nil {
		return err
	}
	const format = "p90 TTFT %.0f ms, p99 %.0f ms, end-to-end mean %.2f s, p99 %.2f s"
	r.verdict.addMeasurement("without low-priority requests: "+format, 1000*without.TTFTP90, 1000*without.TTFTP99, without.mean,
		without.E2EP99)
	r.verdict.addMeasurement("with %.0f to %.0f queued low-priority requests: "+format, waiting, still, 1000*with.TTFTP90, 1000*with.TTFTP99,
		with.mean, with.E2EP99)
	r.verdict.require(still > 0, "no low-priority request was queued after %v beside %d clients: nothing was measured", lowPriorityWindow,
		r.load.number)
	ttft, e2e := with.TTFTP90/without.TTFTP90, with.mean/without.mean
	r.verdict.require(ttft <= maxLowPriorityRatio && e2e <= maxLowPriorityRatio,
		"with low-priority requests the clients' p90 TTFT is %.2f times and their mean end-to-end latency %.2f times that without, want at "+
			"most %.1f", ttft, e2e, maxLowPriorityRatio)
	// Without the bound the rest completes soon.
	if err := r.proxy.Reload(ctx, "ok", r.replicas, "routing: {low_priority_slowdown: 0}"); err != nil {
		return err
	}
	sent.Wait()
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// queuedLowPriorityRequests returns how many low-priority requests the proxy has queued.
func (r *rig) queuedLowPriorityRequests(ctx context.Context) (n float64, err error) {
	m, err := r.proxy.ReadMetrics(ctx)
	return m.Sum("warmroute_queue_requests", "class", "low"), err
}

// clientTimes are the latencies that clients measured: TTFT of streams, end-to-end
// latency of all responses.
type clientTimes struct {
	replay.Summary         // of streams, except E2EP99
	mean           float64 // end-to-end, in seconds
}

// measureClientTimes measures the clients' requests for lowPriorityWindow.
func (r *rig) measureClientTimes(ctx context.Context) (clientTimes, error) {
	streams, all := r.verdict.startMeasuring()
	began := time.Now()
	if err := testbed.Sleep(ctx, lowPriorityWindow); err != nil {
		return clientTimes{}, err
	}
	elapsed := time.Since(began)
	times, complete := streams.Summary("", elapsed), all.Summary("", elapsed)
	times.E2EP99 = complete.E2EP99
	return clientTimes{times, complete.E2EMean}, nil
}
