package proxy

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/apikey"
	"warmroute/proxy/relay"
)

// anthropicError is an error in Anthropic's shape.
type anthropicError struct {
	Type  string `json:"type"`
	Error struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Src     string `json:"src"`
	} `json:"error"`
}

// isAnthropicError fails unless data is an error of the proxy's own in Anthropic's
// shape, and of the given type.
func isAnthropicError(t *testing.T, data, kind string) {
	t.Helper()
	var e anthropicError
	decoder := json.NewDecoder(strings.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&e); err != nil || e.Type != "error" || e.Error.Type != kind || e.Error.Message == "" ||
		e.Error.Src != "warmroute" {
		t.Errorf("got %v %q, want an error of type %s", err, data, kind)
	}
}

func TestAnthropicErrorBodies(t *testing.T) {
	t.Parallel()
	const ask = `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`
	silent := func(s *session) { s.request(); s.closed() }
	for name, c := range map[string]struct {
		script  func(*session)
		change  func(*Options)
		prepare func(*fleet)
		body    string
		header  []string
		status  int
		kind    string
	}{
		"not JSON":       {body: "{", status: 400, kind: "invalid_request_error"},
		"bad header":     {header: []string{"X-Warmroute-Priority", "-1"}, status: 400, kind: "invalid_request_error"},
		"no key":         {change: withKeys(keyOf("a", nil)), status: 401, kind: "authentication_error"},
		"unknown model":  {body: `{"model":"nope","messages":[]}`, status: 404, kind: "not_found_error"},
		"too large":      {change: func(o *Options) { o.BodyBytes = 10 }, status: 413, kind: "request_too_large"},
		"query too long": {change: func(o *Options) { o.QueryBytes = -1 }, status: 414, kind: "api_error"},
		"rate": {change: withKeys(keyOf("a", func(k *apikey.Key) {
			k.Concurrency = 1
		})), prepare: (*fleet).takeKey, header: bearer("a"), status: 429, kind: "rate_limit_error"},
		"dead replica": {script: once(), status: 502, kind: "api_error"},
		"no memory": {script: always(answered("500 Internal Server Error", "")), prepare: func(f *fleet) {
			f.proxy.buffers.Reserved.Add(relay.MaxBufferedTotalBytes)
		}, status: 500, kind: "api_error"},
		"too many": {change: func(o *Options) { o.InFlight = 0 }, status: 503, kind: "overloaded_error"},
		"no first event": {script: silent, change: func(o *Options) {
			o.FirstByte = 50 * time.Millisecond
		}, body: ask[:len(ask)-1] + `,"stream":true}`, status: 504, kind: "api_error"},
		"no body in time": {change: func(o *Options) { o.BodyIdle = 50 * time.Millisecond }, status: 408, kind: "api_error"},
	} {
		for _, path := range []string{"/v1/messages", "/v1/messages/count_tokens"} {
			if path != "/v1/messages" && strings.Contains(c.body, "stream") {
				continue
			}
			t.Run(name+" "+path, func(t *testing.T) {
				if c.script == nil {
					c.script = always(answered("200 OK", whole))
				}
				f := serve(t, c.change, &replica{script: c.script})
				if c.prepare != nil {
					c.prepare(f)
				}
				body := c.body
				if body == "" {
					body = ask
				}
				if c.status == 408 {
					resp, got := f.raw("POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
					if resp.StatusCode != 408 {
						t.Errorf("got %d", resp.StatusCode)
					}
					isAnthropicError(t, got, c.kind)
					return
				}
				resp, got := f.post(path, body, c.header...)
				if resp.StatusCode != c.status || resp.Header.Get("Content-Type") != "application/json" {
					t.Errorf("got %d %v", resp.StatusCode, resp.Header)
				}
				isAnthropicError(t, got, c.kind)
				f.proxy.buffers.Reserved.Store(0)
			})
		}
	}
}

// takeKey occupies the one request that key a may have.
func (f *fleet) takeKey() {
	holder, _ := f.proxy.keys.Find(secretOf("a"))
	if _, refusal := holder.TryAcquire(); refusal != nil {
		f.t.Fatal(refusal)
	}
}

func TestAnthropicRouteErrors(t *testing.T) {
	f := serve(t, nil, &replica{})
	for _, path := range []string{"/v1/messages", "/v1/messages/count_tokens"} {
		resp, got := f.get(path)
		if resp.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: got %d", path, resp.StatusCode)
		}
		isAnthropicError(t, got, "api_error")
	}
	resp, got := f.get("/v1/messages/batches")
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("got %d", resp.StatusCode)
	}
	isAnthropicError(t, got, "not_found_error")
}

// What a replica says itself passes as it is.
func TestAnthropicReplicaErrorsRelayed(t *testing.T) {
	const said = `{"type":"error","error":{"type":"BadRequestError","message":"too long"}}`
	for _, status := range []string{"400 Bad Request", "500 Internal Server Error"} {
		f := serve(t, nil, &replica{script: always(answered(status, said))})
		if _, got := f.post("/v1/messages", `{"model":"m","messages":[]}`); got != said {
			t.Errorf("%s: got %q", status, got)
		}
	}
}

// An error event has the type of the status that the error would have been.
func TestAnthropicErrorEvents(t *testing.T) {
	t.Parallel()
	const (
		ask   = `{"model":"m","max_tokens":5,"messages":[],"stream":true}`
		begun = "event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"text":"Hi"}}` + "\n\n"
	)
	last := func(t *testing.T, stream string) string {
		t.Helper()
		_, data, ok := strings.Cut(stream, "event: error\ndata: ")
		if !ok || !strings.HasSuffix(data, "\n\n") || strings.Count(data, "\n") != 2 {
			t.Fatalf("no error event at the end of %q", stream)
		}
		return strings.TrimSpace(data)
	}
	t.Run("broken off", func(t *testing.T) {
		f := serve(t, nil, &replica{script: once(sseHead, chunk(begun))})
		_, got := f.post("/v1/messages", ask)
		isAnthropicError(t, last(t, got), "api_error")
	})
	for status, kind := range map[string]string{
		"400 Bad Request": "invalid_request_error", "403 Forbidden": "permission_error", "404 Not Found": "not_found_error",
		"422 Unprocessable Entity": "api_error", "429 Too Many Requests": "rate_limit_error", "503 Service Unavailable": "overloaded_error",
	} {
		t.Run(status, func(t *testing.T) {
			heard := make(chan struct{})
			f := keepingAlive(t, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead)
				s.until(heard)
			}}, &replica{script: always(answered(status, `{"error":{"message":"in its words","type":"x","code":1}}`))})
			r := f.open(t, "/v1/messages", ask)
			r.to("event: ping")
			close(heard)
			data := last(t, r.rest())
			if want := `{"type":"error","error":{"type":"` + kind + `","message":"in its words"}}`; data != want {
				t.Errorf("got %s, want %s", data, want)
			}
		})
	}
}

func TestMethodNotAllowed(t *testing.T) {
	r := &replica{}
	f := serve(t, withKeys(keyOf("a", nil)), r)
	allowed := map[string]string{"/v1/models": "GET, HEAD", "/v1/models/m": "GET, HEAD", "/v1/models/a%2Fb": "GET, HEAD",
		"/version": "GET, HEAD", "/livez": "GET, HEAD", "/readyz": "GET, HEAD", "/health": "GET, HEAD"}
	for _, e := range endpointsOfNewResponses() {
		allowed[e.Path] = http.MethodPost
	}
	for path, want := range allowed {
		for _, method := range strings.Fields("GET HEAD POST PUT PATCH DELETE OPTIONS TRACE PURGE post") {
			if strings.Contains(want, method) {
				continue
			}
			resp, body := f.raw(method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			if resp.StatusCode != http.StatusMethodNotAllowed || resp.Header.Get("Allow") != want {
				t.Errorf("%s %s: got %d, Allow %q, want %q", method, path, resp.StatusCode, resp.Header.Get("Allow"), want)
			}
			if method != http.MethodHead && !strings.Contains(body, want) {
				t.Errorf("%s %s: %s", method, path, body)
			}
		}
	}
	if resp, _ := f.raw("PURGE /none HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); resp.StatusCode != http.StatusNotFound {
		t.Errorf("an unknown path: %d", resp.StatusCode)
	}
	if resp, body := f.raw("HEAD /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); resp.StatusCode != http.StatusOK || body != "" {
		t.Errorf("HEAD /readyz: %d %q", resp.StatusCode, body)
	}
}

func TestBodyLimitMessage(t *testing.T) {
	t.Parallel()
	for limit, want := range map[int64]string{64 << 20: "64 MiB", 3 << 10: "3 KiB", 1000: "1000 bytes"} {
		f := serve(t, func(o *Options) { o.BodyBytes = limit }, &replica{})
		resp, body := f.post("/v1/chat/completions", string(bytes.Repeat([]byte(" "), int(limit)+1)))
		if want = "the request body exceeds the limit of " + want + " (limits.body_bytes)"; resp.StatusCode != http.StatusRequestEntityTooLarge ||
			refused(t, body).Error.Message != want {
			t.Errorf("got %d %s, want %q", resp.StatusCode, body, want)
		}
	}
}
