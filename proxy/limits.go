package proxy

import (
	"io"
	"net/http"
	"time"
)

// lingering is for the rest of a body that nobody wants: net/http reads some of it,
// to use the connection again or to close it in order, and would wait for ever.
const lingering = 2 * time.Second

// hurry leaves the client that long.
func (c *client) hurry() { _ = c.conn.SetReadDeadline(time.Now().Add(lingering)) }

// refuseUnread answers a request whose body was not read to its end.
func (c *client) refuseUnread(e *apiError, r *http.Request) {
	c.hurry()
	e.write(c)
	if r.Close && r.ProtoMajor == 1 {
		// net/http would close at once, and a connection that is closed with bytes
		// still to be read is reset: the client might never see the answer.
		_ = c.conn.Flush()
		_, _ = io.Copy(io.Discard, r.Body)
	}
}

// checkLimits refuses what is too much before any of its body is read.
func (x *exchange) checkLimits() *apiError {
	if most := x.settings.InFlight; x.p.inFlight.Load() > int64(most) {
		e := unavailable("as many requests as this proxy takes are in flight (limits.in_flight)")
		e.kind, e.code = "overloaded", "too_many_requests"
		return e
	}
	if most := x.settings.QueryBytes; len(x.r.URL.RawQuery) > most {
		return &apiError{status: http.StatusRequestURITooLong, kind: "invalid_request_error", code: "query_too_long",
			message: "the query is longer than this proxy takes (limits.query_bytes)"}
	}
	return nil
}
