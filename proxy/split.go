package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/vllm"
	"warmroute/metrics"
	"warmroute/prompt"
	"warmroute/proxy/fault"
	"warmroute/proxy/httpheader"
	"warmroute/proxy/relay"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

// A split request becomes two. The prefill request asks one replica for one token of the response and for the parameters
// by which another one can read the prompt's KV cache; the decode request is the client's request with these parameters.
// The first replica keeps the cache for a lease: after it, the other one reads the memory of other requests, and the
// client gets a wrong response. So the parameters are used in the first half of the lease only, and once. Without them
// the request is sent as a whole, which any replica can serve.

// prepareDecode makes the attempt the decode request of a split request, unless it is for the whole request. It sends the
// prefill request, if no earlier attempt has, and blocks until its response. It returns the failure of the attempt, or nil.
func (a *attempt) prepareDecode() *fault.Failure {
	h := &a.req.history
	if p := a.decision.Prefill; p != nil {
		o, f := a.sendPrefillRequest(p)
		if f != nil {
			return f
		}
		h.kvTransfer = o
	}
	if h.kvTransfer == nil {
		return nil
	}
	if f := h.kvTransfer.CheckUsable(time.Now()); f != nil {
		return f
	}
	a.kvTransfer = h.kvTransfer
	a.req.prefillBackend, a.req.prefillTime = a.kvTransfer.Prefill.Backend.Name, a.kvTransfer.Took
	a.req.matchedTokens = a.kvTransfer.Prefill.MatchedTokens // what the backends had before this request
	a.req.outcome.ElsewhereTokens = a.kvTransfer.Prefill.ElsewhereTokens
	a.decision.StartDecode()
	return nil
}

// isForPrefillOnly reports whether the router has a request wait for another backend rather than be served by b.
func (s *Settings) isForPrefillOnly(b *backends.Backend, req *router.Request) bool {
	return s.QueueForRoles && b.Options().Role == backends.RolePrefill && !req.NoEngine && !req.Stored
}

// kvTransferEdits returns the edits that make the client's body that of the decode request. Other attempts have none.
func (a *attempt) kvTransferEdits() []prompt.Edit {
	if a.kvTransfer == nil {
		return nil
	}
	at := a.req.input.membersAt
	return []prompt.Edit{{Start: at, End: at, Text: a.kvTransfer.Member}}
}

// sendPrefillRequest has the backend of p do the prefill of the request, and releases p. It returns what the decode request
// needs, or the failure of the attempt.
func (a *attempt) sendPrefillRequest(p *router.Reservation) (*upstream.KVTransfer, *fault.Failure) {
	prefill := &attempt{req: a.req, decision: p, isPrefillRequest: true, token: a.token, result: router.Outcome{End: router.NotProcessed}}
	defer prefill.releasePrefill()
	begun := time.Now()
	a.req.context.BeginPrefill(p, a.req.settings.Response)
	prefill.startSpan("prefill")
	a.req.input.setSessionHeader(a.req.httpReq.Header, p.KVSession)
	resp, err := prefill.send(a.req.input.scratch.prefillEdits, time.Time{})
	o := &upstream.KVTransfer{Prefill: p, EndedAt: time.Now()}
	var f *fault.Failure
	if err != nil {
		a.req.queueKeepalive.stop()
		f = prefill.classifyOrEndRequest(err)
	} else {
		defer resp.Body.Close()
		a.req.spans.SetStatus(resp.StatusCode)
		o.Member, f = prefill.readPrefillResponse(resp)
	}
	if cause := a.req.context.EndPrefill(); f == nil && cause != nil {
		f = prefill.classifyOrEndRequest(cause)
	}
	if f == nil && !a.req.proxy.buffers.Reserve(int64(len(o.Member))) {
		f = &fault.Failure{Reason: metrics.RetryNoTransferParams, Err: upstream.ErrTransferParamsMemory}
	}
	if f != nil {
		prefill.setRouterOutcome(f)
		return nil, prefill.withoutResponse(f)
	}
	a.req.startQueueKeepalive()
	o.Took, o.Result, o.Reserved = time.Since(begun), prefill.result, int64(len(o.Member))
	o.NotAfter = o.EndedAt.Add(a.req.settings.KVLease / 2)
	o.Address = upstream.TransferAddress(o.Member)
	a.req.proxy.metrics.ObservePrefillRequest(o.Took)
	return o, nil
}

// readPrefillResponse returns the member for the decode request's body that the response to the prefill request has. Without
// one it returns a failure, which is done if the client has the response: an error that it would get from any replica.
// It may stop the keep-alives of the queue.
func (a *attempt) readPrefillResponse(resp *http.Response) (member string, f *fault.Failure) {
	if resp.StatusCode != http.StatusOK {
		a.req.queueKeepalive.stop()
	}
	body, ok := resp.Body.(relay.Body)
	if !ok {
		a.req.queueKeepalive.stop()
		return "", a.classifyOrEndRequest(fmt.Errorf("the transport's body is a %T", resp.Body))
	}
	body.ForbidReuse()
	if f := a.checkResponseHeaderID(resp.Header); f != nil {
		return "", f
	}
	if f := fault.OfHeader(resp); f != nil {
		return "", f
	}
	body.SetIdleTimeout(a.req.settings.Idle)
	switch status := resp.StatusCode; {
	case status == http.StatusOK && httpheader.IsEncoded(resp.Header):
		return "", &fault.Failure{Reason: metrics.RetryEncoded,
			Err: errors.New("the response to the prefill request is encoded: disable compression in front of the replica")}
	case status == http.StatusOK:
		return a.readTransferParams(resp, body)
	case a.isPrefillRefusal(status):
		if f = a.relayWhole(resp, body); f == nil {
			a.req.outcome.Backend = a.decision.Backend.Name
			f = &fault.Failure{Done: true}
		}
		return "", f
	case status == http.StatusBadRequest: // by an older replica, of the prefill request and not of the client's
		return "", &fault.Failure{Reason: metrics.RetryStatus(status), Err: upstream.ErrThinkingBudget, SameBackend: true}
	}
	body.AllowReuse() // an error has no id
	f = a.readErrorResponse(resp)
	if !f.Done && !httpheader.IsEncoded(resp.Header) && vllm.IsMissingEndpoint(f.Status, f.Body) {
		a.req.proxy.buffers.Release(f.Reserved)
		f = a.recordMissingEndpoint(resp, f.Body)
	}
	return "", f
}

// isPrefillRefusal reports whether a status of a prefill request is an error of the client's own, which any replica would
// send. It is not if it may be about the prefill request, about this replica or about its load.
func (a *attempt) isPrefillRefusal(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusNotFound, http.StatusTooManyRequests:
		return false
	case http.StatusBadRequest:
		return !a.req.input.hasThinkingBudget
	}
	return status >= 400 && status < 500
}

// readTransferParams is readPrefillResponse for a response with status 200.
func (a *attempt) readTransferParams(resp *http.Response, body relay.Body) (member string, f *fault.Failure) {
	buffers := &a.req.proxy.buffers
	buf := buffers.Get()
	reserved, complete, err := buffers.Read(buf, resp.Body, false)
	defer func() {
		buffers.Release(reserved)
		buffers.Put(buf)
	}()
	a.req.queueKeepalive.stop()
	if err != nil {
		return "", a.classifyOrEndRequest(err)
	}
	if f := a.checkBodyID(buf.Bytes()); f != nil {
		return "", f
	}
	body.AllowReuse()
	if f := a.checkBuffered(resp, buf.Bytes()); f != nil {
		return "", f
	}
	var u relay.Usage
	u.Parse(gjson.GetBytes(buf.Bytes(), "usage"), a.req.endpoint.Format)
	a.setResultUsage(&u)
	a.result.End = router.Completed
	member, ok := upstream.KVTransferMember(buf.Bytes(), a.decision.Backend.Host())
	if !ok || !complete {
		return "", &fault.Failure{Reason: metrics.RetryNoTransferParams, Err: upstream.ErrNoTransferParams}
	}
	return member, nil
}

// withoutResponse returns the failure of a prefill request as one that is not charged, and whose response no client gets.
func (a *attempt) withoutResponse(f *fault.Failure) *fault.Failure {
	if f.Done {
		return f
	}
	a.req.proxy.buffers.Release(f.Reserved)
	split := metrics.SplitPrefillFailed
	if f.QueueFull && a.req.settings.QueueForRoles { // it waits until a replica can do its prefill
		split = ""
	}
	return &fault.Failure{
		Reason: f.Reason, Err: f.Err, IsFree: true, SuspectsCrash: f.SuspectsCrash, ShuttingDown: f.ShuttingDown, QueueFull: f.QueueFull,
		Decision: a.decision, Split: split,
	}
}

// releasePrefill ends the span of a prefill request and tells the router how it ended. Its tokens are part of the decode
// request's, unless the client has disconnected before.
func (a *attempt) releasePrefill() {
	a.endAttemptSpan()
	if a.result.End == router.ClientDisconnected {
		a.setTokenUsage()
	}
	a.decision.Release(a.result)
}

// adjustDecodeFailure makes f, if there is one, the failure of a decode request: where only the KV transfer may have failed,
// the request is sent as a whole, to whichever backend, as if this attempt had not been made.
func (a *attempt) adjustDecodeFailure(f *fault.Failure) {
	if f == nil || f.Done || a.kvTransfer == nil {
		return
	}
	if f.Status != 0 && !f.QueueFull && !f.ShuttingDown && !f.IsUnsuited() {
		a.req.proxy.router.RecordTransfer(a.kvTransfer.Prefill.Backend, a.decision.Backend, true)
	}
	f.NoRetry, f.Split = false, metrics.SplitDecodeFailed
	isLate := errors.Is(f.Err, upstream.ErrLateTransfer)
	if isLate {
		f.Reason, f.Split = metrics.RetryKVTransfer, metrics.SplitLate
	}
	if a.quotesKVTransfer(f.Status, f.Body, true) {
		a.req.proxy.buffers.Release(f.Reserved)
		f.Reserved = 0
		f.SetProxyErrorBody(a.req.endpoint.Dialect())
	}
	if isLate || f.Status != 0 && !f.QueueFull && !f.ShuttingDown && !f.IsUnsuited() {
		f.IsFree, f.SameBackend, f.SuspectsCrash = true, true, false
	}
	a.req.proxy.recheckHealth(a.kvTransfer.Prefill.Backend) // it may be what has failed
}

// quotesKVTransfer reports whether an error response to a prefill or decode request may have parameters of the KV transfer in it, as one
// that is not readable in full may: vLLM quotes a body that it finds invalid, and where a transfer failed.
func (a *attempt) quotesKVTransfer(status int, body []byte, isReadable bool) bool {
	if a.kvTransfer == nil && !a.isPrefillRequest || status < 400 {
		return false
	}
	return !isReadable || a.kvTransfer.IsQuotedIn(body)
}

// newQuoteFailure returns the failure of a decode request whose error response no client may get. The request is sent again
// without the parameters, and gets its error then.
func (a *attempt) newQuoteFailure(status int) *fault.Failure {
	f := &fault.Failure{Reason: metrics.RetryStatus(status), Err: upstream.ErrQuotesTransfer, Status: status}
	f.SetProxyErrorBody(a.req.endpoint.Dialect())
	return f
}

// recordSplitFailure records what a failure means for a split request: it is not split again, and its parameters are
// used by another attempt only if nothing was sent by this one.
func (r *request) recordSplitFailure(f *fault.Failure) {
	if f.Split == "" {
		return
	}
	r.splitResult = f.Split
	if r.history.kvTransfer == nil || !f.NothingSent() {
		r.endSplit()
	}
}

// setPrefilledOn has the router pick a backend for the decode request of the KV transfer, or else for the whole request.
func (r *request) setPrefilledOn(decode bool) {
	switch o := r.history.kvTransfer; {
	case decode:
		r.input.request.PrefilledOn = o.Prefill.Backend
	case o != nil:
		r.endSplit()
	}
}

// endSplit makes all further attempts those of a request that is not split, and frees the parameters of the KV transfer. A
// second call does nothing.
func (r *request) endSplit() {
	r.input.request.Splittable, r.input.request.PrefilledOn = false, nil
	r.history.kvTransfer.Release(&r.proxy.buffers)
	r.history.kvTransfer = nil
}
