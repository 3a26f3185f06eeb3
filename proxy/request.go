package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/metrics"
	"warmroute/proxy/apikey"
	"warmroute/proxy/recorder"
	"warmroute/proxy/tracing"
	"warmroute/router"
	"warmroute/router/prompt"
)

// request is one request and its answer.
type request struct {
	proxy          *Proxy
	settings       *Settings // of its arrival
	endpoint       *endpoint
	client         clientWriter
	httpReq        *http.Request
	id             string
	arrivedAt      time.Time // before the body was read
	bodyReceivedAt time.Time // the whole body was there

	input        input // freed as soon as no further attempt can need it
	history      history
	context      *attemptContext // of the attempt under way
	firstContext attemptContext  // of the first: no allocation of its own
	finished     bool            // counts in flight no more
	waiting      bool            // counted by the router among those that wait
	aborted      bool            // the client did not get its answer to the end
	headersSent  bool            // the client has the header of a stream, and keep-alive comments

	holder           *apikey.Holder // nil: no keys are configured
	lease            apikey.Visit   // its holder's
	query            string         // the client's, fit for replicas
	promptTokens     int            // of the prompt, as the key is charged; 0: no engine worked on it
	completionTokens int            // of the answer, as far as it came

	outcome   metrics.Request
	inFlight  inFlightEntry     // among those that operators see
	recording *recorder.Request // nil: traffic is not recorded, or not this request
	summary   summary
	spans     *tracing.Request // nil: requests are not traced
}

// input is what the client sent and what routing made of it.
type input struct {
	body    []byte
	scratch *scratch
	request router.Request
}

// scratch is memory that requests hand on to each other.
type scratch struct {
	prompt prompt.Prompt
	blocks []prompt.Block
}

// serveEndpoint takes one request from its arrival to its end. What stands on its stack
// while a stream is open, here and down to the relay, is kept small: a few hundred
// bytes more, and each stream has a stack of 16 KB instead of 8.
func (p *Proxy) serveEndpoint(e *endpoint, w http.ResponseWriter, r *http.Request) {
	x := p.newRequest(e, w, r)
	defer x.finish()
	if fault := x.admit(); fault != nil {
		if x.isCancelled() {
			fault = x.cutOffError()
		}
		x.sendError(fault)
		return
	}
	x.beginRecording()
	x.forward()
	if x.aborted {
		// Should the connection live after all, the server would end on it what is no
		// answer, or make an empty one.
		panic(http.ErrAbortHandler)
	}
}

func (p *Proxy) newRequest(e *endpoint, w http.ResponseWriter, r *http.Request) *request {
	s := p.settings.Load()
	x := &request{proxy: p, settings: s, endpoint: e, client: newClientWriter(w, r, s.WriteIdle), httpReq: r, arrivedAt: time.Now(), id: headerValue(r.Header, "X-Request-Id")}
	x.client.cancelled = &x.inFlight.cancelled
	x.outcome.Endpoint = e.path
	x.spans = p.traces.StartRequest(r, e.path, x.arrivedAt)
	p.inFlight.Add(1)
	p.activity.add(x)
	return x
}

// admit sees whether the request may come in, reads and understands it.
func (r *request) admit() *apiError {
	fault := r.proxy.checkLoop(r.httpReq.Header)
	if fault == nil {
		fault = r.checkLimits()
	}
	if fault == nil {
		fault = r.authenticate()
	}
	if fault == nil {
		fault = r.applyRoutingHints()
	}
	if fault == nil {
		fault = r.checkBatchLimit()
	}
	if fault == nil {
		fault = r.readInput()
	}
	if fault == nil {
		fault = r.chargePrompt()
	}
	return fault
}

// finish frees and records, whichever way the request ended.
func (r *request) finish() {
	r.releaseInput()
	r.endInFlight()
	now := time.Now()
	r.outcome.Duration = now.Sub(r.arrivedAt)
	r.proxy.metrics.RecordRequest(&r.outcome, r.id, now)
	r.proxy.activity.stats.countEnded(r.inFlight.backend, r.arrivedAt, &r.outcome, r.summary.cachedKnown)
	r.finishRecording()
	r.logRequest()
}

// endInFlight counts the request in flight no more, if that was not done before.
func (r *request) endInFlight() {
	if r.finished {
		return
	}
	r.finished = true
	r.proxy.inFlight.Add(-1)
	r.proxy.activity.remove(&r.inFlight)
	r.clearCancelDeadline()
	r.lease.End(r.promptTokens, r.completionTokens)
}

func (r *request) releaseInput() {
	in := &r.input
	r.proxy.bodies.release(in.body)
	if in.scratch != nil {
		in.scratch.prompt.Reset() // what one huge prompt needed must not stay for good
		r.proxy.scratch.Put(in.scratch)
	}
	*in = input{}
}

// sendError answers with an error of ours.
func (r *request) sendError(e *apiError) {
	r.outcome.Code = e.status
	if r.headersSent {
		r.client.writeAndFlush(r.endpoint.format.errorEvent(e))
		return
	}
	r.addErrorHeaders()
	if !r.bodyReceivedAt.IsZero() {
		r.endpoint.dialect().writeError(&r.client, e)
		return
	}
	r.sendErrorUnread(e)
}

// readInput reads and understands the request.
func (r *request) readInput() *apiError {
	var err error
	upload := throttledReader{body: r.httpReq.Body, conn: &r.client.conn, idleTimeout: r.settings.BodyIdle, startedAt: r.arrivedAt, cancelled: &r.inFlight.cancelled}
	r.proxy.activity.beginBody(&r.inFlight)
	r.input.body, err = r.proxy.bodies.read(&upload, r.httpReq.ContentLength, bodyLimits{r.settings.BodyBytes, r.limitForPriority(r.settings.BodyBytesTotal)})
	cut := r.proxy.activity.endBody(&r.inFlight)
	upload.clearDeadline()
	if err != nil || cut {
		return r.bodyError(err)
	}
	r.bodyReceivedAt = time.Now()
	r.summary.bytesIn = len(r.input.body)
	_ = r.httpReq.Body.Close() // or net/http would look for more of it, in vain, with the answer's header
	return r.parseInput()
}

// parseInput makes of the client's body what routing needs.
func (r *request) parseInput() *apiError {
	r.input.scratch = r.proxy.scratch.Get().(*scratch)
	if r.endpoint.multipart {
		return r.parseForm()
	}
	return r.parseJSON()
}

// bodyError is what a body that could not be read is answered with.
func (r *request) bodyError(err error) *apiError {
	r.client.Header().Set("Connection", "close") // the rest of it is not read
	var socket *net.OpError
	switch {
	case r.isCancelled():
		return r.cutOffError()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &apiError{status: http.StatusRequestTimeout, kind: "timeout", code: "body_timeout",
			message: "the rest of the request body did not come (timeouts.body_idle)"}
	case errors.Is(err, errBodyTooLarge):
		return &apiError{status: http.StatusRequestEntityTooLarge, kind: "invalid_request_error", code: "body_too_large",
			message: bodyTooLargeMessage(r.settings.BodyBytes)}
	case errors.Is(err, errBodyMemory):
		e := unavailableError("the bodies of the requests under way take all the memory that they may (limits.body_bytes_total)")
		e.code = "bodies_too_large"
		return e
	// The client is gone, where one whose body ends too soon may still read: over HTTP/1.1 it has closed its half.
	case errors.As(err, &socket), r.httpReq.ProtoMajor > 1 && r.isDisconnected():
		r.summary.phase = metrics.AbortInUpload
		r.proxy.metrics.CountAbort(metrics.AbortInUpload)
		return &apiError{status: statusClientClosed, kind: "client_left", message: "the client left"}
	}
	return invalidRequestError("", "the request body ended before its end: "+err.Error())
}

func (r *request) parseJSON() *apiError {
	in := &r.input
	pr := &in.scratch.prompt
	if err := pr.Parse(r.endpoint.promptKind, in.body); err != nil {
		var fault *prompt.Error
		if errors.As(err, &fault) {
			return invalidRequestError(fault.Param, fault.Message)
		}
		return invalidRequestError("", err.Error())
	}
	if pr.PreviousResponse {
		return invalidRequestError("previous_response_id",
			"previous_response_id cannot be routed: the earlier response lives in one replica's memory; send the whole conversation as input instead")
	}
	engine, fault := r.resolveModel(pr.Model)
	if fault != nil {
		return fault
	}
	engine = r.blockSeed(engine)
	if pr.Cacheable && r.endpoint.promptKind != prompt.Other {
		in.scratch.blocks = pr.Blocks(in.scratch.blocks[:0], engine, r.proxy.blockBytes)
		in.request.Blocks = in.scratch.blocks
	}
	if in.request.NoEngine = r.endpoint.noEngine; !in.request.NoEngine {
		in.request.Bytes = len(pr.Text) + pr.ExtraBytes
		in.request.Streams = pr.Stream
	}
	in.request.Sequences = pr.Sequences
	in.request.Media = pr.HasMedia()
	in.request.MaxAnswerTokens = pr.MaxTokens
	in.request.BodyBytes = cap(in.body) + len(pr.Text) + 8*len(in.request.Blocks)
	if pr.Opening != 0 {
		in.request.PromptKey = nonzero(xxh3.HashStringSeed(engine, pr.Opening))
	}
	return nil
}

// resolveModel finds the backends that serve the model, and the name that seeds its
// prompts' blocks.
func (r *request) resolveModel(model string) (engine string, fault *apiError) {
	catalog := r.proxy.registry.Catalog()
	if model == "" {
		if model, fault = r.defaultModel(catalog); fault != nil {
			return "", fault
		}
	}
	entry, ok := findModel(catalog, model, r.holder)
	if !ok {
		return "", r.proxy.unknownModel(model, r.holder)
	}
	r.outcome.Model = entry.ID
	req := &r.input.request
	req.Backends, req.CatalogID = entry.Backends, entry.ID
	req.NonGenerative = r.endpoint.format == plainFormat
	if entry.Adapter {
		req.Adapter = entry.ID
	}
	req.Model = catalog.EngineModel(entry.ID)
	req.MaxPromptTokens = catalog.MaxTokens(entry.ID)
	return req.Model, nil
}

const (
	// lingerTimeout is for the rest of a body that nobody wants: some of it is read, to
	// use the connection again or to close it in order.
	lingerTimeout = 2 * time.Second
	// maxLingerBytes is how much of it is read at most.
	maxLingerBytes = 64 << 20
)

// setLingerDeadline leaves the client that long.
func (c *clientWriter) setLingerDeadline() { _ = c.conn.SetReadDeadline(time.Now().Add(lingerTimeout)) }

// maxLingering is how many refused requests may do that at once. They count in
// flight no more, or some hundred a second that nobody lets in would keep everybody
// out; those beyond it are closed at once, and may miss why.
const maxLingering = 1000

// sendErrorUnread answers a request whose body was not read to its end.
func (r *request) sendErrorUnread(e *apiError) {
	r.releaseInput()
	r.endInFlight()
	defer r.proxy.lingering.Add(-1)
	if r.proxy.lingering.Add(1) > maxLingering {
		_ = r.client.conn.SetReadDeadline(time.Now())
	} else {
		r.client.setLingerDeadline()
	}
	r.endpoint.dialect().writeError(&r.client, e)
	if r.httpReq.ProtoMajor > 1 {
		return
	}
	_ = r.client.conn.Flush() // net/http waits for the body here, where the client may send another request after it
	// A connection that is closed with bytes still to be read is reset: the client
	// might never see the answer.
	_, _ = io.CopyN(io.Discard, r.httpReq.Body, maxLingerBytes)
}

// interactiveShare is one part in so many of limits.in_flight and of
// limits.body_bytes_total that batch requests leave to interactive ones.
const interactiveShare = 10

// limitForPriority returns how much of a limit on all requests together the request
// may use.
func (r *request) limitForPriority(limit int64) int64 {
	if r.input.request.Priority > 0 {
		return limit - limit/interactiveShare
	}
	return limit
}

// checkBatchLimit refuses a batch request before its body is read, when such
// requests have their part of limits.in_flight.
func (r *request) checkBatchLimit() *apiError {
	if r.proxy.inFlight.Load() > r.limitForPriority(int64(r.settings.InFlight)) {
		return tooManyInFlightError()
	}
	return nil
}

func tooManyInFlightError() *apiError {
	e := unavailableError("as many requests as this proxy takes are in flight (limits.in_flight; batch requests leave a tenth of it to others)")
	e.kind, e.code = "overloaded", "too_many_requests"
	return e
}

// checkLimits refuses what is too much before any of its body is read.
func (r *request) checkLimits() *apiError {
	if most := r.settings.InFlight; r.proxy.inFlight.Load() > int64(most) {
		return tooManyInFlightError()
	}
	if int64(len(r.httpReq.URL.RawQuery)) > r.settings.QueryBytes {
		return &apiError{status: http.StatusRequestURITooLong, kind: "invalid_request_error", code: "query_too_long",
			message: "the query is longer than this proxy takes (limits.query_bytes)"}
	}
	return nil
}

// ErrCutOff is the cause with which the contexts of requests are cancelled that
// took longer than a proxy waits at its end. Their clients get to know.
var ErrCutOff = errors.New("the proxy ended before the answer did (timeouts.shutdown)")

// FailReadiness makes /readyz and /health fail from now on. All else is served as before.
func (p *Proxy) FailReadiness() { p.unready.Store(true) }

func shuttingDownError() *apiError {
	e := unavailableError("this proxy is shutting down; try again")
	e.code = "shutting_down"
	return e
}

// isCancelled reports whether an operator has ended the request.
func (r *request) isCancelled() bool { return r.inFlight.cancelled.Load() }

// isCutOff reports whether the request was ended by the end of the proxy, or by an
// operator.
func (r *request) isCutOff() bool {
	return r.isCancelled() || context.Cause(r.httpReq.Context()) == ErrCutOff
}

// isDone reports whether nobody waits for an answer any more.
func (r *request) isDone() bool { return r.isCancelled() || r.httpReq.Context().Err() != nil }

// isDisconnected reports whether the request was ended by its client.
func (r *request) isDisconnected() bool { return r.isDone() && !r.isCutOff() }

// cutOffError is what a client is told whose request was cut off.
func (r *request) cutOffError() *apiError {
	if !r.isCancelled() {
		return shuttingDownError()
	}
	if r.summary.phase != metrics.AbortCancelled {
		r.summary.phase = metrics.AbortCancelled
		r.proxy.metrics.CountAbort(metrics.AbortCancelled)
	}
	r.client.cancelled, r.client.writeTimeout, r.client.deadline = nil, cancelGrace, time.Time{}
	// Not a 5xx, which clients would send again.
	return &apiError{status: http.StatusForbidden, kind: "cancelled", code: "cancelled", message: "an operator of this proxy has cancelled the request"}
}

// clearCancelDeadline lifts the deadline that a cancelled request's client had, where
// the next answer on the connection sets none of its own.
func (r *request) clearCancelDeadline() {
	if r.isCancelled() && r.settings.WriteIdle == 0 {
		_ = r.client.conn.SetWriteDeadline(time.Time{})
	}
}
