package tracing

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/status"
)

const (
	warnEvery  = time.Minute
	mostReason = 500 // bytes of an error that are logged
)

// exporter sends spans and tells, now and then, why it could not.
type exporter struct {
	*otlptrace.Exporter
	log                            *slog.Logger
	sent, failed, dropped, waiting atomic.Int64
	told                           int64 // of dropped; the batcher's, which exports one batch at a time

	stopped context.Context // done when the rest is given up
	giveUp  context.CancelFunc

	mu               sync.Mutex // guards what follows
	warned, reported time.Time
}

func newExporter(client otlptrace.Client, log *slog.Logger) *exporter {
	e := &exporter{Exporter: otlptrace.NewUnstarted(client), log: log}
	e.stopped, e.giveUp = context.WithCancel(context.Background())
	return e
}

// ExportSpans implements sdk.SpanExporter. Its errors are told here, so that the SDK
// need not.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	e.waiting.Add(-int64(len(spans)))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stopped, cancel)()
	if err := e.Exporter.ExportSpans(ctx, spans); err != nil {
		e.failed.Add(int64(len(spans)))
		e.warn(err)
		return nil
	}
	e.sent.Add(int64(len(spans)))
	if dropped := e.dropped.Load(); dropped > e.told {
		e.told = dropped
		e.warn(errors.New("it is too slow: more spans wait for it than OTEL_BSP_MAX_QUEUE_SIZE allows"))
	}
	return nil
}

// warn tells that the collector did not take spans.
func (e *exporter) warn(err error) {
	if e.mayTell(&e.warned) {
		e.log.Warn("traces do not reach the collector", "reason", reasonOf(err), "spans_lost", e.failed.Load()+e.dropped.Load())
	}
}

// report tells what the SDK finds wrong with itself or its environment. Such errors
// keep none of those of warn from being told.
func (e *exporter) report(err error) {
	if e.mayTell(&e.reported) {
		text := err.Error()
		e.log.Warn("OpenTelemetry goes on after a fault", "reason", text[:min(len(text), mostReason)])
	}
}

// mayTell reports whether last is long enough ago, and sets it if so.
func (e *exporter) mayTell(last *time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if now.Sub(*last) < warnEvery {
		return false
	}
	*last = now
	return true
}

// reasonOf is why spans were not sent, without what the collector wrote: that may
// repeat the headers it was sent, keys and all.
func reasonOf(err error) string {
	if s, ok := status.FromError(err); ok {
		return "gRPC status " + s.Code().String()
	}
	if at, ok := errors.AsType[*url.Error](err); ok { // a redirect's address is the collector's text
		err = at.Err
	}
	text := err.Error()
	for _, its := range []string{" (body: ", "body: ", "OTLP partial success: ", "malformed HTTP", "Location header"} {
		text, _, _ = strings.Cut(text, its)
	}
	switch text = strings.TrimSuffix(strings.TrimSpace(text), ":"); {
	case strings.HasSuffix(text, "retry-able request failure"): // for these the SDK keeps no status
		text += ": status 429, 502, 503 or 504"
	case text == "" || strings.HasSuffix(text, "traces export"):
		text = "an answer that is none of a collector's, or spans refused"
	}
	return text[:min(len(text), mostReason)]
}
