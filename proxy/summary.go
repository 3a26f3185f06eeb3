package proxy

import (
	"net/http"
	"net/netip"
	"time"

	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/activity"
	"warmroute/proxy/admit"
	"warmroute/proxy/api"
	"warmroute/proxy/recorder"
	"warmroute/proxy/relay"
	"warmroute/proxy/tracing"
	"warmroute/router"
)

// maxLoggedFailures is how many failed attempts the log of a request names.
const maxLoggedFailures = 16

// summary is what metrics, the access log, traces and the recording say of a request.
type summary struct {
	outcome   metrics.Request
	spans     *tracing.Request  // nil: requests are not traced
	recording *recorder.Request // nil: requests are not recorded, or not this one

	bytesIn        int                     // of the body
	reason         string                  // of the last attempt's decision
	matchedTokens  int                     // by that decision; of a split request, by that for its prefill
	estimatedInput int                     // tokens of the prompt, by that decision
	failures       []accesslog.Failure     // attempts that failed, the first of them
	disconnected   metrics.DisconnectPhase // what the request was doing when its client disconnected; empty: it did not
	cancelled      bool                    // by an operator

	splitResult    metrics.SplitResult // empty: the fleet has no replicas for prefill or decode
	prefillBackend string              // of the prefill request, if the last attempt is a decode request
	prefillTime    time.Duration       // of that request
}

// recordDecision records the decision of a new attempt.
func (s *summary) recordDecision(d *router.Reservation) {
	s.outcome.Backend = d.Backend.Name
	s.reason, s.matchedTokens, s.estimatedInput, s.outcome.CachedKnown = d.Reason, d.MatchedTokens, d.PromptTokens, false
	s.outcome.ElsewhereTokens = d.ElsewhereTokens
	s.prefillBackend, s.prefillTime = "", 0
}

// startSpan starts the span of an attempt. kind is prefill or decode for a request of a split one, else empty.
func (a *attempt) startSpan(kind string) {
	if a.req.spans == nil {
		return
	}
	d := a.decision
	span := tracing.Attempt{
		Number: a.req.history.sent, Model: a.req.outcome.Model, Backend: d.Backend.Name, Reason: d.Reason, RequestKind: kind,
		Scheme: d.Backend.URL.Scheme, Host: d.Backend.URL.Host,
		MatchedTokens: d.MatchedTokens, PromptTokens: d.PromptTokens,
		MaxTokens: a.req.input.request.MaxOutputTokens, Streams: a.req.input.request.Streams,
	}
	if kind == "prefill" {
		span.MaxTokens, span.Streams = 1, false
	}
	a.req.spans.StartAttempt(&span, a.req.httpReq.Header)
	if a.req.spans.IsRecording() {
		a.metadata = &relay.Metadata{}
	}
}

func (a *attempt) endAttemptSpan() {
	a.req.outcome.CachedKnown = a.result.CachedKnown
	if a.req.spans == nil {
		return
	}
	reason := a.failureReason
	response := tracing.Response{Tokens: tracing.Tokens{
		Prompt: a.result.PromptTokens, Output: a.result.OutputTokens, Cached: -1, OutputEstimated: a.countsEvents,
	}}
	switch {
	case reason != "":
	case a.result.End == router.Truncated:
		reason = "truncated"
	case a.req.cancelled:
		reason = tracing.ErrorCancelled
	case a.req.disconnected != "":
		reason = tracing.ErrorDisconnected
	case a.result.End == router.ClientDisconnected:
		reason = "shutting_down"
	}
	if a.result.CachedKnown {
		response.Cached = a.result.CachedTokens
	}
	if m := a.metadata; m != nil {
		response.ID, response.Model, response.FinishReasons = m.ID, m.Model, m.FinishReasons
	}
	a.req.spans.EndAttempt(reason, &response)
}

// endTraceAndRecord ends the request's trace, keeps the request for operators, and writes its line of the access log.
func (r *request) endTraceAndRecord() {
	o, s := &r.outcome, &r.summary
	f := &activity.FinishedRequest{Entry: accesslog.Entry{
		At: r.inFlight.Arrived.Add(o.Duration), ID: r.inFlight.ID, Client: clientName(r.httpReq, r.clientAddress, r.settings), Key: r.keyName(),
		Endpoint: o.Endpoint, Model: o.Model, ModelName: o.ModelName, Backend: o.Backend,
		PrefillBackend: s.prefillBackend, Reason: s.reason, Disconnected: string(s.disconnected), Cancelled: s.cancelled, Failures: s.failures,
		TraceID: r.spans.TraceID(r.httpReq.Header),
		Code:    o.Code, Attempts: r.history.sent, BytesIn: int64(s.bytesIn), BytesOut: r.client.BytesWritten,
		Tokens: accesslog.Tokens{Prompt: r.promptTokens, Predicted: s.matchedTokens, Cached: -1, Output: r.completionTokens},
		Times:  accesslog.Times{Total: o.Duration, TTFT: o.TTFT, Queued: r.history.waited.Total(), Overhead: o.Overhead, Prefill: s.prefillTime},
	}}
	isEstimated := r.estimated.prompt > 0
	if f.Tokens.Prompt == 0 {
		f.Tokens.Prompt, isEstimated = s.estimatedInput, true
	} else {
		f.Tokens.Predicted = o.PredictedTokens // in the tokens of the reported prompt
	}
	if o.CachedKnown {
		f.Tokens.Cached = o.CachedTokens
	}
	r.spans.End(&f.Entry, tracing.Tokens{
		Prompt: f.Tokens.Prompt, Output: f.Tokens.Output, Cached: f.Tokens.Cached,
		PromptEstimated: isEstimated, OutputEstimated: r.estimated.output > 0,
	})
	r.proxy.activity.AddFinished(f, r.account != nil || r.proxy.keys.Empty())
	if r.proxy.accessLog.Enabled() {
		r.proxy.accessLog.EnqueueSampled(&f.Entry)
	}
}

// clientName returns the client's address, with the port where it is that of the connection.
func clientName(r *http.Request, address netip.Addr, s *Settings) string {
	if len(s.TrustedProxies) == 0 {
		return r.RemoteAddr
	}
	if peer, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && admit.NormalizeAddress(peer.Addr()) != address {
		return address.String()
	}
	return r.RemoteAddr
}

// beginRecording copies what the recording needs of the input. Endpoints that generate nothing are not recorded.
func (s *summary) beginRecording(to *recorder.Recorder, e *api.Endpoint, arrived time.Time, in *input) {
	if to == nil || !e.Format.IsRead() {
		return
	}
	q, req := to.NewRequest(), &in.request
	q.Arrived, q.Conversation = arrived, req.Conversation
	q.Streams, q.Bytes, q.ExtraBytes, q.Plain = req.Streams, req.Bytes-in.extraBytes, in.extraBytes, in.isPlain
	s.recording = q
	s.updateRecording(in)
}

// updateRecording copies what another model of the request's name changes in the input.
func (s *summary) updateRecording(in *input) {
	if q := s.recording; q != nil {
		q.Model, q.Blocks = in.request.Model, append(q.Blocks[:0], in.request.Blocks...)
	}
}

// addTokensToRecording records the tokens of an attempt. The last attempt's count.
func (a *attempt) addTokensToRecording() {
	if q := a.req.recording; q != nil {
		q.PromptTokens, q.OutputTokens = a.result.PromptTokens, a.result.OutputTokens
		q.CachedTokens, q.CachedKnown = a.result.CachedTokens, a.result.CachedKnown
	}
}

func (s *summary) finishRecording(to *recorder.Recorder) {
	if q := s.recording; q != nil {
		q.Code, q.TTFT, q.Duration = s.outcome.Code, s.outcome.TTFT, s.outcome.Duration
		to.Enqueue(q)
		s.recording = nil
	}
}
