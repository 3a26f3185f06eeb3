package server

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/sim"
)

// drain has an operator drain a backend.
func (p registrable) drain(name string) {
	p.t.Helper()
	resp, err := p.client.Post(p.admin+"/api/backends/"+url.PathEscape(name)+"/drain", "application/json", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		p.t.Fatalf("drain of %s: status %d", name, resp.StatusCode)
	}
}

// stateOf returns the state of a backend, "" if there is none.
func (p registrable) stateOf(name string) string {
	b := p.server.registry.Find(name)
	if b == nil {
		return ""
	}
	return b.State().String()
}

// contains waits until a file has text.
func (p registrable) contains(file, text string, want bool) {
	p.t.Helper()
	p.until(fmt.Sprintf("%s in %s: %v", text, file, want), func() bool {
		data, err := os.ReadFile(file)
		return err == nil && strings.Contains(string(data), text) == want
	})
}

// What was registered and drained is as before when another process starts with the state file of one that was killed,
// which here still runs.
func TestStateFileAfterKill(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "state.json")
	withState := func(c *config.Config) { c.StateFile = file }
	kept, drained, removed, configured := standIn{}.start(t), standIn{}.start(t), standIn{}.start(t), standIn{}.start(t)
	first := startRegistrable(t, withState, configured)
	for _, replica := range []string{kept, drained, removed} {
		first.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica+"/"))
	}
	name := func(replica string) string { return strings.TrimPrefix(replica, "http://") }
	first.drain(name(drained))
	first.drain(name(configured))
	first.expect(http.StatusOK, "DELETE", "/workers/"+name(removed), "")
	first.contains(file, `"given_url": "`+removed, false)
	first.contains(file, `"drain/`+name(configured), true)

	second := startRegistrable(t, withState, configured)
	second.ready(1)
	for replica, want := range map[string]string{kept: "ready", drained: "draining", configured: "draining", removed: ""} {
		if got := second.stateOf(name(replica)); got != want {
			t.Errorf("%s is %q, want %q", replica, got, want)
		}
	}
	if second.idOf(kept+"/") == "" {
		t.Errorf("its URL has changed: %+v", second.workers())
	}
	second.checkServed()

	// The first one goes on for a while, as during a binary upgrade: what one of them changes is known to both.
	second.expect(http.StatusOK, "DELETE", "/workers/"+name(kept), "")
	first.until("the removal is known", func() bool { return first.stateOf(name(kept)) == "" })
	first.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, removed))
	second.until("the replica is known", func() bool { return second.stateOf(name(removed)) == "ready" })
}

// A change that cannot be stored is made, and the operator is told that it is not stored.
func TestUnstoredChangeIsReported(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	configured, replica := standIn{}.start(t), standIn{}.start(t)
	p := startRegistrable(t, func(c *config.Config) { c.StateFile = filepath.Join(folder, "state.json") }, configured)
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	name := strings.TrimPrefix(replica, "http://")
	for _, call := range []struct{ method, url, body string }{
		{"POST", p.admin + "/api/backends", fmt.Sprintf(`{"url":%q}`, replica)},
		{"POST", p.admin + "/api/backends/" + name + "/drain", ""},
		{"DELETE", p.admin + "/api/backends/" + name, ""},
		{"POST", p.url + "/workers", fmt.Sprintf(`{"url":%q}`, replica)},
	} {
		req, err := http.NewRequestWithContext(t.Context(), call.method, call.url, strings.NewReader(call.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := p.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode >= 300 || !strings.Contains(string(body), "not stored in "+folder) {
			t.Errorf("%s %s: status %d, %s", call.method, call.url, resp.StatusCode, body)
		}
	}
}

func TestBrokenStateFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "state.json")
	if err := os.WriteFile(file, []byte(`{"version":1,"records":`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startRegistrable(t, func(c *config.Config) { c.StateFile = file })
	replica := standIn{}.start(t)
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	p.contains(file, replica, true)
	p.contains(file+".broken", `"records":`, true)
	p.logs("state file is invalid")
}

// A replica that crashes and does not come back is dropped after registration.remove_after.
func TestDownReplicaIsForgotten(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "state.json")
	p := startRegistrable(t, func(c *config.Config) {
		c.StateFile, c.Registration.RemoveAfter = file, 2*time.Second
		c.Health.DownInterval = 100 * time.Millisecond
	}, standIn{}.start(t))
	p.ready(1)
	healthy := standIn{}.start(t)
	crashing, kill := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	for _, replica := range []string{crashing, healthy} {
		p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	}
	p.contains(file, crashing, true)
	b := p.server.registry.Find(strings.TrimPrefix(crashing, "http://"))
	kill()
	b.RequestCheck()
	p.until("it is down", func() bool { return b.State() == backends.Down })
	p.until("it is gone", func() bool { return p.idOf(crashing) == "" && len(p.server.registry.All()) == 2 })
	p.contains(file, crashing, false)
	p.logs("registered replica removed, down for too long")
	if p.idOf(healthy) == "" {
		t.Error("the other one is gone too")
	}
}
