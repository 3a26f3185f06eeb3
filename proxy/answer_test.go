package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestAnswerComesBackUnchanged(t *testing.T) {
	long := `{"data":"` + strings.Repeat("0123456789abcdef", 100_000) + `"}` // 1.6 MB
	cases := []struct{ name, says, want string }{
		{"whole", answered("200 OK", whole), whole},
		{"odd spacing", answered("200 OK", "{ \"b\":1,\n\"a\" :2 }\n"), "{ \"b\":1,\n\"a\" :2 }\n"},
		{"no JSON", answered("200 OK", "\x00\xff plain"), "\x00\xff plain"},
		{"empty", answered("200 OK", ""), ""},
		{"long", answered("200 OK", long), long},
		{"long, chunked", "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(long[:5]) + chunk(long[5:]) + lastChunk, long},
		{"stream", streamed(role, hello, world, stop, counted, doneLine), goodStream},
		{"stream in one chunk", streamed(goodStream), goodStream},
		{"stream with comments and names", streamed(": ping\n\n", "event: x\nid: 7\n"+hello, ": keep-alive\n\n", "retry: 5\n\n", doneLine), ": ping\n\nevent: x\nid: 7\n" + hello + ": keep-alive\n\nretry: 5\n\n" + doneLine},
		{"stream with CRLF", streamed(strings.ReplaceAll(goodStream, "\n", "\r\n")), strings.ReplaceAll(goodStream, "\n", "\r\n")},
		{"stream without a last line end", streamed(role, hello, "data: [DONE]"), role + hello + "data: [DONE]"},
		{"stream without [DONE], framed", streamed(role, hello), role + hello},
		{"stream to the connection's end", sseToEnd + goodStream, goodStream},
		{"stream with a length", fmt.Sprintf("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n", len(hello+doneLine)) + hello + doneLine, hello + doneLine},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: once(c.says)})
			// What the answer is, it says itself: the request asks for the other kind.
			body := askStream
			if strings.Contains(c.name, "stream") {
				body = askWhole
			}
			resp, got := f.post("/v1/chat/completions", body)
			if resp.StatusCode != http.StatusOK || got != c.want {
				t.Errorf("got %d, %d bytes %.300q, want %d bytes %.300q", resp.StatusCode, len(got), got, len(c.want), c.want)
			}
		})
	}
}

func TestStreamIsCutAnyhow(t *testing.T) {
	for _, size := range []int{1, 2, 7, 100, 1000} {
		var parts []string
		for rest := goodStream; rest != ""; {
			n := min(size, len(rest))
			parts, rest = append(parts, rest[:n]), rest[n:]
		}
		f := serve(t, nil, &replica{script: once(streamed(parts...))})
		if _, got := f.post("/v1/chat/completions", askStream); got != goodStream {
			t.Errorf("in chunks of %d: got %q", size, got)
		}
	}
}

func TestLongLinesOfAStreamPass(t *testing.T) {
	long := `data: {"choices":[{"delta":{"content":"` + strings.Repeat("long ", 60_000) + `"}}]}` + "\n\n"
	f := serve(t, nil, &replica{script: once(streamed(role, long, hello, doneLine))}, &replica{script: once(streamed(long, doneLine))})
	for range 2 {
		_, got := f.post("/v1/chat/completions", askStream)
		if want := role + long + hello + doneLine; got != want && got != long+doneLine {
			t.Errorf("got %d bytes", len(got))
		}
		f.backends[0].SetState(0)
	}
}

func TestHeadersThatComeBack(t *testing.T) {
	for name, body := range map[string]string{"whole": answered("200 OK", whole, "X-Odd-CASE: 1", "x-two: a", "x-two: b", "Set-Cookie: k=v", "Server: uvicorn",
		"Keep-Alive: 5", "Connection: keep-alive, X-Hop", "X-Hop: 1", "Proxy-Authenticate: x", "X-Request-Id: other", "X-Warmroute-Backend: forged", "endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4"),
		"stream": strings.Replace(streamed(goodStream), "server: uvicorn\r\n", "X-Odd-CASE: 1\r\nx-two: a\r\nx-two: b\r\nSet-Cookie: k=v\r\nServer: uvicorn\r\n", 1)} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: always(body)})
			resp, _ := f.post("/v1/chat/completions", askWhole, "X-Request-Id", "mine")
			for name, want := range map[string]string{
				"X-Odd-Case": "1", "X-Two": "a,b", "Set-Cookie": "k=v", "Server": "uvicorn", "Keep-Alive": "", "X-Hop": "", "Connection": "",
				"Proxy-Authenticate": "", "X-Request-Id": "mine", "X-Warmroute-Backend": "r0", "X-Warmroute-Reason": "only",
				"X-Warmroute-Attempts": "1", "Endpoint-Load-Metrics": "",
			} {
				if got := strings.Join(resp.Header[name], ","); got != want {
					t.Errorf("%s is %q, want %q", name, got, want)
				}
			}
			if got := resp.Header.Get("X-Warmroute-Prefix-Match"); !strings.HasPrefix(got, "0/") || got == "0/0" {
				t.Errorf("match %q", got)
			}
			if resp.Header.Get("X-Warmroute-Overhead-Us") == "" {
				t.Error("no overhead")
			}
		})
	}
}

func TestRouteHeadersCanBeOff(t *testing.T) {
	f := serve(t, func(o *Options) { o.RouteHeaders = false }, &replica{script: always(answered("200 OK", whole))})
	resp, _ := f.post("/v1/chat/completions", askWhole)
	for name := range resp.Header {
		if strings.HasPrefix(name, "X-Warmroute") {
			t.Errorf("%s is there", name)
		}
	}
}

func TestSecondTurnMatchesTheFirst(t *testing.T) {
	f := serve(t, nil, &replica{script: always(streamed(goodStream))}, &replica{script: always(streamed(goodStream))})
	f.post("/v1/chat/completions", askStream)
	f.backends[0].SetLoad(nil)
	f.backends[1].SetLoad(nil)
	resp, _ := f.post("/v1/chat/completions", strings.TrimSuffix(askStream, "]}")+`,{"role":"assistant","content":"Hello world"},{"role":"user","content":"And?"}]}`)
	if resp.Header.Get("X-Warmroute-Backend") != "r0" || resp.Header.Get("X-Warmroute-Reason") != "prefix" || strings.HasPrefix(resp.Header.Get("X-Warmroute-Prefix-Match"), "0/") {
		t.Errorf("went to %s for %s, match %s", resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Reason"), resp.Header.Get("X-Warmroute-Prefix-Match"))
	}
}

// stream opens a streamed answer and returns its lines as they come.
func (f *fleet) stream(body string) (*http.Response, *bufio.Reader) {
	f.t.Helper()
	resp, err := f.client.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { resp.Body.Close() })
	return resp, bufio.NewReader(resp.Body)
}

// expect reads exactly these bytes.
func (f *fleet) expect(r io.Reader, want string) {
	f.t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != want {
		f.t.Fatalf("got %q (%v), want %q", got, err, want)
	}
}

func TestStreamIsNotBuffered(t *testing.T) {
	confirmed := make(chan struct{})
	r := &replica{}
	r.script = func(s *session) {
		s.request()
		s.say(sseHead, chunk(role))
		for _, e := range []string{hello, world, stop, doneLine} {
			select {
			case <-confirmed:
			case <-r.over:
			}
			s.say(chunk(e))
		}
		s.say(lastChunk)
	}
	f := serve(t, nil, r)
	_, br := f.stream(askStream)
	f.expect(br, role)
	for _, e := range []string{hello, world, stop, doneLine} {
		confirmed <- struct{}{}
		f.expect(br, e)
	}
	if _, err := br.ReadByte(); err != io.EOF {
		t.Errorf("ended with %v", err)
	}
}

func TestContentTypeIsNotGuessed(t *testing.T) {
	html := "<html><body>hello</body></html>"
	f := serve(t, nil, &replica{script: always(strings.Replace(answered("200 OK", html), "content-type: application/json\r\n", "", 1))})
	resp, body := f.post("/v1/embeddings", `{"model":"m","input":"x"}`)
	if got, ok := resp.Header["Content-Type"]; ok || body != html {
		t.Errorf("Content-Type %q, body %q; the replica sent no Content-Type", got, body)
	}
}
