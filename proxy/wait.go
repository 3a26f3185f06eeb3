package proxy

import (
	"context"
	"sync"
	"time"

	"warmroute/backends/ending"
	"warmroute/router"
)

// wait is what can end an attempt while nothing of its answer was relayed: its
// client, a limit of time, the router's word that the backend is stuck, or an
// operator. It is the context with which the attempt is sent. Safe for concurrent
// use, but for begin, limit, unlimit and end.
type wait struct {
	ending.Context
	unwatch func() bool   // ends the client's calling back
	last    *time.Timer   // runs out at the limit; nil: there is none
	silence *silenceLimit // nil: there is none
}

// begin precedes the pick: the router may call stuck from then on. A wait begins
// once: what is late in ending it must not end another.
func (w *wait) begin(client context.Context) {
	w.Begin(client)
	w.unwatch = ending.AfterFunc(client, w.left)
}

func (w *wait) left() { w.End(w.Cause()) }

func (w *wait) limit(d time.Duration) {
	w.last = time.AfterFunc(d, func() { w.End(errFirstByte) })
}

// silenceLimit ends a wait when the backend of its attempt has made no progress for
// some time.
type silenceLimit struct {
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// limitSilence makes w end with errResponse when the backend of d has shown no sign of
// work for as long as limit.
func (w *wait) limitSilence(d *router.Decision, limit time.Duration) {
	s := &silenceLimit{}
	w.silence = s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(limit, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.stopped {
			return
		}
		if left := limit - d.SinceProgress(); left > 0 {
			s.timer.Reset(left)
			return
		}
		w.End(errResponse)
	})
}

// stop returns when the wait is ended by s no more.
func (s *silenceLimit) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	s.timer.Stop()
}

func (w *wait) unlimit() {
	if w.silence != nil {
		w.silence.stop()
	}
	if w.last != nil {
		w.last.Stop()
	}
}

func (w *wait) end() {
	w.unlimit()
	w.unwatch()
	w.End(context.Canceled)
}

// stuck is called by the router, under its lock: see router.Request.Stuck. What
// the stall guard moves away once it does not move again: a request may itself
// be what takes so long, and has to end somewhere. Where it stays, a whole answer
// has from now on the time that a stream has for its first event.
func (x *exchange) stuck(elsewhere, hung bool) {
	s, w := x.settings, x.wait
	switch {
	case elsewhere && s.RetryStalled && (hung || !x.moved) && x.spent+1 < s.Attempts:
		w.End(errStuck)
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
