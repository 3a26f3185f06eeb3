package proxy

import (
	"context"
	"slices"
	"sync"
	"time"
)

// wait is what can end an attempt while nothing of its answer was relayed: its
// client, a limit of time, the router's word that the backend is stuck, or an
// operator. It is the context with which the attempt is sent.
//
// It is a context of our own because package context would take two, one that is
// cancelled and one that calls the transport back, each with a map, a channel and
// closures of its own. Safe for concurrent use, but for limit, unlimit and end.
type wait struct {
	context.Context             // the client's
	unwatch         func() bool // ends its calling back
	last            *time.Timer // runs out at the limit; nil: there is none

	mu    sync.Mutex // guards what follows
	cause error      // nil: it has not ended
	done  chan struct{}
	calls []call // to be made at the end
	room  [1]call
	count int // of calls ever asked for
}

// call is what somebody wants to have called, by its number.
type call struct {
	number int
	f      func()
}

// begin precedes the pick: the router may call stuck from then on. A wait begins
// once: what is late in ending it must not end another.
func (w *wait) begin(ctx context.Context) {
	w.Context, w.calls = ctx, w.room[:0]
	w.unwatch = context.AfterFunc(ctx, w.left)
}

func (w *wait) left() { w.cancel(context.Cause(w.Context)) }

func (w *wait) limit(d time.Duration) {
	w.last = time.AfterFunc(d, func() { w.cancel(errFirstByte) })
}

func (w *wait) unlimit() {
	if w.last != nil {
		w.last.Stop()
	}
}

func (w *wait) end() {
	w.unlimit()
	w.unwatch()
	w.cancel(context.Canceled)
}

// cancel ends the wait, if nothing has before.
func (w *wait) cancel(cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause != nil {
		return
	}
	w.cause = cause
	if w.done != nil {
		close(w.done)
	}
	for _, c := range w.calls {
		go c.f() // it may take locks that are held here, the router's for one
	}
	w.calls = nil
}

// Done implements context.Context.
func (w *wait) Done() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done == nil {
		w.done = make(chan struct{})
		if w.cause != nil {
			close(w.done)
		}
	}
	return w.done
}

// Err implements context.Context. That the client has left is seen here at once,
// Done follows.
func (w *wait) Err() error {
	if err := w.Context.Err(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause != nil {
		return context.Canceled
	}
	return nil
}

// Cause says why the wait has ended; nil: it has not.
func (w *wait) Cause() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause != nil {
		return w.cause
	}
	return context.Cause(w.Context)
}

// AfterFunc is context.AfterFunc of w: both package context and the transport look
// for it.
func (w *wait) AfterFunc(f func()) (stop func() bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cause != nil {
		go f()
		return func() bool { return false }
	}
	w.count++
	number := w.count
	w.calls = append(w.calls, call{number, f})
	return func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		before := len(w.calls)
		w.calls = slices.DeleteFunc(w.calls, func(c call) bool { return c.number == number })
		return len(w.calls) < before
	}
}

// stuck is called by the router, under its lock: see router.Request.Stuck. What
// the stall guard moves away once it does not move again: a request may itself
// be what takes so long, and has to end somewhere. Where it stays, a whole answer
// has from now on the time that a stream has for its first event.
func (x *exchange) stuck(elsewhere, hung bool) {
	s, w := x.settings, x.wait
	switch {
	case elsewhere && s.RetryStalled && (hung || !x.moved) && x.spent+1 < s.Attempts:
		w.cancel(errStuck)
	case !x.input.request.Streams && s.FirstByte > 0 && w.last == nil: // a stream's limit is its attempt's business
		w.limit(s.FirstByte)
	}
}

// inTime ends the wait: from here on nothing but its client ends the answer. It
// returns why there is none, if it was ended before.
func (a *attempt) inTime() *failure {
	a.decision.Commit()
	a.wait.unlimit()
	if err := a.wait.Cause(); err != nil {
		return a.failed(err)
	}
	return nil
}
