package server

import (
	"context"
	"crypto/tls"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
	"warmroute/recovery"
)

const (
	// joinTimeout bounds how long backends that are removed take requests until those
	// that are added with them are ready.
	joinTimeout = 5 * time.Second
	// pollInterval is how often the condition that a change waits for is checked.
	pollInterval = 10 * time.Millisecond
)

// prepareUpdate checks the backends of a configuration and changes nothing. apply, which cannot fail, makes the
// fleet theirs: new backends are added, missing ones drained and removed, and the settings of the others
// change. A backend is the same as long as its name and URL are. apply does not wait for backends to become
// ready or to be drained. It must not be called before start.
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
	// A request may have been sent to it at the moment in which it was retired; from now on none can be.
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
