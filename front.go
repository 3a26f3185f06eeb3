package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/proxy"
	"warmroute/proxy/http1"
)

// clientIdle is how long a client's connection may lie idle. Longer than any
// common client keeps one, so that it is the client that closes.
const clientIdle = 5 * time.Minute

// adminConnections is how many the admin listener may have: where strangers reach
// it, they must not take the descriptors that requests need.
const adminConnections = 64

// front is the listeners with their servers.
type front struct {
	doors   []*door    // the public one, then the admin one if there is one
	failed  chan error // serving a listener ended by itself
	cut     context.CancelCauseFunc
	handed  atomic.Bool  // another process has the listeners: clients are to connect anew
	late    atomic.Int64 // requests that came all the same
	serving sync.WaitGroup
}

// door is one listener.
type door struct {
	name     string // as socket activation has it
	listener net.Listener
	server   server
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

// open serves the listeners until close.
func (s *service) open(public, admin net.Listener) *front {
	requests, cut := context.WithCancelCause(context.Background())
	f := &front{failed: make(chan error, 2), cut: cut}
	f.serve(&door{"public", public, s.publicServer(f.closing(s.proxy), requests)})
	if admin != nil {
		server := s.server(f.closing(s.admin), requests)
		server.RegisterOnShutdown(s.admin.EndEvents)
		server.ConnState = proxy.BoundConnections(adminConnections)
		f.serve(&door{"admin", admin, server})
	}
	return f
}

func (f *front) serve(d *door) {
	f.doors = append(f.doors, d)
	f.serving.Go(func() {
		if err := d.server.Serve(proxy.LazyDeadlines(d.listener)); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			f.failed <- err
		}
	})
}

// closing has clients close their connections after the answer, once another
// process has the listeners: by the header itself in HTTP/1, by the GOAWAY that
// net/http sends for it in HTTP/2.
func (f *front) closing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.handed.Load() {
			f.late.Add(1)
			w.Header()["Connection"] = []string{"close"}
		}
		next.ServeHTTP(w, r)
	})
}

// stopListening leaves the listeners to the process that shares them. What was
// accepted is served on.
func (f *front) stopListening() {
	f.handed.Store(true)
	for _, d := range f.doors {
		d.listener.Close()
	}
}

// close cuts off what is left and waits for the listeners to be closed.
func (f *front) close() {
	f.cut(nil)
	for _, d := range f.doors {
		d.server.Close()
	}
	f.serving.Wait()
}

// publicServer is the one for clients.
func (s *service) publicServer(h http.Handler, requests context.Context) server {
	if s.certificate.Load() != nil {
		server := s.server(h, requests)
		server.TLSConfig = s.tlsConfig()
		server.ConnState = s.proxy.Track
		return secured{server}
	}
	return &http1.Server{
		Handler: h, Context: requests, ConnState: s.proxy.Track, Log: s.log,
		ReadHeaderTimeout: s.config.Timeouts.ReadHeader, IdleTimeout: clientIdle,
		MaxHeaderBytes: int(s.config.Limits.HeaderBytes),
	}
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
