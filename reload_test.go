package main

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
)

func TestAReloadUnderLoadLosesNoRequest(t *testing.T) {
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

func TestAChangedFileIsReadWithoutASignal(t *testing.T) {
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
	p.awaitLog(`msg="configuration reloaded" changed=\[limits.body_bytes\]`)
}

func TestABadFileLeavesTheOldConfigurationInUse(t *testing.T) {
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	for i, bad := range []struct{ yaml, want string }{
		{"routing: {policy: fastest}\npoll: {interval: 0s}", `fault="poll.interval: `},
		{"routing: {policy: [", `fault=".*: line \d+: `},
		{"no_such: 1", `fault="no_such: `},
		{"backends: []", `fault="backends: `},
	} {
		file.write(bad.yaml)
		p.signal(syscall.SIGHUP)
		p.reloaded("failed", i+1)
		p.awaitLog(bad.want)
		if err := askStream(http.DefaultClient, p.url, "hello", 4, nil); err != nil {
			t.Errorf("after a bad file: %v", err)
		}
	}
	p.awaitLog(`fault="routing.policy: `)
	http.DefaultClient.CloseIdleConnections()
	file.write("")
	p.signal(syscall.SIGHUP)
	p.reloaded("ok", 1)
}

func TestWhatWaitsForTheNextStartIsSaid(t *testing.T) {
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "")
	p := startProgram(t, "--config", file.path)
	file.write("index: {block_bytes: 512}\nrecord: {keep: 9}")
	p.signal(syscall.SIGHUP)
	for _, setting := range []string{"index.block_bytes", "record.keep"} {
		p.awaitLog(`msg="setting takes effect at the next start" setting=` + setting)
	}
}
