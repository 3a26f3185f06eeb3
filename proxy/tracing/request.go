package tracing

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"warmroute/proxy/accesslog"
)

// Request is the spans of one request. It is not safe for concurrent use. All that
// a nil one is told it forgets.
type Request struct {
	tracer  trace.Tracer
	ctx     context.Context // with span in it
	span    trace.Span
	route   string
	attempt context.Context // the one under way, with its span in it
	sent    time.Time
	status  int // of its answer
	chunk   bool
}

var traceContext propagation.TraceContext

// Begin begins the span of a request that arrived at that time, below the client's
// own if it sent one. route is its path as it is configured, not as it was written.
func (t *Tracer) Begin(r *http.Request, route string, at time.Time) *Request {
	if t == nil {
		return nil
	}
	tracer := t.tracer.Load()
	if tracer == nil {
		return nil
	}
	q := &Request{tracer: *tracer, route: route}
	from := traceContext.Extract(context.Background(), propagation.HeaderCarrier(r.Header))
	q.ctx, q.span = q.tracer.Start(from, "POST "+route, trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(at))
	if !q.span.IsRecording() {
		return q
	}
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	client, _, _ := net.SplitHostPort(r.RemoteAddr)
	q.span.SetAttributes(semconv.HTTPRequestMethodPost, semconv.HTTPRoute(route), semconv.URLPath(route), semconv.URLScheme(scheme),
		semconv.ClientAddress(client), semconv.NetworkProtocolVersion(strings.TrimSuffix(strconv.Itoa(r.ProtoMajor)+"."+strconv.Itoa(r.ProtoMinor), ".0")))
	if addr, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		q.span.SetAttributes(address(addr.String(), "")...)
	}
	return q
}

// address is where a server is.
func address(hostPort, scheme string) []attribute.KeyValue {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		host, port = hostPort, map[string]string{"http": "80", "https": "443"}[scheme]
	}
	attrs := []attribute.KeyValue{semconv.ServerAddress(host)}
	if n, err := strconv.Atoi(port); err == nil {
		attrs = append(attrs, semconv.ServerPort(n))
	}
	return attrs
}

// TraceID is that of the request's span; of a nil Request's, what its client said.
func (q *Request) TraceID(h http.Header) string {
	if q != nil {
		return q.span.SpanContext().TraceID().String()
	}
	if len(h["Traceparent"]) == 0 {
		return ""
	}
	sent := trace.SpanContextFromContext(traceContext.Extract(context.Background(), propagation.HeaderCarrier(h)))
	if !sent.HasTraceID() {
		return ""
	}
	return sent.TraceID().String()
}

// Held adds a wait that ends now.
func (q *Request) Held(waited time.Duration, end string) {
	if q == nil || waited <= 0 {
		return
	}
	now := time.Now()
	_, span := q.tracer.Start(q.ctx, "queue", trace.WithTimestamp(now.Add(-waited)), trace.WithAttributes(heldEnd.String(end)))
	span.End(trace.WithTimestamp(now))
}

// Attempt is what is known of an attempt before it is made.
type Attempt struct {
	Number               int // from 1
	Model                string
	Backend, Reason      string
	Scheme, Host         string // of the replica; Host may have a port
	Matched, Prompt, Max int    // tokens; Max 0: the request names no limit
	Streams              bool
}

// Sending begins the span of an attempt, and puts it into the header that the
// replica gets.
func (q *Request) Sending(a *Attempt, header http.Header) {
	if q == nil {
		return
	}
	op, known := operations[q.route]
	name := "POST " + q.route
	if known {
		name = op.Value.AsString() + " " + a.Model
	}
	q.sent, q.status, q.chunk = time.Now(), 0, false
	var span trace.Span
	q.attempt, span = q.tracer.Start(q.ctx, name, trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(q.sent))
	delete(header, "Tracestate")
	traceContext.Inject(q.attempt, propagation.HeaderCarrier(header))
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(address(a.Host, a.Scheme)...)
	span.SetAttributes(semconv.HTTPRequestMethodPost, semconv.URLFull(a.Scheme+"://"+a.Host+q.route), provider.String("vllm"), requestModel.String(a.Model),
		backend.String(a.Backend), reason.String(a.Reason), matched.Int(a.Matched), prompt.Int(a.Prompt))
	if known {
		span.SetAttributes(op)
	}
	if a.Number > 1 {
		span.SetAttributes(semconv.HTTPRequestResendCount(a.Number - 1))
	}
	if a.Streams {
		span.SetAttributes(streams.Bool(true))
	}
	if a.Max > 0 {
		span.SetAttributes(maxTokens.Int(a.Max))
	}
}

// Answered notes the status of the replica's answer.
func (q *Request) Answered(status int) {
	if q != nil {
		q.status = status
	}
}

// FirstToken notes that the first content of the answer came, now.
func (q *Request) FirstToken() {
	if q == nil || q.attempt == nil || q.chunk {
		return
	}
	q.chunk = true
	now := time.Now()
	_, span := q.tracer.Start(q.attempt, "first token", trace.WithTimestamp(q.sent))
	span.End(trace.WithTimestamp(now))
	trace.SpanFromContext(q.attempt).SetAttributes(firstChunk.Float64(now.Sub(q.sent).Seconds()))
}

// Left is the fault of attempts and requests whose client did not stay to their end.
const Left = "client_left"

// Sent ends the span of the attempt. fault is why it failed, if it did; tokens are
// the replica's counts, 0 where it gave none, cached below 0.
func (q *Request) Sent(fault string, in, out, cached int) {
	if q == nil || q.attempt == nil {
		return
	}
	span := trace.SpanFromContext(q.attempt)
	q.attempt = nil
	if q.status != 0 {
		span.SetAttributes(semconv.HTTPResponseStatusCode(q.status))
	}
	usage(span, in, out, cached)
	if fault == "" && q.status >= http.StatusBadRequest {
		fault = strconv.Itoa(q.status)
	}
	if fault != "" {
		span.SetAttributes(semconv.ErrorTypeKey.String(fault))
		if fault != Left {
			span.SetStatus(codes.Error, "")
		}
	}
	span.End()
}

func usage(span trace.Span, in, out, cached int) {
	if in > 0 {
		span.SetAttributes(inputTokens.Int(in))
	}
	if out > 0 {
		span.SetAttributes(outputTokens.Int(out))
	}
	if cached >= 0 {
		span.SetAttributes(cachedTokens.Int(cached))
	}
}

// End ends the request's span with the account that the access log has of it.
func (q *Request) End(e *accesslog.Entry) {
	if q == nil {
		return
	}
	if !q.span.IsRecording() {
		q.span.End()
		return
	}
	q.span.SetAttributes(semconv.HTTPResponseStatusCode(e.Code), requestID.String(e.ID), attempts.Int(e.Attempts))
	if op, known := operations[q.route]; known {
		q.span.SetAttributes(op, provider.String("vllm"))
	}
	for _, text := range []attribute.KeyValue{requestModel.String(e.Model), keyName.String(e.Key), phase.String(e.Phase)} {
		if text.Value.AsString() != "" {
			q.span.SetAttributes(text)
		}
	}
	for key, d := range map[attribute.Key]time.Duration{held: e.Times.Queued, ttft: e.Times.TTFT} {
		if d > 0 {
			q.span.SetAttributes(key.Float64(d.Seconds()))
		}
	}
	if e.Backend != "" {
		q.span.SetAttributes(backend.String(e.Backend), reason.String(e.Reason), matched.Int(e.Tokens.Predicted), prompt.Int(e.Tokens.Prompt), overhead.Float64(e.Times.Overhead.Seconds()))
		usage(q.span, e.Tokens.Prompt, e.Tokens.Output, e.Tokens.Observed)
	}
	switch {
	case e.Phase != "":
		q.span.SetAttributes(semconv.ErrorTypeKey.String(Left))
	case e.Code >= http.StatusInternalServerError:
		q.span.SetAttributes(semconv.ErrorTypeKey.String(strconv.Itoa(e.Code)))
		q.span.SetStatus(codes.Error, "")
	}
	q.span.End(trace.WithTimestamp(e.At))
}
