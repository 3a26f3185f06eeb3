package traces

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

const (
	warnEvery = time.Minute
	// mostReason is how much of an error is logged: it may hold a collector's answer.
	mostReason = 500
)

// exporter sends spans and tells, now and then, why it could not.
type exporter struct {
	*otlptrace.Exporter
	log          *slog.Logger
	sent, failed atomic.Int64

	stopped context.Context // done when the rest is given up
	giveUp  context.CancelFunc

	mu     sync.Mutex // guards warned
	warned time.Time
}

func newExporter(client otlptrace.Client, log *slog.Logger) *exporter {
	e := &exporter{Exporter: otlptrace.NewUnstarted(client), log: log}
	e.stopped, e.giveUp = context.WithCancel(context.Background())
	return e
}

// ExportSpans implements sdk.SpanExporter. Its errors are told here, so that the SDK
// need not.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stopped, cancel)()
	if err := e.Exporter.ExportSpans(ctx, spans); err != nil {
		e.failed.Add(int64(len(spans)))
		e.warn(err)
		return nil
	}
	e.sent.Add(int64(len(spans)))
	return nil
}

func (e *exporter) warn(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if now.Sub(e.warned) < warnEvery {
		return
	}
	e.warned = now
	text := err.Error()
	e.log.Warn("traces do not reach the collector", "reason", text[:min(len(text), mostReason)], "spans_lost", e.failed.Load())
}
