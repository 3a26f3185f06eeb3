package proxy

import (
	"net/http"
	"sync/atomic"
	"time"

	"warmroute/metrics"
)

// mostPiece is how much is written under one deadline: a client that reads slowly
// must not be cut off in the middle of a long write.
const mostPiece = 32 << 10

// client is where an answer goes. A write waits as long as the client does not
// read, and with it the reading of the replica's answer, so nothing piles up here.
// A client that takes nothing for longer than it may is given up.
type client struct {
	http.ResponseWriter
	conn   http.ResponseController
	idle   time.Duration // for the client to take nothing; 0: no limit
	until  time.Time     // the write deadline in force; zero: none
	wrote  time.Time     // when the latest write began
	sent   int64         // bytes of the answer's body
	resets bool          // a deadline ends the answer even while nothing is written
	ended  *atomic.Bool  // by an operator, who has set the last deadline; nil: that cannot be, or its last words are written
}

func newClient(w http.ResponseWriter, r *http.Request, idle time.Duration) client {
	c := client{ResponseWriter: w, conn: *http.NewResponseController(w), idle: idle, resets: r.ProtoMajor == 2}
	if r.Header["Expect"] != nil && !c.resets { // it is told to go on while its body is read, and may not read that either
		c.renew()
		c.until = time.Time{}
	}
	return c
}

// Write implements io.Writer. The deadline stays, for what the server itself has
// still to write at the end.
func (c *client) Write(p []byte) (n int, err error) {
	for {
		c.renew()
		var m int
		m, err = c.ResponseWriter.Write(p[n:min(len(p), n+mostPiece)])
		c.sent += int64(m)
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// send writes p and flushes it: something else may follow much later.
func (c *client) send(p []byte) error {
	if _, err := c.Write(p); err != nil {
		return err
	}
	if err := c.conn.Flush(); err != nil {
		return err
	}
	if c.resets && c.idle > 0 {
		c.limit(time.Time{})
	}
	return nil
}

// renew moves the deadline when a quarter of the time is gone: setting one costs
// a lock and a timer, and pieces come many thousand times a second.
func (c *client) renew() {
	c.wrote = time.Now()
	if c.idle == 0 {
		return
	}
	if c.until.Sub(c.wrote) < c.idle-c.idle/4 {
		c.limit(c.wrote.Add(c.idle))
	}
}

// limit sets the deadline, unless an operator has set the last one.
func (c *client) limit(until time.Time) {
	if c.ended != nil && c.ended.Load() {
		return
	}
	c.until = until
	_ = c.conn.SetWriteDeadline(until)    // fails where there are none; then there is no limit
	if c.ended != nil && c.ended.Load() { // it came in between
		_ = c.conn.SetWriteDeadline(time.Now().Add(lastWords))
	}
}

// phase tells, of a write that failed, where the client was lost: where the caller
// says, or in not reading.
func (c *client) phase(usual metrics.AbortPhase) metrics.AbortPhase {
	if !c.until.IsZero() && !time.Now().Before(c.until) {
		return metrics.AbortNotReading
	}
	return usual
}

// sender flushes what it is given, piece by piece.
type sender struct{ to *client }

func (s sender) Write(p []byte) (int, error) {
	if err := s.to.send(p); err != nil {
		return 0, err
	}
	return len(p), nil
}
