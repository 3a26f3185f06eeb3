// Package tenantlru has a cache of a fixed size in which no tenant displaces what others have, once it has a sixteenth itself.
package tenantlru

import "iter"

// tenantShare is the share of the places that a tenant may take from others.
const tenantShare = 1.0 / 16

// Key identifies an entry of a tenant.
type Key struct{ Tenant, Key uint64 }

// LRU holds a number of values. When it is full, a new one takes the place of the one that was added or replaced least
// recently: of its tenant's own, if that has tenantShare of all. Not safe for concurrent use.
//
// Entries refer to each other by their indexes, not by pointers: the garbage collector would follow each of these, which has cost
// a tenth of the CPU time of a request.
type LRU[V any] struct {
	size    int
	removed func(Key, V) // nil: not called
	byKey   map[Key]int32
	entries []entry[V] // that of index 0 is not used
	unused  int32      // an entry that is free, which has the next one as older; 0: none
	recent  list       // all of them
	tenants map[uint64]list
}

type entry[V any] struct {
	key         Key
	value       V
	all, tenant links
}

// links are the neighbours of an entry in a list; 0: there is none.
type links struct{ newer, older int32 }

// list is a list of entries by the order in which they were added.
type list struct {
	newest, oldest int32 // 0: it is empty
	count          int
}

// add adds an entry as the newest one. linksOf returns the links of an entry in this list.
func (l *list) add(at int32, linksOf func(int32) *links) {
	*linksOf(at) = links{older: l.newest}
	if l.newest != 0 {
		linksOf(l.newest).newer = at
	} else {
		l.oldest = at
	}
	l.newest = at
	l.count++
}

// remove removes an entry.
func (l *list) remove(at int32, linksOf func(int32) *links) {
	removed := *linksOf(at)
	if removed.newer != 0 {
		linksOf(removed.newer).older = removed.older
	} else {
		l.newest = removed.older
	}
	if removed.older != 0 {
		linksOf(removed.older).newer = removed.newer
	} else {
		l.oldest = removed.newer
	}
	l.count--
}

// New returns an empty LRU with so many places. removed, which may be nil, is called for each value that leaves it, but for
// one that Add replaces.
func New[V any](size int, removed func(Key, V)) *LRU[V] {
	return &LRU[V]{size: size, removed: removed, byKey: map[Key]int32{}, entries: make([]entry[V], 1), tenants: map[uint64]list{}}
}

// Len returns how many values there are.
func (c *LRU[V]) Len() int { return c.recent.count }

// Find returns the value of a key, and whether there is one.
func (c *LRU[V]) Find(key Key) (value V, found bool) {
	if at := c.byKey[key]; at != 0 {
		return c.entries[at].value, true
	}
	return value, false
}

// Oldest returns the least recent value and its key; ok is false if there is none.
func (c *LRU[V]) Oldest() (key Key, value V, ok bool) {
	if at := c.recent.oldest; at != 0 {
		return c.entries[at].key, c.entries[at].value, true
	}
	return key, value, false
}

// Add adds or replaces the value of a key, which is then the most recent one.
func (c *LRU[V]) Add(key Key, value V) {
	at := c.byKey[key]
	if at != 0 {
		c.unlink(at)
	} else {
		if c.Len() >= c.size {
			c.remove(c.displaced(key.Tenant))
		}
		at = c.takeUnused()
		c.byKey[key] = at
	}
	c.entries[at].key, c.entries[at].value = key, value
	c.recent.add(at, c.allLinks)
	tenant := c.tenants[key.Tenant]
	tenant.add(at, c.tenantLinks)
	c.tenants[key.Tenant] = tenant
}

// takeUnused returns the index of an entry that is not used.
func (c *LRU[V]) takeUnused() int32 {
	at := c.unused
	if at == 0 {
		c.entries = append(c.entries, entry[V]{})
		return int32(len(c.entries) - 1)
	}
	c.unused = c.entries[at].all.older
	return at
}

func (c *LRU[V]) allLinks(at int32) *links    { return &c.entries[at].all }
func (c *LRU[V]) tenantLinks(at int32) *links { return &c.entries[at].tenant }

// displaced returns the entry whose place a new one of a tenant takes.
func (c *LRU[V]) displaced(tenant uint64) int32 {
	if own := c.tenants[tenant]; own.count > 0 && float64(own.count) >= tenantShare*float64(c.size) {
		return own.oldest
	}
	return c.recent.oldest
}

// Remove removes the value of a key, if there is one.
func (c *LRU[V]) Remove(key Key) {
	if at := c.byKey[key]; at != 0 {
		c.remove(at)
	}
}

func (c *LRU[V]) remove(at int32) {
	removed := c.entries[at]
	c.unlink(at)
	delete(c.byKey, removed.key)
	c.entries[at] = entry[V]{all: links{older: c.unused}}
	c.unused = at
	if c.removed != nil {
		c.removed(removed.key, removed.value)
	}
}

// unlink removes an entry from the lists.
func (c *LRU[V]) unlink(at int32) {
	c.recent.remove(at, c.allLinks)
	of := c.entries[at].key.Tenant
	tenant := c.tenants[of]
	if tenant.remove(at, c.tenantLinks); tenant.count > 0 {
		c.tenants[of] = tenant
	} else {
		delete(c.tenants, of)
	}
}

// All yields the values, the least recent one first. The one that is yielded may be removed.
func (c *LRU[V]) All() iter.Seq2[Key, V] {
	return func(yield func(Key, V) bool) {
		for at := c.recent.oldest; at != 0; {
			e := c.entries[at]
			at = e.all.newer
			if !yield(e.key, e.value) {
				return
			}
		}
	}
}
