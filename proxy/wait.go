package proxy

import (
	"context"
	"time"
)

// wait is what can end an attempt while nothing of its answer was relayed: its
// client, a limit of time, or the router's word that the backend is stuck.
type wait struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	last   *time.Timer // runs out at the limit; nil: there is none
}

// begin precedes the pick: the router may call stuck from then on.
func (w *wait) begin(ctx context.Context) {
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.last = nil
}

func (w *wait) limit(d time.Duration) {
	cancel := w.cancel
	w.last = time.AfterFunc(d, func() { cancel(errFirstByte) })
}

func (w *wait) unlimit() {
	if w.last != nil {
		w.last.Stop()
	}
}

func (w *wait) end() {
	w.unlimit()
	w.cancel(nil)
}

// stuck is called by the router, under its lock: see router.Request.Stuck. What
// the stall guard moves away once it does not move again: a request may itself
// be what takes so long, and has to end somewhere. Where it stays, a whole answer
// has from now on the time that a stream has for its first event.
func (x *exchange) stuck(elsewhere, hung bool) {
	s, w := x.settings, &x.wait
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
	if err := context.Cause(a.wait.ctx); err != nil {
		return a.failed(err)
	}
	return nil
}
