package fleet

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func newTestStateFile(t *testing.T, path string) (*stateFile, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	return newStateFile(path, slog.New(slog.NewTextHandler(&log, nil))), &log
}

func readState(t *testing.T, s *stateFile) map[string][]byte {
	t.Helper()
	values, err := s.ReadRecords(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func TestStateFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	a, _ := newTestStateFile(t, path)
	b, _ := newTestStateFile(t, path)
	if values := readState(t, a); len(values) != 0 {
		t.Fatalf("an absent file has %v", values)
	}
	write := func(s *stateFile, key string, removed ...string) {
		t.Helper()
		if err := s.WriteRecords(t.Context(), map[string][]byte{key: []byte(`{"by":"x"}`)}, removed); err != nil {
			t.Fatal(err)
		}
	}
	write(a, "drain/a")
	write(b, "drain/b")
	write(a, "drain/c", "drain/a")
	for _, s := range []*stateFile{a, b} {
		if values := readState(t, s); len(values) != 2 || values["drain/b"] == nil || values["drain/c"] == nil {
			t.Errorf("the file has %v", maps.Keys(values))
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// Two processes write during a binary upgrade. Neither loses what the other has written.
func TestStateFileOfTwoProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	const each = 20
	var writers sync.WaitGroup
	for p := range 2 {
		s, _ := newTestStateFile(t, path)
		writers.Go(func() {
			for i := range each {
				if err := s.WriteRecords(t.Context(), map[string][]byte{fmt.Sprintf("drain/%d-%d", p, i): []byte("{}")}, nil); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	s, _ := newTestStateFile(t, path)
	if n := len(readState(t, s)); n != 2*each {
		t.Errorf("%d records are there, want %d", n, 2*each)
	}
}

// Replicas whose URL is another one each time leave the record of a removal each. The oldest are dropped from the file
// as well, which can be read the next time.
func TestStateFileIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	file, log := newTestStateFile(t, path)
	e := newStoreExchange(file, path, true)
	var r records
	key := func(i int) recordKey { return replicaKey(fmt.Sprint("r", i)) }
	now := recordTime
	const n = maxRecords + 100
	for i := range n {
		now = now.Add(time.Second)
		r.change(key(i), record{removed: true}, now)
		if i%500 == 0 || i > n-20 {
			e.exchange(t.Context(), file.log, func(c *storedCopy) (map[string][]byte, []string, error) {
				_, write, remove, err := r.mergeStored(c, now)
				return write, remove, err
			})
		}
	}
	next, _ := newTestStateFile(t, path)
	if values := readState(t, next); len(values) > maxRecords || values[string(key(n-1))] == nil || log.Len() > 0 {
		t.Errorf("the file has %d records; the log: %s", len(values), log)
	}
}

func TestBrokenStateFileIsKeptAside(t *testing.T) {
	for _, content := range []string{"", "{", `{"version":9,"records":{}}`, "\x00\x00"} {
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		s, log := newTestStateFile(t, path)
		if values := readState(t, s); len(values) != 0 {
			t.Errorf("%q has %v", content, values)
		}
		if kept, err := os.ReadFile(path + brokenSuffix); err != nil || string(kept) != content {
			t.Errorf("%q was kept as %q, %v", content, kept, err)
		}
		if !strings.Contains(log.String(), "state file is invalid") {
			t.Errorf("logged %q", log.String())
		}
		if err := s.WriteRecords(t.Context(), map[string][]byte{"drain/a": []byte("{}")}, nil); err != nil || len(readState(t, s)) != 1 {
			t.Errorf("not written again: %v", err)
		}
	}
}
