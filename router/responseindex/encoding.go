package responseindex

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"
)

// The entries are, the least recently used first,
//
//	names    uvarint number; for each, uvarint length and bytes: backends and owners
//	entries  uvarint number; for each, uvarint length and bytes of its id, the uvarint
//	         numbers of its backend and its owner among the names, and the time of its
//	         last use as a varint, ms since 1970
const (
	maxNames     = 1 << 16
	maxNameBytes = 4 << 10
	minEntrySize = 5 // bytes

	// MaxEncodedBytes bounds the entries that Restore accepts.
	MaxEncodedBytes = 256 << 20
)

var errDamaged = errors.New("responses are damaged")

// AppendTo appends all entries to b, for Restore. No more than MaxEncodedBytes are appended: entries
// are left out as they are from an Index that is full.
func (x *Index) AppendTo(b []byte) []byte {
	entries := limitSize(x.list(), MaxEncodedBytes/2)
	numbers := map[string]uint64{}
	var names []string
	number := func(name string) uint64 {
		n, ok := numbers[name]
		if !ok {
			n = uint64(len(names))
			numbers[name], names = n, append(names, name)
		}
		return n
	}
	for i := range entries {
		number(entries[i].Backend)
		number(entries[i].Owner)
	}
	b = binary.AppendUvarint(b, uint64(len(names)))
	for _, name := range names {
		b = appendString(b, name)
	}
	b = binary.AppendUvarint(b, uint64(len(entries)))
	for i := range entries {
		e := &entries[i]
		b = appendString(b, e.id)
		b = binary.AppendUvarint(b, number(e.Backend))
		b = binary.AppendUvarint(b, number(e.Owner))
		b = binary.AppendVarint(b, e.usedAt.UnixMilli())
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
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

// decode returns the entries in data, which holds nothing else.
func decode(data []byte) ([]record, error) {
	d := decoder{rest: data}
	names := make([]string, d.count(maxNames, 1))
	for i := range names {
		names[i] = d.text(maxNameBytes)
	}
	name := func() string {
		n := d.uvarint()
		if n >= uint64(len(names)) {
			d.damaged = true
			return ""
		}
		return names[n]
	}
	entries := make([]record, d.count(MaxEntries, minEntrySize))
	for i := range entries {
		e := &entries[i]
		e.id = d.text(maxIDBytes)
		e.Backend, e.Owner = name(), name()
		e.usedAt = time.UnixMilli(d.varint())
		if d.damaged || !IsValidID(e.id) {
			return nil, errDamaged
		}
	}
	if d.damaged || len(d.rest) > 0 {
		return nil, errDamaged
	}
	return entries, nil
}

// decoder reads the parts of encoded entries. After the first error it returns zeros.
type decoder struct {
	rest    []byte
	damaged bool
}

func (d *decoder) uvarint() uint64 {
	n, size := binary.Uvarint(d.rest)
	return advance(d, n, size)
}

func (d *decoder) varint() int64 {
	n, size := binary.Varint(d.rest)
	return advance(d, n, size)
}

// advance skips the size bytes of a number n, and returns n.
func advance[T int64 | uint64](d *decoder, n T, size int) T {
	if d.damaged || size <= 0 {
		d.damaged = true
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

// count reads a number of things of minSize bytes each, of which there is room for no more
// than the rest holds.
func (d *decoder) count(limit, minSize int) int {
	n := d.uvarint()
	if n > uint64(limit) || n > uint64(len(d.rest)/minSize) {
		d.damaged = true
		return 0
	}
	return int(n)
}

// text reads a string of at most maxBytes.
func (d *decoder) text(maxBytes int) string {
	n := d.uvarint()
	if n > uint64(maxBytes) || n > uint64(len(d.rest)) {
		d.damaged = true
		return ""
	}
	s := string(d.rest[:n])
	d.rest = d.rest[n:]
	return s
}
