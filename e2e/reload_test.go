//go:build unix

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
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
	file.write("index: {block_bytes: 512}\nrecording: {keep: 9}")
	p.signal(syscall.SIGHUP)
	for _, setting := range []string{"index.block_bytes", "recording.keep"} {
		p.awaitLog(`msg="setting change requires a restart" setting=` + setting)
	}
}

func TestReloadBackends(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 3, 200_000)
	file := fleet.configFile(t, "")
	list := func(urls ...string) {
		file.write("timeouts: {serve_after_term: 0s}\nbackends: [" + strings.Join(urls, ", ") + "]")
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

// What lets more people in than before may be a file cut short: nothing of that is
// taken while the proxy runs.
func TestReloadRefusesWeakerProtection(t *testing.T) {
	t.Parallel()
	const guards = "admin_token: what-operators-send\nkeys: [{name: a, sha256: " +
		"\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"}]\n"
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "tenant: isolate\n"+guards)
	p := startProgram(t, "--config", file.path)
	unknown := func() int {
		t.Helper()
		resp, err := p.get("/v1/models")
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode
	}
	file.write("")
	p.reloaded("failed", 1)
	for _, setting := range []string{"keys", "admin_token", "tenant"} {
		p.awaitLog(`msg="config reload failed, keeping previous config" err="` + setting + `: `)
	}
	if status := unknown(); status != http.StatusUnauthorized {
		t.Errorf("without a key: %d", status)
	}
	file.write("tenant: isolate\nlimits: {in_flight: 9}\n" + guards)
	p.reloaded("ok", 1)
}

// Files that only a refused configuration names are watched as well.
func TestReloadWatchesFilesOfRejectedConfig(t *testing.T) {
	t.Parallel()
	file := startSimFleet(t, 1, 200_000).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	token := filepath.Join(t.TempDir(), "token")
	file.write("admin_token_file: " + token)
	p.awaitLog(`err="admin_token_file: .*no such file`)
	if err := os.WriteFile(token, []byte("what-operators-send"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.reloaded("ok", 1)
}

// TestReloadKeysAndAdminToken changes them, by files and by the
// configuration, under a request of a key that goes.
func TestReloadKeysAndAdminToken(t *testing.T) {
	t.Parallel()
	fleet := startSimFleet(t, 1, 200_000)
	folder := t.TempDir()
	put := func(name, text string) string {
		t.Helper()
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const first, second, token = "the-first-key-of-a-tenant", "the-second-key-of-a-tenant", "what-operators-send"
	settings := "keys_file: " + put("keys", "old "+first+"\nstays "+second+"\n") + "\nadmin_token_file: " + put("token", token+"\n") + "\n"
	file := fleet.configFile(t, settings)
	p := startProgram(t, "--config", file.path)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	send := func(method, url, key, body string) (int, string, error) {
		req, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil {
			return 0, "", err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := client.Do(req)
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		answer, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(answer), err
	}
	models := func(key string) int {
		t.Helper()
		status, _, err := send(http.MethodGet, p.url+"/v1/models", key, "")
		if err != nil {
			t.Fatal(err)
		}
		return status
	}
	drain := func(verb, key string) int {
		t.Helper()
		name := strings.TrimPrefix(fleet.urls[0], "http://")
		status, _, err := send(http.MethodPost, p.admin+"/api/backends/"+name+"/"+verb, key, "{}")
		if err != nil {
			t.Fatal(err)
		}
		return status
	}
	if models(first) != 200 || models(second) != 200 || models("another") != 401 {
		t.Fatal("the file of keys is not in force")
	}
	ended := make(chan error, 1)
	go func() {
		status, answer, err := send(http.MethodPost, p.url+"/v1/chat/completions", first,
			`{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":1500,"messages":[{"role":"user","content":"long"}]}`)
		if err == nil && (status != 200 || !strings.HasSuffix(answer, "data: [DONE]\n\n")) {
			err = fmt.Errorf("status %d, %.200s", status, answer)
		}
		ended <- err
	}()
	p.eventually("the request is counted", func() bool { return metricSum(t, p.admin, "warmroute_key_in_flight", "old") == 1 })

	// A changed file is seen without a signal.
	put("keys", "stays "+second+"\n")
	p.eventually("the key is gone", func() bool { return models(first) == 401 })
	if exposition := p.exposition(); strings.Contains(exposition, `key="old"`) || !strings.Contains(exposition, `key="stays"`) {
		t.Error("the metrics tell of a key that is gone, or not of one that stays")
	}
	if err := <-ended; err != nil {
		t.Errorf("a request of a key that went: %v", err)
	}
	if models(second) != 200 {
		t.Error("the key that stays is not valid")
	}

	// A file that holds no keys would let everybody in.
	put("keys", "# none\n")
	p.awaitLog(`err="keys_file: `)
	if models("another") != 401 {
		t.Error("everybody may come in")
	}

	if drain("drain", "another") != 401 || drain("drain", token) != 200 || drain("undrain", token) != 200 {
		t.Error("the token is not in force")
	}
	put("keys", "stays "+second+"\n")
	put("token", "another-for-operators\n")
	file.write(settings + "keys: [{name: stays, requests_per_minute: 1}]\n")
	p.signal(syscall.SIGHUP)
	p.eventually("the token is another", func() bool { return drain("undrain", token) == 401 })
	if drain("undrain", "another-for-operators") != 200 {
		t.Error("the new token is not in force")
	}
	ask := `{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`
	for _, want := range []int{200, 429} {
		if status, answer, err := send(http.MethodPost, p.url+"/v1/chat/completions", second, ask); err != nil || status != want {
			t.Errorf("got %d %s %v, want %d", status, answer, err, want)
		}
	}
}

// A replica's own path, as SkyRL's, is relayed once the file names it, with the key of a client and the session.
func TestReloadExtraPaths(t *testing.T) {
	t.Parallel()
	const path, body = "/skyrl/v1/generate", `{"token_ids":[1,2,3]}`
	sessions := make(chan string, 1)
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.URL.Path {
		case "/v1/models":
			io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","root":"m"}]}`)
		case path:
			sessions <- r.Header.Get("X-Session-Id")
			io.Copy(w, r.Body)
		}
	}))
	t.Cleanup(replica.Close)
	file := (&simFleet{urls: []string{replica.URL}}).configFile(t, "")
	p := startProgram(t, "--config", file.path)
	post := func() (int, string) {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, p.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Session-Id", "one")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer http.DefaultClient.CloseIdleConnections()
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(got)
	}
	if status, got := post(); status != http.StatusNotFound {
		t.Errorf("before it is configured: %d %s", status, got)
	}
	file.write("extra_paths: [" + path + "]")
	p.reloaded("ok", 1)
	if status, got := post(); status != http.StatusOK || got != body || <-sessions != "one" {
		t.Errorf("got %d %s", status, got)
	}
	file.write("extra_paths: [" + path + ", /v1/pause]")
	p.reloaded("failed", 1)
	p.awaitLog(`err="extra_paths\[1\]: /v1/pause is for the operator`)
}
