package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// control posts an action and returns the status and the results by backend.
func (g *guarded) control(path, body string) (status int, results map[string]control.Result) {
	g.t.Helper()
	resp, err := g.client.Post(g.admin+"/api/backends/"+path, "application/json", strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	var report struct {
		Results []control.Result `json:"results"`
		Error   struct{ Message string }
	}
	if err := json.Unmarshal(text, &report); err != nil || (resp.StatusCode == http.StatusOK) != (report.Error.Message == "") {
		g.t.Fatalf("%s: status %d, %s, %v", path, resp.StatusCode, text, err)
	}
	results = map[string]control.Result{}
	for _, r := range report.Results {
		results[r.Backend] = r
	}
	return resp.StatusCode, results
}

// mustControl is control for an action that succeeds on so many backends.
func (g *guarded) mustControl(path, body string, n int) {
	g.t.Helper()
	status, results := g.control(path, body)
	for _, r := range results {
		if !r.OK || r.Status != http.StatusOK || r.Error != "" {
			g.t.Errorf("%s: %+v", path, r)
		}
	}
	if status != http.StatusOK || len(results) != n {
		g.t.Fatalf("%s: status %d, %v", path, status, results)
	}
}

func (g *guarded) name(replica int) string { return g.server.registry.All()[replica].Name }

// isStopped reports whether the replica says that it is paused or asleep.
func (g *guarded) isStopped(replica int) bool {
	g.t.Helper()
	resp, err := g.client.Get(g.replicas[replica].URL() + "/is_paused")
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return strings.Contains(string(text), "true")
}

func TestSleepAndWakeUnderLoad(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 3, sim.Config{Engine: engine.Config{Speed: 20}}, nil)
	clients := startCrowd(t, g.url, 12, &http.Transport{})
	defer clients.leave()
	clients.more(50)
	for _, c := range []struct{ sleep, wake, body string }{
		{g.name(0) + "/sleep", g.name(0) + "/wake", ""},
		{"sleep", "wake", fmt.Sprintf(`{"backends":[%q]}`, g.name(0))},
	} {
		g.mustControl(c.sleep, c.body, 1)
		if b := g.state().Backends[0]; b.State != "asleep" || !b.Suspended || b.Drained || b.InFlight != 0 {
			t.Errorf("after %s: %+v", c.sleep, b)
		}
		before := g.replicas[0].Stats()
		clients.more(100)
		if after := g.replicas[0].Stats(); after != before || !g.isStopped(0) {
			t.Errorf("requests were sent to the sleeping replica: %+v, before %+v", after, before)
		}
		g.mustControl(c.wake, c.body, 1)
		g.until("the replica gets requests again", func() bool { return g.replicas[0].Stats().PromptTokens > before.PromptTokens })
	}
}

// An operator's own drain is not ended by what sleep has drained.
func TestWakeKeepsDrain(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 1, sim.Config{}, nil)
	b := g.server.registry.All()[0]
	b.Drain()
	g.mustControl("sleep", `{"level":2}`, 1)
	g.mustControl("wake", "", 1)
	if s := g.state().Backends[0]; s.State != "draining" || !s.Drained || s.Suspended {
		t.Errorf("got %+v", s)
	}
}

func TestSleepOfBusyReplica(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 1, sim.Config{}, nil)
	s := g.long("a long output")
	status, results := g.control("sleep", `{"wait":"100ms"}`)
	if r := results[g.name(0)]; status != http.StatusBadGateway || r.OK ||
		!strings.Contains(r.Error, "requests in flight after 100ms: 1: wait longer") {
		t.Errorf("status %d, %+v", status, r)
	}
	if b := g.server.registry.All()[0]; b.State() != backends.Ready || g.isStopped(0) {
		t.Errorf("the replica is %v", b.Status())
	}
	if _, err := s.in.ReadString('\n'); err != nil {
		t.Errorf("the response has ended: %v", err)
	}
	g.mustControl("sleep", `{"wait":"100ms","force":true}`, 1)
	if _, err := io.ReadAll(s.in); err != nil {
		t.Error(err)
	}
	g.mustControl("wake", "", 1)
}

// Requests wait for a resume in the admission queue.
func TestPauseAllAndResume(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"wait", "keep"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			g := startGuarded(t, 2, sim.Config{Engine: engine.Config{Speed: 20}}, nil)
			clients := startCrowd(t, g.url, 8, &http.Transport{})
			defer clients.leave()
			clients.more(30)
			g.mustControl("pause", fmt.Sprintf(`{"mode":%q}`, mode), 2)
			waiting := g.ask("one that comes now")
			g.until("it waits", func() bool { return g.server.router.CountWaiting() > 0 })
			generated := func() int64 { return g.replicas[0].Stats().GenerationTokens + g.replicas[1].Stats().GenerationTokens }
			before := generated()
			for i := range 2 {
				if b := g.state().Backends[i]; b.State != "paused" || !g.isStopped(i) {
					t.Errorf("paused, it is %+v", b)
				}
			}
			time.Sleep(100 * time.Millisecond)
			if n := generated(); n != before {
				t.Errorf("%d tokens were generated while all replicas were paused", n-before)
			}
			g.mustControl("resume", "", 2)
			<-waiting
			clients.more(30)
		})
	}
}

// A response that a paused replica holds is not lost: what continues it waits.
func TestPauseKeepsStoredResponses(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 1, sim.Config{StoreResponses: true}, nil)
	respond := func(previous string) (status int, id string) {
		body := `{"model":"sim","input":"Hello","max_output_tokens":2` + previous + `}`
		resp, err := g.client.Post(g.url+"/v1/responses", "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return 0, ""
		}
		defer resp.Body.Close()
		var out struct{ ID string }
		if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
			t.Error(err)
		}
		return resp.StatusCode, out.ID
	}
	_, id := respond("")
	g.mustControl("pause", "", 1)
	done := make(chan int)
	go func() {
		status, _ := respond(fmt.Sprintf(`,"previous_response_id":%q`, id))
		done <- status
	}()
	g.until("the request waits", func() bool { return g.server.router.CountWaiting() == 1 })
	g.mustControl("resume", "", 1)
	if status := <-done; status != http.StatusOK {
		t.Errorf("status %d", status)
	}
}

func TestResetCache(t *testing.T) {
	t.Parallel()
	for _, force := range []bool{false, true} {
		g := startGuarded(t, 2, sim.Config{Engine: engine.Config{Speed: 20}}, nil)
		prompt := strings.Repeat("words to be cached ", 200)
		<-g.ask(prompt)
		holder := 0
		if g.state().Backends[1].IndexBlocks > 0 {
			holder = 1
		}
		g.until("the prompt is indexed", func() bool { return g.state().Backends[holder].IndexBlocks > 10 })
		if force {
			g.long("a request that uses the cache")
		}
		g.mustControl("reset-cache", fmt.Sprintf(`{"force":%v}`, force), 2)
		for i := range 2 {
			if b := g.state().Backends[i]; b.IndexBlocks != 0 || b.State != "ready" {
				t.Errorf("after the reset: %+v", b)
			}
		}
		if force {
			continue
		}
		hits := g.replicas[holder].Stats().PrefixHits
		served := <-g.ask(prompt)
		if got := g.replicas[holder].Stats().PrefixHits; got != hits {
			t.Errorf("%v hits in a cache that was reset", got-hits)
		}
		g.until("the index learns again", func() bool { return g.state().Backends[served].IndexBlocks > 10 })
	}
}

// The cache is reset when the requests that use it have ended.
func TestResetCacheOfBusyReplica(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 1, sim.Config{}, nil)
	s := g.long("a long output")
	if _, results := g.control("reset-cache", `{"wait":"100ms"}`); results[g.name(0)].OK {
		t.Errorf("got %v", results)
	}
	done := make(chan bool)
	go func() { g.mustControl("reset-cache", "", 1); done <- true }()
	g.until("new requests are kept away", func() bool { return g.state().Backends[0].Suspended })
	waiting := g.ask("one that waits")
	s.leave()
	<-done
	if <-waiting != 0 {
		t.Error("the request that waited was not served")
	}
}

func TestAdapterActions(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{Adapters: []string{"old"}}, nil)
	lists := func(model string) (n int) {
		entry, ok := g.server.registry.Catalog().Find(model)
		if !ok {
			return 0
		}
		return len(entry.Backends)
	}
	g.mustControl("load-adapter", `{"adapter":"sql","path":"/adapters/sql"}`, 2)
	if n := lists("sql"); n != 2 {
		t.Errorf("%d backends list the adapter", n)
	}
	if s, err := g.open(t.Context(), g.url, "sql", "a request", 2); err != nil {
		t.Error(err)
	} else {
		s.leave()
	}
	_, results := g.control(g.name(0)+"/load-adapter", `{"adapter":"sql","path":"/adapters/sql"}`)
	if r := results[g.name(0)]; r.Status != http.StatusBadRequest || !strings.Contains(r.Error, "already been loaded") {
		t.Errorf("loaded twice: %+v", r)
	}
	g.mustControl("load-adapter", `{"adapter":"sql","path":"/adapters/sql2","in_place":true}`, 2)
	g.mustControl(g.name(0)+"/unload-adapter", `{"adapter":"sql"}`, 1)
	if n := lists("sql"); n != 1 {
		t.Errorf("%d backends list the adapter that one has unloaded", n)
	}
	for _, want := range []string{
		`level=INFO msg="operator action" action=load-adapter backend=` + g.name(1) + ` adapter=sql path=/adapters/sql by=127.0.0.1:`,
		`level=WARN msg="operator action" action=load-adapter backend=` + g.name(0) + ` adapter=sql path=/adapters/sql by=127.0.0.1:`,
		`action=unload-adapter backend=` + g.name(0) + ` adapter=sql by=127.0.0.1:`,
	} {
		if !strings.Contains(g.log.String(), want) {
			t.Errorf("no line %s in the log:\n%s", want, g.log.String())
		}
	}
}

// One replica fails in each way, and none stops the action on another.
func TestActionOnFailingReplicas(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	failing := func(sleep http.HandlerFunc) string {
		mux := http.NewServeMux()
		mux.Handle("/", standIn{}.handler())
		mux.HandleFunc("/sleep", sleep)
		s := httptest.NewServer(mux)
		t.Cleanup(s.Close)
		return s.URL
	}
	defer close(release)
	hanging := failing(func(http.ResponseWriter, *http.Request) { <-release })
	broken := failing(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
		io.WriteString(w, `{"error":{"message":"out of memory","code":500}}`)
	})
	plain := failing(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"detail":"Not Found"}`)
	})
	working, _ := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	f := startFronted(t, func(*config.Config) {}, hanging, broken, plain, working)
	f.ready(4)
	g := &guarded{t: t, server: f.server, client: f.client, admin: f.admin}
	status, results := g.control("sleep", `{"timeout":"300ms"}`)
	if status != http.StatusBadGateway || len(results) != 4 {
		t.Errorf("status %d, %v", status, results)
	}
	for i, want := range []struct {
		status int
		error  string
		state  string
	}{
		{0, "/sleep: no response within 300ms: it may happen later", "asleep"},
		{500, "/sleep returned 500: out of memory", "ready"},
		{404, "start vLLM with VLLM_SERVER_DEV_MODE=1", "ready"},
		{200, "", "asleep"},
	} {
		r := results[g.name(i)]
		if r.Status != want.status || r.OK != (want.error == "") || !strings.Contains(r.Error, want.error) {
			t.Errorf("got %+v, want %+v", r, want)
		}
		if s := g.state().Backends[i]; s.State != want.state {
			t.Errorf("%s is %s, want %s", s.Name, s.State, want.state)
		}
	}
}

// What another operator or a restart has ended does not keep requests away.
func TestSuspensionEndedElsewhere(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 2, sim.Config{}, nil)
	g.mustControl("sleep", "", 2)
	g.until("polls show it", func() bool { return g.load(0).Asleep && g.load(1).Asleep })
	resp, err := g.client.Post(g.replicas[0].URL()+"/wake_up", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	g.replicas[1].Restart()
	g.until("both are ready", func() bool {
		s := g.state()
		return s.Backends[0].State == "ready" && s.Backends[1].State == "ready" && !s.Backends[0].Suspended && !s.Backends[1].Suspended
	})
}

// An action on the ranks of a server is one call.
func TestActionOnRanks(t *testing.T) {
	t.Parallel()
	g := startGuarded(t, 1, sim.Config{Ranks: 4, Engine: engine.Config{Speed: 20}}, nil)
	server := g.server.registry.All()[0].Server()
	g.until("the ranks are backends", func() bool { return len(g.server.registry.All()) == 4 })
	for range 8 {
		<-g.ask(strings.Repeat("words to be cached ", 200))
	}
	g.mustControl("reset-cache", "", 1)
	for _, b := range g.state().Backends {
		if b.IndexBlocks != 0 {
			t.Errorf("after the reset: %+v", b)
		}
	}
	g.mustControl(g.name(2)+"/sleep", "", 1)
	for _, b := range g.state().Backends {
		if b.State != "asleep" {
			t.Errorf("asleep, it is %+v", b)
		}
	}
	_, results := g.control("wake", "")
	if r := results[server.Name]; !r.OK {
		t.Errorf("got %v", results)
	}
	<-g.ask("a request")
}
