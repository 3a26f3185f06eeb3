package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/goleak"
)

// shortCall is what a test sends with Do.
type shortCall struct {
	method, uri, body string
	fresh             bool
	maxBodyBytes      int
}

// do sends a short request, and returns the status and body of the response.
func (c shortCall) do(ctx context.Context, t *Transport) (status int, body string, err error) {
	req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
	defer fasthttp.ReleaseRequest(req)
	defer fasthttp.ReleaseResponse(resp)
	req.Header.SetMethod(c.method)
	req.SetRequestURI(c.uri)
	req.Header.Set("Accept", "application/json")
	req.SetBodyString(c.body)
	if c.fresh {
		req.SetConnectionClose()
	}
	var read func(io.Reader) error
	if c.maxBodyBytes > 0 {
		read = func(r io.Reader) error {
			b, err := io.ReadAll(http.MaxBytesReader(nil, io.NopCloser(r), int64(c.maxBodyBytes)))
			body = string(b)
			return err
		}
	}
	err = t.Do(ctx, req, resp, read)
	return resp.StatusCode(), body, err
}

// get is a GET of a path.
func get(path string) shortCall { return shortCall{method: "GET", uri: path, maxBodyBytes: 1 << 20} }

func TestDoOnTheWire(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	heads := make(chan string, 1)
	transport := replicaOn(t, ln, "http", Options{}, func(s *session) {
		var head strings.Builder
		for {
			line, err := s.br.ReadString('\n')
			if err != nil {
				return
			}
			if head.WriteString(line); line == "\r\n" {
				break
			}
		}
		heads <- head.String()
		io.WriteString(s.Conn, ok)
	})
	for _, c := range []struct {
		call shortCall
		want string
	}{
		{get("/v1/responses/a%2Fb//c%20d?e=f%3F&g"),
			"GET /v1/responses/a%2Fb//c%20d?e=f%3F&g HTTP/1.1\r\nHost: HOST\r\nAccept: application/json\r\n\r\n"},
		{shortCall{"POST", "/sleep?level=1", "", true, 10},
			"POST /sleep?level=1 HTTP/1.1\r\nHost: HOST\r\nContent-Length: 0\r\nAccept: application/json\r\nConnection: close\r\n\r\n"},
	} {
		if _, _, err := c.call.do(failsafe(t), transport); err != nil {
			t.Fatal(err)
		}
		want := strings.Replace(c.want, "HOST", ln.Addr().String(), 1)
		if got := <-heads; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestDoReusesConnections(t *testing.T) {
	overBoth(t, "", func(t *testing.T, ln net.Listener, scheme string, o Options) {
		transport := replicaOn(t, ln, scheme, o, numbered)
		for i, c := range []struct {
			call shortCall
			want string
		}{
			{get("/"), "1"}, {get("/"), "1"}, {shortCall{"POST", "/", "x", true, 10}, "2"}, {get("/"), "1"},
			{shortCall{"GET", "/", "", false, 0}, ""}, {get("/"), "3"},
		} {
			if _, body, err := c.call.do(failsafe(t), transport); body != c.want || err != nil {
				t.Errorf("call %d: connection %q, error %v; want %q", i+1, body, err, c.want)
			}
		}
		if open := transport.OpenConns(); open != 1 {
			t.Errorf("%d connections are open, want 1", open)
		}
		transport.CloseIdleConnections()
		if open := transport.OpenConns(); open != 0 {
			t.Errorf("%d connections are open, want 0", open)
		}
	})
}

// A short request is sent where RoundTrip is at its limit.
func TestDoAtMaxConns(t *testing.T) {
	transport := replica(t, Options{MaxConns: 1}, always(ok))
	resp, err := send(failsafe(t), transport, "hello")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if status, _, err := get("/health").do(failsafe(t), transport); status != 200 || err != nil {
		t.Errorf("status %d, error %v", status, err)
	}
}

func TestDoResponses(t *testing.T) {
	const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
	for name, c := range map[string]struct {
		response, body, err string
		status, kept        int
	}{
		"counted":             {ok, "ok", "", 200, 1},
		"chunked":             {chunked, "hello", "", 200, 1},
		"to the end":          {"HTTP/1.1 200 OK\r\n\r\nhello", "hello", "", 200, 0},
		"interim":             {"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + ok, "ok", "", 200, 1},
		"no content":          {"HTTP/1.1 204 No Content\r\n\r\n", "", "", 204, 1},
		"HTTP/1.0":            {"HTTP/1.0 503 x\r\nContent-Length: 2\r\n\r\nno", "no", "", 503, 0},
		"close":               {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", "ok", "", 200, 0},
		"redirect":            {"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "", "", 302, 1},
		"more than announced": {ok + "x", "ok", "", 200, 0},
		"long header":         {"HTTP/1.1 200 OK\r\nA: " + strings.Repeat("a", 100<<10) + "\r\nContent-Length: 2\r\n\r\nok", "ok", "", 200, 0},
		"longer header":       {"HTTP/1.1 200 OK\r\nA: " + strings.Repeat("a", 128<<10) + "\r\n\r\n", "", "too long", 0, 0},
		"longest body":        {"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n12345678", "12345678", "", 200, 1},
		"body too long":       {"HTTP/1.1 401 Unauthorized\r\nContent-Length: 9\r\n\r\n123456789", "-", "too large", 401, 0},
		"chunks too long":     {"HTTP/1.1 401 x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n123456789\r\n", "-", "too large", 401, 0},
		"endless":             {"HTTP/1.1 401 x\r\n\r\n123456789", "-", "too large", 401, 0},
		"truncated":           {"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n1234", "-", "unexpected EOF", 0, 0},
		"not HTTP":            {"SSH-2.0-secret\r\n\r\n", "", "response header of ", 0, 0},
		"not a header line":   {"HTTP/1.1 200 OK\r\nsecret\r\n\r\n", "", "malformed line", 0, 0},
		"not a header value":  {"HTTP/1.1 200 OK\r\nA: secret\x01\r\n\r\n", "", "malformed line", 0, 0},
		"HTTP/secret":         {"HTTP/secret 200 OK\r\n\r\n", "", "malformed line", 0, 0},
		"truncated header":    {"HTTP/1.1 200 OK\r\nA: b", "", "EOF", 0, 0},
		"unrequested 101":     {"HTTP/1.1 101 Switching Protocols\r\n\r\n", "", "unrequested 101", 0, 0},
		"nothing":             {"", "", "no response: EOF", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, Options{}, func(s *session) {
				s.request()
				s.say(c.response)
				if c.kept > 0 || c.body == "ok" {
					s.closed()
				}
			})
			call := get("/")
			call.maxBodyBytes = 8
			status, body, err := call.do(failsafe(t), transport)
			switch {
			case c.err == "" && (err != nil || status != c.status || body != c.body):
				t.Errorf("got %d %q, error %v", status, body, err)
			case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "secret")):
				t.Errorf("got error %v, want %q", err, c.err)
			case c.status != 0 && status != c.status:
				t.Errorf("got status %d", status)
			}
			if open := transport.OpenConns(); open != c.kept {
				t.Errorf("%d connections are open, want %d", open, c.kept)
			}
		})
	}
}

// TestDoPanic has the reader of a body panic: its connection is closed, and no longer counted.
func TestDoPanic(t *testing.T) {
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say(ok)
		s.closed()
	})
	req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
	req.SetRequestURI("/")
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic is lost")
			}
		}()
		_ = transport.Do(failsafe(t), req, resp, func(io.Reader) error { panic("in a reader") })
	}()
	if open := transport.OpenConns(); open != 0 {
		t.Errorf("%d connections are open", open)
	}
}

// A connection that the replica has closed is not used; where it closes it on the request, that is repeated once over a new
// connection, unless it had a new one.
func TestDoAfterStaleConnection(t *testing.T) {
	for name, c := range map[string]struct {
		options Options
		failing int // connections that end on their second request, or on their first one if it is not the first connection
		fails   bool
	}{
		"repeated":       {Options{StaleTimeout: time.Minute}, 1, false},
		"repeated once":  {Options{StaleTimeout: time.Minute}, 2, true},
		"after too long": {Options{StaleTimeout: time.Nanosecond}, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, c.options, func(s *session) {
				if s.n == 1 {
					s.request()
					s.say(ok)
				}
				if _, _, more := s.request(); more && s.n > c.failing {
					s.say(ok)
					s.closed()
				}
			})
			if _, _, err := get("/first").do(failsafe(t), transport); err != nil {
				t.Fatal(err)
			}
			if _, _, err := get("/second").do(failsafe(t), transport); (err != nil) != c.fails {
				t.Errorf("error %v", err)
			}
		})
	}
}

// Whatever a short request is doing when its context ends, it ends with the context's cause, and the connection is closed.
func TestCancelDo(t *testing.T) {
	for name, response := range map[string]string{
		"before the header": "",
		"in the header":     "HTTP/1.1 200 OK\r\nContent-",
		"in the body":       "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
		"in a chunk":        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
	} {
		overBoth(t, name, func(t *testing.T, ln net.Listener, scheme string, o Options) {
			ctx, cancel := context.WithCancelCause(failsafe(t))
			closed := make(chan struct{})
			transport := replicaOn(t, ln, scheme, o, func(s *session) {
				s.request()
				s.say(response)
				cancel(errLeft)
				s.closed()
				close(closed)
			})
			if _, _, err := get("/").do(ctx, transport); err != errLeft {
				t.Errorf("error %v, want the cause", err)
			}
			<-closed
			if open := transport.OpenConns(); open != 0 {
				t.Errorf("%d connections are open", open)
			}
			if _, _, err := get("/").do(ctx, transport); err != errLeft {
				t.Errorf("after the end: error %v, want the cause", err)
			}
		})
	}
}

func TestDoAfterClose(t *testing.T) {
	transport := replica(t, Options{}, always(ok))
	if _, _, err := get("/").do(failsafe(t), transport); err != nil {
		t.Fatal(err)
	}
	transport.Close()
	refused := (*ConnectError)(nil)
	if _, _, err := get("/").do(failsafe(t), transport); !errors.As(err, &refused) || transport.OpenConns() != 0 {
		t.Errorf("error %v, %d connections", err, transport.OpenConns())
	}
}

// More requests than fasthttp allows by default are in flight at once.
func TestNoLimitOfConnections(t *testing.T) {
	const requests = fasthttp.DefaultMaxConnsPerHost + 10
	var arrived atomic.Int64
	all := make(chan struct{})
	transport := replica(t, Options{ConnectTimeout: time.Minute}, func(s *session) {
		s.request()
		if arrived.Add(1) == 2*requests {
			close(all)
		}
		select {
		case <-all:
			s.say(ok)
		case <-time.After(time.Minute):
			t.Errorf("%d of %d requests have come", arrived.Load(), 2*requests)
		}
	})
	var sent sync.WaitGroup
	for range requests {
		sent.Go(func() {
			resp, err := send(failsafe(t), transport, "hello")
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		})
		sent.Go(func() {
			if _, _, err := get("/").do(failsafe(t), transport); err != nil {
				t.Error(err)
			}
		})
	}
	sent.Wait()
}

// The goroutines of a closed transport end within its idle timeout.
func TestCleanerEnds(t *testing.T) {
	before := goleak.IgnoreCurrent()
	server := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(ln) })
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: ln.Addr().String()}, IdleTimeout: 50 * time.Millisecond})
	sendBody(t, transport, "hello")
	if _, _, err := get("/").do(failsafe(t), transport); err != nil {
		t.Error(err)
	}
	transport.Close()
	server.Close()
	serving.Wait()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := goleak.Find(before)
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}
