package relay

import (
	"net/http"
	"time"

	"warmroute/metrics"
	"warmroute/proxy/activity"
	"warmroute/proxy/clientconn"
)

// maxWriteBytes is how much is written under one deadline, so that a slow reader is not disconnected in a long write.
const maxWriteBytes = 32 << 10

// ClientWriter writes the response to the client. A write blocks while the client does not read, and with it the reading from
// the replica. It fails when the client reads nothing for WriteTimeout.
type ClientWriter struct {
	http.ResponseWriter
	Conn           http.ResponseController
	WriteTimeout   time.Duration // 0: no limit
	Deadline       time.Time     // of writes; zero: none
	WriteStartedAt time.Time     // the latest one
	BytesWritten   int64         // of the response's body
	isHTTP2        bool          // a deadline ends the response even while nothing is written
	// Cancellable is the request whose response this is. If an operator cancels it, that has set the last deadline. nil: it cannot
	// be cancelled, or the error is being written.
	Cancellable *activity.Request
}

// NewClientWriter returns the writer of the response to r. writeTimeout 0: no limit.
func NewClientWriter(w http.ResponseWriter, r *http.Request, writeTimeout time.Duration) ClientWriter {
	c := ClientWriter{ResponseWriter: w, Conn: *http.NewResponseController(w), WriteTimeout: writeTimeout, isHTTP2: r.ProtoMajor == 2}
	if r.Header["Expect"] != nil && !c.isHTTP2 { // a "100 Continue" is written while the body is read, to a client that may not read it
		c.ExtendWriteDeadline()
		c.Deadline = time.Time{}
	}
	return c
}

// Write implements io.Writer. The deadline stays, for what the server itself writes at the end.
func (c *ClientWriter) Write(p []byte) (n int, err error) {
	for {
		c.ExtendWriteDeadline()
		var m int
		m, err = c.ResponseWriter.Write(p[n:min(len(p), n+maxWriteBytes)])
		c.BytesWritten += int64(m)
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// WriteAndFlush writes p and sends it at once: more may follow much later.
func (c *ClientWriter) WriteAndFlush(p []byte) error {
	if _, err := c.Write(p); err != nil {
		return err
	}
	if err := c.Conn.Flush(); err != nil {
		return err
	}
	if c.isHTTP2 && c.WriteTimeout > 0 {
		c.setWriteDeadline(time.Time{})
	}
	return nil
}

// ExtendWriteDeadline moves the deadline if a quarter of the time has passed: setting it costs a lock and a timer.
func (c *ClientWriter) ExtendWriteDeadline() {
	c.WriteStartedAt = time.Now()
	if c.WriteTimeout == 0 {
		return
	}
	if c.Deadline.Sub(c.WriteStartedAt) < c.WriteTimeout-c.WriteTimeout/4 {
		c.setWriteDeadline(c.WriteStartedAt.Add(c.WriteTimeout))
	}
}

// setWriteDeadline sets the write deadline, unless an operator has set the last one.
func (c *ClientWriter) setWriteDeadline(until time.Time) {
	if c.Cancellable != nil && c.Cancellable.IsCancelled() {
		return
	}
	c.Deadline = until
	_ = c.Conn.SetWriteDeadline(until)                       // it fails if the writer does not support deadlines
	if c.Cancellable != nil && c.Cancellable.IsCancelled() { // meanwhile
		_ = c.Conn.SetWriteDeadline(time.Now().Add(activity.CancelGrace))
	}
}

// DisconnectPhase returns the phase in which a failed write disconnected the client: usual, or not reading.
func (c *ClientWriter) DisconnectPhase(usual metrics.DisconnectPhase) metrics.DisconnectPhase {
	if !c.Deadline.IsZero() && !time.Now().Before(c.Deadline) {
		return metrics.DisconnectNotReading
	}
	return usual
}

// SetLingerReadDeadline makes reads from the client fail after clientconn.LingerTimeout.
func (c *ClientWriter) SetLingerReadDeadline() {
	_ = c.Conn.SetReadDeadline(time.Now().Add(clientconn.LingerTimeout))
}
