package main

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"warmroute/proxy"
)

const (
	// farewell is how long clients whose answers are cut off have to take the error
	// that says so.
	farewell = 2 * time.Second
	// lastScrape is how long a request on the admin listener may take at the end.
	lastScrape = time.Second
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

// drain goes on answering for timeouts.drain: requests in flight go on, and
// new ones get a 503, so that a balancer in front learns from its health check
// and not from its clients. Nobody waits for that at a terminal.
func (s *service) drain(ctx context.Context, f *front) {
	s.proxy.Refuse()
	s.tellSystemd("STOPPING=1")
	if stoppedBy(ctx) != syscall.SIGTERM || s.config.Timeouts.Drain == 0 {
		return
	}
	s.log.Info("draining: not ready any more, new requests are refused", "for", s.config.Timeouts.Drain)
	select {
	case <-time.After(s.config.Timeouts.Drain):
	case <-f.failed: // nothing is left to be refused
	}
}

// shutdown closes the listeners and lets requests in flight finish, as long as
// they may, and then cuts them off, which their clients are told. Requests that
// wait for a replica to come back do so at another proxy. The admin listener
// goes last, so that the end can be watched.
func (s *service) shutdown(f *front) error {
	most := s.config.Timeouts.Shutdown
	s.log.Info("shutting down", "limit", most)
	s.proxy.Refuse()
	s.router.Stop()
	return s.finish(f, most)
}

// finish ends the servers: requests in flight have most to end by themselves.
func (s *service) finish(f *front, most time.Duration) error {
	limit, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	public, others := f.doors[0], f.doors[1:]
	err := public.server.Shutdown(limit)
	if err != nil {
		err = fmt.Errorf("requests still in flight after %v were cut off (timeouts.shutdown)", s.config.Timeouts.Shutdown)
		f.cut(proxy.ErrCutOff)
		last, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		public.server.Shutdown(last)
	}
	for _, d := range others {
		last, cancel := context.WithTimeout(context.Background(), lastScrape)
		defer cancel()
		d.server.Shutdown(last)
	}
	return err
}
