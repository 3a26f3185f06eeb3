package backends

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Registry holds the backends and the catalog of what they serve. Backends can be added and removed
// while it is used. Safe for concurrent use; All, Find and Catalog take no lock.
type Registry struct {
	backends atomic.Pointer[[]*Backend] // by Slot; never modified once published
	catalog  atomic.Pointer[Catalog]
	changed  Event // the State of a backend

	// mu serializes changes, so that a catalog is never replaced by an older one.
	mu    sync.Mutex
	slots []slot
}

// slot is an index that a backend has, or had last.
type slot struct {
	backend *Backend
	removed bool
}

// NewRegistry returns a registry of these backends, with Slots in the order of
// list, which may be empty. A backend belongs to one registry only. The error names all conflicts.
func NewRegistry(list []*Backend) (*Registry, error) {
	if err := CheckConflicts(list); err != nil {
		return nil, err
	}
	r := &Registry{}
	for _, b := range list {
		r.assignSlot(b)
	}
	r.publishBackends()
	return r, nil
}

// CheckConflicts returns an error that names all backends in list with the same name or address.
func CheckConflicts(list []*Backend) error {
	var errs []error
	names, addresses := map[string]bool{}, map[string]*Backend{}
	for _, b := range list {
		if names[b.Name] {
			errs = append(errs, fmt.Errorf("two backends are named %q; rename one", b.Name))
		}
		names[b.Name] = true
		address := b.Address()
		if address == "" { // it gets no requests, as in tests of routing alone
			continue
		}
		if other := addresses[address]; other != nil {
			errs = append(errs, fmt.Errorf("backends %q and %q are the same replica, %s; remove one", other.Name, b.Name, address))
		} else {
			addresses[address] = b
		}
	}
	return errors.Join(errs...)
}

// Add adds a backend in the lowest free Slot. It must not conflict (CheckConflicts) with
// another one that is not retired.
func (r *Registry) Add(b *Backend) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.assignSlot(b)
	r.publishBackends()
}

// Remove removes b from the registry and the catalog at once. Its Slot is reused
// once no request of this proxy is in flight there. Remove b from routers before.
func (r *Registry) Remove(b *Backend) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b.Slot < len(r.slots) && r.slots[b.Slot].backend == b {
		r.slots[b.Slot].removed = true
		r.publishBackends()
	}
}

// All returns the backends in the order of their Slots, of which some may be
// unused. Callers must not change the slice.
func (r *Registry) All() []*Backend { return *r.backends.Load() }

// StateChanged returns a channel that is closed at the next change of a backend's
// State. To wait for a state, call it first, then look, then wait.
func (r *Registry) StateChanged() <-chan struct{} { return r.changed.Next() }

// Find returns the backend of that name, preferably one that is not retired, or the server of that name
// whose ranks the registry has, or nil.
func (r *Registry) Find(name string) *Backend {
	if b := r.findBackend(func(b *Backend) bool { return b.Name == name }); b != nil {
		return b
	}
	if rank := r.findBackend(func(b *Backend) bool { return b.Server().Name == name }); rank != nil {
		return rank.Server()
	}
	return nil
}

// FindAddress returns the backend with an Address, preferably one that is not retired, or nil.
func (r *Registry) FindAddress(address string) *Backend {
	return r.findBackend(func(b *Backend) bool { return b.URL != nil && b.Address() == address })
}

// FindAtServer is FindAddress, or else returns another part of the same server: a rank, or all of it.
func (r *Registry) FindAtServer(address string) *Backend {
	if b := r.FindAddress(address); b != nil {
		return b
	}
	server, _, _ := strings.Cut(address, "#")
	return r.findBackend(func(b *Backend) bool { return b.URL != nil && b.Server().Address() == server })
}

func (r *Registry) findBackend(matches func(*Backend) bool) (found *Backend) {
	for _, b := range r.All() {
		if (found == nil || found.Retiring()) && matches(b) {
			found = b
		}
	}
	return found
}

// Catalog returns the models that the backends list now.
func (r *Registry) Catalog() *Catalog { return r.catalog.Load() }

// assignSlot puts b in the lowest free slot.
func (r *Registry) assignSlot(b *Backend) {
	i := slices.IndexFunc(r.slots, func(s slot) bool { return s.removed && s.backend.Idle() })
	if i < 0 {
		i = len(r.slots)
		r.slots = append(r.slots, slot{})
	}
	r.slots[i] = slot{backend: b}
	b.Slot = i
	if b.rank == nil { // else its server has them
		b.checkRequested = make(chan struct{}, 1)
		b.pollRequested = make(chan struct{}, 1)
	}
	b.registry, b.changed = r, &r.changed
}

// publishBackends makes the slots' backends, and their catalog, visible to readers.
func (r *Registry) publishBackends() {
	var all []*Backend
	for _, s := range r.slots {
		if !s.removed {
			all = append(all, s.backend)
		}
	}
	r.backends.Store(&all)
	r.catalog.Store(newCatalog(all))
}

func (r *Registry) updateCatalog() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.catalog.Store(newCatalog(r.All()))
}
