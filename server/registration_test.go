package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// allowLoopback lets replicas of this machine register from it.
func allowLoopback(c *config.Config) {
	c.Registration.Listener = "public"
	c.Registration.AllowFrom = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
	c.Registration.AllowURLs = []string{"http://127.0.0.1:*"}
}

// registrable is a proxy without replicas, with which they may register.
type registrable struct{ *fronted }

func startRegistrable(t *testing.T, change func(*config.Config), urls ...string) registrable {
	t.Helper()
	none := len(urls) == 0
	if none {
		urls = []string{unusedURL} // a configuration without backends is not valid before registration is on
	}
	return registrable{startFronted(t, func(c *config.Config) {
		allowLoopback(c)
		if none {
			c.Backends = nil
		}
		if change != nil {
			change(c)
		}
	}, urls...)}
}

// call sends a request as it is, and returns the status and the body of the response.
func (p registrable) call(method, path, body string, header ...string) (status int, response string) {
	p.t.Helper()
	req, err := http.NewRequest(method, p.url+path, strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := p.client.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return resp.StatusCode, string(data)
}

// expect fails the test unless the call has that status, and returns the body of the response.
func (p registrable) expect(want int, method, path, body string, header ...string) (response string) {
	p.t.Helper()
	status, response := p.call(method, path, body, header...)
	if status != want {
		p.t.Fatalf("%s %s %s: status %d, want %d: %s", method, path, body, status, want, response)
	}
	return response
}

type listedWorkers struct {
	Workers []struct {
		ID, URL    string
		ModelID    string `json:"model_id"`
		WorkerType string `json:"worker_type"`
		IsHealthy  bool   `json:"is_healthy"`
		Load       int
		Mode       string `json:"connection_mode"`
		Priority   int
		Cost       float64
	}
	Total int
	Stats map[string]any
}

func (p registrable) workers() (list listedWorkers) {
	p.t.Helper()
	if err := json.Unmarshal([]byte(p.expect(http.StatusOK, "GET", "/workers", "")), &list); err != nil {
		p.t.Fatal(err)
	}
	return list
}

// idOf returns the id of the only worker with exactly that URL, as callers look it up; empty: there is none.
func (p registrable) idOf(workerURL string) string {
	p.t.Helper()
	for _, w := range p.workers().Workers {
		if w.URL == workerURL {
			return w.ID
		}
	}
	return ""
}

// vime: requests.post(f"{router}/workers", json={"url": url, "worker_type": "regular"}, timeout=30), and at the end
// requests.get(f"{router}/workers") and requests.delete(f"{router}/workers/{quote(url, safe=”)}").
func TestRegistrationOfVime(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url": %q, "worker_type": "regular"}`, replica))
	p.checkServed()
	if p.idOf(replica) == "" {
		t.Fatal("it is not listed")
	}
	p.expect(http.StatusOK, "DELETE", "/workers/"+url.QueryEscape(replica), "")
	p.until("it is gone", func() bool { return len(p.server.registry.All()) == 0 })
	if p.idOf(replica) != "" {
		t.Error("it is listed")
	}
	p.expect(http.StatusNotFound, "DELETE", "/workers/"+url.QueryEscape(replica), "")
	p.logs("action=register backend=" + strings.TrimPrefix(replica, "http://") + " by=127.0.0.1 result=registered")
	p.logs("action=deregister")
}

// NeMo RL with SGLang: POST /workers {"url", "worker_type": "regular"}, then GET /workers every 0.5 s until the URL is
// among workers[].url, ready or not; at the end GET /workers and DELETE /workers/{workers[].id}. Its URLs may end with
// a slash.
func TestRegistrationOfNeMo(t *testing.T) {
	t.Parallel()
	var healthy atomic.Bool
	slow := standIn{health: func(w http.ResponseWriter, _ *http.Request) {
		if !healthy.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}}
	p, replica := startRegistrable(t, nil), slow.start(t)+"/"
	added := make(chan string)
	go func() {
		_, body := p.call("POST", "/workers", fmt.Sprintf(`{"url": %q, "worker_type": "regular"}`, replica))
		added <- body
	}()
	p.until("it is listed while it is not ready", func() bool { return p.idOf(replica) != "" })
	list := p.workers()
	if w := list.Workers[0]; w.IsHealthy || w.WorkerType != "regular" || w.Mode != "http" || list.Total != 1 {
		t.Errorf("listed as %+v", list)
	}
	healthy.Store(true)
	var response struct {
		Success  bool
		WorkerID string `json:"worker_id"`
		URL      string
		Location string
	}
	if err := json.Unmarshal([]byte(<-added), &response); err != nil {
		t.Fatal(err)
	}
	id := p.idOf(replica)
	if !response.Success || response.WorkerID != id || response.URL != replica || response.Location != "/workers/"+id {
		t.Errorf("responded %+v, and its id is %s", response, id)
	}
	if list = p.workers(); !list.Workers[0].IsHealthy || list.Workers[0].ModelID != "m" || list.Stats["healthy_workers"] != 1.0 ||
		list.Stats["regular_count"] != 1.0 {
		t.Errorf("listed as %+v", list)
	}
	p.expect(http.StatusOK, "GET", "/workers/"+id, "")
	p.expect(http.StatusOK, "DELETE", "/workers/"+id, "")
	p.until("it is gone", func() bool { return p.idOf(replica) == "" })
}

func TestRegisteredDevice(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	for _, device := range []string{"gpu0", "gpu1", ""} {
		p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q,"device":%q}`, replica, device))
		if all := p.server.registry.All(); len(all) != 1 || all[0].Options().Device != device {
			t.Errorf("registered with device %q: %d backends, %+v", device, len(all), all[0].Options())
		}
	}
	if response := p.expect(http.StatusBadRequest, "POST", "/workers", fmt.Sprintf(`{"url":%q,"device":"gpu 0"}`, replica)); !strings.Contains(
		response, "device: ") {
		t.Error(response)
	}
}

// NeMo RL with vLLM: POST /workers blocks until the replica is healthy, then /health of the replica is asked.
func TestRegistrationBlocksUntilReady(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	if b := p.server.registry.All()[0]; b.State() != backends.Ready {
		t.Errorf("it is %v", b.State())
	}
	// A restarted process registers again.
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	if list := p.workers(); list.Total != 1 {
		t.Errorf("it is listed %d times", list.Total)
	}
}

// slime: as NeMo RL, with worker_type prefill and decode in a disaggregated fleet.
func TestRegistrationOfSlime(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	for kind, role := range map[string]backends.Role{"prefill": backends.RolePrefill, "decode": backends.RoleDecode,
		"regular": backends.RoleBoth} {
		p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url": %q, "worker_type": %q, "bootstrap_port": 8998}`, replica, kind))
		if got := p.server.registry.All()[0].Options().Role; got != role {
			t.Errorf("worker_type %s: role %v", kind, got)
		}
		list := p.workers()
		if list.Workers[0].WorkerType != kind || list.Stats[kind+"_count"] != 1.0 || list.Stats["by_type"].(map[string]any)[kind] != 1.0 {
			t.Errorf("worker_type %s: listed as %+v", kind, list)
		}
	}
	response := p.expect(http.StatusBadRequest, "POST", "/workers", fmt.Sprintf(`{"url": %q, "worker_type": "encode"}`, replica))
	if !strings.Contains(response, "unknown worker_type") || !strings.Contains(response, `"code":"ADD_WORKER_FAILED"`) {
		t.Error(response)
	}
	p.expect(http.StatusOK, "DELETE", "/workers/"+p.idOf(replica), "")
}

// Earlier versions of slime, and clients of vllm-router: POST /add_worker?url=, /remove_worker?url=, GET /list_workers.
func TestRegistrationByQuery(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	query := "?" + url.Values{"url": {replica}}.Encode()
	if text := p.expect(http.StatusOK, "POST", "/add_worker"+query, ""); text != "Successfully added worker: "+replica {
		t.Error(text)
	}
	if text := p.expect(http.StatusOK, "GET", "/list_workers", ""); text != fmt.Sprintf(`{"urls":[%q]}`, replica) {
		t.Error(text)
	}
	if text := p.expect(http.StatusOK, "GET", "/get_loads", ""); text != fmt.Sprintf(`{"workers":[{"worker":%q,"load":0}]}`, replica) {
		t.Error(text)
	}
	p.expect(http.StatusOK, "POST", "/add_worker"+query+"&worker_type=prefill&bootstrap_port=8998", "")
	if kind := p.workers().Workers[0].WorkerType; kind != "prefill" {
		t.Errorf("its type is %s", kind)
	}
	p.expect(http.StatusBadRequest, "POST", "/add_worker"+query+"&worker_type=encode", "")
	p.expect(http.StatusOK, "POST", "/remove_worker"+query, "")
	p.expect(http.StatusNotFound, "POST", "/remove_worker"+query, "")
	p.expect(http.StatusBadRequest, "POST", "/add_worker?url=gpu-7", "")
	p.expect(http.StatusBadRequest, "POST", "/add_worker", "")
	p.expect(http.StatusMethodNotAllowed, "GET", "/add_worker"+query, "")
}

// SkyRL starts a router for its engines' URLs, asks GET /health until it is 200, and reports the end of each session.
// prime-rl asks /health likewise. Neither registers anything.
func TestRoutersOfSkyRLAndPrimeRL(t *testing.T) {
	t.Parallel()
	p := registrable{startFronted(t, nil, standIn{}.start(t))}
	p.ready(1)
	p.expect(http.StatusOK, "GET", "/health", "")
	if text := p.expect(http.StatusOK, "POST", "/finish_session?session_id=a+b%22", ""); text != `{"session_id":"a b\"","status":"ok"}` {
		t.Error(text)
	}
	p.expect(http.StatusBadRequest, "POST", "/finish_session", "")
	p.expect(http.StatusMethodNotAllowed, "GET", "/finish_session?session_id=a", "")
	p.expect(http.StatusNotFound, "GET", "/workers", "") // registration is off
	p.expect(http.StatusNotFound, "POST", "/add_worker?url=http%3A%2F%2F127.0.0.1%3A1", "")
}

// TestRegistrationPaths expects other spellings of paths, and other methods, to be answered as they always were.
func TestRegistrationPaths(t *testing.T) {
	t.Parallel()
	p := startRegistrable(t, nil)
	const listed, noWorker, notAllowed, unknown = `{"stats":`, "there is no such worker", `"code":"METHOD_NOT_ALLOWED"`, "unknown path"
	for _, c := range []struct {
		method, path string
		status       int
		says, allow  string
	}{
		{"GET", "/workers/", 200, listed, ""},
		{"GET", "/workers/?a=b", 200, listed, ""},
		{"GET", "/workers/x", 404, noWorker, ""},
		{"GET", "/workers/x/", 404, noWorker, ""},
		{"GET", "/workers//", 404, noWorker, ""},
		{"GET", "/workers/http://127.0.0.1:1", 404, noWorker, ""},
		{"GET", "/workers/http%3A%2F%2F127.0.0.1%3A1", 404, noWorker, ""},
		{"DELETE", "/workers/http%3A%2F%2F127.0.0.1%3A1", 404, "no such worker is registered", ""},
		{"DELETE", "/workers/", 405, notAllowed, "GET, POST"},
		{"PATCH", "/workers", 405, notAllowed, "GET, POST"},
		{"HEAD", "/workers", 405, "", "GET, POST"},
		{"OPTIONS", "/workers/x", 405, notAllowed, "GET, DELETE"},
		{"PURGE", "/workers/x", 405, notAllowed, "GET, DELETE"},
		{"get", "/workers/x", 405, notAllowed, "GET, DELETE"},
		{"POST", "/workers/x", 405, notAllowed, "GET, DELETE"},
		{"GET", "/flush_cache/", 405, notAllowed, "POST"},
		{"POST", "/get_loads", 405, notAllowed, "GET"},
		{"GET", "/get_loads/", 200, `{"workers":[]}`, ""},
		{"GET", "/get_loads//", 404, unknown, ""},
		{"GET", "//workers", 404, unknown, ""},
		{"GET", "/%77orkers", 404, unknown, ""},
		{"GET", "/workersx", 404, unknown, ""},
		{"HEAD", "/liveness", 200, "", ""},
		{"POST", "/liveness", 405, "allowed: GET, HEAD", "GET, HEAD"},
		{"PURGE", "/liveness", 405, "allowed: GET, HEAD", "GET, HEAD"},
		{"PURGE", "/v1/models", 405, "allowed: GET, HEAD", "GET, HEAD"},
	} {
		req, err := http.NewRequest(c.method, p.url+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := p.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.status || !strings.Contains(string(body), c.says) || resp.Header.Get("Allow") != c.allow || err != nil {
			t.Errorf("%s %s: got %d %v %s, %v", c.method, c.path, resp.StatusCode, resp.Header["Allow"], body, err)
		}
	}
}

func TestRegistrationProbes(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	if text := p.expect(http.StatusOK, "GET", "/readyz", ""); !strings.Contains(text, "0 replicas") {
		t.Errorf("/readyz says %q", text)
	}
	p.expect(http.StatusOK, "GET", "/liveness", "")
	p.expect(http.StatusServiceUnavailable, "GET", "/readiness", "")
	p.expect(http.StatusServiceUnavailable, "GET", "/health_generate", "")
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	for _, path := range []string{"/readiness", "/health_generate", "/readyz", "/livez"} {
		p.expect(http.StatusOK, "GET", path, "")
	}
	p.server.proxy.FailReadiness() // it shuts down
	p.expect(http.StatusServiceUnavailable, "GET", "/readiness", "")
}

func TestRegistrationRefusals(t *testing.T) {
	t.Parallel()
	const token, key = "a-long-random-token", "a-long-random-client-key"
	p := startRegistrable(t, func(c *config.Config) {
		c.Registration.Token = token
		c.Registration.AllowURLs = []string{"http://10.0.*:8000", "http://127.0.0.1:*"}
		c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
		c.Registration.AllowFrom = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8")}
	})
	replica := standIn{}.start(t)
	body := fmt.Sprintf(`{"url":%q}`, replica)
	bearer := "Bearer " + token
	for name, c := range map[string]struct {
		status     int
		body, code string
		header     []string
	}{
		"no token":        {401, body, "INVALID_TOKEN", nil},
		"a client's key":  {401, body, "INVALID_TOKEN", []string{"Authorization", "Bearer " + key}},
		"wrong network":   {403, body, "ADDRESS_NOT_ALLOWED", []string{"Authorization", bearer, "X-Forwarded-For", "192.0.2.1"}},
		"claimed network": {403, body, "ADDRESS_NOT_ALLOWED", []string{"Authorization", bearer, "X-Forwarded-For", "10.0.0.1, 192.0.2.1"}},
		"a web page":      {403, body, "ORIGIN_NOT_ALLOWED", []string{"Authorization", bearer, "Origin", "http://127.0.0.1"}},
		"wrong URL":       {403, `{"url":"http://192.0.2.1:8000"}`, "URL_NOT_ALLOWED", []string{"Authorization", bearer}},
		"no URL":          {400, `{}`, "ADD_WORKER_FAILED", []string{"Authorization", bearer}},
		"user in the URL": {400, `{"url":"http://u:secret@127.0.0.1:1"}`, "ADD_WORKER_FAILED", []string{"Authorization", bearer}},
		"names":           {400, `{"url":"dns://vllm:8000"}`, "ADD_WORKER_FAILED", []string{"Authorization", bearer}},
		"long URL": {400, `{"url":"http://127.0.0.1:1/` + strings.Repeat("a", 300) + `"}`, "ADD_WORKER_FAILED",
			[]string{"Authorization", bearer}},
		"many slashes": {400, `{"url":"http://127.0.0.1:1` + strings.Repeat("/", 2000) + `"}`, "ADD_WORKER_FAILED",
			[]string{"Authorization", bearer}},
		"long body": {400, `{"url":"` + strings.Repeat("a", 100<<10) + `"}`, "ADD_WORKER_FAILED", []string{"Authorization", bearer}},
	} {
		status, response := p.call("POST", "/workers", c.body, c.header...)
		if status != c.status || !strings.Contains(response, `"code":"`+c.code+`"`) || strings.Contains(response, "secret") {
			t.Errorf("%s: status %d, want %d with %s: %s", name, status, c.status, c.code, response)
		}
	}
	for _, path := range []string{"/workers", "/list_workers", "/get_loads", "/workers/x"} {
		p.expect(http.StatusUnauthorized, "GET", path, "")
	}
	p.expect(http.StatusUnauthorized, "DELETE", "/workers/x", "")
	p.expect(http.StatusUnauthorized, "POST", "/remove_worker?url=x", "")
	if n := len(p.server.registry.All()); n != 0 {
		t.Fatalf("%d replicas were registered", n)
	}
	p.logs("registration refused")
	for result, want := range map[string]float64{"refused_token": 8, "refused_address": 2, "refused_origin": 1, "refused_url": 1,
		"invalid": 6} {
		if got := metricSum(t, p.admin, "warmroute_registration_calls_total", result); got != want {
			t.Errorf("%s: %v calls counted, want %v", result, got, want)
		}
	}
	if strings.Contains(p.log.String(), "secret") || strings.Contains(p.log.String(), key) {
		t.Error("the log has a secret")
	}
	p.expect(http.StatusOK, "POST", "/workers", body, "Authorization", bearer)
}

// Whoever registers a replica must learn no key: neither a client's nor one of another backend.
func TestRegisteredReplicaGetsNoCredentials(t *testing.T) {
	t.Parallel()
	const key, configured = "a-long-random-client-key", "the-key-of-a-configured-backend"
	headers := make(chan http.Header, 100)
	spy := standIn{}
	respond := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			select {
			case headers <- r.Header:
			default:
			}
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, body)
		}
	}
	spy.health, spy.metrics, spy.chat = respond(""), respond("vllm:num_requests_running 0\n"), respond(wholeResponse)
	replica := spy.start(t)
	p := startRegistrable(t, func(c *config.Config) { c.Backends[0].APIKey = configured }, standIn{}.start(t))
	p.ready(1)
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q,"labels":{"x":"y"}}`, replica), "Authorization", "Bearer "+key)
	p.server.registry.All()[0].Drain()
	p.expect(http.StatusOK, "POST", "/v1/chat/completions", plainChat, "Authorization", "Bearer "+key, "X-Api-Key", key, "Cookie", "k="+key)
	chats := 0
	for {
		select {
		case h := <-headers:
			if h.Get("Content-Length") != "" {
				chats++
			}
			if text := fmt.Sprint(h); strings.Contains(text, key) || strings.Contains(text, configured) {
				t.Errorf("the replica got %s", text)
			}
			continue
		default:
		}
		break
	}
	if chats != 1 {
		t.Errorf("the replica got %d chats, want 1", chats)
	}
}

func TestConfiguredBackendIsNotDeregistered(t *testing.T) {
	t.Parallel()
	replica := standIn{}.start(t)
	p := startRegistrable(t, nil, replica)
	p.ready(1)
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	if list := p.workers(); list.Total != 1 || list.Workers[0].URL != replica {
		t.Errorf("listed as %+v", list)
	}
	if response := p.expect(http.StatusConflict, "DELETE", "/workers/"+url.QueryEscape(replica), ""); !strings.Contains(response,
		"the configuration") {
		t.Error(response)
	}
	p.checkServed()
}

func TestRegistrationFollowsReload(t *testing.T) {
	t.Parallel()
	p := startRegistrable(t, nil)
	p.expect(http.StatusOK, "GET", "/workers", "")
	next := *p.server.config
	next.Registration.Listener = "off"
	p.server.registration.Configure(&next)
	p.expect(http.StatusNotFound, "GET", "/workers", "")
	next.Registration.Listener, next.Registration.Token = "public", "a-long-random-token"
	p.server.registration.Configure(&next)
	p.expect(http.StatusUnauthorized, "GET", "/workers", "")
}

// Callers replace the whole fleet three times, as a trainer that restarts its engines does, while clients send
// a thousand requests a second or so.
func TestReplaceRegisteredFleetUnderLoad(t *testing.T) {
	const size, generations = 3, 4
	p := startRegistrable(t, nil)
	start := func() (urls []string) {
		for range size {
			u, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 200_000, Speed: 200}}, "127.0.0.1:0")
			urls = append(urls, u)
			p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, u))
		}
		return urls
	}
	old := start()
	clients := startCrowd(t, p.url, 16, &http.Transport{})
	clients.more(100)
	for range generations - 1 {
		fresh := start()
		for _, u := range old {
			p.expect(http.StatusOK, "DELETE", "/workers/"+url.QueryEscape(u), "")
		}
		p.until("the old ones are gone", func() bool { return len(p.server.registry.All()) == size })
		old = fresh
		clients.more(1000)
	}
	clients.leave()
	if list := p.workers(); list.Total != size {
		t.Errorf("%d workers", list.Total)
	}
	p.until("nothing is in flight", func() bool {
		for _, b := range p.server.registry.All() {
			if !b.Idle() {
				return false
			}
		}
		return true
	})
	if parts, _ := p.server.router.IndexStats(); len(parts) > 2*size {
		t.Errorf("the index has %d parts for %d replicas", len(parts), size)
	}
}

// A caller is answered before its own timeout, which is 30 s for vime, and its replica is there.
func TestRegistrationOfUnreadyReplica(t *testing.T) {
	t.Parallel()
	p := startRegistrable(t, nil)
	p.expect(http.StatusOK, "GET", "/livez", "")
	p.client.Timeout = 30 * time.Second
	response := p.expect(http.StatusAccepted, "POST", "/workers", `{"url":"`+unusedURL+`"}`)
	if !strings.Contains(response, "not ready yet") || p.idOf(unusedURL) == "" {
		t.Error(response)
	}
}

// The ranks of a registered replica are one worker, which is healthy when they are.
func TestRegistrationOfRanks(t *testing.T) {
	t.Parallel()
	p := startRegistrable(t, func(c *config.Config) { c.Poll.Interval = 20 * time.Millisecond })
	replica, _ := startSimReplica(t, sim.Config{Ranks: 2, Engine: engine.Config{KVTokens: 20_000, Speed: 20}}, "127.0.0.1:0")
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	p.until("it is two backends", func() bool { return len(p.server.registry.All()) == 2 })
	if list := p.workers(); list.Total != 1 || list.Workers[0].URL != replica || !list.Workers[0].IsHealthy {
		t.Errorf("listed as %+v", list)
	}
}

func TestFlushCacheOfRegisteredReplicas(t *testing.T) {
	t.Parallel()
	p := startRegistrable(t, nil)
	replica, _ := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, replica))
	if response := p.expect(http.StatusOK, "POST", "/flush_cache", ""); !strings.Contains(response, `"workers_flushed":1`) ||
		!strings.Contains(response, `"status":"success"`) {
		t.Error(response)
	}
	plain := standIn{}.start(t) // has no such path
	p.expect(http.StatusOK, "POST", "/workers", fmt.Sprintf(`{"url":%q}`, plain))
	if response := p.expect(http.StatusPartialContent, "POST", "/flush_cache", ""); !strings.Contains(response, `"workers_flushed":1`) ||
		!strings.Contains(response, `"failed":[{`) {
		t.Error(response)
	}
	p.logs("action=flush_cache")
}

// A drain ends with the replica: another one that is registered under its URL later gets requests.
func TestDrainEndsWithRegistration(t *testing.T) {
	t.Parallel()
	p, replica := startRegistrable(t, nil), standIn{}.start(t)
	body, name := fmt.Sprintf(`{"url":%q}`, replica), strings.TrimPrefix(replica, "http://")
	p.expect(http.StatusOK, "POST", "/workers", body)
	p.drain(name)
	p.expect(http.StatusOK, "DELETE", "/workers/"+name, "")
	p.until("it is gone", func() bool { return len(p.server.registry.All()) == 0 })
	p.expect(http.StatusOK, "POST", "/workers", body)
	p.checkServed()
}

// TestCallersDoNotRemoveOperatorsReplicas checks that who may register replicas cannot remove those that an operator
// has added, also after a registration of the same URL.
func TestCallersDoNotRemoveOperatorsReplicas(t *testing.T) {
	t.Parallel()
	p := startRegistrable(t, nil)
	replica := standIn{}.start(t)
	body := fmt.Sprintf(`{"url":%q}`, replica)
	admin := &emptyFleet{guarded: &guarded{t: t, client: p.client, admin: p.admin}}
	admin.call("POST", "/api/backends?wait=1m", body, http.StatusCreated, nil)
	if status, response := p.call("POST", "/workers", body); status != http.StatusOK {
		t.Errorf("registered again: status %d, %s", status, response)
	}
	if status, response := p.call("DELETE", "/workers/"+url.PathEscape(replica), ""); status/100 != 4 ||
		!strings.Contains(response, "added by an operator") {
		t.Errorf("removed: status %d, %s", status, response)
	}
	if rows := admin.list().Backends; len(rows) != 1 {
		t.Errorf("got %+v", rows)
	}
}
