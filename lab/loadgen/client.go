// Package loadgen sends workloads over HTTP to a server that speaks OpenAI's API
// and measures the responses. It is the load client of demo, bench and scripts.
package loadgen

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/clock"
	"warmroute/lab/replay"
)

// Client sends requests to one server. Set its fields before the first request
// and do not change them afterwards; its methods are safe for concurrent use.
type Client struct {
	URL    string // of the server, without /v1
	Model  string
	APIKey string       // sent as a bearer token unless empty
	Header http.Header  // further headers of each request; may be nil
	HTTP   *http.Client // see NewHTTPClient

	// Speed is how many times faster than real ones the replicas run: a
	// workload's times are divided by it, measured times multiplied.
	Speed float64
	// Timeout bounds each request, in wall time.
	Timeout time.Duration
	// MaxInFlight bounds the concurrent requests of RunTrace; 0: no bound. The
	// time that a request waits for this bound counts as its latency.
	MaxInFlight int
	// OpenAIOnly is that of every Turn that RunTrace and RunChats send.
	OpenAIOnly bool
	// Stop, once closed, makes RunChats send nothing new and return when the
	// requests in flight have ended. nil: never.
	Stop <-chan struct{}
	// OnResult is called for each request of RunTrace and RunChats that ended
	// before the context did, from several goroutines at once.
	OnResult func(replay.Result)
}

// NewHTTPClient returns an http.Client for many concurrent streams to one
// server. The caller closes its idle connections.
func NewHTTPClient() *http.Client { return NewTLSClient(nil) }

// NewTLSClient is NewHTTPClient with a TLS configuration; nil: the system's
// authorities verify certificates.
func NewTLSClient(c *tls.Config) *http.Client {
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig:     c,
		ForceAttemptHTTP2:   true, // over TLS, also with a configuration
		MaxIdleConnsPerHost: 4096,
		// vLLM closes a connection that was idle for 5 s; a request that is
		// just being written to it would be lost.
		IdleConnTimeout:    3 * time.Second,
		DisableCompression: true,
	}}
}

// RunTrace sends each request of t at its time and returns when all have ended
// or ctx has.
func (c *Client) RunTrace(ctx context.Context, t *replay.Trace) {
	var slots chan struct{}
	if c.MaxInFlight > 0 {
		slots = make(chan struct{}, c.MaxInFlight)
	}
	start := time.Now()
	var wg sync.WaitGroup
	for _, r := range t.Requests {
		due := start.Add(c.toWallTime(r.At))
		if !clock.Sleep(ctx, time.Until(due)) {
			break
		}
		wg.Go(func() {
			if slots != nil {
				select {
				case slots <- struct{}{}:
				case <-ctx.Done():
					return
				}
				defer func() { <-slots }()
			}
			c.sendAndReport(ctx, due, Turn{Messages: traceMessages(r, t.BlockTokens), OutputTokens: r.OutputTokens})
		})
	}
	wg.Wait()
}

// RunChats keeps chats.Concurrency conversations open until all have ended, ctx
// has, or Stop is closed. A failed turn ends its conversation; the next one of
// that user starts after Retry-After and a delay that grows with each failure
// in a row, so that a server which refuses everything is not flooded.
func (c *Client) RunChats(ctx context.Context, chats *Chats) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range chats.Concurrency {
		wg.Go(func() {
			for failures := 0; c.sleepUnlessStopped(ctx, c.toWallTime(retryDelay(failures))); {
				i := int(next.Add(1)) - 1
				if chats.Sessions > 0 && i >= chats.Sessions {
					return
				}
				last := c.runSession(ctx, chats.NewSession(i))
				if last.Err == "" {
					failures = 0
					continue
				}
				failures++
				if !c.sleepUnlessStopped(ctx, min(last.RetryAfter, maxRetryAfter)) {
					return
				}
			}
		})
	}
	wg.Wait()
}

const (
	maxRetryAfter = 30 * time.Second
	maxRetryDelay = 5 * time.Second
)

// retryDelay returns how long a user waits after so many failures in a row.
func retryDelay(failures int) time.Duration {
	if failures == 0 {
		return 0
	}
	return min(100*time.Millisecond<<min(failures-1, 10), maxRetryDelay)
}

// runSession sends the turns of s until one fails, and returns the last result.
func (c *Client) runSession(ctx context.Context, s *Session) (last replay.Result) {
	for output := ""; ; {
		turn, ok := s.Next(output)
		if !ok || !c.sleepUnlessStopped(ctx, c.toWallTime(turn.Think)) {
			return last
		}
		if last, output = c.sendAndReport(ctx, time.Now(), turn); last.Err != "" {
			return last
		}
	}
}

// sendAndReport sends one request, whose latency counts from latencyStart, reports its result to
// OnResult, and returns it with the output's text. It reports nothing once ctx has ended.
func (c *Client) sendAndReport(ctx context.Context, latencyStart time.Time, turn Turn) (r replay.Result, output string) {
	turn.OpenAIOnly = c.OpenAIOnly
	attempt, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	var in responseReader
	err := c.roundTripOrDisconnect(attempt, Request{Body: ChatBody(c.Model, turn, true), Stream: true}, &in)
	if ctx.Err() != nil {
		return replay.Result{}, ""
	}
	if err != nil {
		if errors.Is(attempt.Err(), context.DeadlineExceeded) {
			err = failure(Timeout)
		}
		r = in.failedResult(err, latencyStart)
	} else {
		r = c.completeResult(&in, latencyStart)
	}
	c.OnResult(r)
	return r, in.text.String()
}

// completeResult returns the figures of a complete response, with its latencies from latencyStart.
func (c *Client) completeResult(in *responseReader, latencyStart time.Time) replay.Result {
	r := replay.Result{
		Sent:             latencyStart,
		TTFT:             c.toModelTime(in.firstContent.Sub(latencyStart)),
		E2E:              c.toModelTime(in.end.Sub(latencyStart)),
		PromptTokens:     in.prompt,
		CachedTokens:     in.cached,
		CompletionTokens: in.completion,
		CachedKnown:      in.cachedKnown,
		InvalidUsage:     in.invalidUsage,
		Split:            in.header.Get("X-Warmroute-Prefill-Backend") != "",
	}
	for _, gap := range in.gaps {
		r.Gaps = append(r.Gaps, c.toModelTime(gap))
	}
	if in.chunks > 1 {
		r.ITL = c.toModelTime(in.lastContent.Sub(in.firstContent)) / time.Duration(in.chunks-1)
	}
	return r
}

// toWallTime converts a duration on the replicas' clock to one on ours.
func (c *Client) toWallTime(d time.Duration) time.Duration {
	return time.Duration(float64(d) / c.Speed)
}

// toModelTime converts a duration on our clock to one on the replicas'.
func (c *Client) toModelTime(d time.Duration) time.Duration {
	return time.Duration(float64(d) * c.Speed)
}

// sleepUnlessStopped sleeps for d; goOn is false when ctx ended or Stop was closed.
func (c *Client) sleepUnlessStopped(ctx context.Context, d time.Duration) (goOn bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-c.Stop:
	}
	select {
	case <-c.Stop:
		return false
	default:
		return ctx.Err() == nil
	}
}
