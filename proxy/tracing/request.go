package tracing

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
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

// Request makes the spans of one request. It is not safe for concurrent use. A nil
// Request makes none.
type Request struct {
	tracer     trace.Tracer
	ctx        context.Context // with span in it
	span       trace.Span
	route      string
	attempt    context.Context // with the span of the current attempt in it; nil: none
	sentAt     time.Time
	status     int // of the response to the attempt
	firstToken bool

	conversation string   // as the client has named it; empty: it has not
	response     Response // of the last attempt that has ended
}

// operations are the names that the GenAI conventions have for endpoints, by path.
var operations = map[string]attribute.KeyValue{
	"/v1/chat/completions": operation.String("chat"),
	"/v1/responses":        operation.String("chat"),
	"/v1/messages":         operation.String("chat"),
	"/v1/completions":      operation.String("text_completion"),
	"/v1/embeddings":       operation.String("embeddings"),
}

// Attributes that the SDK's package of conventions does not have.
const (
	operation    = attribute.Key("gen_ai.operation.name")
	provider     = attribute.Key("gen_ai.provider.name")
	requestModel = attribute.Key("gen_ai.request.model")
	maxTokens    = attribute.Key("gen_ai.request.max_tokens")
	streams      = attribute.Key("gen_ai.request.stream")
	inputTokens  = attribute.Key("gen_ai.usage.input_tokens")
	outputTokens = attribute.Key("gen_ai.usage.output_tokens")
	cachedTokens = attribute.Key("gen_ai.usage.cache_read.input_tokens")
	firstChunk   = attribute.Key("gen_ai.response.time_to_first_chunk") // seconds
	responseID   = attribute.Key("gen_ai.response.id")
	responseFrom = attribute.Key("gen_ai.response.model")
	reasons      = attribute.Key("gen_ai.response.finish_reasons")
	conversation = attribute.Key("gen_ai.conversation.id")

	requestID    = attribute.Key("warmroute.request_id")
	keyName      = attribute.Key("warmroute.key")
	modelName    = attribute.Key("warmroute.model_name") // by which the model was asked for
	backend      = attribute.Key("warmroute.backend")
	prefill      = attribute.Key("warmroute.prefill.backend")
	requestKind  = attribute.Key("warmroute.request_kind") // of a split request: prefill or decode
	reason       = attribute.Key("warmroute.reason")
	predicted    = attribute.Key("warmroute.predicted_tokens") // of the prompt, to be cached
	prompt       = attribute.Key("warmroute.prompt_tokens")    // as estimated for the decision
	attempts     = attribute.Key("warmroute.attempts")
	queueTime    = attribute.Key("warmroute.queue.seconds")
	queueResult  = attribute.Key("warmroute.queue.result")
	ttft         = attribute.Key("warmroute.ttft")         // seconds
	overhead     = attribute.Key("warmroute.overhead")     // seconds
	disconnected = attribute.Key("warmroute.disconnected") // what the request was doing
	cancelled    = attribute.Key("warmroute.cancelled")    // by an operator

	inputEstimated  = attribute.Key("warmroute.input_tokens_estimated")  // gen_ai.usage.input_tokens is not the replica's count
	outputEstimated = attribute.Key("warmroute.output_tokens_estimated") // gen_ai.usage.output_tokens is not
)

// maxValueBytes bounds a value that a client or a replica has chosen.
const maxValueBytes = 256

var traceContext propagation.TraceContext

// StartRequest starts the span of a request that arrived at that time, as a child of
// the client's span if it sent one. route is the endpoint's path.
func (t *Tracer) StartRequest(r *http.Request, route string, client netip.Addr, at time.Time) *Request {
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
	q.span.SetAttributes(semconv.HTTPRequestMethodPost, semconv.HTTPRoute(route), semconv.URLPath(route), semconv.URLScheme(scheme),
		semconv.ClientAddress(client.String()),
		semconv.NetworkProtocolVersion(strings.TrimSuffix(strconv.Itoa(r.ProtoMajor)+"."+strconv.Itoa(r.ProtoMinor), ".0")))
	if addr, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		q.span.SetAttributes(serverAddress(addr.String(), "")...)
	}
	return q
}

// serverAddress returns the attributes of a server's address.
func serverAddress(hostPort, scheme string) []attribute.KeyValue {
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

// TraceID returns the trace of the request's span. For a nil Request it is the trace
// that the client sent, or empty.
func (q *Request) TraceID(clientHeader http.Header) string {
	if q != nil {
		return q.span.SpanContext().TraceID().String()
	}
	if len(clientHeader["Traceparent"]) == 0 {
		return ""
	}
	sent := trace.SpanContextFromContext(traceContext.Extract(context.Background(), propagation.HeaderCarrier(clientHeader)))
	if !sent.HasTraceID() {
		return ""
	}
	return sent.TraceID().String()
}

// IsRecording reports whether what is told about the request is sent to the collector.
func (q *Request) IsRecording() bool { return q != nil && q.span.IsRecording() }

// SetConversation sets the conversation that the request belongs to, by the name that the client has for it.
func (q *Request) SetConversation(id string) {
	if q.IsRecording() {
		q.conversation = boundValue(id)
		setNonZero(q.span, conversation.String(q.conversation))
	}
}

// boundValue returns the beginning of s, as UTF-8: the collector would accept nothing else.
func boundValue(s string) string {
	return strings.Clone(strings.ToValidUTF8(s[:min(len(s), maxValueBytes)], ""))
}

// AddQueueWaitSpan adds the span of a wait in the admission queue that ends now.
func (q *Request) AddQueueWaitSpan(waited time.Duration, result string) {
	if q == nil || waited <= 0 {
		return
	}
	now := time.Now()
	_, span := q.tracer.Start(q.ctx, "queue", trace.WithTimestamp(now.Add(-waited)), trace.WithAttributes(queueResult.String(result)))
	span.End(trace.WithTimestamp(now))
}

// Attempt describes an attempt before it is made.
type Attempt struct {
	Number                      int // from 1
	Model                       string
	Backend, Reason             string
	RequestKind                 string // of a split request; empty: the attempt has one request
	Scheme, Host                string // of the replica; Host may have a port
	MatchedTokens, PromptTokens int
	MaxTokens                   int // of the output; 0: not limited by the request
	Streams                     bool
}

// StartAttempt starts the span of an attempt and sets the headers that make the
// replica's span its child.
func (q *Request) StartAttempt(a *Attempt, outgoingHeader http.Header) {
	if q == nil {
		return
	}
	op, known := operations[q.route]
	name := "POST " + q.route
	if known {
		name = op.Value.AsString() + " " + a.Model
	}
	q.sentAt, q.status, q.firstToken = time.Now(), 0, false
	var span trace.Span
	q.attempt, span = q.tracer.Start(q.ctx, name, trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(q.sentAt))
	delete(outgoingHeader, "Tracestate")
	traceContext.Inject(q.attempt, propagation.HeaderCarrier(outgoingHeader))
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(serverAddress(a.Host, a.Scheme)...)
	span.SetAttributes(semconv.HTTPRequestMethodPost, semconv.URLFull(a.Scheme+"://"+a.Host+q.route), provider.String("vllm"),
		requestModel.String(a.Model),
		backend.String(a.Backend), reason.String(a.Reason), predicted.Int(a.MatchedTokens), prompt.Int(a.PromptTokens))
	setNonZero(span, requestKind.String(a.RequestKind), semconv.HTTPRequestResendCount(a.Number-1), streams.Bool(a.Streams),
		maxTokens.Int(a.MaxTokens), conversation.String(q.conversation))
	if known {
		span.SetAttributes(op)
	}
}

// setNonZero sets those attributes whose values are not zero.
func setNonZero(span trace.Span, attrs ...attribute.KeyValue) {
	span.SetAttributes(slices.DeleteFunc(attrs, func(a attribute.KeyValue) bool {
		switch a.Value.AsInterface() {
		case "", false, int64(0), 0.0:
			return true
		}
		return false
	})...)
}

// SetStatus sets the status of the response to the attempt.
func (q *Request) SetStatus(status int) {
	if q != nil {
		q.status = status
	}
}

// AddFirstTokenSpan adds the span that ends with the first content of the response, now.
func (q *Request) AddFirstTokenSpan() {
	if q == nil || q.attempt == nil || q.firstToken {
		return
	}
	q.firstToken = true
	now := time.Now()
	_, span := q.tracer.Start(q.attempt, "first token", trace.WithTimestamp(q.sentAt))
	span.End(trace.WithTimestamp(now))
	trace.SpanFromContext(q.attempt).SetAttributes(firstChunk.Float64(now.Sub(q.sentAt).Seconds()))
}

// Error types of attempts and requests that no failure has ended.
const (
	ErrorDisconnected = "client_disconnected"
	ErrorCancelled    = "cancelled" // by an operator
)

// Response describes the response to an attempt, as far as the replica has sent it.
type Response struct {
	ID, Model     string
	FinishReasons []string // of its choices
	Tokens
}

// Tokens are those of a response.
type Tokens struct {
	Prompt, Output                   int // 0: not known
	Cached                           int // of the prompt; negative: not known
	PromptEstimated, OutputEstimated bool
}

// EndAttempt ends the span of the attempt. errorType is why it failed, or empty.
func (q *Request) EndAttempt(errorType string, r *Response) {
	if q == nil || q.attempt == nil {
		return
	}
	span := trace.SpanFromContext(q.attempt)
	q.attempt = nil
	setNonZero(span, semconv.HTTPResponseStatusCode(q.status))
	q.response = *r
	setResponse(span, r)
	setTokens(span, r.Tokens)
	if errorType == "" && q.status >= http.StatusBadRequest {
		errorType = strconv.Itoa(q.status)
	}
	setError(span, errorType)
	span.End()
}

func setResponse(span trace.Span, r *Response) {
	setNonZero(span, responseID.String(boundValue(r.ID)), responseFrom.String(boundValue(r.Model)))
	if len(r.FinishReasons) > 0 {
		span.SetAttributes(reasons.StringSlice(r.FinishReasons))
	}
}

func setTokens(span trace.Span, t Tokens) {
	setNonZero(span, inputTokens.Int(max(t.Prompt, 0)), outputTokens.Int(max(t.Output, 0)),
		inputEstimated.Bool(t.PromptEstimated && t.Prompt > 0), outputEstimated.Bool(t.OutputEstimated && t.Output > 0))
	if t.Cached >= 0 {
		span.SetAttributes(cachedTokens.Int(t.Cached))
	}
}

// setError sets the type of the error that ended a span; "": none. A disconnect or a cancellation
// is not the fault of who was called.
func setError(span trace.Span, errorType string) {
	setNonZero(span, semconv.ErrorTypeKey.String(errorType))
	if errorType != "" && errorType != ErrorDisconnected && errorType != ErrorCancelled {
		span.SetStatus(codes.Error, "")
	}
}

// End ends the span of the request, which e describes. t are the tokens of e.
func (q *Request) End(e *accesslog.Entry, t Tokens) {
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
	setNonZero(q.span, requestModel.String(e.Model), prefill.String(e.PrefillBackend), keyName.String(e.Key), modelName.String(e.ModelName),
		disconnected.String(e.Disconnected),
		queueTime.Float64(e.Times.Queued.Seconds()), ttft.Float64(e.Times.TTFT.Seconds()))
	if e.Backend != "" {
		q.span.SetAttributes(backend.String(e.Backend), reason.String(e.Reason), predicted.Int(e.Tokens.Predicted), prompt.Int(e.Tokens.Prompt),
			overhead.Float64(e.Times.Overhead.Seconds()))
		setResponse(q.span, &q.response)
		setTokens(q.span, t)
	}
	switch {
	case e.Cancelled:
		q.span.SetAttributes(cancelled.Bool(true))
		setError(q.span, ErrorCancelled)
	case e.Disconnected != "":
		setError(q.span, ErrorDisconnected)
	case e.Code >= http.StatusInternalServerError:
		setError(q.span, strconv.Itoa(e.Code))
	}
	q.span.End(trace.WithTimestamp(e.At))
}
