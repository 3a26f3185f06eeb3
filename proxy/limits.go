package proxy

import (
	"io"
	"net/http"
	"time"
)

const (
	// lingering is for the rest of a body that nobody wants: some of it is read, to
	// use the connection again or to close it in order.
	lingering = 2 * time.Second
	// mostUnread is how much of it is read at most.
	mostUnread = 64 << 20
)

// hurry leaves the client that long.
func (c *client) hurry() { _ = c.conn.SetReadDeadline(time.Now().Add(lingering)) }

// mostLingering is how many refused requests may do that at once. They count in
// flight no more, or some hundred a second that nobody lets in would keep everybody
// out; those beyond it are closed at once, and may miss why.
const mostLingering = 1000

// refuseUnread answers a request whose body was not read to its end.
func (x *exchange) refuseUnread(e *apiError) {
	x.freeInput()
	x.leave()
	defer x.p.lingering.Add(-1)
	if x.p.lingering.Add(1) > mostLingering {
		_ = x.w.conn.SetReadDeadline(time.Now())
	} else {
		x.w.hurry()
	}
	e.write(&x.w, x.endpoint.anthropic())
	if x.r.ProtoMajor > 1 {
		return
	}
	_ = x.w.conn.Flush() // net/http waits for the body here, where the client may send another request after it
	// A connection that is closed with bytes still to be read is reset: the client
	// might never see the answer.
	_, _ = io.CopyN(io.Discard, x.r.Body, mostUnread)
}

// interactiveShare is one part in so many of limits.in_flight and of
// limits.body_bytes_total that batch requests leave to interactive ones.
const interactiveShare = 10

// limitForPriority returns how much of a limit on all requests together the request
// may use.
func (x *exchange) limitForPriority(limit int64) int64 {
	if x.input.request.Priority > 0 {
		return limit - limit/interactiveShare
	}
	return limit
}

// checkBatchLimit refuses a batch request before its body is read, when such
// requests have their part of limits.in_flight.
func (x *exchange) checkBatchLimit() *apiError {
	if x.p.inFlight.Load() > x.limitForPriority(int64(x.settings.InFlight)) {
		return tooManyInFlight()
	}
	return nil
}

func tooManyInFlight() *apiError {
	e := unavailable("as many requests as this proxy takes are in flight (limits.in_flight; batch requests leave a tenth of it to others)")
	e.kind, e.code = "overloaded", "too_many_requests"
	return e
}

// checkLimits refuses what is too much before any of its body is read.
func (x *exchange) checkLimits() *apiError {
	if most := x.settings.InFlight; x.p.inFlight.Load() > int64(most) {
		return tooManyInFlight()
	}
	if most := x.settings.QueryBytes; len(x.r.URL.RawQuery) > most {
		return &apiError{status: http.StatusRequestURITooLong, kind: "invalid_request_error", code: "query_too_long",
			message: "the query is longer than this proxy takes (limits.query_bytes)"}
	}
	return nil
}
