package main

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// run serves the public listener, and the admin one if there is one, until ctx
// is done or another process has taken over; then requests in flight may finish.
// It owns the listeners.
func (s *service) run(ctx context.Context, public, admin net.Listener) error {
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	keeping := s.keepFiles(watching)
	running.Go(func() { s.fleet.run(watching) })
	running.Go(func() { s.router.Run(watching) })
	defer func() {
		stopWatching()
		running.Wait()
		keeping.end()
	}()
	if s.control.before.ready != nil {
		// The process before still answers. What came here would find no replica yet.
		select {
		case <-s.firstChecks.done:
		case <-ctx.Done():
		}
	}
	f := s.open(public, admin)
	defer f.close()
	switch err := s.govern(ctx, f); err {
	case nil:
		s.drain(ctx, f)
		return s.shutdown(f)
	case errHandedOver:
		keeping.abandon()
		return s.leave(ctx, f)
	default:
		return errors.Join(err, s.shutdown(f))
	}
}

// control is what a running service is told from outside. The channels may be
// nil: then nobody tells it anything but to end.
type control struct {
	reloads   <-chan os.Signal // read the configuration anew
	reload    *reloader
	handOvers <-chan os.Signal // let a new process take over
	program   string           // its file
	before    *inherited       // from the process before; told when this one serves
}

// govern does what the service is told until ctx is done, serving fails, or
// another process has taken over (errHandedOver).
func (s *service) govern(ctx context.Context, f *front) error {
	c := &s.control
	looks := time.NewTicker(watchEvery)
	defer looks.Stop()
	checked := s.firstChecks.done
	var next successor
	defer func() {
		if next.giveUp != nil {
			next.giveUp()
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
			if err := s.ready(); err != nil {
				return err
			}
		case <-c.reloads:
			c.reload.run(s)
		case <-looks.C:
			if c.reload != nil && c.reload.files.changed() {
				c.reload.run(s)
			}
		case <-c.handOvers:
			next = s.handOver(f, next)
		case err := <-next.serves:
			if err == nil {
				return s.handedOver(next)
			}
			s.log.Error("not handed over, this process goes on", "reason", err.Error())
			next = successor{}
		}
	}
}
