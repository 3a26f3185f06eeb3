package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// limitFileSize makes the writes of the proxy beyond a size of a file fail, as on a full disk.
func (p *program) limitFileSize(bytes uint64) {
	p.t.Helper()
	var limit unix.Rlimit
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_FSIZE, nil, &limit); err != nil {
		p.t.Fatal(err)
	}
	limit.Cur = bytes
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_FSIZE, &limit, nil); err != nil {
		p.t.Fatal(err)
	}
}

// unsavedReason returns why rows of the account are not in the file, as the page shows it; "" if all are.
func (p *program) unsavedReason() string {
	p.t.Helper()
	resp, err := http.Get(p.admin + "/api/usage")
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	var report struct{ Unsaved string }
	if err := json.NewDecoder(resp.Body).Decode(&report); err != nil {
		p.t.Fatal(err)
	}
	return report.Unsaved
}

// TestUsageOnFullDisk expects that requests go on while the usage file cannot be written, and that each is in it once
// when it can be again.
func TestUsageOnFullDisk(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	usage := filepath.Join(t.TempDir(), "usage")
	yaml := "usage: {file: " + usage + "}"
	file := fleet.configFile(t, yaml)
	p := startProgram(t, "--config", file.path)
	want := 0
	ask := func() {
		t.Helper()
		for range 3 {
			want++
			if err := askStream(http.DefaultClient, p.url, fmt.Sprint("request ", want), 2, func() {}); err != nil {
				t.Fatal(err)
			}
		}
	}
	failures := 0
	save := func() { // a binary upgrade begins with it, and fails with this configuration
		t.Helper()
		file.write("listen: invalid\n")
		p.signal(syscall.SIGUSR2)
		failures++
		p.eventually("the binary upgrade has failed", func() bool {
			return strings.Count(p.log.String(), "binary upgrade failed, this process keeps serving") == failures
		})
	}
	check := func(when string, isUnsaved bool) {
		t.Helper()
		p.eventually(when, func() bool { return p.countUsedRequests() == want })
		if reason := p.unsavedReason(); (reason != "") != isUnsaved {
			t.Errorf("%s: unsaved because of %q, want a reason: %v", when, reason, isUnsaved)
		}
	}
	ask()
	save()
	check("before", false)
	ask()
	p.limitFileSize(100) // less than the file has
	save()
	check("on a full disk", true)
	ask()
	save()
	check("on a disk that is still full", true)
	p.limitFileSize(unix.RLIM_INFINITY)
	save()
	check("with space again", false)
	p.signal(syscall.SIGKILL)
	p.exit()
	file.write(yaml)
	p = startProgram(t, "--config", file.path)
	check("after a kill", false)
}
