package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"warmroute/admin"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// emptyFleet is a proxy without backends, which its admin API can add, and replicas that it does not know.
type emptyFleet struct {
	*guarded
	log syncBuffer
}

func startEmptyFleet(t *testing.T, replicas int) *emptyFleet {
	t.Helper()
	transport := &http.Transport{}
	f := &emptyFleet{guarded: &guarded{t: t, client: &http.Client{Transport: transport}}}
	t.Cleanup(transport.CloseIdleConnections)
	for range replicas {
		s := sim.NewServer(sim.Config{Engine: engine.Config{KVTokens: 200_000, Speed: 20}})
		if err := s.Bind("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		runUntilStopped(t, s.Run)
		f.replicas = append(f.replicas, s)
	}
	c := loadConfig(t, "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nstate_file: "+t.TempDir()+"/state\n")
	f.server, _ = startConfigured(t, &f.log, c)
	f.url, f.admin = f.server.publicURL(), f.server.adminURL()
	return f
}

// call sends a request to the admin API and decodes a response with the status.
func (f *emptyFleet) call(method, path, body string, status int, into any) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.admin+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != status {
		f.t.Fatalf("%s %s %s: status %d, %s, %v; want %d", method, path, body, resp.StatusCode, text, err, status)
	}
	if into == nil {
		return
	}
	if err := json.Unmarshal(text, into); err != nil {
		f.t.Fatalf("%s %s: %v in %s", method, path, err, text)
	}
}

func (f *emptyFleet) add(replica int) (name string) {
	f.t.Helper()
	var added admin.AddedBackend
	f.call("POST", "/api/backends?wait=1m", fmt.Sprintf(`{"url":%q}`, f.replicas[replica].URL()), http.StatusCreated, &added)
	if !added.Ready || !added.Added {
		f.t.Fatalf("replica %d: %+v", replica, added)
	}
	return added.Name
}

func (f *emptyFleet) list() (l admin.BackendList) {
	f.t.Helper()
	f.call("GET", "/api/backends", "", http.StatusOK, &l)
	return l
}

func TestEmptyFleet(t *testing.T) {
	f := startEmptyFleet(t, 1)
	for path, want := range map[string]int{"/v1/models": 503, "/readyz": 503, "/livez": 200} {
		resp, err := f.client.Get(f.url + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s: status %d, %s; want %d", path, resp.StatusCode, body, want)
		}
	}
	served := f.ask("hello")
	unknown := make(chan error, 1)
	go func() { unknown <- askModel(f.client, f.url, "another-model") }()
	f.until("both requests wait", func() bool { return f.server.router.CountWaiting() == 2 })
	f.add(0)
	if replica, ok := <-served; !ok || replica != 0 {
		t.Errorf("the waiting request was served by replica %d, %v", replica, ok)
	}
	if err := <-unknown; err == nil || !strings.Contains(err.Error(), "404") || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("the request for a model that the replica does not have: %v", err)
	}
}

// askModel sends a short request and returns an error with status and body unless it is a 200.
func askModel(client *http.Client, base, model string) error {
	body := fmt.Sprintf(`{"model":%q,"max_tokens":1,"messages":[{"role":"user","content":"hello"}]}`, model)
	resp, err := client.Post(base+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	return err
}

func TestAddAndRemoveBackendsOverAPI(t *testing.T) {
	f := startEmptyFleet(t, 2)
	name := f.add(0)
	var again admin.AddedBackend
	f.call("POST", "/api/backends", fmt.Sprintf(`{"url":%q,"name":%q}`, f.replicas[0].URL(), "another"), http.StatusOK, &again)
	if again.Added || again.Name != name || !again.Ready {
		t.Errorf("added twice: %+v", again)
	}
	f.call("POST", "/api/backends", fmt.Sprintf(`{"url":%q,"name":%q}`, f.replicas[1].URL(), name), http.StatusConflict, nil)
	f.call("POST", "/api/backends", `{"url":"http://127.0.0.1:8000/v1"}`, http.StatusBadRequest, nil)
	f.call("POST", "/api/backends?wait=1h", `{"url":"http://127.0.0.1:8000"}`, http.StatusBadRequest, nil)
	f.call("DELETE", "/api/backends/unknown", "", http.StatusNotFound, nil)

	var down admin.AddedBackend
	f.call("POST", "/api/backends?wait=50ms", `{"url":"http://127.0.0.1:1","name":"down","device":"gpu0","role":"decode"}`,
		http.StatusAccepted, &down)
	if down.Ready || !down.Added || down.Reason == "" {
		t.Errorf("a replica that is down: %+v", down)
	}
	rows := f.list().Backends
	if len(rows) != 2 || rows[0].Name != name || rows[0].State != "ready" || rows[0].Source != "registration" || rows[0].AddedBy == "" ||
		rows[1].Name != "down" || rows[1].State != "down" && rows[1].State != "starting" || rows[1].Reason == "" || rows[0].Device != "" ||
		rows[1].Device != "gpu0" || rows[0].Role != "" || rows[1].Role != "decode" {
		t.Errorf("got %+v", rows)
	}
	var one admin.BackendRow
	f.call("GET", "/api/backends/"+url.PathEscape(name), "", http.StatusOK, &one)
	if one.Name != name {
		t.Errorf("got %+v", one)
	}
	f.call("DELETE", "/api/backends/down?wait=1m", "", http.StatusOK, nil)
	// A URL names it too.
	f.call("DELETE", "/api/backends/"+url.PathEscape(f.replicas[0].URL())+"?wait=1m", "", http.StatusOK, nil)
	if rows := f.list().Backends; len(rows) != 0 {
		t.Errorf("after all were removed: %+v", rows)
	}
	if log := f.log.String(); strings.Count(log, "operator action") != 5 || !strings.Contains(log, "action=add backend="+name) ||
		!strings.Contains(log, "action=remove backend=down") {
		t.Errorf("got %s", log)
	}
}

// TestReplaceFleetOverAPIUnderLoad replaces all backends three times while clients send requests.
func TestReplaceFleetOverAPIUnderLoad(t *testing.T) {
	const replicas = 4
	f := startEmptyFleet(t, replicas)
	current := []string{f.add(0), f.add(1)}
	clients := startCrowd(t, f.url, 32, &http.Transport{})
	for round := range 3 {
		clients.more(300)
		next := []int{2, 3}
		if round%2 == 1 {
			next = []int{0, 1}
		}
		var added []string
		for _, replica := range next {
			added = append(added, f.add(replica))
		}
		for _, name := range current {
			f.call("DELETE", "/api/backends/"+url.PathEscape(name)+"?wait=1m", "", http.StatusOK, nil)
		}
		current = added
	}
	clients.more(300)
	clients.leave()
	if rows := f.list().Backends; len(rows) != 2 {
		t.Errorf("got %+v", rows)
	}
}

func TestBackendOfConfigurationIsNotRemovedOverAPI(t *testing.T) {
	g := startGuarded(t, 1, sim.Config{}, func(c *config.Config) { c.Backends[0].Name = "fixed" })
	f := &emptyFleet{guarded: g}
	var response struct{ Error struct{ Message string } }
	f.call("DELETE", "/api/backends/fixed", "", http.StatusConflict, &response)
	if want := "backend fixed comes from the configuration or the command line; remove it there, or drain it"; response.Error.Message != want {
		t.Errorf("got %q, want %q", response.Error.Message, want)
	}
	f.call("POST", "/api/backends/fixed/drain?wait=10s", "", http.StatusOK, nil)
	if row := f.list().Backends[0]; row.State != "draining" || row.Source != "configuration" {
		t.Errorf("got %+v", row)
	}
}
