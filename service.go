package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"

	"warmroute/admin"
	"warmroute/backends"
	"warmroute/cli"
	"warmroute/config"
	"warmroute/metrics"
	"warmroute/proxy"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/apikey"
	"warmroute/proxy/recorder"
	"warmroute/proxy/tracing"
	"warmroute/router"
	"warmroute/router/snapshot"
)

// service is one proxy with everything that runs for it.
type service struct {
	started  *config.Config // as at the start
	config   *config.Config // as it is in use
	instance string         // random id of this proxy; the same after a hand-over
	log      *slog.Logger
	registry *backends.Registry
	router   *router.Router
	snapshot *snapshotFile      // nil: none is kept
	recorder *recorder.Recorder // nil: traffic is not recorded
	access   *accesslog.Log
	traces   *tracing.Tracer // nil: requests are not traced
	keys     *apikey.Set
	fleet    *fleet
	checker  *backends.Checker
	poller   *backends.Poller
	metrics  *metrics.Metrics
	proxy    *proxy.Proxy // serves the public listener
	admin    *admin.Handler

	certificate      atomic.Pointer[tls.Certificate] // the public listener's; nil: it has none
	adminCertificate atomic.Pointer[tls.Certificate] // likewise the admin listener's

	resources   *resourceLog
	firstChecks *firstChecks
	control     control
}

// newService puts a proxy together. Nothing runs before run.
func newService(c *config.Config, log *slog.Logger) (*service, error) {
	return newServiceAfter(&inherited{}, c, log)
}

// newServiceAfter is newService for a process that takes over from another, which
// still has its files.
func newServiceAfter(before *inherited, c *config.Config, log *slog.Logger) (*service, error) {
	s := &service{started: c, config: c, log: log, resources: &resourceLog{log: log}, control: control{before: before}, keys: apikey.New(c.APIKeys())}
	s.instance = cmp.Or(before.Instance, rand.Text())
	s.certificate.Store(c.TLS.Certificate)
	s.adminCertificate.Store(c.AdminTLS.Certificate)
	var err error
	if s.fleet, err = newFleet(c, log); err != nil {
		return nil, err
	}
	s.registry = s.fleet.registry
	o := s.routerOptions(c)
	if s.router, err = router.New(o); err != nil {
		return nil, err
	}
	if c.Index.Snapshot != "" {
		s.snapshot = &snapshotFile{
			path:  c.Index.Snapshot,
			index: snapshot.NewStore(s.router, snapshot.Options{BlockBytes: o.BlockBytes, MaxBytes: o.IndexMaxBytes, Now: o.Now, Log: log}),
			log:   log,
		}
		if err := s.snapshot.open(before.ready != nil); err != nil {
			return nil, fmt.Errorf("index.snapshot: %w", err)
		}
	}
	s.firstChecks = newFirstChecks(s.registry.All())
	m := metrics.New(s.registry, s.router, cli.Version())
	s.metrics = m
	s.watch(m)
	if c.Record.File != "" {
		s.recorder, err = recorder.New(recorder.Options{
			File:       c.Record.File,
			MaxBytes:   int64(c.Record.MaxBytes),
			Keep:       c.Record.Keep,
			BlockBytes: c.Index.BlockBytes,
			Log:        log,
			Dropped:    m.CountDroppedRecord,
			Wait:       before.ready != nil,
		})
		if err != nil {
			return nil, fmt.Errorf("record.file: %w", err)
		}
	}
	if err := s.watchRequests(m); err != nil {
		return nil, err
	}
	s.proxy = proxy.New(proxy.Options{
		Registry:      s.registry,
		Router:        s.router,
		Metrics:       m,
		Log:           log,
		Version:       cli.Version(),
		Instance:      s.instance,
		RecheckHealth: s.checker.RequestCheck,

		OutOfDescriptors: s.resources.outOfDescriptors,

		BlockBytes: c.Index.BlockBytes,
		Recorder:   s.recorder,
		AccessLog:  s.access,
		Tracer:     s.traces,
		Keys:       s.keys,
		Settings:   proxySettings(c),
	})
	host, _, _ := net.SplitHostPort(c.Admin) // checked with the configuration
	s.admin = admin.New(admin.Options{
		Registry: s.registry, Router: s.router, Proxy: s.proxy, Reset: s.reset,
		Metrics: m.Handler(), Version: cli.Version(), Log: log, Host: host, Token: c.AdminToken,
	})
	return s, nil
}

// watch makes what keeps the fleet's state up to date.
func (s *service) watch(m *metrics.Metrics) {
	c := s.config
	lost := func(b *backends.Backend, _ string) {
		b.ReportsCached.Store(false) // the next process may be another version
		s.router.ForgetCache(b)
	}
	s.checker = &backends.Checker{
		Logger:   s.log,
		Instance: s.instance,
		OnState: func(b *backends.Backend, _ backends.State, _ string) {
			s.router.BackendChanged(b)
			s.firstChecks.note(b)
		},
		OnHung: s.router.ChecksTimedOut,

		OnOutOfDescriptors: s.resources.outOfDescriptors,

		OnCacheLost: lost,
	}
	s.checker.SetSettings(backends.HealthSettings(c.Health))
	s.poller = &backends.Poller{
		Logger:      s.log,
		OnLoad:      s.router.ObserveLoad,
		OnCacheLost: lost,

		OnOutOfDescriptors: s.resources.outOfDescriptors,
	}
	s.poller.SetSettings(backends.PollSettings(c.Poll))
	if s.snapshot != nil {
		s.poller.OnLoad = s.snapshot.index.ObserveLoad
	}
	told := stalls{router: s.router, log: s.log, told: map[*backends.Backend]lastStalls{}}
	observe := s.poller.OnLoad
	s.poller.OnLoad = func(b *backends.Backend, l *backends.Load) {
		observe(b, l)
		told.tell(b)
	}
	s.poller.OnError = func(b *backends.Backend, err error) {
		m.CountPollError(b)
		s.missedPoll(b, err)
		told.tell(b)
	}
	f := s.fleet
	f.router, f.checker, f.poller, f.metrics, f.left = s.router, s.checker, s.poller, m, func(b *backends.Backend) {
		told.forget(b)
		s.firstChecks.note(b) // it is not waited for any more
		if s.snapshot != nil {
			s.snapshot.index.ForgetBackend(b)
		}
	}
}

// reset forgets what is believed of a backend, by an operator's word: also what a
// snapshot would give back to it.
func (s *service) reset(b *backends.Backend) router.ResetReport {
	if s.snapshot != nil {
		s.snapshot.index.ForgetBackend(b)
	}
	return s.router.ResetBackend(b)
}

// missedPoll makes of a scrape that failed what it is worth: one that was not
// answered in time may be the first sign of a replica that hangs.
func (s *service) missedPoll(b *backends.Backend, err error) {
	late := errors.Is(err, context.DeadlineExceeded)
	s.router.ScrapeFailed(b, late)
	if late {
		s.checker.RequestCheck(b)
	}
}
