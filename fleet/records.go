package fleet

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"warmroute/backends"
	"warmroute/config"
)

const (
	// maxRegistered bounds the replicas that callers and operators have added.
	maxRegistered = 1024
	// maxRecords bounds all records, also those of what was removed.
	maxRecords     = 4 * maxRegistered
	maxRecordBytes = 8 << 10
	// removedLifetime is how long it is remembered that something was removed: an older record of it, which a store or
	// another proxy still has, does not come back.
	removedLifetime = 24 * time.Hour
	// maxClockSkew is how far in the future another proxy's change may be.
	maxClockSkew = 10 * time.Minute
)

// recordKey names a record: its kind and the name of a backend.
type recordKey string

const (
	replicaPrefix = "replica/" // a replica was added or removed
	drainPrefix   = "drain/"   // a backend was drained or undrained
)

func replicaKey(name string) recordKey { return recordKey(replicaPrefix + name) }
func drainKey(name string) recordKey   { return recordKey(drainPrefix + name) }

// backendName returns the name in a key of the kind that begins with prefix.
func (k recordKey) backendName(prefix string) (name string, ok bool) {
	return strings.CutPrefix(string(k), prefix)
}

// record is the latest change of what its key names. Of two, that of the later change counts, in all proxies.
type record struct {
	changed time.Time
	removed bool
	ignored bool         // this proxy does as if it were removed until it is changed again
	replica Registration // of a replica that is not removed
}

// isSet reports whether what the record is about is to be: a replica in the fleet, a backend drained.
func (r *record) isSet() bool { return !r.removed && !r.ignored }

// storedRecord is a record in JSON.
type storedRecord struct {
	Changed  time.Time       `json:"changed"`
	Removed  bool            `json:"removed,omitempty"`
	Backend  json.RawMessage `json:"backend,omitempty"` // the settings of a replica
	GivenURL string          `json:"given_url,omitempty"`
	By       string          `json:"by,omitempty"`
	Operator bool            `json:"operator,omitempty"`

	RefuseLocal bool `json:"refuse_local,omitempty"`
}

// encodeRecord returns r as JSON, which parseRecord reads.
func encodeRecord(r *record) ([]byte, error) {
	s := storedRecord{
		Changed: r.changed.UTC(), Removed: r.removed, GivenURL: r.replica.GivenURL, By: r.replica.By, Operator: r.replica.Operator,
		RefuseLocal: r.replica.Backend.RefuseLocal,
	}
	if r.replica.Backend.URL != "" {
		settings, err := config.FormatAddedBackend(r.replica.Backend)
		if err != nil {
			return nil, err
		}
		s.Backend = settings
	}
	return json.Marshal(&s)
}

// parseRecord reads the record of a key that another proxy, or an earlier process, has written.
func parseRecord(key recordKey, data []byte) (*record, error) {
	if len(data) > maxRecordBytes || len(key) > 256 {
		return nil, errors.New("record is too long")
	}
	var s storedRecord
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, err
	}
	r := &record{changed: s.Changed, removed: s.Removed}
	name, isReplica := key.backendName(replicaPrefix)
	if !isReplica {
		var isDrain bool
		if name, isDrain = key.backendName(drainPrefix); !isDrain {
			return nil, errors.New("unknown kind of record")
		}
	}
	switch {
	case name == "" || s.Changed.IsZero():
		return nil, errors.New("record has no name or no time")
	case !isReplica || s.Removed:
		return r, nil
	}
	b, err := config.ParseAddedBackend(s.Backend)
	switch {
	case err != nil:
		return nil, err
	case b.Name != name:
		return nil, fmt.Errorf("record of %q has a backend named %q", name, b.Name)
	}
	b.Source, b.RefuseLocal = backends.FromRegistration, s.RefuseLocal
	r.replica = Registration{Backend: b, GivenURL: cmp.Or(s.GivenURL, b.URL), By: s.By, At: s.Changed, Operator: s.Operator}
	return r, nil
}

// records are what was added, removed, drained and undrained while proxies ran. Not safe for concurrent use.
type records struct {
	byKey map[recordKey]*record
}

// registrations returns the replicas that are to be in the fleet, in the order of their names.
func (r *records) registrations() (list []Registration) {
	for _, key := range slices.Sorted(maps.Keys(r.byKey)) {
		if one := r.byKey[key]; strings.HasPrefix(string(key), replicaPrefix) && one.isSet() {
			list = append(list, one.replica)
		}
	}
	return list
}

// backends returns the settings of the replicas that are to be in the fleet.
func (r *records) backends() (list []config.Backend) {
	for _, one := range r.registrations() {
		list = append(list, one.Backend)
	}
	return list
}

// findRegistration returns the replica that a caller means, or nil.
func (r *records) findRegistration(nameOrURL string) *Registration {
	list := r.registrations()
	if i := slices.IndexFunc(list, func(o Registration) bool { return o.matches(nameOrURL) }); i >= 0 {
		return &list[i]
	}
	return nil
}

// isDrained reports whether an operator has drained the backend of that name.
func (r *records) isDrained(name string) bool {
	one := r.byKey[drainKey(name)]
	return one != nil && one.isSet()
}

// change records a change that is made now. It is later than any that it replaces, whatever the clocks of the proxies say.
func (r *records) change(key recordKey, to record, now time.Time) {
	if old := r.byKey[key]; old != nil && !now.After(old.changed) {
		now = old.changed.Add(time.Millisecond)
	}
	to.changed = now
	to.replica.At = now
	r.put(key, &to)
}

// merge applies a record of a store, and reports whether it is later than what is known.
func (r *records) merge(key recordKey, other *record, now time.Time) (applied bool) {
	old := r.byKey[key]
	if old != nil && !other.changed.After(old.changed) || other.changed.After(now.Add(maxClockSkew)) || other.isExpired(now) {
		return false
	}
	if old == nil && !other.removed && r.countSet() >= 2*maxRegistered { // replicas and drains
		return false
	}
	if old == nil && other.removed && r.isFull() {
		if oldest := r.oldestRemoval(); oldest == "" || !other.changed.After(r.byKey[oldest].changed) {
			return false // it would be dropped again
		}
	}
	r.put(key, other)
	return true
}

func (r *records) countSet() (n int) {
	for _, one := range r.byKey {
		if one.isSet() {
			n++
		}
	}
	return n
}

// ignore makes this proxy treat what a key names as removed. Other proxies do not.
func (r *records) ignore(key recordKey) {
	if old := r.byKey[key]; old != nil && old.isSet() {
		ignored := *old
		ignored.ignored = true
		r.byKey[key] = &ignored
	}
}

// put sets a record. If there are more than maxRecords, it drops the record of the oldest removal.
func (r *records) put(key recordKey, one *record) {
	if r.byKey == nil {
		r.byKey = map[recordKey]*record{}
	}
	r.byKey[key] = one
	if len(r.byKey) > maxRecords {
		delete(r.byKey, r.oldestRemoval())
	}
}

func (r *records) isFull() bool { return len(r.byKey) >= maxRecords }

// oldestRemoval returns the key of the oldest record that is not set; "": all are.
func (r *records) oldestRemoval() (oldest recordKey) {
	for k, o := range r.byKey {
		if !o.isSet() && (oldest == "" || o.changed.Before(r.byKey[oldest].changed)) {
			oldest = k
		}
	}
	return oldest
}

// isExpired reports whether a removal need not be remembered any more.
func (r *record) isExpired(now time.Time) bool {
	return r.removed && now.Sub(r.changed) > removedLifetime
}

func (r *records) deleteExpired(now time.Time) {
	maps.DeleteFunc(r.byKey, func(_ recordKey, one *record) bool { return one.isExpired(now) })
}

// storedCopy is what a store had when it was read last. Not safe for concurrent use.
type storedCopy struct {
	private bool // the store is this proxy's own
	values  map[string][]byte
	parsed  map[string]*record // of values; nil: invalid
}

// update makes the copy what the store has now, and returns the error of a value that has changed and is invalid.
func (c *storedCopy) update(values map[string][]byte) (invalid error) {
	parsed := map[string]*record{}
	for key, data := range values {
		if old, known := c.values[key]; known && bytes.Equal(old, data) {
			parsed[key] = c.parsed[key]
			continue
		}
		one, err := parseRecord(recordKey(key), data)
		if err != nil {
			invalid = fmt.Errorf("record %.100q: %w", key, err)
		}
		parsed[key] = one
	}
	c.values, c.parsed = values, parsed
	return invalid
}

// mergeStored applies what a store has, and returns the keys of the records that it changes, and what to write to
// the store.
func (r *records) mergeStored(c *storedCopy, now time.Time) (applied []recordKey, write map[string][]byte, remove []string, err error) {
	for key, one := range c.parsed {
		if one != nil && r.merge(recordKey(key), one, now) {
			applied = append(applied, recordKey(key))
		}
	}
	r.deleteExpired(now)
	write = map[string][]byte{}
	for key, own := range r.byKey {
		stored := c.parsed[string(key)]
		switch {
		case own.ignored && c.private && stored != nil:
			remove = append(remove, string(key))
		case own.ignored, stored != nil && !own.changed.After(stored.changed):
		default:
			data, encodeErr := encodeRecord(own)
			if encodeErr != nil {
				err = encodeErr
				continue
			}
			write[string(key)] = data
		}
	}
	for key, stored := range c.parsed {
		dropped := r.isFull() && r.byKey[recordKey(key)] == nil
		if stored != nil && stored.removed && (dropped || stored.isExpired(now)) {
			remove = append(remove, key)
		}
	}
	slices.Sort(applied)
	slices.Sort(remove)
	return applied, write, remove, err
}
