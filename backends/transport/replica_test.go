package transport

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// The goroutine that closes idle connections ends when it finds none open: see TestCleanerEnds.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m, ignoreCleaner) }

var ignoreCleaner = goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner")

// session is one connection as a replica sees it. Reading and writing nothing
// but bytes, it can misbehave in every way.
type session struct {
	net.Conn
	t  testing.TB
	br *bufio.Reader

	over <-chan struct{} // closed when the test ends
	n    int             // 1 for the first connection that the replica accepted

	asked []*http.Request // so far
	said  bytes.Buffer    // everything
}

// request reads one request, and its body whole. ok is false when the other side
// closed instead.
func (s *session) request() (req *http.Request, body string, ok bool) {
	req, err := http.ReadRequest(s.br)
	if err != nil {
		return nil, "", false
	}
	b, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, "", false
	}
	s.mayBeReused()
	s.asked = append(s.asked, req)
	return req, string(b), true
}

// mayBeReused fails the test when another request comes on a connection on which
// not every response came to its end, or on which more than the responses was sent. It
// holds for every test here, by net/http's reading of what was sent.
func (s *session) mayBeReused() {
	br := bufio.NewReader(bytes.NewReader(s.said.Bytes()))
	for i, req := range s.asked {
		resp, err := http.ReadResponse(br, req)
		for err == nil && resp.StatusCode < 200 {
			resp, err = http.ReadResponse(br, req)
		}
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
		}
		if err != nil || resp.Close {
			s.t.Errorf("a connection was used again after response %d, which does not allow it: error %v", i+1, err)
			return
		}
	}
	if rest, _ := io.ReadAll(br); len(rest) > 0 {
		s.t.Errorf("a connection was used again with %.100q left on it", rest)
	}
}

// say writes each part on its own.
func (s *session) say(parts ...string) {
	for _, p := range parts {
		s.said.WriteString(p)
		io.WriteString(s.Conn, p) // an error shows at the other end
	}
}

// tcp is the socket, under TLS or not.
func (s *session) tcp() *net.TCPConn {
	if secured, ok := s.Conn.(*tls.Conn); ok {
		return secured.NetConn().(*net.TCPConn)
	}
	return s.Conn.(*net.TCPConn)
}

// closed waits for the other side to close.
func (s *session) closed() {
	io.Copy(io.Discard, s.br)
}

// replica serves script to every connection and returns a transport to it. A
// connection is closed when its script returns.
func replica(t testing.TB, o Options, script func(*session)) *Transport {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return replicaOn(t, ln, "http", o, script)
}

func replicaOn(t testing.TB, ln net.Listener, scheme string, o Options, script func(*session)) *Transport {
	t.Helper()
	var running sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	over := make(chan struct{})
	running.Go(func() {
		for n := 1; ; n++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			running.Go(func() {
				defer c.Close()
				script(&session{Conn: c, t: t, br: bufio.NewReader(c), over: over, n: n})
			})
		}
	})
	if o.URL == nil {
		o.URL = &url.URL{Scheme: scheme, Host: ln.Addr().String()}
	}
	if o.IdleTimeout == 0 {
		o.IdleTimeout = 2 * time.Second
	}
	transport := New(o)
	t.Cleanup(func() {
		close(over)
		transport.CloseIdleConnections()
		ln.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return transport
}

// always responds to every request on a connection with the same bytes.
func always(response string) func(*session) {
	return func(s *session) {
		for {
			if _, _, ok := s.request(); !ok {
				return
			}
			s.say(response)
		}
	}
}

// once responds to one request and closes.
func once(parts ...string) func(*session) {
	return func(s *session) {
		s.request()
		s.say(parts...)
	}
}

// failsafe is a context that ends long after any test should have, on a busy machine with the race detector too.
func failsafe(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeoutCause(t.Context(), 2*time.Minute, fmt.Errorf("%s hangs", t.Name()))
	t.Cleanup(cancel)
	return ctx
}

// send posts body, or with an empty one asks with GET.
func send(ctx context.Context, t *Transport, body string) (*http.Response, error) {
	method, from := http.MethodGet, io.Reader(nil)
	if body != "" {
		method, from = http.MethodPost, strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://replica/v1/x", from)
	if err != nil {
		return nil, err
	}
	return t.RoundTrip(req)
}

// sendBody sends a body and reads the whole response.
func sendBody(t testing.TB, transport *Transport, body string) (*http.Response, string) {
	t.Helper()
	resp, err := send(failsafe(t), transport, body)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// idleConns checks that as many connections as given are open, all of them idle.
func idleConns(t testing.TB, transport *Transport, want int) {
	t.Helper()
	p := &transport.requests
	if open, idle := p.open.Load(), p.host.IdleConnsCount(); open != int64(want) || idle != want {
		t.Errorf("%d connections open, %d idle; want %d", open, idle, want)
	}
}
