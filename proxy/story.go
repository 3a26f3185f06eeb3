package proxy

import (
	"warmroute/metrics"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/tracing"
	"warmroute/router"
)

// mostFailures is how many failed attempts the story of a request names.
const mostFailures = 16

// story is what the access log and the traces tell of a request besides what
// metrics do.
type story struct {
	bytesIn     int                // of the body
	reason      string             // of the last attempt's decision
	matched     int                // tokens, by that decision
	prompt      int                // tokens, by that decision
	cachedKnown bool               // the replica told how much of the prompt it had
	failures    []string           // reasons of attempts that failed, the first of them
	phase       metrics.AbortPhase // in which the client was lost
}

func (s *story) failed(reason string) {
	if len(s.failures) < mostFailures {
		s.failures = append(s.failures, reason)
	}
}

// tellAttempt begins an attempt.
func (x *exchange) tellAttempt(d *router.Decision) {
	x.story.reason, x.story.matched, x.story.prompt, x.story.cachedKnown = d.Reason, d.MatchedTokens, d.PromptTokens, false
	if x.spans == nil {
		return
	}
	x.spans.Sending(&tracing.Attempt{
		Number: x.attempts, Model: x.outcome.Model, Backend: d.Backend.Name, Reason: d.Reason,
		Scheme: d.Backend.URL.Scheme, Host: d.Backend.URL.Host,
		Matched: d.MatchedTokens, Prompt: d.PromptTokens,
		Max: x.input.request.MaxAnswerTokens, Streams: x.input.request.Streams,
	}, x.r.Header)
}

// tellEnd ends an attempt.
func (a *attempt) tellEnd() {
	a.story.cachedKnown = a.result.CachedKnown
	if a.spans == nil {
		return
	}
	fault, cached := a.fault, -1
	switch {
	case fault != "":
	case a.result.End == router.Truncated:
		fault = "broke_off"
	case a.story.phase != "":
		fault = tracing.Left
	case a.result.End == router.ClientDisconnected:
		fault = "cut_off" // by an operator, or by the proxy's end
	}
	if a.result.CachedKnown {
		cached = a.result.CachedTokens
	}
	a.spans.Sent(fault, a.result.PromptTokens, a.result.AnswerTokens, cached)
}

// tellStory tells of the request at its end.
func (x *exchange) tellStory() {
	if x.spans == nil && !x.p.access.On() {
		return
	}
	o, s := &x.outcome, &x.story
	e := &accesslog.Entry{
		At: x.arrived.Add(o.Duration), ID: x.id, Client: x.r.RemoteAddr, Endpoint: o.Endpoint, Model: o.Model, Backend: o.Backend,
		Reason: s.reason, Phase: string(s.phase), Failures: s.failures, TraceID: x.spans.TraceID(x.r.Header),
		Code: o.Code, Attempts: x.attempts, BytesIn: int64(s.bytesIn), BytesOut: x.w.sent,
		Prompt: x.tokensIn, Predicted: s.matched, Observed: -1, Answer: x.tokensOut,
		TTFT: o.TTFT, Duration: o.Duration, Held: x.held, Overhead: o.Overhead,
	}
	if x.holder != nil {
		e.Key = x.holder.Name
	}
	if e.Prompt == 0 {
		e.Prompt = s.prompt
	}
	if s.cachedKnown {
		e.Observed = o.ObservedTokens
	}
	x.spans.End(e)
	if x.p.access.On() {
		x.p.access.Add(e)
	}
}
