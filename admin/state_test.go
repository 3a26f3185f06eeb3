package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends"
	"warmroute/fleet"
	"warmroute/proxy"
	"warmroute/router"
)

// failsafe is longer than any step of a test takes.
const failsafe = 20 * time.Second

// busy is a proxy with a request in flight: its replica gets it, and never responds.
type busy struct {
	*asked
	public string
	seen   chan struct{} // the replica has a request
	left   chan struct{} // the proxy has closed its connection
	proxy  *proxy.Proxy
}

const secret = "a secret of the clients"

func atWork(t *testing.T) *busy {
	t.Helper()
	b := &busy{asked: askable(t), seen: make(chan struct{}, 10), left: make(chan struct{}, 10)}
	for i, backend := range b.fleet {
		backend.SetOptions(backends.Options{APIKey: "backends-own-key", Transport: silent{b}})
		usage := float64(i) / 4
		backend.SetLoad(&backends.Load{QueuesKnown: true, Running: i, KVKnown: true, KVCacheUsage: usage, PolledAt: time.Now()})
	}
	b.proxy = b.handler.Proxy
	s := httptest.NewServer(b.proxy)
	t.Cleanup(s.Close)
	b.public = s.URL
	return b
}

// silent is how replicas are reached that never respond.
type silent struct{ b *busy }

func (s silent) RoundTrip(r *http.Request) (*http.Response, error) {
	s.b.seen <- struct{}{}
	<-r.Context().Done()
	s.b.left <- struct{}{}
	return nil, r.Context().Err()
}

// Do is not called: nothing checks or polls the replicas.
func (s silent) Do(context.Context, *fasthttp.Request, *fasthttp.Response, func(io.Reader) error) error {
	return io.ErrUnexpectedEOF
}

// request sends one, and returns what its client gets once it ends.
func (b *busy) request() <-chan string {
	got := make(chan string, 1)
	go func() {
		req, _ := http.NewRequest("POST", b.public+"/v1/chat/completions", strings.NewReader(chat("m", secret)))
		req.Header.Set("X-Request-Id", "mine")
		req.Header.Set("Authorization", "Bearer the-clients-key")
		resp, err := b.client.Do(req)
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		got <- fmt.Sprint(resp.StatusCode, " ", string(body))
	}()
	<-b.seen
	return got
}

func (l *listener) state(headers ...string) (s State, text string) {
	l.t.Helper()
	status, text := l.ask("GET", "/api/state", headers...)
	if err := json.Unmarshal([]byte(text), &s); status != 200 || err != nil {
		l.t.Fatalf("%d %s %v", status, text, err)
	}
	return s, text
}

func TestState(t *testing.T) {
	b := atWork(t)
	done := b.request()
	b.ask("POST", "/api/backends/gpu-1/drain", "Content-Type", jsonType)
	b.fleet[2].Aborted.Add(5)
	s, text := b.state()
	if s.Backends[0].Aborted != 0 || s.Backends[2].Aborted != 5 {
		t.Errorf("aborted responses: %s", text)
	}
	if len(s.Backends) != 3 || s.Backends[0].Name != "gpu-0" || s.Backends[0].State != "ready" || s.Backends[1].State != "draining" ||
		!s.Backends[1].Drained ||
		s.Backends[0].InFlight+s.Backends[1].InFlight != 1 || s.Backends[0].Breaker != "closed" || *s.Backends[2].Running != 2 ||
		*s.Backends[2].KVUsage != 0.5 {
		t.Errorf("backends: %s", text)
	}
	if s.Policy != "prefix" || s.Queue.Requests != 0 || len(s.Queue.First) != 0 || s.Requests.All != 1 {
		t.Errorf("got %s", text)
	}
	r := s.Requests.Oldest[0]
	if r.RequestID != "mine" || r.Phase != "first token" || r.Model != "m" || r.Endpoint != "/v1/chat/completions" || r.Backend == "" ||
		r.PromptTokens < 500 || r.Attempts != 1 {
		t.Errorf("got %+v", r)
	}
	if len(s.Decisions) != 1 || s.Decisions[0].RequestID != "mine" || s.Decisions[0].Backend != r.Backend || s.Decisions[0].Sentence == "" {
		t.Errorf("got %+v", s.Decisions)
	}
	for _, hidden := range []string{secret, "the-clients-key", "backends-own-key"} {
		if strings.Contains(text, hidden) {
			t.Errorf("%q is shown", hidden)
		}
	}
	b.proxy.Activity().Cancel(r.Handle)
	<-done
}

// Between two attempts a request asks for a backend, and mostly need not wait for it.
func TestQueueState(t *testing.T) {
	asking := []requestState{{Handle: "a", Age: 3}, {Handle: "b", Age: 2}}
	if q := newQueueState(0, asking); len(q.First) != 0 || q.Oldest != nil {
		t.Errorf("empty queue: %+v", q)
	}
	if q := newQueueState(5, asking); len(q.First) != 2 || *q.Oldest != 3 {
		t.Errorf("five wait: %+v", q)
	}
}

func TestStateWithoutRequests(t *testing.T) {
	_, text := askable(t).state()
	for _, want := range []string{`"oldest":[]`, `"first":[]`, `"decisions":[]`, `"oldest_seconds":null`, `"kv_usage":null`,
		`"hit_ratio":null`, `"requests_per_second":0`, `"failed_ratio":null`} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing in %s", want, text)
		}
	}
}

func TestCancel(t *testing.T) {
	b := atWork(t)
	done := b.request()
	s, _ := b.state()
	handle := s.Requests.Oldest[0].Handle
	for _, h := range []string{"mine", "0", handle + "0", "%2e%2e"} {
		b.post("/api/requests/"+h+"/cancel", "", 404, "no request in flight has that handle")
	}
	b.post("/api/requests/"+handle+"/cancel", "{}", 200, `{"cancelled":"`+handle+`"}`)
	if got := <-done; !strings.HasPrefix(got, "403 ") || !strings.Contains(got, `"code":"cancelled"`) {
		t.Errorf("the client got %s", got)
	}
	<-b.left
	for {
		if s, _ := b.state(); s.Requests.All == 0 {
			break
		}
	}
	b.post("/api/requests/"+handle+"/cancel", "", 404, "GET /api/state")
}

// hears opens a stream of events.
func (l *listener) hears(headers ...string) (*http.Response, *bufio.Reader) {
	l.t.Helper()
	req, _ := http.NewRequestWithContext(l.t.Context(), "GET", l.url+"/api/events", nil)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := l.client.Do(req)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { resp.Body.Close() })
	return resp, bufio.NewReader(resp.Body)
}

// event reads one.
func event(t *testing.T, from *bufio.Reader) (name, data string) {
	t.Helper()
	for {
		line, err := from.ReadString('\n')
		if err != nil {
			t.Fatalf("no event, but %v", err)
		}
		switch line = strings.TrimSuffix(line, "\n"); {
		case strings.HasPrefix(line, "event: "):
			name = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			data = line[len("data: "):]
		case line == "":
			return name, data
		}
	}
}

func TestEvents(t *testing.T) {
	a := askable(t)
	resp, from := a.hears()
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || kind != "text/event-stream" {
		t.Fatalf("got %d %s", resp.StatusCode, kind)
	}
	var first, second State
	for _, s := range []*State{&first, &second} {
		name, data := event(t, from)
		if err := json.Unmarshal([]byte(data), s); name != "state" || err != nil {
			t.Fatalf("got %s %s: %v", name, data, err)
		}
	}
	if len(first.Backends) != 3 || !second.Now.After(first.Now) {
		t.Errorf("got %+v, then %+v", first, second)
	}
}

func TestEventStreamLimit(t *testing.T) {
	a := askable(t)
	for range maxStreams {
		_, from := a.hears()
		event(t, from)
	}
	if status, _ := a.ask("GET", "/api/events"); status != 503 {
		t.Errorf("one more than there may be: got %d", status)
	}
	if status, _ := a.ask("GET", "/api/state"); status != 200 {
		t.Errorf("the state: got %d", status)
	}
}

func TestEndEvents(t *testing.T) {
	a := askable(t)
	_, from := a.hears()
	event(t, from)
	a.handler.EndEventStreams()
	a.handler.EndEventStreams()
	for name := ""; name != "end"; {
		name, _ = event(t, from)
	}
	if rest, err := io.ReadAll(from); len(rest) > 0 || err != nil {
		t.Errorf("then %q, %v", rest, err)
	}
	_, late := a.hears()
	if name, _ := event(t, late); name != "state" {
		t.Errorf("who comes later gets %s", name)
	}
	if name, _ := event(t, late); name != "end" {
		t.Errorf("and then %s", name)
	}
}

func TestEventsEndAfterTokenChange(t *testing.T) {
	a := askable(t)
	a.handler.SetToken(token)
	_, from := a.hears("Authorization", "Bearer "+token)
	event(t, from)
	a.handler.SetToken("another")
	if _, err := io.ReadAll(from); err != nil {
		t.Error(err)
	}
	if status, _ := a.ask("GET", "/api/events", "Authorization", "Bearer "+token); status != 401 {
		t.Errorf("the old token: got %d", status)
	}
}

// A listener that reads nothing is dropped when it has been given more than the
// connection holds, and its place is another's.
func TestEventWriteTimeout(t *testing.T) {
	a := askable(t)
	w := &stuckWriter{header: http.Header{}}
	ended := make(chan struct{})
	go func() {
		a.handler.ServeHTTP(w, localRequest("GET", "/api/events", ""))
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(failsafe):
		t.Fatal("it is still written to")
	}
	if w.deadline.IsZero() {
		t.Error("no deadline")
	}
	for range maxStreams {
		_, from := a.hears()
		event(t, from)
	}
}

// stuckWriter takes nothing, and fails as a connection does whose deadline is over.
type stuckWriter struct {
	header   http.Header
	deadline time.Time
}

func (w *stuckWriter) Header() http.Header                 { return w.header }
func (w *stuckWriter) WriteHeader(int)                     {}
func (w *stuckWriter) Write([]byte) (int, error)           { return 0, io.ErrShortWrite }
func (w *stuckWriter) SetWriteDeadline(at time.Time) error { w.deadline = at; return nil }

// TestPageAccess: its files are no secret, what it shows is.
func TestPageAccess(t *testing.T) {
	bearer := []string{"Authorization", "Bearer " + token}
	link := []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}
	for _, c := range []struct {
		name    string
		afar    bool
		token   string
		headers []string
		page    int
		state   int
	}{
		{"loopback", false, "", nil, 200, 200},
		{"loopback, token set", false, token, nil, 200, 401},
		{"loopback, token sent", false, token, bearer, 200, 200},
		{"afar, no token set", true, "", nil, 403, 403},
		{"afar, token set", true, token, nil, 200, 401},
		{"a name that was made to lead here", false, "", []string{"Host", "evil.example"}, 403, 403},
		{"a link on another's page", false, "", link, 200, 403},
		{"in another's frame", false, "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}, 403,
			403},
		{"another's page asks", false, "", []string{"Origin", "http://evil.example", "Sec-Fetch-Site", "cross-site"}, 403, 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := askable(t)
			far := listen(t, c.afar, Options{Token: c.token, Proxy: a.handler.Proxy, Router: a.router, Fleet: a.handler.Fleet})
			if status, _ := far.ask("GET", "/", c.headers...); status != c.page {
				t.Errorf("page: got %d, want %d", status, c.page)
			}
			for _, path := range []string{"/api/state"} {
				if status, response := far.ask("GET", path, c.headers...); status != c.state || strings.Contains(response, token) {
					t.Errorf("%s: got %d %s, want %d", path, status, response, c.state)
				}
			}
		})
	}
}

func TestPageContentSecurityPolicy(t *testing.T) {
	l := listen(t, false, Options{})
	for path, kind := range map[string]string{"/": "text/html", "/style.css": "text/css", "/page.js": "text/javascript",
		"/history.js": "text/javascript", "/finished.js": "text/javascript", "/usage.js": "text/javascript", "/icon.svg": "image/svg+xml"} {
		resp, err := l.client.Get(l.url + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		h := resp.Header
		if resp.StatusCode != 200 || !strings.HasPrefix(h.Get("Content-Type"), kind) || h.Get("X-Content-Type-Options") != "nosniff" ||
			h.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: %d %v", path, resp.StatusCode, h)
		}
		for _, part := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
			"frame-ancestors 'none'"} {
			if !strings.Contains(h.Get("Content-Security-Policy"), part) {
				t.Errorf("%s: no %s in %s", path, part, h.Get("Content-Security-Policy"))
			}
		}
		text := strings.ReplaceAll(string(body), "http://www.w3.org/2000/svg", "")
		for _, not := range []string{"http://", "https://", "innerHTML", "style=\"", "onclick", "eval("} {
			if strings.Contains(text, not) {
				t.Errorf("%s has %s in it", path, not)
			}
		}
	}
	if _, page := l.ask("GET", "/"); !strings.Contains(page, `data-token="none"`) {
		t.Error("the page asks for a token that is not wanted")
	}
	l.handler.SetToken(token)
	if _, page := l.ask("GET", "/"); !strings.Contains(page, `data-token="wanted"`) || strings.Contains(page, token) {
		t.Error("the page does not ask for the token, or has it")
	}
	if status, body := l.ask("HEAD", "/"); status != 200 || body != "" {
		t.Errorf("HEAD: %d %s", status, body)
	}
}

func TestStateOfSlowBackend(t *testing.T) {
	a := askable(t)
	b := a.fleet[0]
	load := backends.Load{QueuesKnown: true, Running: 4, OwnInFlight: 4, TokensKnown: true}
	generate := func(seconds int, step float64) {
		for range seconds {
			now := time.Now().Add(time.Duration(a.later.Add(int64(time.Second))))
			load.Gaps += 4 / step
			load.GapSeconds += 4
			load.GenerationTokens, load.PolledAt = load.Gaps, now
			l := load
			b.SetLoad(&l)
			a.router.ObserveLoad(b, &l)
		}
	}
	generate(120, 0.02)
	generate(20, 0.3)
	if s, text := a.state(); s.Backends[0].State != "ready" || s.Backends[0].Reason != "slow: its steps take 15 times as long as usual" {
		t.Errorf("when it is slow: %s", text)
	}
}

func TestStateOfStartingBackend(t *testing.T) {
	a := askable(t)
	u, err := backends.ParseURL("http://192.0.2.9:8000")
	if err != nil {
		t.Fatal(err)
	}
	b := backends.New("gpu-9", u, "", deaf{t})
	a.handler.Registry.Add(b)
	a.router.AddBackend(b)
	s, text := a.state()
	if got := s.Backends[3]; got.Name != "gpu-9" || got.State != "starting" || got.Reason != "not checked yet" || got.Since == nil {
		t.Errorf("got %+v in %s", got, text)
	}
}

// TestStateOfRanks: they name their server, and are the last ready backends for a model together.
func TestStateOfRanks(t *testing.T) {
	a := askable(t)
	u, err := backends.ParseURL("http://192.0.2.9:8000")
	if err != nil {
		t.Fatal(err)
	}
	server := backends.New("eight", u, "", deaf{t})
	server.Addr = "192.0.2.10:8000"
	server.SetOptions(backends.Options{Source: backends.FromFile, Role: backends.RolePrefill})
	server.SetVersion("0.32.0")
	ranks := []*backends.Backend{backends.NewRank(server, 0, 0), backends.NewRank(server, 1, 1)}
	server.SetParts(ranks)
	server.SetState(backends.Ready)
	for _, b := range ranks {
		a.handler.Registry.Add(b)
		a.router.AddBackend(b)
	}
	ranks[0].SetModels([]backends.Model{{ID: "ours", Root: "ours", Card: []byte(`{"id":"ours"}`)}})
	s, text := a.state()
	for i, got := range s.Backends[3:] {
		if got.Server != "eight" || got.Rank == nil || *got.Rank != i || got.Source != "file" || got.Address != "192.0.2.10:8000" ||
			got.ServerDrained || strings.Join(got.LastReadyFor, ",") != "ours" || got.Role != "prefill" || got.Version != "0.32.0" {
			t.Errorf("rank %d: %+v in %s", i, got, text)
		}
	}
	if got := s.Backends[2]; got.Server != "" || got.Rank != nil || got.Role != "" || strings.Join(got.LastReadyFor, ",") != "other" {
		t.Errorf("no rank: %+v", got)
	}
	server.Drain()
	a.handler.cache.invalidate()
	if s, text := a.state(); !s.Backends[3].ServerDrained || !s.Backends[4].Drained {
		t.Errorf("drained: %s", text)
	}
}

// A backend has the same state in the list of backends, in the response of an operation, and on the page.
func TestStateHasOneWord(t *testing.T) {
	b := askable(t)
	b.fleet[1].SetSuspension(backends.Asleep)
	b.fleet[2].SetState(backends.Down)
	b.post("/api/backends/gpu-0/drain", "", 200, `"state":"draining"`)
	b.post("/api/backends/gpu-1/undrain", "", 200, `"state":"asleep"`)
	b.post("/api/backends/gpu-2/reset", "", 200, `"state":"down"`)
	s, _ := b.state()
	_, text := b.ask("GET", "/api/backends")
	var list BackendList
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		t.Fatal(err)
	}
	for i, want := range []router.ConditionState{router.Draining, router.Asleep, router.Down} {
		if page, row := s.Backends[i].State, list.Backends[i].State; page != string(want) || row != string(want) {
			t.Errorf("%s is %s on the page and %s in the list, want %s", s.Backends[i].Name, page, row, want)
		}
	}
}

func TestFleetState(t *testing.T) {
	names := []fleet.Name{{Name: "good:80", Addresses: []string{"10.0.0.1:80"}}, {Name: "large:80", Addresses: []string{"10.0.0.1:80"},
		Omitted: 2}}
	for i := range 2 * maxFailingNames {
		names = append(names, fleet.Name{Name: fmt.Sprint("failing-", i), Error: "timeout"})
	}
	s := newFleetState("config.yaml: line 3", names)
	if s.ReloadError != "config.yaml: line 3" || len(s.FailingNames) != maxFailingNames {
		t.Fatalf("got %+v", s)
	}
	if s.FailingNames[0] != (nameState{"large:80", 1, 2, ""}) || s.FailingNames[1] != (nameState{"failing-0", 0, 0, "timeout"}) {
		t.Errorf("got %+v", s.FailingNames[:2])
	}
}

func TestStateListsUnreadyModelsFirst(t *testing.T) {
	a := askable(t)
	var cards []backends.Model
	for i := range 2 * maxModels {
		cards = append(cards, backends.Model{ID: fmt.Sprintf("adapter-%03d", i), Parent: "m", Card: []byte(`{}`)})
	}
	a.fleet[0].SetModels(append(cards, backends.Model{ID: "m", Root: "m", Card: []byte(`{"id":"m"}`)}))
	a.fleet[2].SetState(backends.Down)
	s, _ := a.state()
	m := s.Models
	if m.All != 2*maxModels+2 || m.Unready != 1 || len(m.Listed) != maxModels {
		t.Fatalf("got %d models, %d unready, %d listed", m.All, m.Unready, len(m.Listed))
	}
	for i, id := range []string{"other", "m", "adapter-000"} {
		if m.Listed[i].ID != id {
			t.Errorf("place %d has %s, want %s", i, m.Listed[i].ID, id)
		}
	}
	if got := m.Listed[0]; got.Ready != 0 || got.Backends != 1 || got.Reason != "gpu-2 is down" || got.Since == nil {
		t.Errorf("got %+v", got)
	}
	if n := len(s.Backends[0].LastReadyFor); n != maxLastReady {
		t.Errorf("%d models are named of a backend, want %d", n, maxLastReady)
	}
}
