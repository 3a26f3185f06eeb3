package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

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
