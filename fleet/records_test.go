package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/config"
)

var recordTime = time.Date(2026, 8, 1, 12, 0, 0, 0, time.UTC)

// registration returns one of a replica at http://NAME.
func registration(t testing.TB, name string) Registration {
	t.Helper()
	b, err := config.ParseAddedBackend(fmt.Appendf(nil, `{"url":"http://%s","name":%q,"weight":1.5,"max_in_flight":7,"device":"gpu0",`+
		`"role":"prefill","dns":"off"}`, name, name))
	if err != nil {
		t.Fatal(err)
	}
	return Registration{Backend: b, GivenURL: "HTTP://" + name + "/", By: "10.0.0.1"}
}

func TestRecordRoundTrip(t *testing.T) {
	local := registration(t, "e:8000")
	local.Backend.RefuseLocal = true
	for key, r := range map[recordKey]*record{
		replicaKey("a:8000"):   {changed: recordTime, replica: registration(t, "a:8000")},
		replicaKey("b:8000"):   {changed: recordTime, removed: true},
		replicaKey("e:8000"):   {changed: recordTime, replica: local},
		drainKey("c"):          {changed: recordTime},
		drainKey("d@10.0.0.1"): {changed: recordTime, removed: true},
	} {
		data, err := encodeRecord(r)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parseRecord(key, data)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		want := *r
		if !r.removed && r.replica.Backend.URL != "" {
			want.replica.At = recordTime
		}
		if !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: got %+v, want %+v", data, *got, want)
		}
	}
}

func TestInvalidRecords(t *testing.T) {
	valid := `{"changed":"2026-08-01T12:00:00Z","backend":{"url":"http://a:1","name":"a"}}`
	if _, err := parseRecord("replica/a", []byte(valid)); err != nil {
		t.Fatal(err)
	}
	for key, data := range map[recordKey]string{
		"replica/b":  valid, // of another name
		"other/a":    valid,
		"replica/":   valid,
		"replica/a1": `{"changed":"2026-08-01T12:00:00Z","backend":{"url":"http://a:1","name":"a1","api_key":"k"}}`,
		"replica/a2": `{"changed":"2026-08-01T12:00:00Z","backend":{"url":"file:///etc/passwd","name":"a2"}}`,
		"replica/a3": `{"changed":"2026-08-01T12:00:00Z"}`,
		"replica/a4": `{"backend":{"url":"http://a:1","name":"a4"}}`,
		"replica/a5": `{`,
		"replica/a6": `{"changed":"2026-08-01T12:00:00Z","by":"` + strings.Repeat("x", maxRecordBytes) + `"}`,
		"drain/a7":   `{}`,
	} {
		if r, err := parseRecord(key, []byte(data)); err == nil {
			t.Errorf("%s: %s was read as %+v", key, data, r)
		}
	}
}

// FuzzParseRecord asserts that what is read is what is written again.
func FuzzParseRecord(f *testing.F) {
	f.Add("replica/a",
		[]byte(`{"changed":"2026-08-01T12:00:00Z","backend":{"url":"http://a:1","name":"a"},"given_url":"http://a:1/","by":"x"}`))
	f.Add("drain/a", []byte(`{"changed":"2026-08-01T12:00:00Z","removed":true}`))
	f.Fuzz(func(t *testing.T, key string, data []byte) {
		r, err := parseRecord(recordKey(key), data)
		if err != nil {
			return
		}
		again, err := encodeRecord(r)
		if err != nil {
			return // a year that JSON does not have
		}
		back, err := parseRecord(recordKey(key), again)
		if err != nil && len(again) <= maxRecordBytes {
			t.Fatalf("%s was written, and is invalid: %v", again, err)
		}
		if err == nil && (!back.changed.Equal(r.changed) || back.removed != r.removed || back.replica.Backend.URL != r.replica.Backend.URL) {
			t.Errorf("%+v was read back as %+v", r, back)
		}
	})
}

// exchangeWith exchanges records with a store that holds values.
func (r *records) exchangeWith(t *testing.T, values map[string][]byte, private bool, now time.Time) (applied []recordKey) {
	t.Helper()
	c := storedCopy{private: private}
	if err := c.update(values); err != nil {
		t.Error(err)
	}
	applied, write, remove, err := r.mergeStored(&c, now)
	if err != nil {
		t.Error(err)
	}
	for key, data := range write {
		values[key] = data
	}
	for _, key := range remove {
		delete(values, key)
	}
	return applied
}

func (r *records) names() (names []string) {
	for _, one := range r.registrations() {
		names = append(names, one.Backend.Name)
	}
	return names
}

func TestLatestRecordCounts(t *testing.T) {
	var a, b, late records
	store, now := map[string][]byte{}, recordTime
	tick := func() time.Time { now = now.Add(time.Second); return now }
	a.change(replicaKey("x"), record{replica: registration(t, "x")}, tick())
	a.change(drainKey("y"), record{}, tick())
	a.exchangeWith(t, store, false, now)
	if applied := b.exchangeWith(t, store, false, now); len(applied) != 2 || !b.isDrained("y") || !slices.Equal(b.names(), []string{"x"}) {
		t.Fatalf("b applied %v and has %v", applied, b.names())
	}
	if applied := b.exchangeWith(t, store, false, now); applied != nil {
		t.Errorf("applied again: %v", applied)
	}
	// The clock of b is an hour late.
	b.change(replicaKey("x"), record{removed: true}, now.Add(-time.Hour))
	b.change(drainKey("y"), record{removed: true}, now.Add(-time.Hour))
	b.exchangeWith(t, store, false, now)
	a.exchangeWith(t, store, false, now)
	if a.names() != nil || a.isDrained("y") {
		t.Errorf("a has %v", a.names())
	}
	if late.exchangeWith(t, store, false, now); late.names() != nil || late.isDrained("y") {
		t.Errorf("a proxy that starts later has %v", late.names())
	}
	// A store that loses everything gets it again, and a copy of an earlier record changes nothing.
	old, err := encodeRecord(&record{changed: recordTime, replica: registration(t, "x")})
	if err != nil {
		t.Fatal(err)
	}
	clear(store)
	store["replica/x"] = old
	a.exchangeWith(t, store, false, now)
	if r, err := parseRecord("replica/x", store["replica/x"]); err != nil || !r.removed {
		t.Errorf("the store has %s", store["replica/x"])
	}
	// After a day nothing of it is left.
	now = now.Add(removedLifetime + time.Hour)
	a.exchangeWith(t, store, false, now)
	if len(store) != 0 || len(a.byKey) != 0 {
		t.Errorf("%d records are stored, %d known", len(store), len(a.byKey))
	}
}

func TestIgnoredRecord(t *testing.T) {
	var a records
	shared, own := map[string][]byte{}, map[string][]byte{}
	a.change(replicaKey("x"), record{replica: registration(t, "x")}, recordTime)
	a.exchangeWith(t, shared, false, recordTime)
	a.exchangeWith(t, own, true, recordTime)
	a.ignore(replicaKey("x"))
	for range 2 {
		a.exchangeWith(t, shared, false, recordTime)
		a.exchangeWith(t, own, true, recordTime)
	}
	if a.names() != nil || len(shared) != 1 || len(own) != 0 {
		t.Errorf("it has %v, %d records are shared and %d its own", a.names(), len(shared), len(own))
	}
	a.change(replicaKey("x"), record{replica: registration(t, "x")}, recordTime)
	if !slices.Equal(a.names(), []string{"x"}) {
		t.Error("it was registered again, and is ignored")
	}
}

func TestRecordsAreBounded(t *testing.T) {
	var r records
	now, x := recordTime, registration(t, "x")
	for i := range maxRecords + 100 {
		now = now.Add(time.Millisecond)
		key := replicaKey(fmt.Sprint("gone", i))
		r.change(key, record{replica: x}, now)
		r.change(key, record{removed: true}, now)
	}
	r.change(replicaKey("x"), record{replica: registration(t, "x")}, now)
	if len(r.byKey) != maxRecords || !slices.Equal(r.names(), []string{"x"}) {
		t.Errorf("%d records, of which %v are in the fleet", len(r.byKey), r.names())
	}
	for i := range 3 * maxRegistered {
		r.merge(drainKey(fmt.Sprint(i)), &record{changed: now}, now)
	}
	if r.countSet() > 2*maxRegistered {
		t.Errorf("%d records were taken over", r.countSet())
	}
	if r.merge(drainKey("x"), &record{changed: now.Add(time.Hour), removed: true}, now) {
		t.Error("a record of the future was taken over")
	}
}

// FuzzParseStateFile asserts that a state file of any content is read or an error, and bounded.
func FuzzParseStateFile(f *testing.F) {
	f.Add([]byte(`{"version":1,"records":{"drain/a":{"changed":"2026-08-01T12:00:00Z"}}}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		values, err := parseStateFile(content)
		if err != nil {
			return
		}
		if !json.Valid(content) || len(values) > maxRecords {
			t.Errorf("%d records were read of %q", len(values), content)
		}
		for key, data := range values {
			if !bytes.Contains(content, data) {
				t.Errorf("%s is not in the file", key)
			}
		}
	})
}
