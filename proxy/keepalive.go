package proxy

import (
	"net/http"
	"sync"
	"time"

	"warmroute/proxy/api"
	"warmroute/proxy/relay"
)

// queueKeepalive is the timer of the keep-alive events that a stream's client gets before a
// replica has responded. While it runs, only its goroutine writes to the client.
type queueKeepalive struct {
	mu      sync.Mutex // guards what follows, and the client's writer
	running bool
	timer   *time.Timer // nil: never started
}

// startQueueKeepalive sends a keep-alive event to the client of a stream whenever nothing was sent
// for Settings.QueueKeepalive, until stopQueueKeepalive. The first one sends the header: from then
// on a failure is an event of the stream. It commits to no backend.
func (r *request) startQueueKeepalive() {
	if r.settings.QueueKeepalive == 0 || !r.input.request.Streams || r.endpoint.Format == api.PlainFormat {
		return
	}
	k := &r.queueKeepalive
	k.mu.Lock()
	defer k.mu.Unlock()
	silentSince := r.bodyReceivedAt
	if r.client.WriteStartedAt.After(silentSince) { // an event may be being written
		silentSince = r.client.WriteStartedAt
	}
	wait := r.settings.QueueKeepalive - time.Since(silentSince)
	k.running = true
	if k.timer == nil {
		k.timer = time.AfterFunc(wait, r.sendAndScheduleKeepalive)
	} else {
		k.timer.Reset(wait)
	}
}

// stopQueueKeepalive ends startQueueKeepalive. It waits for the end of a write that has begun. It
// may be called when none runs.
func (r *request) stopQueueKeepalive() {
	k := &r.queueKeepalive
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.running {
		k.running = false
		k.timer.Stop()
	}
}

// sendAndScheduleKeepalive sends one keep-alive event, and schedules the next one unless the client
// cannot be written to.
func (r *request) sendAndScheduleKeepalive() {
	k := &r.queueKeepalive
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.running {
		return
	}
	if !r.headersSent {
		r.headersSent = true
		h := r.client.Header()
		h["Content-Type"] = []string{"text/event-stream; charset=utf-8"}
		if r.mayShowRoute() {
			h["X-Warmroute-Reason"] = []string{reasonQueued}
		}
		r.client.WriteHeader(http.StatusOK)
	}
	if err := r.client.WriteAndFlush([]byte(relay.KeepAliveEvent(r.endpoint.Format))); err == nil {
		k.timer.Reset(r.settings.QueueKeepalive)
	}
}

// sendKeepAlive sends a keep-alive event on a silent stream. The header names this attempt, the first
// with a response. Nothing is committed by it: a failure is still retried, and only if no
// retry succeeds the stream ends with an error event.
func (a *attempt) sendKeepAlive(resp *http.Response) error {
	a.ensureStreamHeader(resp)
	return a.req.client.WriteAndFlush([]byte(relay.KeepAliveEvent(a.req.endpoint.Format)))
}

// ensureStreamHeader sends the header of a stream, unless the client has one.
func (a *attempt) ensureStreamHeader(resp *http.Response) {
	if a.req.headersSent {
		return
	}
	a.req.headersSent = true
	a.req.fillResponseHeader(a.decision, resp.Header)
	a.req.client.WriteHeader(resp.StatusCode)
}
