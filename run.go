package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// maxAcceptDelay bounds for how long a proxy accepts no connections at its start, where a
// replica answers no check. It is above the default of health.timeout.
const maxAcceptDelay = 5 * time.Second

// readerWait is how long the end waits for a file that is being read.
const readerWait = time.Second

// run serves the public listener, and the admin one if there is one, until ctx
// is done or another process has taken over; then requests in flight may finish.
// It owns the listeners.
func (s *service) run(ctx context.Context, public, admin net.Listener) error {
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var running, telling sync.WaitGroup
	keeping := s.keepFiles(watching)
	readings, readerEnded := s.control.reload.follow(watching, s.control.reloads)
	running.Go(s.fleet.start(watching))
	running.Go(func() { s.router.Run(watching) })
	defer runtime.KeepAlive(newHeapBallast())
	telling.Go(func() { s.access.Run(watching) }) // two processes may write to it at once, so it is no matter of a hand-over
	if s.traces != nil {
		telling.Go(func() { s.traces.Run(watching) })
	}
	defer func() {
		stopWatching()
		running.Wait()
		keeping.end()
		telling.Wait() // last: whoever reads neither lines nor spans must not hold up the snapshot
		select {
		case <-readerEnded:
		case <-time.After(readerWait):
		}
	}()
	checked := s.firstChecks.done
	if s.control.before.ready != nil {
		// The process before still answers. What came here would find no replica yet.
		select {
		case <-checked:
		case <-ctx.Done():
		}
		if ctx.Err() != nil { // so that one goes on, with the sockets and the files
			keeping.abandon()
			public.Close()
			if admin != nil {
				admin.Close()
			}
			return nil
		}
		checked = nil
		s.notifyReady()
	}
	f := s.newListeners()
	defer f.close()
	if admin != nil {
		s.serveAdmin(f, admin)
	}
	// Connections wait for the first checks: a balancer that does not ask for readiness
	// sends requests as soon as the port is open, and they would find no replica yet.
	select {
	case <-s.firstChecks.done:
	case <-time.After(maxAcceptDelay):
	case <-ctx.Done():
	}
	s.servePublic(f, public)
	switch err := s.eventLoop(ctx, f, checked, readings); err {
	case nil:
		s.drain(ctx, f)
		return s.shutdown(f)
	case errHandedOver:
		keeping.abandon()
		return s.shutDownHandedOver(ctx, f)
	default:
		return errors.Join(err, s.shutdown(f))
	}
}

// control is what a running service is told from outside. The channels may be
// nil: then nobody tells it anything but to end.
type control struct {
	reloads   <-chan os.Signal // read the configuration anew
	reload    *reloader
	level     *slog.LevelVar   // of the log
	handOvers <-chan os.Signal // let a new process take over
	program   string           // its file
	before    *inherited       // from the process before; told when this one serves
}

// eventLoop does what the service is told until ctx is done, serving fails, or
// another process has taken over (errHandedOver). Once checked is closed it tells
// that the service is ready. A hand-over under way ends with it: where the service
// is stopped, no process may stay that took over in the same moment.
func (s *service) eventLoop(ctx context.Context, f *listeners, checked <-chan struct{}, readings <-chan reading) error {
	c := &s.control
	var child childProcess
	defer func() {
		if child.stop != nil {
			child.stop(stoppedBy(ctx))
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-f.failed:
			return err
		case <-checked:
			checked = nil
			s.notifyReady()
		case read := <-readings:
			s.reloadNotifying(read, checked == nil)
		case <-c.handOvers:
			child = s.handOver(f, child)
		case err := <-child.serves:
			pid := child.pid
			child = childProcess{}
			if err == nil {
				s.log.Info("handed over; finishing requests in flight", "pid", pid)
				s.notifySystemd("MAINPID=" + strconv.Itoa(pid))
				return errHandedOver
			}
			s.log.Error("hand-over failed, this process keeps serving", "err", err)
		}
	}
}
