// Package accesslog writes one line about each request at its end: where it came
// from, where it went and why, and what became of it. Never a prompt, an answer or
// a key.
//
// Requests never wait for it. Their lines are gathered in memory, up to a bound,
// and one goroutine writes them; where it cannot keep up, because a disk is full or
// whoever reads a pipe does not, lines are lost, counted and warned of.
package accesslog

import (
	"bytes"
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// mostPending is how much may wait to be written, as bytes of lines, while as much
	// again is being written.
	mostPending = 4 << 20
	// gather is how long lines are gathered, so that many are written at once.
	gather = 50 * time.Millisecond
	// lookEvery is how often the writer looks whether its file was renamed.
	lookEvery = time.Second
	// patience is how long a write may still take when its file is given up: at the
	// end, or for another one.
	patience  = 2 * time.Second
	warnEvery = time.Minute
)

// Settings may be changed while the log is in use.
type Settings struct {
	File   string  // a path, stdout or stderr; empty: nothing is logged
	Format string  // json or text
	Sample float64 // share of the requests without an error that are logged
}

// Log is the access log. Safe for concurrent use; a nil one logs nothing.
type Log struct {
	log  *slog.Logger // what it says of itself
	use  atomic.Pointer[use]
	lost atomic.Int64
	wake chan struct{}

	mu      sync.Mutex // guards what follows
	pending []byte     // whole lines
	next    *sink      // where they go from now on, if changed
	changed bool
	file    *os.File // that is being written to; nil: none
	ended   bool     // nobody writes any more

	warned time.Time // the writer's own
}

// use is what a line is made with.
type use struct {
	handler slog.Handler
	sample  float64
}

// New opens the file, if there is to be one. Nothing is written before Run.
func New(s Settings, log *slog.Logger) (*Log, error) {
	l := &Log{log: log, wake: make(chan struct{}, 1)}
	return l, l.Configure(s)
}

// Configure changes where and what is logged from now on. The file is opened anew
// in any case, so that one that was renamed is let go. An error leaves all as it was.
func (l *Log) Configure(s Settings) error {
	var u *use
	var to *sink
	if s.File != "" {
		var err error
		if to, err = open(s.File); err != nil {
			return err
		}
		u = &use{handler: slog.NewTextHandler(queue{l}, nil), sample: s.Sample}
		if s.Format == "json" {
			u.handler = slog.NewJSONHandler(queue{l}, nil)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next != nil {
		l.next.close()
	}
	l.next, l.changed = to, true
	l.use.Store(u)
	l.hurry()
	l.rouse()
	return nil
}

// On reports whether anything is logged.
func (l *Log) On() bool { return l != nil && l.use.Load() != nil }

// Lost is how many lines could not be written.
func (l *Log) Lost() int64 { return l.lost.Load() }

// Add logs a request, if it has an error or is one of the sample. It never waits.
func (l *Log) Add(e *Entry) {
	u := l.use.Load()
	if u == nil || !e.failed() && u.sample < 1 && rand.Float64() >= u.sample {
		return
	}
	_ = u.handler.Handle(context.Background(), e.record()) // queue takes or counts it
}

// queue is where the handlers write to, a line each time.
type queue struct{ *Log }

func (l queue) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || len(l.pending)+len(line) > mostPending {
		l.lost.Add(1)
		return len(line), nil
	}
	l.pending = append(l.pending, line...)
	l.rouse()
	return len(line), nil
}

func (l *Log) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// hurry bounds the write under way. Files on disks know no such bound.
func (l *Log) hurry() {
	if l.file != nil {
		_ = l.file.SetWriteDeadline(time.Now().Add(patience))
	}
}

// Run writes until ctx is done, and then what was added before; it gives that up
// where it cannot be written in time. Call it once.
func (l *Log) Run(ctx context.Context) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.write(ctx)
	}()
	<-ctx.Done()
	l.mu.Lock()
	l.hurry()
	l.mu.Unlock()
	select {
	case <-ended:
	case <-time.After(patience + patience/2): // stuck in the system; it ends with what it waits for, or with the process
	}
}

// write is the writer.
func (l *Log) write(ctx context.Context) {
	var out *sink
	var batch []byte
	looks := time.NewTicker(lookEvery)
	defer looks.Stop()
	for ctx.Err() == nil {
		select {
		case <-l.wake:
			select {
			case <-time.After(gather):
			case <-ctx.Done():
			}
		case <-looks.C:
			l.check(out.renew())
		case <-ctx.Done():
		}
		batch, out = l.take(batch, out, false)
		l.put(out, batch)
	}
	batch, out = l.take(batch, out, true)
	l.put(out, batch)
	out.close()
}

// take returns the lines that wait and where they go; spare is a buffer to be used
// again.
func (l *Log) take(spare []byte, out *sink, last bool) ([]byte, *sink) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed {
		out.close()
		out, l.next, l.changed = l.next, nil, false
	}
	if l.file = out.target(); last {
		l.ended = true
		l.hurry()
	}
	if cap(spare) > mostPending/4 {
		spare = nil // what one jam took must not stay for good
	}
	batch := l.pending
	l.pending = spare[:0]
	return batch, out
}

func (l *Log) put(out *sink, batch []byte) {
	if len(batch) == 0 {
		return
	}
	lost, err := bytes.Count(batch, []byte("\n")), error(nil)
	if out != nil {
		lost, err = out.write(batch)
	}
	l.lost.Add(int64(lost))
	l.check(err)
}

// check tells of an error now and then.
func (l *Log) check(err error) {
	if now := time.Now(); err != nil && now.Sub(l.warned) > warnEvery {
		l.warned = now
		l.log.Warn("access log is not written", "reason", err.Error(), "lines_lost", l.Lost())
	}
}
