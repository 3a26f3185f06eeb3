package proxy

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"warmroute/backends/socket"
)

// LazyDeadlines makes the connections that l accepts cheap to set deadlines on.
// A server and the relay set many for each request, most of which are lifted or
// put off before anything waits, and each costs a lock and a timer of the runtime.
func LazyDeadlines(l net.Listener) net.Listener { return lazyListener{l} }

type lazyListener struct{ net.Listener }

func (l lazyListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &lazyConn{Conn: c, writer: socket.NewWriter(c)}, nil
}

// lazyConn leaves a deadline of its socket as it is when a later one is asked for.
// What waits is woken at the old one, sees that more time was given, and goes on.
type lazyConn struct {
	net.Conn
	read, write lazyDeadline
	writer      *socket.Writer
}

// lazyDeadline is one direction's.
type lazyDeadline struct {
	mu     sync.Mutex // guards what follows
	wanted time.Time  // zero: none
	armed  time.Time  // the socket's: never later than wanted; zero: none
}

// longAgo is before any deadline but those that are to end a read at once: a server
// ends the one by which it sees clients leave so, after each request.
const longAgo = 1e9 // seconds, 2001

// lease is for how long a read is armed that no deadline or a far one follows such
// an end: no longer than what is asked for next, which then costs nothing.
const lease = 5 * time.Second

// set asks for a deadline.
func (d *lazyDeadline) set(at time.Time, arm func(time.Time) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wanted = at
	if !d.armed.IsZero() && (at.IsZero() || !at.Before(d.armed)) {
		return nil
	}
	d.armed = at
	return arm(at)
}

// begin precedes a wait.
func (d *lazyDeadline) begin(arm func(time.Time) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.armed.IsZero() || d.armed.Unix() > longAgo || !d.wanted.IsZero() && d.wanted.Unix() <= longAgo {
		return
	}
	d.armed = time.Now().Add(lease)
	if !d.wanted.IsZero() && d.wanted.Before(d.armed) {
		d.armed = d.wanted
	}
	_ = arm(d.armed) // fails on a closed socket, as what follows will
}

// early reports whether a wait that ended with err has more time, and arms that.
func (d *lazyDeadline) early(err error, arm func(time.Time) error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.wanted.IsZero() && !time.Now().Before(d.wanted) {
		return false
	}
	d.armed = d.wanted
	return arm(d.armed) == nil
}

// Read implements net.Conn.
func (c *lazyConn) Read(p []byte) (n int, err error) {
	c.read.begin(c.Conn.SetReadDeadline)
	for {
		if n, err = c.Conn.Read(p); err == nil || n > 0 || !c.read.early(err, c.Conn.SetReadDeadline) {
			return n, err
		}
	}
}

// Write implements net.Conn.
func (c *lazyConn) Write(p []byte) (n int, err error) {
	if n = c.writer.Begin(p); n > 0 && n == len(p) {
		return n, nil
	}
	for {
		var m int
		m, err = c.Conn.Write(p[n:])
		if n += m; err == nil || !c.write.early(err, c.Conn.SetWriteDeadline) {
			return n, err
		}
	}
}

// SetReadDeadline implements net.Conn.
func (c *lazyConn) SetReadDeadline(at time.Time) error { return c.read.set(at, c.Conn.SetReadDeadline) }

// SetWriteDeadline implements net.Conn.
func (c *lazyConn) SetWriteDeadline(at time.Time) error {
	return c.write.set(at, c.Conn.SetWriteDeadline)
}

// SetDeadline implements net.Conn.
func (c *lazyConn) SetDeadline(at time.Time) error {
	return errors.Join(c.SetReadDeadline(at), c.SetWriteDeadline(at))
}

// CloseWrite is what a server ends a connection with on which more is to be read.
func (c *lazyConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}
