package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/metrics"
	"warmroute/router"
)

const (
	// heldWhole is how much of an answer that is no stream is held back before the
	// first byte goes to the client: a replica that dies while it writes such an
	// answer costs nothing then.
	heldWhole = 1 << 20
	// freeHeld is what each answer may take of that, heldWholeTotal what all of them may
	// beyond it: clients that read slowly keep what is held. Where there is no more,
	// an answer is passed on as one that is too long.
	freeHeld       = 64 << 10
	heldWholeTotal = 256 << 20
	// maxErrorBody is how long the body of an error may be that is kept while another
	// backend is asked. All of it is charged to heldWholeTotal.
	maxErrorBody = 64 << 10
	// errorBodyTimeout bounds the reading of such a body. A replica that works sends
	// one at once, and no other backend is asked before its end.
	errorBodyTimeout = 5 * time.Second
)

var (
	errCut              = errors.New("the answer ended before its end")
	errAborted          = errors.New("the replica aborted the request")
	errErrorBodyTooLong = errors.New("the body of the error is too long")
	errErrorBodyTimeout = fmt.Errorf("the body of the error did not end in %v: %w", errorBodyTimeout, os.ErrDeadlineExceeded)
	errErrorBodyMemory  = errors.New("no memory is left for the body of the error")
)

// refused is for an answer that another backend may better.
func (a *attempt) refused(resp *http.Response) *failure {
	f := &failure{
		reason: metrics.RetryStatus(resp.StatusCode), err: errors.New("it answered " + strconv.Itoa(resp.StatusCode)), // its own words may be the prompt's
		status: resp.StatusCode, header: resp.Header,
		full: resp.StatusCode == http.StatusServiceUnavailable,
	}
	switch body, err := a.readErrorBody(resp); {
	case err == nil:
		f.body, f.charged = body, int64(len(body))
	case errors.Is(err, errErrorBodyMemory):
		f.withoutBody(a.endpoint)
	default:
		return a.failed(err)
	}
	if resp.StatusCode == http.StatusInternalServerError {
		f.stops = isShutdownError(f.body)
		f.free, f.deadly = f.stops, !f.stops
	}
	return f
}

// readErrorBody reads a short body whole, in bounded time. The length of what it
// returns stays charged to heldWhole, and is for the caller to release.
func (a *attempt) readErrorBody(resp *http.Response) ([]byte, error) {
	if !a.p.chargeHeld(maxErrorBody) {
		return nil, errErrorBodyMemory
	}
	charged := int64(maxErrorBody)
	defer func() { a.p.heldWhole.Add(-charged) }()
	w := a.wait
	timer := time.AfterFunc(errorBodyTimeout, func() { w.End(errErrorBodyTimeout) })
	defer timer.Stop()
	held := a.p.held.Get().(*bytes.Buffer)
	defer a.p.keepHeld(held)
	switch n, err := held.ReadFrom(io.LimitReader(resp.Body, maxErrorBody+1)); {
	case err != nil:
		return nil, err
	case n > maxErrorBody: // no error that a client could use, and a part is not the whole
		return nil, errErrorBodyTooLong
	}
	body := bytes.Clone(held.Bytes())
	charged -= int64(len(body))
	return body, nil
}

// chargeHeld takes n bytes of heldWholeTotal, and reports whether there are as many.
func (p *Proxy) chargeHeld(n int64) bool {
	if p.heldWhole.Add(n) > heldWholeTotal {
		p.heldWhole.Add(-n)
		return false
	}
	return true
}

// withoutBody replaces a response whose body cannot be kept by an error of the
// proxy's own with the same status.
func (f *failure) withoutBody(e *endpoint) {
	f.body, f.header = replicaError(f.status, nil).body(e.anthropic()), http.Header{"Content-Type": {"application/json"}}
}

// keepFailure keeps f for the client in place of the failure kept before, of which
// it frees the body. A nil f only frees.
func (x *exchange) keepFailure(f *failure) {
	if x.kept != nil {
		x.p.heldWhole.Add(-x.kept.charged)
		x.kept.body, x.kept.charged = nil, 0
	}
	x.kept = f
}

// relayFailure answers with what a replica said.
func (x *exchange) relayFailure(f *failure) {
	if x.opened {
		x.outcome.Backend = f.decision.Backend.Name
		x.refuse(replicaError(f.status, f.body))
		return
	}
	h := x.answerHeader(f.decision, f.header)
	h["Content-Length"] = []string{strconv.Itoa(len(f.body))}
	if f.status == http.StatusServiceUnavailable && h.Get("Retry-After") == "" {
		h["Retry-After"] = []string{"1"}
	}
	x.outcome.Backend = f.decision.Backend.Name
	x.outcome.Code = f.status
	x.w.WriteHeader(f.status)
	if _, err := x.w.Write(f.body); err != nil {
		x.lost(x.w.phase(metrics.AbortInBody))
	}
}

// relayWhole passes on an answer that is no stream.
func (a *attempt) relayWhole(resp *http.Response) *failure {
	held := a.p.held.Get().(*bytes.Buffer)
	charged, whole, err := a.p.hold(held, resp.Body)
	defer a.p.letGo(held, charged)
	if err != nil {
		return a.failed(err)
	}
	if !whole {
		return a.relayLong(resp, held.Bytes())
	}
	if resp.StatusCode < 300 {
		if !isEncoded(resp.Header) {
			if aborted(a.endpoint.format, held.Bytes()) {
				return a.abortedFailure()
			}
			if !isFramed(resp) && isJSON(resp.Header) && !json.Valid(held.Bytes()) {
				return a.failed(errCut)
			}
			a.learn(held.Bytes())
		}
		a.result.End = router.Completed
	}
	length := saidLength(resp, held.Len())
	h := a.commit(resp)
	h["Content-Length"] = length
	a.w.WriteHeader(resp.StatusCode)
	if _, err := a.w.Write(held.Bytes()); err != nil {
		a.lost(a.w.phase(metrics.AbortInBody))
	}
	return nil
}

// saidLength is the header of an answer of n bytes: the replica's own, as it nearly
// always is, which costs nothing.
func saidLength(resp *http.Response, n int) []string {
	if said := resp.Header["Content-Length"]; len(said) == 1 && resp.ContentLength == int64(n) && said[0][0] != '0' {
		return said
	}
	return []string{strconv.Itoa(n)}
}

// hold reads an answer into a buffer, as far as it may be held, and says what that
// was charged and whether it is the whole answer.
func (p *Proxy) hold(held *bytes.Buffer, body io.Reader) (charged int64, whole bool, err error) {
	for most := freeHeld; ; most *= 2 {
		for err == nil && held.Len() < most {
			held.Grow(bytes.MinRead)
			free := held.AvailableBuffer()
			var n int
			n, err = body.Read(free[:min(cap(free), most-held.Len())])
			held.Write(free[:n]) // where it lies
		}
		if err != nil {
			if err == io.EOF {
				err = nil
			}
			return charged, err == nil, err
		}
		if most == heldWhole {
			return charged, false, nil
		}
		if !p.chargeHeld(int64(most)) {
			return charged, false, nil
		}
		charged += int64(most)
		held.Grow(most + bytes.MinRead)
	}
}

// letGo is the end of hold.
func (p *Proxy) letGo(held *bytes.Buffer, charged int64) {
	p.heldWhole.Add(-charged)
	p.keepHeld(held)
}

// abortedFailure is for an answer that the replica ended with an abort nobody
// asked for: what vLLM does to all it has when it is told to stop.
func (a *attempt) abortedFailure() *failure {
	a.decision.Backend.Aborted.Add(1)
	e := unavailable("the replica aborted the request: it may be shutting down")
	e.code = "replica_aborted"
	return &failure{
		reason: metrics.RetryAborted, err: errAborted, status: e.status, body: e.body(a.endpoint.anthropic()), stops: true,
		header: http.Header{"Content-Type": {"application/json"}},
	}
}

// aborted reports whether the engine aborted a whole answer. Few of those with
// choices hold the word, so few are parsed for it.
func aborted(f format, body []byte) bool {
	switch f {
	case chatFormat, completionFormat:
		if !bytes.Contains(body, []byte(`"abort"`)) {
			return false
		}
		found := false
		gjson.GetBytes(body, "choices").ForEach(func(_, choice gjson.Result) bool {
			found = found || choice.Get("finish_reason").Str == "abort"
			return true
		})
		return found
	case responsesFormat:
		return responseAborted(gjson.ParseBytes(body))
	case messagesFormat:
		return gjson.GetBytes(body, "type").Str == "message" && gjson.GetBytes(body, "stop_reason").Type != gjson.String
	}
	return false
}

// responseAborted reports whether the engine aborted a response, as far as vLLM
// tells: by its status where the model is gpt-oss, else only where it aborted before
// the first token, as nothing else makes an answer of none. Any other response that
// was aborted looks like one that is complete.
func responseAborted(response gjson.Result) bool {
	switch response.Get("status").Str {
	case "cancelled":
		return true
	case "completed", "incomplete":
		return response.Get("usage.output_tokens").Raw == "0" && response.Get("output.#").Raw == "0"
	}
	return false
}

// relayLong passes on an answer too long to be held.
func (a *attempt) relayLong(resp *http.Response, head []byte) *failure {
	if f := a.inTime(); f != nil {
		return f
	}
	h := a.commit(resp)
	switch {
	case resp.ContentLength >= 0:
		h["Content-Length"] = []string{strconv.FormatInt(resp.ContentLength, 10)}
	case !isFramed(resp):
		// Its end could be its breaking off. The client gets no more than the
		// replica gave: the end of the connection, and no mark of completeness.
		h["Transfer-Encoding"] = []string{"identity"}
	}
	if resp.StatusCode < 300 {
		a.decision.RecordFirstEvent()
	}
	a.w.WriteHeader(resp.StatusCode)
	from := source{Reader: resp.Body}
	err := a.w.send(head)
	if err == nil {
		_, err = io.Copy(sender{&a.w}, &from)
	}
	a.learnLong(&from, len(head))
	switch {
	case err == nil:
		a.w.renew()
		if resp.StatusCode < 300 {
			a.result.End = router.Completed
		}
		return nil
	case a.cutOff():
		a.result.End, a.outcome.Code = router.ClientDisconnected, a.cutFault().status
		panic(http.ErrAbortHandler) // as below
	case from.err == nil || from.err == io.EOF || a.clientLeft(): // it was the writing that failed
		a.left(a.w.phase(metrics.AbortInBody))
		return nil
	}
	a.brokeOff(http.StatusBadGateway, err)
	// Ending normally would make what has come look like the whole answer.
	panic(http.ErrAbortHandler)
}

// learn takes the answer's own account of its tokens, and its text.
func (a *attempt) learn(body []byte) {
	if a.endpoint.format == plainFormat {
		return
	}
	var found []byte
	if a.followReply(); a.reply != nil {
		found = a.reply.Whole(body)
	}
	account := gjson.ParseBytes(found)
	if found == nil { // nobody has walked over the answer
		account = gjson.GetBytes(body, "usage")
	}
	var u usage
	u.read(account, a.endpoint.format)
	a.observe(&u)
}

// observe takes over what the answer said of its tokens.
func (a *attempt) observe(u *usage) {
	b := a.decision.Backend
	if u.cachedTold {
		b.TellsCached.Store(true)
	}
	a.result.AnswerTokens = u.answerTokens
	a.result.PromptTokens = u.promptTokens
	a.result.CachedTokens = u.cachedTokens
	// Some versions leave the figure out when it is 0.
	a.result.CachedKnown = u.known && (u.cachedTold || b.TellsCached.Load())
	a.outcome.ObservedTokens = u.cachedTokens
	a.outcome.PromptTokens = a.decision.PromptTokens
	if u.promptTokens > 0 {
		a.outcome.PromptTokens = u.promptTokens
	}
}
