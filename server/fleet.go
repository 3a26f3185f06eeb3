package server

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/kvevents"
	"warmroute/metrics"
	"warmroute/recovery"
	"warmroute/router"
)

// fleet keeps the running backends in step with those of the configuration, without
// losing a request. Safe for concurrent use.
type fleet struct {
	registry  *backends.Registry
	router    *router.Router
	checker   *backends.Checker
	poller    *backends.Poller
	kvEvents  *kvevents.Reader
	metrics   *metrics.Metrics
	log       *slog.Logger
	panics    recovery.Reporter
	onRemoved func(*backends.Backend)

	mu           sync.Mutex      // guards what follows
	running      context.Context // of start; nil: not started, or ending
	work         sync.WaitGroup  // of the goroutines
	managed      []*managedBackend
	drainTimeout time.Duration // for the last requests of a backend that is removed
}

// newManagedBackends returns the backends of a configuration, in its order. Nothing runs for them.
func newManagedBackends(c *config.Config) (managed []*managedBackend, err error) {
	for _, b := range c.Backends {
		m, err := newManagedBackend(b, transportSettingsOf(c))
		if err != nil {
			return nil, err
		}
		managed = append(managed, m)
	}
	return managed, nil
}

func backendsOf(managed []*managedBackend) []*backends.Backend {
	list := make([]*backends.Backend, len(managed))
	for i, m := range managed {
		list[i] = m.backend
	}
	return list
}

// start begins to check and poll the backends, until ctx is done. It returns a function
// that waits for that, and for the end of everything that the fleet does then.
func (f *fleet) start(ctx context.Context) (waitStopped func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running = ctx
	for _, m := range f.managed {
		f.startMonitoring(m)
	}
	return func() {
		<-ctx.Done()
		f.mu.Lock()
		f.running = nil // an update starts goroutines before this or not at all
		f.mu.Unlock()
		f.work.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, m := range f.managed {
			m.closeIdleConnections()
		}
	}
}

// startMonitoring starts the goroutines that check and poll a backend until it is removed. f.mu is held.
func (f *fleet) startMonitoring(m *managedBackend) {
	if f.running == nil {
		return
	}
	ctx, stop := context.WithCancel(f.running)
	m.stopMonitoring = stop
	for place, watch := range map[recovery.Place]func(context.Context, *backends.Backend){
		recovery.HealthCheck: f.checker.Watch, recovery.Poll: f.poller.Watch, recovery.KVEvents: f.kvEvents.Watch,
	} {
		m.monitoring.Add(1)
		f.work.Go(func() {
			defer m.monitoring.Done()
			f.panics.RunLoop(ctx, place, func(ctx context.Context) { watch(ctx, m.backend) })
		})
	}
}

type managedBackend struct {
	backend    *backends.Backend
	settings   transportSettings
	tls        *tls.Config            // nil: the defaults
	transports []*transport.Transport // the two in use, and before them others with requests in flight

	added          time.Time          // zero: at the start
	cancelRemoval  context.CancelFunc // nil: it is not being removed
	stopMonitoring context.CancelFunc
	monitoring     sync.WaitGroup
}

type transportSettings struct {
	connectTimeout, idleTimeout time.Duration
	maxConns                    int // to one backend, for requests
}

func transportSettingsOf(c *config.Config) transportSettings {
	return transportSettings{c.Timeouts.Connect, c.Timeouts.KeepaliveIdle, c.Connections.MaxPerBackend}
}

func newManagedBackend(c config.Backend, s transportSettings) (*managedBackend, error) {
	u, err := backends.ParseURL(c.URL)
	if err != nil {
		return nil, fmt.Errorf("backend %s: %w", c.Name, err)
	}
	tlsConfig, err := c.TLSConfig()
	if err != nil {
		return nil, fmt.Errorf("backend %s: certificate: %w", c.Name, err)
	}
	requests := transport.New(transport.Options{
		URL: u, TLS: tlsConfig, ConnectTimeout: s.connectTimeout, IdleTimeout: s.idleTimeout, MaxConns: s.maxConns,
	})
	probes := transport.New(transport.Options{URL: u, TLS: tlsConfig, ConnectTimeout: s.connectTimeout, IdleTimeout: s.idleTimeout})
	b := backends.New(c.Name, u, c.APIKey, requests)
	b.SetOptions(backends.Options{
		APIKey: c.APIKey, EnginePriority: c.EnginePriority, MaxInFlight: c.MaxInFlight, Weight: c.Weight,
		KVEvents: c.KVEvents, KVReplay: c.KVReplay,
		Transport: requests, ProbeTransport: probes,
	})
	return &managedBackend{backend: b, settings: s, tls: tlsConfig, transports: []*transport.Transport{requests, probes}}, nil
}

func (m *managedBackend) closeIdleConnections() {
	for _, t := range m.transports {
		t.CloseIdleConnections()
	}
}

// closeTransports aborts the requests in flight.
func (m *managedBackend) closeTransports() {
	for _, t := range m.transports {
		t.Close()
	}
}
