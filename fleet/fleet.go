// Package fleet updates the list of backends when one of its sources changes: the configuration, a file, DNS and
// callers that register replicas. It adds, drains and removes backends without losing a request.
package fleet

import (
	"context"
	"log/slog"
	"slices"
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

// Options are what a Fleet is made of. All are required but Shared.
type Options struct {
	Initial   *Initial
	Router    *router.Router // has the backends of Initial
	Watches   Watches
	Metrics   *metrics.Metrics
	Log       *slog.Logger
	Panics    recovery.Reporter
	OnRemoved func(*backends.Backend)
	Shared    Store // of all proxies; nil: this proxy is the only one
}

// Fleet is the backends of a proxy, with the configuration, lookups and records from which they come. Safe for
// concurrent use.
type Fleet struct {
	Options
	registry *backends.Registry
	resolver *discovery.Resolver

	exchanges      []*storeExchange
	recordsChanged backends.Event

	mu           sync.Mutex      // guards what follows
	running      context.Context // of Start; nil: not started, or ending
	work         sync.WaitGroup  // of the goroutines
	config       *config.Config  // in use
	records      records
	changes      uint64 // how often records have changed
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
	records  records
	stored   []*storeExchange // state_file, from which records are
}

// NewInitial returns the backends of a configuration, in its order, and then those of its state file. It looks up
// names, which takes firstLookupTimeout at most; one that has no address yet is a backend that is down, or none if it
// was given as dns://. A panic in the lookup of one of several targets is reported to panics.
func NewInitial(ctx context.Context, c *config.Config, log *slog.Logger, panics recovery.Reporter) (*Initial, error) {
	in := &Initial{config: c, resolver: discovery.NewResolver(c.DNS.Server, panics)}
	if c.StateFile != "" {
		e := newStoreExchange(newStateFile(c.StateFile, log), c.StateFile, true)
		e.exchange(ctx, log, in.mergeStored)
		in.stored = append(in.stored, e)
	}
	members := slices.Concat(c.Backends, in.records.backends())
	in.names = updateNames(members, c.DNS.MaxAddresses, nil)
	lookUpNamesOnce(ctx, in.names, in.resolver, log, nil)
	var err error
	for _, w := range wantedBackends(members, statesOf(in.names), func(string) bool { return false }) {
		m, buildErr := newManagedBackend(w, c, in.resolver)
		if buildErr != nil {
			return nil, buildErr
		}
		in.managed = append(in.managed, m)
	}
	in.Registry, err = backends.NewRegistry(backendsOf(in.managed))
	return in, err
}

// mergeStored applies the records of the state file, and returns the changes to write to it.
func (in *Initial) mergeStored(c *storedCopy) (write map[string][]byte, remove []string, err error) {
	_, write, remove, err = in.records.mergeStored(c, time.Now())
	return write, remove, err
}

// New returns the fleet of a configuration. Nothing runs until Start.
func New(o Options) *Fleet {
	f := &Fleet{
		Options: o, registry: o.Initial.Registry, resolver: o.Initial.resolver, config: o.Initial.config,
		managed: o.Initial.managed, names: o.Initial.names, drainTimeout: o.Initial.config.Timeouts.Shutdown,
		records: o.Initial.records, exchanges: o.Initial.stored,
	}
	if o.Shared != nil {
		f.exchanges = append(f.exchanges, newStoreExchange(o.Shared, "redis", false))
	}
	for _, m := range f.managed {
		f.drainIfRecorded(m.backend)
	}
	return f
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
	f.startExchanges()
	f.work.Go(func() { f.Panics.RunLoop(ctx, recovery.Removal, f.removeDownRepeatedly) })
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
