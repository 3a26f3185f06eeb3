package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// logLines parses a log in JSON.
func logLines(t *testing.T, log string) (lines []map[string]any) {
	t.Helper()
	for line := range strings.Lines(log) {
		var attributes map[string]any
		if err := json.Unmarshal([]byte(line), &attributes); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		lines = append(lines, attributes)
	}
	return lines
}

func TestLogInJSON(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "log: {format: json}\ntimeouts: {serve_after_term: 1ms, shutdown: 90s}")
	p := launch(t, exec.Command(binary, "serve", "--config", file.path))
	p.awaitLog(`"msg":"backend state"`)
	p.signal(syscall.SIGTERM)
	if status := p.exit(); status != 0 {
		t.Errorf("status %d", status)
	}
	p.awaitLog(`"msg":"stopped".*\n`)
	lines := logLines(t, p.log.String())
	first, last := lines[0], lines[len(lines)-1]
	if first["msg"] != "starting" || first["version"] == nil || first["pid"] != float64(p.cmd.Process.Pid) || first["go"] == nil {
		t.Errorf("first line %v", first)
	}
	uptime, err := time.ParseDuration(last["uptime"].(string))
	if last["msg"] != "stopped" || last["reason"] != "terminated" || err != nil || uptime <= 0 {
		t.Errorf("last line %v, %v", last, err)
	}
	durations := 0
	for _, line := range lines {
		for _, name := range []string{"for", "timeout"} {
			if value, ok := line[name]; ok {
				durations++
				if text, _ := value.(string); text != "1ms" && text != "1m30s" {
					t.Errorf("%s: %s is %v", line["msg"], name, value)
				}
			}
		}
	}
	if durations != 2 {
		t.Errorf("%d durations in the log, want 2:\n%s", durations, p.log.String())
	}
}

func TestLogEndsWithReason(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "timeouts: {serve_after_term: 0}")
	p := startProgram(t, "--config", file.path)
	p.signal(os.Interrupt)
	p.exit()
	p.awaitLog(`msg=stopped reason=interrupt uptime=\S+s\n$`)

	taken := startProgram(t, "--config", file.path)
	failed := launch(t, exec.Command(binary, "serve", "--config", file.path, "--listen", strings.TrimPrefix(taken.url, "http://")))
	if status := failed.exit(); status != 1 {
		t.Errorf("status %d", status)
	}
	failed.awaitLog(`msg=stopped reason=".* is in use: .* uptime=\S+s\n`)
}

// Warnings of a configuration are for its first use; later ones are for what a reload changed.
func TestReloadRepeatsNoWarning(t *testing.T) {
	t.Parallel()
	const warned = "timeouts: {keepalive_idle: 5s}\nlimits: {in_flight: 1000, connections: 1000}\n"
	file := startSimFleet(t, 1, 200_000).configFile(t, warned)
	p := startCommand(t, exec.Command("sh", "-c", `ulimit -n 500; exec "$0" serve --config "$1"`, binary, file.path))
	file.write(warned + "breaker: {failures: 0}\n")
	p.reloaded("ok", 1)
	for _, warning := range []string{"file descriptor limit is too low: 2102", "timeouts.keepalive_idle"} {
		if n := strings.Count(p.log.String(), warning); n != 1 {
			t.Errorf("%q %d times in the log:\n%s", warning, n, p.log.String())
		}
	}
	file.write(strings.Replace(warned, "in_flight: 1000", "in_flight: 1200", 1))
	p.reloaded("ok", 2)
	p.awaitLog("file descriptor limit is too low: 2502")
}

// Each added backend may need a few more descriptors, which is not worth another warning.
func TestAddedBackendsRepeatNoDescriptorWarning(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 3, 200_000)
	list := func(n int) string {
		return "limits: {in_flight: 1000, connections: 1000}\nbackends: [" + strings.Join(fleet.urls[:n], ", ") + "]"
	}
	file := fleet.configFile(t, list(1))
	p := file.startWithDescriptors(500)
	for n := 2; n <= len(fleet.urls); n++ {
		file.write(list(n))
		p.reloaded("ok", n-1)
	}
	if n := strings.Count(p.log.String(), "file descriptor limit"); n != 1 {
		t.Errorf("%d times in the log:\n%s", n, p.log.String())
	}
}

func TestConnectionErrorNamesAddressOnce(t *testing.T) {
	t.Parallel()
	p := launch(t, exec.Command(binary, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "http://127.0.0.1:1"))
	for _, want := range []string{
		`msg="backend state" backend=127\.0\.0\.1:1 state=down reason="/health: connect: connection refused"`,
		`msg="poll failed" backend=127\.0\.0\.1:1 reason="/metrics: connect: connection refused"`,
	} {
		p.awaitLog(want)
	}
}
