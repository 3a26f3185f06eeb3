package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"warmroute/scripts/testbed"
	"warmroute/sim"
)

// abortTime is how long replicas abort requests.
const abortTime = 3 * time.Second

// abort lets the engine of one replica abort each request after three tokens, and
// then that of another each before its first. Meanwhile messages and responses are
// asked for as well: the load is of chats.
func abort(ctx context.Context, r *rig) error {
	// Without breakers and with retries enough those replicas go on to be asked.
	if err := r.proxy.Reload(ctx, "ok", r.replicas, "breaker: {failures: 0}", "retry: {per_second: 10000}"); err != nil {
		return err
	}
	for i, tokens := range []int{3, 0} {
		one := r.replicas[i]
		before, err := r.aborted(ctx, one)
		if err != nil {
			return err
		}
		if err := one.Fault(sim.Fault{Kind: sim.AbortEach, Chunks: tokens, Seconds: abortTime.Seconds()}); err != nil {
			return err
		}
		broken := 0
		for end := time.Now().Add(abortTime); time.Now().Before(end); {
			n, err := r.checkOtherAPIs(ctx, tokens > 0)
			if err != nil {
				return err
			}
			broken += n
		}
		after, err := r.aborted(ctx, one)
		if err != nil {
			return err
		}
		r.verdict.require(after > before, "%s aborted requests, and none was counted", one.Name)
		r.verdict.require(tokens == 0 || broken > 0, "no message was aborted after its first content")
		if err := r.awaitTraffic(ctx, one); err != nil {
			return err
		}
	}
	return r.proxy.Reload(ctx, "ok", r.replicas)
}

// aborted is how many responses the proxy counted that a replica aborted.
func (r *rig) aborted(ctx context.Context, one *testbed.Replica) (float64, error) {
	m, err := r.proxy.Scrape(ctx)
	return m.Sum("warmroute_backend_aborted_responses_total", "backend", one.Name), err
}

// checkOtherAPIs asks for a message and a response, each as a stream and whole, and
// checks that each is complete. A stream of a message may end with an error event
// instead, where mayBreak is true, and broken is how many did. vLLM does not say of a
// response that it aborted it after content.
func (r *rig) checkOtherAPIs(ctx context.Context, mayBreak bool) (broken int, err error) {
	for _, c := range []struct{ path, body, end string }{
		{"/v1/messages", `{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"Hi"}],"stream":true}`, `"type":"message_stop"`},
		{"/v1/messages", `{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"Hi"}]}`, `"stop_reason":"`},
		{"/v1/responses", `{"model":"sim","max_output_tokens":20,"input":"Hi","stream":true}`, `"type":"response.completed"`},
		{"/v1/responses", `{"model":"sim","max_output_tokens":20,"input":"Hi"}`, `"type":"output_text"`},
	} {
		status, answer, err := r.post(ctx, c.path, c.body)
		if err != nil {
			return broken, err
		}
		switch {
		case status == http.StatusOK && strings.Contains(answer, c.end) && !strings.Contains(answer, "event: error"):
		case mayBreak && status == http.StatusOK && strings.Contains(answer, "event: content_block_delta") && strings.Contains(answer, "event: error") && !strings.Contains(answer, c.end):
			broken++
		default:
			r.verdict.require(false, "%s: status %d, %q", c.path, status, answer)
		}
	}
	return broken, nil
}

func (r *rig) post(ctx context.Context, path, body string) (status int, answer string, err error) {
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
