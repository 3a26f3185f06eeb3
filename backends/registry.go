package backends

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Registry is the fleet: the backends there are and what they serve. Backends
// come and go while it is used. Safe for concurrent use; readers take no lock.
type Registry struct {
	present atomic.Pointer[[]*Backend] // by Slot; never modified once published
	catalog atomic.Pointer[Catalog]

	// changing makes one change after the other: a catalog is never replaced by an
	// older one when two replicas change their models together.
	changing sync.Mutex
	slots    []slot

	changed Event // a backend's state
}

// slot is a place that a backend has, or had last.
type slot struct {
	owner *Backend
	left  bool
}

// NewRegistry gives every backend its Slot, in the order of list. A backend
// belongs to one registry only. All faults of the list are reported together.
func NewRegistry(list []*Backend) (*Registry, error) {
	if len(list) == 0 {
		return nil, errors.New("no backends; name at least one replica's URL")
	}
	r := &Registry{}
	var faults []error
	for _, b := range list {
		faults = append(faults, r.clashes(b)...)
		r.place(b)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	r.publish()
	return r, nil
}

// Add takes in one backend more, in the lowest Slot that is free. On an error
// nothing has changed. A backend that retires is in nobody's way.
func (r *Registry) Add(b *Backend) error {
	r.changing.Lock()
	defer r.changing.Unlock()
	if err := errors.Join(r.clashes(b)...); err != nil {
		return err
	}
	r.place(b)
	r.publish()
	return nil
}

// Remove takes b out of the fleet and the catalog, at once. Its Slot is free for
// another once nothing of ours is in flight there. Routers have to let go of b
// before.
func (r *Registry) Remove(b *Backend) {
	r.changing.Lock()
	defer r.changing.Unlock()
	if b.Slot < len(r.slots) && r.slots[b.Slot].owner == b {
		r.slots[b.Slot].left = true
		r.publish()
	}
}

// All returns the backends there are, by Slot. Callers must not change the slice,
// which need not have one for every Slot.
func (r *Registry) All() []*Backend { return *r.present.Load() }

// Find returns the backend of that name, of two the one that does not retire; nil
// when there is none.
func (r *Registry) Find(name string) *Backend {
	var found *Backend
	for _, b := range r.All() {
		if b.Name == name && (found == nil || found.Retiring()) {
			found = b
		}
	}
	return found
}

// StateChanged returns a channel that is closed when the state of a backend changes next.
func (r *Registry) StateChanged() <-chan struct{} { return r.changed.Next() }

// Catalog returns what the fleet serves, as of the last change of a replica's list.
func (r *Registry) Catalog() *Catalog { return r.catalog.Load() }

// clashes says what is wrong with b beside those there are.
func (r *Registry) clashes(b *Backend) (faults []error) {
	named, alike := false, false
	for _, s := range r.slots {
		other := s.owner
		if s.left || other.Retiring() {
			continue
		}
		if other.Name == b.Name && !named {
			named = true
			faults = append(faults, fmt.Errorf("two backends are named %q; give one another name", b.Name))
		}
		// No URL: nothing is sent there, as in tests of routing alone.
		if b.URL != nil && other.URL != nil && Address(other.URL) == Address(b.URL) && !alike {
			alike = true
			faults = append(faults, fmt.Errorf("backends %q and %q are the same replica, %s; drop one", other.Name, b.Name, Address(b.URL)))
		}
	}
	return faults
}

// place gives b a Slot.
func (r *Registry) place(b *Backend) {
	at := slices.IndexFunc(r.slots, func(s slot) bool { return s.left && s.owner.Idle() })
	if at < 0 {
		at = len(r.slots)
		r.slots = append(r.slots, slot{})
	}
	r.slots[at] = slot{owner: b}
	b.Slot = at
	b.suspected = make(chan struct{}, 1)
	b.relisted = r.relist
	b.changed = &r.changed
}

func (r *Registry) publish() {
	var all []*Backend
	for _, s := range r.slots {
		if !s.left {
			all = append(all, s.owner)
		}
	}
	r.present.Store(&all)
	r.catalog.Store(newCatalog(all))
}

func (r *Registry) relist() {
	r.changing.Lock()
	defer r.changing.Unlock()
	r.catalog.Store(newCatalog(r.All()))
}
