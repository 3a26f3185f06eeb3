package zmtp

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

// maxConns is the number of connections that a server has at most; it closes further ones at
// once.
const maxConns = 1024

// acceptDelay is the time until the next try when no connection could be accepted.
const acceptDelay = 50 * time.Millisecond

// Server accepts connections to one socket. Its methods are safe for concurrent use.
type Server struct {
	socketType string
	handle     func(*Conn)

	mu     sync.Mutex
	conns  map[net.Conn]bool
	closed bool
}

// NewServer returns a server for a socket of type PUB or ROUTER. It calls handle in a goroutine
// of its own for each connection, and closes the connection when handle returns. The reads and
// writes of a connection fail when the server closes it.
func NewServer(socketType string, handle func(*Conn)) *Server {
	if peersOf[socketType] == nil {
		panic("zmtp: unknown socket type " + socketType)
	}
	return &Server{socketType: socketType, handle: handle, conns: make(map[net.Conn]bool)}
}

// Serve serves connections to l until ctx is done. Then it closes l and all connections, waits
// for what it started and returns.
func (s *Server) Serve(ctx context.Context, l net.Listener) {
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
			case <-time.After(acceptDelay):
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
			if c, err := newConn(conn, s.socketType); err == nil {
				s.handle(c)
			}
		})
	}
}

// add registers a connection, unless there are too many or the server is closed.
func (s *Server) add(conn net.Conn) (added bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= maxConns {
		return false
	}
	s.conns[conn] = true
	return true
}

// remove closes a connection.
func (s *Server) remove(conn net.Conn) {
	conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// ResetAll resets all connections, as the kernel does for a process that was killed. The server
// goes on.
func (s *Server) ResetAll() {
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
func (s *Server) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for conn := range s.conns {
		conn.Close()
	}
}
