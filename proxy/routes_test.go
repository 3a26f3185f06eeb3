package proxy

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/proxy/api"
)

// bodyFor is a request that the endpoint takes.
func bodyFor(path string) string {
	switch path {
	case "/v1/chat/completions":
		return askWhole
	case "/v1/completions":
		return `{"model":"m","prompt":"Once upon a time"}`
	case "/inference/v1/generate":
		return `{"model":"m","token_ids":[1,2,3],"sampling_params":{"max_tokens":1}}`
	case "/v1/messages":
		return `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`
	}
	return `{"model":"m","input":"x"}`
}

// endpointsOfNewResponses are those that are not about a stored response.
func endpointsOfNewResponses() []api.Endpoint {
	return slices.DeleteFunc(slices.Clone(api.Endpoints), func(e api.Endpoint) bool { return e.IsAboutResponse() })
}

func TestEndpointPaths(t *testing.T) {
	paths := strings.Fields(`/v1/chat/completions /v1/completions /v1/responses /v1/messages /inference/v1/generate ` +
		`/v1/messages/count_tokens /v1/embeddings
		/pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank /tokenize /detokenize /v1/audio/transcriptions /v1/audio/translations`)
	if n := len(endpointsOfNewResponses()); len(paths) != n {
		t.Errorf("%d endpoints are listed, want %d", n, len(paths))
	}
	if n := len(api.Endpoints); n > backends.MaxEndpoints {
		t.Errorf("%d endpoints; raise backends.MaxEndpoints", n)
	}
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	for _, path := range paths {
		before := len(r.requests())
		resp, answer := f.post(path, bodyFor(path))
		seen := r.requests()
		if resp.StatusCode != http.StatusOK || len(seen) != before+1 || seen[before].RequestURI != path ||
			seen[before].Method != http.MethodPost {
			t.Errorf("%s: status %d %s", path, resp.StatusCode, answer)
		}
	}
	// An absolute URI means the same to any HTTP server; its host goes nowhere.
	resp, _ := f.raw("POST http://elsewhere.example/v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 25\r\n\r\n" +
		bodyFor("/v1/embeddings"))
	if last := r.requests()[len(paths)]; resp.StatusCode != http.StatusOK || last.RequestURI != "/v1/embeddings" ||
		last.Host != r.listener.Addr().String() {
		t.Errorf("absolute URI: status %d", resp.StatusCode)
	}
}

func TestUnknownPathsRejected(t *testing.T) {
	t.Parallel()
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	var lines []string
	for _, path := range strings.Fields(`/ /v1 /v1/ /invocations /v1/invocations /pause /resume /abort_requests /collective_rpc /server_info
		/scale_elastic_ep /start_profile /docs /openapi.json /metrics /ping /load /sleep /wake_up /reset_prefix_cache
		/v1/load_lora_adapter /v1/unload_lora_adapter /v1/batches /v1/files /v1/realtime /v1/images/generations /v1/audio/speech
		/v1/chat /v1/chat/completions/batch //v1/chat/completions /v1//chat/completions /V1/chat/completions /v1/chat/Completions
		/v1/chat/completions;x=1 /v1;x/chat/completions /v1/chat/completions%20 /v1/chat/completions%00 /v1/chat/completions%0a
		/v1/chat/completions%3Fx /v1/chat%2Fcompletions /v1/chat%2fcompletions /v1/ch%61t/completions /%76%31/chat/completions
		/v1/chat/./completions /v1/chat/../chat/completions /v1/../invocations /v1/%2e%2e/invocations /v1/models/../../invocations
		/..%2finvocations /v1/chat/completions/%2e%2e/%2e%2e/%2e%2e/invocations /v1/chat/completions\..\..
		/v1/responses/resp_1/cancel /v1/chat/completions#x /v1/embeddings/x http://x/invocations http://x//v1/chat/completions`) {
		lines = append(lines, "POST "+path)
	}
	for _, e := range endpointsOfNewResponses() {
		for _, method := range strings.Fields("GET HEAD PUT PATCH DELETE OPTIONS TRACE PURGE post CONNECT") {
			lines = append(lines, method+" "+e.Path)
		}
	}
	lines = append(lines, "OPTIONS *", "CONNECT example.com:443", "CONNECT 127.0.0.1:80", "GET /v1/responses/resp_1", "GET /metrics",
		"GET /docs",
		"GET /server_info", "POST /v1/models", "POST /health", "DELETE /v1/models/m", "POST /v1/models/m", "GET /v1/models/m/../../../metrics")
	for _, line := range lines {
		method, path, _ := strings.Cut(line, " ")
		resp, body := f.raw(line + " HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
		want := http.StatusNotFound
		if known := path == "/health" || strings.HasPrefix(path, "/v1/models"); known && method != "GET" ||
			slices.ContainsFunc(api.Endpoints, func(e api.Endpoint) bool { return e.Path == path }) {
			want = http.StatusMethodNotAllowed
		}
		if resp.StatusCode != want {
			t.Errorf("%s: status %d %s, want %d", line, resp.StatusCode, body, want)
		}
	}
	if seen := r.requests(); len(seen) != 0 {
		t.Errorf("the backend saw %s %s", seen[0].Method, seen[0].RequestURI)
	}
}

// TestRoutes expects each spelling of a path with each method to be answered as it always was.
func TestRoutes(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, withExtraPaths("/skyrl/v1/generate", "/v1/responses/render/x"), r)
	const ok, stored, noModel, unknown, notAllowed = "", "response_not_found", "model_not_found", "unknown path ",
		"method not allowed on this path; allowed: "
	const localMethods = "GET, HEAD"
	for _, c := range []struct {
		method, paths string // separated by spaces
		status        int
		says, allow   string
	}{
		{"GET", "/livez /livez/ /livez// /readyz /health /health/ /version /v1/models /v1/models/ /v1/models// /v1/models/m /v1/models/m/ " +
			"/v1/models/%6d", 200, ok, ""},
		{"HEAD", "/livez /readyz /health /version /v1/models /v1/models/m", 200, ok, ""},
		{"GET", "/v1/models/x /v1/models/x/y /v1/models//m /v1/models/x%2Fy /v1/models/%2F /v1/models/x%2F", 404, noModel, ""},
		{"GET", "/livez/x /livez;x /Livez //livez /%6civez /v1/models%2F /v1%2Fmodels /v1/./models /version%20 /health%2F", 404, unknown, ""},
		{"POST", "/livez /livez/ /readyz /health /version /v1/models /v1/models/ /v1/models/x/y /v1/models/x%2Fy", 405, notAllowed + localMethods,
			localMethods},
		{"OPTIONS", "/livez /v1/models /v1/models/x", 405, notAllowed + localMethods, localMethods},
		{"TRACE", "/livez", 405, notAllowed + localMethods, localMethods},
		{"QUERY", "/livez", 405, notAllowed + localMethods, localMethods},
		{"PURGE", "/livez", 405, notAllowed + localMethods, localMethods},
		{"get", "/livez /v1/models/m", 405, notAllowed + localMethods, localMethods},
		{"POST", "/finish_session?session_id=a /finish_session/?session_id=a", 200, ok, ""},
		{"GET", "/finish_session /finish_session/", 405, notAllowed + "POST", "POST"},
		{"HEAD", "/finish_session", 405, ok, "POST"},
		{"GET", "/v1/chat/completions /v1/embeddings/ /skyrl/v1/generate /skyrl/v1/generate/ /v1/responses /v1/responses/ /v1/responses/x/cancel",
			405, notAllowed + "POST", "POST"},
		{"HEAD", "/v1/chat/completions", 405, ok, "POST"},
		{"PURGE", "/v1/chat/completions /v1/responses/x/cancel", 405, notAllowed + "POST", "POST"},
		{"CONNECT", "/v1/messages", 405, notAllowed + "POST", "POST"},
		{"GET", "/v1/responses/x /v1/responses/x/ /v1/responses/render /v1/responses/cancel", 404, stored, ""},
		{"POST", "/v1/responses/x/cancel /v1/responses/x/cancel/ /v1/responses/cancel/cancel /v1/responses/render/cancel", 404, stored, ""},
		{"HEAD", "/v1/responses/x", 405, ok, "GET"},
		{"POST", "/v1/responses/x /v1/responses/x/ /v1/responses/render /v1/responses/cancel", 405, notAllowed + "GET", "GET"},
		{"DELETE", "/v1/responses/x", 405, notAllowed + "GET", "GET"},
		{"POST", "/v1/responses//cancel /v1/responses/x/y/cancel /v1/responses/x//cancel /v1//responses/x/cancel /v1/responses/x/cancel/y", 404,
			unknown, ""},
		{"GET", "/v1/responses/x/y /v1/responses//x /v1/responses/x%2Fy/z /v1/responses/render/y", 404, unknown, ""},
		{"GET", "/v1/responses/x%2Fy /v1/responses/%78 /v1/responses/%7Ex", 405, notAllowed + "GET", "GET"}, // responses' ids need no escapes
		{"POST", "/v1/responses/%78/cancel", 405, notAllowed + "POST", "POST"},
		{"POST", "/v1/chat%2Fcompletions /v1/ch%61t/completions /skyrl/v1/gener%61te /v1/embeddings%2F //v1/embeddings /v1/embeddings/x " +
			"/skyrl/v1 /skyrl/v1/generate/x", 404, unknown, ""},
		{"POST", "/skyrl/v1/generate /skyrl/v1/generate/ /v1/responses/render/x /v1/embeddings /v1/embeddings///", 200, ok, ""},
		{"OPTIONS", "* /none", 404, unknown, ""},
		{"CONNECT", "x:443", 404, unknown, ""},
		{"PURGE", "/none /", 404, unknown, ""},
	} {
		for _, path := range strings.Fields(c.paths) {
			body := bodyFor("/v1/embeddings")
			resp, answer := f.raw(fmt.Sprintf("%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", c.method, path,
				len(body), body))
			if resp.StatusCode != c.status || !strings.Contains(answer, c.says) || strings.Join(resp.Header["Allow"], "|") != c.allow {
				t.Errorf("%s %s: got %d %v %s; want %d %s %s", c.method, path, resp.StatusCode, resp.Header["Allow"], answer, c.status, c.allow, c.says)
			}
		}
	}
	for _, seen := range r.requests() {
		if want := map[string]bool{"/skyrl/v1/generate": true, "/v1/responses/render/x": true, "/v1/embeddings": true}; !want[seen.RequestURI] {
			t.Errorf("the replica saw %s", seen.RequestURI)
		}
	}
}

// Such request lines never reach a handler.
func TestMalformedRequestLineRejected(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	for _, line := range []string{"POST /v1/chat/completions\x00 HTTP/1.1", "POST /v1/%zz HTTP/1.1", "POST /v1/chat completions HTTP/1.1",
		"POST v1/chat/completions HTTP/1.1"} {
		if resp, _ := f.raw(line + "\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"); resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%q: status %d", line, resp.StatusCode)
		}
	}
	if len(r.requests()) != 0 {
		t.Error("the backend was asked")
	}
}

func TestWebSocketHandshakeStatus426(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("a", nil)), r)
	const key = "Sec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n"
	for name, headers := range map[string]string{
		"handshake":                  "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n" + key,
		"several protocols":          "Connection: Upgrade\r\nUpgrade: h2c, WebSocket\r\n",
		"Upgrade already removed":    key,
		"Connection already changed": "Upgrade: websocket\r\n",
	} {
		for _, path := range []string{"/v1/responses", "/v1/responses/", "/v1/responses/resp_1", "/v1/realtime?model=m", "/v1/chat/completions",
			"/v1/messages", "/v1/models", "/"} {
			resp, body := f.raw("GET " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n")
			if resp.StatusCode != http.StatusUpgradeRequired || resp.Header.Get("Upgrade") != "HTTP/1.1" ||
				!strings.EqualFold(resp.Header.Get("Connection"), "upgrade") ||
				!strings.Contains(body, "WebSocket is not served: send the request over HTTP") {
				t.Errorf("%s, %s: status %d %v %s", name, path, resp.StatusCode, resp.Header, body)
			}
		}
	}
	if len(r.requests()) != 0 {
		t.Error("the backend was asked")
	}
}

func TestUpgradeHeaderDropped(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	// On a POST it is a wish that may be ignored.
	resp, _ := f.raw("POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\nContent-Length: " +
		"25\r\n\r\n" + bodyFor("/v1/embeddings"))
	if got := r.requests()[0].Header; resp.StatusCode != http.StatusOK || got["Upgrade"] != nil || got["Connection"] != nil {
		t.Errorf("status %d, went up: %v", resp.StatusCode, got)
	}
	// Java's HTTP client sends this with its first request to each server.
	if resp, body := f.raw("GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade, HTTP2-Settings\r\nUpgrade: " +
		"h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"); resp.StatusCode != http.StatusOK {
		t.Errorf("status %d %s", resp.StatusCode, body)
	}
}

func TestTrailingSlash(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	for _, e := range endpointsOfNewResponses() {
		path := e.Path
		if e.Multipart {
			continue // as the others
		}
		resp, answer := f.post(path+"/", bodyFor(path))
		seen := r.requests()
		if resp.StatusCode != http.StatusOK || len(seen) == 0 || seen[len(seen)-1].RequestURI != path {
			t.Errorf("%s/: status %d %s", path, resp.StatusCode, answer)
		}
	}
	for path, status := range map[string]int{"/livez/": 200, "/health/": 200, "/version/": 200, "/v1/chat/completions/": 405,
		"/v1/responses/": 405} {
		if resp, answer := f.get(path); resp.StatusCode != status {
			t.Errorf("GET %s: status %d %s", path, resp.StatusCode, answer)
		}
	}
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
	if strings.Contains(f.exposition(), `completions/"`) {
		t.Error("a path of the client is a label")
	}
}

func TestUnknownPathNamed(t *testing.T) {
	f := serve(t, nil, &replica{})
	for path, want := range map[string]string{
		"/v1/chat/completions/batch":            "unknown path /v1/chat/completions/batch; the API is at /v1/chat/completions, ",
		"/v1/v1/chat/completions":               "unknown path /v1/v1/chat/completions: the API is at /v1/chat/completions; ",
		"/v1/v1/messages/":                      "unknown path /v1/v1/messages: the API is at /v1/messages; ",
		"/chat/completions":                     "unknown path /chat/completions: the API is at /v1/chat/completions; ",
		"/openai/v1/embeddings":                 "unknown path /openai/v1/embeddings: the API is at /v1/embeddings; ",
		"/v1//chat/completions":                 "unknown path /v1//chat/completions: the API is at /v1/chat/completions; ",
		"/models":                               "unknown path /models: the API is at /v1/models; ",
		"/v1/v1/models":                         "unknown path /v1/v1/models: the API is at /v1/models; ",
		"/v1/%0ax":                              "unknown path /v1/%0ax; ",
		"/v1/" + strings.Repeat("x", 20) + "/y": "unknown path /v1/…/y; ",
		strings.Repeat("/abc", 1000):            "unknown path " + strings.Repeat("/abc", maxNamedPathBytes/4) + "…; ",
	} {
		resp, answer := f.get(path)
		if refused(t, answer); resp.StatusCode != http.StatusNotFound || !strings.Contains(answer, want) {
			t.Errorf("%s: status %d %s, want %s", path, resp.StatusCode, answer, want)
		}
	}
}

func TestModelListUnion(t *testing.T) {
	f := serve(t, nil, &replica{}, &replica{}, &replica{})
	card := func(id, json string) backends.Model { return backends.Model{ID: id, Root: id, Card: []byte(json)} }
	a := `{"id":"a",  "object":"model","created":1,"owned_by":"vllm","root":"/models/a","parent":null,"max_model_len":8192,` +
		`"permission":[{"id":"x"}],"new_field":{"k":[1,2]}}`
	b, c := `{"id":"org/b","root":"org/b"}`, `{"id":"lora","parent":"a"}`
	f.backends[0].SetModels([]backends.Model{card("a", a)})
	f.backends[1].SetModels([]backends.Model{card("org/b", b), card("a", `{"id":"a","owned_by":"another's view"}`)})
	f.backends[2].SetModels([]backends.Model{card("lora", c)})
	f.backends[1].SetState(backends.Down) // what it listed last is kept
	for range 3 {
		resp, got := f.get("/v1/models")
		if want := `{"object":"list","data":[` + a + "," + b + "," + c + "]}"; got != want ||
			resp.Header.Get("Content-Type") != "application/json" {
			t.Fatalf("got %s\nwant %s", got, want)
		}
	}
	for path, want := range map[string]string{"a": a, "org/b": b, "org%2Fb": b, "org%2fb": b, "lora": c, "%61": a, "a/": a, "org/b/": b,
		"org%2Fb/": b} {
		if resp, got := f.get("/v1/models/" + path); resp.StatusCode != http.StatusOK || got != want {
			t.Errorf("%s: got %d %s", path, resp.StatusCode, got)
		}
	}
	if _, list := f.get("/v1/models"); list != "" {
		for _, path := range []string{"/v1/models/", "/v1/models//"} {
			if resp, got := f.get(path); resp.StatusCode != http.StatusOK || got != list {
				t.Errorf("%s: got %d %s", path, resp.StatusCode, got)
			}
		}
	}
	for _, path := range []string{"none", "A", "org//b", "a%00", "/a"} {
		resp, got := f.get("/v1/models/" + path)
		if refused(t, got); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%q: got %d %s", path, resp.StatusCode, got)
		}
	}
}

func TestHealthEndpoints(t *testing.T) {
	f := serve(t, nil, &replica{}, &replica{})
	check := func(want map[string]int) {
		t.Helper()
		for path, status := range want {
			if resp, _ := f.get(path); resp.StatusCode != status {
				t.Errorf("GET %s: %d, want %d", path, resp.StatusCode, status)
			}
			resp, err := f.client.Head(f.url + path)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != status {
				t.Errorf("HEAD %s: %d, want %d", path, resp.StatusCode, status)
			}
		}
	}
	f.backends[0].SetState(backends.Down)
	check(map[string]int{"/livez": 200, "/readyz": 200, "/health": 200, "/version": 200, "/v1/models": 200, "/v1/models/m": 200,
		"/v1/models/none": 404})
	f.backends[1].SetState(backends.Draining)
	check(map[string]int{"/livez": 200, "/readyz": 503, "/health": 503, "/version": 200, "/v1/models": 200})
	resp, answer := f.get("/readyz")
	if refused(t, answer); resp.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	if _, got := f.get("/version"); got != `{"version":"1.2.3"}` {
		t.Errorf("version %s", got)
	}
}
