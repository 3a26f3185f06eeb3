// Package tracing makes OpenTelemetry spans of requests: one for the request, with children for its
// waits in the admission queue and for each attempt, and a child of the attempt that ends with its
// first token. OpenTelemetry's own environment variables configure it; without them it is off.
//
// Requests never wait for it: spans go through a bounded queue to a goroutine of the SDK.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// flushTimeout is how long Run waits at its end for the collector to accept the spans in the queue.
const flushTimeout = 3 * time.Second

// Tracer makes the spans. It is safe for concurrent use. A nil Tracer makes none.
type Tracer struct {
	version  string
	log      *slog.Logger
	exporter *exporter
	tracer   atomic.Pointer[trace.Tracer] // nil: not running
}

// New returns a Tracer as configured by the environment, or nil if it configures none. The SDK
// ignores other variables with invalid values and logs them to log. No span is made before Run.
func New(version string, log *slog.Logger) (*Tracer, error) {
	otel.SetLogger(logr.New(sdkLog{log}))
	client, err := newClient()
	if client == nil {
		return nil, err
	}
	return &Tracer{version: version, log: log, exporter: newExporter(client, log)}, nil
}

// newClient returns what spans are sent with, or nil if the environment configures no tracing.
func newClient() (otlptrace.Client, error) {
	if strings.EqualFold(firstEnv("OTEL_SDK_DISABLED"), "true") {
		return nil, nil
	}
	switch exporter := firstEnv("OTEL_TRACES_EXPORTER"); exporter {
	case "none":
		return nil, nil
	case "otlp":
	case "":
		if firstEnv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT") == "" {
			return nil, nil
		}
	default:
		return nil, fmt.Errorf("OTEL_TRACES_EXPORTER: unknown value %q; use otlp or none", exporter)
	}
	switch protocol := firstEnv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); protocol {
	case "", "http/protobuf":
		return otlptracehttp.NewClient(), nil
	case "grpc":
		return otlptracegrpc.NewClient(), nil
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL: unknown value %q; use http/protobuf or grpc", protocol)
	}
}

// firstEnv returns the first of the variables that is not empty.
func firstEnv(names ...string) string {
	for _, name := range names {
		if value := strings.TrimSpace(os.Getenv(name)); value != "" {
			return value
		}
	}
	return ""
}

// positiveEnv returns the value of a variable if it is from 1 to limit.
func positiveEnv(name string, fallback, limit int) int {
	if n, err := strconv.Atoi(firstEnv(name)); err == nil && n >= 1 && n <= limit {
		return n
	}
	return fallback
}

// sdkLog logs errors of the SDK without their values, which may be secret.
type sdkLog struct{ log *slog.Logger }

func (sdkLog) Init(logr.RuntimeInfo)            {}
func (sdkLog) Enabled(int) bool                 { return false }
func (sdkLog) Info(int, string, ...any)         {}
func (s sdkLog) WithValues(...any) logr.LogSink { return s }
func (s sdkLog) WithName(string) logr.LogSink   { return s }

func (s sdkLog) Error(_ error, message string, _ ...any) {
	s.log.Warn("OpenTelemetry error (tracing continues): check the OTEL_ environment variables", "err", message)
}

// Run traces requests until ctx is done, and then waits up to flushTimeout for the
// collector to accept the remaining spans. It must be called once.
func (t *Tracer) Run(ctx context.Context) {
	otel.SetErrorHandler(otel.ErrorHandlerFunc(t.exporter.logSDKError))
	if err := t.exporter.Start(ctx); err != nil {
		t.log.Warn("requests are not traced", "err", err)
		return
	}
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(startQueue(t.exporter)), sdk.WithResource(t.newResource(ctx)))
	tracer := provider.Tracer("warmroute", trace.WithInstrumentationVersion(t.version))
	t.tracer.Store(&tracer)
	t.log.Info("tracing requests")
	<-ctx.Done()
	t.tracer.Store(nil)
	flushCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	defer context.AfterFunc(flushCtx, t.exporter.stop)()
	if err := provider.Shutdown(flushCtx); err != nil {
		t.exporter.logExportError(err)
	}
}

// newResource returns a description of this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
// override it.
func (t *Tracer) newResource(ctx context.Context) *resource.Resource {
	r, err := resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithHost(),
		resource.WithAttributes(semconv.ServiceName("warmroute"), semconv.ServiceVersion(t.version)),
		resource.WithFromEnv(),
	)
	if err != nil { // r has the valid attributes
		t.exporter.logSDKError(errors.New("some resource attributes are missing: check OTEL_RESOURCE_ATTRIBUTES"))
	}
	return r
}

// SentSpans returns how many spans the collector has accepted.
func (t *Tracer) SentSpans() int64 { return t.exporter.sent.Load() }

// FailedSpans returns how many spans the collector has not accepted.
func (t *Tracer) FailedSpans() int64 { return t.exporter.failed.Load() }

// DroppedSpans returns how many spans were dropped because the queue was full.
func (t *Tracer) DroppedSpans() int64 { return t.exporter.dropped.Load() }
