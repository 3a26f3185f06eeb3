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
	batchRate    = 1200             // batch requests per second: more than three times what four replicas complete
	batchWindow  = 8 * time.Second  // measured time of the clients' requests, without batch requests and with them
	batchTimeout = 20 * time.Minute // for all batch requests to be completed
	// maxBatchRatio bounds the p90 of the clients' TTFT and their mean end-to-end
	// latency with batch requests, relative to those without. The p99, which should
	// stay below 1.1, is printed only: everything here shares a few cores, so single
	// requests are late by chance. go test ./lab/replay -run Batch checks it in virtual time.
	maxBatchRatio = 2.5
)

// queueBatchRequests queues many batch requests beside the clients' requests: none may be
// lost, and the clients must be hardly slower.
func (o *options) queueBatchRequests(ctx context.Context, r *rig) error {
	settings := fmt.Sprintf("routing: {queue: {busy_timeout: %v}}", batchTimeout)
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
		URL: r.proxy.URL, Model: "sim", HTTP: httpClient, Speed: 1, Timeout: batchTimeout,
		Header: http.Header{"X-Warmroute-Priority": {"10"}},
	}
	var sent sync.WaitGroup
	send := time.NewTicker(time.Second / batchRate)
	defer send.Stop()
	for i := range o.batchRequests {
		sent.Go(func() {
			q := newUniquePrompt("sim", i)
			r.verdict.checkAndCountUnmeasured(q, client.Send(ctx, q.request(false)))
		})
		<-send.C
	}
	waiting, err := r.queuedBatchRequests(ctx)
	if err != nil {
		return err
	}
	with, err := r.measureClientTimes(ctx)
	if err != nil {
		return err
	}
	still, err := r.queuedBatchRequests(ctx)
	if err != nil {
		return err
	}
	const format = "p90 TTFT %.0f ms, p99 %.0f ms, end-to-end mean %.2f s, p99 %.2f s"
	r.verdict.addMeasurement("without batch requests: "+format, 1000*without.TTFTP90, 1000*without.TTFTP99, without.mean, without.E2EP99)
	r.verdict.addMeasurement("with %.0f to %.0f queued batch requests: "+format, waiting, still, 1000*with.TTFTP90, 1000*with.TTFTP99, with.mean, with.E2EP99)
	r.verdict.require(still > 0, "no batch request was queued after %v beside %d clients: nothing was measured", batchWindow, r.load.number)
	ttft, e2e := with.TTFTP90/without.TTFTP90, with.mean/without.mean
	r.verdict.require(ttft <= maxBatchRatio && e2e <= maxBatchRatio, "with batch requests the clients' p90 TTFT is %.2f times and their mean end-to-end latency %.2f times that without, want at most %.1f", ttft, e2e, maxBatchRatio)
	// Without the bound the rest completes soon.
	if err := r.proxy.Reload(ctx, "ok", r.replicas, "routing: {batch_slowdown: 0}"); err != nil {
		return err
	}
	sent.Wait()
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// queuedBatchRequests returns how many batch requests the proxy has queued.
func (r *rig) queuedBatchRequests(ctx context.Context) (n float64, err error) {
	m, err := r.proxy.ReadMetrics(ctx)
	return m.Sum("warmroute_queue_requests", "class", "batch"), err
}

// clientTimes are the latencies that clients measured: TTFT of streams, end-to-end
// latency of all responses.
type clientTimes struct {
	replay.Summary         // of streams, except E2EP99
	mean           float64 // end-to-end, in seconds
}

// measureClientTimes measures the clients' requests for batchWindow.
func (r *rig) measureClientTimes(ctx context.Context) (clientTimes, error) {
	streams, all := r.verdict.startMeasuring()
	began := time.Now()
	if err := testbed.Sleep(ctx, batchWindow); err != nil {
		return clientTimes{}, err
	}
	elapsed := time.Since(began)
	times, complete := streams.Summary("", elapsed), all.Summary("", elapsed)
	times.E2EP99 = complete.E2EP99
	return clientTimes{times, complete.E2EMean}, nil
}
