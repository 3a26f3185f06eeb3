package proxy

import (
	"errors"
	"net/http"
	"time"

	"warmroute/backends/ending"
	"warmroute/metrics"
)

// ErrCutOff is the cause with which the contexts of requests are cancelled that
// took longer than a proxy waits at its end. Their clients get to know.
var ErrCutOff = errors.New("the proxy ended before the answer did (timeouts.shutdown)")

// FailReadiness makes /readyz and /health fail from now on. All else is served as before.
func (p *Proxy) FailReadiness() { p.unready.Store(true) }

func shuttingDown() *apiError {
	e := unavailable("this proxy is shutting down; try again")
	e.code = "shutting_down"
	return e
}

// cancelled reports whether an operator has ended the request.
func (x *exchange) cancelled() bool { return x.presence.cancelled.Load() }

// cutOff reports whether the request was ended by the end of the proxy, or by an
// operator.
func (x *exchange) cutOff() bool { return x.cancelled() || ending.Cause(x.r.Context()) == ErrCutOff }

// over reports whether nobody waits for an answer any more.
func (x *exchange) over() bool { return x.cancelled() || x.r.Context().Err() != nil }

// clientLeft reports whether the request was ended by its client.
func (x *exchange) clientLeft() bool { return x.over() && !x.cutOff() }

// cutFault is what a client is told whose request was cut off.
func (x *exchange) cutFault() *apiError {
	if !x.cancelled() {
		return shuttingDown()
	}
	if x.story.phase != metrics.AbortCancelled {
		x.story.phase = metrics.AbortCancelled
		x.p.metrics.Aborted(metrics.AbortCancelled)
	}
	x.w.ended, x.w.idle, x.w.until = nil, lastWords, time.Time{}
	// Not a 5xx, which clients would send again.
	return &apiError{status: http.StatusForbidden, kind: "cancelled", code: "cancelled", message: "an operator of this proxy has cancelled the request"}
}

// endLastWords lifts the deadline that a cancelled request's client had, where
// the next answer on the connection sets none of its own.
func (x *exchange) endLastWords() {
	if x.cancelled() && x.settings.WriteIdle == 0 {
		_ = x.w.conn.SetWriteDeadline(time.Time{})
	}
}
