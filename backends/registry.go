package backends

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Registry holds the backends and the catalog of what they serve. Backends can
// be added and removed while it is used. Safe for concurrent use; All, Find and
// Catalog take no lock.
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
// list. A backend belongs to one registry only. The error names all conflicts.
func NewRegistry(list []*Backend) (*Registry, error) {
	if len(list) == 0 {
		return nil, errors.New("no backends; name at least one replica's URL")
	}
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

// CheckConflicts returns an error that names all backends in list with the same name or
// address.
func CheckConflicts(list []*Backend) error {
	var errs []error
	for i, b := range list {
		errs = append(errs, conflicts(b, list[:i])...)
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

// Find returns the backend of that name, preferably one that is not retired, or
// nil.
func (r *Registry) Find(name string) *Backend {
	var found *Backend
	for _, b := range r.All() {
		if b.Name == name && (found == nil || found.Retiring()) {
			found = b
		}
	}
	return found
}

// FindAddress returns the backend at an address, as of NormalizeURL, preferably one that
// is not retired, or nil.
func (r *Registry) FindAddress(address string) *Backend {
	var found *Backend
	for _, b := range r.All() {
		if b.URL != nil && (found == nil || found.Retiring()) && NormalizeURL(b.URL) == address {
			found = b
		}
	}
	return found
}

// Catalog returns the models that the backends list now.
func (r *Registry) Catalog() *Catalog { return r.catalog.Load() }

// conflicts returns why b cannot be used beside others: at most one error for its name and one
// for its address.
func conflicts(b *Backend, others []*Backend) (errs []error) {
	sameName, sameAddress := false, false
	for _, other := range others {
		if other.Name == b.Name && !sameName {
			sameName = true
			errs = append(errs, fmt.Errorf("two backends are named %q; rename one", b.Name))
		}
		// A backend without a URL gets no requests, as in tests of routing alone.
		if b.URL != nil && other.URL != nil && NormalizeURL(other.URL) == NormalizeURL(b.URL) && !sameAddress {
			sameAddress = true
			errs = append(errs, fmt.Errorf("backends %q and %q are the same replica, %s; remove one", other.Name, b.Name, NormalizeURL(b.URL)))
		}
	}
	return errs
}

// assignSlot puts b in the lowest free slot.
func (r *Registry) assignSlot(b *Backend) {
	i := slices.IndexFunc(r.slots, func(s slot) bool { return s.removed && s.backend.Idle() })
	if i < 0 {
		i = len(r.slots)
		r.slots = append(r.slots, slot{})
	}
	r.slots[i] = slot{backend: b}
	b.Slot = i
	b.checkRequested = make(chan struct{}, 1)
	b.pollRequested = make(chan struct{}, 1)
	b.registry = r
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

// Catalog is the union of all replicas' /v1/models; that of a replica which is
// down is the last known one. Never modified once published, and read without
// allocation.
type Catalog struct {
	Models []Model // one card for each ID: that of the first backend, by Slot, that lists it

	entries  map[string]Entry
	onlyBase string
}

// Entry is one model and where it is served.
type Entry struct {
	Model
	Adapter  bool       // a LoRA adapter: its card has a parent
	Backends []*Backend // those that list it, ready or not, by Slot; not to be changed

	unbounded bool // one of them does not report its MaxTokens
}

func newCatalog(all []*Backend) *Catalog {
	c := &Catalog{entries: map[string]Entry{}}
	for _, b := range all {
		for _, m := range b.Models() {
			e, known := c.entries[m.ID]
			if !known {
				e = Entry{Model: m, Adapter: m.Parent != ""}
				c.Models = append(c.Models, m)
			}
			if e.MaxTokens = max(e.MaxTokens, m.MaxTokens); m.MaxTokens == 0 || e.unbounded {
				e.MaxTokens, e.unbounded = 0, true
			}
			// A replica may list an ID twice.
			if n := len(e.Backends); n == 0 || e.Backends[n-1] != b {
				e.Backends = append(e.Backends, b)
			}
			c.entries[m.ID] = e
		}
	}
	c.onlyBase, _ = OnlyBaseModel(c.Models)
	return c
}

// OnlyBaseModel returns the ID of the only base model among those given, or false.
// IDs with the same Root are aliases of one model; the first of them is returned.
func OnlyBaseModel(models []Model) (id string, ok bool) {
	first := -1
	for i, m := range models {
		switch {
		case m.Parent != "":
		case first < 0:
			first = i
		case m.Root == "" || m.Root != models[first].Root:
			return "", false
		}
	}
	if first < 0 {
		return "", false
	}
	return models[first].ID, true
}

// Find returns the model with an ID.
func (c *Catalog) Find(id string) (e Entry, ok bool) {
	e, ok = c.entries[id]
	return e, ok
}

// OnlyBaseModel returns the ID of the only base model of all backends, which is that
// of a request without a model, or false.
func (c *Catalog) OnlyBaseModel() (id string, ok bool) { return c.onlyBase, c.onlyBase != "" }

// EngineModel returns the name that seeds a chain of blocks. Aliases of a base
// model share their KV cache and so a seed; vLLM hashes an adapter's name into
// its blocks, so that an adapter has its own.
func (c *Catalog) EngineModel(id string) string {
	e, ok := c.entries[id]
	if !ok || e.Adapter || e.Root == "" {
		return id
	}
	return e.Root
}

// MaxTokens returns the maximum length of a prompt and its answer on the replica
// that accepts the most; 0 when one does not report it. An adapter's is that of
// its base model.
func (c *Catalog) MaxTokens(id string) int {
	e := c.entries[id]
	if e.Adapter {
		e = c.entries[e.Parent]
	}
	return e.MaxTokens
}
