package responseindex

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// clock is a time that a test sets.
type clock struct{ time.Time }

func (c *clock) now() time.Time { return c.Time }

func newTestIndex(maxEntries int) (*Index, *clock) {
	c := &clock{time.Unix(1000, 0)}
	return New(Settings{MaxEntries: maxEntries, TTL: time.Hour}, c.now, nil), c
}

// found returns the backend of a response, "" if it is not known, and records a use of it.
func found(x *Index, id string) string {
	e, _ := x.Find(id)
	x.RecordUse(id)
	return e.Backend
}

func TestEviction(t *testing.T) {
	x, _ := newTestIndex(3)
	for i := range 3 {
		x.Add(fmt.Sprint("resp_", i), Entry{Backend: "a"})
	}
	found(x, "resp_0")
	x.Add("resp_3", Entry{Backend: "b"})
	for id, want := range map[string]string{"resp_0": "a", "resp_1": "", "resp_2": "a", "resp_3": "b"} {
		if got := found(x, id); got != want {
			t.Errorf("%s is on %q, want %q", id, got, want)
		}
	}
	x.Configure(Settings{MaxEntries: 1, TTL: time.Hour})
	if n := x.Len(); n != 1 {
		t.Errorf("%d entries remain, want 1", n)
	}
}

func TestLifetime(t *testing.T) {
	x, c := newTestIndex(10)
	x.Add("used", Entry{Backend: "a"})
	x.Add("unused", Entry{Backend: "a"})
	c.Time = c.Add(40 * time.Minute)
	found(x, "used")
	x.Find("unused")
	c.Time = c.Add(40 * time.Minute)
	if found(x, "used") == "" || found(x, "unused") != "" || x.Len() != 1 {
		t.Errorf("used: %q, unused: %q, %d entries", found(x, "used"), found(x, "unused"), x.Len())
	}
}

func TestOwner(t *testing.T) {
	x, c := newTestIndex(10)
	x.Add("resp_1", Entry{"a", "alice"})
	x.Add("resp_1", Entry{"b", "bob"})
	if e, _ := x.Find("resp_1"); e != (Entry{"a", "alice"}) {
		t.Errorf("the id is now of %+v", e)
	}
	x.Add("resp_1", Entry{"c", "alice"})
	if e, _ := x.Find("resp_1"); e != (Entry{"c", "alice"}) {
		t.Errorf("after another response of the owner: %+v", e)
	}
	c.Time = c.Add(2 * time.Hour)
	x.Add("resp_1", Entry{"b", "bob"})
	if e, _ := x.Find("resp_1"); e != (Entry{"b", "bob"}) {
		t.Errorf("after its end: %+v", e)
	}
}

func TestValidID(t *testing.T) {
	for id, want := range map[string]bool{
		"resp_0123456789abcdef": true, "a.b:c-d_E": true, strings.Repeat("x", maxIDBytes): true,
		"": false, ".": false, "..": false, "a/b": false, "a b": false, "a%2f": false, "é": false, "a\n": false,
		strings.Repeat("x", maxIDBytes+1): false,
	} {
		x, _ := newTestIndex(1)
		x.Add(id, Entry{Backend: "a"})
		if got := IsValidID(id); got != want || (x.Len() == 1) != want {
			t.Errorf("%q: valid %v, %d entries; want %v", id, got, x.Len(), want)
		}
	}
}

func TestAbsent(t *testing.T) {
	x, c := newTestIndex(10)
	x.AddAbsent("resp_1")
	x.AddAbsent("resp_2")
	if !x.IsAbsent("resp_1") || x.IsAbsent("resp_3") {
		t.Error("resp_1 is not absent, or resp_3 is")
	}
	x.Add("resp_1", Entry{Backend: "a"})
	if x.IsAbsent("resp_1") {
		t.Error("a response is absent that was made since")
	}
	c.Time = c.Add(absentLifetime)
	if x.IsAbsent("resp_2") {
		t.Error("resp_2 is absent for too long")
	}
	for i := range 2 * maxAbsent {
		x.AddAbsent(fmt.Sprint(i))
	}
	if n := x.absent.Len(); n > maxAbsent {
		t.Errorf("%d ids are remembered as absent", n)
	}
}

func TestDisabled(t *testing.T) {
	x, _ := newTestIndex(0)
	x.Add("resp_1", Entry{Backend: "a"})
	x.Remove("resp_1")
	if _, ok := x.Find("resp_1"); ok || x.Enabled() || x.Len() != 0 || x.Restore(x.AppendTo(nil)) != nil {
		t.Error("a disabled index remembers")
	}
	x.Configure(Settings{MaxEntries: 1, TTL: time.Hour})
	x.Add("resp_1", Entry{Backend: "a"})
	if found(x, "resp_1") != "a" {
		t.Error("not remembered once enabled")
	}
}

func TestRestore(t *testing.T) {
	before, c := newTestIndex(10)
	for i := range 8 {
		before.Add(fmt.Sprint("resp_", i), Entry{Backend: fmt.Sprint("http://10.0.0.", i%3), Owner: []string{"", "alice"}[i%2]})
		c.Time = c.Add(time.Minute)
	}
	found(before, "resp_0")
	data := before.AppendTo([]byte("x"))[1:]
	after := New(Settings{MaxEntries: 10, TTL: time.Hour}, c.now, nil)
	if err := after.Restore(data); err != nil {
		t.Fatal(err)
	}
	if got, want := after.list(), before.list(); !slices.EqualFunc(got, want, func(a, b record) bool {
		return a.id == b.id && a.Entry == b.Entry && a.usedAt.Equal(b.usedAt)
	}) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if again := after.AppendTo(nil); !bytes.Equal(again, data) {
		t.Error("the restored entries are written differently")
	}
	c.Time = c.Add(time.Hour - 4*time.Minute)
	smaller := New(Settings{MaxEntries: 2, TTL: time.Hour}, c.now, nil)
	if err := smaller.Restore(data); err != nil {
		t.Fatal(err)
	}
	if smaller.Len() != 2 || found(smaller, "resp_0") == "" || found(smaller, "resp_7") == "" {
		t.Errorf("kept %v, want resp_7 and resp_0", smaller.list())
	}
}

func FuzzRestore(f *testing.F) {
	x, c := newTestIndex(10)
	f.Add(x.AppendTo(nil))
	x.Add("resp_1", Entry{"http://10.0.0.1:8000", "alice"})
	x.Add("resp_2", Entry{"http://10.0.0.2:8000", ""})
	f.Add(x.AppendTo(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		x := New(Settings{MaxEntries: 100, TTL: time.Hour}, c.now, nil)
		if x.Restore(data) != nil {
			if x.Len() != 0 {
				t.Error("entries were added in spite of an error")
			}
			return
		}
		again := New(Settings{MaxEntries: 100, TTL: time.Hour}, c.now, nil)
		if err := again.Restore(x.AppendTo(nil)); err != nil || again.Len() != x.Len() {
			t.Errorf("%d entries became %d: %v", x.Len(), again.Len(), err)
		}
	})
}
