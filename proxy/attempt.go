package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends/transport"
	"warmroute/router"
)

// failure is an attempt that failed before anything was committed to the
// client, so that another backend may be asked.
type failure struct {
	reason  string // one of few, for the metric
	err     error
	free    bool // counts as no attempt: nothing was sent
	final   bool // no other backend may be asked
	timeout bool

	// What the replica answered, if it did.
	status int
	header http.Header
	body   []byte
}

var errFirstByte = errors.New("no first event in time")

// heldWhole is how much of an answer that is no stream is held back before the
// first byte goes to the client: a replica that dies while it writes such an
// answer costs nothing then.
const heldWhole = 1 << 20

// statusClientLeft is what metrics and logs show for a client that left.
const statusClientLeft = 499

// attempt sends the request to the chosen backend and relays its answer. It
// returns nil when the request is over: answered, broken off, or left by its
// client. The decision is released here, once, on every path.
func (x *exchange) attempt(d *router.Decision) *failure {
	a := &attempt{exchange: x, decision: d, end: router.Unseen}
	defer func() { d.Release(a.end, a.tokens) }()
	ctx, cancel := context.WithCancelCause(x.r.Context())
	defer cancel(nil)
	if x.input.request.Streams && x.p.firstByte > 0 {
		a.patience = time.AfterFunc(x.p.firstByte, func() { cancel(errFirstByte) })
		defer a.patience.Stop()
	}
	x.outcome.Backend = d.Backend.Name
	x.outcome.Overhead = time.Since(x.whole)
	resp, err := d.Backend.Transport.RoundTrip(x.request(ctx, d))
	if err != nil {
		return a.failed(err)
	}
	defer resp.Body.Close()
	return a.answer(resp)
}

// attempt is one try at one backend. Its end and tokens are what the decision
// is released with.
type attempt struct {
	*exchange
	decision *router.Decision
	patience *time.Timer // ends the attempt when no first event comes; nil: no limit
	end      router.End
	tokens   int // of the answer
}

// request is what goes to the replica: the client's bytes, to the endpoint's
// own path.
func (x *exchange) request(ctx context.Context, b *router.Decision) *http.Request {
	header := x.r.Header
	delete(header, "Authorization")
	if key := b.Backend.APIKey; key != "" {
		header["Authorization"] = []string{"Bearer " + key}
	}
	body := x.input.body
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	first, _ := open()
	base := b.Backend.URL
	req := &http.Request{
		Method:        http.MethodPost,
		URL:           &url.URL{Scheme: base.Scheme, Host: base.Host, Path: base.Path + x.endpoint.path, RawQuery: x.r.URL.RawQuery},
		Header:        header,
		Body:          first,
		GetBody:       open,
		ContentLength: int64(len(body)),
	}
	return req.WithContext(ctx)
}

// failed sorts an attempt that brought no answer, or none to its end. The
// client's own leaving is no failure.
func (a *attempt) failed(err error) *failure {
	if a.r.Context().Err() != nil {
		a.left("before_answer")
		return nil
	}
	var connect *transport.ConnectError
	switch {
	case errors.Is(err, errFirstByte):
		return &failure{reason: "first_byte_timeout", err: err, final: true, timeout: true}
	case errors.As(err, &connect):
		return &failure{reason: "connect", err: err, free: true}
	}
	return &failure{reason: "broken", err: err}
}

// left notes that the client is gone. The replica's connection is closed when
// the attempt returns, which makes its engine drop the request.
func (a *attempt) left(phase string) {
	a.end = router.Left
	a.outcome.Code = statusClientLeft
	a.p.metrics.Aborted(phase)
}

func (a *attempt) answer(resp *http.Response) *failure {
	switch resp.StatusCode {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return a.refused(resp)
	}
	if resp.StatusCode == http.StatusOK && isEventStream(resp.Header) {
		return a.stream(resp)
	}
	return a.relayWhole(resp)
}

// isEventStream goes by what the answer says it is, never by what the request
// asked for.
func isEventStream(h http.Header) bool {
	kind, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	return kind == "text/event-stream"
}

// mostErrorBody is how much of a refusal is kept to be relayed.
const mostErrorBody = 64 << 10

// refused is for an answer that another backend may better.
func (a *attempt) refused(resp *http.Response) *failure {
	body, err := io.ReadAll(io.LimitReader(resp.Body, mostErrorBody))
	if err != nil {
		return a.failed(err)
	}
	return &failure{reason: "status_" + strconv.Itoa(resp.StatusCode), status: resp.StatusCode, header: resp.Header, body: body}
}

// relayFailure answers with what the last replica said.
func (x *exchange) relayFailure(f *failure) {
	h := x.w.Header()
	copyHeader(h, f.header)
	h["Content-Length"] = []string{strconv.Itoa(len(f.body))}
	if f.status == http.StatusServiceUnavailable && h.Get("Retry-After") == "" {
		h["Retry-After"] = []string{"1"}
	}
	x.outcome.Code = f.status
	x.w.WriteHeader(f.status)
	x.w.Write(f.body)
}

// relayWhole passes on an answer that is no stream.
func (a *attempt) relayWhole(resp *http.Response) *failure {
	held := a.p.held.Get().(*bytes.Buffer)
	defer a.p.keepHeld(held)
	_, err := io.Copy(held, io.LimitReader(resp.Body, heldWhole))
	if err != nil {
		return a.failed(err)
	}
	if held.Len() == heldWhole {
		return a.relayLong(resp, held.Bytes())
	}
	if resp.StatusCode < 300 {
		if aborted(a.endpoint.format, held.Bytes()) {
			return a.abortedFailure()
		}
		a.end = router.Served
		a.learn(held.Bytes())
	}
	h := a.commit(resp)
	h["Content-Length"] = []string{strconv.Itoa(held.Len())}
	a.w.WriteHeader(resp.StatusCode)
	a.w.Write(held.Bytes())
	return nil
}

// abortedFailure is for an answer that the replica ended with an abort nobody
// asked for: what vLLM does to all it has when it is told to stop.
func (a *attempt) abortedFailure() *failure {
	e := unavailable("the replica is shutting down")
	return &failure{
		reason: "aborted", status: e.status, body: e.body(),
		header: http.Header{"Content-Type": {"application/json"}},
	}
}

// aborted says whether a whole answer was cut short by its replica. Few answers
// hold the word, so few are parsed for it.
func aborted(f format, body []byte) bool {
	if f != chatFormat && f != completionFormat || !bytes.Contains(body, []byte(`"abort"`)) {
		return false
	}
	found := false
	gjson.GetBytes(body, "choices").ForEach(func(_, choice gjson.Result) bool {
		found = found || choice.Get("finish_reason").Str == "abort"
		return true
	})
	return found
}

// relayLong passes on an answer too long to be held.
func (a *attempt) relayLong(resp *http.Response, head []byte) *failure {
	h := a.commit(resp)
	if resp.ContentLength >= 0 {
		h["Content-Length"] = []string{strconv.FormatInt(resp.ContentLength, 10)}
	}
	a.decision.FirstEvent()
	a.w.WriteHeader(resp.StatusCode)
	_, err := a.w.Write(head)
	if err == nil {
		_, err = io.Copy(a.w, resp.Body)
	}
	switch {
	case err == nil:
		a.end = router.Served
		return nil
	case a.r.Context().Err() != nil:
		a.left("in_body")
		return nil
	}
	a.end = router.Broken
	a.p.log.Warn("answer broke off", "backend", a.decision.Backend.Name, "error", err, "request_id", a.id)
	a.p.suspect(a.decision.Backend)
	// Ending normally would make what has come look like the whole answer.
	panic(http.ErrAbortHandler)
}

// learn takes the answer's own account of its tokens.
func (a *attempt) learn(body []byte) {
	if a.endpoint.format == plainFormat {
		return
	}
	var u usage
	u.read(gjson.GetBytes(body, "usage"), a.endpoint.format)
	a.tokens = u.answerTokens
	a.observe(&u)
}

func (a *attempt) observe(u *usage) {
	a.outcome.ObservedTokens = u.cachedTokens
	a.outcome.PromptTokens = a.decision.PromptTokens
	if u.promptTokens > 0 {
		a.outcome.PromptTokens = u.promptTokens
	}
}

// commit makes the answer this backend's: from here on the client sees it. It
// returns the client's header, filled but for the length.
func (a *attempt) commit(resp *http.Response) http.Header {
	d, h := a.decision, a.w.Header()
	copyHeader(h, resp.Header)
	h["X-Request-Id"] = []string{a.id}
	a.outcome.Code = resp.StatusCode
	a.outcome.PredictedTokens = d.MatchedTokens
	a.outcome.Spilled = d.Reason == router.ReasonSpill
	if a.p.routeHeaders {
		h["X-Warmroute-Backend"] = []string{d.Backend.Name}
		h["X-Warmroute-Reason"] = []string{d.Reason}
		h["X-Warmroute-Prefix-Match"] = []string{strconv.Itoa(d.MatchedTokens) + "/" + strconv.Itoa(d.PromptTokens)}
		h["X-Warmroute-Attempts"] = []string{strconv.Itoa(len(a.tried) + 1)}
		h["X-Warmroute-Overhead-Us"] = []string{strconv.FormatInt(a.outcome.Overhead.Microseconds(), 10)}
	}
	return h
}

// copyHeader takes over what the replica said, but for what concerns only its
// own connection, and the length, which is set where the body is written.
func copyHeader(to, from http.Header) {
	dropHopByHop(from)
	for name, values := range from {
		to[name] = values
	}
	delete(to, "Content-Length")
}
