// Package server runs one proxy built from a configuration: its listeners and their TLS, the backends, reloads,
// the binary upgrade to another process, the drain and the shutdown.
package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	"warmroute/admin"
	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/cluster"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/kvevents"
	"warmroute/metrics"
	"warmroute/proxy"
	"warmroute/proxy/accesslog"
	"warmroute/proxy/apikey"
	"warmroute/proxy/recorder"
	"warmroute/proxy/tracing"
	"warmroute/recovery"
	"warmroute/registration"
	"warmroute/router"
	"warmroute/router/decide"
	"warmroute/router/policy"
	"warmroute/router/responseindex"
	"warmroute/router/snapshot"
	"warmroute/usage"
)

// Options are what a Server is made of. Config and Log are required.
type Options struct {
	Config   *config.Config
	Policies policy.Registry // those of its config.Loader
	Log      *slog.Logger
	Version  string

	process process // zero: it has no reloads and no binary upgrades
}

// process is what connects a Server to the process whose job it is.
type process struct {
	logLevel  *slog.LevelVar   // set by a reload
	watcher   *configWatcher   // nil: the configuration is not reloaded
	reloads   <-chan os.Signal // ask for a reload
	upgrades  <-chan os.Signal // ask for a binary upgrade
	program   string           // path of the program that a binary upgrade starts
	inherited *inherited       // sockets from systemd or a predecessor; never nil in a Server
}

// Server is one proxy with everything that runs for it.
type Server struct {
	log      *slog.Logger
	policies policy.Registry
	process  process
	started  *config.Config // as of New
	config   *config.Config // in use; replaced by a reload
	instance string         // random ID of this proxy; the same after a binary upgrade

	listeners    *listeners
	proxy        *proxy.Proxy          // serves what registration does not
	registration *registration.Handler // serves the public listener
	admin        *admin.Handler        // serves the admin listener
	keys         *apikey.Set
	usage        *usage.Table
	panics       recovery.Reporter
	accessLog    *accesslog.Log
	tracer       *tracing.Tracer // nil: requests are not traced

	registry      *backends.Registry
	fleet         *fleet.Fleet
	checker       *backends.Checker
	poller        *backends.Poller
	kvEvents      *kvevents.Reader
	router        *router.Router
	responses     *responseindex.Index
	snapshots     *snapshot.Store  // nil: none are read or written
	cluster       *cluster.Cluster // nil: this proxy is the only one
	metrics       *metrics.Metrics
	startupChecks *startupChecks
	hookCaller    *hookCaller
	resources     *resourceLog
	files         stateFiles

	mu                sync.Mutex // guards what follows, and config while Run's event loop runs
	modelWarnings     modelWarnings
	replicas          int    // of the fleet, as of the last applyFleetSize
	warnedDescriptors uint64 // that the last warning about their number named; 0: none
}

// New returns a Server whose listeners are open; Run serves them. It fails if a
// listener, or a file that the server writes, cannot be opened.
func New(o Options) (*Server, error) {
	c := o.Config
	if o.process.inherited == nil {
		o.process.inherited = &inherited{}
	}
	hasPredecessor := o.process.inherited.ready != nil
	s := &Server{
		log: o.Log, policies: o.Policies, process: o.process, started: c, config: c,
		instance: cmp.Or(o.process.inherited.Instance, rand.Text()),
		keys:     apikey.New(c.APIKeys()), resources: newResourceLog(o.Log),
	}
	s.panics = s.reportPanic
	peers := newPeerReporters(c)
	s.responses = responseindex.New(c.Responses, time.Now, peers.responses)
	initial, err := fleet.NewInitial(context.Background(), c, o.Log, s.panics)
	if err != nil {
		return nil, err
	}
	registry := initial.Registry
	s.registry = registry
	if s.router, err = router.New(router.Options{
		Settings:      c.RouterSettings(),
		Policies:      o.Policies,
		Backends:      registry.All(),
		Catalog:       registry.Catalog,
		Reporter:      peers.placements,
		BlockBytes:    c.Index.BlockBytes,
		IndexMaxBytes: c.Index.MaxBytes,
		Now:           time.Now,
		Rand:          mathrand.NewPCG(mathrand.Uint64(), mathrand.Uint64()),
		OnPanic:       func(cause any, stack []byte) { s.reportPanic(recovery.Dispatch, cause, stack) },
		OnPairAvoided: func(pair decide.Pair, failures int, duration time.Duration) {
			s.log.Warn("transfers of KV keep failing, pair avoided", "prefill", pair.Prefill.Name, "decode", pair.Decode.Name, "failures", failures,
				"for", duration)
		},
		OnCacheReset: func(b *backends.Backend) {
			s.log.Info("prefix cache reset", "backend", b.Name, "reason", "the replica no longer has tokens that it had cached")
		},
	}); err != nil {
		return nil, err
	}
	s.metrics = metrics.New(registry, s.router, o.Version)
	s.snapshots = newSnapshotStore(c, s.router, s.responses, o.Log)
	if err = s.openCluster(peers.outbox, registry); err != nil {
		return nil, fmt.Errorf("redis.url: %w", err)
	}
	if c.Index.Snapshot != "" {
		if s.files.snapshot, err = newSnapshotFile(c.Index.Snapshot, s.snapshots, o.Log, !hasPredecessor); err != nil {
			return nil, fmt.Errorf("index.snapshot: %w", err)
		}
	}
	if c.Recording.File != "" || c.Recording.Memory > 0 {
		if s.files.recorder, err = newRecorder(c, s.metrics, o.Log, hasPredecessor); err != nil {
			return nil, fmt.Errorf("recording.file: %w", err)
		}
	}
	if s.usage, err = usage.New(c.Usage, hasPredecessor); err != nil {
		return nil, fmt.Errorf("usage.file: %w", err)
	}
	if s.accessLog, err = accesslog.New(c.AccessLog, o.Log); err != nil {
		return nil, fmt.Errorf("access_log.file: %w", err)
	}
	s.metrics.RegisterStoredResponses(s.responses.Len)
	s.metrics.RegisterDroppedLogLines(s.accessLog.DroppedLines)
	if s.tracer, err = tracing.New(o.Version, o.Log); err != nil {
		// The variables may be shared by all services of a host: serve all the same.
		o.Log.Warn("requests are not traced", "err", err)
	}
	if s.tracer != nil {
		s.metrics.RegisterTraceSpans(s.tracer.SentSpans, s.tracer.FailedSpans, s.tracer.DroppedSpans)
	}
	s.startupChecks = newStartupChecks(registry.All())
	if s.listeners, err = s.openListeners(); err != nil {
		return nil, err
	}
	s.fleet = s.newFleet(initial)
	s.hookCaller = newHookCaller(s.router, registry, o.Log, s.panics, c.StartHooks)
	s.proxy = proxy.New(proxy.Options{
		Registry: registry,
		Router:   s.router,
		Metrics:  s.metrics,
		Log:      o.Log,
		Version:  o.Version,
		Instance: s.instance,
		RecheckHealth: func(b *backends.Backend) {
			b.RequestCheck()
			b.RequestPoll()
		},
		OutOfDescriptors: s.handleOutOfDescriptors,
		Panics:           s.panics,
		BlockBytes:       c.Index.BlockBytes,
		Recorder:         s.files.recorder,
		AccessLog:        s.accessLog,
		Tracer:           s.tracer,
		Keys:             s.keys,
		Usage:            s.usage,
		Responses:        s.responses,
		Settings:         c.ProxySettings(fileDescriptorLimit(), s.countReplicas()),
	})
	controller := &control.Controller{StateChanged: s.router.BackendStateChanged, CacheReset: s.recordCacheReset, Panics: s.panics}
	s.registration = registration.New(registration.Options{
		Next: s.proxy, Fleet: s.fleet, Registry: registry, Control: controller, Metrics: s.metrics, Log: o.Log,
	}, c)
	host, _, _ := net.SplitHostPort(c.Admin) // validated with the configuration
	s.admin = admin.New(admin.Options{
		Registry: registry, Router: s.router, Proxy: s.proxy, Reset: s.resetBackend,
		Control: controller,
		Fleet:   s.fleet, Cluster: s.clusterStatus(), Usage: s.usage, Recorder: s.files.recorder, Metrics: s.metrics.Handler(),
		Version: o.Version, Log: o.Log, Host: host, Token: c.AdminToken,
	})
	s.warnIfMoreDescriptorsNeeded(c)
	return s, nil
}

// clusterStatus returns the function that returns the state of the cluster; nil: there is no cluster.
func (s *Server) clusterStatus() func() cluster.Status {
	if s.cluster == nil {
		return nil
	}
	return s.cluster.Status
}

func (s *Server) reportPanic(place recovery.Place, cause any, stack []byte) {
	s.log.Error("panic recovered", "where", place, "panic", cause, "stack", string(stack))
	s.metrics.CountPanic(place)
}

// Addr returns the address of the public listener.
func (s *Server) Addr() net.Addr { return s.listeners.public.socket.Addr() }

// AdminAddr returns the address of the admin listener, nil if there is none.
func (s *Server) AdminAddr() net.Addr {
	if s.listeners.admin == nil {
		return nil
	}
	return s.listeners.admin.socket.Addr()
}

// newFleet returns the fleet with the health checker and the poller that keep its state up to date.
func (s *Server) newFleet(initial *fleet.Initial) *fleet.Fleet {
	progress := newProgressLog(s.router, s.log)
	replaced := func(b *backends.Backend, _ string) {
		b.ForgetReportsCached() // the next process may be another version
		s.router.ForgetCache(b)
	}
	s.checker = &backends.Checker{
		Logger:   s.log,
		Instance: s.instance,
		OnState: func(b *backends.Backend, _ backends.State, _ string) {
			s.router.BackendStateChanged(b)
			s.startupChecks.removePending(b)
		},
		OnHung:             s.router.ChecksTimedOut,
		OnCacheLost:        replaced,
		OnOutOfDescriptors: s.handleOutOfDescriptors,
	}
	observe := s.router.ObserveLoad
	if s.snapshots != nil {
		observe = s.snapshots.ObserveLoad
	}
	s.poller = &backends.Poller{
		Logger: s.log,
		OnPoll: func(ctx context.Context, b *backends.Backend, l *backends.Load) { s.fleet.UpdateRanks(ctx, b, l) },
		OnLoad: func(b *backends.Backend, l *backends.Load) {
			observe(b, l)
			progress.logChange(b)
		},
		IsExpected:  s.router.IsLoadExpected,
		OnCacheLost: replaced,
		OnError: func(b *backends.Backend, err error) {
			s.metrics.CountPollError(b)
			timedOut := errors.Is(err, context.DeadlineExceeded)
			s.router.PollFailed(b, timedOut)
			if timedOut { // it may hang
				b.RequestCheck()
			}
			progress.logChange(b)
		},
		OnOutOfDescriptors: s.handleOutOfDescriptors,
	}
	s.checker.SetSettings(s.config.Health)
	s.poller.SetSettings(s.config.Poll)
	s.kvEvents = kvevents.NewReader(s.registry, s.router, s.log, s.panics, s.listeners.kvEvents)
	s.metrics.Register(s.kvEvents)
	var shared fleet.Store
	if s.cluster != nil {
		shared = s.cluster.Records()
	}
	return fleet.New(fleet.Options{
		Initial: initial, Shared: shared, Router: s.router, Metrics: s.metrics, Log: s.log, Panics: s.panics,
		Watches: fleet.Watches{recovery.HealthCheck: s.checker.Watch, recovery.Poll: s.poller.Watch, recovery.KVEvents: s.kvEvents.Watch},
		OnRemoved: func(b *backends.Backend) {
			progress.forget(b)
			s.startupChecks.removePending(b)
			if s.snapshots != nil {
				s.snapshots.ForgetBackend(b)
			}
		},
	})
}

// handleOutOfDescriptors logs that a connection to a backend could not be made for lack of a file
// descriptor, and frees one, if there is an idle client connection, for the next try.
func (s *Server) handleOutOfDescriptors(err error) {
	s.resources.logOutOfDescriptors(err)
	s.proxy.EvictIdleConnection()
}

// resetBackend forgets what is assumed of a backend, or of each of its ranks, and what a snapshot would restore. The
// report has the blocks of all, and the rest of the first.
func (s *Server) resetBackend(b *backends.Backend) (report router.ResetReport) {
	for i, part := range b.Parts() {
		if s.snapshots != nil {
			s.snapshots.ForgetBackend(part)
		}
		was := s.router.ResetBackend(part)
		if i > 0 {
			was.Blocks += report.Blocks
			was.Breaker, was.Estimates = report.Breaker, report.Estimates
		}
		report = was
	}
	return report
}

// recordCacheReset forgets what a backend held, and what a snapshot would restore of it.
func (s *Server) recordCacheReset(b *backends.Backend) {
	if s.snapshots != nil {
		s.snapshots.ForgetBackend(b)
	}
	s.router.RecordCacheReset(b)
}

func newRecorder(c *config.Config, m *metrics.Metrics, log *slog.Logger, hasPredecessor bool) (*recorder.Recorder, error) {
	return recorder.New(recorder.Options{
		Settings:   c.Recording,
		BlockBytes: c.Index.BlockBytes,
		Log:        log,
		Dropped:    m.CountDroppedRequest,
		Wait:       hasPredecessor,
	})
}
