package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// logged waits until a file's lines name these requests, and no others.
func logged(p traced, path string, ids ...string) {
	p.t.Helper()
	p.eventually(fmt.Sprint("the access log has ", ids), func() bool {
		text, _ := os.ReadFile(path)
		if strings.Count(string(text), "\n") != len(ids) {
			return false
		}
		for _, id := range ids {
			if !strings.Contains(string(text), `"request_id":"`+id+`"`) {
				p.t.Fatalf("%s is not in\n%s", id, text)
			}
		}
		return true
	})
}

func TestAccessLogReloadAndRotation(t *testing.T) {
	t.Parallel()
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	config := (&simFleet{urls: []string{replica}}).configFile(t, "")
	p := traced{startProgram(t, "--config", config.path)}
	one, two := filepath.Join(t.TempDir(), "one"), filepath.Join(t.TempDir(), "two")
	reload := func(yaml, says string) {
		t.Helper()
		before := strings.Count(p.log.String(), says)
		config.write(yaml)
		p.signal(syscall.SIGHUP)
		p.eventually(says, func() bool { return strings.Count(p.log.String(), says) > before })
	}
	p.read("sim", "to-nobody", false)
	reload("access_log: {file: "+one+"}\n", "config reloaded")
	p.read("sim", "a", false)
	logged(p, one, "a")
	reload("access_log: {file: "+filepath.Join(one, "x")+"}\n", "access_log.file: stat "+one)
	p.read("sim", "b", false)
	logged(p, one, "a", "b")
	reload("access_log: {file: "+two+", sample: 0}\n", "config reloaded")
	p.read("sim", "good", false)
	resp := p.ask("none", "bad", false)
	resp.Body.Close()
	logged(p, two, "bad")
	if err := os.Rename(two, two+".1"); err != nil {
		t.Fatal(err)
	}
	p.signal(syscall.SIGHUP)
	p.eventually("the file is there again", func() bool { _, err := os.Stat(two); return err == nil })
	resp = p.ask("none", "worse", false)
	resp.Body.Close()
	logged(p, two, "worse")
	logged(p, two+".1", "bad")
	if dropped := metricSum(t, p.admin, "warmroute_access_log_dropped_lines_total"); dropped != 0 {
		t.Errorf("%v lines were dropped", dropped)
	}
}

// TestBlockedStdoutDelaysNothing gives the access log a pipe that
// is full after a few hundred requests, and one whose reader is gone.
func TestBlockedStdoutDelaysNothing(t *testing.T) {
	t.Parallel()
	replica, _ := startSimReplica(t, sim.Config{Engine: engine.Config{Speed: 20}}, "127.0.0.1:0")
	for name, gone := range map[string]bool{"unread": false, "gone": true} {
		t.Run(name, func(t *testing.T) {
			config := (&simFleet{urls: []string{replica}}).configFile(t, "access_log: {file: stdout}\ntimeouts: {serve_after_term: 0}\n")
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			cmd := exec.Command(binary, "serve", "--config", config.path)
			cmd.Stdout = w
			p := traced{startCommand(t, cmd)}
			w.Close()
			if gone {
				r.Close()
			}
			for i := range 300 { // 64 KiB of lines is what a pipe takes
				resp := p.ask("none", fmt.Sprint("request-", i, "-", strings.Repeat("x", 100)), false)
				resp.Body.Close()
			}
			p.eventually("what is lost is counted", func() bool {
				return !gone || metricSum(t, p.admin, "warmroute_access_log_dropped_lines_total") == 300
			})
			p.signal(syscall.SIGTERM)
			if status := p.exit(); status != 0 {
				t.Errorf("status %d", status)
			}
		})
	}
}
