// Package tenantlru has a cache of a fixed size in which no tenant displaces what others have, once it has a sixteenth itself.
package tenantlru

import (
	"container/list"
	"iter"
)

// tenantShare is the share of the places that a tenant may take from others.
const tenantShare = 1.0 / 16

// Key identifies an entry of a tenant.
type Key struct{ Tenant, Key uint64 }

// LRU holds a number of values. When it is full, a new one takes the place of the one that was added or replaced least
// recently: of its tenant's own, if that has tenantShare of all. Not safe for concurrent use.
type LRU[V any] struct {
	size     int
	removed  func(Key, V) // nil: not called
	byKey    map[Key]*entry[V]
	recent   *list.List            // of *entry[V], the last one added in front
	byTenant map[uint64]*list.List // likewise
}

type entry[V any] struct {
	key             Key
	value           V
	place, ofTenant *list.Element
}

// New returns an empty LRU with so many places. removed, which may be nil, is called for each value that leaves it, but for
// one that Add replaces.
func New[V any](size int, removed func(Key, V)) *LRU[V] {
	return &LRU[V]{size: size, removed: removed, byKey: map[Key]*entry[V]{}, recent: list.New(), byTenant: map[uint64]*list.List{}}
}

// Len returns how many values there are.
func (c *LRU[V]) Len() int { return len(c.byKey) }

// Find returns the value of a key, and whether there is one.
func (c *LRU[V]) Find(key Key) (value V, found bool) {
	if e := c.byKey[key]; e != nil {
		return e.value, true
	}
	return value, false
}

// Oldest returns the least recent value and its key; ok is false if there is none.
func (c *LRU[V]) Oldest() (key Key, value V, ok bool) {
	if at := c.recent.Back(); at != nil {
		e := at.Value.(*entry[V])
		return e.key, e.value, true
	}
	return key, value, false
}

// Add adds or replaces the value of a key, which is then the most recent one.
func (c *LRU[V]) Add(key Key, value V) {
	if e := c.byKey[key]; e != nil {
		e.value = value
		c.recent.MoveToFront(e.place)
		c.byTenant[key.Tenant].MoveToFront(e.ofTenant)
		return
	}
	if len(c.byKey) >= c.size {
		c.remove(c.displaced(key.Tenant))
	}
	own := c.byTenant[key.Tenant]
	if own == nil {
		own = list.New()
		c.byTenant[key.Tenant] = own
	}
	e := &entry[V]{key: key, value: value}
	e.place, e.ofTenant = c.recent.PushFront(e), own.PushFront(e)
	c.byKey[key] = e
}

// displaced returns the entry whose place a new one of a tenant takes.
func (c *LRU[V]) displaced(tenant uint64) *entry[V] {
	if own := c.byTenant[tenant]; own != nil && float64(own.Len()) >= tenantShare*float64(c.size) {
		return own.Back().Value.(*entry[V])
	}
	return c.recent.Back().Value.(*entry[V])
}

// Remove removes the value of a key, if there is one.
func (c *LRU[V]) Remove(key Key) {
	if e := c.byKey[key]; e != nil {
		c.remove(e)
	}
}

func (c *LRU[V]) remove(e *entry[V]) {
	delete(c.byKey, e.key)
	c.recent.Remove(e.place)
	own := c.byTenant[e.key.Tenant]
	if own.Remove(e.ofTenant); own.Len() == 0 {
		delete(c.byTenant, e.key.Tenant)
	}
	if c.removed != nil {
		c.removed(e.key, e.value)
	}
}

// All yields the values, the least recent one first. The one that is yielded may be removed.
func (c *LRU[V]) All() iter.Seq2[Key, V] {
	return func(yield func(Key, V) bool) {
		for at := c.recent.Back(); at != nil; {
			e := at.Value.(*entry[V])
			at = at.Prev()
			if !yield(e.key, e.value) {
				return
			}
		}
	}
}
