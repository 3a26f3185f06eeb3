package backends

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// Registry is the fleet: a fixed list of backends and what they serve. Safe for
// concurrent use.
type Registry struct {
	all     []*Backend
	catalog atomic.Pointer[Catalog]

	// rebuild keeps an older list of models from replacing a newer one when two
	// replicas change theirs together. Readers of the catalog never take it.
	rebuild sync.Mutex
}

// NewRegistry gives every backend its Slot, in the order of list. A backend
// belongs to one registry only. All faults of the list are reported together.
func NewRegistry(list []*Backend) (*Registry, error) {
	if len(list) == 0 {
		return nil, errors.New("no backends; name at least one replica's URL")
	}
	var faults []error
	names, urls := map[string]bool{}, map[string]string{}
	for _, b := range list {
		if names[b.Name] {
			faults = append(faults, fmt.Errorf("two backends are named %q; give one another name", b.Name))
		}
		names[b.Name] = true
		if b.URL == nil {
			continue // where nothing is sent, as in tests of routing alone
		}
		address := Address(b.URL)
		if other, taken := urls[address]; taken {
			faults = append(faults, fmt.Errorf("backends %q and %q are the same replica, %s; drop one", other, b.Name, address))
		}
		urls[address] = b.Name
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	r := &Registry{all: append([]*Backend(nil), list...)}
	for i, b := range r.all {
		b.Slot = i
		b.suspected = make(chan struct{}, 1)
		b.relisted = r.relist
	}
	r.relist()
	return r, nil
}

// All returns the backends by Slot. Callers must not change the slice.
func (r *Registry) All() []*Backend { return r.all }

// Catalog returns what the fleet serves, as of the last change of a replica's list.
func (r *Registry) Catalog() *Catalog { return r.catalog.Load() }

func (r *Registry) relist() {
	r.rebuild.Lock()
	defer r.rebuild.Unlock()
	r.catalog.Store(newCatalog(r.all))
}
