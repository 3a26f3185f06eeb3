package proxy

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"

	"warmroute/backends"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
)

func TestCheckExtraPath(t *testing.T) {
	for _, path := range strings.Fields(`/skyrl/v1/generate /v1/chat/completions/render /v1/chat/completions/batch ` +
		`/v1/completions/derender /v1/responses/render
		/v1.1/x /a-b_c~d /paused /loads/x`) {
		if err := api.CheckExtraPath(path); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	for want, paths := range map[string]string{
		"is not a plain absolute path": `skyrl / /a/ //a /a//b /a/../b /a/. /.a /a/* /a/{id} /a%2fb /a?b /a#b /a;b /ä http://x/a`,
		"is served already": `/v1/chat/completions /v1/messages /v1/responses/resp_1/cancel /v1/audio/translations /v1/models /v1/models/m ` +
			`/health /livez /readyz /version
			/workers /workers/1 /add_worker /finish_session /get_loads`,
		"is for the operator of a replica": `/pause /v1/pause /collective_rpc /v1/load_lora_adapter /load_lora_adapter /metrics ` +
			`/fault_tolerance/apply /update_weights`,
		"the maximum is 200": "/" + strings.Repeat("a", 200),
	} {
		for _, path := range strings.Fields(paths) {
			if err := api.CheckExtraPath(path); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", path, err, want)
			}
		}
	}
}

// TestServedPathsAreReserved has no path of this proxy be an extra path.
func TestServedPathsAreReserved(t *testing.T) {
	routes := serve(t, nil, &replica{}).proxy.routes.Load()
	err := chi.Walk(routes.Mux, func(method, pattern string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		path := strings.NewReplacer("*", "x", api.ResponseIDPart, "x").Replace(pattern)
		if path == "/v1/responses/x" { // only GET
			return nil
		}
		if err := api.CheckExtraPath(path); err == nil || !strings.HasSuffix(err.Error(), "is served already; remove it") {
			t.Errorf("%s %s: %v", method, pattern, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestExtraEndpointNumbers(t *testing.T) {
	var before []api.Endpoint
	lists := [][]string{{"/a", "/b"}, {"/b", "/c"}, {"/d"}, nil, make([]string, api.MaxExtraPaths), make([]string, api.MaxExtraPaths)}
	for i := range api.MaxExtraPaths {
		lists[4][i], lists[5][i] = "/x"+string(rune('a'+i)), "/y"+string(rune('a'+i))
	}
	for _, paths := range lists {
		after := api.NewExtraEndpoints(paths, before)
		for i, e := range after {
			at := slices.IndexFunc(before, func(b api.Endpoint) bool { return b.Path == e.Path })
			taken := slices.ContainsFunc(before, func(b api.Endpoint) bool { return b.Number == e.Number }) ||
				slices.ContainsFunc(after[:i], func(b api.Endpoint) bool { return b.Number == e.Number })
			if e.Path != paths[i] || at >= 0 && before[at].Number != e.Number || at < 0 && taken || int(e.Number) < len(api.Endpoints) ||
				e.Number >= backends.MaxEndpoints {
				t.Errorf("%v after %v: %s has number %d", paths, before, e.Path, e.Number)
			}
		}
		before = after
	}
}

func withExtraPaths(paths ...string) func(*Options) {
	return func(o *Options) { o.ExtraPaths, o.BodyBytes = paths, 2000 }
}

// TestResponseInPieces expects that what a replica sends in pieces reaches the client as it comes: on extra paths, and elsewhere
// if it is not JSON.
func TestResponseInPieces(t *testing.T) {
	for name, c := range map[string]struct{ path, contentType string }{
		"audio on an extra path": {"/v1/audio/speech", "audio/pcm"},
		"JSON on an extra path":  {"/v1/audio/speech", "application/json"},
		"no type, extra path":    {"/v1/audio/speech", ""},
		"text elsewhere":         {"/v1/chat/completions", "text/plain; charset=utf-8"},
	} {
		t.Run(name, func(t *testing.T) {
			more := make(chan struct{})
			head := "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
			if c.contentType != "" {
				head += "content-type: " + c.contentType + "\r\n"
			}
			r := &replica{script: func(s *session) {
				s.request()
				s.say(head, "\r\n", chunk("first"))
				select {
				case <-more:
					s.say(chunk("second"), lastChunk)
				case <-s.replica.over:
				}
			}}
			f := serve(t, withExtraPaths("/v1/audio/speech"), r)
			req, _ := http.NewRequest(http.MethodPost, f.url+c.path, strings.NewReader(askWhole))
			resp, err := f.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			first := make([]byte, len("first"))
			if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "first" {
				t.Fatalf("got %q, %v", first, err)
			}
			close(more)
			if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != "second" {
				t.Errorf("then %q, %v", rest, err)
			}
		})
	}
}

// TestMultipartOnExtraPath expects an error that says what is wrong with a body that is not JSON.
func TestMultipartOnExtraPath(t *testing.T) {
	r := &replica{}
	f := serve(t, withExtraPaths("/v1/images/edits"), r)
	body := "--b\r\nContent-Disposition: form-data; name=\"image\"\r\n\r\n\x89PNG\r\n--b--\r\n"
	for contentType, want := range map[string]string{
		"multipart/form-data; boundary=b": "the request body is not JSON, but multipart/form-data: /v1/images/edits takes JSON only",
		"application/json":                "not valid UTF-8",
		"":                                "not valid UTF-8",
	} {
		if resp, got := f.post("/v1/images/edits", body, "Content-Type", contentType); resp.StatusCode != http.StatusBadRequest ||
			!strings.Contains(got, want) {
			t.Errorf("%q: got %d %s, want %q", contentType, resp.StatusCode, got, want)
		}
	}
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
}

// TestInvalidResponse502 expects an error that does not call a response truncated whose header is invalid.
func TestInvalidResponse502(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole, "content-length: 1"))})
	if resp, got := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusBadGateway ||
		!strings.Contains(got, "invalid_response (what a replica sent is not valid HTTP/1") {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
}

// TestTruncatedPieces expects that an attempt whose response ends before its first piece is repeated, and that the client of
// one that ends later notices.
func TestTruncatedPieces(t *testing.T) {
	head := "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: audio/pcm\r\n\r\n"
	f := serve(t, withExtraPaths("/v1/audio/speech"), &replica{script: once(head)}, &replica{script: always(head, chunk("all"), lastChunk)})
	if resp, got := f.post("/v1/audio/speech", askWhole); resp.StatusCode != http.StatusOK || got != "all" {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	f = serve(t, withExtraPaths("/v1/audio/speech"), &replica{script: once(head, chunk("some"))})
	if resp, got, err := f.try("/v1/audio/speech", askWhole); resp.StatusCode != http.StatusOK || got != "some" || err == nil {
		t.Errorf("got %d %q, %v", resp.StatusCode, got, err)
	}
}

func TestExtraPathsRelayed(t *testing.T) {
	const path, body = "/skyrl/v1/generate", `{"model":"m","token_ids":[1,2,3], "any":{"model":"other"}}`
	r := &replica{script: always(answered("200 OK", `{"output":"x"}`))}
	f := serve(t, withExtraPaths(path, "/v1/responses/render"), r)
	if resp, got := f.post(path+"?return=1", body, "X-Session-Id", "s"); resp.StatusCode != http.StatusOK || got != `{"output":"x"}` {
		t.Errorf("got %d %s", resp.StatusCode, got)
	}
	if seen := r.requests(); seen[0].RequestURI != path+"?return=1" || seen[0].body != body || seen[0].Method != http.MethodPost ||
		seen[0].Header.Get("X-Session-Id") != "s" {
		t.Errorf("the replica saw %v", seen)
	}
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="200",endpoint="/skyrl/v1/generate",model="m"} 1`)
	if resp, _ := f.post("/v1/responses/render", body); resp.StatusCode != http.StatusOK {
		t.Errorf("beside the path of a stored response: %d", resp.StatusCode)
	}
	for _, c := range []struct {
		name, path, body string
		want             int
	}{
		{"not JSON", path, "--b\r\n", http.StatusBadRequest},
		{"empty", path, "", http.StatusBadRequest},
		{"too large", path, `{"x":"` + strings.Repeat("x", 2000) + `"}`, http.StatusRequestEntityTooLarge},
		{"unknown model", path, `{"model":"other"}`, http.StatusNotFound},
		{"transfer between replicas", path, `{"kv_transfer_params":{"x":1}}`, http.StatusBadRequest},
		{"a path below", path + "/x", body, http.StatusNotFound},
		{"a path above", "/skyrl/v1", body, http.StatusNotFound},
	} {
		if resp, got := f.post(c.path, c.body); resp.StatusCode != c.want {
			t.Errorf("%s: got %d %s", c.name, resp.StatusCode, got)
		}
	}
	if resp, _ := f.get(path); resp.StatusCode != http.StatusMethodNotAllowed || resp.Header.Get("Allow") != http.MethodPost {
		t.Errorf("GET: %d %v", resp.StatusCode, resp.Header)
	}
	if n := len(r.requests()); n != 2 {
		t.Errorf("the replica saw %d requests", n)
	}
	if sum := slices.Max(f.blocks()); sum != 0 {
		t.Errorf("%d blocks are indexed", sum)
	}
}

// A request without a model goes to the default one, and where there is none to any replica.
func TestExtraPathWithoutModel(t *testing.T) {
	a, b := &replica{models: []string{"m", "adapter<m"}, script: always(answered("200 OK", "{}"))},
		&replica{models: []string{"n"}, script: always(answered("200 OK", "{}"))}
	limited := keyOf("limited", func(k *apikey.Key) { k.Models = []string{"m", "n"} })
	f := serve(t, func(o *Options) {
		withExtraPaths("/x")(o)
		withKeys(keyOf("a", nil), keyOf("one", func(k *apikey.Key) { k.Models = []string{"n"} }), limited)(o)
	}, a, b)
	for _, c := range []struct {
		name, key, body string
		want            int
		first, second   int // requests that the replicas have seen by then
	}{
		{"any", "a", "{}", http.StatusOK, 1, 0},
		{"model of the key", "one", "{}", http.StatusOK, 1, 1},
		{"several models of the key", "limited", "{}", http.StatusBadRequest, 1, 1},
		{"named", "limited", `{"model":"n"}`, http.StatusOK, 1, 2},
		{"not of the key", "limited", `{"model":"adapter"}`, http.StatusNotFound, 1, 2},
		{"no key", "none", "{}", http.StatusUnauthorized, 1, 2},
	} {
		resp, got := f.post("/x", c.body, bearer(c.key)...)
		if n, m := len(a.requests()), len(b.requests()); resp.StatusCode != c.want || n != c.first || m != c.second {
			t.Errorf("%s: got %d %s; the replicas saw %d and %d requests", c.name, resp.StatusCode, got, n, m)
		}
	}
	f.backends[0].SetModels(nil)
	f.backends[1].SetModels(nil)
	if resp, got := f.post("/x", "{}", bearer("a")...); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("no model is listed: got %d %s", resp.StatusCode, got)
	}
}

func TestExtraPathRetried(t *testing.T) {
	failing, lacking, serving := &replica{script: always(answered("500 Internal Server Error", "{}"))},
		&replica{script: always(answered("404 Not Found", pathNotFound))}, &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, withExtraPaths("/x"), lacking, failing, serving)
	for range 2 {
		if resp, got := f.post("/x", `{"model":"m"}`); resp.StatusCode != http.StatusOK {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
	}
	if a, b := len(lacking.requests()), len(serving.requests()); a != 1 || b != 2 {
		t.Errorf("%d and %d requests", a, b)
	}
	if got := f.proxy.MissingEndpoints(f.backends[0], time.Now()); !slices.Equal(got, []string{"/x"}) {
		t.Errorf("missing: %q", got)
	}
}

// A stream of an extra path may end without any mark, if it is framed.
func TestExtraPathStream(t *testing.T) {
	const events = "data: {\"a\":1}\n\nevent: b\ndata: 2\n\n"
	for name, c := range map[string]struct{ answer, want string }{
		"framed":     {streamed(events), events},
		"cut":        {sseHead + chunk(events), events + `data: {"error"`},
		"not framed": {sseToEnd + events, events + `data: {"error"`},
		"done":       {sseToEnd + events + doneLine, events + doneLine},
	} {
		f := serve(t, withExtraPaths("/x"), &replica{script: once(c.answer)})
		resp, got := f.post("/x", `{"model":"m","stream":true}`)
		if complete := !strings.HasSuffix(c.want, `{"error"`); resp.StatusCode != http.StatusOK || !strings.HasPrefix(got, c.want) || complete &&
			got != c.want {
			t.Errorf("%s: got %d %q, want %q", name, resp.StatusCode, got, c.want)
		}
	}
}

func TestExtraPathsReloaded(t *testing.T) {
	r := &replica{script: func(s *session) {
		for {
			seen, ok := s.request()
			if !ok {
				return
			}
			if seen.URL.Path == "/b" {
				s.say(answered("404 Not Found", pathNotFound))
			} else {
				s.say(answered("200 OK", "{}"))
			}
		}
	}}
	f := serve(t, withExtraPaths("/a", "/b"), r)
	post := func(path string, want int) {
		t.Helper()
		if resp, got := f.post(path, `{"model":"m"}`); resp.StatusCode != want {
			t.Errorf("%s: got %d %s, want %d", path, resp.StatusCode, got, want)
		}
	}
	post("/a", http.StatusOK)
	post("/b", http.StatusNotFound)
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="404",endpoint="/b",model="m"} 1`)
	settings := *f.proxy.settings.Load()
	settings.ExtraPaths = []string{"/c", "/a"}
	f.proxy.Configure(settings)
	post("/a", http.StatusOK)
	post("/c", http.StatusOK)
	post("/b", http.StatusNotFound)
	if n := len(r.requests()); n != 4 {
		t.Errorf("the replica saw %d requests", n)
	}
	if text := f.exposition(); strings.Contains(text, `endpoint="/b"`) || !strings.Contains(text, `endpoint="/a",model="m"} 2`) {
		t.Error("the series are not those of the paths that are served")
	}
}
