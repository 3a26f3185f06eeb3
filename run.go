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
// is done; then requests in flight may finish. It owns the listeners.
func (s *service) run(ctx context.Context, public, admin net.Listener) error {
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	if s.recorder != nil {
		running.Go(func() { s.recorder.Run(watching) })
	}
	if s.snapshot != nil {
		s.snapshot.load()
		running.Go(func() { s.snapshot.run(watching) })
	}
	running.Go(func() { s.fleet.run(watching) })
	running.Go(func() { s.router.Run(watching) })
	defer func() {
		stopWatching()
		running.Wait()
		if s.snapshot != nil {
			s.snapshot.save()
		}
	}()
	f := s.open(public, admin)
	defer f.close()
	if err := s.govern(ctx, f); err != nil {
		return errors.Join(err, s.shutdown(f))
	}
	s.drain(ctx, f)
	return s.shutdown(f)
}

// control is what a running service is told from outside.
type control struct {
	reloads <-chan os.Signal // read the configuration anew
	reload  *reloader
}

// govern does what the service is told until ctx is done, or serving fails.
func (s *service) govern(ctx context.Context, f *front) error {
	if s.control == nil {
		select {
		case <-ctx.Done():
			return nil
		case err := <-f.failed:
			return err
		}
	}
	looks := time.NewTicker(watchEvery)
	defer looks.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-f.failed:
			return err
		case <-s.control.reloads:
			s.control.reload.run(s)
		case <-looks.C:
			if s.control.reload.files.changed() {
				s.control.reload.run(s)
			}
		}
	}
}
