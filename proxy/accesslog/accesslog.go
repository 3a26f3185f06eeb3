// Package accesslog writes one line for each request at its end, without prompts,
// responses and keys.
//
// Requests never wait for it. Lines go through a bounded queue to one goroutine that
// writes them; if it cannot keep up, lines are dropped and counted.
package accesslog

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"warmroute/recovery"
)

const (
	// maxQueuedLines bounds the lines that wait to be written, about 4 MiB.
	maxQueuedLines = 8 << 10
	// batchInterval is how long lines are collected before they are written together.
	batchInterval = 50 * time.Millisecond
	// renameCheckInterval is how often the writer checks whether its file was renamed.
	renameCheckInterval = time.Second
	// writeTimeout bounds a write to a file that is to be closed.
	writeTimeout = 2 * time.Second
	warnInterval = time.Minute
)

// Settings configure a Log. They may be changed while it is in use.
type Settings struct {
	File   string  `mapstructure:"file"`                     // a path, stdout or stderr; empty: none
	Format string  `mapstructure:"format" oneof:"json text"` // json or text
	Sample float64 `mapstructure:"sample" range:"0..1"`      // share of the successful requests that are logged, 0 to 1
}

// Log is the access log. It is safe for concurrent use. A nil Log is disabled.
type Log struct {
	log      *slog.Logger   // for warnings about the access log
	warnings rate.Sometimes // are logged
	queue    chan []byte
	dropped  atomic.Int64
	stopped  atomic.Bool // nobody reads the queue
	output   atomic.Pointer[output]
}

// output is where lines go, and how they are made.
type output struct {
	handler slog.Handler
	sample  float64
	*file
}

// New opens the file, if there is one. Nothing is written before Run.
func New(s Settings, log *slog.Logger) (*Log, error) {
	l := &Log{log: log, warnings: rate.Sometimes{Interval: warnInterval}, queue: make(chan []byte, maxQueuedLines)}
	apply, err := l.PrepareSettings(s)
	if err == nil {
		apply()
	}
	return l, err
}

// PrepareSettings opens the file again, in case it was renamed, and changes nothing yet. apply,
// which cannot fail and must be called, changes the settings.
func (l *Log) PrepareSettings(s Settings) (apply func(), err error) {
	var next *output
	if s.File != "" {
		f, err := openFile(s.File)
		if err != nil {
			return nil, err
		}
		next = &output{handler: slog.NewTextHandler(queueWriter{l}, nil), sample: s.Sample, file: f}
		if s.Format == "json" {
			next.handler = slog.NewJSONHandler(queueWriter{l}, nil)
		}
	}
	return func() {
		if previous := l.output.Swap(next); previous != nil {
			time.AfterFunc(writeTimeout, func() { previous.Close() }) // a write to it may be in progress
		}
	}, nil
}

// Enabled reports whether requests are logged.
func (l *Log) Enabled() bool { return l != nil && l.output.Load() != nil }

// DroppedLines returns how many lines were not written.
func (l *Log) DroppedLines() int64 {
	n := l.dropped.Load()
	if l.stopped.Load() {
		n += int64(len(l.queue))
	}
	return n
}

// EnqueueSampled logs a request if it failed or is in the sample. It does not block.
func (l *Log) EnqueueSampled(e *Entry) {
	out := l.output.Load()
	if out == nil || !e.failed() && out.sample < 1 && rand.Float64() >= out.sample {
		return
	}
	_ = out.handler.Handle(context.Background(), e.record()) // queueWriter returns no error
}

// queueWriter queues the lines that a handler writes, one at a time.
type queueWriter struct{ *Log }

func (l queueWriter) Write(line []byte) (int, error) {
	select {
	case l.queue <- bytes.Clone(line):
	default:
		l.dropped.Add(1)
	}
	return len(line), nil
}

// Run writes lines until ctx is done, and then those in the queue. It returns after
// about writeTimeout even if a write hangs. It must be called once.
func (l *Log) Run(ctx context.Context, panics recovery.Reporter) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer l.stopped.Store(true)
		panics.RunLoop(ctx, recovery.AccessLog, l.writeLines)
	}()
	<-ctx.Done()
	select {
	case <-done:
	case <-time.After(writeTimeout):
	}
	if out := l.output.Load(); out != nil {
		out.Close() // ends a write that hangs, if it is to a pipe
	}
	select {
	case <-done:
	case <-time.After(writeTimeout / 2):
	}
}

func (l *Log) writeLines(ctx context.Context) {
	renameCheck := time.NewTicker(renameCheckInterval)
	defer renameCheck.Stop()
	for ctx.Err() == nil {
		select {
		case line := <-l.queue:
			select {
			case <-time.After(batchInterval):
			case <-ctx.Done():
			}
			l.writeBatch(line)
		case <-renameCheck.C:
			l.warn(l.reopenIfRenamed())
		case <-ctx.Done():
		}
	}
	for len(l.queue) > 0 {
		l.writeBatch(<-l.queue)
	}
}

// warn logs err, unless it is nil, at most once in warnInterval.
func (l *Log) warn(err error) {
	if err != nil {
		l.warnings.Do(func() {
			l.log.Warn("writing the access log failed", "err", err, "dropped_lines", l.DroppedLines())
		})
	}
}

// writeBatch writes the first line and those in the queue, and counts those it could not write.
func (l *Log) writeBatch(first []byte) {
	batch := first
	for range len(l.queue) { // nobody else receives
		batch = append(batch, <-l.queue...)
	}
	unwritten := batch
	var err error
	if out := l.output.Load(); out != nil {
		unwritten, err = out.write(batch)
	}
	l.dropped.Add(int64(bytes.Count(unwritten, []byte("\n"))))
	l.warn(err)
}

// reopenIfRenamed opens the file again if it was renamed.
func (l *Log) reopenIfRenamed() error {
	out := l.output.Load()
	if out == nil || !out.wasRenamed() {
		return nil
	}
	f, err := openFile(out.path)
	if err != nil {
		return fmt.Errorf("reopen renamed file: %w", err)
	}
	if !l.output.CompareAndSwap(out, &output{out.handler, out.sample, f}) { // Configure was faster
		return f.Close()
	}
	return out.Close()
}
