package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/netio"
)

var (
	// errMaxConns is the error of a request for which Options.MaxConns allows no connection.
	errMaxConns = errors.New("the limit of open connections is reached")

	errClosed = errors.New("transport is closed")
)

// connections are those to the replica for one purpose. Safe for concurrent use.
type connections struct {
	t       *Transport
	maxOpen int64        // 0: no limit
	open    atomic.Int64 // with those that are idle or being made

	// host keeps the idle ones, and closes each after Options.IdleTimeout. Its goroutine ends within that time after
	// the last connection. Since it dials without a context, it gets connections that acquire connects.
	host fasthttp.HostClient
}

// initConnections sets the fields of p. maxOpen is for 0 no limit.
func (t *Transport) initConnections(p *connections, maxOpen int) {
	p.t, p.maxOpen = t, int64(maxOpen)
	p.host.Addr = t.addr
	p.host.Dial = func(string) (net.Conn, error) { return p.newConn() }
	p.host.MaxConns = math.MaxInt           // newConn counts them
	p.host.ConnPoolStrategy = fasthttp.LIFO // the one used last is the least likely to be closed by the replica
	p.host.MaxIdleConnDuration = t.options.IdleTimeout
}

// newConn returns a connection that is to be connected. It fails at the limit, and once the transport is closed.
func (p *connections) newConn() (*conn, error) {
	if p.t.closed.Err() != nil {
		return nil, errClosed
	}
	for {
		n := p.open.Load()
		if p.maxOpen > 0 && n >= p.maxOpen {
			return nil, errMaxConns
		}
		if p.open.CompareAndSwap(n, n+1) {
			return &conn{of: p}, nil
		}
	}
}

// acquire returns a connected connection: a new one that does not become idle if dedicated, else an idle one, else a
// new one. Idle ones that are readable are closed: the replica has closed them, or sent bytes that would be taken for
// the response.
func (p *connections) acquire(ctx context.Context, dedicated bool) (*conn, error) {
	c, err := p.acquireIdleOrNew(dedicated)
	if err != nil {
		return nil, &ConnectError{p.t.addr, err}
	}
	if c.raw != nil {
		c.reused = true
		return c, nil
	}
	if err := c.connect(ctx); err != nil {
		c.discard()
		// The dialer's deadline can fire before ctx's timer.
		if end, ok := ctx.Deadline(); ok && !time.Now().Before(end) {
			<-ctx.Done()
		}
		return nil, &ConnectError{p.t.addr, err}
	}
	return c, nil
}

// acquireIdleOrNew returns an idle connection on which nothing is readable, else one that is to be connected.
func (p *connections) acquireIdleOrNew(dedicated bool) (*conn, error) {
	if dedicated {
		return p.newConn()
	}
	for {
		pooled, err := p.host.AcquireConn(0, false)
		if err != nil {
			return nil, err
		}
		c := pooled.Conn().(*conn)
		if c.raw == nil {
			c.makeIdle = func() { p.host.ReleaseConn(pooled) }
			c.remove = func() { p.host.CloseConn(pooled) }
			return c, nil
		}
		if c.probeIdle() {
			return c, nil
		}
		c.discard()
	}
}

// conn is one connection to the replica. The goroutine that acquired it owns it until release or discard; others may
// only call closeSocket.
type conn struct {
	net.Conn               // TCP or TLS
	raw      net.Conn      // the socket under it; nil until connected
	reader   *netio.Reader // of raw; nil: use Conn
	of       *connections

	makeIdle func() // gives it to the HostClient; nil: it is dedicated to one request
	remove   func() // has the HostClient close and forget it; nil: it is dedicated

	closeSocket func()      // closes the socket; any goroutine may call it, repeatedly
	stopClosing func() bool // the transport no longer closes the socket
	reused      bool        // carried a request before this one

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

// Close implements net.Conn for the HostClient: others call discard. It closes the socket without TLS's close_notify,
// which could wait 5 s on a full socket and which HTTP's framing does not need.
func (c *conn) Close() error {
	c.of.open.Add(-1)
	if c.raw == nil {
		return nil
	}
	c.stopClosing()
	return c.raw.Close()
}

// discard closes the connection.
func (c *conn) discard() {
	if c.remove == nil {
		c.Close()
		return
	}
	c.remove()
}

// release keeps the connection for another request, after a complete response.
func (c *conn) release() {
	if c.makeIdle == nil {
		c.Close()
		return
	}
	c.makeIdle()
	if c.of.t.closed.Err() != nil {
		c.of.host.CloseIdleConnections()
	}
}

// connect dials, including the TLS handshake. It looks the name up each time and tries both address families.
func (c *conn) connect(ctx context.Context) error {
	t := c.of.t
	ctx, cancel := context.WithTimeout(ctx, t.options.ConnectTimeout)
	defer cancel()
	socket, err := t.dialer.DialContext(ctx, "tcp", t.addr)
	if err != nil {
		return err
	}
	c.Conn, c.raw = socket, socket
	c.closeSocket = func() { socket.Close() }
	c.stopClosing = context.AfterFunc(t.closed, c.closeSocket)
	if t.closed.Err() != nil {
		return errClosed
	}
	if t.tls != nil {
		tlsConn := tls.Client(socket, t.tls)
		if err := tlsConn.HandshakeContext(ctx); err != nil {
			return err
		}
		c.Conn = tlsConn
	} else {
		c.reader = netio.NewReader(socket)
	}
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
