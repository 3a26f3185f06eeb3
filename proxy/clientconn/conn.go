// Package clientconn is the connections of clients: they notice a disconnect in any state, refuse headers with too many lines
// as they come, and are bounded in number.
package clientconn

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"

	"warmroute/backends/netio"
)

// NewListener returns a listener whose connections have faster writes, on which the server notices a disconnect also when
// the client has sent more than its request, and which refuses headers of more than MaxHeaderLines as they come. It is for
// clear-text HTTP/1; below TLS, clearText is false.
func NewListener(l net.Listener, clearText bool) net.Listener {
	return listener{l, clearText}
}

type listener struct {
	net.Listener
	clearText bool
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	conn := &clientConn{Conn: c, writer: netio.NewWriter(c), clearText: l.clearText}
	if s, ok := c.(syscall.Conn); ok {
		conn.raw, _ = s.SyscallConn() // fails on a closed socket, as reads will
	}
	return conn, nil
}

// clientConn is a client's connection. One goroutine reads at a time, as for any net.Conn that net/http serves.
type clientConn struct {
	net.Conn
	writer *netio.Writer
	raw    syscall.RawConn // nil: the connection has no socket

	clearText bool
	header    headerLineCounter // of the request that is not served yet
	active    atomic.Bool       // a request is being served
}

// SetActive notes whether a request is being served on a connection of a Listener. The server's ConnState has to call
// it for each state of each connection.
func SetActive(conn net.Conn, state http.ConnState) {
	if client, ok := unwrapTLS(conn).(*clientConn); ok {
		if state == http.StateActive {
			client.header = headerLineCounter{}
		}
		client.active.Store(state == http.StateActive)
	}
}

// Read implements net.Conn.
//
// While a handler runs, net/http reads a single byte to notice a disconnect, and stops looking when there is one: a line end
// after a body, or the next request. So that read leaves the byte alone and goes on until the client disconnects or the server
// ends it by a deadline, as it does after each request. Other reads of a single byte end the header of a request, before it is
// active; only the trailer of a chunked body that fills net/http's buffer is read so as well, and meets the body's deadline.
//
// active changes while no such read runs: net/http reports StateActive before it starts one, and StateIdle after its end.
func (c *clientConn) Read(p []byte) (int, error) {
	if len(p) == 1 && canAwaitHangup && c.raw != nil && c.active.Load() {
		return 0, readUntilHangup(c.raw)
	}
	n, err := c.Conn.Read(p)
	if c.clearText && !c.active.Load() && !c.header.add(p[:n]) {
		c.refuseHeader()
		return 0, io.EOF
	}
	return n, err
}

// Write implements net.Conn.
func (c *clientConn) Write(p []byte) (int, error) {
	n := c.writer.TryWrite(p)
	if n > 0 && n == len(p) {
		return n, nil
	}
	m, err := c.Conn.Write(p[n:])
	return n + m, err
}

// CloseWrite closes the writing side: the server does so when more of the request may come after the response.
func (c *clientConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}
