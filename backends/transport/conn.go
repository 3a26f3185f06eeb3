package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/netio"
)

// conn is one connection to the replica. The pool returns it unconnected the first time. The
// goroutine that acquired it owns it until release or discard; others may only call abort.
type conn struct {
	net.Conn               // TCP or TLS; nil until connected
	raw      net.Conn      // the socket under it
	reader   *netio.Reader // of raw; nil: use Conn
	owner    *Transport    // has c in its conns; nil until connected

	// The pool's handle has an unexported type and is recycled by discard, so these
	// closures hold it.
	release func() // returns it to the pool after a complete response
	discard func() // removes it from the pool and closes it

	abort  func() // closes the socket; any goroutine may call it, repeatedly
	reused bool   // carried a request before this one

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
	if c.raw == nil {
		return nil
	}
	if c.owner != nil {
		c.owner.conns.remove(c)
	}
	return c.raw.Close()
}

// acquireConn returns a connected connection: a new one outside the pool if dedicated,
// else an idle one, else a new one. Idle ones that are readable are discarded: the
// replica has closed them, or sent bytes that would be taken for the response.
func (t *Transport) acquireConn(ctx context.Context, dedicated bool) (*conn, error) {
	if dedicated {
		return t.dialDedicated(ctx)
	}
	for {
		handle, err := t.pool.AcquireConn(0, false)
		if err != nil {
			return nil, &ConnectError{t.addr, err}
		}
		c := handle.Conn().(*conn)
		if c.Conn == nil {
			c.release = func() { t.pool.ReleaseConn(handle) }
			c.discard = func() { t.pool.CloseConn(handle) }
			return t.connectOrDiscard(ctx, c)
		}
		if c.probeIdle() {
			c.reused = true
			return c, nil
		}
		c.discard()
	}
}

// dialDedicated returns a connection outside the pool, for one request.
func (t *Transport) dialDedicated(ctx context.Context) (*conn, error) {
	if t.options.MaxConns > 0 && t.conns.len() >= t.options.MaxConns {
		return nil, &ConnectError{t.addr, fasthttp.ErrNoFreeConns}
	}
	c := new(conn)
	c.discard = func() { c.Close() }
	c.release = c.discard
	return t.connectOrDiscard(ctx, c)
}

// connectOrDiscard connects c, or discards it and returns a ConnectError. If ctx's
// deadline is the reason, ctx is done when it returns.
func (t *Transport) connectOrDiscard(ctx context.Context, c *conn) (*conn, error) {
	if err := t.connect(ctx, c); err != nil {
		c.discard()
		// The dialer's deadline can fire before ctx's timer.
		if end, ok := ctx.Deadline(); ok && !time.Now().Before(end) {
			<-ctx.Done()
		}
		return nil, &ConnectError{t.addr, err}
	}
	return c, nil
}

// connect dials, including the TLS handshake. It looks the name up each time and tries
// both address families.
func (t *Transport) connect(ctx context.Context, c *conn) error {
	ctx, cancel := context.WithTimeout(ctx, t.options.ConnectTimeout)
	defer cancel()
	var err error
	if c.raw, err = t.dialer.DialContext(ctx, "tcp", t.addr); err != nil {
		return err
	}
	if err := t.conns.add(c); err != nil {
		return err
	}
	c.owner = t
	c.Conn = c.raw
	if t.tls != nil {
		tlsConn := tls.Client(c.raw, t.tls)
		if err := tlsConn.HandshakeContext(ctx); err != nil {
			return err
		}
		c.Conn = tlsConn
	} else {
		c.reader = netio.NewReader(c.raw)
	}
	c.abort = func() { c.raw.Close() }
	if s, ok := c.raw.(syscall.Conn); ok {
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

var errClosed = errors.New("transport is closed")

// connSet is the set of a Transport's connections, so that those in use can be closed
// too: the pool has only the idle ones.
type connSet struct {
	mu     sync.Mutex
	conns  map[*conn]struct{}
	closed bool
}

// add fails once the set is closed.
func (s *connSet) add(c *conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if s.conns == nil {
		s.conns = map[*conn]struct{}{}
	}
	s.conns[c] = struct{}{}
	return nil
}

func (s *connSet) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// close closes the sockets and lets no conn be added. The owner of each conn removes it.
func (s *connSet) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.conns {
		c.raw.Close()
	}
}

func (s *connSet) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}
