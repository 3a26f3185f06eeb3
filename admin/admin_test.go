package admin

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/config"
	"warmroute/fleet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const token = "a-token-that-operators-have"

// far is a listener that seems to be reached from another machine.
type far struct{ net.Listener }

type farConn struct{ net.Conn }

func (l far) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return farConn{c}, nil
}

func (farConn) LocalAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 5), Port: 9090} }

// listener is a Handler behind a real one.
type listener struct {
	t       testing.TB
	url     string
	host    string // as clients know it
	client  *http.Client
	backend *backends.Backend
	handler *Handler
}

// newFleet returns a fleet of the backends in a registry, which nothing watches.
func newFleet(t testing.TB, registry *backends.Registry) *fleet.Fleet {
	t.Helper()
	initial, err := fleet.NewInitial(t.Context(), &config.Config{}, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		t.Fatal(err)
	}
	initial.Registry = registry
	return fleet.New(fleet.Options{Initial: initial})
}

func listen(t *testing.T, fromAfar bool, o Options) *listener {
	t.Helper()
	u, err := backends.ParseURL("http://10.0.0.9:8000/a")
	if err != nil {
		t.Fatal(err)
	}
	b := backends.New("", u, "", deaf{t})
	b.SetState(backends.Ready)
	if o.Registry, err = backends.NewRegistry([]*backends.Backend{b}); err != nil {
		t.Fatal(err)
	}
	o.Log, o.Fleet = cmp.Or(o.Log, slog.New(slog.DiscardHandler)), newFleet(t, o.Registry)
	if o.Router == nil {
		o.Router = newRouter(t, o.Registry, time.Now)
	}
	if o.Metrics == nil {
		o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "warmroute_up 1\n") })
	}
	l := &listener{t: t, client: &http.Client{Transport: &http.Transport{}}, backend: b, handler: New(o)}
	s := httptest.NewUnstartedServer(l.handler)
	l.url, l.host = "http://"+s.Listener.Addr().String(), s.Listener.Addr().String()
	if fromAfar {
		s.Listener = far{s.Listener}
	}
	s.Start()
	t.Cleanup(func() { l.client.CloseIdleConnections(); s.Close() })
	return l
}

// ask sends a request with headers, Host among them, and returns the status and the body.
func (l *listener) ask(method, path string, headers ...string) (int, string) {
	l.t.Helper()
	return l.send(method, path, "", headers...)
}

func (l *listener) send(method, path, body string, headers ...string) (int, string) {
	l.t.Helper()
	resp := l.doWithBody(method, path, body, headers...)
	defer resp.Body.Close()
	response, err := io.ReadAll(resp.Body)
	if err != nil {
		l.t.Fatal(err)
	}
	return resp.StatusCode, string(response)
}

func (l *listener) do(method, path string, headers ...string) *http.Response {
	l.t.Helper()
	return l.doWithBody(method, path, "", headers...)
}

func (l *listener) doWithBody(method, path, body string, headers ...string) *http.Response {
	l.t.Helper()
	req, err := http.NewRequest(method, l.url, strings.NewReader(body))
	if err != nil {
		l.t.Fatal(err)
	}
	if path == "*" {
		req.URL.Opaque = path
	} else if req.URL, err = req.URL.Parse(l.url + path); err != nil {
		l.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "Host" {
			req.Host = headers[i+1]
		} else {
			req.Header.Add(headers[i], headers[i+1])
		}
	}
	resp, err := l.client.Do(req)
	if err != nil {
		l.t.Fatal(err)
	}
	return resp
}

const (
	drainPath = "/api/backends/10.0.0.9:8000%2Fa/drain"
	jsonType  = "application/json"
)

func TestDrainAndUndrain(t *testing.T) {
	var log bytes.Buffer
	l := listen(t, false, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	for _, step := range []struct {
		verb string
		want backends.State
	}{{"drain", backends.Draining}, {"drain", backends.Draining}, {"undrain", backends.Ready}} {
		status, response := l.ask("POST", strings.TrimSuffix(drainPath, "drain")+step.verb, "Content-Type", jsonType)
		want := fmt.Sprintf(`{"backend":"10.0.0.9:8000/a","in_flight":0,"state":%q}`+"\n", step.want.String())
		if status != 200 || response != want || l.backend.State() != step.want {
			t.Errorf("%s: got %d %s", step.verb, status, response)
		}
	}
	if n := strings.Count(log.String(), "operator action"); n != 2 {
		t.Errorf("%d lines about two changes:\n%s", n, log.String())
	}
	status, response := l.ask("POST", "/api/backends/none/drain", "Content-Type", jsonType)
	if status != 404 || !strings.Contains(response, "available: 10.0.0.9:8000/a") || strings.Contains(response, "none") {
		t.Errorf("got %d %s", status, response)
	}
}

// TestAccess asks each listener for each thing in each way.
func TestAccess(t *testing.T) {
	bearer := []string{"Authorization", "Bearer " + token}
	for _, c := range []struct {
		name    string
		afar    bool
		token   string
		headers []string
		metrics int // the status of a scrape
		drain   int // and of a drain
	}{
		{"loopback", false, "", nil, 200, 200},
		{"loopback, token set", false, token, nil, 200, 401},
		{"loopback, token set and sent", false, token, bearer, 200, 200},
		{"afar, no token set", true, "", nil, 200, 403},
		{"afar, no token set, one sent", true, "", bearer, 200, 403},
		{"afar, an empty token sent", true, "", []string{"Authorization", "Bearer "}, 200, 403},
		{"afar, token set", true, token, nil, 200, 401},
		{"afar, token sent", true, token, bearer, 200, 200},
		{"afar, token sent twice", true, token, append(bearer, bearer...), 200, 401},
		{"afar, another sent", true, token, []string{"Authorization", "Bearer " + token[1:]}, 200, 401},
		{"afar, sent as a password", true, token, []string{"Authorization", "Basic " + token}, 200, 401},
		{"afar, by the name of a service, as Prometheus asks", true, token, []string{"Host", "warmroute:9090"}, 200, 401},
		{"afar, by the name of a service", true, token, append([]string{"Host", "warmroute:9090"}, bearer...), 200, 200},
		{"localhost", false, "", []string{"Host", "LocalHost:9090"}, 200, 200},
		{"another address of this machine", false, "", []string{"Host", "[::1]:9090"}, 200, 200},
		{"the name in the setting", false, "", []string{"Host", "admin.example"}, 200, 200},
		{"a name that was made to lead here", false, "", []string{"Host", "evil.example:9090"}, 403, 403},
		{"the same, token sent", false, token, append([]string{"Host", "evil.example"}, bearer...), 403, 403},
		{"a name that begins like an address", false, "", []string{"Host", "127.0.0.1.evil.example"}, 403, 403},
		{"another's page", false, "", []string{"Origin", "http://evil.example"}, 403, 403},
		{"a page without an origin", false, "", []string{"Origin", "null"}, 403, 403},
		{"a page of another port", false, "", []string{"Origin", "http://127.0.0.1:1"}, 403, 403},
		{"two origins", false, "", []string{"Origin", "http://SELF", "Origin", "http://SELF"}, 403, 403},
		{"a page of its own", false, "", []string{"Origin", "http://SELF"}, 200, 200},
		{"a browser says that it is another's", false, "", []string{"Sec-Fetch-Site", "cross-site"}, 403, 403},
		{"a browser's address bar", false, "", []string{"Sec-Fetch-Site", "none"}, 200, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := listen(t, c.afar, Options{Token: c.token, Host: "admin.example"})
			headers := strings.Split(strings.ReplaceAll(strings.Join(c.headers, "\n"), "SELF", l.host), "\n")
			if c.headers == nil {
				headers = nil
			}
			if status, response := l.ask("GET", "/metrics", headers...); status != c.metrics {
				t.Errorf("metrics: got %d %s, want %d", status, response, c.metrics)
			}
			status, response := l.ask("POST", drainPath, append(headers, "Content-Type", jsonType)...)
			if status != c.drain || strings.Contains(response, token) {
				t.Errorf("drain: got %d %s, want %d", status, response, c.drain)
			}
			if drained := l.backend.State() == backends.Draining; drained != (c.drain == 200) {
				t.Errorf("the backend is drained: %v", drained)
			}
			if status, _ := l.ask("GET", "/debug/pprof/", headers...); status != c.drain {
				t.Errorf("profile: got %d, want %d", status, c.drain)
			}
		})
	}
}

func TestPostContentType(t *testing.T) {
	l := listen(t, false, Options{})
	for _, kind := range []string{"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
		"application/jsonp", "text/plain; application/json"} {
		if status, response := l.ask("POST", drainPath, "Content-Type", kind); status != 415 || !strings.Contains(response, jsonType) {
			t.Errorf("%q: got %d %s", kind, status, response)
		}
	}
	if status, _ := l.ask("POST", drainPath, "Content-Type", "application/json; charset=utf-8"); status != 200 {
		t.Errorf("with a charset: got %d", status)
	}
	if status, _ := l.send("POST", drainPath, strings.Repeat(" ", maxPostBytes+1), "Content-Type", jsonType); status != 413 {
		t.Errorf("a long body: got %d", status)
	}
}

func TestUnknownPaths(t *testing.T) {
	l := listen(t, false, Options{})
	for _, c := range []struct{ method, path string }{
		{"GET", "/index.html"}, {"GET", "/page/page.js"}, {"POST", "/api/backends/x/none"}, {"GET", "/debug/vars"}, {"GET", "/api"},
		{"GET", "/api/"},
		{"GET", "/api/state/"}, {"PURGE", "/none"}, {"GET", "/api%2Fstate"}, {"GET", "/api/backends/"},
	} {
		status, response := l.ask(c.method, c.path, "Content-Type", jsonType)
		if status != 404 || !strings.Contains(response, "available: GET /, ") || !strings.Contains(response, "GET /metrics") ||
			!strings.Contains(response, "POST /api/backends/{name}/drain") {
			t.Errorf("%s %s: got %d %s", c.method, c.path, status, response)
		}
	}
}

func TestMethodNotAllowed(t *testing.T) {
	l := listen(t, false, Options{})
	for _, c := range []struct{ method, path, allow string }{
		{"POST", "/", "GET, HEAD"},
		{"DELETE", "/page.js", "GET, HEAD"},
		{"POST", "/metrics", "GET, HEAD"},
		{"POST", "/api/state", "GET, HEAD"},
		{"OPTIONS", "/api/events", "GET, HEAD"},
		{"PURGE", "/api/usage", "GET, HEAD"},
		{"get", "/api/usage", "GET, HEAD"},
		{"PUT", "/api/backends", "GET, HEAD, POST"},
		{"POST", "/api/backends/x", "GET, HEAD, DELETE"},
		{"PATCH", "/api/backends/sleep", "GET, HEAD, POST, DELETE"}, // of a backend of that name
		{"GET", drainPath, "POST"},
		{"PUT", drainPath, "POST"},
		{"DELETE", "/api/backends/x/sleep", "POST"},
		{"HEAD", "/api/requests/x/cancel", "POST"},
		{"GET", "/api/explain", "POST"},
		{"POST", "/debug/pprof/", "GET, HEAD"},
		{"POST", "/debug/pprof/heap", "GET, HEAD"},
	} {
		resp := l.do(c.method, c.path, "Content-Type", jsonType)
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		want := `{"error":{"message":"method not allowed on this path, allowed: ` + c.allow + `; available: GET /, `
		if c.method == "HEAD" {
			want = ""
		}
		if resp.StatusCode != 405 || strings.Join(resp.Header["Allow"], "|") != c.allow || !strings.HasPrefix(string(body), want) ||
			resp.Header.Get("Content-Type") != jsonType || err != nil {
			t.Errorf("%s %s: got %d %v %s, %v", c.method, c.path, resp.StatusCode, resp.Header, body, err)
		}
	}
	if l.backend.State() != backends.Ready {
		t.Error("the backend was drained")
	}
}

// Paths and methods are looked up only for who may know of them.
func TestRouteErrorsAfterAccess(t *testing.T) {
	for _, c := range []struct {
		method, path string
		headers      []string
		want         int
	}{
		{"POST", "/metrics", nil, 401},
		{"PUT", "/", nil, 401},
		{"PURGE", "/metrics", nil, 401},
		{"PURGE", "/api/state", nil, 401},
		{"PUT", drainPath, nil, 401},
		{"GET", "/none", nil, 401},
		{"POST", "/api/state", []string{"Origin", "http://evil.example"}, 403},
		{"POST", "/api/state", []string{"Authorization", "Bearer " + token}, 415},
	} {
		l := listen(t, false, Options{Token: token})
		resp := l.do(c.method, c.path, c.headers...)
		resp.Body.Close()
		if resp.StatusCode != c.want || resp.Header["Allow"] != nil || resp.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s %s: got %d %v", c.method, c.path, resp.StatusCode, resp.Header)
		}
	}
}

func TestHeadAsGet(t *testing.T) {
	a := askable(t)
	for _, path := range []string{"/", "/page.js", "/api/state", "/api/backends", "/api/backends/gpu-0", "/api/history", "/api/requests",
		"/api/usage", "/debug/pprof/", "/debug/pprof/heap"} {
		if status, body := a.ask("HEAD", path); status != 200 || body != "" {
			t.Errorf("HEAD %s: got %d %s", path, status, body)
		}
	}
	l := listen(t, false, Options{})
	if status, _ := l.ask("HEAD", "/metrics"); status != 200 {
		t.Errorf("HEAD /metrics: %d", status)
	}
}

// A backend's name has slashes where its URL has a path.
func TestEscapesInPaths(t *testing.T) {
	l := listen(t, false, Options{})
	for _, path := range []string{
		"/api/backends/10.0.0.9:8000%2Fa", "/api/backends/10.0.0.9:8000%2fa", "/api/backends/10.0.0.9%3A8000%2F%61",
		"/%61pi/b%61ckends/10.0.0.9:8000%2Fa",
		"//api/backends/10.0.0.9:8000%2Fa", "/api/./backends/x/../10.0.0.9:8000%2Fa",
	} {
		if status, response := l.ask("GET", path); status != 200 || !strings.HasPrefix(response, `{"name":"10.0.0.9:8000/a",`) {
			t.Errorf("%s: got %d %s", path, status, response)
		}
	}
	for _, path := range []string{"/api/backends/10.0.0.9:8000%252Fa", "/api/backends/10.0.0.9:8000/a", "/api/backends/%2e%2e"} {
		if status, response := l.ask("GET", path); status != 404 {
			t.Errorf("%s: got %d %s", path, status, response)
		}
	}
	resp := l.do("GET", "/debug/pprof")
	resp.Body.Close()
	if resp.StatusCode != 200 || resp.Request.URL.Path != "/debug/pprof/" { // its links are relative
		t.Errorf("/debug/pprof: got %d of %s", resp.StatusCode, resp.Request.URL)
	}
}

// TestUncleanPaths has calls whose path lacks the name of a backend: none of them is the call for all backends.
func TestUncleanPaths(t *testing.T) {
	l := listen(t, false, Options{})
	for _, path := range []string{"/api/backends//sleep", "/api/backends/./sleep", "/api/backends/x/../sleep", "//api/backends/sleep"} {
		req, err := http.NewRequest(http.MethodPost, l.url+path, nil) // which leaves the path as it is
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := l.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		response, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(response), "write /api/backends/sleep if") {
			t.Errorf("POST %s: got %d %s", path, resp.StatusCode, response)
		}
	}
	if status, response := l.ask("DELETE", "/api/backends//"); status != 400 {
		t.Errorf("DELETE: got %d %s", status, response)
	}
	if status, _ := l.ask("GET", "//api/backends"); status != 200 {
		t.Errorf("GET: got %d", status)
	}
}

// TestCallsAreDocumented has each call of the API on the page about it.
func TestCallsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/reference/http-api.md")
	if err != nil {
		t.Fatal(err)
	}
	calls := strings.Split(listen(t, false, Options{}).handler.calls, ", ")
	if len(calls) < 20 {
		t.Errorf("only %d calls: %s", len(calls), calls)
	}
	for _, call := range calls {
		call = strings.NewReplacer("{name}", "NAME", "{handle}", "HANDLE").Replace(call)
		before, last := path.Split(call)
		if slices.Contains(control.ActionNames(), last) {
			call = before + "ACTION"
		}
		if strings.Contains(call, "/api/") && !regexp.MustCompile("`"+regexp.QuoteMeta(call)+"[?`]").Match(page) {
			t.Errorf("docs/reference/http-api.md lacks %s", call)
		}
	}
}

func TestSetToken(t *testing.T) {
	l := listen(t, true, Options{Token: token})
	l.handler.SetToken("another")
	for given, want := range map[string]int{token: 401, "another": 200} {
		if status, _ := l.ask("GET", "/debug/pprof/", "Authorization", "Bearer "+given); status != want {
			t.Errorf("%s: got %d, want %d", given, status, want)
		}
	}
	if l.handler.SetToken(""); l.backend.State() != backends.Ready {
		t.Fatal("drained")
	}
	if status, _ := l.ask("GET", "/debug/pprof/", "Authorization", "Bearer "); status != 403 {
		t.Errorf("without a token: got %d", status)
	}
}

func TestProfileLimits(t *testing.T) {
	l := listen(t, false, Options{})
	for _, seconds := range []string{"0", "61", "-1", "1e3", "99999999999999999999"} {
		if status, _ := l.ask("GET", "/debug/pprof/profile?seconds="+seconds); status != 400 {
			t.Errorf("%s seconds: got %d", seconds, status)
		}
	}
	for _, path := range []string{"/debug/pprof/trace?seconds=1", "/debug/pprof/heap", "/debug/pprof/goroutine?debug=2"} {
		if status, _ := l.ask("GET", path); status != 200 {
			t.Errorf("%s: got %d", path, status)
		}
	}
}

func TestConcurrentScrapes(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	l := listen(t, false, Options{Metrics: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { begun <- struct{}{}; <-end })})
	responses := make(chan int, maxScrapes)
	for range maxScrapes {
		go func() {
			resp, err := l.client.Get(l.url + "/metrics")
			if err != nil {
				responses <- 0
				return
			}
			resp.Body.Close()
			responses <- resp.StatusCode
		}()
		<-begun
	}
	if status, _ := l.ask("GET", "/metrics"); status != 503 {
		t.Errorf("one more than there may be: got %d", status)
	}
	if status, _ := l.ask("POST", drainPath, "Content-Type", jsonType); status != 200 {
		t.Errorf("operators are kept out by scrapes: got %d", status)
	}
	close(end)
	for range maxScrapes {
		if status := <-responses; status != 200 {
			t.Errorf("got %d", status)
		}
	}
}

func TestLimitConcurrency(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	limit := limitConcurrency(2)
	serve := func(w http.ResponseWriter, _ *http.Request) { begun <- struct{}{}; <-end }
	one, other := limit(http.HandlerFunc(serve)), limit(http.HandlerFunc(serve))
	ended := make(chan struct{})
	for _, h := range []http.Handler{one, other} {
		go func() {
			h.ServeHTTP(httptest.NewRecorder(), localRequest("GET", "/", ""))
			ended <- struct{}{}
		}()
		<-begun
	}
	for _, h := range []http.Handler{one, other} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, localRequest("GET", "/", ""))
		if w.Code != 503 || w.Header().Get("Retry-After") != "1" || w.Header().Get("Content-Type") != jsonType ||
			w.Body.String() != `{"error":{"message":"too many requests of this kind at once","src":"warmroute"}}`+"\n" {
			t.Errorf("beyond the limit: %d %v %s", w.Code, w.Header(), w.Body)
		}
	}
	close(end)
	<-ended
	<-ended
	go one.ServeHTTP(httptest.NewRecorder(), localRequest("GET", "/", ""))
	<-begun
}

// A wrong token must not read like a missing one: the sender would look in the wrong place.
func TestAdminTokenErrors(t *testing.T) {
	l := listen(t, true, Options{Token: token})
	for _, c := range []struct {
		given []string
		says  string
	}{
		{nil, "send the admin_token as Authorization: Bearer TOKEN"},
		{[]string{"Authorization", "Bearer "}, "send the admin_token as Authorization: Bearer TOKEN"},
		{[]string{"Authorization", "Basic " + token}, "send the admin_token as Authorization: Bearer TOKEN"},
		{[]string{"Authorization", "Bearer " + token[1:]}, "invalid admin token"},
	} {
		status, body := l.ask("GET", "/api/state", c.given...)
		if status != 401 || !strings.Contains(body, c.says) {
			t.Errorf("%v: got %d %s, want %q", c.given, status, body, c.says)
		}
	}
}
