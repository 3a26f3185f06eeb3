package proxy

import (
	"net/netip"
	"time"

	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/activity"
	"warmroute/proxy/admit"
	"warmroute/proxy/recorder"
	"warmroute/proxy/tracing"
	"warmroute/router"
)

// maxLoggedFailures is how many failed attempts the log of a request names.
const maxLoggedFailures = 16

// summary is what metrics, the access log, traces and the recording say of a request.
type summary struct {
	outcome   metrics.Request
	spans     *tracing.Request  // nil: requests are not traced
	recording *recorder.Request // nil: traffic is not recorded, or not this request

	bytesIn        int                 // of the body
	reason         string              // of the last attempt's decision
	matchedTokens  int                 // by that decision; of a split request, by that for its prefill
	estimatedInput int                 // tokens of the prompt, by that decision
	failures       []accesslog.Failure // attempts that failed, the first of them
	phase          metrics.AbortPhase  // in which the client was lost

	splitResult    metrics.SplitResult // empty: the fleet has no replicas for prefill or decode
	prefillBackend string              // of the prefill leg, if the last attempt is a decode leg
	prefillTime    time.Duration       // of that leg
}

// recordDecision records the decision of a new attempt.
func (r *request) recordDecision(d *router.Reservation) {
	r.outcome.Backend = d.Backend.Name
	r.reason, r.matchedTokens, r.estimatedInput, r.outcome.CachedKnown = d.Reason, d.MatchedTokens, d.PromptTokens, false
	r.prefillBackend, r.prefillTime = "", 0
}

// startSpan starts the span of an attempt, or of that leg of a split one.
func (a *attempt) startSpan(leg string) {
	if a.req.spans == nil {
		return
	}
	d := a.decision
	span := tracing.Attempt{
		Number: a.req.history.sent, Model: a.req.outcome.Model, Backend: d.Backend.Name, Reason: d.Reason, Leg: leg,
		Scheme: d.Backend.URL.Scheme, Host: d.Backend.URL.Host,
		MatchedTokens: d.MatchedTokens, PromptTokens: d.PromptTokens,
		MaxTokens: a.req.input.request.MaxOutputTokens, Streams: a.req.input.request.Streams,
	}
	if leg == "prefill" {
		span.MaxTokens, span.Streams = 1, false
	}
	a.req.spans.StartAttempt(&span, a.req.httpReq.Header)
}

func (a *attempt) endAttemptSpan() {
	a.req.outcome.CachedKnown = a.result.CachedKnown
	if a.req.spans == nil {
		return
	}
	reason, cached := a.failureReason, -1
	switch {
	case reason != "":
	case a.result.End == router.Truncated:
		reason = "truncated"
	case a.req.phase == metrics.AbortCancelled:
		reason = tracing.ErrorCancelled
	case a.req.phase != "":
		reason = tracing.ErrorDisconnected
	case a.result.End == router.ClientDisconnected:
		reason = "shutting_down"
	}
	if a.result.CachedKnown {
		cached = a.result.CachedTokens
	}
	a.req.spans.EndAttempt(reason, a.result.PromptTokens, a.result.OutputTokens, cached)
}

// endTraceAndRecord ends the request's trace, keeps the request for operators, and writes its line of the access log.
func (r *request) endTraceAndRecord() {
	o, s := &r.outcome, &r.summary
	f := &activity.FinishedRequest{Entry: accesslog.Entry{
		At: r.inFlight.Arrived.Add(o.Duration), ID: r.inFlight.ID, Client: r.clientName(), Key: r.keyName(), Endpoint: o.Endpoint, Model: o.Model, Backend: o.Backend,
		PrefillBackend: s.prefillBackend, Reason: s.reason, Phase: string(s.phase), Failures: s.failures, TraceID: r.spans.TraceID(r.httpReq.Header),
		Code: o.Code, Attempts: r.history.sent, BytesIn: int64(s.bytesIn), BytesOut: r.client.BytesWritten,
		Tokens: accesslog.Tokens{Prompt: r.promptTokens, Predicted: s.matchedTokens, Cached: -1, Output: r.completionTokens},
		Times:  accesslog.Times{Total: o.Duration, TTFT: o.TTFT, Queued: r.history.waited.Total(), Overhead: o.Overhead, Prefill: s.prefillTime},
	}}
	if f.Tokens.Prompt == 0 {
		f.Tokens.Prompt = s.estimatedInput
	}
	if o.CachedKnown {
		f.Tokens.Cached = o.CachedTokens
	}
	r.spans.End(&f.Entry)
	r.proxy.activity.AddFinished(f, r.account != nil || r.proxy.keys.Empty())
	if r.proxy.accessLog.Enabled() {
		r.proxy.accessLog.EnqueueSampled(&f.Entry)
	}
}

// clientName returns the client's address, with the port where it is that of the connection.
func (r *request) clientName() string {
	if len(r.settings.TrustedProxies) == 0 {
		return r.httpReq.RemoteAddr
	}
	if peer, err := netip.ParseAddrPort(r.httpReq.RemoteAddr); err == nil && admit.NormalizeAddress(peer.Addr()) != r.clientAddress {
		return r.clientAddress.String()
	}
	return r.httpReq.RemoteAddr
}

// beginRecording copies what the recording needs of the input. Endpoints that generate nothing are not recorded.
func (r *request) beginRecording() {
	if r.proxy.recorder == nil || !r.endpoint.Format.IsRead() {
		return
	}
	q, req := r.proxy.recorder.NewRequest(), &r.input.request
	q.Arrived, q.Model, q.Session = r.inFlight.Arrived, req.Model, req.Session
	q.Streams, q.Bytes, q.ExtraBytes, q.Plain = req.Streams, req.Bytes-r.input.extraBytes, r.input.extraBytes, r.input.isPlain
	q.Blocks = append(q.Blocks, req.Blocks...)
	r.recording = q
}

// addTokensToRecording records the tokens of an attempt. The last attempt's count.
func (a *attempt) addTokensToRecording() {
	if q := a.req.recording; q != nil {
		q.PromptTokens, q.OutputTokens = a.result.PromptTokens, a.result.OutputTokens
		q.CachedTokens, q.CachedKnown = a.result.CachedTokens, a.result.CachedKnown
	}
}

func (r *request) finishRecording() {
	if q := r.recording; q != nil {
		q.Code, q.TTFT, q.Duration = r.outcome.Code, r.outcome.TTFT, r.outcome.Duration
		r.proxy.recorder.Enqueue(q)
		r.recording = nil
	}
}
