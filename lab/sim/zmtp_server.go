package sim

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"warmroute/clock"
	"warmroute/kvevents/zmtp"
)

// maxPeers is the number of connections that a server has at most; it closes further ones at
// once.
const maxPeers = 1024

// acceptRetryDelay is the time until the next try when no connection could be accepted.
const acceptRetryDelay = 50 * time.Millisecond

// reconnectDelay is the time until a socket that connects tries again, as in ZeroMQ.
const reconnectDelay = 100 * time.Millisecond

// zmtpServer has the connections of one ZeroMQ socket. Its methods are safe for concurrent use.
type zmtpServer struct {
	socketType zmtp.SocketType
	handle     func(*zmtp.Conn)

	mu     sync.Mutex
	conns  map[net.Conn]bool
	closed bool
}

// newZMTPServer returns a server for a socket of type PUB or ROUTER. It calls handle in a goroutine
// of its own for each connection, and closes the connection when handle returns. The reads and
// writes of a connection fail when the server closes it.
func newZMTPServer(socketType zmtp.SocketType, handle func(*zmtp.Conn)) *zmtpServer {
	return &zmtpServer{socketType: socketType, handle: handle, conns: make(map[net.Conn]bool)}
}

// serve serves connections to l until ctx is done. Then it closes l and all connections, waits
// for what it started and returns.
func (s *zmtpServer) serve(ctx context.Context, l net.Listener) {
	var handlers sync.WaitGroup
	defer handlers.Wait()
	handlers.Go(func() {
		<-ctx.Done()
		l.Close()
		s.closeAll()
	})
	for ctx.Err() == nil {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as too many open files
			select {
			case <-time.After(acceptRetryDelay):
			case <-ctx.Done():
			}
			continue
		}
		if !s.add(conn) {
			conn.Close()
			continue
		}
		handlers.Go(func() {
			defer s.remove(conn)
			if c, err := zmtp.Handshake(conn, s.socketType); err == nil {
				s.handle(c)
			}
		})
	}
}

// serveDialed keeps a connection to an address, and serves it, until ctx is done. Then it closes the connection, waits for what it
// started and returns.
func (s *zmtpServer) serveDialed(ctx context.Context, address string) {
	defer context.AfterFunc(ctx, s.closeAll)()
	for ctx.Err() == nil {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil && s.add(conn) {
			if c, err := zmtp.Handshake(conn, s.socketType); err == nil {
				s.handle(c)
			}
			s.remove(conn)
		} else if err == nil {
			conn.Close()
		}
		clock.Sleep(ctx, reconnectDelay)
	}
}

// add registers a connection, unless there are too many or the server is closed.
func (s *zmtpServer) add(conn net.Conn) (added bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= maxPeers {
		return false
	}
	s.conns[conn] = true
	return true
}

// remove closes a connection.
func (s *zmtpServer) remove(conn net.Conn) {
	conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// resetAll resets all connections, as the kernel does for a process that was killed. The server
// goes on.
func (s *zmtpServer) resetAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.conns {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		conn.Close()
	}
}

// closeAll closes all connections and those that are accepted later.
func (s *zmtpServer) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for conn := range s.conns {
		conn.Close()
	}
}
