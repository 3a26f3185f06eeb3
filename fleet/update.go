package fleet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/config"
	"warmroute/fleet/discovery"
	"warmroute/recovery"
)

const (
	// joinTimeout bounds how long backends that are removed take requests until those
	// that are added with them are ready.
	joinTimeout = 5 * time.Second
	// pollInterval is how often the condition that a change waits for is checked.
	pollInterval = 10 * time.Millisecond
)

// PrepareConfig checks the backends of a configuration and looks up their new names, which takes
// firstLookupTimeout at most. It changes nothing. apply, which cannot fail, changes the fleet to
// them: new backends are added, missing ones drained and removed, and the settings of the others change. A backend is the
// same as long as its name and address are. apply does not wait for backends to become ready or to be drained.
// It must not be called before Start.
func (f *Fleet) PrepareConfig(ctx context.Context, c *config.Config) (apply func(), err error) {
	if err := checkBackends(c.Backends); err != nil {
		return nil, err
	}
	added := f.lookUpNewNames(ctx, c.Backends)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.config, f.drainTimeout = c, c.Timeouts.Shutdown
		f.addNames(added)
		f.reconcile()
	}, nil
}

// checkBackends returns an error if a backend is invalid, or conflicts with another one.
func checkBackends(list []config.Backend) error {
	var parsed []*backends.Backend
	for _, b := range list {
		u, err := b.ParseURL()
		if err != nil {
			return fmt.Errorf("backend %s: %w", b.Name, err)
		}
		if _, err := b.TLSConfig(); err != nil {
			return fmt.Errorf("backend %s: certificate: %w", b.Name, err)
		}
		parsed = append(parsed, backends.New(b.Name, u, "", nil))
	}
	return backends.CheckConflicts(parsed)
}

// lookUpNewNames looks up the names of members that the fleet does not look up yet, which takes firstLookupTimeout at
// most, and returns them.
func (f *Fleet) lookUpNewNames(ctx context.Context, members []config.Backend) map[discovery.Name]*lookedUpName {
	names := f.newNames(members)
	lookUpNamesOnce(ctx, names, f.resolver, f.Log, f.Panics)
	return names
}

// newNames returns the names of members that the fleet does not look up yet.
func (f *Fleet) newNames(members []config.Backend) map[discovery.Name]*lookedUpName {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := updateNames(members, f.config.DNS.MaxAddresses, f.names)
	maps.DeleteFunc(names, func(n discovery.Name, _ *lookedUpName) bool { return f.names[n] != nil })
	return names
}

// addNames adds names unless the fleet has got them meanwhile. f.mu is held.
func (f *Fleet) addNames(names map[discovery.Name]*lookedUpName) {
	for n, name := range names {
		if f.names[n] == nil {
			f.names[n] = name
		}
	}
}

// reconcile changes the fleet to the backends that its members stand for. f.mu is held.
func (f *Fleet) reconcile() {
	members := f.members()
	names := updateNames(members, f.config.DNS.MaxAddresses, f.names)
	for n, name := range f.names {
		if names[n] == nil && name.stop != nil {
			name.stop()
		}
	}
	for _, name := range names {
		name.addresses.SetMaxAddresses(f.config.DNS.MaxAddresses)
	}
	f.names = names
	f.startLookups()
	var fresh []*managedBackend
	for _, w := range wantedBackends(members, statesOf(names), f.keepsAddress) {
		m, err := newManagedBackend(w, f.config, f.resolver)
		if err != nil { // members are checked before
			f.Log.Error("backend not added", "backend", w.Name, "err", err)
			continue
		}
		fresh = append(fresh, m)
	}
	f.update(fresh)
}

// members returns the entries of the configuration and its file, and the registered replicas. f.mu is held.
func (f *Fleet) members() []config.Backend {
	return slices.Concat(f.config.Backends, f.records.backends())
}

// keepsAddress reports whether the backend at an address stays although its name has no address: it passes
// its checks. f.mu is held.
func (f *Fleet) keepsAddress(address string) bool {
	return slices.ContainsFunc(f.managed, func(m *managedBackend) bool {
		return m.cancelRemoval == nil && m.backend.Address() == address && m.backend.State() != backends.Down
	})
}

// update changes the fleet to the wanted backends. It keeps those that it has already. f.mu is held.
func (f *Fleet) update(wanted []*managedBackend) {
	var kept, added []*managedBackend
	changes := map[*managedBackend]*managedBackend{}
	for _, fresh := range wanted {
		if at := slices.IndexFunc(f.managed, fresh.isSame); at >= 0 {
			kept = append(kept, f.managed[at])
			changes[f.managed[at]] = fresh
		} else {
			added = append(added, fresh)
		}
	}
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
		// A backend whose name or address another one gets receives no more requests from now on.
		if slices.ContainsFunc(added, m.conflictsWith) || slices.ContainsFunc(kept, m.conflictsWith) {
			m.backend.Retire()
		}
		if at := slices.IndexFunc(added, m.isReplacedBy); at >= 0 {
			f.takeOverState(added[at], m)
		}
	}
	f.addAndStartRemoval(added, removed)
}

// takeOverState has m drained and suspended as the backend is that it replaces: the replica is the same. f.mu is held.
func (f *Fleet) takeOverState(m, replaced *managedBackend) {
	if replaced.backend.Drained() {
		f.setDrained(m.backend, true)
	}
	if s := replaced.backend.Suspension(); s == backends.Paused || s == backends.Asleep {
		m.backend.SetSuspension(s)
	}
}

// addAndStartRemoval adds backends and begins to remove others, unless that has begun. f.mu is held.
func (f *Fleet) addAndStartRemoval(added, removed []*managedBackend) {
	for _, m := range added {
		f.drainIfRecorded(m.backend)
		f.registry.Add(m.backend)
		f.Router.AddBackend(m.backend)
		m.added = time.Now()
		f.managed = append(f.managed, m)
		f.startWatches(m)
		f.Log.Info("backend added", "backend", m.backend.Name)
	}
	for _, m := range removed {
		if f.running == nil || m.cancelRemoval != nil {
			continue
		}
		var ctx context.Context
		ctx, m.cancelRemoval = context.WithCancel(f.running)
		f.work.Go(func() {
			f.Panics.RunLoop(ctx, recovery.Removal, func(ctx context.Context) { f.drainAndRemove(ctx, m) })
		})
	}
}

// drainAndRemove waits for the requests of a backend and then removes it, unless ctx ends before:
// the configuration has it again.
func (f *Fleet) drainAndRemove(ctx context.Context, m *managedBackend) {
	waitAtMost(ctx, joinTimeout, f.addedReadyOrTimedOut)
	end := f.retireUnlessDone(ctx, m)
	waitAtMost(ctx, time.Until(end), func() bool { return f.isIdle(m) })
	if f.removeManagedUnlessDone(ctx, m) {
		f.removeBackend(m, end)
	}
}

// isIdle is managedBackend.isIdle for one whose ranks may change.
func (f *Fleet) isIdle(m *managedBackend) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return m.isIdle()
}

// retireUnlessDone retires a backend unless ctx is done. It returns when its last requests must have ended.
func (f *Fleet) retireUnlessDone(ctx context.Context, m *managedBackend) (end time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() == nil {
		m.backend.Retire()
		f.Log.Info("removing backend", "backend", m.backend.Name, "in_flight", m.countInFlight(), "timeout", f.drainTimeout)
	}
	return time.Now().Add(f.drainTimeout)
}

// removeManagedUnlessDone removes m from the managed backends unless ctx is done, and reports whether it did.
func (f *Fleet) removeManagedUnlessDone(ctx context.Context, m *managedBackend) (removed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	m.cancelRemoval()
	f.managed = slices.DeleteFunc(f.managed, func(other *managedBackend) bool { return other == m })
	if !slices.ContainsFunc(f.managed, func(other *managedBackend) bool { return other.backend.Name == m.backend.Name }) {
		f.forgetDrain(m.backend.Name)
	}
	return true
}

// addedReadyOrTimedOut reports whether every backend that was added is ready or had
// joinTimeout for it, also those of a later update than the one that waits.
func (f *Fleet) addedReadyOrTimedOut() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !slices.ContainsFunc(f.managed, func(m *managedBackend) bool {
		return m.cancelRemoval == nil && m.backend.State() == backends.Down && time.Since(m.added) < joinTimeout
	})
}

// removeBackend removes all that there is of a backend. It waits for its requests, and ends
// those in flight at the deadline.
func (f *Fleet) removeBackend(m *managedBackend, deadline time.Time) {
	b := m.backend
	m.stopWatches()
	m.watches.Wait()
	parts := b.WithParts() // which nothing changes any more
	for _, part := range parts {
		f.Router.RemoveBackend(part)
	}
	// A request may have been sent to it at the moment in which it was retired; from now on none can be.
	waitAtMost(context.Background(), time.Until(deadline), m.isIdle)
	unfinished := m.countInFlight()
	m.closeTransports()
	for _, part := range parts {
		f.registry.Remove(part)
	}
	for _, part := range parts {
		if f.registry.Find(part.Name) == nil {
			f.Metrics.DeleteBackend(part.Name)
		}
		f.OnRemoved(part)
	}
	f.Log.Info("backend removed", "backend", b.Name, "unfinished_requests", unfinished)
}

// waitAtMost blocks until reached returns true, ctx is done, or it took too long.
func waitAtMost(ctx context.Context, timeout time.Duration, reached func() bool) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	clock.WaitUntil(ctx, pollInterval, reached)
}

// SetReloadError records why the last reload was not applied; nil: it was.
func (f *Fleet) SetReloadError(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reloadError = ""
	if err != nil {
		f.reloadError = config.ErrorLines(err)[0]
	}
}

// ReloadError returns why the last reload was not applied; "": it was.
func (f *Fleet) ReloadError() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reloadError
}
