package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	modelDownWait    = 5 * time.Second // routing.queue.none_ready_timeout of the scenario
	modelDownQueue   = 64              // routing.queue.requests: half of it is for models without a ready replica
	modelDownFlood   = 100             // requests for the model without a ready replica: more than the whole queue
	modelDownLater   = 8               // requests that are queued when its replica returns
	otherModel       = "other"
	readinessTimeout = 10 * time.Second // for the proxy to detect that a replica is down or ready
)

// killOnlyReplica adds a second model with one replica, kills the replica and starts it
// again. No request of the clients, which use the first model, may fail.
func killOnlyReplica(ctx context.Context, r *rig) error {
	one, err := r.newReplica("only-"+otherModel, "--model", otherModel)
	if err != nil {
		return err
	}
	if err := one.Start(); err != nil {
		return err
	}
	defer func() {
		if one.Running() {
			testbed.KillAndWait(one)
		}
	}()
	if err := one.AwaitHealthy(ctx); err != nil {
		return err
	}
	settings := fmt.Sprintf("routing: {queue: {none_ready_timeout: %v, requests: %d}}", modelDownWait, modelDownQueue)
	if err := r.proxy.Reload(ctx, "ok", append(slices.Clone(r.replicas), one), settings); err != nil {
		return err
	}
	if err := r.awaitModelStatus(ctx, otherModel, http.StatusOK); err != nil {
		return err
	}
	if err := testbed.KillAndWait(one); err != nil {
		return err
	}
	if err := r.awaitModelStatus(ctx, otherModel, http.StatusServiceUnavailable); err != nil {
		return err
	}
	for path, want := range map[string]int{"/readyz": http.StatusOK, "/readyz?model=sim": http.StatusOK,
		"/readyz?model=no-such-model": http.StatusNotFound} {
		got, err := r.proxy.PublicStatus(ctx, path)
		if err != nil {
			return err
		}
		r.verdict.require(got == want, "GET %s: status %d while one of two models is down, want %d", path, got, want)
	}
	metrics, err := r.proxy.ReadMetrics(ctx)
	if err != nil {
		return err
	}
	ready := metrics.Sum("warmroute_model_ready_backends", "model", otherModel)
	known := metrics.Sum("warmroute_model_backends", "model", otherModel)
	r.verdict.require(ready == 0 && known == 1, "metrics: %v of %v backends of the model that is down are ready, want 0 of 1", ready, known)

	before := r.verdict.responseCount()
	waited, refused := 0, 0
	for _, response := range r.sendToOtherModel(ctx, modelDownFlood) {
		r.verdict.require(response.RetryAfter >= time.Second && response.RetryAfter <= time.Minute,
			"status %d for the model that is down has Retry-After %v", response.Status, response.RetryAfter)
		switch response.Status {
		case http.StatusServiceUnavailable:
			waited++
			r.verdict.require(response.took >= modelDownWait, "a 503 for the model that is down after %v, before routing.queue.none_ready_timeout",
				response.took)
		case http.StatusTooManyRequests:
			refused++
		default:
			r.verdict.require(false, "a request for the model that is down got %d %s %s", response.Status, response.Err, response.Detail)
		}
	}
	r.verdict.require(waited > 0 && waited <= modelDownQueue/2 && refused > 0,
		"%d requests for the model that is down waited and %d were refused, want at most %d to wait", waited, refused, modelDownQueue/2)
	r.verdict.require(r.verdict.responseCount() > before, "no response for the other model in the meantime")

	responses := make(chan []timedResponse, 1)
	go func() { responses <- r.sendToOtherModel(ctx, modelDownLater) }()
	err = waitUntil(ctx, modelDownWait, "requests to queue for the model that is down", func() (bool, error) {
		m, err := r.proxy.ReadMetrics(ctx)
		return m.Sum("warmroute_queue_requests") >= modelDownLater, err
	})
	if err == nil {
		err = one.Start()
	}
	for _, response := range <-responses {
		r.verdict.require(response.Status == http.StatusOK && response.Err == "", "a request that waited when its model came back got %d %s %s",
			response.Status, response.Err, response.Detail)
	}
	if err != nil {
		return err
	}
	if err := r.awaitModelStatus(ctx, otherModel, http.StatusOK); err != nil {
		return err
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// timedResponse is a response and how long it took, also if it failed.
type timedResponse struct {
	loadgen.Response
	took time.Duration
}

// sendToOtherModel sends n concurrent requests for the other model and returns the responses.
func (r *rig) sendToOtherModel(ctx context.Context, n int) []timedResponse {
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &loadgen.Client{URL: r.proxy.URL, Model: otherModel, HTTP: httpClient, Speed: 1, Timeout: requestTimeout}
	responses := make([]timedResponse, n)
	var all sync.WaitGroup
	for i := range responses {
		all.Go(func() {
			sent := time.Now()
			response := client.Send(ctx, newUniquePrompt(otherModel, i).request(i%2 == 0))
			responses[i] = timedResponse{response, time.Since(sent)}
		})
	}
	all.Wait()
	return responses
}

// awaitModelStatus waits until GET /readyz?model= has the wanted status.
func (r *rig) awaitModelStatus(ctx context.Context, model string, wantStatus int) error {
	return waitUntil(ctx, readinessTimeout, fmt.Sprintf("/readyz?model=%s to have status %d", model, wantStatus), func() (bool, error) {
		got, err := r.proxy.PublicStatus(ctx, "/readyz?model="+model)
		return got == wantStatus, err
	})
}
