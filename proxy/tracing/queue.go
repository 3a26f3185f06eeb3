package tracing

import (
	"strconv"
	"sync/atomic"

	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// mostQueue is the most spans that may be asked to wait: a place is allocated for each.
const mostQueue = 1 << 20

// queue is the SDK's batcher behind a count. The batcher drops what its own queue
// has no room for and tells nobody, so nothing goes to it that would not fit.
type queue struct {
	sdk.SpanProcessor
	room    int64
	waiting *atomic.Int64 // ended, and not given to the exporter yet
	dropped *atomic.Int64
}

// newQueue begins the batcher, which takes its other settings from the environment.
func newQueue(e *exporter, room int) queue {
	return queue{sdk.NewBatchSpanProcessor(e, sdk.WithMaxQueueSize(room)), int64(room), &e.waiting, &e.dropped}
}

// queueRoom is how many spans may wait.
func queueRoom(env environment) int {
	_, value := env.first("OTEL_BSP_MAX_QUEUE_SIZE")
	if room, err := strconv.Atoi(value); err == nil { // it was checked
		return room
	}
	return sdk.DefaultMaxQueueSize
}

// OnEnd implements sdk.SpanProcessor. It never waits.
func (q queue) OnEnd(s sdk.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	if q.waiting.Add(1) > q.room {
		q.waiting.Add(-1)
		q.dropped.Add(1)
		return
	}
	q.SpanProcessor.OnEnd(s)
}
