package server

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"slices"
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

const (
	// joinTimeout bounds how long backends that are removed take requests until those
	// that are added with them are ready.
	joinTimeout = 5 * time.Second
	// pollInterval is how often the condition that a change waits for is checked.
	pollInterval = 10 * time.Millisecond
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

// prepareUpdate checks the backends of a configuration and changes nothing. apply, which cannot
// fail, makes the fleet theirs: new backends are added, missing ones drained and removed, and
// the settings of the others change. A backend is the same as long as its name and URL
// are. apply does not wait for backends to become ready or to be drained. It must not
// be called before start.
func (f *fleet) prepareUpdate(c *config.Config) (apply func(), err error) {
	managed, err := newManagedBackends(c)
	if err != nil {
		return nil, err
	}
	if err := backends.CheckConflicts(backendsOf(managed)); err != nil {
		return nil, err
	}
	return func() { f.update(managed, c.Timeouts.Shutdown) }, nil
}

// update makes the fleet the configured backends, of which those that are there already are kept.
func (f *fleet) update(configured []*managedBackend, drainTimeout time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var kept, added []*managedBackend
	changes := map[*managedBackend]*managedBackend{}
	for _, fresh := range configured {
		if at := slices.IndexFunc(f.managed, fresh.isSame); at >= 0 {
			kept = append(kept, f.managed[at])
			changes[f.managed[at]] = fresh
		} else {
			added = append(added, fresh)
		}
	}
	f.drainTimeout = drainTimeout
	for m, fresh := range changes {
		m.cancelPendingRemoval()
		m.updateSettings(fresh)
	}
	var removed []*managedBackend
	for _, m := range f.managed {
		if slices.Contains(kept, m) {
			continue
		}
		removed = append(removed, m)
		// One whose name or address another gets takes no more requests from now on.
		if slices.ContainsFunc(added, m.conflictsWith) || slices.ContainsFunc(kept, m.conflictsWith) {
			m.backend.Retire()
		}
	}
	f.addAndStartRemoval(added, removed)
}

// addAndStartRemoval adds backends and begins to remove others, unless that has begun. f.mu is held.
func (f *fleet) addAndStartRemoval(added, removed []*managedBackend) {
	for _, m := range added {
		f.registry.Add(m.backend)
		f.router.AddBackend(m.backend)
		m.added = time.Now()
		f.managed = append(f.managed, m)
		f.startMonitoring(m)
		f.log.Info("backend added", "backend", m.backend.Name)
	}
	for _, m := range removed {
		if f.running == nil || m.cancelRemoval != nil {
			continue
		}
		var ctx context.Context
		ctx, m.cancelRemoval = context.WithCancel(f.running)
		f.work.Go(func() {
			f.panics.RunLoop(ctx, recovery.Removal, func(ctx context.Context) { f.drainAndRemove(ctx, m) })
		})
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

// drainAndRemove waits for the requests of a backend and then removes it, unless ctx ends before:
// the configuration has it again.
func (f *fleet) drainAndRemove(ctx context.Context, m *managedBackend) {
	b := m.backend
	waitAtMost(ctx, joinTimeout, f.addedReadyOrTimedOut)
	end := f.retireUnlessDone(ctx, b)
	waitAtMost(ctx, time.Until(end), b.Idle)
	if f.removeManagedUnlessDone(ctx, m) {
		f.removeBackend(m, end)
	}
}

// retireUnlessDone retires a backend unless ctx is done. It returns when its last requests must have ended.
func (f *fleet) retireUnlessDone(ctx context.Context, b *backends.Backend) (end time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() == nil {
		b.Retire()
		f.log.Info("removing backend", "backend", b.Name, "in_flight", b.InFlight.Load(), "timeout", f.drainTimeout)
	}
	return time.Now().Add(f.drainTimeout)
}

// removeManagedUnlessDone removes m from the managed backends unless ctx is done, and reports whether it did.
func (f *fleet) removeManagedUnlessDone(ctx context.Context, m *managedBackend) (removed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	m.cancelRemoval()
	f.managed = slices.DeleteFunc(f.managed, func(other *managedBackend) bool { return other == m })
	return true
}

// addedReadyOrTimedOut reports whether every backend that was added is ready or had
// joinTimeout for it, also those of a later update than the one that waits.
func (f *fleet) addedReadyOrTimedOut() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !slices.ContainsFunc(f.managed, func(m *managedBackend) bool {
		return m.cancelRemoval == nil && m.backend.State() == backends.Down && time.Since(m.added) < joinTimeout
	})
}

// removeBackend removes all that there is of a backend. It waits for its requests, and aborts
// those in flight at the deadline.
func (f *fleet) removeBackend(m *managedBackend, deadline time.Time) {
	b := m.backend
	m.stopMonitoring()
	m.monitoring.Wait()
	f.router.RemoveBackend(b)
	// A request may have been sent to it at the moment in which it was retired;
	// from now on none can be.
	waitAtMost(context.Background(), time.Until(deadline), b.Idle)
	aborted := b.InFlight.Load() + b.NoEngineInFlight.Load()
	m.closeTransports()
	f.registry.Remove(b)
	if f.registry.Find(b.Name) == nil {
		f.metrics.DeleteBackend(b.Name)
	}
	f.onRemoved(b)
	f.log.Info("backend removed", "backend", b.Name, "aborted_requests", aborted)
}

// waitAtMost blocks until reached returns true, ctx is done, or it took too long.
func waitAtMost(ctx context.Context, timeout time.Duration, reached func() bool) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	waitUntil(ctx, pollInterval, reached)
}

// managedBackend is a backend with what runs for it.
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

// transportSettings are the settings that all transports share.
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

// isSame reports whether other is the same replica under the same name.
func (m *managedBackend) isSame(other *managedBackend) bool {
	return m.backend.Name == other.backend.Name && backends.NormalizeURL(m.backend.URL) == backends.NormalizeURL(other.backend.URL)
}

// conflictsWith reports whether the two cannot be there together.
func (m *managedBackend) conflictsWith(other *managedBackend) bool {
	return m.backend.Name == other.backend.Name || backends.NormalizeURL(m.backend.URL) == backends.NormalizeURL(other.backend.URL)
}

// cancelPendingRemoval keeps m if its removal is in progress.
func (m *managedBackend) cancelPendingRemoval() {
	if m.cancelRemoval != nil {
		m.cancelRemoval()
		m.cancelRemoval = nil
		m.backend.Unretire()
	}
}

// updateSettings gives m the settings of fresh, and its transports if they differ: requests in
// flight go on over those that they began with.
func (m *managedBackend) updateSettings(fresh *managedBackend) {
	used := m.backend.Options()
	m.transports = slices.DeleteFunc(m.transports, func(t *transport.Transport) bool {
		return t.OpenConns() == 0 && t != used.Transport && t != used.ProbeTransport
	})
	o := *fresh.backend.Options()
	if m.settings != fresh.settings || !equalTLS(m.tls, fresh.tls) {
		m.closeIdleConnections()
		m.transports = append(m.transports, fresh.transports...)
	} else {
		o.Transport, o.ProbeTransport = used.Transport, used.ProbeTransport
	}
	m.settings, m.tls = fresh.settings, fresh.tls
	m.backend.SetOptions(o)
}

// equalTLS compares results of config.Backend.TLSConfig.
func equalTLS(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.ServerName == b.ServerName && a.RootCAs.Equal(b.RootCAs)
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
