package proxy

import (
	"net/http"
	"time"

	"warmroute/metrics"
	"warmroute/proxy/activity"
)

// maxWriteBytes is how much is written under one deadline, so that a slow reader is not disconnected in a long write.
const maxWriteBytes = 32 << 10

// clientWriter writes the response to the client. A write blocks while the client does not read, and with it the reading from
// the replica. It fails when the client reads nothing for writeTimeout.
type clientWriter struct {
	http.ResponseWriter
	conn           http.ResponseController
	writeTimeout   time.Duration // 0: no limit
	deadline       time.Time     // of writes; zero: none
	writeStartedAt time.Time     // the latest one
	bytesWritten   int64         // of the response's body
	isHTTP2        bool          // a deadline ends the response even while nothing is written
	// cancellable is the request whose response this is. If an operator cancels it, that has set the last deadline. nil: it cannot
	// be cancelled, or the error is being written.
	cancellable *activity.Request
}

func newClientWriter(w http.ResponseWriter, r *http.Request, writeTimeout time.Duration) clientWriter {
	c := clientWriter{ResponseWriter: w, conn: *http.NewResponseController(w), writeTimeout: writeTimeout, isHTTP2: r.ProtoMajor == 2}
	if r.Header["Expect"] != nil && !c.isHTTP2 { // a "100 Continue" is written while the body is read, to a client that may not read it
		c.extendWriteDeadline()
		c.deadline = time.Time{}
	}
	return c
}

// Write implements io.Writer. The deadline stays, for what the server itself writes at the end.
func (c *clientWriter) Write(p []byte) (n int, err error) {
	for {
		c.extendWriteDeadline()
		var m int
		m, err = c.ResponseWriter.Write(p[n:min(len(p), n+maxWriteBytes)])
		c.bytesWritten += int64(m)
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// writeAndFlush writes p and sends it at once: more may follow much later.
func (c *clientWriter) writeAndFlush(p []byte) error {
	if _, err := c.Write(p); err != nil {
		return err
	}
	if err := c.conn.Flush(); err != nil {
		return err
	}
	if c.isHTTP2 && c.writeTimeout > 0 {
		c.setWriteDeadline(time.Time{})
	}
	return nil
}

// extendWriteDeadline moves the deadline if a quarter of the time has passed: setting it costs a lock and a timer.
func (c *clientWriter) extendWriteDeadline() {
	c.writeStartedAt = time.Now()
	if c.writeTimeout == 0 {
		return
	}
	if c.deadline.Sub(c.writeStartedAt) < c.writeTimeout-c.writeTimeout/4 {
		c.setWriteDeadline(c.writeStartedAt.Add(c.writeTimeout))
	}
}

// setWriteDeadline sets the write deadline, unless an operator has set the last one.
func (c *clientWriter) setWriteDeadline(until time.Time) {
	if c.cancellable != nil && c.cancellable.IsCancelled() {
		return
	}
	c.deadline = until
	_ = c.conn.SetWriteDeadline(until)                       // an error says that there are none
	if c.cancellable != nil && c.cancellable.IsCancelled() { // meanwhile
		_ = c.conn.SetWriteDeadline(time.Now().Add(activity.CancelGrace))
	}
}

// abortPhase returns the phase in which a failed write lost the client: usual, or not reading.
func (c *clientWriter) abortPhase(usual metrics.AbortPhase) metrics.AbortPhase {
	if !c.deadline.IsZero() && !time.Now().Before(c.deadline) {
		return metrics.AbortNotReading
	}
	return usual
}
