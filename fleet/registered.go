package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"warmroute/backends"
	"warmroute/clock"
	"warmroute/config"
)

// Registration is a replica that a caller registered or an operator added.
type Registration struct {
	Backend  config.Backend
	GivenURL string // as the caller wrote it
	By       string // the caller's address
	At       time.Time
	Operator bool // added by an operator: callers that register replicas cannot remove it
}

// ID returns what names the registration in paths: the name of its backend.
func (r *Registration) ID() string { return r.Backend.Name }

// Address returns the backends.Backend.Address of the replica.
func (r *Registration) Address() string {
	u, err := r.Backend.ParseURL()
	if err != nil || r.Backend.HasDNSScheme() {
		return ""
	}
	return backends.NormalizeURL(u)
}

// matches reports whether a caller means r by its name, its URL as given, or another way to write that.
func (r *Registration) matches(nameOrURL string) bool {
	if nameOrURL == r.Backend.Name || nameOrURL == r.GivenURL {
		return true
	}
	u, err := backends.ParseURL(nameOrURL)
	return err == nil && backends.NormalizeURL(u) == r.Address()
}

// ErrNotRegistered is the error of Remove for what the fleet does not have.
var ErrNotRegistered = errors.New("not in the fleet")

// Add adds a replica to the fleet, or changes the settings of one that was added before under its name.
// For a URL that the fleet has already, added is false and name is that of its backend. Add
// does not wait until the replica is ready, but looks up its name, which takes firstLookupTimeout at most.
func (f *Fleet) Add(ctx context.Context, r Registration) (name string, added bool, err error) {
	names := f.lookUpNewNames(ctx, []config.Backend{r.Backend})
	f.mu.Lock()
	defer f.mu.Unlock()
	r.Backend.Source = backends.FromRegistration
	u, err := r.Backend.ParseURL()
	if err != nil {
		return "", false, err
	}
	for _, m := range f.members() {
		other, err := m.ParseURL()
		sameURL := err == nil && backends.NormalizeURL(other) == backends.NormalizeURL(u)
		switch {
		case sameURL && (m.Source != backends.FromRegistration || m.Name != r.Backend.Name):
			return m.Name, false, nil
		case !sameURL && m.Name == r.Backend.Name:
			return "", false, fmt.Errorf("the name %q is that of %s; give the replica another name", m.Name, m.URL)
		}
	}
	known := f.records.findRegistration(r.Backend.Name)
	if known != nil && known.Operator && !r.Operator {
		return r.Backend.Name, false, nil
	}
	added = known == nil
	if added && len(f.records.registrations()) >= maxRegistered {
		return "", false, fmt.Errorf("%d replicas are registered, which is the maximum; remove some", maxRegistered)
	}
	f.records.change(replicaKey(r.Backend.Name), record{replica: r}, r.At)
	f.notifyChange()
	f.addNames(names)
	f.reconcile()
	return r.Backend.Name, added, nil
}

// Remove removes a replica that was added, by its name or URL: it gets no new requests, and is removed when its
// last ones have ended. It returns the name. A backend of the configuration or the file, or an operator's unless
// operator is set, is an error that says where to remove it.
func (f *Fleet) Remove(nameOrURL string, operator bool) (name string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.records.findRegistration(nameOrURL); r != nil {
		if r.Operator && !operator {
			return "", fmt.Errorf("backend %s was added by an operator; remove it with warmroute backends remove", r.Backend.Name)
		}
		f.removeRegistered(r.Backend.Name)
		return r.Backend.Name, nil
	}
	for _, m := range f.config.Backends {
		if m.URL != nameOrURL && !IsNameOfMember(nameOrURL, m.Name) {
			continue
		}
		where := "the configuration or the command line"
		if m.Source == backends.FromFile {
			where = f.config.BackendsFile
		}
		return "", fmt.Errorf("backend %s comes from %s; remove it there, or drain it", m.Name, where)
	}
	return "", ErrNotRegistered
}

// Registrations returns the replicas that were added.
func (f *Fleet) Registrations() []Registration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.records.registrations()
}

// removeRegistered removes a replica that was added. f.mu is held.
func (f *Fleet) removeRegistered(name string) {
	f.records.change(replicaKey(name), record{removed: true}, time.Now())
	for _, b := range f.registry.All() { // one that is registered under its name later is not drained
		if isOfMember(b, name) && f.records.isDrained(b.Name) {
			f.records.change(drainKey(b.Name), record{removed: true}, time.Now())
		}
	}
	f.notifyChange()
	f.reconcile()
	f.retireRemoved(name)
}

// retireRemoved has a replica that was removed get no new requests from now on: its process may end as soon as the
// caller knows of the removal. f.mu is held.
func (f *Fleet) retireRemoved(name string) {
	for _, m := range f.managed {
		if m.cancelRemoval != nil && isOfMember(m.backend, name) {
			m.backend.Retire()
		}
	}
}

// SetDrained has a backend get no new requests, or get them again, also after a restart and through other proxies.
func (f *Fleet) SetDrained(b *backends.Backend, drained bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.setDrained(b, drained)
}

// setDrained is SetDrained while f.mu is held.
func (f *Fleet) setDrained(b *backends.Backend, drained bool) {
	if drained {
		b.Drain()
		f.records.change(drainKey(b.Name), record{}, time.Now())
	} else {
		b.Undrain()
		f.recordUndrained()
	}
	f.notifyChange()
}

// recordUndrained records of each backend, and each server with ranks, that is not drained any more that it is not. f.mu is held.
func (f *Fleet) recordUndrained() {
	for _, m := range f.managed {
		for _, b := range m.backend.WithParts() {
			if !b.Drained() && f.records.isDrained(b.Name) {
				f.records.change(drainKey(b.Name), record{removed: true}, time.Now())
			}
		}
	}
}

// drainIfRecorded drains a backend that is added, if an operator has drained it before. f.mu is held, or nothing runs.
func (f *Fleet) drainIfRecorded(b *backends.Backend) {
	if f.records.isDrained(b.Name) {
		b.Drain()
	}
}

// isDownSince reports whether the backends of a member are all down since a time or longer. f.mu is held.
func (f *Fleet) isDownSince(member string, since time.Time) bool {
	found := false
	for _, m := range f.managed {
		if m.cancelRemoval != nil || !isOfMember(m.backend, member) {
			continue
		}
		found = true
		if s := m.backend.Status(); s.State != backends.Down || s.Since.After(since) {
			return false
		}
	}
	return found
}

// WaitReady waits until a backend of the member with that name is ready, or that of a name with its address, or ctx is
// done. It returns whether one is, and if not, why: the reason of the last health check.
func (f *Fleet) WaitReady(ctx context.Context, member string) (ready bool, reason string) {
	address := ""
	for _, r := range f.Registrations() {
		if r.Backend.Name == member {
			address = r.Address()
		}
	}
	for {
		changed := f.registry.StateChanged() // before looking
		reason = "it has no address yet"
		for _, b := range f.registry.All() {
			if b.Retiring() || !isOfMember(b, member) && (address == "" || b.Server().Address() != address) {
				continue
			}
			if b.State() == backends.Ready {
				return true, ""
			}
			reason = b.Status().Reason
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false, reason
		}
	}
}

// WaitRemoved waits until the fleet has no backend of a member, or ctx is done. It reports whether it has none.
func (f *Fleet) WaitRemoved(ctx context.Context, member string) (removed bool) {
	gone := func() bool {
		return !slices.ContainsFunc(f.registry.All(), func(b *backends.Backend) bool { return isOfMember(b, member) })
	}
	clock.WaitUntil(ctx, pollInterval, gone)
	return gone()
}

// WaitIdle waits until no request of this proxy is in flight on b, or ctx is done.
func (f *Fleet) WaitIdle(ctx context.Context, b *backends.Backend) {
	clock.WaitUntil(ctx, pollInterval, b.AllIdle)
}

// isOfMember reports whether a backend is that of a member, or one of its addresses or ranks.
func isOfMember(b *backends.Backend, member string) bool {
	return IsNameOfMember(b.Server().Name, member)
}

// IsNameOfMember reports whether a backend with a name is that of a member of the fleet, or at one of its addresses.
func IsNameOfMember(name, member string) bool {
	return name == member || strings.HasPrefix(name, member+"@")
}
