//go:build unix

package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"warmroute/admin"
)

// registrationYAML lets replicas of this machine register from it.
const registrationYAML = "registration: {listener: public, allow_from: [127.0.0.1], allow_urls: [\"http://127.0.0.1:*\"]}\n"

// register registers a replica, and returns when it is ready.
func (p *program) register(replica string) {
	p.t.Helper()
	p.expectStatus(http.StatusOK, http.MethodPost, p.url+"/workers", fmt.Sprintf(`{"url":%q,"worker_type":"regular"}`, replica))
}

func (p *program) drain(name string) {
	p.t.Helper()
	p.expectStatus(http.StatusOK, http.MethodPost, p.admin+"/api/backends/"+name+"/drain", "{}")
}

// expectStatus sends a request, and returns the body of the response, which has that status.
func (p *program) expectStatus(want int, method, url, body string) (response []byte) {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	response, err = io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != want {
		p.t.Fatalf("%s %s: status %d, want %d: %s, %v", method, url, resp.StatusCode, want, response, err)
	}
	return response
}

// backends returns what the admin listener lists.
func (p *program) backends() []admin.BackendRow {
	p.t.Helper()
	var list admin.BackendList
	if err := json.Unmarshal(p.expectStatus(http.StatusOK, http.MethodGet, p.admin+"/api/backends", ""), &list); err != nil {
		p.t.Fatal(err)
	}
	return list.Backends
}

// backendStates returns the state of each backend by its name.
func (p *program) backendStates() map[string]string {
	p.t.Helper()
	states := map[string]string{}
	for _, b := range p.backends() {
		states[b.Name] = b.State
	}
	return states
}

// awaitStates waits until the backends have these states, and there are no others.
func (p *program) awaitStates(want map[string]string) {
	p.t.Helper()
	p.eventually(fmt.Sprint("the backends are ", want), func() bool { return fmt.Sprint(p.backendStates()) == fmt.Sprint(want) })
}

// backendName returns the name of the backend at a URL.
func backendName(url string) string { return strings.TrimPrefix(url, "http://") }

// TestRegistrationAfterKill expects registered replicas and drains to be there after kill -9 and after a binary upgrade.
func TestRegistrationAfterKill(t *testing.T) {
	t.Parallel()
	fleet, registered := startSimFleet(t, 2, 0), startSimFleet(t, 2, 0)
	state := filepath.Join(t.TempDir(), "state.json")
	file := fleet.configFile(t, registrationYAML+"state_file: "+state+"\n")
	p := startProgram(t, "--config", file.path)
	for _, replica := range registered.urls {
		p.register(replica)
	}
	p.drain(backendName(fleet.urls[0]))
	p.drain(backendName(registered.urls[0]))
	want := map[string]string{
		backendName(fleet.urls[0]): "draining", backendName(fleet.urls[1]): "ready",
		backendName(registered.urls[0]): "draining", backendName(registered.urls[1]): "ready",
	}
	p.awaitStates(want)
	p.signal(syscall.SIGKILL)
	<-p.ended
	p = startProgram(t, "--config", file.path)
	p.awaitStates(want)
	p.upgrade()
	p.awaitStates(want)
	p.expectStatus(http.StatusOK, http.MethodDelete, p.url+"/workers/"+backendName(registered.urls[0]), "")
	delete(want, backendName(registered.urls[0]))
	p.awaitStates(want)
}

// TestKillAfterAcknowledgedChange kills the proxy as soon as it has said that it changed its fleet. The change is there
// after a restart.
func TestKillAfterAcknowledgedChange(t *testing.T) {
	t.Parallel()
	fleet, others := startSimFleet(t, 2, 0), startSimFleet(t, 2, 0)
	file := fleet.configFile(t, registrationYAML+"state_file: "+filepath.Join(t.TempDir(), "state.json")+"\n")
	configured, added, registered := backendName(fleet.urls[0]), backendName(others.urls[0]), backendName(others.urls[1])
	p := startProgram(t, "--config", file.path)
	for _, change := range []struct {
		status             int
		method, path, body string
		onPublic           bool
		backend, state     string // afterwards; "": there is none
	}{
		{200, "POST", "/api/backends/" + configured + "/drain", "{}", false, configured, "draining"},
		{200, "POST", "/api/backends/" + configured + "/undrain", "{}", false, configured, "ready"},
		{201, "POST", "/api/backends?wait=1m", fmt.Sprintf(`{"url":%q}`, others.urls[0]), false, added, "ready"},
		{200, "POST", "/api/backends/" + added + "/drain?wait=1m", "{}", false, added, "draining"},
		{200, "DELETE", "/api/backends/" + added, "", false, added, ""},
		{200, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, others.urls[1]), true, registered, "ready"},
		{200, "POST", "/remove_worker?url=" + others.urls[1], "", true, registered, ""},
		{200, "POST", "/add_worker?url=" + others.urls[1], "", true, registered, "ready"},
		{200, "DELETE", "/workers/" + registered, "", true, registered, ""},
	} {
		base := p.admin
		if change.onPublic {
			base = p.url
		}
		p.expectStatus(change.status, change.method, base+change.path, change.body)
		p.signal(syscall.SIGKILL)
		<-p.ended
		p = startProgram(t, "--config", file.path)
		p.eventually(fmt.Sprintf("%s %s has lasted", change.method, change.path), func() bool {
			return p.backendStates()[change.backend] == change.state
		})
	}
}
