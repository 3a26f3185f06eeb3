package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/proxy/activity"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/clientconn"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/relay"
	"warmroute/proxy/stored"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// request is one request of a client, from its arrival to the end of its response.
type request struct {
	proxy          *Proxy
	settings       *Settings // as of its arrival
	endpoint       *api.Endpoint
	client         relay.ClientWriter
	httpReq        *http.Request
	clientAddress  netip.Addr // as trusted proxies state it
	bodyReceivedAt time.Time  // zero: not yet

	input          input // released as soon as no further attempt can need it
	history        history
	context        *upstream.Context // of the current attempt
	firstContext   upstream.Context  // of the first, which needs no allocation of its own
	tenant         admit.Tenant
	counted        bool // among the requests of tenant
	finished       bool // it is not counted in flight any more
	place          waitingPlace
	isIncomplete   bool // the client did not get all of the response
	headersSent    bool // the client has the header of a stream
	queueKeepalive queueKeepalive
	inFlight       activity.Request // what operators see of it
	lifetime       lifetime

	named      namedModel
	background *backgroundAttempt // whose response its replica generates after it has responded; nil: none

	caller
	summary
}

// input is what the client sent and what routing made of it.
type input struct {
	query   string // of the URL, without keys
	body    []byte
	scratch *scratch // nil: nothing was parsed
	stored  stored.Input
	request router.Request

	membersAt         int  // index in the body at which a member can be inserted, if it may be split
	hasThinkingBudget bool // some replicas refuse the body of its prefill request

	sessionHeader      []string // of the client, for replicas that do not publish KV events
	extraBytes         int      // of request.Bytes, not in the canonical prompt
	isPlain            bool     // the replica counts what is in the canonical prompt, no more and no less
	conversationSource string   // the header or the body's field that names the session; "": none
}

// scratch is what a request keeps of its prompt, in memory that requests pass on to each other.
type scratch struct {
	blocks        []prompt.Block
	media         []prompt.MediaPosition
	responseStart prompt.ResponseStart
	prefillEdits  []prompt.Edit // of the body of the prefill request, if it may be split
}

// maxPooledBlocks bounds the blocks of a scratch that is passed on: a prompt of 2 MiB.
const maxPooledBlocks = 8 << 10

// serveEndpoint serves one request. Its stack while a stream is open, here and down to the relay, is kept small:
// a few hundred bytes more would double it to 16 KB.
func (p *Proxy) serveEndpoint(e *api.Endpoint, responseID string, w http.ResponseWriter, r *http.Request) {
	x := p.beginRequest(e, w, r)
	x.input.stored.RefersTo = responseID
	defer func() {
		if x.background == nil {
			x.finish()
			return
		}
		x.releaseInput()
		p.activity.BeginBackground(&x.inFlight, x.background.context.Cancel)
		p.background.start(p.panics, x.background.follow)
	}()
	if apiErr := x.admit(); apiErr != nil {
		if x.lifetime.isCancelled() {
			apiErr = x.recordProxyEnd()
		}
		x.sendError(apiErr)
		return
	}
	x.beginRecording(p.recorder, e, x.inFlight.Arrived, &x.input)
	x.forward()
	if x.isIncomplete {
		panic(http.ErrAbortHandler) // else the server would end the response as if it were complete
	}
}

// beginRequest returns a new request, which is counted and listed in flight until its finish.
func (p *Proxy) beginRequest(e *api.Endpoint, w http.ResponseWriter, r *http.Request) *request {
	s := p.settings.Load()
	x := &request{
		proxy: p, settings: s, endpoint: e, client: relay.NewClientWriter(w, r, s.WriteIdle),
		httpReq: r,
	}
	x.inFlight.ID, x.inFlight.Arrived = httpheader.First(r.Header, upstream.RequestIDHeader), time.Now()
	x.inFlight.Endpoint, x.inFlight.Conn = e.Path, &x.client.Conn
	x.client.Cancellable = &x.inFlight
	x.lifetime = lifetime{r.Context(), &x.inFlight}
	x.outcome.Endpoint = e.Path
	x.clientAddress = admit.ClientAddress(r.RemoteAddr, r.Header["X-Forwarded-For"], s.TrustedProxies)
	x.spans = p.tracer.StartRequest(r, e.Path, x.clientAddress, x.inFlight.Arrived)
	p.inFlight.Add(1)
	p.activity.Add(&x.inFlight)
	return x
}

// admit authenticates the request, reads its body and parses it. It returns the error to send,
// or nil.
func (r *request) admit() *fault.Error {
	if apiErr := r.proxy.instance.CheckLoop(r.httpReq.Header); apiErr != nil {
		return apiErr
	}
	for _, step := range [...]func(*request) *fault.Error{
		(*request).authenticate,
		(*request).checkInFlightLimit,
		func(r *request) *fault.Error { return r.settings.checkQueryLength(r.httpReq.URL) },
		func(r *request) *fault.Error { return r.acquireLease(r.client.Header()) },
		func(r *request) *fault.Error { return checkContentEncoding(r.httpReq.Header, r.client.Header()) },
		(*request).applyRoutingHints,
		(*request).checkInFlightLimit, // the priority is known now
		(*request).readAndParseInput,
		func(r *request) *fault.Error { return r.chargePrompt(r.endpoint, &r.input, r.client.Header()) },
		(*request).routeToStoredResponse,
	} {
		if apiErr := step(r); apiErr != nil {
			return apiErr
		}
	}
	return nil
}

// finish releases what the request holds and records it, however it ended.
func (r *request) finish() {
	r.releaseInput()
	r.endInFlight()
	now := time.Now()
	r.outcome.Duration = now.Sub(r.inFlight.Arrived)
	r.proxy.metrics.RecordRequest(&r.outcome, r.inFlight.ID, now)
	r.proxy.metrics.CountSplit(r.splitResult)
	r.proxy.activity.CountEnded(&r.inFlight, &r.outcome)
	r.recordKeyUsage(now)
	r.finishRecording(r.proxy.recorder)
	r.endTraceAndRecord()
}

// endInFlight ends what beginRequest and admit have begun. A second call does nothing.
func (r *request) endInFlight() {
	if r.finished {
		return
	}
	r.finished = true
	r.proxy.inFlight.Add(-1)
	r.proxy.activity.Remove(&r.inFlight)
	if r.lifetime.isCancelled() && r.settings.WriteIdle == 0 && r.background == nil { // then the next response sets no write deadline
		_ = r.client.Conn.SetWriteDeadline(time.Time{})
	}
	r.lease.Release(r.promptTokens, r.completionTokens)
	if r.counted {
		r.proxy.tenants.EndRequest(r.tenant)
	}
}

// releaseInput frees the memory of the request's body and prompt.
func (r *request) releaseInput() {
	in := &r.input
	r.proxy.bodies.ReleaseBuffer(in.body, r.tenant)
	if in.scratch != nil {
		in.scratch.responseStart.Reset()
		if cap(in.scratch.blocks) > maxPooledBlocks {
			in.scratch.blocks = nil
		}
		r.proxy.pools.scratch.Put(in.scratch)
	}
	*in = input{}
}

// sendError sends an error of the proxy's own: as an event to a client that has the header of a stream.
func (r *request) sendError(e *fault.Error) {
	r.outcome.Code = e.Status
	if r.headersSent {
		r.client.WriteAndFlush(fault.Event(r.endpoint.Format, e, 0))
		return
	}
	r.addErrorRouteHeaders()
	if r.bodyReceivedAt.IsZero() {
		r.sendErrorAndDiscardBody(e)
	} else {
		fault.Write(&r.client, r.endpoint.Dialect(), e)
	}
}

// readAndParseInput reads the body and parses it.
func (r *request) readAndParseInput() *fault.Error {
	limit := r.input.limitForPriority(int64(r.settings.InFlight))
	err := r.proxy.tenants.BeginUpload(r.tenant, r.proxy.inFlight.Load(), limit)
	if err != nil {
		return uploadShareError(r.tenant)
	}
	r.counted = true
	upload := admit.NewBodyReader(r.httpReq.Body, r.settings.BodyIdle, &r.inFlight)
	limits := admit.BodyLimits{Each: r.settings.BodyBytes, Total: r.input.limitForPriority(r.settings.BodyBytesTotal)}
	r.proxy.activity.BeginUpload(&r.inFlight)
	r.input.body, err = r.proxy.bodies.ReadBody(&upload, r.httpReq.ContentLength, r.tenant, limits)
	r.proxy.tenants.EndUpload(r.tenant)
	cancelled := r.proxy.activity.EndUpload(&r.inFlight)
	upload.ClearReadDeadline()
	if err != nil || cancelled {
		return r.recordUploadError(err)
	}
	r.bodyReceivedAt = time.Now()
	r.bytesIn = len(r.input.body)
	_ = r.httpReq.Body.Close() // or net/http would look for more of it before it writes the response's header
	return r.parseInput()
}

// tenantAt returns whom the request of a client with that address is charged to.
func (c *caller) tenantAt(address netip.Addr) admit.Tenant {
	if c.account != nil {
		return admit.Tenant{Key: c.account.Name}
	}
	return admit.Tenant{Network: admit.ClientNetwork(address)}
}

// maxParsedBytes bounds the bodies that are parsed at a time, since each takes several times its size then. Those
// up to minCountedBody do not count: they are parsed in a few milliseconds.
const (
	maxParsedBytes = 8 << 20
	minCountedBody = 1 << 20
)

// parseInput extracts what routing needs from the body.
func (r *request) parseInput() *fault.Error {
	if r.input.scratch == nil {
		r.input.scratch = r.proxy.pools.scratch.Get().(*scratch)
	}
	if n := int64(len(r.input.body)); n > minCountedBody {
		n = min(n, maxParsedBytes)
		if err := r.proxy.parsing.Acquire(r.httpReq.Context(), n); err != nil {
			return r.recordEndInUpload()
		}
		defer r.proxy.parsing.Release(n)
	}
	pr := r.proxy.pools.prompts.Get().(*prompt.Prompt)
	defer func() {
		pr.Reset() // frees the memory of a huge prompt
		r.proxy.pools.prompts.Put(pr)
	}()
	if r.endpoint.Multipart {
		return r.parseFormAndSelectModel(pr)
	}
	if r.endpoint.IsAboutResponse() {
		req := &r.input.request
		req.NoEngine, req.Backends, req.Endpoint = true, r.proxy.registry.All(), r.endpoint.Number
		if len(r.input.body) > 0 {
			if apiErr := r.parseBody(pr, prompt.Other); apiErr != nil {
				return apiErr
			}
		}
	} else if apiErr := r.parseJSON(pr); apiErr != nil {
		return apiErr
	}
	s := &r.input.stored
	if r.account != nil && (s.RefersTo != "" || s.RefersToAt > 0 || s.ChosenIDAt > 0) {
		s.Scope = stored.ScopeOf(r.account.Name)
	}
	return nil
}

// recordUploadError returns the error for a body that could not be read, and counts a client disconnect. The
// connection is closed after the response.
func (r *request) recordUploadError(err error) *fault.Error {
	r.client.Header().Set("Connection", "close") // the rest of the body is not read
	var socket *net.OpError
	switch {
	case r.lifetime.isCancelled():
		return r.recordProxyEnd()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fault.New(http.StatusRequestTimeout, fault.CodeBodyTimeout,
			"the rest of the request body did not arrive in time: each timeouts.body_idle needs 1 KiB per second of it")
	// One whose body ends too soon may still read: over HTTP/1.1 it has closed its half.
	case errors.As(err, &socket), r.httpReq.ProtoMajor > 1 && r.lifetime.isDisconnected():
		return r.recordEndInUpload()
	}
	return cmp.Or(bodyLimitError(err, r.settings.BodyBytes, r.tenant), fault.InvalidRequest("", "the request body is incomplete: "+
		err.Error()))
}

// bodyLimitError returns the error for a body beyond a limit, or nil if err is another one.
func bodyLimitError(err error, limit int64, t admit.Tenant) *fault.Error {
	e := fault.Unavailable(fault.CodeBodiesTooLarge, "")
	switch {
	case err == admit.ErrBodyTooLarge:
		return fault.New(http.StatusRequestEntityTooLarge, fault.CodeBodyTooLarge,
			"the request body exceeds the limit of "+formatBytes(limit)+" (limits.body_bytes)")
	case err == admit.ErrBodyMemory:
		e.Message = "the request bodies in memory have reached the limit (limits.body_bytes_total); try again"
	case err == admit.ErrBodyShare:
		e.Message = "the request bodies of this " + t.Kind() + " in memory have reached its share while others send requests, " +
			"a quarter of limits.body_bytes_total; try again when one of its requests has ended"
	default:
		return nil
	}
	return e
}

// formatBytes formats n in the largest binary unit that divides it.
func formatBytes(n int64) string {
	switch {
	case n%(1<<30) == 0:
		return strconv.FormatInt(n>>30, 10) + " GiB"
	case n%(1<<20) == 0:
		return strconv.FormatInt(n>>20, 10) + " MiB"
	case n%(1<<10) == 0:
		return strconv.FormatInt(n>>10, 10) + " KiB"
	}
	return strconv.FormatInt(n, 10) + " bytes"
}

// recordEndInUpload returns the error for a request that ended before it was parsed, and counts a disconnect.
func (r *request) recordEndInUpload() *fault.Error {
	if r.lifetime.isEndedByProxy() {
		return r.recordProxyEnd()
	}
	r.disconnected = metrics.DisconnectInUpload
	r.proxy.metrics.CountDisconnect(metrics.DisconnectInUpload)
	return fault.New(metrics.StatusClientClosed, "", "client disconnected")
}

func (r *request) parseBody(pr *prompt.Prompt, kind prompt.Kind) *fault.Error {
	if err := pr.Parse(kind, r.input.body); err != nil {
		var apiErr *prompt.Error
		if !errors.As(err, &apiErr) {
			apiErr = &prompt.Error{Message: err.Error()}
		}
		if kind, _, err := mime.ParseMediaType(httpheader.First(r.httpReq.Header, "Content-Type")); err == nil && apiErr.Param == "" &&
			isNoJSONType(kind) {
			return fault.InvalidRequest("", fmt.Sprintf("the request body is not JSON, but %s: %s takes JSON only", kind, r.endpoint.Path))
		}
		return fault.InvalidRequest(apiErr.Param, apiErr.Message)
	}
	return r.settings.checkTransferParams(pr)
}

// isNoJSONType reports whether a media type is that of bodies which cannot be JSON, unlike types that clients send by mistake.
func isNoJSONType(mediaType string) bool {
	kind, _, _ := strings.Cut(mediaType, "/")
	return kind == "multipart" || kind == "audio" || kind == "image" || kind == "video"
}

// parseJSON parses a JSON body into pr. Of the canonical prompt it keeps the blocks and the end.
func (r *request) parseJSON(pr *prompt.Prompt) *fault.Error {
	in := &r.input
	if apiErr := r.parseBody(pr, r.endpoint.PromptKind); apiErr != nil {
		return apiErr
	}
	model, apiErr := r.resolveModel(pr, pr.Model)
	if apiErr != nil {
		return apiErr
	}
	engine, apiErr := r.setModelBackends(model)
	if apiErr != nil {
		return apiErr
	}
	pr.ApplyLayout(r.proxy.router.PromptLayout(in.request.Model))
	in.request.Forks = pr.Forks()
	engine = r.blockSeed(engine, r.settings.IsolateTenants, r.httpReq.Header)
	if pr.Cacheable && r.endpoint.PromptKind != prompt.Other {
		in.scratch.blocks = pr.AppendBlocks(in.scratch.blocks[:0], engine, r.proxy.blockBytes)
		in.request.Blocks = in.scratch.blocks
	}
	in.stored = stored.Input{
		RefersTo: pr.PreviousResponse, RefersToAt: pr.PreviousResponseAt, ChosenID: pr.ResponseID, ChosenIDAt: pr.ResponseIDAt,
		Unstored: pr.NoStore,
	}
	if in.request.NoEngine = r.endpoint.NoEngine; !in.request.NoEngine {
		in.request.Bytes = len(pr.Text) + pr.ExtraBytes
		in.request.Streams = pr.Stream
		in.request.Turn = pr.TurnKind()
	}
	if in.request.Conversation == 0 { // no header has named one
		in.request.Conversation, in.conversationSource = pr.Conversation, pr.ConversationField
	}
	in.request.Sequences = pr.Sequences
	if in.request.Splittable = pr.Splittable() && !in.stored.Refers() && !in.request.NoEngine; in.request.Splittable {
		in.scratch.prefillEdits = pr.AppendPrefillEdits(in.scratch.prefillEdits[:0])
		in.membersAt, in.hasThinkingBudget = pr.MembersAt(), pr.HasThinkingBudget()
	}
	in.scratch.media = pr.AppendMediaPositions(in.scratch.media[:0])
	in.request.Media, in.request.MediaItems = pr.HasMedia(), in.scratch.media
	in.request.TextClass = pr.TextClass(in.scratch.media)
	in.request.MaxOutputTokens, in.request.Truncates = pr.MaxTokens, pr.Truncates
	in.request.BodyBytes = cap(in.body) + 8*len(in.request.Blocks)
	in.extraBytes = pr.ExtraBytes
	in.isPlain = pr.Cacheable && pr.Sequences <= 1 && pr.ExtraBytes == 0 && !pr.HasMedia()
	in.scratch.responseStart.SetFrom(pr)
	if pr.FirstMessageHash != 0 {
		in.request.PromptKey = admit.NonzeroHash(xxh3.HashStringSeed(engine, pr.FirstMessageHash))
	}
	return nil
}

const (
	// maxLingering is how many refused requests may have the rest of their bodies read at once. They do not count as in flight, or some
	// hundred unauthenticated ones a second would lock out all others.
	maxLingering = 1000
	// One part in interactiveShare of limits.in_flight and limits.body_bytes_total is not for low-priority requests.
	interactiveShare = 10
)

// sendErrorAndDiscardBody sends an error, and reads the rest of the body for at most clientconn.LingerTimeout.
func (r *request) sendErrorAndDiscardBody(e *fault.Error) {
	r.releaseInput()
	r.endInFlight()
	defer r.proxy.lingering.Add(-1)
	if r.proxy.lingering.Add(1) > maxLingering {
		_ = r.client.Conn.SetReadDeadline(time.Now())
	} else {
		r.client.SetLingerReadDeadline()
	}
	fault.Write(&r.client, r.endpoint.Dialect(), e)
	if r.httpReq.ProtoMajor > 1 {
		return
	}
	_ = r.client.Conn.Flush() // net/http would wait for the body first, where the client may send another request after it
	// A connection that is closed with unread bytes is reset, and the client might never see the response.
	_, _ = io.CopyN(io.Discard, r.httpReq.Body, clientconn.MaxLingerBytes)
}

// limitForPriority returns how much of a limit on all requests the request may use.
func (in *input) limitForPriority(limit int64) int64 {
	if in.request.Priority > 0 {
		return limit - limit/interactiveShare
	}
	return limit
}

// checkInFlightLimit refuses a request beyond limits.in_flight, or the part of it that its priority may
// use, before its body is read.
func (r *request) checkInFlightLimit() *fault.Error {
	if r.proxy.inFlight.Load() <= r.input.limitForPriority(int64(r.settings.InFlight)) {
		return nil
	}
	r.proxy.tenants.RecordRefusal(r.tenant)
	return tooManyRequestsError(
		"too many requests in flight (limits.in_flight, of which low-priority requests may use nine tenths); try again")
}

func tooManyRequestsError(message string) *fault.Error {
	e := fault.Unavailable(fault.CodeTooManyRequests, message)
	e.Kind = "overloaded"
	return e
}

// uploadShareError returns the error for a request beyond the share of its tenant of those whose bodies are incomplete.
func uploadShareError(t admit.Tenant) *fault.Error {
	return tooManyRequestsError("too many requests of this " + t.Kind() + " have an incomplete body: while others send requests, " +
		"they may be a quarter of limits.in_flight; send each body at once, and try again")
}

func (s *Settings) checkQueryLength(u *url.URL) *fault.Error {
	if int64(len(u.RawQuery)) > s.QueryBytes {
		return fault.New(http.StatusRequestURITooLong, fault.CodeQueryTooLong, "the query of the URL is too long (limits.query_bytes)")
	}
	return nil
}

// checkContentEncoding refuses a compressed body: routing needs its text, and replicas read none.
func checkContentEncoding(from, response http.Header) *fault.Error {
	if !httpheader.IsEncoded(from) {
		return nil
	}
	response["Accept-Encoding"] = upstream.IdentityEncoding
	return contentEncodingError()
}

func contentEncodingError() *fault.Error {
	return fault.New(http.StatusUnsupportedMediaType, fault.CodeUnsupportedEncoding,
		"the request body is compressed (Content-Encoding), which is not supported: send it uncompressed and without that header")
}

// ErrShutdown is the cause with which the contexts of requests that are in flight after
// timeouts.shutdown are cancelled. Their clients get an error that says so.
var ErrShutdown = errors.New("proxy ended before the response was complete (timeouts.shutdown)")

// FailReadiness makes /readyz and /health fail from now on. Requests are served as before.
func (p *Proxy) FailReadiness() { p.unready.Store(true) }

// lifetime tells whether a request was ended before its response was complete.
type lifetime struct {
	ctx      context.Context // of the request: done when its client disconnects
	inFlight *activity.Request
}

// isCancelled reports whether an operator has cancelled the request.
func (l *lifetime) isCancelled() bool { return l.inFlight.IsCancelled() }

// isEndedByProxy reports whether an operator or the shutdown of the proxy has ended the request.
func (l *lifetime) isEndedByProxy() bool {
	return l.isCancelled() || context.Cause(l.ctx) == ErrShutdown
}

// isDone reports whether the request was ended by its client or the proxy.
func (l *lifetime) isDone() bool { return l.isCancelled() || l.ctx.Err() != nil }

func (l *lifetime) isDisconnected() bool { return l.isDone() && !l.isEndedByProxy() }

// recordCancel counts the request, once, as cancelled by an operator.
func (r *request) recordCancel() {
	if !r.cancelled {
		r.cancelled, r.disconnected = true, ""
		r.proxy.metrics.CountCancel()
	}
}

// recordProxyEnd returns the error for a request that an operator or the shutdown has ended. A
// cancelled one is counted, and its client has activity.CancelGrace to read the error.
func (r *request) recordProxyEnd() *fault.Error {
	if !r.lifetime.isCancelled() {
		return fault.ShuttingDown()
	}
	r.recordCancel()
	r.client.Cancellable, r.client.WriteTimeout, r.client.Deadline = nil, activity.CancelGrace, time.Time{}
	// Not a 5xx, which clients would retry.
	return fault.New(http.StatusForbidden, fault.CodeCancelled, "an operator has cancelled the request")
}

// allowsTransferParams reports whether clients may send, and get, parameters of KV transfers.
func (s *Settings) allowsTransferParams() bool {
	return s.KVTransferParams == AllowTransferParams
}

// checkTransferParams refuses a body in which pr found parameters of KV transfers. With them a client can have a replica connect to any
// host, read the KV cache of another tenant's prompts, and end the replica's process.
func (s *Settings) checkTransferParams(pr *prompt.Prompt) *fault.Error {
	if pr.TransferParams == "" || s.allowsTransferParams() {
		return nil
	}
	return fault.InvalidRequest(pr.TransferParams,
		pr.TransferParams+" is not accepted from clients: remove it from the request (limits.kv_transfer_params)")
}
