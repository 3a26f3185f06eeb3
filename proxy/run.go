package proxy

import (
	"errors"
	"log/slog"
	"net/http"
	"time"

	"warmroute/metrics"
	"warmroute/router"
)

// run makes attempts until the client has its answer, or is gone.
func (x *exchange) run() {
	x.query = x.hideKey()
	outgoing(x.r.Header, x.id)
	x.p.addInstance(x.r.Header)
	x.p.retries.request()
	x.input.request.Stuck = x.stuck
	var latest *failure
	var none error // why there is no backend to ask
	defer x.keepFailure(nil)
	x.beginWait()
	for {
		var d *router.Decision
		if d, none = x.pick(); none != nil {
			x.wait.end()
			break
		}
		if latest != nil {
			x.p.metrics.Retried(latest.reason)
		}
		f := x.attempt(d)
		if f == nil || f.left {
			return
		}
		x.beginWait()
		f.decision, latest = d, f
		x.tell(f)
		x.story.failed(string(f.reason))
		if !f.stale { // else it may be the next one too, on a new connection
			x.tried = append(x.tried, d.Backend)
		}
		if f.status != 0 || f.final || x.kept == nil || x.kept.status == 0 {
			x.keepFailure(f)
		}
		x.countFailure(f)
		if !x.again(f) {
			x.wait.end()
			break
		}
	}
	x.giveUp(none)
}

// beginWait precedes all that may take long before an attempt, and the attempt,
// which ends it.
func (x *exchange) beginWait() {
	if x.wait = &x.first; x.first.Begun() {
		x.wait = new(wait)
	}
	x.wait.begin(x.r.Context())
	x.p.present.waits(x)
}

// tell makes a failed attempt known.
func (x *exchange) tell(f *failure) {
	level, more := slog.LevelDebug, []any(nil)
	switch {
	case f.stale:
	case f.starved:
		x.p.outOfDescriptors(f.err)
	default:
		x.p.suspect(f.decision.Backend)
		if due, left := x.p.warnings.due(f.decision.Backend, time.Now()); due {
			level = slog.LevelWarn
			if left > 0 {
				more = []any{"others_since_the_last_warning", left}
			}
		}
	}
	x.p.log.Log(x.r.Context(), level, "attempt failed", append([]any{
		"backend", f.decision.Backend.Name, "reason", string(f.reason), "error", f.err, "request_id", x.id}, more...)...)
}

// giveUp answers when no attempt is left: with the last replica's own words, if
// there were any, else with why there is none.
func (x *exchange) giveUp(none error) {
	last := x.kept
	x.stopWaiting()
	if x.crowded {
		none = router.ErrQueueFull
	}
	switch {
	case x.cutOff():
		x.refuse(x.cutFault())
	case x.clientLeft():
		x.lost(metrics.AbortHeld)
	case last != nil && last.status != 0:
		x.relayFailure(last)
	case last != nil && last.starved && !x.crowded:
		e := unavailable("this proxy has no file descriptor left to connect to a replica with; try again")
		e.code = "out_of_descriptors"
		x.refuse(e)
	case last == nil, x.crowded, none != nil && (x.held > 0 || last.free && x.holdTime() > 0): // it waited for one
		x.refuse(x.notPicked(none))
	case last.stuck:
		x.refuse(&apiError{status: http.StatusGatewayTimeout, kind: "timeout", code: "replica_stuck",
			message: "the replica does nothing about the request, and no other could answer it"})
	case errors.Is(last.err, errResponse):
		x.refuse(responseTimeout())
	case last.timeout:
		x.refuse(firstByteTimeout())
	default:
		e := unavailable("no replica could answer: " + string(last.reason))
		e.status, e.kind, e.code = http.StatusBadGateway, "bad_gateway", "replica_failed"
		x.refuse(e)
	}
}
