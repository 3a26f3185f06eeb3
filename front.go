package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// clientIdle is how long a client's connection may lie idle. Longer than any
// common client keeps one, so that it is the client that closes.
const clientIdle = 5 * time.Minute

// front is the listeners with their servers.
type front struct {
	public, admin *http.Server // admin may be nil
	failed        chan error   // serving a listener ended by itself
	cut           context.CancelCauseFunc
	serving       sync.WaitGroup
}

// open serves the listeners until close.
func (s *service) open(public, admin net.Listener) *front {
	requests, cut := context.WithCancelCause(context.Background())
	f := &front{failed: make(chan error, 2), cut: cut}
	f.public = s.server(s.proxy, requests)
	if s.certificate.Load() != nil {
		f.public.TLSConfig = s.tlsConfig()
	}
	f.public.ConnState = s.proxy.Track
	f.serve(f.public, public)
	if admin != nil {
		f.admin = s.server(s.admin, requests)
		f.serve(f.admin, admin)
	}
	return f
}

func (f *front) serve(server *http.Server, l net.Listener) {
	f.serving.Go(func() {
		serve := server.Serve
		if server.TLSConfig != nil {
			serve = func(l net.Listener) error { return server.ServeTLS(l, "", "") }
		}
		if err := serve(l); !errors.Is(err, http.ErrServerClosed) {
			f.failed <- err
		}
	})
}

// close cuts off what is left and waits for the listeners to be closed.
func (f *front) close() {
	f.cut(nil)
	f.public.Close()
	if f.admin != nil {
		f.admin.Close()
	}
	f.serving.Wait()
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
	}
}
