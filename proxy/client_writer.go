package proxy

import (
	"net/http"
	"sync/atomic"
	"time"

	"warmroute/metrics"
)

// maxWriteBytes is how much is written under one deadline: a client that reads slowly
// must not be cut off in the middle of a long write.
const maxWriteBytes = 32 << 10

// clientWriter is where an answer goes. A write waits as long as the client does not
// read, and with it the reading of the replica's answer, so nothing piles up here.
// A client that takes nothing for longer than it may is given up.
type clientWriter struct {
	http.ResponseWriter
	conn           http.ResponseController
	writeTimeout   time.Duration // for the client to take nothing; 0: no limit
	deadline       time.Time     // the write deadline in force; zero: none
	writeStartedAt time.Time     // when the latest write began
	bytesWritten   int64         // bytes of the answer's body
	isHTTP2        bool          // a deadline ends the answer even while nothing is written
	cancelled      *atomic.Bool  // by an operator, who has set the last deadline; nil: that cannot be, or its last words are written
}

func newClientWriter(w http.ResponseWriter, r *http.Request, idle time.Duration) clientWriter {
	c := clientWriter{ResponseWriter: w, conn: *http.NewResponseController(w), writeTimeout: idle, isHTTP2: r.ProtoMajor == 2}
	if r.Header["Expect"] != nil && !c.isHTTP2 { // it is told to go on while its body is read, and may not read that either
		c.extendDeadline()
		c.deadline = time.Time{}
	}
	return c
}

// Write implements io.Writer. The deadline stays, for what the server itself has
// still to write at the end.
func (c *clientWriter) Write(p []byte) (n int, err error) {
	for {
		c.extendDeadline()
		var m int
		m, err = c.ResponseWriter.Write(p[n:min(len(p), n+maxWriteBytes)])
		c.bytesWritten += int64(m)
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// writeAndFlush writes p and flushes it: something else may follow much later.
func (c *clientWriter) writeAndFlush(p []byte) error {
	if _, err := c.Write(p); err != nil {
		return err
	}
	if err := c.conn.Flush(); err != nil {
		return err
	}
	if c.isHTTP2 && c.writeTimeout > 0 {
		c.setDeadline(time.Time{})
	}
	return nil
}

// extendDeadline moves the deadline when a quarter of the time is gone: setting one costs
// a lock and a timer, and pieces come many thousand times a second.
func (c *clientWriter) extendDeadline() {
	c.writeStartedAt = time.Now()
	if c.writeTimeout == 0 {
		return
	}
	if c.deadline.Sub(c.writeStartedAt) < c.writeTimeout-c.writeTimeout/4 {
		c.setDeadline(c.writeStartedAt.Add(c.writeTimeout))
	}
}

// setDeadline sets the deadline, unless an operator has set the last one.
func (c *clientWriter) setDeadline(until time.Time) {
	if c.cancelled != nil && c.cancelled.Load() {
		return
	}
	c.deadline = until
	_ = c.conn.SetWriteDeadline(until)            // fails where there are none; then there is no limit
	if c.cancelled != nil && c.cancelled.Load() { // it came in between
		_ = c.conn.SetWriteDeadline(time.Now().Add(cancelGrace))
	}
}

// abortPhase tells, of a write that failed, where the client was lost: where the caller
// says, or in not reading.
func (c *clientWriter) abortPhase(usual metrics.AbortPhase) metrics.AbortPhase {
	if !c.deadline.IsZero() && !time.Now().Before(c.deadline) {
		return metrics.AbortNotReading
	}
	return usual
}

// flushingWriter flushes what it is given, piece by piece.
type flushingWriter struct{ client *clientWriter }

func (s flushingWriter) Write(p []byte) (int, error) {
	if err := s.client.writeAndFlush(p); err != nil {
		return 0, err
	}
	return len(p), nil
}
