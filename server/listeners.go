package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/proxy/clientconn"
	"warmroute/recovery"
)

const (
	// idleTimeout bounds how long a client's connection may be idle. It is longer than any
	// common client keeps one, so that it is the client that closes.
	idleTimeout = 5 * time.Minute
	// acceptGrace is how long connections that are being opened have to be accepted
	// before the listener closes: above a round trip to the client.
	acceptGrace = 200 * time.Millisecond
)

// listeners are the open listeners with their HTTP servers.
type listeners struct {
	public   *listener
	admin    *listener               // nil: there is none
	kvEvents []net.Listener          // for replicas that connect to publish KV events; by data-parallel rank
	failed   chan error              // serving a listener failed
	requests context.Context         // parent of all requests' contexts
	cancel   context.CancelCauseFunc // ends requests
	closing  atomic.Bool             // responses tell clients to close their connections
	serving  sync.WaitGroup

	reserve descriptorReserve // for operators
}

type listener struct {
	name        string // as in socket activation
	socket      net.Listener
	certificate atomic.Pointer[tls.Certificate] // for new connections; nil: no TLS
	server      *http.Server                    // nil: not served yet
	ended       chan struct{}                   // closed when no more connections are accepted
}

func (s *Server) openListeners() (*listeners, error) {
	public, admin, err := s.process.inherited.listen(s.config)
	if err != nil {
		return nil, err
	}
	kvEvents, err := s.process.inherited.listenForKVEvents(s.config)
	if err != nil {
		public.Close()
		if admin != nil {
			admin.Close()
		}
		return nil, err
	}
	l := &listeners{public: newListener("public", public, s.config.TLS), kvEvents: kvEvents, failed: make(chan error, 2)}
	if admin != nil {
		l.admin = newListener("admin", admin, s.config.AdminTLS)
		l.reserve.refill()
	}
	l.requests, l.cancel = context.WithCancelCause(context.Background())
	return l, nil
}

func newListener(name string, socket net.Listener, t config.ListenerTLS) *listener {
	l := &listener{name: name, socket: socket, ended: make(chan struct{})}
	l.certificate.Store(t.Certificate)
	return l
}

func (l *listeners) all() []*listener {
	if l.admin == nil {
		return []*listener{l.public}
	}
	return []*listener{l.public, l.admin}
}

func (s *Server) startServingPublic() {
	server := s.newHTTPServer(s.registration)
	server.ConnState = s.proxy.TrackAndLimitConnections
	s.listeners.startServing(s.listeners.public, server, acceptErrors{s.resources.logAcceptError, s.proxy.EvictIdleConnection})
}

// startServingAdmin starts to serve operators, until the listeners close, over HTTP/1 alone, so that
// bounding the connections bounds the requests.
func (s *Server) startServingAdmin() {
	if s.listeners.admin == nil {
		return
	}
	server := s.newHTTPServer(s.admin)
	server.RegisterOnShutdown(s.admin.EndEventStreams)
	server.ConnState = func(conn net.Conn, state http.ConnState) {
		clientconn.SetActive(conn, state)
		s.admin.ConnState(conn, state)
		s.listeners.reserve.refill() // what was released may have become another connection's
	}
	server.ConnContext = s.admin.ConnContext
	server.Protocols = new(http.Protocols)
	server.Protocols.SetHTTP1(true)
	freeDescriptor := func() bool { return s.proxy.EvictIdleConnection() || s.listeners.reserve.release() }
	s.listeners.startServing(s.listeners.admin, server, acceptErrors{s.resources.logAcceptError, freeDescriptor})
}

func (s *Server) newHTTPServer(h http.Handler) *http.Server {
	requests := s.listeners.requests
	return &http.Server{
		Handler: s.listeners.setConnectionClose(s.reportPanics(h)),
		// Else net/http itself responds to "OPTIONS *", which is on no allowlist.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            s.config.Timeouts.ReadHeader,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               int(s.config.Limits.HeaderBytes),
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		BaseContext:                  func(net.Listener) context.Context { return requests },
		// Responses have deadlines of their own; this is for a connection that does not even accept the end of
		// one. net/http reads it with each connection, unguarded, so a reload cannot change it.
		HTTP2: &http.HTTP2Config{WriteByteTimeout: s.config.Timeouts.WriteIdle},
	}
}

// setConnectionClose has connections closed after a response: all of them once closing is set, by the header
// itself in HTTP/1 and by the GOAWAY that net/http sends for it in HTTP/2; and at any time those whose request
// may end elsewhere for a proxy in front of this one than it does here. net/http ignores Transfer-Encoding in
// HTTP/1.0, and Content-Length beside it in HTTP/1.1.
func (l *listeners) setConnectionClose(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if l.closing.Load() || !r.ProtoAtLeast(1, 1) || len(r.TransferEncoding) > 0 {
			w.Header()["Connection"] = []string{"close"}
		}
		next.ServeHTTP(w, r)
	})
}

// reportPanics reports a panic of next: net/http's own message goes to the
// debug level, with what clients cause. The connection is closed either way.
func (s *Server) reportPanics(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			cause := recover()
			if cause == nil {
				return
			}
			if cause != http.ErrAbortHandler {
				s.reportPanic(recovery.Handler, cause, debug.Stack())
			}
			panic(http.ErrAbortHandler)
		}()
		next.ServeHTTP(w, r)
	})
}

// startServing starts the goroutine that serves a listener until it closes, over TLS if it has a certificate.
func (l *listeners) startServing(on *listener, server *http.Server, onError acceptErrors) {
	serve := server.Serve
	if on.certificate.Load() != nil {
		server.TLSConfig = &tls.Config{
			MinVersion:     tls.VersionTLS12,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return on.certificate.Load(), nil },
		}
		serve = func(socket net.Listener) error { return server.ServeTLS(socket, "", "") }
	}
	on.server = server
	l.serving.Go(func() {
		defer close(on.ended)
		err := serve(temporaryErrorListener{clientconn.NewListener(on.socket, on.certificate.Load() == nil), onError})
		if !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			l.failed <- err
		}
	})
}

// replaceCertificate has new connections use another certificate. Turning TLS on or off needs a restart.
func (l *listener) replaceCertificate(t config.ListenerTLS) {
	if t.Enabled() && l.certificate.Load() != nil {
		l.certificate.Store(t.Certificate)
	}
}

// stopAcceptingAndWait leaves the listeners to the process that shares them.
func (l *listeners) stopAcceptingAndWait() {
	for _, one := range l.all() {
		one.stopAcceptingAndWait()
	}
}

// stopAcceptingAndWait closes the socket and returns when each connection that was
// accepted is known to the server, which keeps serving them.
func (l *listener) stopAcceptingAndWait() {
	l.socket.Close()
	<-l.ended
}

// stopAcceptingWithGrace is stopAcceptingAndWait for a listener that no other process has: the kernel resets
// connections that were opened and not accepted when it closes, and their clients may have sent requests. So
// new connections are ignored for a moment first. Their clients try again after a second, and are refused.
func (l *listener) stopAcceptingWithGrace() {
	if dropNewConnections(l.socket) == nil {
		time.Sleep(acceptGrace)
	}
	l.stopAcceptingAndWait()
}

func closeSockets(sockets []net.Listener) {
	for _, socket := range sockets {
		socket.Close()
	}
}

// closeAndWait ends what is left of requests and returns when nothing is served any more.
func (l *listeners) closeAndWait() {
	l.cancel(nil)
	for _, one := range l.all() {
		if one.server != nil {
			one.server.Close()
		}
		one.socket.Close()
	}
	closeSockets(l.kvEvents)
	l.serving.Wait()
	l.reserve.close()
}

// temporaryErrorListener makes net/http's server accept again, 5 ms to 1 s later, after any error but the
// listener's closing. By itself it ends after errors that do not call themselves temporary, and accept(2)
// returns such for a lack of memory, and for a network error of the one connection. After a lack of file
// descriptors it accepts again at once if it can free one.
type temporaryErrorListener struct {
	net.Listener
	acceptErrors
}

type acceptErrors struct {
	log            func(error)
	freeDescriptor func() bool // reports whether it could
}

// Accept implements net.Listener.
func (l temporaryErrorListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err == nil || errors.Is(err, net.ErrClosed) {
			return c, err
		}
		l.log(err)
		if !transport.IsOutOfDescriptors(err) || !l.freeDescriptor() {
			return nil, temporaryError{err}
		}
	}
}

// maxReservedDescriptors is how many connections operators can open when no file descriptor is left.
const maxReservedDescriptors = 4

// descriptorReserve holds file descriptors until they are needed. Safe for concurrent use; the
// zero value holds none.
type descriptorReserve struct {
	mu     sync.Mutex
	files  []*os.File // all of os.DevNull
	closed bool
}

func (r *descriptorReserve) refill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for !r.closed && len(r.files) < maxReservedDescriptors {
		file, err := os.Open(os.DevNull)
		if err != nil {
			return
		}
		r.files = append(r.files, file)
	}
}

func (r *descriptorReserve) release() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := len(r.files) - 1
	if last < 0 {
		return false
	}
	r.files[last].Close()
	r.files = r.files[:last]
	return true
}

func (r *descriptorReserve) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, file := range r.files {
		file.Close()
	}
	r.files, r.closed = nil, true
}

// temporaryError is a net.Error after which net/http's server accepts again.
type temporaryError struct{ error }

func (temporaryError) Timeout() bool   { return false }
func (temporaryError) Temporary() bool { return true }
func (e temporaryError) Unwrap() error { return e.error }

// listenTCP listens without Multipath TCP, which is Go's default and whose sockets
// take no filter (dropNewConnections).
func listenTCP(address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), "tcp", address)
}

// ListenError explains why address cannot be listened on, and what to do. setting is the
// command-line flag or the setting that has it.
func ListenError(setting, address string, err error) error {
	var dns *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		_, port, _ := net.SplitHostPort(address)
		return fmt.Errorf("%s is in use: stop the listener or the connection that has the port (ss -tanp 'sport = :%s' lists it), or set "+
			"another address with %s", address, port, setting)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("listen on %s: permission denied: ports below 1024 need root or CAP_NET_BIND_SERVICE; set another address with %s",
			address, setting)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s is not an address of this machine: set another address with %s", address, setting)
	case errors.As(err, &dns):
		return fmt.Errorf("%s: no such host: set another address with %s", address, setting)
	}
	return fmt.Errorf("listen on %s: %w: set another address with %s", address, err, setting)
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
