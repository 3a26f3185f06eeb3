package filelock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func mustOpen(t *testing.T, path string) *os.File {
	t.Helper()
	file, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return file
}

// A lock is an opened file's, so that two in one process are as good as two processes.
func TestOpenWaitsForLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	first := mustOpen(t, path)
	if info, err := first.Stat(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := TryOpen(path); !errors.Is(err, ErrLocked) {
		t.Errorf("a second TryOpen: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := Open(ctx, path)
	if !errors.Is(err, ErrLocked) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), path) {
		t.Errorf("a second Open until ctx is done: %v", err)
	}
	time.AfterFunc(3*openInterval, func() { first.Close() })
	mustOpen(t, path)
}

// Whoever waits for a file that is renamed, replaced or removed opens the one that then has the name.
func TestOpenFollowsName(t *testing.T) {
	for name, replace := range map[string]func(path string) error{
		"renamed": func(path string) error { return os.Rename(path, path+".1") },
		"removed": os.Remove,
		"replaced": func(path string) error {
			return errors.Join(os.WriteFile(path+".new", nil, 0o600), os.Rename(path+".new", path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			stale, err := os.Create(path) // opened, and not locked yet
			if err != nil {
				t.Fatal(err)
			}
			defer stale.Close()
			if err := replace(path); err != nil {
				t.Fatal(err)
			}
			if err := lockNamed(stale); !errors.Is(err, ErrLocked) {
				t.Errorf("locked: %v", err)
			}
			opened, err := mustOpen(t, path).Stat()
			if err != nil {
				t.Fatal(err)
			}
			if named, err := os.Stat(path); err != nil || !os.SameFile(opened, named) {
				t.Errorf("another file is open: %v", err)
			}
		})
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	a, b, c := NewLock(path), NewLock(path), NewLock(path)
	for range 2 { // the second time it is locked already
		if err := a.TryLock(); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.TryLock(); err == nil || !strings.HasPrefix(err.Error(), "another process writes "+path+": stop it") {
		t.Errorf("a second lock: %v", err)
	}
	time.AfterFunc(3*openInterval, a.Unlock)
	if err := b.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer b.Unlock()
	if err := c.TryLock(); err == nil {
		t.Error("two are locked")
	}
	absent := NewLock(filepath.Join(path, "absent"))
	if err := absent.Acquire(t.Context()); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("in a folder that is not there: %v", err)
	}
}
