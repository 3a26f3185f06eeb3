// Package responseindex remembers which backend holds a stored response of
// /v1/responses: replicas keep them in memory, each its own.
package responseindex

import (
	"container/list"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

const (
	// maxIDBytes bounds the ids that are remembered. vLLM's own have 37 bytes; a client may
	// choose others, which are longer by the scope of its key.
	maxIDBytes = 192

	// A response that no backend holds is remembered as absent, so that a client that
	// asks for it again does not make every replica search again.
	maxAbsent      = 4096
	absentLifetime = 10 * time.Second
)

const maxEntries = 5_000_000

// Settings bound an Index.
type Settings struct {
	MaxEntries int           `mapstructure:"max_entries" range:"0..5000000"` // 0: nothing is remembered
	TTL        time.Duration `mapstructure:"ttl" range:"1s.."`               // since the last use
}

// Entry says where a response is held and whose it is.
type Entry struct {
	Backend string // the backend's address, as of Backend.Address
	Owner   string // name of the API key that made it; empty: no keys were configured
}

// Reporter receives which responses are added and which are lost. Its methods do not block.
type Reporter interface {
	ReportResponse(id string, e Entry)
	ReportForgotten(id string)
}

// Index maps the ids of responses to the backends that hold them. Where it is full, the owner with
// the most entries loses the one that was used least recently, so that no owner takes the places of
// others. Safe for concurrent use.
type Index struct {
	now      func() time.Time
	reporter Reporter // nil: none

	mu       sync.Mutex // guards what follows
	settings Settings
	entries  *simplelru.LRU[string, *record] // nil: nothing is remembered; never full
	owners   owners                          // of entries
	absent   *simplelru.LRU[string, time.Time]
}

// record is an Entry with its id and its last use.
type record struct {
	Entry
	id      string
	usedAt  time.Time
	use     uint64        // counts uses: of two records the one that was used later has the larger one
	element *list.Element // among the records of its owner; nil: it was removed
}

// New returns an empty index. reporter may be nil.
func New(s Settings, now func() time.Time, reporter Reporter) *Index {
	x := &Index{now: now, reporter: reporter, owners: newOwners(), absent: newLRU[time.Time](maxAbsent, nil)}
	x.Configure(s)
	return x
}

// newLRU returns an empty LRU of a size above 0. onRemove is called for each entry that is removed,
// and may be nil.
func newLRU[V any](size int, onRemove func(string, V)) *simplelru.LRU[string, V] {
	l, err := simplelru.NewLRU(size, onRemove)
	if err != nil {
		panic(err) // the size is not positive
	}
	return l
}

// Configure changes the bounds. Entries beyond them are removed.
func (x *Index) Configure(s Settings) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.settings = s
	switch {
	case s.MaxEntries <= 0:
		x.entries, x.owners = nil, newOwners()
	case x.entries == nil:
		x.entries = newLRU(s.MaxEntries+1, func(_ string, r *record) { x.owners.remove(r) })
	default:
		x.evict()
		x.entries.Resize(s.MaxEntries + 1)
	}
}

// evict removes the entries beyond the bound. x.mu is held.
func (x *Index) evict() {
	for x.entries.Len() > x.settings.MaxEntries {
		x.entries.Remove(x.owners.oldestOfLargest().id)
	}
}

// Enabled reports whether responses are remembered.
func (x *Index) Enabled() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.entries != nil
}

// Len returns how many responses are remembered.
func (x *Index) Len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.entries == nil {
		return 0
	}
	x.removeExpired()
	return x.entries.Len()
}

// Add remembers a response, unless its id is not valid or names one of another owner.
func (x *Index) Add(id string, e Entry) {
	if x.add(id, e) && x.reporter != nil {
		x.reporter.ReportResponse(id, e)
	}
}

// AddOfPeer is Add for a response that another proxy reports.
func (x *Index) AddOfPeer(id string, e Entry) { x.add(id, e) }

func (x *Index) add(id string, e Entry) (added bool) {
	if !IsValidID(id) {
		return false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.entries == nil {
		return false
	}
	x.absent.Remove(id)
	r := x.find(id)
	switch {
	case r == nil:
		x.insert(&record{Entry: e, id: id, usedAt: x.now()})
	case r.Owner != e.Owner:
		return false
	default:
		r.Backend = e.Backend
		x.recordUse(r)
	}
	return true
}

// insert adds a record of a new id, and removes another one where there is no room. x.mu is held.
func (x *Index) insert(r *record) {
	x.owners.add(r)
	x.entries.Add(r.id, r)
	x.evict()
}

// Find returns the entry of a response. That is not a use.
func (x *Index) Find(id string) (e Entry, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r := x.find(id)
	if r == nil {
		return Entry{}, false
	}
	return r.Entry, true
}

// RecordUse makes a response the one of its owner that was used most recently.
func (x *Index) RecordUse(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if r := x.find(id); r != nil {
		x.recordUse(r)
	}
}

// recordUse is RecordUse of a record. x.mu is held.
func (x *Index) recordUse(r *record) {
	r.usedAt = x.now()
	x.owners.recordUse(r)
	x.entries.Get(r.id) // which makes it the most recent one
}

// find returns the record of a response, nil if there is none. x.mu is held.
func (x *Index) find(id string) *record {
	if x.entries == nil {
		return nil
	}
	x.removeExpired()
	r, _ := x.entries.Peek(id)
	return r
}

// removeExpired removes the entries that were not used for Settings.TTL. They are the
// least recent ones. x.mu is held.
func (x *Index) removeExpired() {
	if x.entries == nil {
		return
	}
	for oldest := x.now().Add(-x.settings.TTL); ; {
		_, r, ok := x.entries.GetOldest()
		if !ok || !r.usedAt.Before(oldest) {
			return
		}
		x.entries.RemoveOldest()
	}
}

// Remove forgets a response.
func (x *Index) Remove(id string) {
	x.RemoveOfPeer(id)
	if x.reporter != nil {
		x.reporter.ReportForgotten(id)
	}
}

// RemoveOfPeer is Remove for a response that another proxy reports as lost.
func (x *Index) RemoveOfPeer(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.entries != nil {
		x.entries.Remove(id)
	}
}

// AddAbsent remembers for a short time that no backend holds a response.
func (x *Index) AddAbsent(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.absent.Add(id, x.now().Add(absentLifetime))
}

// IsAbsent reports whether AddAbsent was called for a response a short time ago.
func (x *Index) IsAbsent(id string) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	until, ok := x.absent.Get(id)
	return ok && x.now().Before(until)
}

// IsValidID reports whether a response with that id can be remembered and named in a path:
// letters, digits and "-_.:", at most maxIDBytes, not only dots.
func IsValidID(id string) bool {
	if id == "" || len(id) > maxIDBytes || id == "." || id == ".." {
		return false
	}
	for _, c := range []byte(id) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.' || c == ':') {
			return false
		}
	}
	return true
}
