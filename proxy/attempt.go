package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/relay"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// attempt is one try at one backend, or the prefill request of one.
type attempt struct {
	req              *request
	decision         *router.Reservation
	kvTransfer       *upstream.KVTransfer // of which it is the decode request; nil: it is none
	isPrefillRequest bool                 // of a split request
	token            string               // names the attempt in its X-Request-Id
	failureReason    string               // empty: it has not failed
	estimatedTokens  int                  // of a response without usage, by its length
	countsEvents     bool                 // the output tokens in result are the number of events: the stream had no usage
	metadata         *relay.Metadata      // of the response, for the attempt's span; nil: it is not traced
	reply            *prompt.Response     // what the next turn will repeat of the response; nil: unknown
	itl              relay.ChunkIntervals // between the chunks of a stream
	result           router.Outcome       // for the release of the decision
	released         bool                 // recordAndReleaseDecision was called
}

// tryBackend sends the request to the picked backend and relays its response. It returns nil when
// the client has the response, or as much as there was. It releases the decision on every path.
func (r *request) tryBackend(d *router.Reservation) *fault.Failure {
	a := &attempt{req: r, decision: d, result: router.Outcome{End: router.NotProcessed}}
	defer r.context.End()
	defer func() {
		if a.req.background == nil && !a.released { // of a background response it is released when that is complete
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
		r.context.StartFirstByteTimer()
	case s.Response > 0:
		r.context.StartProgressTimer(d, s.Response)
	}
	kind, notAfter := "", time.Time{}
	if a.kvTransfer != nil {
		kind, notAfter = "decode", a.kvTransfer.NotAfter
	}
	a.startSpan(kind)
	r.input.setSessionHeader(r.httpReq.Header, d.KVSession)
	resp, err := a.send(a.kvTransferEdits(), notAfter)
	r.queueKeepalive.stop()
	var f *fault.Failure
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
func (a *attempt) setRouterOutcome(f *fault.Failure) {
	if f == nil || f.Done {
		return
	}
	a.failureReason = string(f.Reason)
	var connect *transport.ConnectError
	a.result.Stalled, a.result.QueueFull, a.result.Stopping = f.Reason == metrics.RetryStalled, f.QueueFull, f.ShuttingDown && f.IsFree
	switch {
	case errors.As(f.Err, &connect):
		a.result.Failed = !connect.MaxConnsReached() && f.Reason != metrics.RetryDescriptors
	case f.IsUnsuited(), f.IsOfConnection(), f.SameBackend, f.Reason == metrics.RetryRank, f.Reason == metrics.RetryScaling:
	case f.Reason == metrics.RetryLoop: // a client can claim one; only the health checks find that a backend is one
	default:
		isFirst := a.req.history.countAttempts((*attemptRecord).isFailure) == a.req.history.countConnectionFailures()
		a.result.Failed = a.result.Stalled || isFirst && !errors.Is(f.Err, transport.ErrInvalidRequest)
	}
}

// recordAndReleaseDecision records the attempt, ends its span and tells the router how it ended. It is called once. If the
// response is complete, that is before the end of it is sent to the client, whose next request may follow at once.
func (a *attempt) recordAndReleaseDecision() {
	a.released = true
	a.addTokensToRecording()
	a.setTokenUsage()
	a.endAttemptSpan()
	if a.result.End == router.Completed {
		a.decision.Backend.RecordServedEndpoint(a.req.endpoint.Number)
	}
	if a.reply != nil && a.result.End == router.Completed {
		a.result.Reply, a.result.ReplyTailBytes = a.reply.Finish(), a.reply.TailBytes()
	}
	a.decision.Release(a.result)
	if a.reply != nil {
		a.req.proxy.pools.replies.Put(a.reply)
	}
}

// startReplyHashing makes the relay hash the blocks of the reply as they pass: the next turn will repeat them.
func (a *attempt) startReplyHashing() {
	reply := a.req.proxy.pools.replies.Get().(*prompt.Response)
	if !reply.Reset(&a.req.input.scratch.responseStart) {
		a.req.proxy.pools.replies.Put(reply)
		return
	}
	a.reply = reply
}

// send sends the client's body with edits to the backend, and returns the response. It fails if the end of the body
// could be sent only after notAfter; zero: whenever.
func (a *attempt) send(edits []prompt.Edit, notAfter time.Time) (*http.Response, error) {
	r, b := a.req, a.decision.Backend
	if scope := r.input.stored.ScopeEdits(); scope != nil {
		edits = append(scope, edits...)
		slices.SortStableFunc(edits, func(x, y prompt.Edit) int { return cmp.Compare(x.Start, y.Start) })
	}
	return upstream.Send(r.context, &upstream.Request{
		Client: r.httpReq, Method: r.endpoint.AllowedMethod(), Path: r.input.replicaPath(r.endpoint), Query: r.input.query,
		Body: r.input.body, Edits: edits, NotAfter: notAfter,
		Backend: b, Priority: r.input.request.Priority,
		NewConnection: r.history.countConnectionFailures() > 0,
	})
}

// setSessionHeader sets the session by which KV events name the request; "": what the client sent.
func (in *input) setSessionHeader(h http.Header, session string) {
	switch {
	case session != "":
		h[upstream.SessionHeader] = []string{session}
	case in.sessionHeader != nil:
		h[upstream.SessionHeader] = in.sessionHeader
	default:
		delete(h, upstream.SessionHeader)
	}
}

// replicaPath returns the path of the request at a replica.
func (in *input) replicaPath(e *api.Endpoint) string {
	if !e.IsAboutResponse() {
		return e.Path
	}
	return strings.Replace(e.Path, api.ResponseIDPart, in.stored.ReplicaID, 1)
}

// classifyOrEndRequest returns the failure of an attempt without a complete response. If the client or the proxy has
// ended the request, it records that, sends the error, and returns a failure that is done.
func (a *attempt) classifyOrEndRequest(err error) *fault.Failure {
	if a.req.lifetime.isEndedByProxy() {
		a.result.End = router.ClientDisconnected
		a.req.sendError(a.req.recordProxyEnd())
		return &fault.Failure{Err: err, Done: true}
	}
	if a.req.lifetime.isDisconnected() {
		a.recordDisconnect(a.req.client.DisconnectPhase(metrics.DisconnectBeforeResponse))
		return &fault.Failure{Err: err, Done: true}
	}
	afterStale := a.req.history.anyAttempt(func(r *attemptRecord) bool {
		return r.failure.Reason == metrics.RetryStale && r.backend == a.decision.Backend
	})
	return fault.OfTransport(err, a.req.settings.Retry.AfterTimeout, afterStale)
}

// recordDisconnect records, also for the router, that the client has disconnected or the request was cancelled. When the
// attempt returns, the connection to the replica is closed, which makes its engine abort the request.
func (a *attempt) recordDisconnect(phase metrics.DisconnectPhase) {
	a.result.End = router.ClientDisconnected
	a.req.recordDisconnectOrCancel(phase)
}

// recordDisconnectOrCancel records that the client did not get all of its response: it has disconnected in that phase, or
// an operator has cancelled the request.
func (r *request) recordDisconnectOrCancel(phase metrics.DisconnectPhase) {
	r.isIncomplete = true
	if r.lifetime.isCancelled() {
		r.outcome.Code = r.recordProxyEnd().Status
		return
	}
	r.outcome.Code, r.disconnected = metrics.StatusClientClosed, phase
	r.proxy.metrics.CountDisconnect(phase)
}

// recordTruncated records that the replica failed after the response was committed, and has its
// health checked. The status is for metrics and logs.
func (a *attempt) recordTruncated(loggedStatus int, err error) {
	a.result.End = router.Truncated
	a.req.outcome.Code = loggedStatus
	if fault.IsRemoval(err) {
		a.req.proxy.log.Warn("response ended, backend removed", "backend", a.decision.Backend.Name, "request_id", a.req.inFlight.ID)
		return
	}
	a.result.Failed = true
	a.req.proxy.log.Warn("upstream closed the response early", "backend", a.decision.Backend.Name, "err", err, "request_id", a.req.inFlight.ID)
	a.req.proxy.recheckHealth(a.decision.Backend)
}

// relayResponse sends the response to the client, or returns the failure that it is. Until the response is known not to
// be another request's, as far as its id can tell, the connection is not reused.
func (a *attempt) relayResponse(resp *http.Response) *fault.Failure {
	body, ok := resp.Body.(relay.Body)
	if !ok {
		return a.classifyOrEndRequest(fmt.Errorf("the transport's body is a %T", resp.Body))
	}
	body.ForbidReuse()
	if f := a.checkResponseHeaderID(resp.Header); f != nil {
		return f
	}
	if f := fault.OfHeader(resp); f != nil {
		return f
	}
	if scope := a.req.input.stored.Scope; scope != "" && !httpheader.IsEncoded(resp.Header) {
		body = relay.RemoveScope(resp, body, scope)
	}
	if resp.StatusCode == http.StatusOK && httpheader.IsEventStream(resp.Header) {
		return a.relayStream(resp, body)
	}
	// A replica computes such a response before it writes any of it, so silence within it is not work.
	body.SetIdleTimeout(a.req.settings.Idle)
	switch resp.StatusCode {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		body.AllowReuse() // an error has no id
		return a.readErrorResponse(resp)
	}
	return a.relayWhole(resp, body)
}

// relayWhole relays a response that is not a stream, in the form that the client can still read.
func (a *attempt) relayWhole(resp *http.Response, body relay.Body) *fault.Failure {
	if a.req.headersSent {
		return a.relayErrorAsEvent(resp, body)
	}
	return a.relayBuffered(resp, body)
}

// recordCommittedResponse records that the client gets this response: earlier failures do not matter any more.
func (a *attempt) recordCommittedResponse(resp *http.Response) {
	a.req.history.replaceBest(nil, &a.req.proxy.buffers)
	a.req.inFlight.BeginResponding()
	a.req.outcome.Code = resp.StatusCode
	if a.kvTransfer != nil {
		a.req.splitResult = metrics.SplitDone
		a.req.proxy.router.RecordTransfer(a.kvTransfer.Prefill.Backend, a.decision.Backend, false)
	}
	a.req.outcome.MatchedBusy = a.decision.Reason == router.ReasonMatchedBusy
}

// beginAttemptContext makes the context of the next attempt, before the pick and whatever may take long before it.
func (r *request) beginAttemptContext() {
	c := &r.firstContext
	if c.Context != nil {
		c = new(upstream.Context)
	}
	s := r.settings
	charged, _ := r.history.countCharged()
	c.Begin(r.httpReq.Context(), upstream.ContextOptions{
		FirstByteTimeout: s.FirstByte,
		Streams:          r.input.request.Streams,
		RetryStalled:     s.Retry.Stalled,
		RetriesStall:     s.Retry.Stalled && charged+1 < s.Attempts,
		Relocated:        r.history.anyAttempt(func(r *attemptRecord) bool { return r.failure.Reason == metrics.RetryStalled }),
	})
	r.context, r.input.request.Stalls = c, c
	r.proxy.activity.BeginQueued(&r.inFlight, r.outcome.Model, r.keyName(), c.Cancel)
}

// commitAttempt ends the time in which another backend may be asked, and returns a failure if the attempt was ended before.
func (a *attempt) commitAttempt() *fault.Failure {
	a.decision.Commit()
	if err := a.req.context.Commit(); err != nil {
		return a.classifyOrEndRequest(err)
	}
	return nil
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

// setRequestIDHeader names the attempt in the header for the replica.
func (a *attempt) setRequestIDHeader() {
	a.token = a.req.proxy.tokens.SetRequestID(a.req.httpReq.Header, a.req.inFlight.ID)
}

// checkResponseHeaderID returns the failure of a response whose header names another attempt, else nil. vLLM repeats the
// header of the request with --enable-request-id-headers.
func (a *attempt) checkResponseHeaderID(h http.Header) *fault.Failure {
	for _, id := range h[upstream.RequestIDHeader] {
		if a.req.proxy.tokens.FindOtherAttempts(id, a.token) != nil {
			return a.recordWrongResponse()
		}
	}
	return nil
}

// checkBodyID is checkResponseHeaderID for a body, or the beginning of one.
func (a *attempt) checkBodyID(body []byte) *fault.Failure {
	return a.checkResponseID(relay.ReadBodyID(body[:min(len(body), upstream.MaxIDSearchBytes)]))
}

// checkResponseID is checkResponseHeaderID for the id of a response. Tokens that the client has sent as part of the response's
// id do not count: it has them from an earlier response. The request's input must not be released yet.
func (a *attempt) checkResponseID(id string) *fault.Failure {
	others := a.req.proxy.tokens.FindOtherAttempts(id, a.token)
	if others == nil {
		return nil
	}
	requested := a.req.input.requestedResponseID(a.req.endpoint)
	for _, token := range others {
		if !strings.Contains(requested, upstream.TokenMark+token) {
			return a.recordWrongResponse()
		}
	}
	return nil
}

// requestedResponseID returns the id that the client wants the response to have, or to begin or end with: that of the stored
// response which the request is about, or the request_id in the body. It is "" where replicas read neither.
func (in *input) requestedResponseID(e *api.Endpoint) string {
	switch {
	case e.IsAboutResponse():
		return in.stored.RefersTo
	case e.ReadsRequestID():
		return gjson.GetBytes(in.body, "request_id").Str
	}
	return ""
}

// recordWrongResponse counts and returns the failure of a response to another attempt.
func (a *attempt) recordWrongResponse() *fault.Failure {
	a.decision.Backend.WrongResponses.Add(1)
	return &fault.Failure{Reason: metrics.RetryWrongResponse, Err: upstream.ErrWrongResponse}
}
