// Package http1 serves clients that speak HTTP/1 in the clear.
//
// Requests are parsed by net/http (ReadRequest), which also tells where a body
// ends. The rest is ours, since net/http's own server costs as much as all else that
// is done for a small request: it starts a goroutine for each to see its client
// leave, copies and sorts the header of each answer, and writes it through three
// buffers. What speaks TLS, and with it HTTP/2, is net/http's.
package http1

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Server is like an http.Server whose Handler neither hijacks connections nor sends
// interim answers or trailers, and keeps neither ResponseWriter nor its Header once
// it has returned: they are the next request's. Its ResponseWriters have what
// http.ResponseController looks for, but for full duplex, and guess no Content-Type.
// All fields are set before Serve.
type Server struct {
	Handler http.Handler

	ReadHeaderTimeout time.Duration // from a header's first byte to its last, and from a connection's beginning; 0: no limit
	IdleTimeout       time.Duration // between two requests; 0: no limit
	MaxHeaderBytes    int           // of the request line and header together, or up to 4 KiB more

	Context   context.Context                // of requests; its end is theirs
	ConnState func(net.Conn, http.ConnState) // as http.Server's
	Log       *slog.Logger                   // of panics, and of what Accept fails with

	readers sync.Pool // of *bufio.Reader: for headers, and what comes of bodies with them
	buffers sync.Pool // of *[]byte: for answers on their way
	watched sync.Once // for the end of Context

	mu        sync.Mutex // guards what follows
	listeners map[net.Listener]struct{}
	conns     map[*conn]struct{}
	empty     chan struct{} // closed when ending and no connection is left; nil: nobody waits

	ending atomic.Bool // no further requests are waited for; set under mu
}

// After Accept failed for want of something there is a pause, twice as long each time.
const (
	quickestRetry = 5 * time.Millisecond
	slowestRetry  = time.Second
)

// passes reports whether Accept may succeed after it has failed with err.
func passes(err error) bool {
	for _, want := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED} {
		if errors.Is(err, want) {
			return true
		}
	}
	return false
}

// Serve answers what comes in on l until Shutdown or Close, and then returns
// http.ErrServerClosed at once.
func (s *Server) Serve(l net.Listener) error {
	if !s.listen(l) {
		l.Close()
		return http.ErrServerClosed
	}
	defer s.stopListening(l)
	s.watched.Do(func() { context.AfterFunc(s.Context, s.endRequests) }) // also after Serve has returned
	var pause time.Duration
	var warned time.Time
	for {
		socket, err := l.Accept()
		if err != nil {
			switch {
			case s.ending.Load():
				return http.ErrServerClosed
			case !passes(err):
				return err
			}
			if time.Since(warned) >= slowestRetry {
				s.Log.Warn("no connection can be accepted", "error", err)
				warned = time.Now()
			}
			pause = min(max(2*pause, quickestRetry), slowestRetry)
			time.Sleep(pause)
			continue
		}
		pause = 0
		c := newConn(s, socket)
		s.tell(c, http.StateNew)
		if !s.enter(c) {
			c.close()
			s.tell(c, http.StateClosed)
			continue
		}
		go c.serve()
	}
}

func (s *Server) tell(c *conn, state http.ConnState) {
	if s.ConnState != nil {
		s.ConnState(c.Conn, state)
	}
}

func (s *Server) listen(l net.Listener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending.Load() {
		return false
	}
	if s.listeners == nil {
		s.listeners, s.conns = map[net.Listener]struct{}{}, map[*conn]struct{}{}
	}
	s.listeners[l] = struct{}{}
	return true
}

func (s *Server) stopListening(l net.Listener) {
	l.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, l)
}

// enter puts a connection among those that are open, unless the server ends.
func (s *Server) enter(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending.Load() {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if len(s.conns) == 0 && s.empty != nil {
		close(s.empty)
		s.empty = nil
	}
}

// end closes the listeners and calls f with each connection that is open.
func (s *Server) end(f func(*conn)) (empty <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending.Store(true)
	for l := range s.listeners {
		l.Close()
	}
	for c := range s.conns {
		f(c)
	}
	switch {
	case len(s.conns) == 0:
		done := make(chan struct{})
		close(done)
		return done
	case s.empty == nil:
		s.empty = make(chan struct{})
	}
	return s.empty
}

// Shutdown closes the listeners and the connections that carry no request, and
// waits for the others to end theirs. When ctx ends before, its error is returned.
// A connection on which nothing has come yet has a moment to say what it wants.
func (s *Server) Shutdown(ctx context.Context) error {
	select {
	case <-s.end((*conn).finish):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close closes the listeners and all connections. Handlers see their clients leave.
func (s *Server) Close() error {
	s.end((*conn).close)
	return nil
}

// endRequests ends the requests that are served when the server's context ends.
func (s *Server) endRequests() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.cut(context.Cause(s.Context))
	}
}
