//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"warmroute/filelock"
)

// isLocked reports whether a process holds the lock of a snapshot.
func isLocked(t *testing.T, snapshot string) bool {
	t.Helper()
	file, err := filelock.TryOpen(snapshot + ".lock")
	if err == nil {
		file.Close()
	} else if !errors.Is(err, filelock.ErrLocked) {
		t.Fatal(err)
	}
	return err != nil
}

func TestSnapshotHasOneWriter(t *testing.T) {
	t.Parallel()
	snapshot := filepath.Join(t.TempDir(), "index")
	fleet := startSimFleet(t, 1, 200_000)
	yaml := "timeouts: {serve_after_term: 0}\nindex: {snapshot: " + snapshot + "}"
	first := startProgram(t, "--config", fleet.configFile(t, yaml).path)
	second := fleet.configFile(t, yaml)
	refused := func(when string) {
		t.Helper()
		p := launch(t, exec.Command(binary, "serve", "--config", second.path))
		if status := p.exit(); status != 1 {
			t.Errorf("%s: status %d", when, status)
		}
		p.awaitLog(`\nwarmroute: index.snapshot: another process writes ` + snapshot + `: stop it, or set another file for one of the two\n`)
	}
	refused("at once")

	pid := first.upgrade()
	if status := first.exit(); status != 0 {
		t.Errorf("the predecessor ended with status %d", status)
	}
	if strings.Contains(first.log.String(), "level=WARN msg=\"the index") {
		t.Errorf("the log:\n%s", first.log.String())
	}
	first.eventually("the successor has the lock", func() bool { return isLocked(t, snapshot) })
	refused("after a binary upgrade")

	before, err := os.Stat(snapshot)
	if err != nil {
		t.Fatal(err)
	}
	first.succeed(pid)
	first.signal(os.Interrupt)
	first.eventually("the successor ends", func() bool { return syscall.Kill(pid, 0) != nil })
	if after, err := os.Stat(snapshot); err != nil || os.SameFile(before, after) {
		t.Errorf("the successor wrote no snapshot: %v", err)
	}
	startProgram(t, "--config", second.path)
}

func TestUnwritableSnapshotEndsStart(t *testing.T) {
	for _, c := range []struct{ path, want string }{
		{"absent/index", "absent does not exist"},
		{".", "is a directory"},
		{"notes", "is not a warmroute snapshot"},
	} {
		folder := t.TempDir()
		if err := os.WriteFile(filepath.Join(folder, "notes"), []byte("do not lose this"), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(binary, "serve", "http://127.0.0.1:1")
		cmd.Env = append(os.Environ(), "WARMROUTE_INDEX_SNAPSHOT="+filepath.Join(folder, c.path))
		p := launch(t, cmd)
		if status := p.exit(); status != 2 {
			t.Errorf("%s: status %d", c.path, status)
		}
		p.awaitLog(`^index\.snapshot \(from WARMROUTE_INDEX_SNAPSHOT\): .*` + c.want)
	}
}
