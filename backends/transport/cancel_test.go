package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"
)

var errLeft = errors.New("the client left")

// Whatever a request is doing when its context ends, it ends with the context's
// cause, and the replica sees the connection close: it would compute an unused response.
func TestCancel(t *testing.T) {
	const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
	large := strings.Repeat("x", 16<<20)
	for name, f := range map[string]struct {
		body, response string
	}{
		"while uploading":           {large, ""},
		"waiting for the header":    {"hello", ""},
		"inside the header":         {"hello", "HTTP/1.1 200 OK\r\nContent-"},
		"after an interim response": {"hello", "HTTP/1.1 100 Continue\r\n\r\n"},
		"between chunks":            {"hello", chunked},
		"inside a size":             {"hello", chunked + "1"},
		"inside a chunk":            {"hello", chunked + "5\r\nhe"},
		"before the last line":      {"hello", chunked + "0\r\n"},
		"inside a counted body":     {"hello", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"},
		"inside an endless body":    {"hello", "HTTP/1.1 200 OK\r\n\r\nhello"},
		"early response, uploading": {large, chunked},
	} {
		overBoth(t, name, func(t *testing.T, ln net.Listener, scheme string, o Options) {
			ctx, cancel := context.WithCancelCause(failsafe(t))
			closed := make(chan struct{})
			transport := replicaOn(t, ln, scheme, o, func(s *session) {
				if f.body == large {
					s.br.ReadString('\n')
				} else {
					s.request()
				}
				s.say(f.response)
				cancel(errLeft)
				s.closed()
				close(closed)
			})
			resp, err := send(ctx, transport, f.body)
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			if err != errLeft {
				t.Errorf("error %v, want the cause", err)
			}
			<-closed
			idleConns(t, transport, 0)
		})
	}
}

func TestCancelBefore(t *testing.T) {
	transport := replica(t, Options{}, always(ok))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errLeft)
	if _, err := send(ctx, transport, "hello"); err != errLeft {
		t.Errorf("error %v, want the cause", err)
	}
	idleConns(t, transport, 0)
}

// net/http cancels a request's context when its handler returns: the connection
// is by then in the pool, or carries the next request.
func TestCancelAfterEnd(t *testing.T) {
	overBoth(t, "", func(t *testing.T, ln net.Listener, scheme string, o Options) {
		transport := replicaOn(t, ln, scheme, o, numbered)
		for range 10 {
			ctx, cancel := context.WithCancel(failsafe(t))
			resp, err := send(ctx, transport, "hello")
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			cancel()
			resp.Body.Close()
			if string(body) != "1" || err != nil {
				t.Errorf("body %q, error %v", body, err)
			}
		}
		idleConns(t, transport, 1)
	})
}

// When the context has begun to close the socket, it may do so at any moment:
// the connection must not go back, even if its response came whole.
func TestCanceledConnectionIsNotPooled(t *testing.T) {
	resp, use, err := readOver(&wire{bytes: []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"), step: 100}, "GET")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.(*Body).stop = func() bool { return false }
	if body, err := io.ReadAll(resp.Body); string(body) != "ok" || err != nil {
		t.Errorf("body %q, error %v", body, err)
	}
	if use.kept != 0 || use.closed != 1 {
		t.Errorf("returned to the pool %d times, closed %d times", use.kept, use.closed)
	}
}

// Cancelled at the very moment of the end, a connection is closed or reused, but
// never both.
func TestCancelAtEnd(t *testing.T) {
	overBoth(t, "", func(t *testing.T, ln net.Listener, scheme string, o Options) {
		transport := replicaOn(t, ln, scheme, o, always(ok))
		for range 200 {
			ctx, cancel := context.WithCancelCause(failsafe(t))
			go cancel(errLeft)
			resp, err := send(ctx, transport, "hello")
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			if err != nil && err != errLeft {
				t.Fatal(err)
			}
			sendBody(t, transport, "again")
		}
		idleConns(t, transport, 1)
	})
}

func TestCancelHandshake(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(failsafe(t))
	closed := make(chan struct{})
	transport := replicaOn(t, ln, "https", Options{ConnectTimeout: time.Hour}, func(s *session) {
		s.br.ReadByte() // its hello
		cancel(errLeft)
		s.closed()
		close(closed)
	})
	if _, err := send(ctx, transport, "hello"); err != errLeft {
		t.Errorf("error %v, want the cause", err)
	}
	<-closed
	idleConns(t, transport, 0)
}

func TestHandshakeTimeout(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	transport := replicaOn(t, ln, "https", Options{ConnectTimeout: 20 * time.Millisecond}, (*session).closed)
	_, err = send(failsafe(t), transport, "hello")
	if refused := (*ConnectError)(nil); !errors.As(err, &refused) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	idleConns(t, transport, 0)
}

func TestHTTPClientTimeout(t *testing.T) {
	transport := replica(t, Options{}, func(s *session) { s.closed() })
	client := http.Client{Transport: transport, Timeout: 20 * time.Millisecond}
	_, err := client.Get("http://replica/")
	if timeout := net.Error(nil); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("error %v, want a timeout", err)
	}
	idleConns(t, transport, 0)
}

func TestCloseTransport(t *testing.T) {
	asked := make(chan struct{}, 2)
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			io.WriteString(w, "a beginning")
			w.(http.Flusher).Flush()
		}
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	defer replica.Close()
	u, _ := url.Parse(replica.URL)
	tr := New(Options{URL: u, IdleTimeout: 20 * time.Millisecond})
	request := func(path string) *http.Request {
		req, _ := http.NewRequestWithContext(context.Background(), http.MethodGet, replica.URL+path, nil)
		return req
	}
	resp, err := tr.RoundTrip(request("/stream"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	waiting := make(chan error)
	go func() {
		_, err := tr.RoundTrip(request("/silence"))
		waiting <- err
	}()
	<-asked
	<-asked
	if n := tr.OpenConns(); n != 2 {
		t.Errorf("%d connections are open, want 2", n)
	}
	tr.Close()
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the stream came to its end")
	}
	if err := <-waiting; err == nil {
		t.Error("a response came over a closed connection")
	}
	resp.Body.Close()
	var refused *ConnectError
	if _, err := tr.RoundTrip(request("/")); !errors.As(err, &refused) {
		t.Errorf("after Close: %v, want a ConnectError", err)
	}
	for end := time.Now().Add(30 * time.Second); tr.OpenConns() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d connections are still counted", tr.OpenConns())
		}
	}
	tr.Close() // a second time
}
