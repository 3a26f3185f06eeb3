package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// numbered responds with the number of the connection.
func numbered(s *session) {
	for {
		if _, _, ok := s.request(); !ok {
			return
		}
		s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d", s.n))
	}
}

func TestKeepsConnectionAlive(t *testing.T) {
	transport := replica(t, Options{}, numbered)
	for range 3 {
		if _, body := sendBody(t, transport, "hello"); body != "1" {
			t.Errorf("response on connection %s, want the first one again", body)
		}
	}
	idleConns(t, transport, 1)
}

func TestClosesConnection(t *testing.T) {
	for name, head := range map[string]string{
		"Connection: close":             "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n",
		"close in a list, in capitals":  "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x, CLOSE\r\n\r\n",
		"close in a second field":       "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\nConnection: close\r\n\r\n",
		"HTTP/1.0":                      "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n",
		"no length, so the end is it":   "HTTP/1.1 200 OK\r\n\r\n",
		"no length, despite keep-alive": "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, Options{}, once(head, "ok"))
			resp, body := sendBody(t, transport, "hello")
			if body != "ok" || !resp.Close {
				t.Errorf("body %q, Close %v; want ok, true", body, resp.Close)
			}
			idleConns(t, transport, 0)
		})
	}
	t.Run("because the request says so", func(t *testing.T) {
		asked := make(chan bool, 1)
		transport := replica(t, Options{}, func(s *session) {
			req, _, _ := s.request()
			asked <- req.Close
			s.say(ok)
			s.closed()
		})
		req, _ := http.NewRequestWithContext(failsafe(t), "GET", "http://replica/", nil)
		req.Close = true
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		io.ReadAll(resp.Body)
		if !<-asked {
			t.Error("the replica was not notified")
		}
		idleConns(t, transport, 0)
	})
	t.Run("but not an HTTP/1.0 one that is kept alive", func(t *testing.T) {
		transport := replica(t, Options{}, always("HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"))
		sendBody(t, transport, "hello")
		idleConns(t, transport, 1)
	})
}

// A connection that the replica closed while it was idle is not written to.
func TestDropsConnectionClosedWhileIdle(t *testing.T) {
	closed := make(chan struct{})
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say(ok)
		if s.n == 1 {
			s.Close()
			close(closed)
			return
		}
		s.closed()
	})
	sendBody(t, transport, "hello")
	<-closed
	req, _ := http.NewRequestWithContext(failsafe(t), "POST", "http://replica/", io.NopCloser(strings.NewReader("hello")))
	req.ContentLength = 5
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}

// Bytes that come after a response must not become the next one.
func TestDropsConnectionReadableWhileIdle(t *testing.T) {
	spoke := make(chan struct{})
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say(ok)
		if s.n == 1 {
			<-spoke
			s.say("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
			spoke <- struct{}{}
		}
		s.closed()
	})
	sendBody(t, transport, "hello")
	spoke <- struct{}{}
	<-spoke
	if resp, _ := sendBody(t, transport, "hello"); resp.StatusCode != 200 {
		t.Errorf("status %d: an unsolicited response was accepted", resp.StatusCode)
	}
}

// A held connection carries no other request before its response was accepted.
func TestForbidReuse(t *testing.T) {
	for name, c := range map[string]struct {
		response string
		end      func(*Body)
		kept     int
	}{
		"released before the end":     {ok, func(b *Body) { b.AllowReuse(); io.ReadAll(b) }, 1},
		"released after the end":      {ok, func(b *Body) { io.ReadAll(b); b.AllowReuse() }, 1},
		"released twice":              {ok, func(b *Body) { io.ReadAll(b); b.AllowReuse(); b.AllowReuse() }, 1},
		"released without a body":     {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", func(b *Body) { b.AllowReuse() }, 1},
		"released, but not read":      {ok, func(b *Body) { b.AllowReuse() }, 0},
		"released after a part":       {ok, func(b *Body) { io.ReadFull(b, make([]byte, 1)); b.AllowReuse() }, 0},
		"not released, read":          {ok, func(b *Body) { io.ReadAll(b) }, 0},
		"not released, without body":  {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", func(*Body) {}, 0},
		"not released, read to close": {"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok", func(b *Body) { io.ReadAll(b) }, 0},
		"more behind the body":        {ok + "x", func(b *Body) { io.ReadAll(b); b.AllowReuse() }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, Options{}, func(s *session) {
				s.request()
				s.say(c.response)
				if !strings.Contains(c.response, "close") {
					s.closed()
				}
			})
			resp, err := send(failsafe(t), transport, "hello")
			if err != nil {
				t.Fatal(err)
			}
			body := resp.Body.(*Body)
			body.ForbidReuse()
			c.end(body)
			body.Close()
			body.AllowReuse()
			idleConns(t, transport, c.kept)
		})
	}
	t.Run("context canceled while held", func(t *testing.T) {
		transport := replica(t, Options{}, always(ok))
		ctx, cancel := context.WithCancel(failsafe(t))
		resp, err := send(ctx, transport, "hello")
		if err != nil {
			t.Fatal(err)
		}
		body := resp.Body.(*Body)
		body.ForbidReuse()
		io.ReadAll(body)
		cancel()
		body.AllowReuse()
		body.Close()
		idleConns(t, transport, 0)
	})
}

// stale responds to the first request on the first connection, and drops it when the second has come.
func stale(after func(*session)) func(*session) {
	return func(s *session) {
		s.request()
		s.say(ok)
		if _, _, more := s.request(); more && s.n == 1 {
			after(s)
			return
		}
		s.closed()
	}
}

func TestStaleError(t *testing.T) {
	for name, fail := range map[string]func(*session){
		"closed": func(*session) {},
		"reset":  func(s *session) { s.Conn.(*net.TCPConn).SetLinger(0) },
	} {
		for _, size := range []int{5, 1 << 20} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				transport := replica(t, Options{StaleTimeout: time.Minute}, stale(fail))
				sendBody(t, transport, "first")
				_, err := send(failsafe(t), transport, strings.Repeat("x", size))
				if stale := (*StaleError)(nil); !errors.As(err, &stale) {
					t.Errorf("error %v, want a StaleError", err)
				}
				idleConns(t, transport, 0)
			})
		}
	}
}

// Once the request was written, the replica may have worked on it.
func TestStaleErrorTimeLimit(t *testing.T) {
	transport := replica(t, Options{StaleTimeout: time.Nanosecond}, stale(func(*session) {}))
	sendBody(t, transport, "first")
	_, err := send(failsafe(t), transport, "hello")
	if stale := (*StaleError)(nil); err == nil || errors.As(err, &stale) {
		t.Errorf("error %v, want one that is not a StaleError", err)
	}
}

// A request that was not written whole cannot have been worked on, however timeoutErr
// that shows.
func TestStaleErrorOfUnfinishedUpload(t *testing.T) {
	transport := replica(t, Options{StaleTimeout: time.Nanosecond}, func(s *session) {
		s.request()
		s.say(ok)
		s.br.ReadString('\n') // and no more of 16 MiB
		s.Conn.(*net.TCPConn).SetLinger(0)
	})
	sendBody(t, transport, "first")
	_, err := send(failsafe(t), transport, strings.Repeat("x", 16<<20))
	if stale := (*StaleError)(nil); !errors.As(err, &stale) {
		t.Errorf("error %v, want a StaleError", err)
	}
}

// Idle connections stay as they are beside one that a request has for itself.
func TestRequestCloseUsesNewConnection(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	transport := replica(t, Options{MaxConns: 4}, func(s *session) {
		for n := 1; ; n++ {
			if _, _, ok := s.request(); !ok {
				return
			}
			if n == 1 {
				arrived <- struct{}{}
				<-release
			}
			s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d", s.n))
		}
	})
	var waiting sync.WaitGroup
	for range 3 {
		waiting.Go(func() {
			resp, err := send(failsafe(t), transport, "hello")
			if err != nil {
				t.Error(err)
				return
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		})
		<-arrived
	}
	close(release)
	waiting.Wait()
	idleConns(t, transport, 3)
	own := func() (*http.Response, error) {
		req, _ := http.NewRequestWithContext(failsafe(t), "POST", "http://replica/", strings.NewReader("hello"))
		req.Close = true
		return transport.RoundTrip(req)
	}
	go func() { <-arrived }()
	resp, err := own()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := own(); !isBusy(err) {
		t.Errorf("a fifth connection of 4: error %v", err)
	}
	if body, err := io.ReadAll(resp.Body); string(body) != "4" || err != nil {
		t.Errorf("response on connection %q, error %v; want a new one", body, err)
	}
	resp.Body.Close()
	idleConns(t, transport, 3)
	if n := transport.OpenConns(); n != 3 {
		t.Errorf("%d connections are open, want 3", n)
	}
	if _, body := sendBody(t, transport, "hello"); body > "3" {
		t.Errorf("response on connection %s, want one of the idle ones", body)
	}
}

func isBusy(err error) bool {
	refused := (*ConnectError)(nil)
	return errors.As(err, &refused) && refused.MaxConnsReached()
}

func TestNotStaleError(t *testing.T) {
	for name, fail := range map[string]func(*session){
		"a new connection that is closed":     func(s *session) {},
		"a new connection that is reset":      func(s *session) { s.Conn.(*net.TCPConn).SetLinger(0) },
		"a response that began":               func(s *session) { s.say("H") },
		"an interim response":                 func(s *session) { s.say("HTTP/1.1 103 Early Hints\r\n\r\n") },
		"a response that is not HTTP":         func(s *session) { s.say("SSH-2.0-x\r\n") },
		"a header that ends before it should": func(s *session) { s.say("HTTP/1.1 200 OK\r\nA: b\r\n") },
	} {
		t.Run(name, func(t *testing.T) {
			var attempts atomic.Int32
			transport := replica(t, Options{}, func(s *session) {
				attempts.Add(1)
				s.request()
				fail(s)
			})
			_, err := send(failsafe(t), transport, "hello")
			refused, stale := (*ConnectError)(nil), (*StaleError)(nil)
			if err == nil || errors.As(err, &refused) || errors.As(err, &stale) {
				t.Errorf("error %v, want neither a ConnectError nor a StaleError", err)
			}
			idleConns(t, transport, 0)
			if n := attempts.Load(); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}
