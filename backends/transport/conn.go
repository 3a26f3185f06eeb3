package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends/netio"
)

// conn is one connection to the replica. The pool hands it out unconnected the
// first time. Whoever acquired it owns it until release or discard; only abort
// may be called by others meanwhile.
type conn struct {
	net.Conn               // TCP or TLS; nil until connected
	raw      net.Conn      // the socket under it
	reader   *netio.Reader // of it; nil: Conn is read
	owner    *Transport    // that has it among its open ones; nil until connected

	// The pool's handle has a type that cannot be named, and is recycled by
	// discard: so these two closures hold it, made once per connection.
	release func() // back to the pool; the answer was read to its end
	discard func() // out of the pool, and closed

	abort  func() // closes the socket, from any goroutine, as often as you like
	reused bool   // carried a request before this one

	sys   syscall.RawConn
	quiet bool               // what probe found
	probe func(uintptr) bool // made once, so that a probe allocates nothing

	pair   [2][]byte   // backs vector
	vector net.Buffers // here because it would escape from anywhere else
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if c.reader != nil {
		return c.reader.Read(p)
	}
	return c.Conn.Read(p)
}

// Close closes the socket without TLS's farewell, which could wait 5 s on a full
// socket. HTTP frames its messages, so nobody misses it.
func (c *conn) Close() error {
	if c.raw == nil {
		return nil
	}
	if c.owner != nil {
		c.owner.open.remove(c)
	}
	return c.raw.Close()
}

// acquire returns a connected connection: with own a new one that never enters the
// pool, else an idle one, else a new one. An idle one that is no longer silent is
// dropped: the replica has closed it, or has sent bytes that nobody asked for and
// that would be taken for the answer.
func (t *Transport) acquire(ctx context.Context, own bool) (*conn, error) {
	if own {
		return t.dialOwn(ctx)
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
		if c.isQuiet() {
			c.reused = true
			return c, nil
		}
		c.discard()
	}
}

// dialOwn makes a connection beside the pool, for one request.
func (t *Transport) dialOwn(ctx context.Context) (*conn, error) {
	if t.maxConns > 0 && t.open.len() >= t.maxConns {
		return nil, &ConnectError{t.addr, fasthttp.ErrNoFreeConns}
	}
	c := new(conn)
	c.discard = func() { c.Close() }
	c.release = c.discard
	return t.connectOrDiscard(ctx, c)
}

func (t *Transport) connectOrDiscard(ctx context.Context, c *conn) (*conn, error) {
	if err := t.connect(ctx, c); err != nil {
		c.discard()
		// A dial watches the clock itself, and can be ahead of ctx's timer.
		if end, ok := ctx.Deadline(); ok && !time.Now().Before(end) {
			<-ctx.Done()
		}
		return nil, &ConnectError{t.addr, err}
	}
	return c, nil
}

// connect dials, and shakes hands for https. The name is looked up each time, and
// both address families are tried.
func (t *Transport) connect(ctx context.Context, c *conn) error {
	ctx, cancel := context.WithTimeout(ctx, t.connectTimeout)
	defer cancel()
	var err error
	if c.raw, err = t.dialer.DialContext(ctx, "tcp", t.addr); err != nil {
		return err
	}
	if err := t.open.add(c); err != nil {
		return err
	}
	c.owner = t
	c.Conn = c.raw
	if t.tls != nil {
		secured := tls.Client(c.raw, t.tls)
		if err := secured.HandshakeContext(ctx); err != nil {
			return err
		}
		c.Conn = secured
	} else {
		c.reader = netio.NewReader(c.raw)
	}
	c.abort = func() { c.raw.Close() }
	if s, ok := c.raw.(syscall.Conn); ok {
		c.sys, err = s.SyscallConn()
	}
	c.probe = func(fd uintptr) bool {
		c.quiet = silent(fd)
		return true
	}
	return err
}

// isQuiet reports whether an idle connection is open and has nothing to read.
func (c *conn) isQuiet() bool {
	if c.sys.Read(c.probe) != nil || !c.quiet {
		return false
	}
	if c.Conn == c.raw {
		return true
	}
	// TLS may hold the rest of a record. With a deadline in the past it returns
	// that, or fails without asking the socket.
	c.SetReadDeadline(time.Unix(1, 0))
	_, err := c.Read(make([]byte, 1))
	c.SetReadDeadline(time.Time{})
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// writeBoth writes head and then body, in one system call where the kernel takes
// both from where they lie.
func (c *conn) writeBoth(head, body []byte) error {
	c.pair = [2][]byte{head, body}
	c.vector = c.pair[:]
	_, err := c.vector.WriteTo(c.Conn)
	c.pair = [2][]byte{} // they are the caller's again
	return err
}
