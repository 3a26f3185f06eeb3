package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"warmroute/loadgen"
	"warmroute/scripts/testbed"
)

const (
	modelDownWait   = 5 * time.Second // routing.queue.time of the scenario
	modelDownQueue  = 64              // routing.queue.requests: half of it is for models without a ready replica
	modelDownFlood  = 100             // requests for the model that is down: more than the whole queue
	modelDownLater  = 8               // requests that still wait when its replica is back
	otherModel      = "other"
	readinessBudget = 10 * time.Second // for the proxy to find a replica down or ready
)

// modelDown adds a second model with one replica, kills that and starts it again,
// while the clients go on with the first model, none of whose requests may fail.
func modelDown(ctx context.Context, r *rig) error {
	one, err := r.newReplica("only-"+otherModel, "--model", otherModel)
	if err != nil {
		return err
	}
	if err := one.Start(); err != nil {
		return err
	}
	defer func() {
		if one.Runs() {
			testbed.Kill(one)
		}
	}()
	if err := one.AwaitHealthy(ctx); err != nil {
		return err
	}
	hold := fmt.Sprintf("routing: {queue: {time: %v, requests: %d}}", modelDownWait, modelDownQueue)
	if err := r.proxy.Reload(ctx, "ok", append(slices.Clone(r.replicas), one), hold); err != nil {
		return err
	}
	if err := r.awaitModel(ctx, otherModel, http.StatusOK); err != nil {
		return err
	}
	if err := testbed.Kill(one); err != nil {
		return err
	}
	if err := r.awaitModel(ctx, otherModel, http.StatusServiceUnavailable); err != nil {
		return err
	}
	for path, want := range map[string]int{"/readyz": http.StatusOK, "/readyz?model=sim": http.StatusOK, "/readyz?model=no-such-model": http.StatusNotFound} {
		got, err := r.proxy.Status(ctx, path)
		if err != nil {
			return err
		}
		r.verdict.require(got == want, "GET %s is answered with %d while one of two models is down, want %d", path, got, want)
	}
	metrics, err := r.proxy.Scrape(ctx)
	if err != nil {
		return err
	}
	ready := metrics.Sum("warmroute_model_ready_backends", "model", otherModel)
	known := metrics.Sum("warmroute_model_backends", "model", otherModel)
	r.verdict.require(ready == 0 && known == 1, "%v of %v backends of the model that is down are ready by the metrics, want 0 of 1", ready, known)

	before := r.verdict.answers()
	waited, refused := 0, 0
	for _, reply := range r.askOther(ctx, modelDownFlood) {
		r.verdict.require(reply.RetryAfter >= time.Second && reply.RetryAfter <= time.Minute, "status %d for the model that is down has Retry-After %v", reply.Status, reply.RetryAfter)
		switch reply.Status {
		case http.StatusServiceUnavailable:
			waited++
			r.verdict.require(reply.took >= modelDownWait, "a 503 for the model that is down after %v, before routing.queue.time", reply.took)
		case http.StatusTooManyRequests:
			refused++
		default:
			r.verdict.require(false, "a request for the model that is down got %d %s %s", reply.Status, reply.Err, reply.Detail)
		}
	}
	r.verdict.require(waited > 0 && waited <= modelDownQueue/2 && refused > 0, "%d requests for the model that is down waited and %d were refused, want at most %d to wait", waited, refused, modelDownQueue/2)
	r.verdict.require(r.verdict.answers() > before, "no answer for the other model in the meantime")

	replies := make(chan []timedReply, 1)
	go func() { replies <- r.askOther(ctx, modelDownLater) }()
	err = until(ctx, modelDownWait, "requests wait for the model that is down", func() (bool, error) {
		m, err := r.proxy.Scrape(ctx)
		return m.Sum("warmroute_queue_requests") >= modelDownLater, err
	})
	if err == nil {
		err = one.Start()
	}
	for _, reply := range <-replies {
		r.verdict.require(reply.Status == http.StatusOK && reply.Err == "", "a request that waited when its model came back got %d %s %s", reply.Status, reply.Err, reply.Detail)
	}
	if err != nil {
		return err
	}
	if err := r.awaitModel(ctx, otherModel, http.StatusOK); err != nil {
		return err
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// timedReply is a reply with the time from sending to its end, failed ones included.
type timedReply struct {
	loadgen.Response
	took time.Duration
}

// askOther sends n requests for the other model at once.
func (r *rig) askOther(ctx context.Context, n int) []timedReply {
	client := loadgen.NewHTTPClient()
	defer client.CloseIdleConnections()
	player := &loadgen.Client{URL: r.proxy.URL, Model: otherModel, HTTP: client, Speed: 1, Timeout: answerLimit}
	replies := make([]timedReply, n)
	var all sync.WaitGroup
	for i := range replies {
		all.Go(func() {
			sent := time.Now()
			reply := player.Send(ctx, strange(otherModel, i).ask(i%2 == 0))
			replies[i] = timedReply{reply, time.Since(sent)}
		})
	}
	all.Wait()
	return replies
}

// awaitModel waits until GET /readyz?model= has a status.
func (r *rig) awaitModel(ctx context.Context, model string, want int) error {
	return until(ctx, readinessBudget, fmt.Sprintf("/readyz?model=%s is answered with %d", model, want), func() (bool, error) {
		got, err := r.proxy.Status(ctx, "/readyz?model="+model)
		return got == want, err
	})
}
