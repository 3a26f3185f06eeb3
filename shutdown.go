package main

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"warmroute/proxy"
)

const (
	// cutoffGrace is how long clients whose responses are cut off have to read the error
	// that says so.
	cutoffGrace = 2 * time.Second
	// adminShutdownTimeout bounds a request on the admin listener at the end.
	adminShutdownTimeout = time.Second
	// quietCheckInterval is how often a process that ends checks whether connections are quiet.
	quietCheckInterval = 20 * time.Millisecond
	// minQuiet is how long no request must come before connections are closed that
	// clients have kept: a client whose request is on its way then cannot know
	// whether it was begun.
	minQuiet = 2 * time.Second
)

// stopSignal is the cause with which a signal ends the program's context.
type stopSignal struct{ os.Signal }

func (s stopSignal) Error() string { return "stopped by " + s.String() }

// stoppedBy is the signal that ended ctx, or os.Interrupt where there was none.
func stoppedBy(ctx context.Context) os.Signal {
	if cause, ok := context.Cause(ctx).(stopSignal); ok {
		return cause.Signal
	}
	return os.Interrupt
}

// drain fails readiness and, after SIGTERM, serves on for timeouts.drain, so that a
// balancer in front learns from its health check and no request fails. Responses
// tell their clients to close the connection. Nobody waits for that at a terminal.
func (s *service) drain(ctx context.Context, f *listeners) {
	s.proxy.FailReadiness()
	s.notifySystemd(daemon.SdNotifyStopping)
	if stoppedBy(ctx) != syscall.SIGTERM {
		return
	}
	f.closing.Store(true)
	if s.config.Timeouts.Drain == 0 {
		return
	}
	s.log.Info("draining: readiness fails, still serving", "for", s.config.Timeouts.Drain)
	select {
	case <-time.After(s.config.Timeouts.Drain):
	case <-f.failed: // no more requests come
	}
}

// shutdown closes the listeners and lets requests in flight finish, as long as
// they may, and then cuts them off, which their clients are told. Requests that
// wait for a replica to come back do so at another proxy. The admin listener
// goes last, so that the end can be watched.
//
// After SIGTERM connections are served until they are quiet: a client that has kept
// one may be sending a request on it.
func (s *service) shutdown(f *listeners) error {
	most := s.config.Timeouts.Shutdown
	s.log.Info("shutting down", "limit", most)
	s.proxy.FailReadiness()
	s.router.Drain()
	limit, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	if f.closing.Load() {
		if s.control.before.SystemdSocket {
			f.public.stopListening()
		} else {
			f.public.refuseConnections()
		}
		s.awaitQuiet(limit, minQuiet)
	}
	return s.finish(limit, f)
}

// awaitQuiet waits until no client has a connection, or none was opened or carried a
// request for that long, or ctx is done.
func (s *service) awaitQuiet(ctx context.Context, least time.Duration) {
	looks := time.NewTicker(quietCheckInterval)
	defer looks.Stop()
	for ctx.Err() == nil {
		if open, quiet := s.proxy.ConnectionActivity(); open == 0 || quiet >= least {
			return
		}
		select {
		case <-looks.C:
		case <-ctx.Done():
		}
	}
}

// finish ends the servers: requests in flight have until limit is done to end by themselves.
func (s *service) finish(limit context.Context, f *listeners) error {
	err := f.public.server.Shutdown(limit)
	if err != nil {
		err = fmt.Errorf("requests still in flight after %v were cut off (timeouts.shutdown)", s.config.Timeouts.Shutdown)
		f.cancel(proxy.ErrCutOff)
		last, cancel := context.WithTimeout(context.Background(), cutoffGrace)
		defer cancel()
		f.public.server.Shutdown(last)
	}
	for _, d := range f.all {
		if d == f.public {
			continue
		}
		last, cancel := context.WithTimeout(context.Background(), adminShutdownTimeout)
		defer cancel()
		d.server.Shutdown(last)
	}
	return err
}
