package proxy

import (
	"net/http"
	"sync"
	"time"
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
	if r.settings.QueueKeepalive == 0 || !r.input.request.Streams || r.endpoint.format == plainFormat {
		return
	}
	silentSince := r.bodyReceivedAt
	if r.client.writeStartedAt.After(silentSince) {
		silentSince = r.client.writeStartedAt
	}
	wait := r.settings.QueueKeepalive - time.Since(silentSince)
	k := &r.queueKeepalive
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running = true
	if k.timer == nil {
		k.timer = time.AfterFunc(wait, r.sendQueueKeepalive)
		return
	}
	k.timer.Reset(wait)
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

// sendQueueKeepalive sends one keep-alive event, and schedules the next one unless the client
// cannot be written to.
func (r *request) sendQueueKeepalive() {
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
	if err := r.client.writeAndFlush([]byte(r.endpoint.format.keepAliveEvent())); err == nil {
		k.timer.Reset(r.settings.QueueKeepalive)
	}
}
