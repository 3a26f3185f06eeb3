package server

import (
	"io"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/router"
)

// NewLogger returns the logger that the configuration asks for, and its level, which
// may be changed while it is in use.
func NewLogger(c config.Log, out io.Writer) (*slog.Logger, *slog.LevelVar) {
	level := new(slog.LevelVar)
	level.UnmarshalText([]byte(c.Level)) // validated with the configuration
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: formatDuration}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(out, options)), level
	}
	return slog.New(slog.NewTextHandler(out, options)), level
}

// formatDuration writes durations as text such as 1.5s, where slog's JSON handler would write nanoseconds.
func formatDuration(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}

// resourceLogInterval is the time between two logs of the same failure, of which there may be
// thousands a second.
const resourceLogInterval = time.Minute

// resourceLog logs, once a minute each, that this process is out of file
// descriptors, and that connections cannot be accepted. Safe for concurrent use.
type resourceLog struct {
	log                 *slog.Logger
	descriptors, accept limitedLog
}

func newResourceLog(log *slog.Logger) *resourceLog {
	l := &resourceLog{log: log}
	l.descriptors.limit.Interval = resourceLogInterval
	l.accept.limit.Interval = resourceLogInterval
	return l
}

type limitedLog struct {
	limit rate.Sometimes
	calls atomic.Int64 // since the last one that wrote, and that one
}

// writeIfDue calls write, unless it did so a short time ago, with the number of calls that it suppressed since.
func (l *limitedLog) writeIfDue(write func(suppressed int64)) {
	l.calls.Add(1)
	l.limit.Do(func() { write(l.calls.Swap(0) - 1) })
}

// logOutOfDescriptors logs, if it is time, that a connection could not be made or accepted for lack
// of a file descriptor.
func (l *resourceLog) logOutOfDescriptors(err error) {
	l.descriptors.writeIfDue(func(suppressed int64) {
		l.log.Error("out of file descriptors", "limit", fileDescriptorLimit(), "err", err, "suppressed", suppressed,
			"fix", "raise the limit (ulimit -n, systemd's LimitNOFILE=, Docker's --ulimit nofile=), "+
				"or lower limits.connections and limits.in_flight")
	})
}

func (l *resourceLog) logAcceptError(err error) {
	if transport.IsOutOfDescriptors(err) {
		l.logOutOfDescriptors(err)
		return
	}
	l.accept.writeIfDue(func(suppressed int64) { l.log.Error("accept failed", "err", err, "suppressed", suppressed) })
}

// progressLog logs when backends stall with requests of ours or become slow, and when they recover. Safe for concurrent use.
type progressLog struct {
	router *router.Router
	log    *slog.Logger

	mu   sync.Mutex
	last map[*backends.Backend]progress // as of the last update
}

type progress struct {
	stalls        uint64
	stalled, slow bool
}

func newProgressLog(r *router.Router, log *slog.Logger) *progressLog {
	return &progressLog{router: r, log: log, last: map[*backends.Backend]progress{}}
}

// logChange logs what has changed of a backend. A stall may be over by then: requests that
// wait are moved to another backend as soon as it is found.
func (l *progressLog) logChange(b *backends.Backend) {
	status := l.router.Status(b)
	now := progress{status.Stalls, status.Stalled, status.Slowdown > 0}
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.last[b]
	if l.last[b] = now; now == (progress{}) {
		delete(l.last, b) // nor is a removed backend kept
	}
	switch {
	case now.stalls > last.stalls:
		l.log.Warn("backend stalled, no new requests routed", "backend", b.Name, "in_flight", b.InFlight.Load())
	case last.stalled && !now.stalled:
		l.log.Info("backend recovered", "backend", b.Name)
	}
	switch {
	case now.slow && !last.slow:
		l.log.Warn("backend slow", "backend", b.Name, "times_usual", math.Round(status.Slowdown), "in_flight", b.InFlight.Load())
	case last.slow && !now.slow:
		l.log.Info("backend not slow any more", "backend", b.Name)
	}
}

func (l *progressLog) forget(b *backends.Backend) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.last, b)
}
