//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// countUsedRequests returns how many requests the proxy's account has.
func (p *program) countUsedRequests() int {
	p.t.Helper()
	resp, err := http.Get(p.admin + "/api/usage")
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	var report struct{ Total struct{ Requests int } }
	if err := json.NewDecoder(resp.Body).Decode(&report); err != nil {
		p.t.Fatal(err)
	}
	return report.Total.Requests
}

// TestUsageOutlivesProcesses counts each request once over a binary upgrade, a restart and a kill.
func TestUsageOutlivesProcesses(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	usage := filepath.Join(t.TempDir(), "usage")
	file := fleet.configFile(t, "timeouts: {serve_after_term: 0}\nusage: {file: "+usage+"}")
	p := startProgram(t, "--config", file.path)
	want := 0
	ask := func(n int) {
		t.Helper()
		for range n {
			want++
			if err := askStream(http.DefaultClient, p.url, fmt.Sprint("request ", want), 2, func() {}); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(when string) {
		t.Helper()
		p.eventually(when, func() bool { return p.countUsedRequests() == want })
	}
	ask(3)
	check("before the binary upgrade")
	refused := launch(t, exec.Command(binary, "serve", "--config", fleet.configFile(t, "usage: {file: "+usage+"}").path))
	if status := refused.exit(); status != 1 {
		t.Errorf("a second process ended with status %d", status)
	}
	refused.awaitLog(`\nwarmroute: usage.file: another process writes ` + usage)

	// A stream that ends in the predecessor, after the binary upgrade.
	begun, ended := make(chan struct{}), make(chan error)
	go func() { ended <- askStream(http.DefaultClient, p.url, "a long one", 1500, func() { close(begun) }) }()
	<-begun
	want++
	pid := p.upgrade()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if status := p.exit(); status != 0 {
		t.Fatalf("the predecessor ended with status %d", status)
	}
	p.succeed(pid)
	ask(2)
	check("after the binary upgrade")
	p.eventually("the successor has the lock", func() bool { return isLocked(t, usage) })
	p.signal(syscall.SIGTERM)
	p.eventually("the successor ends", func() bool { return syscall.Kill(pid, 0) != nil })

	p = startProgram(t, "--config", file.path)
	check("after a restart")
	ask(2) // lost: they were not saved yet
	p.signal(syscall.SIGKILL)
	p.exit()
	want -= 2
	p = startProgram(t, "--config", file.path)
	check("after a kill")
}
