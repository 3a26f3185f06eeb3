package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	"warmroute/backends/netio"
)

// conn is one connection to the replica. The goroutine that acquired it owns it until release or Close; others may
// only call abort.
type conn struct {
	net.Conn               // TCP or TLS
	raw      net.Conn      // the socket under it; nil until connected
	reader   *netio.Reader // of raw; nil: use Conn
	pool     *pool         // that it was added to

	abort     func()    // closes the socket; any goroutine may call it, repeatedly
	reused    bool      // carried a request before this one
	dedicated bool      // to one request
	idleSince time.Time // set by the pool

	sys        syscall.RawConn
	probedIdle bool               // result of probe
	probe      func(uintptr) bool // created once, to avoid allocations

	pair   [2][]byte   // backs vector
	vector net.Buffers // a field, since a variable would escape
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if c.reader != nil {
		return c.reader.Read(p)
	}
	return c.Conn.Read(p)
}

// Close closes the socket without TLS's close_notify, which could wait 5 s on a full
// socket and which HTTP's framing does not need.
func (c *conn) Close() error {
	c.pool.remove(c)
	if c.raw == nil {
		return nil
	}
	return c.raw.Close()
}

// release returns the connection to the pool, after a complete response.
func (c *conn) release() {
	if c.dedicated || !c.pool.putIdle(c) {
		c.Close()
	}
}

// acquireConn returns a connected connection: a new one that does not return to the pool if dedicated,
// else an idle one, else a new one. Idle ones that are readable are closed: the
// replica has closed them, or sent bytes that would be taken for the response.
func (t *Transport) acquireConn(ctx context.Context, dedicated bool) (*conn, error) {
	if !dedicated {
		for c := t.pool.takeIdle(); c != nil; c = t.pool.takeIdle() {
			if c.probeIdle() {
				c.reused = true
				return c, nil
			}
			c.Close()
		}
	}
	c := &conn{pool: &t.pool, dedicated: dedicated}
	if err := t.connect(ctx, c); err != nil {
		c.Close()
		// The dialer's deadline can fire before ctx's timer.
		if end, ok := ctx.Deadline(); ok && !time.Now().Before(end) {
			<-ctx.Done()
		}
		return nil, &ConnectError{t.addr, err}
	}
	return c, nil
}

// connect adds c to the pool and dials, including the TLS handshake. It looks the name up each time and tries
// both address families.
func (t *Transport) connect(ctx context.Context, c *conn) error {
	if err := t.pool.add(c); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, t.options.ConnectTimeout)
	defer cancel()
	socket, err := t.dialer.DialContext(ctx, "tcp", t.addr)
	if err != nil {
		return err
	}
	if err := t.pool.setSocket(c, socket); err != nil {
		return err
	}
	c.Conn = socket
	if t.tls != nil {
		tlsConn := tls.Client(socket, t.tls)
		if err := tlsConn.HandshakeContext(ctx); err != nil {
			return err
		}
		c.Conn = tlsConn
	} else {
		c.reader = netio.NewReader(socket)
	}
	c.abort = func() { socket.Close() }
	if s, ok := socket.(syscall.Conn); ok {
		c.sys, err = s.SyscallConn()
	}
	c.probe = func(fd uintptr) bool {
		c.probedIdle = probeIdleSocket(fd)
		return true
	}
	return err
}

// probeIdle reports whether an idle connection is open and has nothing to read. It does
// not block. If it consumes a byte, it returns false and the connection is unusable.
func (c *conn) probeIdle() (idle bool) {
	if c.sys.Read(c.probe) != nil || !c.probedIdle {
		return false
	}
	if c.Conn == c.raw {
		return true
	}
	// TLS may have buffered the rest of a record, which it returns also with a deadline
	// in the past.
	c.SetReadDeadline(time.Unix(1, 0))
	_, err := c.Read(make([]byte, 1))
	c.SetReadDeadline(time.Time{})
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// writeHeadAndBody writes head and body, in one system call and without a copy if possible.
func (c *conn) writeHeadAndBody(head, body []byte) error {
	c.pair = [2][]byte{head, body}
	c.vector = c.pair[:]
	_, err := c.vector.WriteTo(c.Conn)
	c.pair = [2][]byte{} // do not keep the caller's memory
	return err
}
