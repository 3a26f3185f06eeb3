package proxy

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/router"
)

func TestBodyGoesUpUnchanged(t *testing.T) {
	bodies := map[string]string{
		"odd spacing":              "\n{ \"messages\" :\t[ {\"content\":\"hi\" , \"role\":\"user\"} ] ,\r\n\"model\":\"m\"}  ",
		"unknown fields":           `{"model":"m","messages":[{"role":"user","content":"hi","x":[1,{"y":null}]}],"guided_json":{"b":1,"a":2},"zz":1e400}`,
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
		"length":                     fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", start, len(body), body),
		"chunked":                    start + "Transfer-Encoding: chunked\r\n\r\n" + chunk(body[:7]) + chunk(body[7:]) + lastChunk,
		"chunked with a trailer":     start + "Trailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body) + "0\r\nX-T: 1\r\n\r\n",
		"length and chunked":         fmt.Sprintf("%sContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n%s%s", start, chunk(body), lastChunk),
		"chunked and length":         fmt.Sprintf("%sTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n%s%s", start, len(body), chunk(body), lastChunk),
		"the same length twice":      fmt.Sprintf("%sContent-Length: %d\r\nContent-Length: %d\r\n\r\n%s", start, len(body), len(body), body),
		"two lengths":                fmt.Sprintf("%sContent-Length: %d\r\nContent-Length: 3\r\n\r\n%s", start, len(body), body),
		"chunked twice":              start + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body) + lastChunk,
		"another coding":             start + "Transfer-Encoding: gzip, chunked\r\n\r\n" + chunk(body) + lastChunk,
		"length named in Connection": fmt.Sprintf("%sConnection: Content-Length, Host\r\nContent-Length: %d\r\n\r\n%s", start, len(body), body),
		"100-continue":               fmt.Sprintf("%sExpect: 100-continue\r\nContent-Length: %d\r\n\r\n%s", start, len(body), body),
	}
}

func TestExactlyOneFramingGoesUp(t *testing.T) {
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
			if got := seen[0]; got.body != askWhole || got.ContentLength != int64(len(askWhole)) || len(got.TransferEncoding) != 0 || len(got.Trailer) != 0 {
				t.Errorf("framed by length %d and %q, %d bytes of body", got.ContentLength, got.TransferEncoding, len(got.body))
			}
		})
	}
}

func TestHeadersThatGoUp(t *testing.T) {
	r := &replica{key: "backend-key", script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	resp, _ := f.raw("POST /v1/chat/completions?api-version=1&a=%20b HTTP/1.1\r\nHost: proxy.example\r\n" +
		"Content-Type: application/json; charset=utf-8\r\naccept: text/event-stream\r\nX-Custom: one\r\nx-custom: two\r\n" +
		"Traceparent: 00-1-2-01\r\nUser-Agent: test\r\n" +
		"Connection: close, X-Mine\r\nX-Mine: secret\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\nProxy-Authorization: y\r\nTE: trailers\r\nUpgrade: h2c\r\n" +
		"Authorization: Bearer client-key\r\nX-API-Key: client-key\r\nX-data-parallel-rank: 3\r\nx-vllm-priority: -9\r\nendpoint-load-metrics-format: TEXT\r\nAccept-Encoding: gzip\r\n" +
		"X-Request-Id: my-id.1\r\n" +
		fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(askWhole), askWhole))
	got := r.requests()[0]
	want := http.Header{
		"Content-Type": {"application/json; charset=utf-8"}, "Accept": {"text/event-stream"}, "X-Custom": {"one", "two"},
		"Traceparent": {"00-1-2-01"}, "User-Agent": {"test"}, "Accept-Encoding": {"identity"},
		"Authorization": {"Bearer backend-key"}, "X-Request-Id": {"my-id.1"},
		"Content-Length": {fmt.Sprint(len(askWhole))},
	}
	if !maps.EqualFunc(got.Header, want, slices.Equal) {
		t.Errorf("went up: %v\nwant: %v", got.Header, want)
	}
	if got.RequestURI != "/v1/chat/completions?api-version=1&a=%20b" || got.Host != r.listener.Addr().String() {
		t.Errorf("asked %s for %s", got.Host, got.RequestURI)
	}
	if resp.Header.Get("X-Request-Id") != "my-id.1" {
		t.Errorf("echoed id %q", resp.Header.Get("X-Request-Id"))
	}
}

func TestClientsKeyGoesToNoBackendWithoutOne(t *testing.T) {
	first := &replica{key: "first-key", script: once()}
	second := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, first, second)
	f.post("/v1/chat/completions", askWhole, "Authorization", "Bearer client-key")
	if got := second.requests()[0].Header["Authorization"]; got != nil {
		t.Errorf("the second backend got %q", got)
	}
}

func TestPathPrefixOfABackendIsKept(t *testing.T) {
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
		if got := requestID(http.Header{"X-Request-Id": {id}}); (got == id) != kept || !plainID(got) {
			t.Errorf("id %q became %q", id, got)
		}
	}
	if a, b := requestID(http.Header{}), requestID(http.Header{}); a == b {
		t.Errorf("two requests have the id %s", a)
	}
}

func TestEveryAnswerHasARequestID(t *testing.T) {
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
