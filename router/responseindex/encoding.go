package responseindex

import (
	"errors"
	"slices"
	"time"

	"warmroute/router/wire"
)

// The entries are, the least recently used first,
//
//	names    uvarint number; for each, uvarint length and bytes: backends and owners
//	entries  uvarint number; for each, uvarint length and bytes of its id, the uvarint
//	         numbers of its backend and its owner among the names, and the time of its
//	         last use as a varint, ms since 1970
const (
	maxNames     = 1 << 16
	minEntrySize = 5 // bytes

	// MaxEncodedBytes bounds the entries that Restore accepts.
	MaxEncodedBytes = 256 << 20
)

var errDamaged = errors.New("responses are damaged")

// AppendTo appends all entries to b, for Restore. No more than MaxEncodedBytes are appended: entries
// are left out as they are from an Index that is full.
func (x *Index) AppendTo(b []byte) []byte {
	entries := limitSize(x.list(), MaxEncodedBytes/2)
	var c wire.Coder
	for i := range entries {
		c.AddName(entries[i].Backend)
		c.AddName(entries[i].Owner)
	}
	c.Data = c.AppendNames(b)
	c.Count(len(entries), maxEntries, minEntrySize)
	for i := range entries {
		codeEntry(&c, &entries[i])
	}
	return c.Data
}

// limitSize returns the entries without those beyond maxBytes, which the owners with the most entries
// lose. It changes the list in place.
func limitSize(entries []record, maxBytes int) []record {
	size := 0
	for i := range entries {
		size += entrySize(&entries[i])
	}
	if size <= maxBytes {
		return entries
	}
	o := newOwners()
	for i := range entries {
		o.add(&entries[i])
	}
	for size > maxBytes {
		r := o.oldestOfLargest()
		size -= entrySize(r)
		o.remove(r)
	}
	return slices.DeleteFunc(entries, func(r record) bool { return r.element == nil })
}

// entrySize returns about how many bytes an entry is encoded in.
func entrySize(r *record) int { return len(r.id) + 24 }

// list returns copies of the entries, the least recently used first.
func (x *Index) list() []record {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.entries == nil {
		return nil
	}
	x.removeExpired()
	all := make([]record, 0, x.entries.Len())
	for _, r := range x.entries.Values() {
		all = append(all, *r)
	}
	return all
}

// Restore adds the entries that AppendTo has written, as far as the bounds allow. On an error
// nothing is added. Call it before entries are added otherwise.
func (x *Index) Restore(data []byte) error {
	entries, err := decode(data)
	if err != nil {
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.entries == nil {
		return nil
	}
	now := x.now()
	for i := range entries {
		e := &entries[i]
		if e.usedAt.After(now) { // the clock was set back
			e.usedAt = now
		}
		if e.usedAt.Before(now.Add(-x.settings.TTL)) {
			continue // or it would take the place of one that has not expired
		}
		x.entries.Remove(e.id)
		x.insert(&record{Entry: e.Entry, id: e.id, usedAt: e.usedAt})
	}
	return nil
}

func decode(data []byte) ([]record, error) {
	c := wire.NewReader(data)
	c.ReadNames(maxNames)
	entries := make([]record, c.Count(0, maxEntries, minEntrySize))
	for i := range entries {
		if codeEntry(&c, &entries[i]); c.Damaged() || !IsValidID(entries[i].id) {
			return nil, errDamaged
		}
	}
	if c.Damaged() || len(c.Data) > 0 {
		return nil, errDamaged
	}
	return entries, nil
}

func codeEntry(c *wire.Coder, e *record) {
	c.Text(&e.id, maxIDBytes)
	c.Name(&e.Backend)
	c.Name(&e.Owner)
	usedAt := e.usedAt.UnixMilli()
	c.Varint(&usedAt)
	e.usedAt = time.UnixMilli(usedAt)
}
