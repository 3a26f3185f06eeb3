package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/metrics"
	"warmroute/router"
	"warmroute/router/prompt"
)

// failure is an attempt that ended before anything was committed to the client,
// so that another backend may be asked.
type failure struct {
	reason         metrics.RetryReason
	err            error
	uncharged      bool // counts as no attempt: nothing was sent, or no engine was asked
	final          bool // no other backend may be asked
	timeout        bool
	stalled        bool // the backend did nothing, and another was to be asked
	full           bool // the replica refused the request with a 503
	mayHaveCrashed bool // the replica may have died of the request
	shuttingDown   bool // the replica ends in good order, and has dropped the request
	loop           bool // the backend is a proxy which found that the request had passed it
	stale          bool // the connection was; no sign of a apiErr of the backend
	noDescriptors  bool // this process had no file descriptor left to connect with
	done           bool // the client is gone, or has its answer: nothing is left to be done

	// What the replica answered, if it did; what its decision was then.
	status   int
	header   http.Header
	body     []byte
	charged  int64 // of body, to maxBufferedResponseBytes
	decision *router.Decision
}

var (
	errFirstByte = errors.New("no first event in time")
	errResponse  = errors.New("no response, and no progress of the replica, in time")
	errStalled   = errors.New("the replica does nothing")
)

// statusClientClosed is what metrics and logs show for a client that left.
const statusClientClosed = 499

// attempt is one try at one backend. Its result is what the decision is released
// with.
type attempt struct {
	*request
	decision        *router.Decision
	failureReason   string           // why it failed; empty: it has not
	estimatedTokens int              // tokens of an answer whose account was not found, by its length
	reply           *prompt.Response // what the next turn will hold of the answer; nil: not known
	itl             chunkIntervals   // between the chunks of a stream
	result          router.Outcome
}

// tryBackend sends the request to the chosen backend and relays its answer. It
// returns nil when the client has its answer, or as much as there was. The
// decision is released here, once, on every path.
func (r *request) tryBackend(d *router.Decision) *failure {
	a := &attempt{request: r, decision: d, result: router.Outcome{End: router.NotProcessed}}
	defer r.context.end()
	defer func() {
		a.releaseDecision()
		if d.Backend.InFlight.Load() == 0 {
			r.proxy.backendIdle.Notify()
		}
	}()
	switch s := r.settings; {
	case r.input.request.Streams:
		r.context.startFirstByteTimer()
	case s.Response > 0:
		r.context.startProgressTimer(d, s.Response)
	}
	r.outcome.Backend = d.Backend.Name
	if r.history.sent++; r.history.sent == 1 {
		r.outcome.Overhead = time.Since(r.bodyReceivedAt) - r.history.queueTime
	}
	r.proxy.activity.recordAttempt(r, d)
	r.beginAttemptSpan(d)
	resp, err := r.roundTrip(r.context, d.Backend)
	if err != nil {
		return a.attributeFailure(a.classifyError(err))
	}
	defer resp.Body.Close()
	r.spans.SetStatus(resp.StatusCode)
	return a.attributeFailure(a.relay(resp))
}

// attributeFailure notes what a failed attempt says of the backend. What another backend
// has failed as well may be the request's own apiErr.
func (a *attempt) attributeFailure(f *failure) *failure {
	if f == nil || f.done {
		return f
	}
	a.failureReason = string(f.reason)
	var connect *transport.ConnectError
	a.result.Stalled, a.result.QueueFull, a.result.Stopping = f.stalled, f.full, f.shuttingDown && f.uncharged
	switch {
	case errors.As(f.err, &connect):
		a.result.Failed = !connect.Busy() && !f.noDescriptors
	case f.stale, f.loop: // a client can claim a loop: only the checks find that a backend is one
	default:
		charged, _ := a.history.countCharged()
		a.result.Failed = f.stalled || charged == a.history.countStale() && !errors.Is(f.err, transport.ErrInvalidRequest)
	}
	return f
}

// releaseDecision tells the router how the attempt ended.
func (a *attempt) releaseDecision() {
	a.recordResult()
	a.chargeUsage()
	a.endAttemptSpan()
	if a.reply == nil {
		a.decision.Release(a.result)
		return
	}
	if a.result.End == router.Completed {
		a.result.Reply = a.reply.Blocks()
	}
	a.decision.Release(a.result)
	a.proxy.pools.replies.Put(a.reply)
}

// trackReply prepares to take the reply's blocks from the answer as it passes.
func (a *attempt) trackReply() {
	reply := a.proxy.pools.replies.Get().(*prompt.Response)
	if !reply.Reset(&a.input.scratch.prompt) {
		a.proxy.pools.replies.Put(reply)
		return
	}
	a.reply = reply
}

// roundTrip asks a replica, on the terms that it has now.
func (r *request) roundTrip(ctx context.Context, b *backends.Backend) (*http.Response, error) {
	terms := b.Options()
	return terms.Transport.RoundTrip(r.outgoingRequest(ctx, b, terms.APIKey))
}

// outgoingRequest is what goes to the replica: the client's bytes, to the endpoint's
// own path. The client's header was made fit for replicas by outgoing.
func (r *request) outgoingRequest(ctx context.Context, b *backends.Backend, key string) *http.Request {
	header := r.httpReq.Header
	delete(header, "Authorization") // the key of the backend tried before
	if key != "" {
		header["Authorization"] = []string{"Bearer " + key}
	}
	body := r.input.body
	sent := &outgoingParts{
		url:  url.URL{Scheme: b.URL.Scheme, Host: b.URL.Host, Path: b.URL.Path + r.endpoint.path, RawQuery: r.input.query},
		body: memoryBody{*bytes.NewReader(body)},
	}
	req := r.httpReq.WithContext(ctx) // a copy, and the only way to one with a context
	req.Method, req.URL, req.Header = http.MethodPost, &sent.url, header
	req.Body, req.ContentLength = &sent.body, int64(len(body))
	req.Close = r.history.countStale() > 0 // then this one must not be; see transport.StaleError
	return req
}

// outgoingParts is what of a request to a replica lives as long as the request: one
// allocation.
type outgoingParts struct {
	url  url.URL
	body memoryBody
}

// memoryBody is a body in memory, which has nothing to close.
type memoryBody struct{ bytes.Reader }

func (*memoryBody) Close() error { return nil }

// classifyError sorts an attempt that brought no answer, or none to its end. The
// client's own leaving is not the backend's apiErr.
func (a *attempt) classifyError(err error) *failure {
	if a.isCutOff() {
		a.result.End = router.ClientDisconnected
		a.sendError(a.cutOffError())
		return &failure{err: err, done: true}
	}
	if a.isDisconnected() {
		a.recordDisconnect(a.client.abortPhase(metrics.AbortBeforeResponse))
		return &failure{err: err, done: true}
	}
	var connect *transport.ConnectError
	var stale *transport.StaleError
	switch {
	case errors.Is(err, errFirstByte):
		return &failure{reason: metrics.RetryFirstByte, err: err, final: !a.settings.Retry.Timeouts, timeout: true}
	case errors.Is(err, errResponse):
		return &failure{reason: metrics.RetryResponse, err: err, final: !a.settings.Retry.Timeouts, timeout: true}
	case errors.Is(err, errStalled):
		return &failure{reason: metrics.RetryStalled, err: err, stalled: true}
	case errors.As(err, &stale):
		return &failure{reason: metrics.RetryStale, err: err, stale: true}
	case errors.As(err, &connect) && connect.OutOfDescriptors():
		return &failure{reason: metrics.RetryDescriptors, err: err, uncharged: true, noDescriptors: true}
	case errors.As(err, &connect):
		// After a stale connection: the replica may have died of the request at once.
		deadly := !connect.Busy() && a.history.wasStale(a.decision.Backend)
		return &failure{reason: metrics.RetryConnect, err: err, uncharged: true, mayHaveCrashed: deadly}
	}
	late := errors.Is(err, os.ErrDeadlineExceeded)
	return &failure{reason: metrics.RetryTruncated, err: err, mayHaveCrashed: !late && !errors.Is(err, transport.ErrInvalidRequest)}
}

// recordDisconnect notes that the client is gone. The replica's connection is closed when
// the attempt returns, which makes its engine drop the request.
func (a *attempt) recordDisconnect(phase metrics.AbortPhase) {
	a.result.End = router.ClientDisconnected
	a.recordAborted(phase)
}

// recordAborted notes that the client did not get its answer to the end.
func (r *request) recordAborted(phase metrics.AbortPhase) {
	r.aborted = true
	if r.isCancelled() {
		r.outcome.Code = r.cutOffError().status
		return
	}
	r.outcome.Code, r.phase = statusClientClosed, phase
	r.proxy.metrics.CountAbort(phase)
}

// recordTruncated notes that the replica failed in the midst of what the client
// already sees. code is what metrics and logs show for it.
func (a *attempt) recordTruncated(code int, err error) {
	a.result.End, a.result.Failed = router.Truncated, true
	a.outcome.Code = code
	a.proxy.log.Warn("upstream closed the response early", "backend", a.decision.Backend.Name, "err", err, "request_id", a.id)
	a.proxy.recheckHealth(a.decision.Backend)
}

// relay sends the response to the client, or returns the failure that it is.
func (a *attempt) relay(resp *http.Response) *failure {
	if f := validateResponse(resp); f != nil {
		return f
	}
	body, ok := resp.Body.(replicaBody)
	if !ok {
		return a.classifyError(fmt.Errorf("the transport's body is a %T", resp.Body))
	}
	if resp.StatusCode == http.StatusOK && isEventStream(resp.Header) {
		return a.relayStream(resp, body)
	}
	// A replica computes such a response before it writes any of it, so silence in its midst
	// is no work.
	body.SetIdleTimeout(a.settings.Idle)
	switch resp.StatusCode {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return a.replicaFailure(resp)
	}
	if a.headersSent {
		return a.relayErrorEvent(resp)
	}
	return a.relayBuffered(resp)
}

// isEventStream goes by what the answer says it is, never by what the request
// asked for.
func isEventStream(h http.Header) bool { return hasType(h, "text/event-stream") }

func isJSON(h http.Header) bool { return hasType(h, "application/json") }

func hasType(h http.Header, want string) bool {
	kind, _, _ := strings.Cut(headerValue(h, "Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), want)
}

// isFramed reports whether the end of an answer can be told from the end of its
// connection.
func isFramed(resp *http.Response) bool {
	return resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
}

// beginResponse makes the answer this backend's: from here on the client sees it. It
// returns the client's header, filled but for the length.
func (a *attempt) beginResponse(resp *http.Response) http.Header {
	a.recordCommitted(resp)
	return a.responseHeader(a.decision, resp.Header)
}

// recordCommitted notes whose answer the client gets.
func (a *attempt) recordCommitted(resp *http.Response) {
	a.setBestFailure(nil)
	a.inFlight.phase.Store(int32(Responding))
	a.outcome.Code = resp.StatusCode
	a.outcome.PredictedTokens = a.decision.MatchedTokens
	a.outcome.Spilled = a.decision.Reason == router.ReasonSpill
}

// attemptContext is the context with which an attempt is sent. Until the response is
// committed it ends with the client, a time limit, a stall of the backend, or a cancel
// by an operator; context.Cause says which. Safe for concurrent use, but for begin.
type attemptContext struct {
	context.Context
	cancel context.CancelCauseFunc

	// Set by begin.
	firstByteTimeout time.Duration // 0: no limit
	streams          bool
	retriesStall     bool // another attempt may follow if the backend stalls
	relocated        bool // an earlier attempt has ended by a stall

	mu        sync.Mutex // guards what follows
	committed bool       // stalls and time limits end it no more
	timer     *time.Timer
	idle      *time.Timer
}

// beginAttemptContext makes the context of the next attempt. It precedes the pick, and
// whatever may take long before it.
func (r *request) beginAttemptContext() {
	c := &r.firstContext
	if c.Context != nil {
		c = new(attemptContext)
	}
	s := r.settings
	c.Context, c.cancel = context.WithCancelCause(r.httpReq.Context())
	c.firstByteTimeout, c.streams = s.FirstByte, r.input.request.Streams
	charged, _ := r.history.countCharged()
	c.retriesStall, c.relocated = s.Retry.Stalled && charged+1 < s.Attempts, r.history.hasStalled()
	r.context, r.input.request.Stalls = c, c
	r.proxy.activity.beginWait(r)
}

// startFirstByteTimer ends the attempt with errFirstByte after the limit.
func (c *attemptContext) startFirstByteTimer() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.startTimer()
}

func (c *attemptContext) startTimer() {
	if c.firstByteTimeout > 0 && c.timer == nil {
		c.timer = time.AfterFunc(c.firstByteTimeout, func() { c.cancelUnlessCommitted(errFirstByte) })
	}
}

func (c *attemptContext) cancelUnlessCommitted(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.committed {
		c.cancel(cause)
	}
}

// startProgressTimer ends the attempt with errResponse when the backend of d has made
// no progress for as long as limit.
func (c *attemptContext) startProgressTimer(d *router.Decision, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = time.AfterFunc(limit, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.committed {
			return
		}
		if left := limit - d.SinceProgress(); left > 0 {
			c.idle.Reset(left)
			return
		}
		c.cancel(errResponse)
	})
}

// BackendStalled implements router.StallListener. A stall moves a request once, unless
// the replica is hung: the request may itself be what takes so long. Where it stays, a
// response that is not streamed has from now on the time that a stream has for its first
// event.
func (c *attemptContext) BackendStalled(elsewhere, hung bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.committed:
	case elsewhere && c.retriesStall && (hung || !c.relocated):
		c.cancel(errStalled)
	case !c.streams: // a stream has its timer from the beginning
		c.startTimer()
	}
}

// commit makes sure that from its return on nothing but the client or an operator ends
// the attempt, and returns what has ended it before, else nil.
func (c *attemptContext) commit() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.committed = true
	for _, t := range []*time.Timer{c.timer, c.idle} {
		if t != nil {
			t.Stop()
		}
	}
	return context.Cause(c)
}

// end releases the context's resources.
func (c *attemptContext) end() {
	_ = c.commit()
	c.cancel(context.Canceled)
}

// commitResponse ends the time in which another backend may be asked. It returns a
// failure if the attempt was ended before.
func (a *attempt) commitResponse() *failure {
	a.decision.Commit()
	if err := a.context.commit(); err != nil {
		return a.classifyError(err)
	}
	return nil
}

// validateResponse is for answers that no engine gives, so something else answers in its
// place: they are no use to the client, and another backend may do better. It
// returns nil for every other.
func validateResponse(resp *http.Response) *failure {
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		// Not followed: the body would go, with the backend's key, to wherever the
		// answer says. Not relayed: the client would go there past the proxy.
		return &failure{reason: metrics.RetryRedirect, err: fmt.Errorf("it redirects (%d) to %s; give the backend the URL of the replica itself", resp.StatusCode, redirectHost(resp.Header.Get("Location")))}
	case resp.StatusCode == http.StatusLoopDetected:
		return &failure{reason: metrics.RetryLoop, err: errors.New("it answered 508: the backend leads back to this proxy; remove it from the backends"), loop: true}
	case isEventStream(resp.Header) && isEncoded(resp.Header):
		// Neither its first event nor an error in it could be seen.
		return &failure{reason: metrics.RetryEncoded, err: errors.New("its stream is encoded, though nothing but identity was asked for; turn compression off in front of the replica")}
	}
	return nil
}

// redirectHost is where a redirect leads, without the path and the query: they may hold
// what was asked.
func redirectHost(location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Host == "" {
		return "another path"
	}
	return u.Scheme + "://" + u.Host
}

// isEncoded reports whether a body has to be decoded to be read, as a compressed one.
func isEncoded(h http.Header) bool {
	coding := headerValue(h, "Content-Encoding")
	return coding != "" && !strings.EqualFold(coding, "identity")
}

// minWarningInterval is the least time between two warnings of failed attempts on one
// backend: a fleet that fails, fails thousands a second.
const minWarningInterval = time.Second

// failureLog are how many failed attempts were not warned of. Safe for concurrent
// use; the zero value is ready. Its size is that of the fleet.
type failureLog struct {
	mu sync.Mutex
	of []failureLogEntry // by slot
}

type failureLogEntry struct {
	backend    *backends.Backend // whose slot it was then
	at         time.Time
	suppressed int // left out since
}

// shouldWarn reports whether a failed attempt on b is to be warned of, and how many were
// left out since the last that was.
func (w *failureLog) shouldWarn(b *backends.Backend, now time.Time) (shouldWarn bool, left int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.of) <= b.Slot {
		w.of = append(w.of, failureLogEntry{})
	}
	of := &w.of[b.Slot]
	if of.backend != b {
		*of = failureLogEntry{backend: b}
	}
	if now.Sub(of.at) < minWarningInterval {
		of.suppressed++
		return false, 0
	}
	left = of.suppressed
	of.at, of.suppressed = now, 0
	return true, left
}
