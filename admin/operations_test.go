package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy"
	"warmroute/proxy/apikey"
	"warmroute/router"
	"warmroute/usage"
)

// asked is a proxy that is asked over its admin listener, and whose replicas must
// never hear of it.
type asked struct {
	*listener
	router *router.Router
	fleet  []*backends.Backend
	later  atomic.Int64 // nanoseconds by which the router's clock is ahead
}

func askable(t testing.TB, list ...apikey.Key) *asked {
	t.Helper()
	a := &asked{}
	for i := range 3 {
		u, err := backends.ParseURL(fmt.Sprintf("http://192.0.2.%d:8000", i+1))
		if err != nil {
			t.Fatal(err)
		}
		b := backends.New(fmt.Sprintf("gpu-%d", i), u, "", deaf{t})
		a.fleet = append(a.fleet, b)
	}
	registry, err := backends.NewRegistry(a.fleet)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range a.fleet {
		models := []backends.Model{{ID: "m", Root: "m", Card: []byte(`{"id":"m"}`)}}
		if i == 2 {
			models = append(models, backends.Model{ID: "other", Root: "other", Card: []byte(`{"id":"other"}`)})
		}
		b.SetModels(models)
		b.SetState(backends.Ready)
	}
	a.router = newRouter(t, registry, func() time.Time { return time.Now().Add(time.Duration(a.later.Load())) })
	log := slog.New(slog.DiscardHandler)
	p := proxy.New(proxy.Options{
		Registry: registry, Router: a.router, Metrics: metrics.New(registry, a.router, "test"), Log: log, BlockBytes: 64, Keys: apikey.New(list),
		Settings: proxy.Settings{Limits: proxy.Limits{InFlight: 10, BodyBytes: 64 << 10, BodyBytesTotal: 1 << 20},
			ConversationHeaders: []string{"X-Session-Id"}, IsolateTenants: list != nil},
	})
	h := New(Options{
		Registry: registry, Fleet: newFleet(t, registry), Router: a.router, Proxy: p, Reset: a.router.ResetBackend, Usage: usage.NewInMemory(),
		Log:     log,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "warmroute_up 1\n") }),
	})
	s := httptest.NewServer(h)
	client := &http.Client{Transport: &http.Transport{}}
	a.listener = &listener{t: t, url: s.URL, client: client, handler: h}
	t.Cleanup(func() { client.CloseIdleConnections(); s.Close() })
	return a
}

func newRouter(t testing.TB, registry *backends.Registry, now func() time.Time) *router.Router {
	t.Helper()
	r, err := router.New(router.Options{
		Settings: router.Settings{
			Policy: "prefix", Queue: router.QueueSettings{Requests: 10, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute},
			Breaker: router.BreakerSettings{Failures: 1, OpenTime: time.Minute}, PollInterval: time.Hour,
		},
		Backends: registry.All(), Catalog: registry.Catalog, BlockBytes: 64, IndexMaxBytes: 1 << 20,
		Now: now, Rand: rand.NewPCG(1, 2),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// localRequest is a request that has come over loopback.
func localRequest(method, path, body string) *http.Request {
	r := httptest.NewRequest(method, "http://127.0.0.1"+path, strings.NewReader(body))
	r.Header.Set("Content-Type", jsonType)
	return r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))
}

// deaf is how replicas that are to be asked nothing are reached.
type deaf struct{ t testing.TB }

func (d deaf) RoundTrip(r *http.Request) (*http.Response, error) {
	d.t.Errorf("a replica was asked for %s", r.URL)
	return nil, io.ErrUnexpectedEOF
}

func (d deaf) Do(_ context.Context, r *fasthttp.Request, _ *fasthttp.Response, _ func(io.Reader) error) error {
	d.t.Errorf("a replica was asked for %s", r.RequestURI())
	return io.ErrUnexpectedEOF
}

// chat is a request whose prompt has more than 30 blocks.
func chat(model, text string) string {
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}]}`, model, text+strings.Repeat(" of words", 250))
}

// explain asks where a request goes.
func (a *asked) explain(query, body string, headers ...string) (e proxy.Explanation) {
	a.t.Helper()
	status, response := a.send("POST", "/api/explain"+query, body, append([]string{"Content-Type", jsonType}, headers...)...)
	if status != 200 {
		a.t.Fatalf("explain%s: %d %s", query, status, response)
	}
	if err := json.Unmarshal([]byte(response), &e); err != nil {
		a.t.Fatal(err)
	}
	return e
}

// post tells or asks, and expects a status and something in the response.
func (a *asked) post(path, body string, status int, says string) {
	a.t.Helper()
	got, response := a.send("POST", path, body, "Content-Type", jsonType)
	if got != status || !strings.Contains(response, says) {
		a.t.Errorf("%s: got %d %s, want %d and %q", path, got, response, status, says)
	}
}

func TestExplainAfterPlacementAndReset(t *testing.T) {
	a := askable(t)
	body := chat("m", "a prompt")
	if e := a.explain("", body); e.Reason != router.ReasonNoMatch || e.Blocks < 30 || len(e.Backends) != 3 ||
		e.Endpoint != "/v1/chat/completions" {
		t.Errorf("of a cold fleet: %+v", e)
	}
	a.post("/api/sent?backend=gpu-1", body, 200, `"backend":"gpu-1","model":"m","blocks":35,"known":35`)
	e := a.explain("", body)
	if e.Choice != "gpu-1" || e.Reason != router.ReasonPrefix || e.Backends[1].MatchedBlocks != e.Blocks ||
		!strings.HasPrefix(e.Sentence, "gpu-1 holds ") {
		t.Errorf("of what was sent: %+v", e)
	}
	if e := a.explain("?tried=gpu-1&tried=gpu-0", body); e.Choice != "gpu-2" || e.Backends[1].WhyNot != "was tried already" {
		t.Errorf("of a retry: %+v", e)
	}
	a.post("/api/backends/gpu-1/reset", "", 200, `"forgotten_blocks":35,"breaker_was":"closed"`)
	if e := a.explain("", body); e.Reason != router.ReasonNoMatch || e.Backends[1].MatchedBlocks != 0 {
		t.Errorf("after the reset: %+v", e)
	}
	if in := a.fleet[1].InFlight.Load(); in != 0 || a.router.CountWaiting() != 0 {
		t.Errorf("%d in flight", in)
	}
}

func TestExplainConversation(t *testing.T) {
	a := askable(t)
	body := `{"model":"m","prompt_cache_key":"someone","messages":[{"role":"user","content":"some words"}]}`
	inBody, inHeader, none := a.explain("", body), a.explain("", body, "x-session-id", "someone"),
		a.explain("", chat("m", "text"), "X-Chat", "c")
	if inBody.Conversation != "prompt_cache_key" || inHeader.Conversation != "X-Session-Id" || inBody.Choice != inHeader.Choice ||
		none.Conversation != "" {
		t.Errorf("got %q for %s, %q for %s and %q", inBody.Conversation, inBody.Choice, inHeader.Conversation, inHeader.Choice, none.Conversation)
	}
	if _, response := a.send("POST", "/api/explain", body, "Content-Type", jsonType); strings.Contains(response, "someone") {
		t.Errorf("the name of the conversation is shown: %s", response)
	}
}

func TestExplainEndpointAndModel(t *testing.T) {
	a := askable(t)
	if e := a.explain("?endpoint=/v1/completions", `{"model":"other","prompt":"some words"}`); e.Choice != "gpu-2" ||
		e.Reason != router.ReasonOnly || e.Backends[0].WhyNot != "does not list the model" {
		t.Errorf("got %+v", e)
	}
	if e := a.explain("?endpoint=/v1/embeddings", `{"model":"m","input":"some words"}`); e.Reason != router.ReasonLoad || e.Blocks != 0 {
		t.Errorf("got %+v", e)
	}
	if e := a.explain("", chat("m", "x"), "X-Warmroute-Priority", "7"); e.Priority != 7 {
		t.Errorf("got %+v", e)
	}
}

func TestExplainForAKey(t *testing.T) {
	a := askable(t, apikey.Key{Name: "team", Hashes: []apikey.Hash{apikey.HashOf("the-key-of-the-team-012345")}, Models: []string{"m"},
		Priority: 3})
	body := chat("m", "a prompt")
	a.post("/api/sent?backend=gpu-1&key=team", body, 200, `"known":35`)
	if e := a.explain("?key=team", body); e.Choice != "gpu-1" || e.Priority != 3 {
		t.Errorf("got %+v", e)
	}
	// Tenants are isolated: no other key matches what the team has sent.
	if e := a.explain("", body, "Authorization", "Bearer the-key-of-the-team-012345"); e.Reason != router.ReasonNoMatch {
		t.Errorf("got %+v", e)
	}
	a.post("/api/explain?key=team", chat("other", "a prompt"), 404, "Available: m")
	a.post("/api/explain?key=the-key-of-the-team-012345", body, 404, "never the key itself")
}

func TestInvalidDryRuns(t *testing.T) {
	a := askable(t)
	body := chat("m", "a prompt")
	a.post("/api/explain?endpoint=/v1/audio/transcriptions", body, 400, "/v1/chat/completions")
	a.post("/api/explain?endpoint=/metrics", body, 400, "endpoint must be")
	a.post("/api/explain?session=x", body, 400, "endpoint, key, tried")
	a.post("/api/explain?key=a&key=b", body, 400, "only tried may be repeated")
	a.post("/api/explain?tried=none", body, 404, "available: gpu-0, gpu-1, gpu-2")
	a.post("/api/explain?"+strings.Repeat("tried=gpu-0&", maxTried+1), body, 400, "too many")
	a.post("/api/explain", "", 400, "empty")
	a.post("/api/explain", "{", 400, "")
	a.post("/api/explain", chat("none", "x"), 404, "does not exist")
	a.post("/api/explain", chat("m", strings.Repeat("x", 64<<10)), 413, "limits.body_bytes")
	a.post("/api/sent", body, 400, "?backend=NAME")
	a.post("/api/sent?backend=none", body, 404, "available: gpu-0")
	a.post("/api/sent?backend=gpu-0", chat("other", "x"), 400, "gpu-0 does not list the model other")
	a.post("/api/backends/none/reset", "", 404, "available: gpu-0")
	if status, _ := a.send("POST", "/api/explain", body, "Content-Type", "text/plain"); status != 415 {
		t.Errorf("a body that is not said to be JSON: %d", status)
	}
	if status, _ := a.send("POST", "/api/explain", body, "Content-Type", jsonType, "X-Warmroute-Priority", "-1"); status != 400 {
		t.Errorf("a priority that no client may have: %d", status)
	}
}

// FuzzQuestion puts bodies and queries to both: whatever they are, there is a
// response in JSON, and no replica hears of it.
func FuzzQuestion(f *testing.F) {
	f.Add("endpoint=/v1/completions", `{"model":"m","prompt":["a","b"]}`, true)
	f.Add("backend=gpu-1", chat("m", "x"), false)
	f.Add("backend=gpu-1&key=&tried=gpu-0", `{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":"a"}]}],"n":900}`,
		false)
	f.Add("tried=gpu-0&tried=gpu-1&tried=gpu-2", `{"messages":[]}`, true)
	f.Add("endpoint=/tokenize", `{"model":"other","prompt":"\ud800"}`, true)
	a := askable(f)
	f.Fuzz(func(t *testing.T, query, body string, explain bool) {
		path := "/api/sent"
		if explain {
			path = "/api/explain"
		}
		r := localRequest("POST", path, body)
		r.URL.RawQuery = query
		w := httptest.NewRecorder()
		a.handler.ServeHTTP(w, r)
		if !json.Valid(w.Body.Bytes()) || w.Code == 500 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}
