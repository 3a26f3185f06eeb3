// Package fleet keeps the backends in step with what names them: the configuration, a file, DNS and
// callers that register replicas. It adds, drains and removes backends without losing a request.
package fleet

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/fleet/discovery"
	"warmroute/metrics"
	"warmroute/recovery"
	"warmroute/router"
)

// Watches are what runs for each backend while it is in the fleet: health checks, polls, KV events.
type Watches map[recovery.Place]func(context.Context, *backends.Backend)

// Options are what a Fleet is made of. All are required.
type Options struct {
	Initial   *Initial
	Router    *router.Router // has the backends of Initial
	Watches   Watches
	Metrics   *metrics.Metrics
	Log       *slog.Logger
	Panics    recovery.Reporter
	OnRemoved func(*backends.Backend)
}

// Fleet is the backends of a proxy and what names them. Safe for concurrent use.
type Fleet struct {
	Options
	registry *backends.Registry
	resolver *discovery.Resolver

	mu           sync.Mutex      // guards what follows
	running      context.Context // of Start; nil: not started, or ending
	work         sync.WaitGroup  // of the goroutines
	config       *config.Config  // in use
	registered   registered
	reloadError  string // of the last reload; empty: it was applied
	managed      []*managedBackend
	names        map[discovery.Name]*lookedUpName
	drainTimeout time.Duration // for the last requests of a backend that is removed
}

// Initial are the backends of a configuration before anything runs for them.
type Initial struct {
	Registry *backends.Registry

	config   *config.Config
	resolver *discovery.Resolver
	managed  []*managedBackend
	names    map[discovery.Name]*lookedUpName
}

// NewInitial returns the backends of a configuration, in its order. It looks up names, which takes
// firstLookupTimeout at most; one that has no address yet is a backend that is down, or none if it
// was given as dns://.
func NewInitial(ctx context.Context, c *config.Config, log *slog.Logger) (*Initial, error) {
	in := &Initial{config: c, resolver: discovery.NewResolver(c.DNS.Server), names: updateNames(c.Backends, c.DNS.MaxAddresses, nil)}
	lookUpNamesOnce(ctx, in.names, in.resolver, log)
	var err error
	for _, w := range wantedBackends(c.Backends, statesOf(in.names), func(string) bool { return false }) {
		m, buildErr := newManagedBackend(w, c, in.resolver)
		if buildErr != nil {
			return nil, buildErr
		}
		in.managed = append(in.managed, m)
	}
	in.Registry, err = backends.NewRegistry(backendsOf(in.managed))
	return in, err
}

// New returns the fleet of a configuration. Nothing runs until Start.
func New(o Options) *Fleet {
	return &Fleet{
		Options: o, registry: o.Initial.Registry, resolver: o.Initial.resolver, config: o.Initial.config,
		managed: o.Initial.managed, names: o.Initial.names, drainTimeout: o.Initial.config.Timeouts.Shutdown,
	}
}

func backendsOf(managed []*managedBackend) []*backends.Backend {
	list := make([]*backends.Backend, len(managed))
	for i, m := range managed {
		list[i] = m.backend
	}
	return list
}

// Start begins to watch the backends and to look up names, until ctx is done. It returns a function
// that waits for that, and for the end of everything that the fleet does then.
func (f *Fleet) Start(ctx context.Context) (waitStopped func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running = ctx
	for _, m := range f.managed {
		f.startWatches(m)
	}
	f.startLookups()
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

// startWatches starts the goroutines that watch a backend until it is removed. f.mu is held.
func (f *Fleet) startWatches(m *managedBackend) {
	if f.running == nil {
		return
	}
	ctx, stop := context.WithCancel(f.running)
	m.stopWatches = stop
	for place, watch := range f.Watches {
		m.watches.Add(1)
		f.work.Go(func() {
			defer m.watches.Done()
			f.Panics.RunLoop(ctx, place, func(ctx context.Context) { watch(ctx, m.backend) })
		})
	}
}
