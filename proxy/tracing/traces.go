// Package tracing makes OpenTelemetry spans of requests: one for the request, and
// below it one for each time it was held, for each attempt at a replica, and for the
// time until an attempt's first token. It is configured by OpenTelemetry's own
// environment variables, and off without them.
//
// Nothing here delays a request: spans that end are queued, up to a bound, and sent
// by a goroutine of the SDK's. A collector that is away costs spans, and a warning
// now and then.
package tracing

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// flushTime is how long the end waits for the collector to take what it has not.
const flushTime = 3 * time.Second

// Tracer makes the spans. Safe for concurrent use; a nil one makes none.
type Tracer struct {
	version string
	log     *slog.Logger
	export  *exporter
	room    int                          // spans that may wait
	tracer  atomic.Pointer[trace.Tracer] // nil: nothing is traced now
}

// New makes a Tracer as the environment says, which lookup reads as os.LookupEnv
// does; nil if there is to be none. Nothing is traced before Run.
func New(lookup func(string) (string, bool), version string, log *slog.Logger) (*Tracer, error) {
	otel.SetLogger(logr.Discard()) // the SDK's own puts variables on standard error, keys and all; they are checked here
	client, err := clientFrom(lookup)
	if client == nil {
		return nil, err
	}
	return &Tracer{version: version, log: log, export: newExporter(client, log), room: queueRoom(lookup)}, nil
}

// Run traces until ctx is done, and then gives the collector a moment to take the
// rest. Call it once.
func (t *Tracer) Run(ctx context.Context) {
	otel.SetErrorHandler(otel.ErrorHandlerFunc(t.export.report)) // the SDK has one place for it
	if err := t.export.Start(ctx); err != nil {
		t.log.Warn("requests are not traced", "reason", err.Error())
		return
	}
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(newQueue(t.export, t.room)), sdk.WithResource(t.resource(ctx)))
	tracer := provider.Tracer("warmroute", trace.WithInstrumentationVersion(t.version))
	t.tracer.Store(&tracer)
	t.log.Info("tracing requests")
	<-ctx.Done()
	t.tracer.Store(nil)
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
	defer cancel()
	stop := context.AfterFunc(limited, t.export.giveUp)
	defer stop()
	if err := provider.Shutdown(limited); err != nil {
		t.export.warn(err)
	}
}

// Sent, Failed and Dropped are how many spans the collector has taken, how many were
// lost because it did not, and how many because too many waited for it.
func (t *Tracer) Sent() int64 { return t.export.sent.Load() }

// Failed is beside Sent.
func (t *Tracer) Failed() int64 { return t.export.failed.Load() }

// Dropped is beside Sent.
func (t *Tracer) Dropped() int64 { return t.export.dropped.Load() }

// resource is who traces: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before
// what is said here.
func (t *Tracer) resource(ctx context.Context) *resource.Resource {
	r, err := resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithHost(),
		resource.WithAttributes(semconv.ServiceName("warmroute"), semconv.ServiceVersion(t.version)),
		resource.WithFromEnv(),
	)
	if err != nil { // r is as much as there is
		t.export.report(err)
	}
	return r
}

// operations are the GenAI conventions' names for what endpoints do. Those that
// have none there are known by their path alone.
var operations = map[string]attribute.KeyValue{
	"/v1/chat/completions": operation.String("chat"),
	"/v1/responses":        operation.String("chat"),
	"/v1/messages":         operation.String("chat"),
	"/v1/completions":      operation.String("text_completion"),
	"/v1/embeddings":       operation.String("embeddings"),
}

// The GenAI conventions, which the SDK's package of conventions has not, and what
// they have no name for.
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

	requestID = attribute.Key("warmroute.request_id")
	keyName   = attribute.Key("warmroute.key")
	backend   = attribute.Key("warmroute.backend")
	reason    = attribute.Key("warmroute.reason")
	matched   = attribute.Key("warmroute.prefix.matched_tokens")
	prompt    = attribute.Key("warmroute.prompt_tokens") // about, as the decision was made by
	attempts  = attribute.Key("warmroute.attempts")
	held      = attribute.Key("warmroute.queue.seconds") // seconds
	heldEnd   = attribute.Key("warmroute.queue.end")
	ttft      = attribute.Key("warmroute.ttft")     // seconds
	overhead  = attribute.Key("warmroute.overhead") // seconds
	phase     = attribute.Key("warmroute.aborted")
)
