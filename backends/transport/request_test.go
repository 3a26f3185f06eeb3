package transport

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
)

// heads is a script that passes on the lines of each request's head, the header's
// sorted. Bodies are of two bytes or none.
func heads(to chan<- []string) func(*session) {
	return func(s *session) {
		for {
			var head []string
			for {
				line, err := s.br.ReadString('\n')
				if err != nil {
					return
				}
				if line == "\r\n" {
					break
				}
				head = append(head, strings.TrimSuffix(line, "\r\n"))
			}
			slices.Sort(head[1:])
			if slices.Contains(head, "Content-Length: 2") {
				s.br.Discard(2)
			}
			to <- head
			s.say(ok)
		}
	}
}

func TestRequestHead(t *testing.T) {
	got := make(chan []string, 1)
	transport := replica(t, Options{}, heads(got))
	host := "Host: " + transport.host
	for name, f := range map[string]struct {
		method, url, body string
		header            http.Header
		want              []string
	}{
		"GET has no length": {"GET", "http://x/a", "", nil, []string{"GET /a HTTP/1.1", host}},
		"POST always has":   {"POST", "http://x/a", "", nil, []string{"POST /a HTTP/1.1", "Content-Length: 0", host}},
		"path and query as given": {"POST", "http://x//a/../%2F%3f?q=%20&b", "hi", nil,
			[]string{"POST //a/../%2F%3f?q=%20&b HTTP/1.1", "Content-Length: 2", host}},
		"no path": {"GET", "http://x", "", nil, []string{"GET / HTTP/1.1", host}},
		"headers by name and value": {"GET", "/", "", http.Header{"X-A": {"1", "2"}, "lower": {"\tü "}},
			[]string{"GET / HTTP/1.1", host, "X-A: 1", "X-A: 2", "lower: \tü "}},
		"one framing, whatever the header says": {"POST", "/", "hi",
			http.Header{"Content-Length": {"9"}, "content-length": {"8"}, "Transfer-Encoding": {"chunked"}, "Host": {"y"}, "Connection": {"upgrade"},
				"Trailer": {"z"}},
			[]string{"POST / HTTP/1.1", "Content-Length: 2", host}},
	} {
		t.Run(name, func(t *testing.T) {
			var body io.Reader
			if f.body != "" {
				body = strings.NewReader(f.body)
			}
			req, err := http.NewRequestWithContext(failsafe(t), f.method, f.url, body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header = f.header
			resp, err := transport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got := <-got; !slices.Equal(got, f.want) {
				t.Errorf("got  %q\nwant %q", got, f.want)
			}
		})
	}
}

func TestRefusesRequest(t *testing.T) {
	transport := replica(t, Options{}, func(s *session) {
		if n, _ := io.Copy(io.Discard, s.br); n > 0 && s.n == 1 {
			s.t.Errorf("the replica got %d bytes", n)
		}
	})
	body := func(n int64, from string) func(*http.Request) {
		return func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(strings.NewReader(from)), n }
	}
	for name, spoil := range map[string]func(*http.Request){
		"a line end in a value":    func(r *http.Request) { r.Header = http.Header{"A": {"b\r\nC: d"}} },
		"a bare LF in a value":     func(r *http.Request) { r.Header = http.Header{"A": {"b\nC: d"}} },
		"a NUL in a value":         func(r *http.Request) { r.Header = http.Header{"A": {"\x00"}} },
		"a space in a name":        func(r *http.Request) { r.Header = http.Header{"A B": {"c"}} },
		"a colon in a name":        func(r *http.Request) { r.Header = http.Header{"A:": {"c"}} },
		"an empty name":            func(r *http.Request) { r.Header = http.Header{"": {"c"}} },
		"a space in the method":    func(r *http.Request) { r.Method = "GET /x" },
		"a line end in the query":  func(r *http.Request) { r.URL.RawQuery = "a\r\nB: c" },
		"a path without a slash":   func(r *http.Request) { r.URL.Path = "x" },
		"a body of unknown length": body(-1, "x"),
		"a body without a length":  body(0, "x"),
	} {
		t.Run(name, func(t *testing.T) {
			req, _ := http.NewRequestWithContext(failsafe(t), "POST", "/", nil)
			spoil(req)
			if _, err := transport.RoundTrip(req); !errors.Is(err, ErrInvalidRequest) {
				t.Errorf("error %v, want ErrInvalidRequest", err)
			}
			idleConns(t, transport, 0)
		})
	}
}

// A body of another length than it said leaves half a request on the connection.
func TestBodyLength(t *testing.T) {
	for _, size := range []int64{10, maxInlineBytes * 2} {
		for _, off := range []int64{-1, 1} {
			transport := replica(t, Options{}, (*session).closed)
			req, _ := http.NewRequestWithContext(failsafe(t), "POST", "/", nil)
			req.Body = io.NopCloser(strings.NewReader(strings.Repeat("x", int(size+off))))
			req.ContentLength = size
			if _, err := transport.RoundTrip(req); !errors.Is(err, ErrInvalidRequest) {
				t.Errorf("%d bytes for a Content-Length of %d: error %v, want ErrInvalidRequest", size+off, size, err)
			}
			idleConns(t, transport, 0)
		}
	}
}

// The body goes up unchanged, whatever its size makes of the way it is written.
func TestUpload(t *testing.T) {
	for name, wrap := range map[string]func(*strings.Reader) io.ReadCloser{
		"from memory":   func(r *strings.Reader) io.ReadCloser { return io.NopCloser(r) },
		"from a reader": func(r *strings.Reader) io.ReadCloser { return io.NopCloser(struct{ io.Reader }{r}) },
	} {
		t.Run(name, func(t *testing.T) {
			got := make(chan string, 1)
			transport := replica(t, Options{}, func(s *session) {
				for {
					_, body, more := s.request()
					if !more {
						return
					}
					got <- body
					s.say(ok)
				}
			})
			for _, size := range []int{1, maxJoinedBytes - 200, maxJoinedBytes, maxJoinedBytes + 1, maxInlineBytes, maxInlineBytes + 1, 5 << 20} {
				sent := strings.Repeat("0123456789abcdef", size/16+1)[:size]
				req, _ := http.NewRequestWithContext(failsafe(t), "POST", "/", nil)
				req.Body, req.ContentLength = wrap(strings.NewReader(sent)), int64(size)
				resp, err := transport.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				if size <= maxInlineBytes && !resp.Body.(*Body).Uploaded() {
					t.Errorf("%d bytes arrived, but were not all written, they say", size)
				}
				resp.Body.Close()
				if <-got != sent {
					t.Errorf("%d bytes did not arrive as sent", size)
				}
			}
		})
	}
}

// A replica may refuse an upload before it has read it, and even stop reading.
func TestResponseBeforeUploadEnds(t *testing.T) {
	const refusal = "HTTP/1.1 413 Content Too Large\r\nContent-Length: 8\r\n\r\ntoo long"
	for name, after := range map[string]func(*session){
		"and closes":        func(*session) {},
		"and reads no more": func(s *session) { <-s.over },
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, Options{}, func(s *session) {
				s.Conn.(*net.TCPConn).SetReadBuffer(4 << 10)
				s.br.ReadString('\n')
				s.say(refusal)
				after(s)
			})
			body := &watched{Reader: strings.NewReader(strings.Repeat("x", 16<<20))}
			req, _ := http.NewRequestWithContext(failsafe(t), "POST", "/", nil)
			req.Body, req.ContentLength = body, 16<<20
			resp, err := transport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			if resp.Body.(*Body).Uploaded() {
				t.Error("the whole request was written, they say")
			}
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 413 || string(text) != "too long" || err != nil {
				t.Errorf("%d %q, error %v", resp.StatusCode, text, err)
			}
			if !body.closed {
				t.Error("the body may still be read")
			}
			idleConns(t, transport, 0)
		})
	}
}

// watched is a body that knows whether it was closed, the last thing done with it.
type watched struct {
	io.Reader
	closed bool // no lock: the race detector shall see who looks too early
}

func (w *watched) Close() error {
	w.closed = true
	return nil
}

func TestRequestBodyIsClosed(t *testing.T) {
	refusing := New(Options{URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}})
	silent := replica(t, Options{}, once(""))
	responding := replica(t, Options{}, always(ok))
	for name, f := range map[string]struct {
		transport *Transport
		header    http.Header
	}{
		"no connection":   {refusing, nil},
		"no response":     {silent, nil},
		"invalid request": {responding, http.Header{"A": {"\n"}}},
		"complete":        {responding, nil},
	} {
		t.Run(name, func(t *testing.T) {
			body := &watched{Reader: strings.NewReader("hello")}
			req, _ := http.NewRequestWithContext(failsafe(t), "POST", "/", nil)
			req.Header, req.Body, req.ContentLength = f.header, body, 5
			if resp, err := f.transport.RoundTrip(req); err == nil {
				resp.Body.Close()
			}
			if !body.closed {
				t.Error("not closed")
			}
		})
	}
}
