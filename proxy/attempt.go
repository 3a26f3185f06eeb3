package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/router"
)

// failure is an attempt that ended before anything was committed to the client, so that another
// backend may be asked.
type failure struct {
	reason        metrics.RetryReason
	err           error
	isFree        bool // does not count towards the limit: nothing was sent, or no engine was asked
	noRetry       bool // no other backend may be asked
	queueFull     bool // the replica refused the request, perhaps as its queue is full
	suspectsCrash bool // the replica may have crashed by the request
	shuttingDown  bool // the replica shuts down or scales in good order, and has dropped the request
	sameBackend   bool // it was about the handover of a split request: the same backend may be asked again
	done          bool // the client has disconnected, or has an error: nothing is left to do

	split metrics.SplitResult // what the request counts as by it; empty: it was not split

	// The response, if there was one, and the decision.
	status   int
	header   http.Header
	body     []byte
	charged  int64 // bytes of body that responseBuffers has reserved
	decision *router.Reservation
}

// isOfConnection reports whether a kept-alive connection failed, not the backend, which may be asked over a new one.
func (f *failure) isOfConnection() bool {
	return f.reason == metrics.RetryStale || f.reason == metrics.RetryWrongResponse
}

// isMissingEndpoint reports whether the replica does not serve the endpoint, as it seems. No rank of its server is asked
// again, and its response is worth less than any other.
func (f *failure) isMissingEndpoint() bool { return f.reason == metrics.RetryEndpoint }

// isUnsuited reports whether the replica cannot serve the request, and says so, though others may: it lacks the endpoint, or
// its context is too short.
func (f *failure) isUnsuited() bool {
	return f.isMissingEndpoint() || f.reason == metrics.RetryContextLength
}

var (
	errFirstByte = errors.New("no first event in time (timeouts.first_byte)")
	errResponse  = errors.New("no response and no progress in time (timeouts.response)")
	errStalled   = errors.New("backend stalled")
)

// attempt is one try at one backend, or the prefill leg of one.
type attempt struct {
	*request
	decision        *router.Reservation
	handover        *handover        // of which it is the decode leg; nil: it is none
	isPrefillLeg    bool             // of a split request
	token           string           // names the attempt in its X-Request-Id
	failureReason   string           // empty: it has not failed
	estimatedTokens int              // of a response without usage, by its length
	reply           *prompt.Response // what the next turn will repeat of the response; nil: unknown
	itl             chunkIntervals   // between the chunks of a stream
	result          router.Outcome   // for the release of the decision
}

// tryBackend sends the request to the picked backend and relays its response. It returns nil when
// the client has the response, or as much as there was. It releases the decision on every path.
func (r *request) tryBackend(d *router.Reservation) *failure {
	a := &attempt{request: r, decision: d, result: router.Outcome{End: router.NotProcessed}}
	defer r.context.end()
	defer func() {
		if a.background == nil { // else it is released when the response is complete
			a.recordAndReleaseDecision()
		}
	}()
	if r.history.sent++; r.history.sent == 1 {
		r.outcome.Overhead = time.Since(r.bodyReceivedAt) - r.history.waited.Total()
	}
	r.recordDecision(d)
	r.proxy.activity.RecordDecision(&r.inFlight, d, r.outcome.Model, r.history.sent, r.history.waited.Total())
	a.setRequestIDHeader()
	if f := a.prepareDecode(); f != nil {
		return f
	}
	switch s := r.settings; {
	case r.input.request.Streams:
		r.context.mu.Lock()
		r.context.startFirstByteTimerLocked()
		r.context.mu.Unlock()
	case s.Response > 0:
		r.context.startProgressTimer(d, s.Response)
	}
	leg, notAfter := "", time.Time{}
	if a.handover != nil {
		leg, notAfter = "decode", a.handover.notAfter
	}
	a.startSpan(leg)
	r.setSessionHeader(d.KVSession)
	resp, err := a.send(a.handoverEdits(), notAfter)
	r.stopQueueKeepalive()
	var f *failure
	if err != nil {
		f = a.classifyOrEndRequest(err)
	} else {
		defer resp.Body.Close()
		r.spans.SetStatus(resp.StatusCode)
		f = a.relayResponse(resp)
	}
	a.adjustDecodeFailure(f)
	a.setRouterOutcome(f)
	return f
}

// setRouterOutcome sets what the router learns of the backend from a failure; nil: nothing.
// After another backend has failed, the cause may be the request itself.
func (a *attempt) setRouterOutcome(f *failure) {
	if f == nil || f.done {
		return
	}
	a.failureReason = string(f.reason)
	var connect *transport.ConnectError
	a.result.Stalled, a.result.QueueFull, a.result.Stopping = f.reason == metrics.RetryStalled, f.queueFull, f.shuttingDown && f.isFree
	switch {
	case errors.As(f.err, &connect):
		a.result.Failed = !connect.MaxConnsReached() && f.reason != metrics.RetryDescriptors
	case f.isUnsuited(), f.isOfConnection(), f.sameBackend, f.reason == metrics.RetryRank, f.reason == metrics.RetryScaling:
	case f.reason == metrics.RetryLoop: // a client can claim one; only the health checks find that a backend is one
	default:
		isFirst := a.history.countAttempts((*attemptRecord).isFailure) == a.history.countConnectionFailures()
		a.result.Failed = a.result.Stalled || isFirst && !errors.Is(f.err, transport.ErrInvalidRequest)
	}
}

// recordAndReleaseDecision records the attempt, ends its span and tells the router how it ended.
func (a *attempt) recordAndReleaseDecision() {
	a.addTokensToRecording()
	a.setTokenUsage()
	a.endAttemptSpan()
	if a.result.End == router.Completed {
		a.decision.Backend.RecordServedEndpoint(a.endpoint.number)
	}
	if a.reply != nil && a.result.End == router.Completed {
		a.result.Reply, a.result.ReplyTailBytes = a.reply.Finish(), a.reply.TailBytes()
	}
	a.decision.Release(a.result)
	if a.reply != nil {
		a.proxy.pools.replies.Put(a.reply)
	}
}

// startReplyHashing makes the relay hash the blocks of the reply as they pass: the next turn will repeat them.
func (a *attempt) startReplyHashing() {
	reply := a.proxy.pools.replies.Get().(*prompt.Response)
	if !reply.Reset(&a.input.scratch.responseStart) {
		a.proxy.pools.replies.Put(reply)
		return
	}
	a.reply = reply
}

// send sends the client's body with edits to the backend, and returns the response. It fails if the end of the body
// could be sent only after notAfter; zero: whenever.
func (a *attempt) send(edits []prompt.Edit, notAfter time.Time) (*http.Response, error) {
	b := a.decision.Backend
	o := b.Options()
	req := a.newBackendRequest(a.context, b, o)
	if scope := a.input.stored.scopeEdits(); scope != nil {
		edits = append(scope, edits...)
		slices.SortStableFunc(edits, func(x, y prompt.Edit) int { return cmp.Compare(x.Start, y.Start) })
	}
	if len(edits) > 0 {
		edited := newEditedBody(a.input.body, edits)
		edited.notAfter = notAfter
		req.Body, req.ContentLength = edited, edited.length
	}
	return o.Transport.RoundTrip(req)
}

// newBackendRequest returns the request to the replica: the client's body, to the endpoint's own
// path. rewriteRequestHeader has prepared the header, to which those of b's options are added.
func (r *request) newBackendRequest(ctx context.Context, b *backends.Backend, o *backends.Options) *http.Request {
	header := r.httpReq.Header
	delete(header, "Authorization") // of the backend tried before
	if o.APIKey != "" {
		header["Authorization"] = []string{"Bearer " + o.APIKey}
	}
	delete(header, vllm.RankHeader)
	if rank := b.RankHeader(); rank != nil {
		header[vllm.RankHeader] = rank
	}
	delete(header, enginePriorityHeader)
	if o.EnginePriority { // also 0, or the body's priority would count
		header[enginePriorityHeader] = []string{strconv.Itoa(r.input.request.Priority)}
	}
	body := r.input.body
	sent := &outgoingParts{
		url:  url.URL{Scheme: b.URL.Scheme, Host: b.URL.Host, Path: b.URL.Path + r.replicaPath(), RawQuery: r.input.query},
		body: memoryBody{*bytes.NewReader(body)},
	}
	req := r.httpReq.WithContext(ctx) // the only way to a copy with another context
	req.Method, req.URL, req.Header = r.endpoint.allowedMethod(), &sent.url, header
	req.Body, req.ContentLength = &sent.body, int64(len(body))
	if len(body) == 0 {
		req.Body = http.NoBody
	}
	req.Close = r.history.countConnectionFailures() > 0 // then this connection must be a new one; see transport.StaleError
	return req
}

// sessionHeader names the session of a request to vLLM, which only repeats it in KV events.
const sessionHeader = "X-Session-Id"

// setSessionHeader sets the session by which KV events name the request; "": what the client sent.
func (r *request) setSessionHeader(session string) {
	switch h := r.httpReq.Header; {
	case session != "":
		h[sessionHeader] = []string{session}
	case r.input.sessionHeader != nil:
		h[sessionHeader] = r.input.sessionHeader
	default:
		delete(h, sessionHeader)
	}
}

// replicaPath returns the path of the request at a replica.
func (r *request) replicaPath() string {
	if !r.endpoint.isAboutResponse() {
		return r.endpoint.path
	}
	return strings.Replace(r.endpoint.path, responseIDPart, r.input.stored.replicaID, 1)
}

// outgoingParts are the parts of a request to a replica, in one allocation.
type outgoingParts struct {
	url  url.URL
	body memoryBody
}

// memoryBody is a body in memory, which needs no closing.
type memoryBody struct{ bytes.Reader }

func (*memoryBody) Close() error { return nil }

// classifyOrEndRequest returns the failure of an attempt without a complete response. If the client or the proxy has
// ended the request, it records that, sends the error, and returns a failure that is done.
func (a *attempt) classifyOrEndRequest(err error) *failure {
	if a.isEndedByProxy() {
		a.result.End = router.ClientDisconnected
		a.sendError(a.recordProxyEnd())
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
		return &failure{reason: metrics.RetryFirstByte, err: err, noRetry: !a.settings.Retry.Timeouts}
	case errors.Is(err, errResponse):
		return &failure{reason: metrics.RetryResponse, err: err, noRetry: !a.settings.Retry.Timeouts}
	case errors.Is(err, errStalled):
		return &failure{reason: metrics.RetryStalled, err: err}
	case errors.As(err, &stale):
		return &failure{reason: metrics.RetryStale, err: err}
	case errors.As(err, &connect) && connect.OutOfDescriptors():
		return &failure{reason: metrics.RetryDescriptors, err: err, isFree: true}
	case errors.As(err, &connect):
		// After a stale connection the replica may have crashed by the request at once.
		suspectsCrash := !connect.MaxConnsReached() && a.history.anyAttempt(func(r *attemptRecord) bool {
			return r.failure.reason == metrics.RetryStale && r.backend == a.decision.Backend
		})
		return &failure{reason: metrics.RetryConnect, err: err, isFree: true, suspectsCrash: suspectsCrash}
	}
	if errors.Is(err, transport.ErrInvalidResponse) {
		return &failure{reason: metrics.RetryInvalid, err: err}
	}
	late := errors.Is(err, os.ErrDeadlineExceeded)
	return &failure{reason: metrics.RetryTruncated, err: err, suspectsCrash: !late && !errors.Is(err, transport.ErrInvalidRequest)}
}

// recordDisconnect records, also for the router, that the client has disconnected or the request was cancelled. When the
// attempt returns, the connection to the replica is closed, which makes its engine abort the request.
func (a *attempt) recordDisconnect(phase metrics.AbortPhase) {
	a.result.End = router.ClientDisconnected
	a.recordDisconnectOrCancel(phase)
}

// recordDisconnectOrCancel records that the client did not get all of its response: it has disconnected in that phase, or
// an operator has cancelled the request.
func (r *request) recordDisconnectOrCancel(phase metrics.AbortPhase) {
	r.aborted = true
	if r.isCancelled() {
		r.outcome.Code = r.recordProxyEnd().status
		return
	}
	r.outcome.Code, r.phase = metrics.StatusClientClosed, phase
	r.proxy.metrics.CountAbort(phase)
}

// recordTruncated records that the replica failed after the response was committed, and has its
// health checked. The status is for metrics and logs.
func (a *attempt) recordTruncated(loggedStatus int, err error) {
	a.result.End = router.Truncated
	a.outcome.Code = loggedStatus
	if isRemoval(err) {
		a.proxy.log.Warn("response aborted, backend removed", "backend", a.decision.Backend.Name, "request_id", a.inFlight.ID)
		return
	}
	a.result.Failed = true
	a.proxy.log.Warn("upstream closed the response early", "backend", a.decision.Backend.Name, "err", err, "request_id", a.inFlight.ID)
	a.proxy.recheckHealth(a.decision.Backend)
}

// isRemoval reports whether a response ended with err because its backend was removed: then its transport is closed.
func isRemoval(err error) bool { return errors.Is(err, net.ErrClosed) }

// relayResponse sends the response to the client, or returns the failure that it is. Until the response is known not to
// be another request's, as far as its id can tell, the connection is not reused.
func (a *attempt) relayResponse(resp *http.Response) *failure {
	body, ok := resp.Body.(replicaBody)
	if !ok {
		return a.classifyOrEndRequest(fmt.Errorf("the transport's body is a %T", resp.Body))
	}
	body.ForbidReuse()
	if f := a.checkResponseHeaderID(resp.Header); f != nil {
		return f
	}
	if f := validateResponse(resp); f != nil {
		return f
	}
	if scope := a.input.stored.scope; scope != "" && !isEncoded(resp.Header) {
		body = removeScope(resp, body, scope)
	}
	if resp.StatusCode == http.StatusOK && isEventStream(resp.Header) {
		return a.relayStream(resp, body)
	}
	// A replica computes such a response before it writes any of it, so silence within it is not work.
	body.SetIdleTimeout(a.settings.Idle)
	switch resp.StatusCode {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		body.AllowReuse() // an error has no id
		return a.readErrorResponse(resp)
	}
	return a.relayWhole(resp, body)
}

// relayWhole relays a response that is not a stream, in the form that the client can still read.
func (a *attempt) relayWhole(resp *http.Response, body replicaBody) *failure {
	if a.headersSent {
		return a.relayErrorAsEvent(resp, body)
	}
	return a.relayBuffered(resp, body)
}

// isEventStream goes by what the response says, never by what the request asked for.
func isEventStream(h http.Header) bool { return hasContentType(h, "text/event-stream") }

func hasContentType(h http.Header, mediaType string) bool {
	kind, _, _ := strings.Cut(firstHeaderValue(h, "Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), mediaType)
}

// isFramed reports whether the end of a response can be told from the end of its connection.
func isFramed(resp *http.Response) bool {
	return resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
}

// recordCommittedResponse records that the client gets this response: earlier failures do not matter any more.
func (a *attempt) recordCommittedResponse(resp *http.Response) {
	a.replaceBestFailure(nil)
	a.inFlight.BeginResponding()
	a.outcome.Code = resp.StatusCode
	if a.handover != nil {
		a.splitResult = metrics.SplitDone
		a.proxy.router.RecordTransfer(a.handover.prefill.Backend, a.decision.Backend, false)
	}
	a.outcome.Spilled = a.decision.Reason == router.ReasonSpill
}

// attemptContext is the context with which an attempt is sent. Until the response is committed it ends with the client, a
// time limit, a stall or a cancel; context.Cause says which. Safe for concurrent use, but for begin.
type attemptContext struct {
	context.Context
	cancel context.CancelCauseFunc

	// Set by begin.
	firstByteTimeout time.Duration // 0: no limit
	streams          bool
	retryStalled     bool // of the settings
	retriesStall     bool // another attempt may follow if the backend stalls
	relocated        bool // an earlier attempt has ended by a stall

	mu         sync.Mutex // guards what follows
	committed  bool       // stalls and time limits end it no more
	prefilling bool       // the prefill leg of a split request is open
	timer      *time.Timer
	idle       *time.Timer
}

// beginAttemptContext makes the context of the next attempt, before the pick and whatever may take long before it.
func (r *request) beginAttemptContext() {
	c := &r.firstContext
	if c.Context != nil {
		c = new(attemptContext)
	}
	s := r.settings
	c.Context, c.cancel = context.WithCancelCause(r.httpReq.Context())
	c.firstByteTimeout, c.streams = s.FirstByte, r.input.request.Streams
	charged, _ := r.history.countCharged()
	c.retryStalled = s.Retry.Stalled
	c.retriesStall = c.retryStalled && charged+1 < s.Attempts
	c.relocated = r.history.anyAttempt(func(r *attemptRecord) bool { return r.failure.reason == metrics.RetryStalled })
	r.context, r.input.request.Stalls = c, c
	r.proxy.activity.BeginQueued(&r.inFlight, r.outcome.Model, r.keyName(), c.cancel)
}

// startFirstByteTimerLocked ends the attempt with errFirstByte after the limit. c.mu is held.
func (c *attemptContext) startFirstByteTimerLocked() {
	if c.firstByteTimeout == 0 || c.timer != nil {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(c.firstByteTimeout, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.committed && c.timer == t {
			c.cancel(errFirstByte)
		}
	})
	c.timer = t
}

// startProgressTimer ends the attempt with errResponse when the backend of d has made no progress for limit.
func (c *attemptContext) startProgressTimer(d *router.Reservation, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var t *time.Timer
	t = time.AfterFunc(limit, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.committed || c.idle != t {
			return
		}
		if left := limit - d.SinceProgress(); left > 0 {
			t.Reset(left)
			return
		}
		c.cancel(errResponse)
	})
	c.idle = t
}

// stopTimersLocked ends the time limits. c.mu is held.
func (c *attemptContext) stopTimersLocked() {
	for _, t := range []*time.Timer{c.timer, c.idle} {
		if t != nil {
			t.Stop()
		}
	}
	c.timer, c.idle = nil, nil // for those that run already
}

// BackendStalled implements router.StallListener. A stall moves a request once, unless the replica is hung: the request may
// itself be what takes so long. Where it stays, a response that is not a stream has from now on Timeouts.FirstByte.
func (c *attemptContext) BackendStalled(anotherAvailable, hung bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.committed:
	case c.prefilling && c.retryStalled, anotherAvailable && c.retriesStall && (hung || !c.relocated):
		c.cancel(errStalled)
	case !c.streams || c.prefilling: // a stream has its timer from the beginning
		c.startFirstByteTimerLocked()
	}
}

// commit ends the time limits and stalls of the attempt, and returns what has ended it before, else nil.
func (c *attemptContext) commit() (cancelCause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.committed = true
	c.stopTimersLocked()
	return context.Cause(c)
}

// end cancels the context and stops its timers.
func (c *attemptContext) end() {
	_ = c.commit()
	c.cancel(context.Canceled)
}

// commitAttempt ends the time in which another backend may be asked, and returns a failure if the attempt was ended before.
func (a *attempt) commitAttempt() *failure {
	a.decision.Commit()
	if err := a.context.commit(); err != nil {
		return a.classifyOrEndRequest(err)
	}
	return nil
}

// validateResponse returns the failure that a response is which no engine sends, else nil.
func validateResponse(resp *http.Response) *failure {
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		// Followed or relayed, it would send the body and a key to wherever the response says.
		return &failure{reason: metrics.RetryRedirect, err: fmt.Errorf("redirected (%d) to %s: set the backend to the URL of the replica itself",
			resp.StatusCode, formatRedirectOrigin(resp.Header.Get("Location")))}
	case resp.StatusCode == http.StatusLoopDetected:
		return &failure{reason: metrics.RetryLoop, err: errors.New("status 508: the backend leads back to this proxy; remove it from the backends")}
	case isEventStream(resp.Header) && isEncoded(resp.Header): // neither its first event nor an error in it can be read
		return &failure{reason: metrics.RetryEncoded, err: errors.New("stream is encoded although only identity was accepted: " +
			"disable compression in front of the replica")}
	}
	return nil
}

// formatRedirectOrigin returns the scheme and host that a redirect leads to, without what may hold the prompt.
func formatRedirectOrigin(location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Host == "" {
		return "another path"
	}
	return u.Scheme + "://" + u.Host
}

// isEncoded reports whether a body is compressed or otherwise encoded. Other values, such as utf-8 and none, are mistakes of
// clients and intermediaries, whose bodies are plain.
func isEncoded(h http.Header) bool {
	for coding := range listMembers(h["Content-Encoding"]) {
		name, _, _ := strings.Cut(coding, ";") // some add a parameter
		switch strings.ToLower(strings.TrimSpace(name)) {
		// Those registered with IANA but for identity, and others in use.
		case "gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress", "dcb", "dcz", "pack200-gzip", "exi", "aes128gcm",
			"bzip2", "x-bzip2", "lz4", "lzma", "snappy", "xz":
			return true
		}
	}
	return false
}

// minWarningInterval is the time between two warnings of failed attempts on one backend.
const minWarningInterval = time.Second

// failureLog limits the warnings of failed attempts. Safe for concurrent use; the zero value is ready.
type failureLog struct {
	mu      sync.Mutex
	entries []failureLogEntry // by slot
}

type failureLogEntry struct {
	backend    *backends.Backend // that had the slot
	warnedAt   time.Time
	suppressed int // warnings since
}

// allowWarning counts a failed attempt on b, and reports whether to warn of it and how many were suppressed since the last.
func (l *failureLog) allowWarning(b *backends.Backend, now time.Time) (allowed bool, suppressed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.entries) <= b.Slot {
		l.entries = append(l.entries, failureLogEntry{})
	}
	e := &l.entries[b.Slot]
	if e.backend != b {
		*e = failureLogEntry{backend: b}
	}
	if now.Sub(e.warnedAt) < minWarningInterval {
		e.suppressed++
		return false, 0
	}
	suppressed = e.suppressed
	e.warnedAt, e.suppressed = now, 0
	return true, suppressed
}
