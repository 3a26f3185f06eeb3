package usage

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// limitFileSize makes writes beyond a size fail for all files of the process, as on a full disk.
func limitFileSize(t *testing.T, bytes uint64) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	limit.Cur = bytes
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
}

func TestFullDisk(t *testing.T) {
	table := newTable(t, filepath.Join(t.TempDir(), "usage"), false)
	t.Cleanup(func() { limitFileSize(t, unix.RLIM_INFINITY) })
	record := func(n int) {
		for range n {
			table.Record("a", "x", "", noon, tokens(1))
			table.Record("b", "x", "", noon, tokens(1))
			table.Save(noLog)
		}
	}
	record(2)
	limitFileSize(t, 700) // the middle of a later row
	record(5)
	if s := table.Status(); s.Err == nil {
		t.Fatal("no write has failed")
	}
	if c := total(t, table); c.Requests != 14 {
		t.Errorf("%d requests while the disk is full, want 14", c.Requests)
	}
	limitFileSize(t, unix.RLIM_INFINITY)
	table.Save(noLog)
	if s := table.Status(); s.Err != nil || len(table.unsaved) > 0 {
		t.Errorf("not saved: %v", s.Err)
	}
	if c := total(t, table); c.Requests != 14 {
		t.Errorf("%d requests after that, want 14", c.Requests)
	}
}
