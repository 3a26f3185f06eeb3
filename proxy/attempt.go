package proxy

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
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
	reason  metrics.RetryReason
	err     error
	free    bool // counts as no attempt: nothing was sent, or no engine was asked
	final   bool // no other backend may be asked
	timeout bool
	stuck   bool // the backend did nothing, and another was to be asked
	full    bool // the replica refused the request with a 503
	deadly  bool // the replica may have died of the request
	stops   bool // the replica ends in good order, and has dropped the request
	loop    bool // the backend is a proxy which found that the request had passed it
	stale   bool // the connection was; no sign of a fault of the backend
	starved bool // this process had no file descriptor left to connect with
	left    bool // the client is gone, or has its answer: nothing is left to be done

	// What the replica answered, if it did; what its decision was then.
	status   int
	header   http.Header
	body     []byte
	charged  int64 // of body, to heldWhole
	decision *router.Decision
}

var (
	errFirstByte = errors.New("no first event in time")
	errResponse  = errors.New("no response, and no progress of the replica, in time")
	errStuck     = errors.New("the replica does nothing")
)

// statusClientLeft is what metrics and logs show for a client that left.
const statusClientLeft = 499

// attempt is one try at one backend. Its result is what the decision is released
// with.
type attempt struct {
	*exchange
	decision *router.Decision
	fault    string        // why it failed; empty: it has not
	unread   int           // tokens of an answer whose account was not found, by its length
	reply    *prompt.Reply // what the next turn will hold of the answer; nil: not known
	gaps     gaps          // between the chunks of a stream
	result   router.Outcome
}

// attempt sends the request to the chosen backend and relays its answer. It
// returns nil when the client has its answer, or as much as there was. The
// decision is released here, once, on every path.
func (x *exchange) attempt(d *router.Decision) *failure {
	a := &attempt{exchange: x, decision: d, result: router.Outcome{End: router.NotProcessed}}
	defer x.wait.end() // after the release: from then on the router ends it no more
	defer a.release()
	switch s := x.settings; {
	case x.input.request.Streams && s.FirstByte > 0:
		x.wait.limit(s.FirstByte)
	case !x.input.request.Streams && s.Response > 0:
		x.wait.limitSilence(d, s.Response)
	}
	x.outcome.Backend = d.Backend.Name
	if x.attempts++; x.attempts == 1 {
		x.outcome.Overhead = time.Since(x.whole) - x.held
	}
	x.p.present.sent(x, d)
	x.tellAttempt(d)
	resp, err := x.send(x.wait, d.Backend)
	if err != nil {
		return a.blame(a.failed(err))
	}
	defer resp.Body.Close()
	x.spans.Answered(resp.StatusCode)
	return a.blame(a.answer(resp))
}

// blame notes what a failed attempt says of the backend. What another backend
// has failed as well may be the request's own fault.
func (a *attempt) blame(f *failure) *failure {
	if f == nil || f.left {
		return f
	}
	a.fault = string(f.reason)
	var connect *transport.ConnectError
	a.result.Stalled, a.result.QueueFull, a.result.Stopping = f.stuck, f.full, f.stops && f.free
	switch {
	case errors.As(f.err, &connect):
		a.result.Failed = !connect.Busy() && !f.starved
	case f.stale, f.loop: // a client can claim a loop: only the checks find that a backend is one
	default:
		a.result.Failed = f.stuck || a.spent == len(a.stale) && !errors.Is(f.err, transport.ErrInvalidRequest)
	}
	return f
}

// release tells the router how the attempt ended.
func (a *attempt) release() {
	a.noteResult()
	a.used()
	a.tellEnd()
	if a.reply == nil {
		a.decision.Release(a.result)
		return
	}
	if a.result.End == router.Completed {
		a.result.Reply = a.reply.End()
	}
	a.decision.Release(a.result)
	a.p.replies.Put(a.reply)
}

// followReply prepares to take the reply's blocks from the answer as it passes.
func (a *attempt) followReply() {
	reply := a.p.replies.Get().(*prompt.Reply)
	if !reply.Begin(&a.input.scratch.prompt) {
		a.p.replies.Put(reply)
		return
	}
	a.reply = reply
}

// send asks a replica, on the terms that it has now.
func (x *exchange) send(ctx context.Context, b *backends.Backend) (*http.Response, error) {
	terms := b.Terms()
	return terms.Transport.RoundTrip(x.request(ctx, b, terms.APIKey))
}

// request is what goes to the replica: the client's bytes, to the endpoint's
// own path. The client's header was made fit for replicas by outgoing.
func (x *exchange) request(ctx context.Context, b *backends.Backend, key string) *http.Request {
	header := x.r.Header
	delete(header, "Authorization") // the key of the backend tried before
	if key != "" {
		header["Authorization"] = []string{"Bearer " + key}
	}
	body := x.input.body
	sent := &sent{
		url:  url.URL{Scheme: b.URL.Scheme, Host: b.URL.Host, Path: b.URL.Path + x.endpoint.path, RawQuery: x.query},
		body: sentBody{*bytes.NewReader(body)},
	}
	req := x.r.WithContext(ctx) // a copy, and the only way to one with a context
	req.Method, req.URL, req.Header = http.MethodPost, &sent.url, header
	req.Body, req.ContentLength = &sent.body, int64(len(body))
	req.Close = len(x.stale) > 0 // then this one must not be; see transport.StaleError
	return req
}

// sent is what of a request to a replica lives as long as the request: one
// allocation.
type sent struct {
	url  url.URL
	body sentBody
}

// sentBody is a body in memory, which has nothing to close.
type sentBody struct{ bytes.Reader }

func (*sentBody) Close() error { return nil }

// failed sorts an attempt that brought no answer, or none to its end. The
// client's own leaving is not the backend's fault.
func (a *attempt) failed(err error) *failure {
	if a.cutOff() {
		a.result.End = router.ClientDisconnected
		a.refuse(a.cutFault())
		return &failure{err: err, left: true}
	}
	if a.clientLeft() {
		a.left(a.w.phase(metrics.AbortBeforeAnswer))
		return &failure{err: err, left: true}
	}
	var connect *transport.ConnectError
	var stale *transport.StaleError
	switch {
	case errors.Is(err, errFirstByte):
		return &failure{reason: metrics.RetryFirstByte, err: err, final: !a.settings.RetryTimeouts, timeout: true}
	case errors.Is(err, errResponse):
		return &failure{reason: metrics.RetryResponse, err: err, final: !a.settings.RetryTimeouts, timeout: true}
	case errors.Is(err, errStuck):
		return &failure{reason: metrics.RetryStuck, err: err, stuck: true}
	case errors.As(err, &stale):
		return &failure{reason: metrics.RetryStale, err: err, stale: true}
	case errors.As(err, &connect) && connect.OutOfDescriptors():
		return &failure{reason: metrics.RetryDescriptors, err: err, free: true, starved: true}
	case errors.As(err, &connect):
		// After a stale connection: the replica may have died of the request at once.
		deadly := !connect.Busy() && slices.Contains(a.stale, a.decision.Backend)
		return &failure{reason: metrics.RetryConnect, err: err, free: true, deadly: deadly}
	}
	late := errors.Is(err, os.ErrDeadlineExceeded)
	return &failure{reason: metrics.RetryBroken, err: err, deadly: !late && !errors.Is(err, transport.ErrInvalidRequest)}
}

// left notes that the client is gone. The replica's connection is closed when
// the attempt returns, which makes its engine drop the request.
func (a *attempt) left(phase metrics.AbortPhase) {
	a.result.End = router.ClientDisconnected
	a.lost(phase)
}

// lost notes that the client did not get its answer to the end.
func (x *exchange) lost(phase metrics.AbortPhase) {
	x.torn = true
	if x.cancelled() {
		x.outcome.Code = x.cutFault().status
		return
	}
	x.outcome.Code, x.story.phase = statusClientLeft, phase
	x.p.metrics.Aborted(phase)
}

// brokeOff notes that the replica failed in the midst of what the client
// already sees. code is what metrics and logs show for it.
func (a *attempt) brokeOff(code int, err error) {
	a.result.End, a.result.Failed = router.Truncated, true
	a.outcome.Code = code
	a.p.log.Warn("answer broke off", "backend", a.decision.Backend.Name, "error", err, "request_id", a.id)
	a.p.suspect(a.decision.Backend)
}

func (a *attempt) answer(resp *http.Response) *failure {
	if f := unfit(resp); f != nil {
		return f
	}
	if resp.StatusCode == http.StatusOK && isEventStream(resp.Header) {
		return a.stream(resp)
	}
	// A replica computes such an answer before it writes any of it, so silence
	// in its midst is no work. Replicas' transports always return a Body.
	resp.Body.(*transport.Body).SetIdleTimeout(a.settings.Idle)
	switch resp.StatusCode {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return a.refused(resp)
	}
	if a.opened {
		return a.relayAsEvent(resp)
	}
	return a.relayWhole(resp)
}

// isEventStream goes by what the answer says it is, never by what the request
// asked for.
func isEventStream(h http.Header) bool { return hasType(h, "text/event-stream") }

func isJSON(h http.Header) bool { return hasType(h, "application/json") }

func hasType(h http.Header, want string) bool {
	kind, _, _ := strings.Cut(first(h, "Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), want)
}

// isFramed reports whether the end of an answer can be told from the end of its
// connection.
func isFramed(resp *http.Response) bool {
	return resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0
}

// commit makes the answer this backend's: from here on the client sees it. It
// returns the client's header, filled but for the length.
func (a *attempt) commit(resp *http.Response) http.Header {
	a.chosen(resp)
	return a.answerHeader(a.decision, resp.Header)
}

// chosen notes whose answer the client gets.
func (a *attempt) chosen(resp *http.Response) {
	a.keepFailure(nil)
	a.presence.phase.Store(int32(Answering))
	a.outcome.Code = resp.StatusCode
	a.outcome.PredictedTokens = a.decision.MatchedTokens
	a.outcome.Spilled = a.decision.Reason == router.ReasonSpill
}
