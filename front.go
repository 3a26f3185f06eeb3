package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/proxy"
)

// clientIdle is how long a client's connection may lie idle. Longer than any
// common client keeps one, so that it is the client that closes.
const clientIdle = 5 * time.Minute

// front is the listeners with their servers.
type front struct {
	public   *door                   // nil until it is served
	doors    []*door                 // all that are served
	failed   chan error              // serving a listener ended by itself
	requests context.Context         // parent of all requests' contexts
	cut      context.CancelCauseFunc // ends requests
	leaving  atomic.Bool             // clients are told to close their connections
	serving  sync.WaitGroup

	acceptFailed func(error) // takes errors after which a listener goes on
}

// door is one listener.
type door struct {
	name     string // as socket activation has it
	listener net.Listener
	server   server
	ended    chan struct{} // closed when no more connections are accepted
}

// server answers what comes in by a door.
type server interface {
	Serve(net.Listener) error
	Shutdown(context.Context) error
	Close() error
}

// secured is a server that speaks TLS alone.
type secured struct{ *http.Server }

func (s secured) Serve(l net.Listener) error { return s.ServeTLS(l, "", "") }

// newFront returns a front that serves no listener yet.
func (s *service) newFront() *front {
	f := &front{failed: make(chan error, 2), acceptFailed: s.resources.acceptFailed}
	f.requests, f.cut = context.WithCancelCause(context.Background())
	return f
}

// servePublic serves clients until close.
func (s *service) servePublic(f *front, l net.Listener) {
	f.public = f.serve("public", l, s.publicServer(f.closing(s.logPanics(s.proxy)), f.requests))
}

// serveAdmin serves operators until close.
func (s *service) serveAdmin(f *front, l net.Listener) {
	f.serve("admin", l, s.adminServer(f.closing(s.logPanics(s.admin)), f.requests))
}

func (f *front) serve(name string, l net.Listener, s server) *door {
	d := &door{name, l, s, make(chan struct{})}
	f.doors = append(f.doors, d)
	f.serving.Go(func() {
		defer close(d.ended)
		listener := retryingListener{proxy.NewClientListener(l), f.acceptFailed}
		if err := s.Serve(listener); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			f.failed <- err
		}
	})
	return d
}

// closing closes connections after a response: all of them once leaving is set, by the
// header itself in HTTP/1 and by the GOAWAY that net/http sends for it in HTTP/2; and
// at any time those whose request may end elsewhere for a proxy in front of this one
// than it does here. net/http ignores Transfer-Encoding in HTTP/1.0, and Content-Length
// beside it in HTTP/1.1.
func (f *front) closing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.leaving.Load() || !r.ProtoAtLeast(1, 1) || len(r.TransferEncoding) > 0 {
			w.Header()["Connection"] = []string{"close"}
		}
		next.ServeHTTP(w, r)
	})
}

// logPanics logs a panic of next as an error: net/http's own message goes to the
// debug level, with what clients cause. The connection is closed either way.
func (s *service) logPanics(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			fault := recover()
			if fault == nil {
				return
			}
			if fault != http.ErrAbortHandler {
				s.log.Error("handler panicked", "panic", fault, "stack", string(debug.Stack()))
			}
			panic(http.ErrAbortHandler)
		}()
		next.ServeHTTP(w, r)
	})
}

// stopListening leaves the listeners to the process that shares them. Connections
// that were accepted are served on.
func (f *front) stopListening() {
	f.leaving.Store(true)
	for _, d := range f.doors {
		d.stopListening()
	}
}

// stopListening closes the listener and returns when each connection that was
// accepted is known to the server, which serves them on.
func (d *door) stopListening() {
	d.listener.Close()
	<-d.ended
}

// acceptTime is how long connections that are being opened have to be accepted
// before the listener closes: above a round trip to the client.
const acceptTime = 200 * time.Millisecond

// refuseConnections is stopListening for a listener that no other process has: the
// kernel resets connections that were opened and not accepted when it closes, and
// their clients may have sent requests. So new connections are ignored for a moment
// first. Their clients ask again after a second, and are refused.
func (d *door) refuseConnections() {
	if ignoreConnections(d.listener) == nil {
		time.Sleep(acceptTime)
	}
	d.stopListening()
}

// close cuts off what is left and waits for the listeners to be closed.
func (f *front) close() {
	f.cut(nil)
	for _, d := range f.doors {
		d.server.Close()
	}
	f.serving.Wait()
}

// publicServer returns the server for clients: over TLS if a certificate is configured.
func (s *service) publicServer(h http.Handler, requests context.Context) server {
	server := s.server(h, requests)
	server.ConnState = s.proxy.TrackConnection
	if s.certificate.Load() == nil {
		return server
	}
	server.TLSConfig = serverTLS(&s.certificate)
	return secured{server}
}

// adminServer returns the server for operators: over TLS if a certificate is
// configured for it, and over HTTP/1 alone, so that bounding the connections bounds
// the requests.
func (s *service) adminServer(h http.Handler, requests context.Context) server {
	server := s.server(h, requests)
	server.RegisterOnShutdown(s.admin.EndEvents)
	server.ConnState = func(conn net.Conn, state http.ConnState) {
		proxy.RecordConnState(conn, state)
		s.admin.ConnState(conn, state)
	}
	server.ConnContext = s.admin.ConnContext
	server.Protocols = new(http.Protocols)
	server.Protocols.SetHTTP1(true)
	if s.adminCertificate.Load() == nil {
		return server
	}
	server.TLSConfig = serverTLS(&s.adminCertificate)
	return secured{server}
}

// server serves requests whose contexts end with the given one.
func (s *service) server(h http.Handler, requests context.Context) *http.Server {
	return &http.Server{
		Handler: h,
		// Else net/http itself answers "OPTIONS *", which is on no allowlist.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            s.config.Timeouts.ReadHeader,
		IdleTimeout:                  clientIdle,
		MaxHeaderBytes:               int(s.config.Limits.HeaderBytes),
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		BaseContext:                  func(net.Listener) context.Context { return requests },
		// Answers have deadlines of their own; this is for a connection that takes not even their ends. net/http
		// reads it with each connection, unguarded, so a reload cannot change it.
		HTTP2: &http.HTTP2Config{WriteByteTimeout: s.config.Timeouts.WriteIdle},
	}
}
