package server

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"warmroute/clock"
	"warmroute/proxy"
)

const (
	// errorGrace is how long clients whose responses are ended have to read the error.
	errorGrace = 2 * time.Second
	// adminShutdownTimeout bounds a request on the admin listener at the end.
	adminShutdownTimeout = time.Second
	// quietCheckInterval is how often a process that ends checks whether connections are quiet.
	quietCheckInterval = 20 * time.Millisecond
	// minQuietTime is how long no request must come before connections are closed that clients have kept: a
	// client whose request is on its way then cannot know whether it was begun.
	minQuietTime = 2 * time.Second
)

// failReadinessAndWait fails readiness and, after SIGTERM, serves for timeouts.serve_after_term, so that a load balancer
// learns from its health check and no request fails. Responses tell their clients to close the connection.
// After another signal, sent by a person, it returns at once.
func (s *Server) failReadinessAndWait(ctx context.Context) {
	s.proxy.FailReadiness()
	s.notifySystemd(daemon.SdNotifyStopping)
	if stopSignalOf(ctx) != syscall.SIGTERM {
		return
	}
	s.listeners.closing.Store(true)
	if s.config.Timeouts.ServeAfterTerm == 0 {
		return
	}
	s.log.Info("readiness fails, still serving", "for", s.config.Timeouts.ServeAfterTerm)
	select {
	case <-time.After(s.config.Timeouts.ServeAfterTerm):
	case <-s.listeners.failed: // no more requests come
	}
}

// shutDownHTTP closes the listeners and lets requests in flight finish within timeouts.shutdown; then it cuts
// them off, with an error to their clients. Requests that wait for a backend are rejected, so that their
// clients try another proxy. The admin listener is closed last, so that the end can be observed.
//
// After SIGTERM connections are served until they are quiet: a client that has kept
// one may be sending a request on it.
func (s *Server) shutDownHTTP() error {
	timeout := s.config.Timeouts.Shutdown
	s.log.Info("shutting down", "timeout", timeout)
	s.proxy.FailReadiness()
	s.router.StartRefusingUnready()
	deadline, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if s.listeners.closing.Load() {
		if s.process.inherited.SystemdSocket {
			s.listeners.public.stopAcceptingAndWait()
		} else {
			s.listeners.public.stopAcceptingWithGrace()
		}
		s.awaitQuiet(deadline, minQuietTime)
	}
	return s.shutDownServers(deadline)
}

// shutDownAfterUpgrade ends a Server whose listeners another process has. Accepted requests are served here, and
// so are those that still come on connections that clients have kept open, with Connection: close: closing
// those at once would lose a request that is on its way. They are closed when nothing came or was in flight for
// timeouts.serve_after_term.
func (s *Server) shutDownAfterUpgrade(ctx context.Context) error {
	s.listeners.closing.Store(true)
	s.listeners.stopAcceptingAndWait()
	s.admin.EndEventStreams() // so that pages connect to the new process
	end := time.Now().Add(s.config.Timeouts.Shutdown)
	untilEnd, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	s.awaitQuiet(untilEnd, max(s.config.Timeouts.ServeAfterTerm, minQuietTime))
	if ctx.Err() != nil {
		s.router.StartRefusingUnready()
	}
	deadline, cancel := context.WithDeadline(context.Background(), end)
	defer cancel()
	return s.shutDownServers(deadline)
}

// awaitQuiet blocks until no client has a connection, or none was opened or carried a
// request for quietTime, or ctx is done.
func (s *Server) awaitQuiet(ctx context.Context, quietTime time.Duration) {
	clock.WaitUntil(ctx, quietCheckInterval, func() bool {
		open, quiet := s.proxy.ConnectionActivity()
		return open == 0 || quiet >= quietTime
	})
}

// shutDownServers ends the HTTP servers: requests in flight have until deadline is done to finish.
func (s *Server) shutDownServers(deadline context.Context) error {
	err := s.listeners.public.server.Shutdown(deadline)
	if err != nil {
		err = fmt.Errorf("requests still in flight after timeouts.shutdown %v were ended", s.config.Timeouts.Shutdown)
		s.listeners.cancel(proxy.ErrShutdown)
		grace, cancel := context.WithTimeout(context.Background(), errorGrace)
		defer cancel()
		s.listeners.public.server.Shutdown(grace)
	}
	s.proxy.Close()
	if admin := s.listeners.admin; admin != nil {
		timeout, cancel := context.WithTimeout(context.Background(), adminShutdownTimeout)
		defer cancel()
		admin.server.Shutdown(timeout)
	}
	return err
}
