package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 2, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	clients := p.startCrowd(8, &http.Transport{})
	clients.more(20)
	for i, yaml := range []string{
		"routing: {policy: least-load}", "timeouts: {idle: 100s}", "limits: {body_bytes: 1MiB}", "log: {level: debug}", "",
	} {
		file.write(yaml)
		p.signal(syscall.SIGHUP)
		p.reloaded("ok", i+1)
		clients.more(100)
	}
	clients.leave()
}

func (p *program) reloaded(result string, times int) {
	p.t.Helper()
	p.eventually("reloaded", func() bool {
		return metricSum(p.t, p.admin, "warmroute_config_reloads_total", result) == float64(times)
	})
	if times == 0 {
		return // of the last one, this says nothing
	}
	taken := map[string]float64{"ok": 1}[result]
	p.eventually("it is told whether it was taken", func() bool {
		return metricSum(p.t, p.admin, "warmroute_config_last_reload_successful") == taken
	})
}

func TestReloadOnFileChange(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	file.write("limits: {body_bytes: 1KiB}")
	p.reloaded("ok", 1)
	body := `{"model":"sim","messages":[{"role":"user","content":"` + strings.Repeat("long ", 1000) + `"}]}`
	resp, err := http.Post(p.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d; the new limit is not in force", resp.StatusCode)
	}
	p.awaitLog(`msg="config reloaded" changed=\[limits.body_bytes\]`)
}

func TestReloadKeepsPreviousConfigOnError(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	for i, bad := range []struct{ yaml, want string }{
		{"routing: {policy: fastest}\npoll: {interval: 0s}", `err="poll.interval: `},
		{"routing: {policy: [", `err=".*: line \d+: `},
		{"no_such: 1", `err="no_such: `},
		{"backends: []", `err="backends: `},
	} {
		file.write(bad.yaml)
		p.signal(syscall.SIGHUP)
		p.reloaded("failed", i+1)
		p.awaitLog(bad.want)
		if err := askStream(http.DefaultClient, p.url, "hello", 4, nil); err != nil {
			t.Errorf("after a bad file: %v", err)
		}
	}
	p.awaitLog(`err="routing.policy: `)
	http.DefaultClient.CloseIdleConnections()
	file.write("")
	p.signal(syscall.SIGHUP)
	p.reloaded("ok", 1)
}

func TestReloadOfSettingThatNeedsRestart(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	file.write("index: {block_bytes: 512}\nrecord: {keep: 9}")
	p.signal(syscall.SIGHUP)
	for _, setting := range []string{"index.block_bytes", "record.keep"} {
		p.awaitLog(`msg="setting change requires a restart" setting=` + setting)
	}
}

func TestReloadBackends(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 3, 200_000)
	file := fleet.configFile(t, "")
	list := func(urls ...string) {
		file.write("timeouts: {drain: 0s}\nbackends: [" + strings.Join(urls, ", ") + "]")
	}
	list(fleet.urls[:2]...)
	p := startProgram(t, "--config", file.path)
	clients := p.startCrowd(8, &http.Transport{})
	ready := func(url string, want float64) {
		t.Helper()
		p.eventually(fmt.Sprint("backend_ready of ", url, " is ", want), func() bool {
			return metricSum(t, p.admin, "warmroute_backend_ready", strings.TrimPrefix(url, "http://")) == want
		})
	}
	for i := range 6 {
		in, out := fleet.urls[(i+2)%3], fleet.urls[i%3]
		list(fleet.urls[(i+1)%3], in)
		p.signal(syscall.SIGHUP)
		p.reloaded("ok", i+1)
		ready(in, 1)
		ready(out, 0)
		clients.more(50)
	}
	clients.leave()
	p.signal(syscall.SIGTERM)
	if status := p.exit(); status != 0 {
		t.Errorf("exit status %d", status)
	}
}
