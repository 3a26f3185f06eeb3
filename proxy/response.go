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

	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/router"
)

const (
	// maxBufferedResponseBytes is how much of an answer that is no stream is held back before the
	// first byte goes to the client: a replica that dies while it writes such an
	// answer costs nothing then.
	maxBufferedResponseBytes = 1 << 20
	// freeBufferBytes is what each answer may take of that, maxBufferedTotalBytes what all of them may
	// beyond it: clients that read slowly keep what is held. Where there is no more,
	// an answer is passed on as one that is too long.
	freeBufferBytes       = 64 << 10
	maxBufferedTotalBytes = 256 << 20
	// maxErrorBodyBytes is how long the body of an error may be that is kept while another
	// backend is asked. All of it is charged to maxBufferedTotalBytes.
	maxErrorBodyBytes = 64 << 10
	// errorBodyTimeout bounds the reading of such a body. A replica that works sends
	// one at once, and no other backend is asked before its end.
	errorBodyTimeout = 5 * time.Second
)

var (
	errTruncated        = errors.New("the answer ended before its end")
	errAborted          = errors.New("the replica aborted the request")
	errErrorBodyTooLong = errors.New("the body of the error is too long")
	errErrorBodyTimeout = fmt.Errorf("the body of the error did not end in %v: %w", errorBodyTimeout, os.ErrDeadlineExceeded)
	errErrorBodyMemory  = errors.New("no memory is left for the body of the error")
)

// replicaFailure is for an answer that another backend may better.
func (a *attempt) replicaFailure(resp *http.Response) *failure {
	f := &failure{
		reason: metrics.RetryStatus(resp.StatusCode), err: errors.New("it answered " + strconv.Itoa(resp.StatusCode)), // its own words may be the prompt's
		status: resp.StatusCode, header: resp.Header,
		full: resp.StatusCode == http.StatusServiceUnavailable,
	}
	switch body, err := a.readErrorBody(resp); {
	case err == nil:
		f.body, f.charged = body, int64(len(body))
	case errors.Is(err, errErrorBodyMemory):
		f.replaceBody(a.endpoint)
	default:
		return a.classify(err)
	}
	if resp.StatusCode == http.StatusInternalServerError {
		f.shuttingDown = vllm.IsShutdownError(f.body)
		f.uncharged, f.mayHaveCrashed = f.shuttingDown, !f.shuttingDown
	}
	return f
}

// readErrorBody reads a short body whole, in bounded time. The length of what it
// returns stays charged to maxBufferedResponseBytes, and is for the caller to release.
func (a *attempt) readErrorBody(resp *http.Response) ([]byte, error) {
	if !a.proxy.reserveBuffer(maxErrorBodyBytes) {
		return nil, errErrorBodyMemory
	}
	charged := int64(maxErrorBodyBytes)
	defer func() { a.proxy.bufferedBytes.Add(-charged) }()
	c := a.context
	timer := time.AfterFunc(errorBodyTimeout, func() { c.cancel(errErrorBodyTimeout) })
	defer timer.Stop()
	held := a.proxy.buffers.Get().(*bytes.Buffer)
	defer a.proxy.putBuffer(held)
	switch n, err := held.ReadFrom(io.LimitReader(resp.Body, maxErrorBodyBytes+1)); {
	case err != nil:
		return nil, err
	case n > maxErrorBodyBytes: // no error that a client could use, and a part is not the whole
		return nil, errErrorBodyTooLong
	}
	body := bytes.Clone(held.Bytes())
	charged -= int64(len(body))
	return body, nil
}

// reserveBuffer takes n bytes of maxBufferedTotalBytes, and reports whether there are as many.
func (p *Proxy) reserveBuffer(n int64) bool {
	if p.bufferedBytes.Add(n) > maxBufferedTotalBytes {
		p.bufferedBytes.Add(-n)
		return false
	}
	return true
}

// replaceBody replaces a response whose body cannot be kept by an error of the
// proxy's own with the same status.
func (f *failure) replaceBody(e *endpoint) {
	f.body, f.header = replicaError(f.status, nil).body(e.anthropic()), http.Header{"Content-Type": {"application/json"}}
}

// setBestFailure keeps f for the client in place of the failure kept before, of which
// it frees the body. A nil f only frees.
func (r *request) setBestFailure(f *failure) {
	if r.history.best != nil {
		r.proxy.bufferedBytes.Add(-r.history.best.charged)
		r.history.best.body, r.history.best.charged = nil, 0
	}
	r.history.best = f
}

// relayFailure answers with what a replica said.
func (r *request) relayFailure(f *failure) {
	if r.headersSent {
		r.outcome.Backend = f.decision.Backend.Name
		r.sendError(replicaError(f.status, f.body))
		return
	}
	h := r.responseHeader(f.decision, f.header)
	h["Content-Length"] = []string{strconv.Itoa(len(f.body))}
	if f.status == http.StatusServiceUnavailable && h.Get("Retry-After") == "" {
		h["Retry-After"] = []string{"1"}
	}
	r.outcome.Backend = f.decision.Backend.Name
	r.outcome.Code = f.status
	r.client.WriteHeader(f.status)
	if _, err := r.client.Write(f.body); err != nil {
		r.recordAborted(r.client.abortPhase(metrics.AbortInBody))
	}
}

// relayBuffered passes on an answer that is no stream.
func (a *attempt) relayBuffered(resp *http.Response) *failure {
	held := a.proxy.buffers.Get().(*bytes.Buffer)
	charged, whole, err := a.proxy.bufferResponse(held, resp.Body)
	defer a.proxy.releaseBuffer(held, charged)
	if err != nil {
		return a.classify(err)
	}
	if !whole {
		return a.relayLong(resp, held.Bytes())
	}
	if resp.StatusCode < 300 {
		if !isEncoded(resp.Header) {
			if isAborted(a.endpoint.format, held.Bytes()) {
				return a.abortedFailure()
			}
			if !isFramed(resp) && isJSON(resp.Header) && !json.Valid(held.Bytes()) {
				return a.classify(errTruncated)
			}
			a.parseUsage(held.Bytes())
		}
		a.result.End = router.Completed
	}
	length := contentLength(resp, held.Len())
	h := a.commit(resp)
	h["Content-Length"] = length
	a.client.WriteHeader(resp.StatusCode)
	if _, err := a.client.Write(held.Bytes()); err != nil {
		a.recordAborted(a.client.abortPhase(metrics.AbortInBody))
	}
	return nil
}

// contentLength is the header of an answer of n bytes: the replica's own, as it nearly
// always is, which costs nothing.
func contentLength(resp *http.Response, n int) []string {
	if said := resp.Header["Content-Length"]; len(said) == 1 && resp.ContentLength == int64(n) && said[0][0] != '0' {
		return said
	}
	return []string{strconv.Itoa(n)}
}

// bufferResponse reads an answer into a buffer, as far as it may be held, and says what that
// was charged and whether it is the whole answer.
func (p *Proxy) bufferResponse(held *bytes.Buffer, body io.Reader) (charged int64, whole bool, err error) {
	for most := freeBufferBytes; ; most *= 2 {
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
		if most == maxBufferedResponseBytes {
			return charged, false, nil
		}
		if !p.reserveBuffer(int64(most)) {
			return charged, false, nil
		}
		charged += int64(most)
		held.Grow(most + bytes.MinRead)
	}
}

// releaseBuffer is the end of hold.
func (p *Proxy) releaseBuffer(held *bytes.Buffer, charged int64) {
	p.bufferedBytes.Add(-charged)
	p.putBuffer(held)
}

// abortedFailure is for an answer that the replica ended with an abort nobody
// asked for: what vLLM does to all it has when it is told to stop.
func (a *attempt) abortedFailure() *failure {
	a.decision.Backend.Aborted.Add(1)
	e := unavailableError("the replica aborted the request: it may be shutting down")
	e.code = "replica_aborted"
	return &failure{
		reason: metrics.RetryAborted, err: errAborted, status: e.status, body: e.body(a.endpoint.anthropic()), shuttingDown: true,
		header: http.Header{"Content-Type": {"application/json"}},
	}
}

// isAborted reports whether the engine aborted a complete response.
func isAborted(f format, body []byte) bool {
	switch f {
	case chatFormat, completionFormat:
		return vllm.HasAbortedChoice(body)
	case responsesFormat:
		return vllm.IsAbortedResponse(gjson.ParseBytes(body))
	case messagesFormat:
		return vllm.IsAbortedMessage(body)
	}
	return false
}

// relayLong passes on an answer too long to be held.
func (a *attempt) relayLong(resp *http.Response, head []byte) *failure {
	if f := a.commitResponse(); f != nil {
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
	a.client.WriteHeader(resp.StatusCode)
	from := tailReader{Reader: resp.Body}
	err := a.client.writeAndFlush(head)
	if err == nil {
		_, err = io.Copy(flushingWriter{&a.client}, &from)
	}
	a.parseTailUsage(&from, len(head))
	switch {
	case err == nil:
		a.client.extendDeadline()
		if resp.StatusCode < 300 {
			a.result.End = router.Completed
		}
		return nil
	case a.isCutOff():
		a.result.End, a.outcome.Code = router.ClientDisconnected, a.cutOffError().status
		panic(http.ErrAbortHandler) // as below
	case from.err == nil || from.err == io.EOF || a.isDisconnected(): // it was the writing that failed
		a.recordDisconnect(a.client.abortPhase(metrics.AbortInBody))
		return nil
	}
	a.recordTruncated(http.StatusBadGateway, err)
	// Ending normally would make what has come look like the whole answer.
	panic(http.ErrAbortHandler)
}

// parseUsage takes the answer's own account of its tokens, and its text.
func (a *attempt) parseUsage(body []byte) {
	if a.endpoint.format == plainFormat {
		return
	}
	var found []byte
	if a.trackReply(); a.reply != nil {
		found = a.reply.Whole(body)
	}
	account := gjson.ParseBytes(found)
	if found == nil { // nobody has walked over the answer
		account = gjson.GetBytes(body, "usage")
	}
	var u usage
	u.parse(account, a.endpoint.format)
	a.recordUsage(&u)
}

// recordUsage takes over what the answer said of its tokens.
func (a *attempt) recordUsage(u *usage) {
	b := a.decision.Backend
	if u.hasCached {
		b.ReportsCached.Store(true)
	}
	a.result.AnswerTokens = u.completionTokens
	a.result.PromptTokens = u.promptTokens
	a.result.CachedTokens = u.cachedTokens
	// Some versions leave the figure out when it is 0.
	a.result.CachedKnown = u.known && (u.hasCached || b.ReportsCached.Load())
	a.outcome.ObservedTokens = u.cachedTokens
	a.outcome.PromptTokens = a.decision.PromptTokens
	if u.promptTokens > 0 {
		a.outcome.PromptTokens = u.promptTokens
	}
}

// maxTailBytes is how much of the end of a long answer is kept: vLLM writes usage
// behind the choices, and little comes behind it.
const maxTailBytes = 2 << 10

// tailReader is a long answer as it is read. It remembers why reading ended, which
// io.Copy does not tell from why writing did, and the end of what was read.
type tailReader struct {
	io.Reader
	err       error
	bytesRead int
	tail      []byte // at most maxTailBytes
}

func (s *tailReader) Read(p []byte) (n int, err error) {
	n, s.err = s.Reader.Read(p)
	s.bytesRead += n
	if n >= maxTailBytes {
		s.tail = append(s.tail[:0], p[n-maxTailBytes:n]...)
	} else if s.tail = append(s.tail, p[:n]...); len(s.tail) > maxTailBytes {
		s.tail = s.tail[:copy(s.tail, s.tail[len(s.tail)-maxTailBytes:])]
	}
	return n, s.err
}

// parseTailUsage takes the account of its tokens from the end of an answer that was not
// held whole. The quotes of a text inside the answer are escaped, so it cannot be
// mistaken for the account. Where there is none, what came counts by its length,
// up to what was asked for: else a long answer would cost its key nothing.
func (a *attempt) parseTailUsage(s *tailReader, before int) {
	if a.endpoint.format == plainFormat || a.outcome.Code >= http.StatusMultipleChoices {
		return
	}
	var u usage
	if _, object, found := bytes.Cut(s.tail, []byte(`"usage":`)); found {
		u.parse(gjson.ParseBytes(object), a.endpoint.format)
	}
	a.recordUsage(&u)
	if u.completionTokens > 0 {
		return
	}
	a.estimatedTokens = (before + s.bytesRead) / bytesPerToken
	if most := a.input.request.MaxAnswerTokens * max(a.input.request.Sequences, 1); most > 0 {
		a.estimatedTokens = min(a.estimatedTokens, most)
	}
}
