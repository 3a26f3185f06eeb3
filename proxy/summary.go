package proxy

import (
	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/tracing"
	"warmroute/router"
)

// maxLoggedFailures is how many failed attempts the story of a request names.
const maxLoggedFailures = 16

// summary is what the access log and the traces tell of a request besides what
// metrics do.
type summary struct {
	bytesIn     int                // of the body
	reason      string             // of the last attempt's decision
	matched     int                // tokens, by that decision
	prompt      int                // tokens, by that decision
	cachedKnown bool               // the replica told how much of the prompt it had
	failures    []string           // reasons of attempts that failed, the first of them
	phase       metrics.AbortPhase // in which the client was lost
}

func (s *summary) addFailure(reason string) {
	if len(s.failures) < maxLoggedFailures {
		s.failures = append(s.failures, reason)
	}
}

// beginAttemptSpan begins an attempt.
func (r *request) beginAttemptSpan(d *router.Decision) {
	r.summary.reason, r.summary.matched, r.summary.prompt, r.summary.cachedKnown = d.Reason, d.MatchedTokens, d.PromptTokens, false
	if r.spans == nil {
		return
	}
	r.spans.StartAttempt(&tracing.Attempt{
		Number: r.history.sent, Model: r.outcome.Model, Backend: d.Backend.Name, Reason: d.Reason,
		Scheme: d.Backend.URL.Scheme, Host: d.Backend.URL.Host,
		MatchedTokens: d.MatchedTokens, PromptTokens: d.PromptTokens,
		MaxTokens: r.input.request.MaxAnswerTokens, Streams: r.input.request.Streams,
	}, r.httpReq.Header)
}

// endAttemptSpan ends an attempt.
func (a *attempt) endAttemptSpan() {
	a.summary.cachedKnown = a.result.CachedKnown
	if a.spans == nil {
		return
	}
	fault, cached := a.failureReason, -1
	switch {
	case fault != "":
	case a.result.End == router.Truncated:
		fault = "broke_off"
	case a.summary.phase != "":
		fault = tracing.ErrorDisconnected
	case a.result.End == router.ClientDisconnected:
		fault = "cut_off" // by an operator, or by the proxy's end
	}
	if a.result.CachedKnown {
		cached = a.result.CachedTokens
	}
	a.spans.EndAttempt(fault, a.result.PromptTokens, a.result.AnswerTokens, cached)
}

// logRequest tells of the request at its end.
func (r *request) logRequest() {
	if r.spans == nil && !r.proxy.access.Enabled() {
		return
	}
	o, s := &r.outcome, &r.summary
	e := &accesslog.Entry{
		At: r.arrivedAt.Add(o.Duration), ID: r.id, Client: r.httpReq.RemoteAddr, Endpoint: o.Endpoint, Model: o.Model, Backend: o.Backend,
		Reason: s.reason, Phase: string(s.phase), Failures: s.failures, TraceID: r.spans.TraceID(r.httpReq.Header),
		Code: o.Code, Attempts: r.history.sent, BytesIn: int64(s.bytesIn), BytesOut: r.client.bytesWritten,
		Tokens: accesslog.Tokens{Prompt: r.promptTokens, Predicted: s.matched, Observed: -1, Output: r.completionTokens},
		Times:  accesslog.Times{Total: o.Duration, TTFT: o.TTFT, Queued: r.history.queueTime, Overhead: o.Overhead},
	}
	if r.holder != nil {
		e.Key = r.holder.Name
	}
	if e.Tokens.Prompt == 0 {
		e.Tokens.Prompt = s.prompt
	}
	if s.cachedKnown {
		e.Tokens.Observed = o.ObservedTokens
	}
	r.spans.End(e)
	if r.proxy.access.Enabled() {
		r.proxy.access.LogRequest(e)
	}
}

// beginRecording keeps for the recording what of the input it will need: the input is
// freed long before the request ends. Endpoints that generate nothing are not
// recorded.
func (r *request) beginRecording() {
	if r.proxy.record == nil || r.endpoint.format == plainFormat {
		return
	}
	q, req := r.proxy.record.Begin(), &r.input.request
	q.Arrived, q.Model, q.Session = r.arrivedAt, req.Model, req.Session
	pr := &r.input.scratch.prompt
	q.Streams, q.Bytes, q.ExtraBytes = req.Streams, len(pr.Text), pr.ExtraBytes
	// Else the replica counts what is not in the text, or not all that is.
	q.Plain = pr.Cacheable && pr.Sequences <= 1 && pr.ExtraBytes == 0 && !pr.HasMedia()
	q.Blocks = append(q.Blocks, req.Blocks...)
	r.recording = q
}

// recordResult takes what an attempt learned. The last attempt's is what counts.
func (a *attempt) recordResult() {
	if q := a.recording; q != nil {
		q.PromptTokens, q.AnswerTokens = a.result.PromptTokens, a.result.AnswerTokens
		q.CachedTokens, q.CachedKnown = a.result.CachedTokens, a.result.CachedKnown
	}
}

// finishRecording hands the request over to be written.
func (r *request) finishRecording() {
	if q := r.recording; q != nil {
		q.Code, q.TTFT, q.Duration = r.outcome.Code, r.outcome.TTFT, r.outcome.Duration
		r.proxy.record.Add(q)
		r.recording = nil
	}
}
