package http1

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"
)

// calm is for how long a request is served before somebody looks whether its client
// is still there. Most of those that need no engine are answered by then.
const calm = 3 * time.Millisecond

// watch sees the client leave while its request is served: by reading on, which
// also may bring the first byte of the next request.
type watch struct {
	c     *conn
	timer *time.Timer // begins it; its goroutine is the watch

	mu       sync.Mutex // guards what follows
	over     sync.Cond  // reading has become false
	due      bool
	reading  bool
	stopping bool
}

// soon begins the watch after a while. The request's body was read to its end.
func (w *watch) soon() {
	if w.c.in.held {
		return
	}
	if w.c.out.hurried.Load() {
		_ = w.c.out.SetReadDeadline(time.Time{}) // it was the body's
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.due = true
	if w.timer == nil {
		w.timer = time.AfterFunc(calm, w.run)
	} else {
		w.timer.Reset(calm)
	}
}

func (w *watch) run() {
	w.mu.Lock()
	if !w.due { // too late, or another run was faster
		w.mu.Unlock()
		return
	}
	w.due, w.reading = false, true
	w.mu.Unlock()
	n, err := w.c.Read(w.c.in.first[:])
	w.mu.Lock()
	defer w.mu.Unlock()
	w.c.in.held = n == 1
	if err != nil && !(w.stopping && errors.Is(err, os.ErrDeadlineExceeded)) {
		w.c.cut(context.Canceled)
	}
	w.reading, w.stopping = false, false
	w.over.Broadcast()
}

// stop ends the watch. Afterwards the connection may be read again.
func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.due {
		w.due = false
		w.timer.Stop()
		return
	}
	if !w.reading {
		return
	}
	w.stopping = true
	w.c.SetReadDeadline(time.Unix(1, 0))
	for w.reading {
		w.over.Wait()
	}
	w.c.SetReadDeadline(time.Time{})
}
