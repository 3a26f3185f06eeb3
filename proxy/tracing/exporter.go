package tracing

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/status"
)

const (
	warnInterval  = time.Minute
	maxErrorBytes = 500     // of a logged error
	maxQueueSpans = 1 << 20 // that may be configured
)

// exporter sends spans, counts them and warns when the collector does not accept them.
type exporter struct {
	*otlptrace.Exporter
	log                           *slog.Logger
	sent, failed, dropped, queued atomic.Int64
	reportedDrops                 int64 // used by ExportSpans, which is not called concurrently

	stopped context.Context // done when the remaining spans are given up
	stop    context.CancelFunc

	exportErrors, sdkErrors rate.Sometimes // are logged
}

func newExporter(client otlptrace.Client, log *slog.Logger) *exporter {
	e := &exporter{Exporter: otlptrace.NewUnstarted(client), log: log,
		exportErrors: rate.Sometimes{Interval: warnInterval}, sdkErrors: rate.Sometimes{Interval: warnInterval}}
	e.stopped, e.stop = context.WithCancel(context.Background())
	return e
}

// ExportSpans implements sdk.SpanExporter. It reports errors itself and returns nil.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	e.queued.Add(-int64(len(spans)))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.stopped, cancel)()
	if err := e.Exporter.ExportSpans(ctx, spans); err != nil {
		e.failed.Add(int64(len(spans)))
		e.logExportError(err)
		return nil
	}
	e.sent.Add(int64(len(spans)))
	if dropped := e.dropped.Load(); dropped > e.reportedDrops {
		e.reportedDrops = dropped
		e.logExportError(errors.New("the collector is too slow: the queue of OTEL_BSP_MAX_QUEUE_SIZE spans is full"))
	}
	return nil
}

// logExportError logs, at most once in warnInterval, that spans were not sent.
func (e *exporter) logExportError(err error) {
	e.exportErrors.Do(func() {
		e.log.Warn("sending traces failed", "err", exportErrorText(err), "unsent_spans", e.failed.Load()+e.dropped.Load())
	})
}

// logSDKError logs, at most once in warnInterval, an error of the SDK itself.
func (e *exporter) logSDKError(err error) {
	e.sdkErrors.Do(func() {
		text := err.Error()
		e.log.Warn("OpenTelemetry error (tracing continues)", "err", text[:min(len(text), maxErrorBytes)])
	})
}

// exportErrorText returns why spans were not sent, without the collector's response,
// which may repeat the headers and so the keys that it was sent.
func exportErrorText(err error) string {
	if s, ok := status.FromError(err); ok {
		return "gRPC status " + s.Code().String()
	}
	if urlErr, ok := errors.AsType[*url.Error](err); ok { // its URL may come from a redirect
		err = urlErr.Err
	}
	text := err.Error()
	for _, quote := range []string{" (body: ", "body: ", "OTLP partial success: ", "malformed HTTP", "Location header"} {
		text, _, _ = strings.Cut(text, quote)
	}
	switch text = strings.TrimSuffix(strings.TrimSpace(text), ":"); {
	case strings.HasSuffix(text, "retry-able request failure"): // the SDK does not say which status
		text += ": status 429, 502, 503 or 504"
	case text == "" || strings.HasSuffix(text, "traces export"):
		text = "invalid response of the collector, or spans rejected"
	}
	return text[:min(len(text), maxErrorBytes)]
}

// queue counts the spans in the SDK's queue, so that the dropped ones can be counted:
// the SDK does not tell their number.
type queue struct {
	sdk.SpanProcessor
	exporter *exporter
	maxSpans int64
}

// startQueue starts the SDK's queue. The SDK panics if the sizes are negative.
func startQueue(e *exporter) queue {
	maxSpans := positiveEnv("OTEL_BSP_MAX_QUEUE_SIZE", sdk.DefaultMaxQueueSize, maxQueueSpans)
	batch := positiveEnv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(sdk.DefaultMaxExportBatchSize, maxSpans), maxSpans)
	delay := positiveEnv("OTEL_BSP_SCHEDULE_DELAY", sdk.DefaultScheduleDelay, 1<<31-1)
	processor := sdk.NewBatchSpanProcessor(e, sdk.WithMaxQueueSize(maxSpans), sdk.WithMaxExportBatchSize(batch),
		sdk.WithBatchTimeout(time.Duration(delay)*time.Millisecond))
	return queue{processor, e, int64(maxSpans)}
}

// OnEnd implements sdk.SpanProcessor. It does not block.
func (q queue) OnEnd(s sdk.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	if q.exporter.queued.Add(1) > q.maxSpans {
		q.exporter.queued.Add(-1)
		q.exporter.dropped.Add(1)
		return
	}
	q.SpanProcessor.OnEnd(s)
}
