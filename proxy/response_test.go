package proxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/backends/vllm"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
	"warmroute/prompt"
	"warmroute/proxy/api"
	"warmroute/proxy/apikey"
	"warmroute/proxy/relay"
	"warmroute/router"
)

func TestResponseRelayedUnchanged(t *testing.T) {
	long := `{"data":"` + strings.Repeat("0123456789abcdef", 100_000) + `"}` // 1.6 MB
	cases := []struct{ name, says, want string }{
		{"whole", answered("200 OK", whole), whole},
		{"odd spacing", answered("200 OK", "{ \"b\":1,\n\"a\" :2 }\n"), "{ \"b\":1,\n\"a\" :2 }\n"},
		{"no JSON", answered("200 OK", "\x00\xff plain"), "\x00\xff plain"},
		{"empty", answered("200 OK", ""), ""},
		{"long", answered("200 OK", long), long},
		{"long, chunked", "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(long[:5]) +
			chunk(long[5:]) + lastChunk, long},
		{"stream", streamed(role, hello, world, stop, counted, doneLine), goodStream},
		{"stream in one chunk", streamed(goodStream), goodStream},
		{"stream with names, without its comments", streamed(": ping\n\n", "event: x\nid: 7\n"+hello, ": keep-alive\n\n", "retry: 5\n\n",
			doneLine), "event: x\nid: 7\n" + hello + "retry: 5\n\n" + doneLine},
		{"stream with CRLF", streamed(strings.ReplaceAll(goodStream, "\n", "\r\n")), strings.ReplaceAll(goodStream, "\n", "\r\n")},
		{"stream without a last line end", streamed(role, hello, "data: [DONE]"), role + hello + "data: [DONE]"},
		{"stream without [DONE], framed", streamed(role, hello, stop), role + hello + stop},
		{"stream to the connection's end", sseToEnd + goodStream, goodStream},
		{"stream with a length", fmt.Sprintf("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n",
			len(hello+doneLine)) + hello + doneLine, hello + doneLine},
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

func TestStreamRelayedAtAnyChunking(t *testing.T) {
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

func TestStreamLongLines(t *testing.T) {
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

func TestResponseHeaders(t *testing.T) {
	for name, body := range map[string]string{"whole": answered("200 OK", whole, "X-Odd-CASE: 1", "x-two: a", "x-two: b", "Set-Cookie: k=v",
		"Server: uvicorn",
		"Keep-Alive: 5", "Connection: keep-alive, X-Hop", "X-Hop: 1", "Proxy-Authenticate: x", "X-Request-Id: other",
		"X-Warmroute-Backend: forged", "endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4"),
		"stream": strings.Replace(streamed(goodStream), "server: uvicorn\r\n",
			"X-Odd-CASE: 1\r\nx-two: a\r\nx-two: b\r\nSet-Cookie: k=v\r\nServer: uvicorn\r\n", 1)} {
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
			if got := resp.Header.Get("X-Warmroute-Predicted-Tokens"); !strings.HasPrefix(got, "0/") || got == "0/0" {
				t.Errorf("match %q", got)
			}
			if resp.Header.Get("X-Warmroute-Overhead-Us") == "" {
				t.Error("no overhead")
			}
		})
	}
}

func TestRouteHeadersDisabled(t *testing.T) {
	f := serve(t, func(o *Options) { o.RouteHeaders = false }, &replica{script: always(answered("200 OK", whole))})
	resp, _ := f.post("/v1/chat/completions", askWhole)
	for name := range resp.Header {
		if strings.HasPrefix(name, "X-Warmroute") {
			t.Errorf("%s is there", name)
		}
	}
}

func TestSecondTurnMatchesFirst(t *testing.T) {
	f := serve(t, nil, &replica{script: always(streamed(goodStream))}, &replica{script: always(streamed(goodStream))})
	f.post("/v1/chat/completions", askStream)
	f.backends[0].SetLoad(nil)
	f.backends[1].SetLoad(nil)
	resp, _ := f.post("/v1/chat/completions", strings.TrimSuffix(askStream, "]}")+
		`,{"role":"assistant","content":"Hello world"},{"role":"user","content":"And?"}]}`)
	if resp.Header.Get("X-Warmroute-Backend") != "r0" || resp.Header.Get("X-Warmroute-Reason") != "prefix" ||
		strings.HasPrefix(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "0/") {
		t.Errorf("went to %s for %s, match %s", resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Reason"),
			resp.Header.Get("X-Warmroute-Predicted-Tokens"))
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

func TestStreamNotBuffered(t *testing.T) {
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

func TestContentTypeNotGuessed(t *testing.T) {
	html := "<html><body>hello</body></html>"
	f := serve(t, nil, &replica{script: always(strings.Replace(answered("200 OK", html), "content-type: application/json\r\n", "", 1))})
	resp, body := f.post("/v1/embeddings", `{"model":"m","input":"x"}`)
	if got, ok := resp.Header["Content-Type"]; ok || body != html {
		t.Errorf("Content-Type %q, body %q; the replica sent no Content-Type", got, body)
	}
}

// dripError answers with a 500 whose body comes a byte at a time and does not end.
func dripError(status string) func(*session) {
	return func(s *session) {
		if _, ok := s.request(); !ok {
			return
		}
		s.say("HTTP/1.1 " + status + "\r\ncontent-type: application/json\r\ncontent-length: 60000\r\n\r\n")
		for {
			if _, err := s.Write([]byte("x")); err != nil {
				return
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-s.replica.over:
				return
			}
		}
	}
}

func TestErrorBodyTimeout(t *testing.T) {
	t.Parallel()
	for _, status := range []string{"500 Internal Server Error", "503 Service Unavailable"} {
		t.Run(status, func(t *testing.T) {
			t.Parallel()
			f := serve(t, nil, &replica{script: dripError(status)}, &replica{script: always(answered("200 OK", whole))})
			select {
			case got := <-f.background(askWhole):
				if got.body != whole {
					t.Errorf("got %+v", got)
				}
			case <-time.After(3 * failsafe):
				t.Fatal("the request waits for the rest of an error")
			}
		})
	}
	t.Run("in a stream that has begun", func(t *testing.T) {
		t.Parallel()
		heard := make(chan struct{})
		quiet := func(s *session) {
			s.request()
			s.say(sseHead)
			s.commentUntil(heard)
		}
		f := keepingAlive(t, &replica{script: quiet}, &replica{script: dripError("400 Bad Request")})
		r := f.open(t, "/v1/chat/completions", askStream)
		r.to(comment)
		close(heard)
		ended := make(chan string, 1)
		go func() { ended <- r.rest() }()
		select {
		case got := <-ended:
			if !strings.Contains(got, "replica_failed") {
				t.Errorf("got %q", got)
			}
		case <-time.After(3 * failsafe):
			t.Fatal("the request waits for the rest of an error")
		}
	})
}

func TestErrorBodyLimit(t *testing.T) {
	const limit = 64 << 10
	for _, c := range []struct {
		size   int
		status int
	}{{limit, http.StatusServiceUnavailable}, {limit + 1, http.StatusBadGateway}} {
		t.Run(fmt.Sprint(c.size), func(t *testing.T) {
			body := strings.Repeat("x", c.size)
			f := serve(t, nil, &replica{script: always(answered("503 Service Unavailable", body))})
			resp, got := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != c.status || (got == body) != (c.size == limit) {
				t.Errorf("got %d with %d bytes", resp.StatusCode, len(got))
			}
		})
	}
}

// What is kept of an error while another backend is asked counts as buffered, until
// there is a better response or the error was relayed.
func TestErrorBodyMemory(t *testing.T) {
	const size = 10_000
	message := errorJSON(strings.Repeat("x", size))
	event := strings.Replace(dead, "EngineCore encountered an issue.", strings.Repeat("x", size), 1)
	for name, c := range map[string]struct{ ask, says string }{
		"response": {askWhole, answered("500 Internal Server Error", message)},
		"event":    {askStream, streamed(event, doneLine)},
	} {
		for _, fails := range []bool{true, false} {
			t.Run(fmt.Sprint(name, " fails=", fails), func(t *testing.T) {
				goOn := make(chan struct{})
				second := &replica{script: func(s *session) {
					s.request()
					<-goOn
					if !fails {
						s.say(streamed(role, hello))
						<-s.replica.over
					}
				}}
				f := serve(t, func(o *Options) { o.Attempts = 2 }, &replica{script: always(c.says)}, second)
				done := f.background(c.ask)
				eventually(t, "the second is asked", func() bool { return len(second.requests()) == 1 })
				if n := f.proxy.buffers.Reserved.Load(); n < size || n > 2*size {
					t.Errorf("%d bytes are charged", n)
				}
				close(goOn)
				if fails {
					if got := <-done; got.status != http.StatusInternalServerError || len(got.body) < size {
						t.Errorf("got %d with %d bytes", got.status, len(got.body))
					}
				}
				eventually(t, "nothing is charged", func() bool { return f.proxy.buffers.Reserved.Load() == 0 })
			})
		}
	}
}

func TestErrorBodyWithoutMemory(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ ask, says string }{
		"response": {askWhole, answered("503 Service Unavailable", errorJSON("no"))},
		"event":    {askStream, streamed(strings.Replace(dead, "500", "503", 1), doneLine)},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := &replica{script: always(c.says)}, &replica{script: always(c.says)}
			f := serve(t, nil, first, second)
			f.proxy.buffers.Reserved.Add(relay.MaxBufferedTotalBytes)
			resp, got := f.post("/v1/chat/completions", c.ask)
			if resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(got, "the replica responded: Service Unavailable") {
				t.Errorf("got %d, %q", resp.StatusCode, got)
			}
			if len(second.requests()) != 1 {
				t.Error("no other backend was asked")
			}
			if n := f.proxy.buffers.Reserved.Add(-relay.MaxBufferedTotalBytes); n != 0 {
				t.Errorf("%d bytes are still charged", n)
			}
		})
	}
}

// allocated is how much memory the process asks for while f runs, given back or not.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// flood writes n bytes as chunks of 64 KB.
func (s *session) flood(n int) {
	piece := append(append([]byte("10000\r\n"), bytes.Repeat([]byte("x"), 64<<10)...), "\r\n"...)
	for ; n > 0; n -= 64 << 10 {
		if _, err := s.Conn.Write(piece); err != nil {
			return
		}
	}
}

// liveHeap is how much memory is in use, without what pools keep.
func liveHeap() int64 {
	for range 2 { // the first one only marks what pools keep
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// However long a line or an answer is, it passes, and what is kept of it is bounded.
func TestLongResponseMemory(t *testing.T) {
	const long, most = 100 << 20, 16 << 20
	jsonHead := "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
	for name, c := range map[string]struct{ head, tail string }{
		"a line in mid-stream": {sseHead + chunk(role+hello+"data: "), chunk("\n\n"+doneLine) + lastChunk},
		"the first line":       {sseHead + chunk("data: "), chunk("\n\n"+doneLine) + lastChunk},
		"a comment":            {sseHead + chunk(role+hello+": "), chunk("\n\n"+doneLine) + lastChunk},
		"a whole answer":       {jsonHead, lastChunk},
		"a refusal":            {strings.Replace(jsonHead, "200 OK", "400 Bad Request", 1), lastChunk},
	} {
		t.Run(name, func(t *testing.T) {
			flooded, measured := make(chan struct{}), make(chan struct{})
			f := serve(t, nil, &replica{script: func(s *session) {
				if _, ok := s.request(); ok {
					s.say(c.head)
					s.flood(long)
					close(flooded)
					s.until(measured)
					s.say(c.tail)
				}
			}})
			var got, kept int64
			want := int64(long)
			if name == "a comment" { // is dropped
				want = int64(len(role + hello + doneLine))
			}
			before := liveHeap()
			spent := allocated(func() {
				resp, err := f.client.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(askStream))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				go func() {
					defer close(measured)
					<-flooded
					kept = liveHeap() - before
				}()
				if got, err = io.Copy(io.Discard, resp.Body); err != nil {
					t.Fatal(err)
				}
				<-measured
			})
			if got < want {
				t.Errorf("%d bytes came through, of %d", got, want)
			}
			if kept > most {
				t.Errorf("%d MB of it are kept", kept>>20)
			}
			if spent > most && !poolsForget {
				t.Errorf("%d MB were allocated on the way", spent>>20)
			}
		})
	}
}

// A refusal without end is no words for a client: it is cut off, and another asked.
func TestEndlessErrorBody(t *testing.T) {
	first := &replica{script: func(s *session) {
		s.request()
		s.say("HTTP/1.1 500 Internal Server Error\r\ntransfer-encoding: chunked\r\n\r\n")
		s.flood(1 << 40)
	}}
	f := serve(t, nil, first, &replica{script: always(answered("200 OK", whole))})
	if _, answer := f.post("/v1/chat/completions", askWhole); answer != whole {
		t.Errorf("got %q", answer)
	}
}

// Comments are no event, however many: the wait for the first one goes on.
func TestEndlessComments(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]struct {
		says  string
		pause time.Duration
		limit time.Duration
		code  int // of the answer: 200 where its beginning had to be passed on
	}{
		"a flood": {strings.Repeat(": nothing yet\n\n", 4<<10), 0, time.Second, http.StatusGatewayTimeout},
		"a drip":  {": nothing yet\n\n", 20 * time.Millisecond, time.Second, http.StatusGatewayTimeout},
		// A mebibyte is held back at most, which a busy machine has to read within the limit.
		"a flood of fields": {strings.Repeat("retry: 10\n\n", 4<<10), 0, failsafe / 4, http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fleet := serve(t, func(o *Options) { o.FirstByte = f.limit }, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead)
				for piece := chunk(f.says); ; {
					if _, err := io.WriteString(s.Conn, piece); err != nil {
						return
					}
					time.Sleep(f.pause)
				}
			}})
			resp, answer := fleet.post("/v1/chat/completions", askStream)
			if resp.StatusCode != f.code || !strings.Contains(answer, "first_byte_timeout") {
				t.Errorf("status %d, %d bytes that end in %q", resp.StatusCode, len(answer), answer[max(0, len(answer)-200):])
			}
		})
	}
}

// Whoever asked for no stream waits as long as the replica computes, but not for
// the rest of a header.
func TestRetryAfterStalledHeader(t *testing.T) {
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say("HTTP/1.1 200 OK\r\ncontent-ty")
		s.closed()
	}}, &replica{script: always(answered("200 OK", whole))})
	terms := *f.backends[0].Options()
	impatient := transport.New(transport.Options{URL: f.backends[0].URL, HeaderTimeout: 20 * time.Millisecond})
	terms.Transport = impatient
	f.backends[0].SetOptions(terms)
	if _, answer := f.post("/v1/chat/completions", askWhole); answer != whole {
		t.Errorf("got %q", answer)
	}
	f.awaitMetric(`warmroute_retries_total{reason="truncated"} 1`)
}

func TestEncodedResponseRelayed(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, whole)
	z.Close()
	framed := answered("200 OK", packed.String(), "content-encoding: gzip")
	toEnd := "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\r\n" + packed.String()
	for name, script := range map[string]func(*session){"framed": always(framed), "to the connection's end": once(toEnd)} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: script})
			resp, answer := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Encoding") != "gzip" || answer != packed.String() {
				t.Errorf("status %d, header %v, %d bytes", resp.StatusCode, resp.Header, len(answer))
			}
		})
	}
}

// TestContentEncodingOfPlainResponse expects that a Content-Encoding which names no compression makes no response unreadable.
func TestContentEncodingOfPlainResponse(t *testing.T) {
	for _, coding := range []string{"utf-8", "none", "identity", "Identity, UTF-8"} {
		f := serve(t, nil, &replica{script: func(s *session) {
			for {
				r, ok := s.request()
				switch {
				case !ok:
					return
				case strings.Contains(r.body, `"stream":true`):
					s.say(strings.Replace(streamed(goodStream), "text/event-stream", "text/event-stream\r\ncontent-encoding: "+coding, 1))
				default:
					s.say(answered("200 OK", whole, "content-encoding: "+coding))
				}
			}
		}})
		for body, want := range map[string]string{askWhole: whole, askStream: goodStream} {
			if resp, answer := f.post("/v1/chat/completions", body); resp.StatusCode != http.StatusOK || answer != want {
				t.Errorf("%s: got %d %s", coding, resp.StatusCode, answer)
			}
		}
	}
}

// What nobody can answer says what to look at, and shows nobody where a redirect leads.
func TestRedirectStatus502(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("308 Permanent Redirect", "", "location: http://10.9.8.7:8000/inner"))})
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusBadGateway || !strings.Contains(answer, "redirect (a backend's URL must be") ||
		strings.Contains(answer, "10.9.8.7") || resp.Header.Get("Location") != "" {
		t.Errorf("status %d, header %v, %s", resp.StatusCode, resp.Header, answer)
	}
	if log := f.log.String(); !strings.Contains(log, "set the backend to the URL of the replica itself") {
		t.Errorf("the log says nothing of what to do: %s", log)
	}
}

// A replica that sends each answer twice is heard once.
func TestResponsesNotMixedUp(t *testing.T) {
	f := serve(t, nil, &replica{script: func(s *session) {
		for {
			req, ok := s.request()
			if !ok {
				return
			}
			s.say(answered("200 OK", req.body) + answered("200 OK", `{"choices":[],"from":"somebody else"}`))
		}
	}})
	var clients sync.WaitGroup
	for client := range 4 {
		clients.Go(func() {
			for n := range 25 {
				body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"client %d, request %d"}]}`, client, n)
				if _, answer, err := f.try("/v1/chat/completions", body); err != nil || answer != body {
					t.Errorf("%s was answered %q, %v", body, answer, err)
				}
			}
		})
	}
	clients.Wait()
}

func TestUnknownModelErrorLength(t *testing.T) {
	f := serve(t, nil, &replica{script: once()})
	var names []string
	for i := range 10_000 {
		names = append(names, fmt.Sprintf("adapter-%d<m", i))
	}
	f.backends[0].SetModels(cards(names))
	resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"m"`, `"absent"`, 1))
	if resp.StatusCode != http.StatusNotFound || !strings.Contains(answer, "and 9950 more") || len(answer) > 4<<10 {
		t.Errorf("status %d, %d bytes: %.300s", resp.StatusCode, len(answer), answer)
	}
}

// Whatever a replica answers, reading it for an abort, its usage and its text ends
// well, and counts are counts.
func FuzzBufferedResponse(f *testing.F) {
	f.Add(whole, byte(api.ChatFormat))
	f.Add(wholeAbort, byte(api.ChatFormat))
	f.Add(`{"choices":[{"text":"x","finish_reason":"abort"}]}`, byte(api.CompletionFormat))
	f.Add(`{"choices":[{"token_ids":[1,2],"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}`, byte(api.TokensFormat))
	f.Add(`{"choices":{"finish_reason":"abort"},"usage":[]}`, byte(api.ChatFormat))
	f.Add(`{"usage":{"input_tokens":-1e400,"output_tokens":9223372036854775808,"input_tokens_details":{"cached_tokens":"7"}}}`,
		byte(api.ResponsesFormat))
	f.Add(`{"usage":{"cache_read_input_tokens":1.5e300,"input_tokens":true}}`, byte(api.MessagesFormat))
	f.Add(strings.Repeat("[", 10_000), byte(api.ChatFormat))
	f.Add(`{"choices":`+strings.Repeat(`[{"message":`, 1000), byte(api.ChatFormat))
	var asked prompt.Prompt
	if err := asked.Parse(prompt.Chat, []byte(askWhole)); err != nil {
		f.Fatal(err)
	}
	asked.ApplyLayout(prompt.DefaultLayout)
	asked.AppendBlocks(nil, "m", 256) // what a reply's blocks follow
	f.Fuzz(func(t *testing.T, body string, kind byte) {
		shape := api.Format(kind) % 7
		vllm.IsEmptyCompletion([]byte(body))
		vllm.IsFailedResponse([]byte(body))
		if relay.EndOfBody(shape, []byte(body)) == vllm.EndAborted && shape.HasChoices() && !strings.Contains(body, "abort") {
			t.Error("an abort that is not there")
		}
		var u relay.Usage
		u.Parse(gjson.Get(body, "usage"), shape)
		for _, n := range []int{u.PromptTokens, u.CachedTokens, u.CompletionTokens} {
			if n < 0 {
				t.Errorf("%+v", u)
			}
		}
		var reply prompt.Response
		var start prompt.ResponseStart
		start.SetFrom(&asked)
		if !reply.Reset(&start) {
			t.Fatal("the reply to a plain prompt is not followed")
		}
		reply.AddBody([]byte(body))
		if blocks := reply.Finish(); len(blocks) > 1024 {
			t.Errorf("%d blocks", len(blocks))
		}
	})
}

func TestResponseBufferLimit(t *testing.T) {
	const size = 300 << 10
	full := answered("200 OK", strings.Repeat("x", size))
	broken := full[:len(full)-size/2]
	for _, c := range []struct {
		name  string
		taken int64
		first string
		came  bool
	}{
		{"room, whole", 0, full, true},
		{"room, breaks off", 0, broken, true}, // held, so another backend is asked
		{"no room, whole", relay.MaxBufferedTotalBytes, full, true},
		{"no room, breaks off", relay.MaxBufferedTotalBytes, broken, false},
		{"room for a part, breaks off", relay.MaxBufferedTotalBytes - relay.FreeBufferBytes, broken, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: once(c.first)}, &replica{script: once(full)})
			f.proxy.buffers.Reserved.Add(c.taken)
			resp, answer, err := f.try("/v1/embeddings", askWhole)
			if came := err == nil && resp.StatusCode == http.StatusOK && len(answer) == size; came != c.came {
				t.Errorf("it came: %v (%d bytes, %v)", came, len(answer), err)
			}
			eventually(t, "what was held is given back", func() bool { return f.proxy.buffers.Reserved.Load() == c.taken })
			f.proxy.buffers.Reserved.Add(-c.taken)
		})
	}
}

func TestResponseBufferWithSlowClient(t *testing.T) {
	t.Parallel()
	const size = 900 << 10
	f := serve(t, nil, &replica{script: always(answered("200 OK", strings.Repeat("x", size)))})
	for range 20 { // more than sockets hold
		f.askFrom(askWhole).SetReadBuffer(4 << 10)
	}
	eventually(t, "answers are held", func() bool {
		return f.proxy.buffers.Reserved.Load() >= 5*(relay.MaxBufferedBytes-relay.FreeBufferBytes)
	})
}

func TestLongResponseUsage(t *testing.T) {
	t.Parallel()
	filler := strings.Repeat(`{"token":"\"usage\":{\"completion_tokens\":1}"},`, 60_000) // 2.8 MB
	answer := func(end string) string {
		return answered("200 OK", `{"choices":[{"logprobs":[`+filler+`{}]}]`+end)
	}
	account := `,"usage":{"prompt_tokens":77,"total_tokens":577,"completion_tokens":500},"prompt_logprobs":null,"kv_transfer_params":null}`
	for i, c := range []struct {
		name, answer, ask string
		prompt, completed int
	}{
		{"account", answer(account), askWhole, 77, 500},
		{"no account", answer("}"), askWhole, 0, (len(`{"choices":[{"logprobs":[`+filler+`{}]}]`) + 1) / bytesPerToken},
		{"no account, and a bound", answer("}"), strings.Replace(askWhole, "{", `{"max_tokens":9,"n":2,`, 1), 0, 18},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := fmt.Sprint("key", i)
			f := serve(t, withKeys(keyOf(name, func(k *apikey.Key) { k.TokensPerMinute = 1000 })), &replica{script: always(c.answer)})
			if resp, got := f.post("/v1/chat/completions", c.ask, bearer(name)...); resp.StatusCode != 200 || len(got) < len(filler) {
				t.Fatalf("got %d, %d bytes", resp.StatusCode, len(got))
			}
			if c.prompt == 0 {
				c.prompt = f.promptTokens(c.ask, bearer(name)...)
			}
			f.awaitMetric(fmt.Sprintf(`warmroute_key_output_tokens_total{key=%q} %d`, name, c.completed))
			f.awaitMetric(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key=%q} %d`, name, c.prompt))
		})
	}
}

func TestTailReader(t *testing.T) {
	var all []byte
	for i := range 2000 {
		all = fmt.Appendf(all, "%d ", i)
	}
	for _, n := range []int{0, 1, relay.MaxTailBytes - 1, relay.MaxTailBytes, relay.MaxTailBytes + 1, len(all)} {
		for name, r := range map[string]io.Reader{
			"at once": bytes.NewReader(all[:n]), "byte by byte": iotest.OneByteReader(bytes.NewReader(all[:n])),
			"in halves": iotest.HalfReader(bytes.NewReader(all[:n])),
		} {
			s := relay.TailReader{Reader: r}
			if _, err := io.Copy(io.Discard, &s); err != nil {
				t.Fatal(err)
			}
			if want := all[max(n-relay.MaxTailBytes, 0):n]; !bytes.Equal(s.Tail, want) || s.BytesRead != n {
				t.Errorf("%d bytes %s: kept %d of %d", n, name, len(s.Tail), s.BytesRead)
			}
		}
	}
}

// simulated is a fleet of simulated replicas, in front of which nothing checks
// or polls.
func simulated(t *testing.T, n int, hold router.QueueSettings) *fleet {
	t.Helper()
	var list []*backends.Backend
	for i := range n {
		s := sim.NewServer(sim.Config{Model: "m", Engine: engine.Config{Speed: 50}})
		if err := s.Bind("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		t.Cleanup(func() {
			stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		list = append(list, backendAt(t, fmt.Sprintf("r%d", i), s.URL(), ""))
	}
	return newFleet(t, list, "prefix", hold, nil)
}

// answerOf puts the text of an answer together, streamed or not, and says how
// many of its prompt's tokens came from the replica's cache.
func answerOf(answer string) (text string, cached int) {
	add := func(data string) {
		for _, path := range []string{"choices.0.delta.content", "choices.0.message.content", "choices.0.text"} {
			text += gjson.Get(data, path).Str
		}
		cached = max(cached, int(gjson.Get(data, "usage.prompt_tokens_details.cached_tokens").Int()))
	}
	if !strings.HasPrefix(answer, "data:") {
		add(answer)
	}
	for line := range strings.Lines(answer) {
		if data, ok := strings.CutPrefix(line, "data: {"); ok {
			add("{" + data)
		}
	}
	return text, cached
}

func TestNextTurnMatchesResponse(t *testing.T) {
	t.Parallel()
	const blockTokens = 64
	question := strings.Repeat("What do you make of this, then? ", 60)
	chat := func(turns ...string) map[string]any {
		var messages []map[string]string
		for i, text := range turns {
			messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": text})
		}
		return map[string]any{"messages": messages}
	}
	text := func(turns ...string) map[string]any { return map[string]any{"prompt": strings.Join(turns, "")} }
	for _, c := range []struct {
		name, path string
		stream     bool
		body       func(turns ...string) map[string]any
	}{
		{"chat, streamed", "/v1/chat/completions", true, chat},
		{"chat", "/v1/chat/completions", false, chat},
		{"completion, streamed", "/v1/completions", true, text},
		{"completion", "/v1/completions", false, text},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := simulated(t, 2, router.QueueSettings{})
			ask := func(turns ...string) (answer string, predicted, observed int) {
				t.Helper()
				body := c.body(turns...)
				body["model"], body["max_tokens"], body["ignore_eos"] = "m", 500, true
				if body["stream"] = c.stream; c.stream {
					body["stream_options"] = map[string]bool{"include_usage": true}
				}
				raw, err := json.Marshal(body)
				if err != nil {
					t.Fatal(err)
				}
				resp, all := f.post(c.path, string(raw))
				matched, _, _ := strings.Cut(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "/")
				predicted, err = strconv.Atoi(matched)
				if err != nil {
					t.Fatalf("no match in %v: %s", resp.Header, all)
				}
				answer, observed = answerOf(all)
				f.awaitIdle()
				return answer, predicted, observed
			}
			turns := []string{question}
			for n := range 3 {
				answer, predicted, observed := ask(turns...)
				if len(answer) < 1000 {
					t.Fatalf("turn %d: an answer of %d bytes", n, len(answer))
				}
				if gap := predicted - observed; gap > blockTokens || gap < -blockTokens {
					t.Errorf("turn %d: %d tokens predicted to be cached, %d were", n, predicted, observed)
				}
				if before := len(strings.Join(turns, ""))/4 - len(turns[len(turns)-1])/4; n > 0 && predicted < before-blockTokens {
					t.Errorf("turn %d: %d tokens predicted to be cached, of about %d before the question", n, predicted, before)
				}
				turns = append(turns, answer, question)
			}
		})
	}
}
