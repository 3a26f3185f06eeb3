package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/metrics"
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

var (
	errTruncated        = errors.New("response ended early")
	errNoOutput         = errors.New("response has no output")
	errAborted          = errors.New("replica aborted the request")
	errRankRefused      = errors.New("replica does not have the data-parallel rank: its ranks are read again")
	errScaling          = errors.New("replica is changing the number of its engines")
	errErrorBodyTooLong = errors.New("error body is too long")
	errErrorBodyTimeout = fmt.Errorf("error body did not end in %v: %w", errorBodyTimeout, os.ErrDeadlineExceeded)
	errErrorBodyMemory  = errors.New("no memory is left for the error body")
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
	isOther := resp.Header["Content-Type"] != nil && !hasContentType(resp.Header, "application/json")
	return resp.StatusCode < 300 && len(resp.TransferEncoding) > 0 && (a.endpoint.isExtra || isOther)
}

// relayBuffered relays a response that is not streamed. Nothing is sent to the client
// before all of it has come, unless it is too long or comes in pieces.
func (a *attempt) relayBuffered(resp *http.Response, body replicaBody) *failure {
	buffers := &a.proxy.buffers
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
	if a.quotesHandover(resp.StatusCode, buf.Bytes(), complete && !isEncoded(resp.Header)) {
		return a.newQuoteFailure(resp.StatusCode)
	}
	if !complete {
		return a.relayUnbuffered(resp, buf.Bytes())
	}
	if !isEncoded(resp.Header) && vllm.IsMissingEndpoint(resp.StatusCode, buf.Bytes()) {
		return a.recordMissingEndpoint(resp, buf.Bytes())
	}
	if a.isRankRefused(resp, buf.Bytes()) {
		return a.recordRefusedRank()
	}
	if f := a.checkQueueFull(resp, buf.Bytes()); f != nil {
		return f
	}
	if !isEncoded(resp.Header) && a.isRefusedAsTooLong(resp.StatusCode, buf.Bytes()) {
		return a.newTooLongFailure(resp.Header, bytes.Clone(buf.Bytes()))
	}
	if a.isResponseLost(resp.StatusCode, buf.Bytes()) {
		a.sendLostResponse()
		return nil
	}
	encoded, ok := isEncoded(resp.Header), resp.StatusCode < 300
	switch {
	case ok && encoded && a.endpoint.format.isRead():
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
	if !encoded && !a.allowsTransferParams() {
		blankTransferParams(buf.Bytes())
	}
	length := contentLengthHeader(resp, buf.Len())
	a.recordCommittedResponse(resp)
	h := a.fillResponseHeader(a.decision, resp.Header)
	h["Content-Length"] = length
	a.client.WriteHeader(resp.StatusCode)
	if _, err := a.client.Write(buf.Bytes()); err != nil {
		a.recordDisconnectOrCancel(a.client.abortPhase(metrics.AbortInBody))
	}
	return nil
}

// checkBuffered returns the failure that a complete response is, or nil.
func (a *attempt) checkBuffered(resp *http.Response, body []byte) *failure {
	end := endOfResponse(a.endpoint.format, body)
	switch {
	case end == vllm.EndAborted, end == vllm.EndUnexplained && a.awaitDown():
		return a.recordReplicaAbort()
	case !isFramed(resp) && hasContentType(resp.Header, "application/json") && !json.Valid(body):
		return a.classifyOrEndRequest(errTruncated)
	case a.endpoint.format.hasChoices() && vllm.IsEmptyCompletion(body):
		return a.newErrorFailure(newError(http.StatusBadGateway, codeReplicaFailed, "the replica's response has no choices"), nil)
	case a.endpoint.format == responsesFormat && vllm.IsFailedResponse(body):
		return a.newErrorFailure(replicaError(vllm.ErrorEventStatus(body), body), body)
	}
	return nil
}

// newErrorFailure returns the failure of a response that is an error in spite of its status: e, which the client gets if no other
// attempt succeeds. It means what the error in the replica's body does; nil: its engine has failed.
func (a *attempt) newErrorFailure(e *apiError, replicaBody []byte) *failure {
	f := &failure{
		reason: metrics.RetryErrorEvent, err: errNoOutput, status: e.status, header: jsonHeader(), body: a.endpoint.dialect().errorBody(e),
		suspectsCrash: replicaBody == nil,
	}
	if replicaBody != nil {
		f.setMeaning(replicaBody)
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
func (a *attempt) relayUnbuffered(resp *http.Response, head []byte) *failure {
	if f := a.commitAttempt(); f != nil {
		return f
	}
	a.recordCommittedResponse(resp)
	h := a.fillResponseHeader(a.decision, resp.Header)
	switch {
	case resp.ContentLength >= 0:
		h["Content-Length"] = []string{strconv.FormatInt(resp.ContentLength, 10)}
	case !isFramed(resp):
		// Its end could be a failure. The client gets no more than the end of the connection.
		h["Transfer-Encoding"] = []string{"identity"}
	}
	if resp.StatusCode < 300 {
		a.decision.RecordFirstEvent()
		a.rememberBody(head)
	}
	a.client.WriteHeader(resp.StatusCode)
	from := tailReader{Reader: resp.Body}
	to := pieceWriter{client: &a.client, passThrough: isEncoded(resp.Header) || a.allowsTransferParams()}
	_, err := to.Write(head)
	if err == nil {
		_, err = io.Copy(&to, &from)
	}
	if err == nil {
		err = to.writeUndecided()
	}
	length := len(head) + from.bytesRead
	if from.err == nil || a.isDone() { // the engine had generated the rest as well
		length = max(length, int(resp.ContentLength))
	}
	a.recordTailUsage(&from, length)
	switch {
	case err == nil:
		a.client.extendWriteDeadline()
		if resp.StatusCode < 300 {
			a.result.End = router.Completed
		}
		return nil
	case a.isEndedByProxy():
		a.result.End, a.outcome.Code = router.ClientDisconnected, a.recordProxyEnd().status
		panic(http.ErrAbortHandler) // as below
	case from.err == nil || from.err == io.EOF || a.isDisconnected(): // it was the writing that failed
		a.recordDisconnect(a.client.abortPhase(metrics.AbortInBody))
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
func (a *attempt) readErrorResponse(resp *http.Response) *failure {
	f := newStatusFailure(resp)
	switch body, err := a.readErrorBody(resp); {
	case err == nil:
		f.body, f.charged = body, int64(len(body))
	case errors.Is(err, errErrorBodyMemory):
		f.setProxyErrorBody(a.endpoint)
	default:
		return a.classifyOrEndRequest(err)
	}
	f.setMeaning(f.body)
	return f
}

// newStatusFailure returns the failure that a response is by its status, without its body.
func newStatusFailure(resp *http.Response) *failure {
	return &failure{
		reason: metrics.RetryStatus(resp.StatusCode), status: resp.StatusCode, header: resp.Header,
		err: fmt.Errorf("replica responded with status %d", resp.StatusCode), // its message may quote the prompt
	}
}

// setMeaning sets what a failure means, from the replica's error, whose status f has.
func (f *failure) setMeaning(replicaError []byte) {
	switch vllm.ClassifyError(f.status, replicaError) {
	case vllm.ErrorQueueFull:
		f.queueFull = true
	case vllm.ErrorShutdown:
		f.shuttingDown, f.isFree = true, true
	case vllm.ErrorScaling:
		f.reason, f.err = metrics.RetryScaling, errScaling
		f.shuttingDown, f.isFree = true, true // like one that finishes what it has
	case vllm.ErrorOfEngine:
		f.suspectsCrash = true
	}
}

// checkQueueFull returns the failure of a response with a 429 that says that the replica's queue is full, else nil: any other 429 is
// the client's own. It copies the body.
func (a *attempt) checkQueueFull(resp *http.Response, body []byte) *failure {
	if resp.StatusCode != http.StatusTooManyRequests || vllm.ClassifyError(resp.StatusCode, body) != vllm.ErrorQueueFull {
		return nil
	}
	f := newStatusFailure(resp)
	f.setMeaning(body)
	f.keepBody(&a.proxy.buffers, a.endpoint, bytes.Clone(body))
	return f
}

// readErrorBody reads a short body whole, in bounded time. The length of what it returns
// stays reserved, for the caller to release.
func (a *attempt) readErrorBody(resp *http.Response) (reservedBody []byte, err error) {
	buffers := &a.proxy.buffers
	if !buffers.reserve(maxErrorBodyBytes) {
		return nil, errErrorBodyMemory
	}
	reserved := int64(maxErrorBodyBytes)
	defer func() { buffers.release(reserved) }()
	c := a.context
	timer := time.AfterFunc(errorBodyTimeout, func() { c.cancel(errErrorBodyTimeout) })
	defer timer.Stop()
	buf := buffers.get()
	defer buffers.put(buf)
	switch n, err := buf.ReadFrom(io.LimitReader(resp.Body, maxErrorBodyBytes+1)); {
	case err != nil:
		return nil, err
	case n > maxErrorBodyBytes: // no error that a client could use, and a part is not the whole
		return nil, errErrorBodyTooLong
	}
	body := bytes.Clone(buf.Bytes())
	reserved -= int64(len(body))
	return body, nil
}

// recordMissingEndpoint records that the replica does not serve the endpoint, or may not if the response is empty, and
// returns the failure. It copies the body.
func (a *attempt) recordMissingEndpoint(resp *http.Response, body []byte) *failure {
	if e := a.proxy.routes.Load().byPattern[a.endpoint.path].endpoint; e != nil && e.number == a.endpoint.number { // no reload has removed it
		record := a.decision.Backend.RecordMissingEndpoint
		if len(bytes.TrimSpace(body)) == 0 {
			record = a.decision.Backend.RecordEmptyNotFound
		}
		record(e.number, time.Now())
	}
	f := &failure{
		reason: metrics.RetryEndpoint, isFree: true, status: resp.StatusCode, header: resp.Header,
		err: fmt.Errorf("replica does not serve the endpoint: it responded with status %d", resp.StatusCode),
	}
	f.keepBody(&a.proxy.buffers, a.endpoint, bytes.Clone(body))
	return f
}

// isRefusedAsTooLong reports whether an error says that the context of the replica is too short for the request, and that of
// another one, ready or not, is longer.
func (a *attempt) isRefusedAsTooLong(status int, body []byte) bool {
	req, b := &a.input.request, a.decision.Backend
	if status != http.StatusBadRequest || req.Truncates || req.Stored || !vllm.IsContextLengthError(body) {
		return false
	}
	if req.CatalogID != "" {
		req.ContextLengths = a.proxy.registry.Catalog().ContextLengths(req.CatalogID)
	}
	length := req.ContextLengths.Of(b.Slot)
	return length > 0 && slices.ContainsFunc(req.Backends, func(other *backends.Backend) bool {
		longer := req.ContextLengths.Of(other.Slot) // 0: not known
		return other != b && (longer == 0 || longer > length) && !a.isForPrefillOnly(other) && !other.LacksEndpoint(req.Endpoint, time.Now())
	})
}

// newTooLongFailure returns the failure that such an error is. From now on the request is sent to replicas with a longer
// context only.
func (a *attempt) newTooLongFailure(header http.Header, body []byte) *failure {
	req := &a.input.request
	req.RefusedLength = req.ContextLengths.Of(a.decision.Backend.Slot)
	f := &failure{
		reason: metrics.RetryContextLength, isFree: true, status: http.StatusBadRequest, header: header,
		err: fmt.Errorf("replica accepts %d tokens, and the request has more: it is sent to one that accepts more", req.RefusedLength),
	}
	f.keepBody(&a.proxy.buffers, a.endpoint, body)
	return f
}

// isRankRefused reports whether a response says that the server does not have the data-parallel rank that it was
// sent: it has other ranks than before.
func (a *attempt) isRankRefused(resp *http.Response, body []byte) bool {
	rank := firstHeaderValue(a.httpReq.Header, vllm.RankHeader)
	if rank == "" || isEncoded(resp.Header) {
		return false
	}
	e, refused := vllm.ParseRankError(resp.StatusCode, body)
	return refused && strconv.Itoa(e.Rank) == rank
}

// recordRefusedRank records that the server has other ranks than before, and returns the failure: the request is sent
// again, to the same backend or another one.
func (a *attempt) recordRefusedRank() *failure {
	a.decision.Backend.RecordRankRefusal(time.Now())
	return &failure{reason: metrics.RetryRank, isFree: true, err: errRankRefused}
}

// recordReplicaAbort counts and returns the failure of a response that the replica aborted: vLLM aborts all its
// requests when it shuts down.
func (a *attempt) recordReplicaAbort() *failure {
	a.decision.Backend.Aborted.Add(1)
	e := unavailableError(codeReplicaAborted, "the replica aborted the request: it may be shutting down")
	return &failure{
		reason: metrics.RetryAborted, err: errAborted, shuttingDown: true,
		status: e.status, body: a.endpoint.dialect().errorBody(e), header: jsonHeader(),
	}
}

// endOfResponse returns how a complete response ended.
func endOfResponse(f format, body []byte) vllm.ResponseEnd {
	switch f {
	case chatFormat, completionFormat, tokensFormat:
		if vllm.HasAbortedChoice(body) {
			return vllm.EndAborted
		}
	case responsesFormat:
		return vllm.EndOfResponse(gjson.ParseBytes(body))
	case messagesFormat:
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
	a.proxy.recheckHealth(b)
	timer := time.NewTimer(unexplainedEndTimeout)
	defer timer.Stop()
	for {
		changed := a.proxy.registry.StateChanged() // before looking
		if b.State() == backends.Down {
			return true
		}
		select {
		case <-changed:
		case <-timer.C:
			return false
		case <-a.context.Done():
			return false
		}
	}
}

// keepBody makes body that of the response, if there is memory for it.
func (f *failure) keepBody(buffers *responseBuffers, e *endpoint, body []byte) {
	if n := int64(len(body)); buffers.reserve(n) {
		f.body, f.charged = body, n
	} else {
		f.setProxyErrorBody(e)
	}
}

// setProxyErrorBody replaces a response that cannot be kept by an error of the proxy's own with its status.
func (f *failure) setProxyErrorBody(e *endpoint) {
	f.body, f.header = e.dialect().errorBody(replicaError(f.status, nil)), jsonHeader()
}

func jsonHeader() http.Header { return http.Header{"Content-Type": {"application/json"}} }

// replaceBestFailure makes f the failure that the client gets should no attempt succeed, and
// frees the body of the one before. A nil f only frees.
func (r *request) replaceBestFailure(f *failure) {
	if best := r.history.best; best != nil {
		r.proxy.buffers.release(best.charged)
		best.body, best.charged = nil, 0
	}
	r.history.best = f
}

// relayFailure sends the kept response of a failed attempt.
func (r *request) relayFailure(f *failure) {
	r.outcome.Backend = f.decision.Backend.Name
	if r.headersSent {
		r.sendError(replicaError(f.status, f.body))
		return
	}
	if !r.allowsTransferParams() && !isEncoded(f.header) {
		blankTransferParams(f.body)
	}
	h := r.fillResponseHeader(f.decision, f.header)
	h["Content-Length"] = []string{strconv.Itoa(len(f.body))}
	if f.status == http.StatusServiceUnavailable && h.Get("Retry-After") == "" {
		h["Retry-After"] = []string{"1"}
	}
	r.outcome.Code = f.status
	r.client.WriteHeader(f.status)
	if _, err := r.client.Write(f.body); err != nil {
		r.recordDisconnectOrCancel(r.client.abortPhase(metrics.AbortInBody))
	}
}

// recordBodyUsage records the usage that a complete response reports, and its text.
func (a *attempt) recordBodyUsage(body []byte) {
	if !a.endpoint.format.isRead() {
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
	u.parse(object, a.endpoint.format)
	a.recordUsage(&u)
	if !u.known && a.endpoint.format != responsesFormat { // those of a background response are not there yet
		a.estimateTokensByLength(len(body))
	}
}

// recordTailUsage records usage from the end of a response that was not buffered whole: quotes in a text are
// escaped, so none is mistaken for it. Where there is none, its length in bytes counts.
func (a *attempt) recordTailUsage(tail *tailReader, length int) {
	if !a.endpoint.format.isRead() || a.outcome.Code >= http.StatusMultipleChoices {
		return
	}
	var u tokenUsage
	if _, object, found := bytes.Cut(tail.tail, []byte(`"usage":`)); found {
		u.parse(gjson.ParseBytes(object), a.endpoint.format)
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
	if limit := a.input.request.MaxOutputTokens * max(a.input.request.Sequences, 1); limit > 0 {
		a.estimatedTokens = min(a.estimatedTokens, limit)
	}
}

// setResultUsage sets what the router learns of the usage.
func (a *attempt) setResultUsage(u *tokenUsage) {
	b := a.decision.Backend
	if u.hasCached {
		b.RecordReportsCached(a.endpoint.number)
	}
	a.result.OutputTokens = u.completionTokens
	a.result.PromptTokens = u.promptTokens
	a.result.CachedTokens = u.cachedTokens
	// Some versions leave the figure out when it is 0.
	a.result.CachedKnown = u.known && (u.hasCached || b.ReportsCached(a.endpoint.number))
}

// recordUsage records what the response said of its tokens.
func (a *attempt) recordUsage(u *tokenUsage) {
	a.setResultUsage(u)
	if a.handover != nil { // most replicas repeat this figure; others would count all that was transferred
		a.result.CachedTokens, a.result.CachedKnown = a.handover.result.CachedTokens, a.handover.result.CachedKnown
	}
	a.outcome.PromptTokens = a.decision.PromptTokens
	if u.promptTokens > 0 {
		a.outcome.PromptTokens = u.promptTokens
	}
}
