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
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/proxy/api"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/relay"
	"warmroute/router"
)

// comesInPieces reports whether a replica may send a response that is not a stream of events while it makes it, such as
// audio. What has a Content-Length was complete before.
func (a *attempt) comesInPieces(resp *http.Response) bool {
	isOther := resp.Header["Content-Type"] != nil && !httpheader.HasContentType(resp.Header, "application/json")
	return resp.StatusCode < 300 && len(resp.TransferEncoding) > 0 && (a.req.endpoint.IsExtra || isOther)
}

// relayBuffered relays a response that is not streamed. Nothing is sent to the client
// before all of it has come, unless it is too long or comes in pieces.
func (a *attempt) relayBuffered(resp *http.Response, body relay.Body) *fault.Failure {
	buffers := &a.req.proxy.buffers
	buf := buffers.Get()
	reserved, complete, err := buffers.Read(buf, resp.Body, a.comesInPieces(resp))
	defer func() {
		buffers.Release(reserved)
		buffers.Put(buf)
	}()
	if err != nil {
		return a.classifyOrEndRequest(err)
	}
	if f := a.checkBodyID(buf.Bytes()); f != nil {
		return f
	}
	body.AllowReuse()
	encoded, ok := httpheader.IsEncoded(resp.Header), resp.StatusCode < 300
	if a.quotesKVTransfer(resp.StatusCode, buf.Bytes(), complete && !encoded) {
		return a.newQuoteFailure(resp.StatusCode)
	}
	if !complete {
		return a.relayUnbuffered(resp, buf.Bytes())
	}
	if !encoded && vllm.IsMissingEndpoint(resp.StatusCode, buf.Bytes()) {
		return a.recordMissingEndpoint(resp, buf.Bytes())
	}
	if !encoded && a.isRankRefused(resp.StatusCode, buf.Bytes()) {
		return a.recordRefusedRank()
	}
	if f := a.checkQueueFull(resp, buf.Bytes()); f != nil {
		return f
	}
	if !encoded && a.isRefusedAsTooLong(resp.StatusCode, buf.Bytes()) {
		return a.newTooLongFailure(resp.Header, bytes.Clone(buf.Bytes()))
	}
	if a.isResponseLost(resp.StatusCode, buf.Bytes()) {
		a.sendLostResponse()
		return nil
	}
	switch {
	case ok && encoded && a.req.endpoint.Format.IsRead():
		a.estimateTokensByLength(buf.Len())
	case ok && !encoded:
		if f := a.checkBuffered(resp, buf.Bytes()); f != nil {
			return f
		}
		a.recordBodyUsage(buf.Bytes())
		a.metadata.AddBody(a.req.endpoint.Format, buf.Bytes())
		a.rememberBody(buf.Bytes())
		a.beginBackground(buf.Bytes())
	}
	if ok {
		a.result.End = router.Completed
	}
	if !encoded && !a.req.settings.allowsTransferParams() {
		relay.BlankTransferParams(buf.Bytes())
	}
	length := contentLengthHeader(resp, buf.Len())
	a.recordCommittedResponse(resp)
	h := a.req.fillResponseHeader(a.decision, resp.Header)
	h["Content-Length"] = length
	if a.result.End == router.Completed && a.req.background == nil {
		a.recordAndReleaseDecision()
	}
	a.req.client.WriteHeader(resp.StatusCode)
	if _, err := a.req.client.Write(buf.Bytes()); err != nil {
		a.req.recordDisconnectOrCancel(a.req.client.DisconnectPhase(metrics.DisconnectInBody))
	}
	return nil
}

// checkBuffered returns the failure that a complete response is, or nil.
func (a *attempt) checkBuffered(resp *http.Response, body []byte) *fault.Failure {
	end := relay.EndOfBody(a.req.endpoint.Format, body)
	switch {
	case end == vllm.EndAborted, end == vllm.EndUnexplained && a.awaitDown():
		return a.recordReplicaAbort()
	case !httpheader.IsFramed(resp) && httpheader.HasContentType(resp.Header, "application/json") && !json.Valid(body):
		return a.classifyOrEndRequest(fault.ErrTruncated)
	case a.req.endpoint.Format.HasChoices() && vllm.IsEmptyCompletion(body):
		return a.newErrorFailure(fault.New(http.StatusBadGateway, fault.CodeReplicaFailed, "the replica's response has no choices"), nil)
	case a.req.endpoint.Format == api.ResponsesFormat && vllm.IsFailedResponse(body):
		return a.newErrorFailure(fault.ReplicaError(vllm.ErrorEventStatus(body), body), body)
	}
	return nil
}

// newErrorFailure returns the failure of a response that is an error in spite of its status: e, which the client gets if no other
// attempt succeeds. It means what the error in the replica's body does; nil: its engine has failed.
func (a *attempt) newErrorFailure(e *fault.Error, replicaBody []byte) *fault.Failure {
	f := &fault.Failure{
		Reason: metrics.RetryErrorEvent, Err: fault.ErrNoOutput, Status: e.Status, Header: fault.JSONHeader(),
		Body:          fault.Body(a.req.endpoint.Dialect(), e),
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
		if !httpheader.IsEncoded(resp.Header) {
			a.metadata.AddBody(a.req.endpoint.Format, head)
		}
	}
	a.req.client.WriteHeader(resp.StatusCode)
	from := relay.TailReader{Reader: resp.Body}
	to := relay.NewPieceWriter(&a.req.client, httpheader.IsEncoded(resp.Header) || a.req.settings.allowsTransferParams(), false)
	_, err := to.Write(head)
	if err == nil {
		_, err = io.Copy(&to, &from)
	}
	if err == nil {
		err = to.WriteUndecided()
	}
	length := len(head) + from.BytesRead
	if from.Err == nil || a.req.lifetime.isDone() { // the engine had generated the rest as well
		length = max(length, int(resp.ContentLength))
	}
	a.recordTailUsage(&from, length)
	switch {
	case err == nil:
		a.req.client.ExtendWriteDeadline()
		if resp.StatusCode < 300 {
			a.result.End = router.Completed
		}
		return nil
	case a.req.lifetime.isEndedByProxy():
		a.result.End, a.req.outcome.Code = router.ClientDisconnected, a.req.recordProxyEnd().Status
		panic(http.ErrAbortHandler) // as below
	case from.Err == nil || from.Err == io.EOF || a.req.lifetime.isDisconnected(): // it was the writing that failed
		a.recordDisconnect(a.req.client.DisconnectPhase(metrics.DisconnectInBody))
		return nil
	}
	a.recordTruncated(http.StatusBadGateway, err)
	// A normal end would make what has come look like the whole response.
	panic(http.ErrAbortHandler)
}

// readErrorResponse reads a response with a status that another backend may better.
func (a *attempt) readErrorResponse(resp *http.Response) *fault.Failure {
	f := fault.OfStatus(resp)
	switch body, err := a.readErrorBody(resp); {
	case err == nil:
		f.Body, f.Reserved = body, int64(len(body))
	case errors.Is(err, fault.ErrErrorBodyMemory):
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
	f.KeepBody(a.req.proxy.buffers.Reserve, a.req.endpoint.Dialect(), bytes.Clone(body))
	return f
}

// readErrorBody reads a short body whole, in bounded time. The length of what it returns
// stays reserved, for the caller to release.
func (a *attempt) readErrorBody(resp *http.Response) (reservedBody []byte, err error) {
	buffers := &a.req.proxy.buffers
	if !buffers.Reserve(relay.MaxErrorBodyBytes) {
		return nil, fault.ErrErrorBodyMemory
	}
	reserved := int64(relay.MaxErrorBodyBytes)
	defer func() { buffers.Release(reserved) }()
	c := a.req.context
	timer := time.AfterFunc(fault.ErrorBodyTimeout, func() { c.Cancel(fault.ErrErrorBodyTimeout) })
	defer timer.Stop()
	buf := buffers.Get()
	defer buffers.Put(buf)
	switch n, err := buf.ReadFrom(io.LimitReader(resp.Body, relay.MaxErrorBodyBytes+1)); {
	case err != nil:
		return nil, err
	case n > relay.MaxErrorBodyBytes: // no error that a client could use, and a part is not the whole
		return nil, fault.ErrErrorBodyTooLong
	}
	body := bytes.Clone(buf.Bytes())
	reserved -= int64(len(body))
	return body, nil
}

// recordMissingEndpoint records that the replica does not serve the endpoint, or may not if the response is empty, and
// returns the failure. It copies the body.
func (a *attempt) recordMissingEndpoint(resp *http.Response, body []byte) *fault.Failure {
	// no reload has removed it
	if e := a.req.proxy.routes.Load().ByPattern[a.req.endpoint.Path].Endpoint; e != nil && e.Number == a.req.endpoint.Number {
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
	f.KeepBody(a.req.proxy.buffers.Reserve, a.req.endpoint.Dialect(), bytes.Clone(body))
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
		return other != b && (longer == 0 || longer > length) && !a.req.settings.isForPrefillOnly(other, req) &&
			!other.LacksEndpoint(req.Endpoint, time.Now())
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
	f.KeepBody(a.req.proxy.buffers.Reserve, a.req.endpoint.Dialect(), body)
	return f
}

// isRankRefused reports whether a response says that the server does not have the data-parallel rank that it was
// sent: it has other ranks than before.
func (a *attempt) isRankRefused(status int, body []byte) bool {
	e, refused := vllm.ParseRankError(status, body)
	return refused && strconv.Itoa(e.Rank) == httpheader.First(a.req.httpReq.Header, vllm.RankHeader)
}

// recordRefusedRank records that the server has other ranks than before, and returns the failure: the request is sent
// again, to the same backend or another one.
func (a *attempt) recordRefusedRank() *fault.Failure {
	a.decision.Backend.StopSendingRankHeader(time.Now())
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

// replaceBest makes f the failure that the client gets should no attempt succeed, and
// frees the body of the one before. A nil f only frees.
func (h *history) replaceBest(f *fault.Failure, buffers *relay.Buffers) {
	if best := h.best; best != nil {
		buffers.Release(best.Reserved)
		best.Body, best.Reserved = nil, 0
	}
	h.best = f
}

// relayFailure sends the kept response of a failed attempt.
func (r *request) relayFailure(f *fault.Failure) {
	r.outcome.Backend = f.Decision.Backend.Name
	if r.headersSent {
		r.sendError(fault.ReplicaError(f.Status, f.Body))
		return
	}
	if !r.settings.allowsTransferParams() && !httpheader.IsEncoded(f.Header) {
		relay.BlankTransferParams(f.Body)
	}
	h := r.fillResponseHeader(f.Decision, f.Header)
	h["Content-Length"] = []string{strconv.Itoa(len(f.Body))}
	if f.Status == http.StatusServiceUnavailable && h.Get("Retry-After") == "" {
		h["Retry-After"] = []string{"1"}
	}
	r.outcome.Code = f.Status
	r.client.WriteHeader(f.Status)
	if _, err := r.client.Write(f.Body); err != nil {
		r.recordDisconnectOrCancel(r.client.DisconnectPhase(metrics.DisconnectInBody))
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
	var u relay.Usage
	u.Parse(object, a.req.endpoint.Format)
	a.recordUsage(&u)
	if !u.Known && a.req.endpoint.Format != api.ResponsesFormat { // those of a background response are not there yet
		a.estimateTokensByLength(len(body))
	}
}

// recordTailUsage records usage from the end of a response that was not buffered whole: quotes in a text are
// escaped, so none is mistaken for it. Where there is none, its length in bytes counts.
func (a *attempt) recordTailUsage(tail *relay.TailReader, length int) {
	if !a.req.endpoint.Format.IsRead() || a.req.outcome.Code >= http.StatusMultipleChoices {
		return
	}
	var u relay.Usage
	if _, object, found := bytes.Cut(tail.Tail, []byte(`"usage":`)); found {
		u.Parse(gjson.ParseBytes(object), a.req.endpoint.Format)
	}
	a.recordUsage(&u)
	if u.CompletionTokens == 0 {
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

// setStreamedTokens sets the output tokens of a stream that was read as far as it goes.
func (a *attempt) setStreamedTokens(e *relay.Scanner) {
	a.result.OutputTokens, a.countsEvents = e.CompletionTokens(), e.Usage.CompletionTokens == 0
}

// setResultUsage sets what the router learns of the usage.
func (a *attempt) setResultUsage(u *relay.Usage) {
	b := a.decision.Backend
	if u.HasCached {
		b.RecordReportsCached(a.req.endpoint.Number)
	}
	a.result.OutputTokens = u.CompletionTokens
	a.result.PromptTokens = u.PromptTokens
	a.result.CachedTokens = u.CachedTokens
	// Some versions leave the figure out when it is 0.
	a.result.CachedKnown = u.Known && (u.HasCached || b.ReportsCached(a.req.endpoint.Number))
}

// recordUsage records what the response said of its tokens.
func (a *attempt) recordUsage(u *relay.Usage) {
	a.setResultUsage(u)
	if a.kvTransfer != nil { // most replicas repeat this figure; others would count all that was transferred
		a.result.CachedTokens, a.result.CachedKnown = a.kvTransfer.Result.CachedTokens, a.kvTransfer.Result.CachedKnown
	}
	a.req.outcome.PromptTokens = a.decision.PromptTokens
	if u.PromptTokens > 0 {
		a.req.outcome.PromptTokens = u.PromptTokens
	}
}

// relayErrorAsEvent sends a response that is not a stream as an error event, to a client that has the
// header of a stream. It returns a failure if another backend may be asked.
func (a *attempt) relayErrorAsEvent(resp *http.Response, from relay.Body) *fault.Failure {
	body, err := a.readErrorBody(resp)
	defer a.req.proxy.buffers.Release(int64(len(body)))
	if f := a.checkBodyID(body); f != nil {
		return f
	}
	from.AllowReuse()
	if a.isResponseLost(resp.StatusCode, body) {
		a.sendLostResponse()
		return nil
	}
	if err != nil && !errors.Is(err, fault.ErrErrorBodyTooLong) && !errors.Is(err, fault.ErrErrorBodyMemory) {
		return a.classifyOrEndRequest(err)
	}
	if a.quotesKVTransfer(resp.StatusCode, body, true) {
		return a.newQuoteFailure(resp.StatusCode)
	}
	if err == nil && !httpheader.IsEncoded(resp.Header) && a.isRankRefused(resp.StatusCode, body) {
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
	a.req.sendError(fault.ReplicaError(resp.StatusCode, body))
	return nil
}
