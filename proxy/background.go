package proxy

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/tidwall/gjson"
	"github.com/valyala/fasthttp"
	"golang.org/x/time/rate"

	"warmroute/backends/vllm"
	"warmroute/proxy/api"
	"warmroute/proxy/relay"
	"warmroute/proxy/stored"
	"warmroute/proxy/upstream"
	"warmroute/recovery"
	"warmroute/router"
	"warmroute/router/responseindex"
)

// A replica responds to a request to /v1/responses with "background": true before it has begun. The request stays in flight, for
// its key, the router and operators, until the response is complete, which the proxy asks the replica for.

const (
	// backgroundPollInterval is the time between two questions to one replica, whichever responses they are about.
	backgroundPollInterval = time.Second
	backgroundPollTimeout  = 3 * time.Second
	// maxBackgroundBytes bounds what is read of a response. A longer one has an output, so it is complete.
	maxBackgroundBytes = 8 << 20
)

// backgroundResponses are the requests whose responses replicas generate after they have responded. limits.in_flight bounds
// them, as all others. Safe for concurrent use.
type backgroundResponses struct {
	ctx    context.Context // done when the proxy is closed
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup // added to under mu, and not when closed
	servers map[string]*serverPolls
}

// serverPolls limits the polls of one server, for as long as responses of it are followed.
type serverPolls struct {
	limiter  *rate.Limiter
	followed int
}

func newBackgroundResponses() *backgroundResponses {
	b := &backgroundResponses{servers: map[string]*serverPolls{}}
	b.ctx, b.cancel = context.WithCancelCause(context.Background())
	return b
}

// Close ends what the proxy does for responses that are generated in the background, and waits for it. Their replicas go on.
func (p *Proxy) Close() {
	b := p.background
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.cancel(ErrShutdown)
	b.running.Wait()
}

// start runs follow in a goroutine of its own that Close waits for, or here if the proxy is closed. A panic of follow is reported.
func (b *backgroundResponses) start(panics recovery.Reporter, follow func()) {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		follow()
		return
	}
	b.running.Go(func() { panics.CallAndRecover(recovery.Handler, follow) })
	b.mu.Unlock()
}

// acquire returns what limits the polls of a server. release must follow.
func (b *backgroundResponses) acquire(address string) *rate.Limiter {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.servers[address]
	if s == nil {
		s = &serverPolls{limiter: rate.NewLimiter(rate.Every(backgroundPollInterval), 1)}
		b.servers[address] = s
	}
	s.followed++
	return s.limiter
}

func (b *backgroundResponses) release(address string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.servers[address]
	if s.followed--; s.followed == 0 {
		delete(b.servers, address)
	}
}

// backgroundAttempt is an attempt whose response is generated in the background.
type backgroundAttempt struct {
	attempt   *attempt
	id        string            // by which the replica knows the response
	context   *upstream.Context // done when an operator cancels the request, or the proxy is closed
	startedAt float64           // when the replica's process started, in Unix time; 0: unknown
	maxTokens int               // that may be generated; 0: not known
}

// isUnfinished reports whether a response is generated in the background, by its status.
func isUnfinished(status string) bool { return status == "queued" || status == "in_progress" }

// beginBackground has the request followed if body is a response that its replica has yet to generate. The request's input must
// not be released yet.
func (a *attempt) beginBackground(body []byte) {
	if a.req.endpoint.Format != api.ResponsesFormat {
		return
	}
	if found := gjson.GetManyBytes(body, "status", "id"); isUnfinished(found[0].Str) {
		a.beginFollowing(a.replicaResponseID(&a.req.input.stored, found[1].Str), a.req.input.request.MaxOutputTokens)
	}
}

// beginFollowing has the request stay in flight until the response that its replica knows by id has ended. Its key is charged for
// all of the tokens that may be generated; 0: not known.
func (a *attempt) beginFollowing(id string, maxTokens int) {
	if !responseindex.IsValidID(id) {
		return
	}
	b := &backgroundAttempt{attempt: a, id: id, context: &upstream.Context{}, maxTokens: maxTokens}
	b.context.Begin(a.req.proxy.background.ctx, upstream.ContextOptions{})
	if load := a.decision.Backend.Load(); load != nil {
		b.startedAt = load.StartTime
	}
	a.req.lease.ChargeOutput(maxTokens)
	if a.reply != nil { // of a response without all of its output
		a.req.proxy.pools.replies.Put(a.reply)
		a.reply = nil
	}
	a.req.background = b
}

// follow blocks until the response has ended, and ends the request. It uses neither its input nor its client.
func (b *backgroundAttempt) follow() {
	defer b.attempt.req.finish()
	defer b.attempt.recordAndReleaseDecision()
	defer b.context.Cancel(context.Canceled)
	address := b.attempt.decision.Backend.Address()
	limiter := b.attempt.req.proxy.background.acquire(address)
	defer b.attempt.req.proxy.background.release(address)
	for limiter.Wait(b.context) == nil {
		if b.poll() {
			return
		}
	}
	b.endUnfinished()
}

// poll asks the replica for the response, and reports whether it has ended. It blocks for backgroundPollTimeout at most.
func (b *backgroundAttempt) poll() (ended bool) {
	backend := b.attempt.decision.Backend
	if b.hasRestarted() {
		return b.recordLost()
	}
	ctx, cancel := context.WithTimeout(b.context, backgroundPollTimeout)
	defer cancel()
	resp, err := backend.Get(ctx, "/v1/responses/"+b.id, "application/json", string(b.attempt.req.proxy.instance), maxBackgroundBytes)
	if resp == nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			return b.recordLost()
		}
		return b.isOverdue()
	}
	defer fasthttp.ReleaseResponse(resp)
	body := resp.Body()
	switch {
	case resp.StatusCode() == http.StatusNotFound:
		return b.recordLost()
	case resp.StatusCode() != http.StatusOK, isUnfinished(gjson.GetBytes(body, "status").Str):
		return b.isOverdue()
	}
	b.attempt.result.End = router.Completed
	var u relay.Usage
	u.Parse(gjson.GetBytes(body, "usage"), api.ResponsesFormat)
	b.attempt.recordUsage(&u)
	b.attempt.metadata.AddBody(api.ResponsesFormat, body)
	if !u.Known { // it was cancelled, or failed
		b.attempt.result.End = router.ClientDisconnected
	}
	return true
}

// hasRestarted reports whether the replica's process is another one than that which has the response, or the backend was removed.
func (b *backgroundAttempt) hasRestarted() bool {
	backend := b.attempt.decision.Backend
	load := backend.Load()
	return load != nil && b.startedAt > 0 && load.StartTime > 0 && load.StartTime != b.startedAt ||
		b.attempt.req.proxy.registry.FindAtServer(backend.Address()) == nil
}

// recordLost records that the replica has lost the response, which costs its key nothing.
func (b *backgroundAttempt) recordLost() (ended bool) {
	b.attempt.result.End = router.NotProcessed
	b.attempt.req.proxy.log.Warn("background response lost", "backend", b.attempt.decision.Backend.Name, "request_id",
		b.attempt.req.inFlight.ID)
	return true
}

// isOverdue reports whether the replica has made no progress for timeouts.response, so that the response is given up. It is
// charged by its time.
func (b *backgroundAttempt) isOverdue() bool {
	limit := b.attempt.req.settings.Response
	if limit == 0 || b.attempt.decision.SinceProgress() < limit {
		return false
	}
	b.attempt.result.End = router.ClientDisconnected
	return true
}

// endUnfinished ends a response that an operator has cancelled, also at the replica. If the proxy is closed, the replica goes on,
// and what may be generated stays charged.
func (b *backgroundAttempt) endUnfinished() {
	if !b.attempt.req.lifetime.isCancelled() {
		b.attempt.result.End, b.attempt.estimatedTokens = router.Truncated, b.maxTokens
		return
	}
	b.attempt.result.End = router.ClientDisconnected
	b.attempt.req.recordCancel()
	ctx, cancel := context.WithTimeout(b.attempt.req.proxy.background.ctx, backgroundPollTimeout)
	defer cancel()
	resp, err := b.attempt.decision.Backend.Post(ctx, vllm.Call{Path: "/v1/responses/" + b.id + "/cancel"}, 0)
	if err != nil {
		b.attempt.req.proxy.log.Warn("background response not cancelled at its replica", "backend", b.attempt.decision.Backend.Name, "err", err,
			"request_id", b.attempt.req.inFlight.ID)
		return
	}
	fasthttp.ReleaseResponse(resp)
}

// replicaResponseID returns the id by which the replica knows the response to a request, whose id is the client's.
func (a *attempt) replicaResponseID(in *stored.Input, responseID string) string {
	if in.ChosenIDAt > 0 && responseID == in.ChosenID {
		return in.Scope + responseID
	}
	return responseID
}
