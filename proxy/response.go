package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/router"
)

const (
	// maxBufferedResponseBytes is how much of a response is buffered before the first byte goes to the
	// client: another backend is asked if the replica fails until then.
	maxBufferedResponseBytes = 1 << 20
	// freeBufferBytes is what each response may take of that, maxBufferedTotalBytes what all of them may
	// beyond it. Where there is no more, a response is relayed as one that is too long.
	freeBufferBytes       = 64 << 10
	maxBufferedTotalBytes = 256 << 20
	maxPooledBufferBytes  = 64 << 10 // more than most responses need
	maxErrorBodyBytes     = 64 << 10 // of an error that is kept while another backend is asked; counts in maxBufferedTotalBytes
	// errorBodyTimeout bounds the reading of such a body, before whose end no other backend is asked.
	errorBodyTimeout = 5 * time.Second
	// maxTailBytes is how much of the end of a long response is kept: vLLM writes usage behind the choices.
	maxTailBytes = 2 << 10
)

// responseBuffers holds what is buffered of responses, and bounds it. Safe for concurrent use.
type responseBuffers struct {
	pool     sync.Pool    // of *bytes.Buffer
	reserved atomic.Int64 // bytes, of maxBufferedTotalBytes
}

func (b *responseBuffers) get() *bytes.Buffer { return b.pool.Get().(*bytes.Buffer) }

// put returns a buffer to the pool, unless it has grown too large.
func (b *responseBuffers) put(buf *bytes.Buffer) {
	if buf.Cap() <= maxPooledBufferBytes {
		buf.Reset()
		b.pool.Put(buf)
	}
}

// reserve takes n bytes of maxBufferedTotalBytes, and reports whether there are as many.
func (b *responseBuffers) reserve(n int64) (ok bool) {
	if b.reserved.Add(n) > maxBufferedTotalBytes {
		b.reserved.Add(-n)
		return false
	}
	return true
}

func (b *responseBuffers) release(n int64) { b.reserved.Add(-n) }

// makeRoom reserves what buf takes with n more bytes, in steps that double, and adds it to
// reserved. ok is false if there is no more to reserve, or buf would be longer than may be buffered.
func (b *responseBuffers) makeRoom(buf *bytes.Buffer, n int, reserved *int64) (ok bool) {
	for {
		step := freeBufferBytes + *reserved
		switch {
		case int64(buf.Len()+n) <= step:
			return true
		case step >= maxBufferedResponseBytes || !b.reserve(step):
			return false
		}
		*reserved += step
		buf.Grow(int(2*step) - buf.Len())
	}
}

// read reads a response into buf, as far as it may be buffered, or only its first piece, and returns what it has
// reserved for that and whether buf has all of the response.
func (b *responseBuffers) read(buf *bytes.Buffer, body io.Reader, firstPiece bool) (reserved int64, complete bool, err error) {
	for b.makeRoom(buf, 1, &reserved) {
		buf.Grow(bytes.MinRead)
		free := buf.AvailableBuffer()
		n, err := body.Read(free[:min(cap(free), freeBufferBytes+int(reserved)-buf.Len())])
		buf.Write(free[:n]) // where it lies
		switch err {
		case nil:
			if firstPiece && n > 0 {
				return reserved, false, nil
			}
		case io.EOF:
			return reserved, true, nil
		default:
			return reserved, false, err
		}
	}
	return reserved, false, nil
}

// comesInPieces reports whether a replica may send a response that is not a stream of events while it makes it, such as
// audio. What has a Content-Length was complete before.
func (a *attempt) comesInPieces(resp *http.Response) bool {
	isOther := resp.Header["Content-Type"] != nil && !httpheader.HasContentType(resp.Header, "application/json")
	return resp.StatusCode < 300 && len(resp.TransferEncoding) > 0 && (a.req.endpoint.IsExtra || isOther)
}

// relayBuffered relays a response that is not streamed. Nothing is sent to the client
// before all of it has come, unless it is too long or comes in pieces.
func (a *attempt) relayBuffered(resp *http.Response, body replicaBody) *fault.Failure {
	buffers := &a.req.proxy.buffers
	buf := buffers.get()
	reserved, complete, err := buffers.read(buf, resp.Body, a.comesInPieces(resp))
	defer func() {
		buffers.release(reserved)
		buffers.put(buf)
	}()
	if err != nil {
		return a.classifyOrEndRequest(err)
	}
	if f := a.checkBodyID(buf.Bytes()); f != nil {
		return f
	}
	body.AllowReuse()
	if a.quotesHandover(resp.StatusCode, buf.Bytes(), complete && !httpheader.IsEncoded(resp.Header)) {
		return a.newQuoteFailure(resp.StatusCode)
	}
	if !complete {
		return a.relayUnbuffered(resp, buf.Bytes())
	}
	if !httpheader.IsEncoded(resp.Header) && vllm.IsMissingEndpoint(resp.StatusCode, buf.Bytes()) {
		return a.recordMissingEndpoint(resp, buf.Bytes())
	}
	if a.isRankRefused(resp, buf.Bytes()) {
		return a.recordRefusedRank()
	}
	if f := a.checkQueueFull(resp, buf.Bytes()); f != nil {
		return f
	}
	if !httpheader.IsEncoded(resp.Header) && a.isRefusedAsTooLong(resp.StatusCode, buf.Bytes()) {
		return a.newTooLongFailure(resp.Header, bytes.Clone(buf.Bytes()))
	}
	if a.isResponseLost(resp.StatusCode, buf.Bytes()) {
		a.sendLostResponse()
		return nil
	}
	encoded, ok := httpheader.IsEncoded(resp.Header), resp.StatusCode < 300
	switch {
	case ok && encoded && a.req.endpoint.Format.IsRead():
		a.estimateTokensByLength(buf.Len())
	case ok && !encoded:
		if f := a.checkBuffered(resp, buf.Bytes()); f != nil {
			return f
		}
		a.recordBodyUsage(buf.Bytes())
		a.rememberBody(buf.Bytes())
		a.beginBackground(buf.Bytes())
	}
	if ok {
		a.result.End = router.Completed
	}
	if !encoded && !a.req.allowsTransferParams() {
		blankTransferParams(buf.Bytes())
	}
	length := contentLengthHeader(resp, buf.Len())
	a.recordCommittedResponse(resp)
	h := a.req.fillResponseHeader(a.decision, resp.Header)
	h["Content-Length"] = length
	a.req.client.WriteHeader(resp.StatusCode)
	if _, err := a.req.client.Write(buf.Bytes()); err != nil {
		a.req.recordDisconnectOrCancel(a.req.client.abortPhase(metrics.AbortInBody))
	}
	return nil
}

// checkBuffered returns the failure that a complete response is, or nil.
func (a *attempt) checkBuffered(resp *http.Response, body []byte) *fault.Failure {
	end := endOfResponse(a.req.endpoint.Format, body)
	switch {
	case end == vllm.EndAborted, end == vllm.EndUnexplained && a.awaitDown():
		return a.recordReplicaAbort()
	case !httpheader.IsFramed(resp) && httpheader.HasContentType(resp.Header, "application/json") && !json.Valid(body):
		return a.classifyOrEndRequest(fault.ErrTruncated)
	case a.req.endpoint.Format.HasChoices() && vllm.IsEmptyCompletion(body):
		return a.newErrorFailure(fault.New(http.StatusBadGateway, fault.CodeReplicaFailed, "the replica's response has no choices"), nil)
	case a.req.endpoint.Format == api.ResponsesFormat && vllm.IsFailedResponse(body):
		return a.newErrorFailure(fault.OfReplica(vllm.ErrorEventStatus(body), body), body)
	}
	return nil
}

// newErrorFailure returns the failure of a response that is an error in spite of its status: e, which the client gets if no other
// attempt succeeds. It means what the error in the replica's body does; nil: its engine has failed.
func (a *attempt) newErrorFailure(e *fault.Error, replicaBody []byte) *fault.Failure {
	f := &fault.Failure{
		Reason: metrics.RetryErrorEvent, Err: fault.ErrNoOutput, Status: e.Status, Header: fault.JSONHeader(), Body: fault.Body(a.req.endpoint.Dialect(), e),
		SuspectsCrash: replicaBody == nil,
	}
	if replicaBody != nil {
		f.SetMeaning(replicaBody)
	}
	return f
}

// contentLengthHeader returns the header's value for a body of that length: the replica's own where
// it says the same, which allocates nothing.
func contentLengthHeader(resp *http.Response, bodyBytes int) []string {
	if values := resp.Header["Content-Length"]; len(values) == 1 && resp.ContentLength == int64(bodyBytes) && values[0][0] != '0' {
		return values
	}
	return []string{strconv.Itoa(bodyBytes)}
}

// relayUnbuffered relays a response as it comes, of which head was read.
func (a *attempt) relayUnbuffered(resp *http.Response, head []byte) *fault.Failure {
	if f := a.commitAttempt(); f != nil {
		return f
	}
	a.recordCommittedResponse(resp)
	h := a.req.fillResponseHeader(a.decision, resp.Header)
	switch {
	case resp.ContentLength >= 0:
		h["Content-Length"] = []string{strconv.FormatInt(resp.ContentLength, 10)}
	case !httpheader.IsFramed(resp):
		// Its end could be a failure. The client gets no more than the end of the connection.
		h["Transfer-Encoding"] = []string{"identity"}
	}
	if resp.StatusCode < 300 {
		a.decision.RecordFirstEvent()
		a.rememberBody(head)
	}
	a.req.client.WriteHeader(resp.StatusCode)
	from := tailReader{Reader: resp.Body}
	to := pieceWriter{client: &a.req.client, passThrough: httpheader.IsEncoded(resp.Header) || a.req.allowsTransferParams()}
	_, err := to.Write(head)
	if err == nil {
		_, err = io.Copy(&to, &from)
	}
	if err == nil {
		err = to.writeUndecided()
	}
	length := len(head) + from.bytesRead
	if from.err == nil || a.req.isDone() { // the engine had generated the rest as well
		length = max(length, int(resp.ContentLength))
	}
	a.recordTailUsage(&from, length)
	switch {
	case err == nil:
		a.req.client.extendWriteDeadline()
		if resp.StatusCode < 300 {
			a.result.End = router.Completed
		}
		return nil
	case a.req.isEndedByProxy():
		a.result.End, a.req.outcome.Code = router.ClientDisconnected, a.req.recordProxyEnd().Status
		panic(http.ErrAbortHandler) // as below
	case from.err == nil || from.err == io.EOF || a.req.isDisconnected(): // it was the writing that failed
		a.recordDisconnect(a.req.client.abortPhase(metrics.AbortInBody))
		return nil
	}
	a.recordTruncated(http.StatusBadGateway, err)
	// A normal end would make what has come look like the whole response.
	panic(http.ErrAbortHandler)
}

// tailReader reads a long response. It keeps why reading ended, which io.Copy does not tell from why
// writing did, and the end of what was read.
type tailReader struct {
	io.Reader
	err       error
	bytesRead int
	tail      []byte // at most maxTailBytes
}

func (r *tailReader) Read(p []byte) (n int, err error) {
	n, r.err = r.Reader.Read(p)
	r.bytesRead += n
	if n >= maxTailBytes {
		r.tail = append(r.tail[:0], p[n-maxTailBytes:n]...)
	} else if r.tail = append(r.tail, p[:n]...); len(r.tail) > maxTailBytes {
		r.tail = r.tail[:copy(r.tail, r.tail[len(r.tail)-maxTailBytes:])]
	}
	return n, r.err
}

// readErrorResponse reads a response with a status that another backend may better.
func (a *attempt) readErrorResponse(resp *http.Response) *fault.Failure {
	f := fault.OfStatus(resp)
	switch body, err := a.readErrorBody(resp); {
	case err == nil:
		f.Body, f.Reserved = body, int64(len(body))
	case errors.Is(err, fault.ErrBodyMemory):
		f.SetProxyErrorBody(a.req.endpoint.Dialect())
	default:
		return a.classifyOrEndRequest(err)
	}
	f.SetMeaning(f.Body)
	return f
}

// checkQueueFull returns the failure of a response with a 429 that says that the replica's queue is full, else nil: any other 429 is
// the client's own. It copies the body.
func (a *attempt) checkQueueFull(resp *http.Response, body []byte) *fault.Failure {
	if resp.StatusCode != http.StatusTooManyRequests || vllm.ClassifyError(resp.StatusCode, body) != vllm.ErrorQueueFull {
		return nil
	}
	f := fault.OfStatus(resp)
	f.SetMeaning(body)
	f.KeepBody(a.req.proxy.buffers.reserve, a.req.endpoint.Dialect(), bytes.Clone(body))
	return f
}

// readErrorBody reads a short body whole, in bounded time. The length of what it returns
// stays reserved, for the caller to release.
func (a *attempt) readErrorBody(resp *http.Response) (reservedBody []byte, err error) {
	buffers := &a.req.proxy.buffers
	if !buffers.reserve(maxErrorBodyBytes) {
		return nil, fault.ErrBodyMemory
	}
	reserved := int64(maxErrorBodyBytes)
	defer func() { buffers.release(reserved) }()
	c := a.req.context
	timer := time.AfterFunc(errorBodyTimeout, func() { c.cancel(fault.ErrBodyTimeout) })
	defer timer.Stop()
	buf := buffers.get()
	defer buffers.put(buf)
	switch n, err := buf.ReadFrom(io.LimitReader(resp.Body, maxErrorBodyBytes+1)); {
	case err != nil:
		return nil, err
	case n > maxErrorBodyBytes: // no error that a client could use, and a part is not the whole
		return nil, fault.ErrBodyTooLong
	}
	body := bytes.Clone(buf.Bytes())
	reserved -= int64(len(body))
	return body, nil
}

// recordMissingEndpoint records that the replica does not serve the endpoint, or may not if the response is empty, and
// returns the failure. It copies the body.
func (a *attempt) recordMissingEndpoint(resp *http.Response, body []byte) *fault.Failure {
	if e := a.req.proxy.routes.Load().ByPattern[a.req.endpoint.Path].Endpoint; e != nil && e.Number == a.req.endpoint.Number { // no reload has removed it
		record := a.decision.Backend.RecordMissingEndpoint
		if len(bytes.TrimSpace(body)) == 0 {
			record = a.decision.Backend.RecordEmptyNotFound
		}
		record(e.Number, time.Now())
	}
	f := &fault.Failure{
		Reason: metrics.RetryEndpoint, IsFree: true, Status: resp.StatusCode, Header: resp.Header,
		Err: fmt.Errorf("replica does not serve the endpoint: it responded with status %d", resp.StatusCode),
	}
	f.KeepBody(a.req.proxy.buffers.reserve, a.req.endpoint.Dialect(), bytes.Clone(body))
	return f
}

// isRefusedAsTooLong reports whether an error says that the context of the replica is too short for the request, and that of
// another one, ready or not, is longer.
func (a *attempt) isRefusedAsTooLong(status int, body []byte) bool {
	req, b := &a.req.input.request, a.decision.Backend
	if status != http.StatusBadRequest || req.Truncates || req.Stored || !vllm.IsContextLengthError(body) {
		return false
	}
	if req.CatalogID != "" {
		req.ContextLengths = a.req.proxy.registry.Catalog().ContextLengths(req.CatalogID)
	}
	length := req.ContextLengths.Of(b.Slot)
	return length > 0 && slices.ContainsFunc(req.Backends, func(other *backends.Backend) bool {
		longer := req.ContextLengths.Of(other.Slot) // 0: not known
		return other != b && (longer == 0 || longer > length) && !a.req.isForPrefillOnly(other) && !other.LacksEndpoint(req.Endpoint, time.Now())
	})
}

// newTooLongFailure returns the failure that such an error is. From now on the request is sent to replicas with a longer
// context only.
func (a *attempt) newTooLongFailure(header http.Header, body []byte) *fault.Failure {
	req := &a.req.input.request
	req.RefusedLength = req.ContextLengths.Of(a.decision.Backend.Slot)
	f := &fault.Failure{
		Reason: metrics.RetryContextLength, IsFree: true, Status: http.StatusBadRequest, Header: header,
		Err: fmt.Errorf("replica accepts %d tokens, and the request has more: it is sent to one that accepts more", req.RefusedLength),
	}
	f.KeepBody(a.req.proxy.buffers.reserve, a.req.endpoint.Dialect(), body)
	return f
}

// isRankRefused reports whether a response says that the server does not have the data-parallel rank that it was
// sent: it has other ranks than before.
func (a *attempt) isRankRefused(resp *http.Response, body []byte) bool {
	rank := httpheader.First(a.req.httpReq.Header, vllm.RankHeader)
	if rank == "" || httpheader.IsEncoded(resp.Header) {
		return false
	}
	e, refused := vllm.ParseRankError(resp.StatusCode, body)
	return refused && strconv.Itoa(e.Rank) == rank
}

// recordRefusedRank records that the server has other ranks than before, and returns the failure: the request is sent
// again, to the same backend or another one.
func (a *attempt) recordRefusedRank() *fault.Failure {
	a.decision.Backend.RecordRankRefusal(time.Now())
	return &fault.Failure{Reason: metrics.RetryRank, IsFree: true, Err: fault.ErrRankRefused}
}

// recordReplicaAbort counts and returns the failure of a response that the replica aborted: vLLM aborts all its
// requests when it shuts down.
func (a *attempt) recordReplicaAbort() *fault.Failure {
	a.decision.Backend.Aborted.Add(1)
	e := fault.Unavailable(fault.CodeReplicaAborted, "the replica aborted the request: it may be shutting down")
	return &fault.Failure{
		Reason: metrics.RetryAborted, Err: fault.ErrAborted, ShuttingDown: true,
		Status: e.Status, Body: fault.Body(a.req.endpoint.Dialect(), e), Header: fault.JSONHeader(),
	}
}

// endOfResponse returns how a complete response ended.
func endOfResponse(f api.Format, body []byte) vllm.ResponseEnd {
	switch f {
	case api.ChatFormat, api.CompletionFormat, api.TokensFormat:
		if vllm.HasAbortedChoice(body) {
			return vllm.EndAborted
		}
	case api.ResponsesFormat:
		return vllm.EndOfResponse(gjson.ParseBytes(body))
	case api.MessagesFormat:
		return vllm.EndOfMessage(body)
	}
	return vllm.EndExplained
}

// unexplainedEndTimeout bounds the wait for the health checks of a replica whose response ended without a reason.
const unexplainedEndTimeout = 50 * time.Millisecond

// awaitDown has the health of the attempt's backend checked, and reports whether it is down within unexplainedEndTimeout, until
// when it blocks: a response without a reason for its end was aborted then, else it is complete.
func (a *attempt) awaitDown() bool {
	b := a.decision.Backend
	a.req.proxy.recheckHealth(b)
	timer := time.NewTimer(unexplainedEndTimeout)
	defer timer.Stop()
	for {
		changed := a.req.proxy.registry.StateChanged() // before looking
		if b.State() == backends.Down {
			return true
		}
		select {
		case <-changed:
		case <-timer.C:
			return false
		case <-a.req.context.Done():
			return false
		}
	}
}

// replaceBestFailure makes f the failure that the client gets should no attempt succeed, and
// frees the body of the one before. A nil f only frees.
func (r *request) replaceBestFailure(f *fault.Failure) {
	if best := r.history.best; best != nil {
		r.proxy.buffers.release(best.Reserved)
		best.Body, best.Reserved = nil, 0
	}
	r.history.best = f
}

// relayFailure sends the kept response of a failed attempt.
func (r *request) relayFailure(f *fault.Failure) {
	r.outcome.Backend = f.Decision.Backend.Name
	if r.headersSent {
		r.sendError(fault.OfReplica(f.Status, f.Body))
		return
	}
	if !r.allowsTransferParams() && !httpheader.IsEncoded(f.Header) {
		blankTransferParams(f.Body)
	}
	h := r.fillResponseHeader(f.Decision, f.Header)
	h["Content-Length"] = []string{strconv.Itoa(len(f.Body))}
	if f.Status == http.StatusServiceUnavailable && h.Get("Retry-After") == "" {
		h["Retry-After"] = []string{"1"}
	}
	r.outcome.Code = f.Status
	r.client.WriteHeader(f.Status)
	if _, err := r.client.Write(f.Body); err != nil {
		r.recordDisconnectOrCancel(r.client.abortPhase(metrics.AbortInBody))
	}
}

// recordBodyUsage records the usage that a complete response reports, and its text.
func (a *attempt) recordBodyUsage(body []byte) {
	if !a.req.endpoint.Format.IsRead() {
		return
	}
	var found []byte
	if a.startReplyHashing(); a.reply != nil {
		found = a.reply.AddBody(body)
	}
	object := gjson.ParseBytes(found)
	if found == nil { // its text was not read
		object = gjson.GetBytes(body, "usage")
	}
	var u tokenUsage
	u.parse(object, a.req.endpoint.Format)
	a.recordUsage(&u)
	if !u.known && a.req.endpoint.Format != api.ResponsesFormat { // those of a background response are not there yet
		a.estimateTokensByLength(len(body))
	}
}

// recordTailUsage records usage from the end of a response that was not buffered whole: quotes in a text are
// escaped, so none is mistaken for it. Where there is none, its length in bytes counts.
func (a *attempt) recordTailUsage(tail *tailReader, length int) {
	if !a.req.endpoint.Format.IsRead() || a.req.outcome.Code >= http.StatusMultipleChoices {
		return
	}
	var u tokenUsage
	if _, object, found := bytes.Cut(tail.tail, []byte(`"usage":`)); found {
		u.parse(gjson.ParseBytes(object), a.req.endpoint.Format)
	}
	a.recordUsage(&u)
	if u.completionTokens == 0 {
		a.estimateTokensByLength(length)
	}
}

// estimateTokensByLength estimates the tokens of a response without usage, up to what was asked for: else it
// would cost its key nothing.
func (a *attempt) estimateTokensByLength(length int) {
	a.estimatedTokens = length / bytesPerToken
	if limit := a.req.input.request.MaxOutputTokens * max(a.req.input.request.Sequences, 1); limit > 0 {
		a.estimatedTokens = min(a.estimatedTokens, limit)
	}
}

// setResultUsage sets what the router learns of the usage.
func (a *attempt) setResultUsage(u *tokenUsage) {
	b := a.decision.Backend
	if u.hasCached {
		b.RecordReportsCached(a.req.endpoint.Number)
	}
	a.result.OutputTokens = u.completionTokens
	a.result.PromptTokens = u.promptTokens
	a.result.CachedTokens = u.cachedTokens
	// Some versions leave the figure out when it is 0.
	a.result.CachedKnown = u.known && (u.hasCached || b.ReportsCached(a.req.endpoint.Number))
}

// recordUsage records what the response said of its tokens.
func (a *attempt) recordUsage(u *tokenUsage) {
	a.setResultUsage(u)
	if a.handover != nil { // most replicas repeat this figure; others would count all that was transferred
		a.result.CachedTokens, a.result.CachedKnown = a.handover.result.CachedTokens, a.handover.result.CachedKnown
	}
	a.req.outcome.ObservedTokens = a.result.CachedTokens
	a.req.outcome.PromptTokens = a.decision.PromptTokens
	if u.promptTokens > 0 {
		a.req.outcome.PromptTokens = u.promptTokens
	}
}

// relayErrorAsEvent sends a response that is not a stream as an error event, to a client that has the
// header of a stream. It returns a failure if another backend may be asked.
func (a *attempt) relayErrorAsEvent(resp *http.Response, from replicaBody) *fault.Failure {
	body, err := a.readErrorBody(resp)
	defer a.req.proxy.buffers.release(int64(len(body)))
	if f := a.checkBodyID(body); f != nil {
		return f
	}
	from.AllowReuse()
	if a.isResponseLost(resp.StatusCode, body) {
		a.sendLostResponse()
		return nil
	}
	if err != nil && !errors.Is(err, fault.ErrBodyTooLong) && !errors.Is(err, fault.ErrBodyMemory) {
		return a.classifyOrEndRequest(err)
	}
	if a.quotesHandover(resp.StatusCode, body, true) {
		return a.newQuoteFailure(resp.StatusCode)
	}
	if err == nil && a.isRankRefused(resp, body) {
		return a.recordRefusedRank()
	}
	if err == nil && !httpheader.IsEncoded(resp.Header) && a.isRefusedAsTooLong(resp.StatusCode, body) {
		return a.newTooLongFailure(resp.Header, body)
	}
	if err == nil && !httpheader.IsEncoded(resp.Header) && vllm.IsMissingEndpoint(resp.StatusCode, body) {
		return a.recordMissingEndpoint(resp, body)
	}
	if f := a.checkQueueFull(resp, body); f != nil {
		return f
	}
	a.req.sendError(fault.OfReplica(resp.StatusCode, body))
	return nil
}
