package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/metrics"
	"warmroute/proxy"
	"warmroute/proxy/record"
	"warmroute/router"
)

// clientIdle is how long a client's connection may lie idle. Longer than any
// common client keeps one, so that it is the client that closes.
const clientIdle = 5 * time.Minute

// service is one proxy with everything that runs for it.
type service struct {
	config     *Config
	log        *slog.Logger
	registry   *backends.Registry
	router     *router.Router
	snapshot   *snapshotFile    // nil: none is kept
	recorder   *record.Recorder // nil: traffic is not recorded
	transports []*transport.Transport
	checker    *backends.Checker
	poller     *backends.Poller
	public     http.Handler
	admin      http.Handler
}

// newService puts a proxy together. Nothing runs before run.
func newService(c *Config, log *slog.Logger) (*service, error) {
	s := &service{config: c, log: log}
	if err := s.openFleet(); err != nil {
		return nil, err
	}
	o := s.routerOptions()
	var err error
	if s.router, err = router.New(o); err != nil {
		return nil, err
	}
	if c.Index.Snapshot != "" {
		s.snapshot = &snapshotFile{
			path:  c.Index.Snapshot,
			index: router.NewSnapshots(s.router, o.Backends, o.IndexMaxBytes, log),
			log:   log,
		}
	}
	m := metrics.New(s.registry.All(), s.router, version())
	s.watch(m)
	if c.Record.File != "" {
		s.recorder, err = record.New(record.Options{
			File:       c.Record.File,
			MaxBytes:   int64(c.Record.MaxBytes),
			Keep:       c.Record.Keep,
			BlockBytes: c.Index.BlockBytes,
			Log:        log,
			Dropped:    m.RecordDropped,
		})
		if err != nil {
			return nil, fmt.Errorf("record.file: %w", err)
		}
	}
	s.public = proxy.New(proxy.Options{
		Registry:   s.registry,
		Router:     s.router,
		Metrics:    m,
		Log:        log,
		Version:    version(),
		Suspect:    s.checker.Suspect,
		BlockBytes: c.Index.BlockBytes,
		Record:     s.recorder,
		Settings:   c.proxySettings(),
	})
	admin := http.NewServeMux()
	admin.Handle("GET /metrics", m.Handler())
	s.admin = admin
	return s, nil
}

// watch makes what keeps the fleet's state up to date.
func (s *service) watch(m *metrics.Metrics) {
	c := s.config
	lost := func(b *backends.Backend, _ string) {
		b.TellsCached.Store(false) // the next process may be another version
		s.router.Forget(b)
	}
	s.checker = &backends.Checker{
		Logger:  s.log,
		OnState: func(b *backends.Backend, _ backends.State, _ string) { s.router.Changed(b) },
		OnLost:  lost,
	}
	s.checker.SetPace(backends.CheckPace(c.Health))
	s.poller = &backends.Poller{
		Logger:  s.log,
		OnLoad:  s.router.Observe,
		OnError: func(b *backends.Backend, _ error) { m.PollFailed(b) },
		OnLost:  lost,
	}
	s.poller.SetPace(backends.PollPace(c.Poll))
	if s.snapshot != nil {
		s.poller.OnLoad = s.snapshot.index.Observe
	}
	s.poller.OnLoad = s.tellStalls(s.poller.OnLoad)
}

// tellStalls logs what a poll makes of a replica's silence.
func (s *service) tellStalls(observe func(*backends.Backend, *backends.Load)) func(*backends.Backend, *backends.Load) {
	told := make([]bool, len(s.registry.All())) // by slot, each in its own poll's goroutine
	return func(b *backends.Backend, l *backends.Load) {
		observe(b, l)
		switch _, stalled := s.router.Stalls(b); {
		case stalled && !told[b.Slot]:
			s.log.Warn("backend produces nothing, and gets nothing new until it does", "backend", b.Name, "in_flight", b.InFlight.Load())
		case !stalled && told[b.Slot]:
			s.log.Info("backend produces again", "backend", b.Name)
		default:
			return
		}
		told[b.Slot] = !told[b.Slot]
	}
}

// run serves the public listener, and the admin one if there is one, until ctx
// is done; then requests in flight may finish for as long as
// timeouts.shutdown. It owns the listeners.
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
	for _, b := range s.registry.All() {
		running.Go(func() { s.checker.Follow(watching, b) })
		running.Go(func() { s.poller.Follow(watching, b) })
	}
	running.Go(func() { s.router.Run(watching) })
	defer func() {
		stopWatching()
		running.Wait()
		if s.snapshot != nil {
			s.snapshot.save()
		}
		for _, t := range s.transports {
			t.CloseIdleConnections()
		}
	}()

	servers := []*http.Server{s.server(s.public)}
	listeners := []net.Listener{public}
	if admin != nil {
		servers, listeners = append(servers, s.server(s.admin)), append(listeners, admin)
	}
	failed := make(chan error, len(servers))
	for i := range servers {
		running.Go(func() {
			if err := servers[i].Serve(listeners[i]); !errors.Is(err, http.ErrServerClosed) {
				failed <- err
			}
		})
	}
	var err error
	select {
	case <-ctx.Done():
		s.log.Info("shutting down", "limit", s.config.Timeouts.Shutdown)
	case err = <-failed:
	}
	return errors.Join(err, s.shutdown(servers))
}

// shutdown lets requests in flight finish, as long as they may, and then cuts
// them off. Those that wait for a replica to come back do so at another proxy.
func (s *service) shutdown(servers []*http.Server) error {
	s.router.Stop()
	limit, cancel := context.WithTimeout(context.Background(), s.config.Timeouts.Shutdown)
	defer cancel()
	var errs []error
	for _, server := range servers {
		if err := server.Shutdown(limit); err != nil {
			errs = append(errs, fmt.Errorf("requests still in flight after %v were cut off (timeouts.shutdown)", s.config.Timeouts.Shutdown))
			server.Close()
		}
	}
	return errors.Join(errs...)
}

func (s *service) server(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h,
		// Else net/http itself answers "OPTIONS *", which is on no allowlist.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            s.config.Timeouts.ReadHeader,
		IdleTimeout:                  clientIdle,
		MaxHeaderBytes:               int(s.config.Limits.HeaderBytes),
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}
