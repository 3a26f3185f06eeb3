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
	"syscall"
	"time"

	"warmroute/config"
	"warmroute/proxy"
)

// clientIdle is how long a client's connection may lie idle. Longer than any
// common client keeps one, so that it is the client that closes.
const clientIdle = 5 * time.Minute

// listeners are the listeners that are served, with their HTTP servers.
type listeners struct {
	public   *listener // nil until it is served
	all      []*listener
	failed   chan error              // serving a listener failed
	requests context.Context         // parent of all requests' contexts
	cancel   context.CancelCauseFunc // ends requests
	closing  atomic.Bool             // responses tell clients to close their connections
	serving  sync.WaitGroup

	acceptFailed func(error) // called with errors after which a listener goes on
}

// listener is one of them.
type listener struct {
	name   string // as in socket activation
	socket net.Listener
	server httpServer
	ended  chan struct{} // closed when no more connections are accepted
}

// httpServer is an http.Server or a tlsServer.
type httpServer interface {
	Serve(net.Listener) error
	Shutdown(context.Context) error
	Close() error
}

// tlsServer is an http.Server that speaks TLS alone.
type tlsServer struct{ *http.Server }

func (s tlsServer) Serve(l net.Listener) error { return s.ServeTLS(l, "", "") }

// newListeners returns the listeners before any is served.
func (s *service) newListeners() *listeners {
	f := &listeners{failed: make(chan error, 2), acceptFailed: s.resources.acceptFailed}
	f.requests, f.cancel = context.WithCancelCause(context.Background())
	return f
}

// servePublic serves clients until close.
func (s *service) servePublic(f *listeners, l net.Listener) {
	f.public = f.serve("public", l, s.publicServer(f.closeConnections(s.logPanics(s.proxy)), f.requests))
}

// serveAdmin serves operators until close.
func (s *service) serveAdmin(f *listeners, l net.Listener) {
	f.serve("admin", l, s.adminServer(f.closeConnections(s.logPanics(s.admin)), f.requests))
}

func (f *listeners) serve(name string, l net.Listener, s httpServer) *listener {
	d := &listener{name, l, s, make(chan struct{})}
	f.all = append(f.all, d)
	f.serving.Go(func() {
		defer close(d.ended)
		listener := retryingListener{proxy.NewClientListener(l), f.acceptFailed}
		if err := s.Serve(listener); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			f.failed <- err
		}
	})
	return d
}

// closeConnections closes connections after a response: all of them once closing is set, by the
// header itself in HTTP/1 and by the GOAWAY that net/http sends for it in HTTP/2; and
// at any time those whose request may end elsewhere for a proxy in front of this one
// than it does here. net/http ignores Transfer-Encoding in HTTP/1.0, and Content-Length
// beside it in HTTP/1.1.
func (f *listeners) closeConnections(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.closing.Load() || !r.ProtoAtLeast(1, 1) || len(r.TransferEncoding) > 0 {
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
			cause := recover()
			if cause == nil {
				return
			}
			if cause != http.ErrAbortHandler {
				s.log.Error("handler panicked", "panic", cause, "stack", string(debug.Stack()))
			}
			panic(http.ErrAbortHandler)
		}()
		next.ServeHTTP(w, r)
	})
}

// stopListening leaves the listeners to the process that shares them. Connections
// that were accepted are served on.
func (f *listeners) stopListening() {
	f.closing.Store(true)
	for _, d := range f.all {
		d.stopListening()
	}
}

// stopListening closes the listener and returns when each connection that was
// accepted is known to the server, which serves them on.
func (d *listener) stopListening() {
	d.socket.Close()
	<-d.ended
}

// acceptGrace is how long connections that are being opened have to be accepted
// before the listener closes: above a round trip to the client.
const acceptGrace = 200 * time.Millisecond

// refuseConnections is stopListening for a listener that no other process has: the
// kernel resets connections that were opened and not accepted when it closes, and
// their clients may have sent requests. So new connections are ignored for a moment
// first. Their clients ask again after a second, and are refused.
func (d *listener) refuseConnections() {
	if ignoreConnections(d.socket) == nil {
		time.Sleep(acceptGrace)
	}
	d.stopListening()
}

// close cuts off what is left and waits for the listeners to be closed.
func (f *listeners) close() {
	f.cancel(nil)
	for _, d := range f.all {
		d.server.Close()
	}
	f.serving.Wait()
}

// publicServer returns the server for clients: over TLS if a certificate is configured.
func (s *service) publicServer(h http.Handler, requests context.Context) httpServer {
	server := s.server(h, requests)
	server.ConnState = s.proxy.TrackConnection
	if s.certificate.Load() == nil {
		return server
	}
	server.TLSConfig = serverTLS(&s.certificate)
	return tlsServer{server}
}

// adminServer returns the server for operators: over TLS if a certificate is
// configured for it, and over HTTP/1 alone, so that bounding the connections bounds
// the requests.
func (s *service) adminServer(h http.Handler, requests context.Context) httpServer {
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
	return tlsServer{server}
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

// listenTCP listens without Multipath TCP, which is Go's default and whose sockets
// take no filter (ignoreConnections).
func listenTCP(address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), "tcp", address)
}

// listen opens the listeners that were not inherited, so that a port that is
// taken is an error before anything runs. admin is nil when the configuration
// has none.
func (in *inherited) listen(c *config.Config) (public, admin net.Listener, err error) {
	in.closeReplaced(c)
	if public = in.public; public == nil {
		if public, err = listenTCP(c.Listen); err != nil {
			return nil, nil, cannotListen("listen", c.Listen, err)
		}
	}
	switch admin = in.admin; {
	case c.Admin == "" && admin != nil:
		admin.Close()
		return public, nil, nil
	case c.Admin == "" || admin != nil:
		return public, admin, nil
	}
	if admin, err = listenTCP(c.Admin); err != nil {
		public.Close()
		return nil, nil, cannotListen("admin", c.Admin, err)
	}
	return public, admin, nil
}

// controlSocket calls f with the descriptor of l.
func controlSocket(l net.Listener, f func(fd int) error) error {
	conn, ok := l.(syscall.Conn)
	if !ok {
		return errors.ErrUnsupported
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}
