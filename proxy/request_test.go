package proxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/relay"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

func TestBodyRelayedUnchanged(t *testing.T) {
	bodies := map[string]string{
		"odd spacing": "\n{ \"messages\" :\t[ {\"content\":\"hi\" , \"role\":\"user\"} ] ,\r\n\"model\":\"m\"}  ",
		"unknown fields": `{"model":"m","messages":[{"role":"user","content":"hi","x":[1,{"y":null}]}],"guided_json":{"b":1,"a":2},` +
			`"zz":1e400}`,
		"unicode":                  `{"model":"m","messages":[{"role":"user","content":"żółć 你好 \u00e9 \ud83d\ude00 😀"}]}`,
		"duplicate keys below":     `{"model":"m","messages":[{"role":"user","role":"user","content":"a","content":"b"}],"extra":{"a":1,"a":2}}`,
		"duplicate unread top key": `{"model":"m","messages":[{"role":"user","content":"hi"}],"zz":1,"zz":2}`,
		"escaped key":              `{"mod\u0065l":"m","messages":[{"role":"user","content":"hi"}]}`,
		"lone surrogate":           `{"model":"m","messages":[{"role":"user","content":"\ud800"}]}`,
		"byte order mark":          "\xef\xbb\xbf" + askWhole,
		"no model":                 `{"messages":[{"role":"user","content":"hi"}]}`,
		"large":                    `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 900_000) + `"}]}`,
	}
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	for name, body := range bodies {
		t.Run(name, func(t *testing.T) {
			before := len(r.requests())
			if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != http.StatusOK {
				t.Fatalf("status %d: %s", resp.StatusCode, answer)
			}
			if got := r.requests()[before]; got.body != body {
				t.Errorf("the replica got %.200q", got.body)
			}
		})
	}
}

// framings are ways to send one body, and whether the proxy may refuse them.
func framings(body string) map[string]string {
	const start = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	return map[string]string{
		"length":                 fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", start, len(body), body),
		"chunked":                start + "Transfer-Encoding: chunked\r\n\r\n" + chunk(body[:7]) + chunk(body[7:]) + lastChunk,
		"chunked with a trailer": start + "Trailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body) + "0\r\nX-T: 1\r\n\r\n",
		"length and chunked":     fmt.Sprintf("%sContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n%s%s", start, chunk(body), lastChunk),
		"chunked and length": fmt.Sprintf("%sTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n%s%s", start, len(body), chunk(body),
			lastChunk),
		"the same length twice":      fmt.Sprintf("%sContent-Length: %d\r\nContent-Length: %d\r\n\r\n%s", start, len(body), len(body), body),
		"two lengths":                fmt.Sprintf("%sContent-Length: %d\r\nContent-Length: 3\r\n\r\n%s", start, len(body), body),
		"chunked twice":              start + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body) + lastChunk,
		"another coding":             start + "Transfer-Encoding: gzip, chunked\r\n\r\n" + chunk(body) + lastChunk,
		"length named in Connection": fmt.Sprintf("%sConnection: Content-Length, Host\r\nContent-Length: %d\r\n\r\n%s", start, len(body), body),
		"100-continue":               fmt.Sprintf("%sExpect: 100-continue\r\nContent-Length: %d\r\n\r\n%s", start, len(body), body),
	}
}

func TestRequestFraming(t *testing.T) {
	for name, request := range framings(askWhole) {
		t.Run(name, func(t *testing.T) {
			r := &replica{script: always(answered("200 OK", whole))}
			f := serve(t, nil, r)
			c := f.dial()
			io.WriteString(c, request)
			br := bufio.NewReader(c)
			resp, err := http.ReadResponse(br, nil)
			if err == nil && resp.StatusCode == http.StatusContinue {
				resp, err = http.ReadResponse(br, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			seen := r.requests()
			if resp.StatusCode == http.StatusBadRequest || resp.StatusCode == http.StatusNotImplemented {
				if len(seen) != 0 {
					t.Error("refused, and sent on all the same")
				}
				return
			}
			if resp.StatusCode != http.StatusOK || len(seen) != 1 {
				t.Fatalf("status %d, %d requests went up", resp.StatusCode, len(seen))
			}
			if got := seen[0]; got.body != askWhole || got.ContentLength != int64(len(askWhole)) || len(got.TransferEncoding) != 0 ||
				len(got.Trailer) != 0 {
				t.Errorf("framed by length %d and %q, %d bytes of body", got.ContentLength, got.TransferEncoding, len(got.body))
			}
		})
	}
}

func TestRequestHeaders(t *testing.T) {
	r := &replica{key: "backend-key", script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	resp, _ := f.raw("POST /v1/chat/completions?api-version=1&a=%20b HTTP/1.1\r\nHost: proxy.example\r\n" +
		"Content-Type: application/json; charset=utf-8\r\naccept: text/event-stream\r\nX-Custom: one\r\nx-custom: two\r\n" +
		"Traceparent: 00-1-2-01\r\nUser-Agent: test\r\n" +
		"Connection: close, X-Mine\r\nX-Mine: secret\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\nProxy-Authorization: y\r\nTE: " +
		"trailers\r\nUpgrade: h2c\r\n" +
		"Authorization: Bearer client-key\r\nX-API-Key: client-key\r\nX-data-parallel-rank: 3\r\nx-vllm-priority: " +
		"-9\r\nendpoint-load-metrics-format: TEXT\r\nAccept-Encoding: gzip\r\n" +
		"X-Request-Id: my-id.1\r\n" +
		fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(askWhole), askWhole))
	got := r.requests()[0]
	want := http.Header{
		"Content-Type": {"application/json; charset=utf-8"}, "Accept": {"text/event-stream"}, "X-Custom": {"one", "two"},
		"Traceparent": {"00-1-2-01"}, "User-Agent": {"test"}, "Accept-Encoding": {"identity"},
		"Authorization": {"Bearer backend-key"}, "X-Request-Id": {"my-id.1"},
		"Content-Length": {fmt.Sprint(len(askWhole))},
	}
	sent := got.Header.Clone()
	id, _, _ := strings.Cut(sent.Get("X-Request-Id"), upstream.TokenMark)
	sent.Set("X-Request-Id", id)
	if !maps.EqualFunc(sent, want, slices.Equal) {
		t.Errorf("went up: %v\nwant: %v", got.Header, want)
	}
	if got.RequestURI != "/v1/chat/completions?api-version=1&a=%20b" || got.Host != r.listener.Addr().String() {
		t.Errorf("asked %s for %s", got.Host, got.RequestURI)
	}
	if resp.Header.Get("X-Request-Id") != "my-id.1" {
		t.Errorf("echoed id %q", resp.Header.Get("X-Request-Id"))
	}
}

func TestAuthorizationRemovedWithoutBackendKey(t *testing.T) {
	first := &replica{key: "first-key", script: once()}
	second := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, first, second)
	f.post("/v1/chat/completions", askWhole, "Authorization", "Bearer client-key")
	if got := second.requests()[0].Header["Authorization"]; got != nil {
		t.Errorf("the second backend got %q", got)
	}
}

func TestBackendPathPrefix(t *testing.T) {
	r := &replica{name: "r0", script: always(answered("200 OK", whole))}
	r.start(t)
	t.Cleanup(r.stop)
	b := backendAt(t, "r0", "http://"+r.listener.Addr().String()+"/vllm/a", "")
	f := newFleet(t, []*backends.Backend{b}, "prefix", router.QueueSettings{}, nil)
	f.post("/v1/chat/completions", askWhole)
	if got := r.requests()[0].RequestURI; got != "/vllm/a/v1/chat/completions" {
		t.Errorf("asked for %s", got)
	}
}

func TestRequestID(t *testing.T) {
	for id, kept := range map[string]bool{
		"abc":                        true,
		"A-b_c.d:9":                  true,
		strings.Repeat("x", 128):     true,
		strings.Repeat("x", 129):     false,
		"":                           false,
		"a b":                        false,
		"a\tb":                       false,
		"ä":                          false,
		`"quoted"`:                   false,
		"<script>":                   false,
		"a,b":                        false,
		"a/b":                        false,
		"\x00":                       false,
		"chatcmpl-1;drop=everything": false,
	} {
		if got := requestIDOrNew(http.Header{"X-Request-Id": {id}}); (got == id) != kept || !upstream.IsPlainID(got) {
			t.Errorf("id %q became %q", id, got)
		}
	}
	if a, b := requestIDOrNew(http.Header{}), requestIDOrNew(http.Header{}); a == b {
		t.Errorf("two requests have the id %s", a)
	}
}

func TestRequestIDInEveryResponse(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole, "x-request-id: the replica's"))})
	for _, path := range []string{"/v1/models", "/health", "/nothing"} {
		if resp, _ := f.get(path); resp.Header.Get("X-Request-Id") == "" {
			t.Errorf("%s has none", path)
		}
	}
	for _, body := range []string{askWhole, "not JSON"} {
		resp, _ := f.post("/v1/chat/completions", body, "X-Request-Id", "mine")
		if got := resp.Header["X-Request-Id"]; len(got) != 1 || got[0] != "mine" {
			t.Errorf("got ids %q", got)
		}
	}
}

// refusal is an error of the proxy's own, as clients read it.
type refusal struct {
	Error struct {
		Message, Type, Src string
		Param, Code        *string
	}
}

func refused(t *testing.T, body string) refusal {
	t.Helper()
	var e refusal
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" || e.Error.Src != "warmroute" {
		t.Errorf("not an error of ours in OpenAI's shape: %.200q", body)
	}
	return e
}

func TestBadBodyRejected(t *testing.T) {
	t.Parallel()
	const limit = 64 << 20
	chat := `{"model":"m","messages":[{"role":"user","content":"hi"}]`
	cases := []struct{ name, path, body, param, says string }{
		{"not JSON", "/v1/chat/completions", "hello", "", "JSON"},
		{"empty", "/v1/chat/completions", "", "", "empty"},
		{"white space", "/v1/chat/completions", " \n ", "", "empty"},
		{"a list", "/v1/chat/completions", "[]", "", "object"},
		{"cut-short JSON", "/v1/chat/completions", chat, "", ""},
		{"two values", "/v1/chat/completions", chat + "}{}", "", ""},
		{"no messages", "/v1/chat/completions", `{"model":"m"}`, "messages", "messages"},
		{"messages not a list", "/v1/chat/completions", `{"model":"m","messages":"hi"}`, "messages", "list"},
		{"64 MiB of [", "/v1/chat/completions", strings.Repeat("[", limit), "", "deep"},
		{`64 MiB of {"a":`, "/v1/chat/completions", strings.Repeat(`{"a":`, limit/5), "", "deep"},
		{"deep messages", "/v1/chat/completions", `{"messages":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + "}", "", "deep"},
		{"invalid UTF-8", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"` + "\xff\xfe" + `"}]}`, "", "UTF-8"},
		{"duplicate model", "/v1/chat/completions", `{"model":"m","model":"x","messages":[]}`, "model", "twice"},
		{"duplicate model, escaped", "/v1/chat/completions", `{"model":"m","\u006dodel":"x","messages":[]}`, "model", "twice"},
		{"duplicate messages", "/v1/chat/completions", `{"messages":[],"messages":[]}`, "messages", "twice"},
		{"number as model", "/v1/chat/completions", `{"model":7,"messages":[]}`, "model", "string"},
		{"control character in a string", "/v1/chat/completions", "{\"model\":\"m\x01\",\"messages\":[]}", "", ""},
		{"completions without a prompt", "/v1/completions", `{"model":"m"}`, "prompt", "prompt"},
		{"embeddings, not JSON", "/v1/embeddings", `{"model":`, "", ""},
		{"embeddings, number as model", "/v1/embeddings", `{"model":1,"input":"x"}`, "model", "string"},
	}
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) { o.BodyBytes = limit }, r)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			resp, answer := f.post(c.path, c.body)
			if resp.StatusCode != http.StatusBadRequest {
				t.Fatalf("status %d: %s", resp.StatusCode, answer)
			}
			e := refused(t, answer)
			if !strings.Contains(e.Error.Message, c.says) {
				t.Errorf("message %q does not say %q", e.Error.Message, c.says)
			}
			if c.param != "" && (e.Error.Param == nil || *e.Error.Param != c.param) {
				t.Errorf("param is not %s: %s", c.param, answer)
			}
			f.awaitIdle()
		})
	}
	if len(r.requests()) != 0 {
		t.Error("a backend was bothered")
	}
}

func TestTruncatedBodyRejected(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	for name, request := range map[string]string{
		"length":                 fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(askWhole)+1, askWhole),
		"chunked":                "Transfer-Encoding: chunked\r\n\r\n" + chunk(askWhole),
		"chunked, broken":        "Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
		"length without a body":  "Content-Length: 10\r\n\r\n",
		"no length and no body":  "\r\n",
		"chunk longer than said": "Transfer-Encoding: chunked\r\n\r\n1\r\n" + askWhole + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := f.dial()
			io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"+request)
			c.CloseWrite()
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			if refused(t, string(body)); resp.StatusCode != http.StatusBadRequest {
				t.Errorf("status %d: %s", resp.StatusCode, body)
			}
		})
	}
	if len(r.requests()) != 0 {
		t.Error("a backend was bothered")
	}
}

func TestModels(t *testing.T) {
	base := &replica{models: []string{"base", "org/name", "lora<base"}, script: always(answered("200 OK", "first"))}
	other := &replica{models: []string{"other"}, script: always(answered("200 OK", "second"))}
	f := serve(t, nil, base, other)
	for _, c := range []struct {
		body   string
		status int
		answer string
	}{
		{`{"model":"base","messages":[]}`, 200, "first"},
		{`{"model":"org/name","messages":[]}`, 200, "first"},
		{`{"model":"lora","messages":[]}`, 200, "first"},
		{`{"model":"other","messages":[]}`, 200, "second"},
		{`{"messages":[]}`, 400, "model is missing"},
		{`{"model":"","messages":[]}`, 400, "model is missing"},
		{`{"model":null,"messages":[]}`, 400, "model is missing"},
		{`{"model":"none","messages":[]}`, 404, "base, org/name, lora, other"},
		{`{"model":"` + strings.Repeat("ü", 5000) + `","messages":[]}`, 404, "does not exist"},
		{`{"model":"\ud800","messages":[]}`, 404, "does not exist"},
	} {
		resp, answer := f.post("/v1/chat/completions", c.body)
		if resp.StatusCode != c.status || !strings.Contains(answer, c.answer) {
			t.Errorf("%.60s: got %d %.300s", c.body, resp.StatusCode, answer)
		}
		if c.status == 404 {
			e := refused(t, answer)
			if e.Error.Code == nil || *e.Error.Code != "model_not_found" || e.Error.Param == nil || *e.Error.Param != "model" || len(answer) > 1000 {
				t.Errorf("%.60s: got %.300s", c.body, answer)
			}
		}
	}
}

func TestAdapterBackends(t *testing.T) {
	without := &replica{models: []string{"base"}, script: always(answered("200 OK", "without"))}
	with := &replica{models: []string{"base", "lora<base"}, script: always(answered("200 OK", "with"))}
	dead := &replica{models: []string{"base", "lora<base"}, script: once()}
	f := serve(t, nil, without, dead, with)
	for range 3 {
		if _, got := f.post("/v1/chat/completions", `{"model":"lora","messages":[]}`); got != "with" {
			t.Errorf("answered by the replica %q the adapter", got)
		}
	}
	if len(without.requests()) != 0 {
		t.Error("a replica was asked for an adapter that it does not list")
	}
	if _, got := f.post("/v1/chat/completions", `{"messages":[]}`); got != "without" {
		t.Errorf("no model named: answered by %q", got)
	}
}

func TestNoModelsListedStatus503(t *testing.T) {
	f := serve(t, nil, &replica{})
	f.backends[0].SetModels(nil)
	for _, body := range []string{askWhole, `{"messages":[]}`} {
		if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != http.StatusServiceUnavailable ||
			resp.Header.Get("Retry-After") == "" {
			t.Errorf("got %d %s", resp.StatusCode, answer)
		}
	}
}

// ends reads an answer, and then the end of the connection.
func ends(t *testing.T, conn net.Conn) (*http.Response, string) {
	t.Helper()
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(br); len(rest) > 0 || isTimeout(err) {
		t.Errorf("behind the answer %q, %v", rest, err)
	}
	return resp, string(body)
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}

func TestInFlightLimit(t *testing.T) {
	t.Parallel()
	over := make(chan struct{})
	r := &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.until(over)
		s.say(chunk(stop), chunk(doneLine), lastChunk)
	}}
	f := serve(t, func(o *Options) { o.InFlight = 2 }, r)
	var streams []*reader
	for range 2 {
		streams = append(streams, f.open(t, "/v1/chat/completions", askStream))
	}
	conn := f.dial()
	io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
	resp, answer := ends(t, conn)
	if e := refused(t, answer); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" ||
		e.Error.Type != "overloaded" {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, _ := f.get("/livez"); resp.StatusCode != http.StatusOK {
		t.Errorf("/livez is %d", resp.StatusCode)
	}
	close(over)
	for _, s := range streams {
		s.rest()
	}
	f.awaitIdle()
	if resp, _ := f.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusOK {
		t.Errorf("with room again: %d", resp.StatusCode)
	}
	if got := len(r.requests()); got != 3 {
		t.Errorf("the replica got %d requests", got)
	}
}

func TestQueryLimit(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) { o.QueryBytes = 100 }, r)
	long := "a=%20%2f;&&b" + strings.Repeat("x", 88)
	if resp, answer := f.post("/v1/chat/completions?"+long, askWhole); resp.StatusCode != http.StatusOK {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	resp, answer := f.post("/v1/chat/completions?"+long+"x", askWhole)
	if refused(t, answer); resp.StatusCode != http.StatusRequestURITooLong {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if got := r.requests(); len(got) != 1 || got[0].URL.RawQuery != long {
		t.Errorf("the replica saw %d requests", len(got))
	}
}

// net/http reads what a handler left of a body, for as long as it takes.
func TestMissingBodyFreesConnection(t *testing.T) {
	t.Parallel()
	for line, c := range map[string]struct {
		status int
		change func(*Options)
	}{
		"POST /nowhere":                {404, nil},
		"GET /livez":                   {200, nil},
		"GET /v1/models":               {200, nil},
		"PUT /v1/chat/completions":     {405, nil},
		"POST /v1/chat/completions":    {408, func(o *Options) { o.BodyIdle = 50 * time.Millisecond }},
		"POST /v1/chat/completions?xx": {414, func(o *Options) { o.QueryBytes = 1 }},
		"POST /v1/embeddings":          {413, func(o *Options) { o.BodyBytes = 50 }},
	} {
		for _, framing := range []string{"Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n40\r\n{"} {
			if c.status == 413 && framing[0] == 'T' {
				continue // not known to be too long
			}
			t.Run(line+" "+framing[:7], func(t *testing.T) {
				t.Parallel()
				f := serve(t, c.change, &replica{})
				conn := f.dial()
				fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\n%s", line, framing)
				if resp, body := ends(t, conn); resp.StatusCode != c.status {
					t.Errorf("status %d %s", resp.StatusCode, body)
				}
			})
		}
	}
}

// Whoever is not let in must not take the place of others meanwhile.
func TestLingeringRequestNotInFlight(t *testing.T) {
	f := serve(t, func(o *Options) {
		withKeys(keyOf("a", func(k *apikey.Key) { k.Concurrency = 1 }))(o)
		o.InFlight, o.QueryBytes = 1, 10
	}, &replica{script: always(answered("200 OK", whole))})
	const path = "POST /v1/chat/completions"
	valid := "Authorization: " + bearer("a")[1] + "\r\n"
	for name, request := range map[string]string{
		"no key":                   path + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"no key, to close":         path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{",
		"a long query":             path + "?a=1234567890 HTTP/1.1\r\nHost: x\r\n" + valid + "Content-Length: 100\r\n\r\n{",
		"a large body, to close":   path + " HTTP/1.1\r\nHost: x\r\n" + valid + "Connection: close\r\nContent-Length: 2000000\r\n\r\n{",
		"no key, a body in chunks": path + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{",
	} {
		t.Run(name, func(t *testing.T) {
			conn := f.dial()
			io.WriteString(conn, request)
			eventually(t, "it lingers", func() bool { return f.proxy.lingering.Load() == 1 })
			if resp, answer := f.post("/v1/chat/completions", askWhole, bearer("a")...); resp.StatusCode != http.StatusOK {
				t.Errorf("another request got %d %s", resp.StatusCode, answer)
			}
			conn.Close()
			eventually(t, "it lingers no more", func() bool { return f.proxy.lingering.Load() == 0 })
		})
	}
}

func TestLingeringLimit(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", nil)), &replica{})
	f.proxy.lingering.Add(maxLingering - 1)
	const request = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: 100\r\n\r\n{"
	for _, connection := range []string{"", "Connection: close\r\n"} {
		last, beyond := f.dial(), f.dial()
		fmt.Fprintf(last, request, connection)
		eventually(t, "the last one lingers", func() bool { return f.proxy.lingering.Load() == maxLingering })
		fmt.Fprintf(beyond, request, connection)
		if resp, answer := ends(t, beyond); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("got %d %s", resp.StatusCode, answer)
		}
		if f.proxy.lingering.Load() != maxLingering {
			t.Error("it took as long as for the one before")
		}
		last.Close()
		eventually(t, "none lingers", func() bool { return f.proxy.lingering.Load() == maxLingering-1 })
	}
}

func TestDrippingBodyStatus408(t *testing.T) {
	t.Parallel()
	f := serve(t, func(o *Options) { o.BodyIdle = 100 * time.Millisecond }, &replica{})
	conn := f.dial()
	io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
	dripping := make(chan struct{})
	go func() {
		defer close(dripping)
		for {
			if _, err := io.WriteString(conn, "["); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || resp.StatusCode != http.StatusRequestTimeout {
		t.Errorf("got %v, %v", resp, err)
	}
	f.awaitIdle()
	<-dripping
}

func TestConnectionLimit(t *testing.T) {
	over := make(chan struct{})
	f := serve(t, func(o *Options) { o.Connections = 4 }, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.until(over)
		s.say(chunk(stop), chunk(doneLine), lastChunk)
	}})
	stream := f.open(t, "/v1/chat/completions", askStream)
	var conns []net.Conn
	ask := func(conn net.Conn) bool {
		io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		return err == nil && resp.StatusCode == http.StatusOK
	}
	for i := range 6 {
		conn := f.dial()
		conns = append(conns, conn)
		if i%2 == 0 { // half of them stop in the middle of a header
			io.WriteString(conn, "POST / HTTP/1.1\r\nHo")
		} else if !ask(conn) {
			t.Fatal("no answer on a new connection")
		}
		// A client has its answer before the server has noted that.
		eventually(t, "the connection is noted as idle", func() bool {
			open, active, _ := f.proxy.clients.Activity()
			return open-active == min(i+1, 3)
		})
	}
	for i, conn := range conns[:3] {
		if _, err := conn.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("connection %d is still open: %v", i, err)
		}
	}
	if !ask(conns[3]) || !ask(conns[5]) {
		t.Error("one of the latest connections was closed")
	}
	close(over)
	if got := stream.rest(); !strings.HasSuffix(got, doneLine) {
		t.Errorf("the stream ended in %q", got)
	}
	f.awaitMetric("warmroute_connections_closed_total 3")
}

// suspects reports the names of suspected backends.
func suspects(to chan<- string) func(*backends.Backend) {
	return func(b *backends.Backend) { to <- b.Name }
}

func TestFirstEventAfterLongBeginning(t *testing.T) {
	for name, line := range map[string]string{"comments": ": waiting\n\n", "no events": "retry: 10\n\n"} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: once(sseHead, chunk(strings.Repeat(line, relay.MaxBufferedBytes/8)), chunk(hello))})
			if _, answer := f.post("/v1/chat/completions", askStream); !strings.Contains(answer, hello) {
				t.Error("the event did not come through")
			}
			f.awaitIdle()
			if got := f.blocks()[0]; got != questionBlocks {
				t.Errorf("%d blocks are kept of a prompt that was computed, want %d", got, questionBlocks)
			}
		})
	}
}

func TestDisconnectClosesReplicaConnection(t *testing.T) {
	long := strings.Repeat("x", 2<<20)
	cases := []struct {
		name   string
		body   string
		says   []string // what the replica says before it falls silent
		reads  string   // what the client reads before it leaves
		phase  string
		blocks int // what the index keeps, at most
	}{
		{"before the header", askStream, nil, "", "before_response", 0},
		{"before the header of a whole answer", askWhole, nil, "", "before_response", 0},
		{"between header and first event", askStream, []string{sseHead}, "", "before_response", 0},
		{"after a comment", askStream, []string{sseHead, chunk(": keep-alive\n\n")}, "", "before_response", 0},
		{"in mid-stream", askStream, []string{sseHead, chunk(role), chunk(hello)}, "data: ", "in_stream", questionBlocks},
		{"in a buffered response", askWhole, []string{answered("200 OK", whole)[:200]}, "", "before_response", 0},
		{"in a long answer", askWhole, []string{answered("200 OK", long)[:3<<19]}, "xxxx", "in_body", questionBlocks},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			said, gone := make(chan struct{}), make(chan struct{})
			suspected := make(chan string, 10)
			other := &replica{script: always(answered("200 OK", whole))}
			f := serve(t, func(o *Options) { o.RecheckHealth = suspects(suspected) }, &replica{script: func(s *session) {
				s.request()
				s.say(c.says...)
				close(said)
				s.closed()
				close(gone)
			}}, other)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(c.body))
			ended := make(chan struct{})
			begun := make(chan struct{})
			go func() {
				defer close(ended)
				resp, err := f.client.Do(req)
				if err != nil {
					return
				}
				defer resp.Body.Close()
				io.ReadFull(resp.Body, make([]byte, len(c.reads)))
				close(begun)
				<-ctx.Done()
			}()
			<-said
			if c.reads != "" {
				<-begun
			}
			leave()
			<-gone // while the replica is silent
			<-ended
			f.awaitIdle()
			f.awaitMetric(`warmroute_disconnected_requests_total{phase="` + c.phase + `"} 1`)
			f.awaitMetric(`warmroute_requests_total{backend="r0",code="499",endpoint="/v1/chat/completions",model="m"} 1`)
			if len(other.requests()) != 0 || len(suspected) != 0 {
				t.Error("the client's leaving was taken for a failure")
			}
			// Of a prompt that was not computed, what time can have reached stays.
			if got := f.blocks()[0]; c.blocks > 0 && got != c.blocks {
				t.Errorf("index holds %d blocks, want %d", got, c.blocks)
			}
		})
	}
}

func TestDisconnectDuringUpload(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	c := f.dial()
	io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
	eventually(t, "the body is being read", func() bool { return f.proxy.tenants.BodyBytesInUse() > 0 })
	c.SetLinger(0)
	c.Close()
	f.awaitMetric(`warmroute_disconnected_requests_total{phase="in_upload"} 1`)
	f.awaitMetric(`warmroute_requests_total{backend="",code="499",endpoint="/v1/chat/completions",model=""} 1`)
	if len(r.requests()) != 0 {
		t.Error("a backend was asked")
	}
}

func TestDisconnectAtDoneIsServed(t *testing.T) {
	ended := make(chan struct{})
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(goodStream)) // and never the last chunk
		s.closed()
		close(ended)
	}})
	c := f.dial()
	io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "+strconv.Itoa(len(askStream))+"\r\n\r\n"+askStream)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	f.expect(resp.Body, goodStream)
	c.Close()
	<-ended
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
}

// A prompt of which time can have computed nothing is taken back whole, so the
// next one is not sent where it is not.
func TestEarlyDisconnectRevertsIndex(t *testing.T) {
	long := `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("A long story. ", 60_000) + `"}]}`
	got, gone := make(chan struct{}), make(chan struct{})
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		close(got)
		s.closed()
		close(gone)
	}})
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(long))
	go func() {
		<-got
		leave()
	}()
	if _, err := f.client.Do(req); err == nil {
		t.Error("was answered")
	}
	<-gone
	f.awaitIdle()
	if all := len(long) / 256; f.blocks()[0] > all/2 {
		t.Errorf("index holds %d of %d blocks", f.blocks()[0], all)
	}
}

func TestCompressedBodyRefused(t *testing.T) {
	t.Parallel()
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	var gzipped bytes.Buffer
	w := gzip.NewWriter(&gzipped)
	io.WriteString(w, askWhole)
	w.Close()
	paths := []string{"/v1/responses/resp_1/cancel"}
	for _, e := range endpointsOfNewResponses() {
		paths = append(paths, e.Path)
	}
	for _, path := range paths {
		for _, coding := range []string{"gzip", "GZIP", "x-gzip", "deflate", "br", "zstd", "gzip, identity", "identity,gzip", "utf-8, br",
			"gzip;q=1.0"} {
			resp, answer, err := f.try(path, gzipped.String(), "Content-Encoding", coding)
			if err != nil || resp.StatusCode != http.StatusUnsupportedMediaType || !strings.Contains(answer, "Content-Encoding") ||
				resp.Header.Get("Accept-Encoding") != "identity" {
				t.Errorf("%s in %s: got %v %s, %v", path, coding, resp, answer, err)
			}
			if api.DialectOf(path) == api.Anthropic {
				isAnthropicError(t, answer, "invalid_request_error")
			} else {
				refused(t, answer)
			}
		}
	}
	resp, answer := f.raw("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: identity\r\nContent-Encoding: " +
		"br\r\nContent-Length: 1000000\r\n\r\n")
	if resp.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("before the body: got %v %s", resp, answer)
	}
	if _, err := f.proxy.Explain(DryRunRequest{Header: http.Header{"Content-Encoding": {"gzip"}}, Body: &gzipped, Length: -1}); err == nil ||
		err.(*DryRunError).Status != http.StatusUnsupportedMediaType {
		t.Errorf("explain: got %v", err)
	}
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d requests were sent", n)
	}
	for _, coding := range []string{"identity", "Identity", "", " , identity", "utf-8", "UTF8", "none", "unknown", `"`} {
		if resp, answer, err := f.try("/v1/chat/completions", askWhole, "Content-Encoding", coding); err != nil ||
			resp.StatusCode != http.StatusOK {
			t.Errorf("%q: got %v %s", coding, resp, answer)
		}
	}
}
