package transport

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// numbered answers with the number of the connection.
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
		if _, body := answer(t, transport, "hello"); body != "1" {
			t.Errorf("answered on connection %s, want the first one again", body)
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
			resp, body := answer(t, transport, "hello")
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
			t.Error("the replica was not told")
		}
		idleConns(t, transport, 0)
	})
	t.Run("but not an HTTP/1.0 one that is kept alive", func(t *testing.T) {
		transport := replica(t, Options{}, always("HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"))
		answer(t, transport, "hello")
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
	answer(t, transport, "hello")
	<-closed
	req, _ := http.NewRequestWithContext(failsafe(t), "POST", "http://replica/", io.NopCloser(strings.NewReader("hello")))
	req.ContentLength = 5 // and no GetBody: a second attempt is impossible
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}

// Bytes that come after an answer must not become the next one.
func TestDropsConnectionThatSpokeWhileIdle(t *testing.T) {
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
	answer(t, transport, "hello")
	spoke <- struct{}{}
	<-spoke
	if resp, _ := answer(t, transport, "hello"); resp.StatusCode != 200 {
		t.Errorf("status %d: an answer nobody asked for was taken", resp.StatusCode)
	}
}

// stale answers the first request on the first connection, and drops it when the second has come.
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

func TestRetriesStaleConnectionOnce(t *testing.T) {
	for name, fail := range map[string]func(*session){
		"closed": func(*session) {},
		"reset":  func(s *session) { s.Conn.(*net.TCPConn).SetLinger(0) },
	} {
		for _, size := range []int{5, 1 << 20} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				transport := replica(t, Options{}, stale(fail))
				answer(t, transport, "first")
				if _, body := answer(t, transport, strings.Repeat("x", size)); body != "ok" {
					t.Errorf("body %q", body)
				}
			})
		}
	}
}

// The replica closes all its connections when one of them sees a second request:
// the others would fail as that one did.
func TestRetryTakesNewConnection(t *testing.T) {
	arrived, reply := make(chan struct{}), make(chan struct{})
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		if s.n <= 3 {
			arrived <- struct{}{}
			<-reply
		}
		s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d", s.n))
		s.request()
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
	close(reply)
	waiting.Wait()
	idleConns(t, transport, 3)
	if _, body := answer(t, transport, "hello"); body != "4" {
		t.Errorf("second attempt on connection %s, want a new one", body)
	}
	idleConns(t, transport, 1)
}

func TestDoesNotRetry(t *testing.T) {
	for name, fail := range map[string]func(*session){
		"a new connection that is closed":     func(s *session) {},
		"a new connection that is reset":      func(s *session) { s.Conn.(*net.TCPConn).SetLinger(0) },
		"an answer that began":                func(s *session) { s.say("H") },
		"an interim answer":                   func(s *session) { s.say("HTTP/1.1 103 Early Hints\r\n\r\n") },
		"an answer that is not HTTP":          func(s *session) { s.say("SSH-2.0-x\r\n") },
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
			if refused := (*ConnectError)(nil); err == nil || errors.As(err, &refused) {
				t.Errorf("error %v, want one that is not a ConnectError", err)
			}
			idleConns(t, transport, 0)
			if n := attempts.Load(); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
	t.Run("a body that cannot be had again", func(t *testing.T) {
		transport := replica(t, Options{}, stale(func(*session) {}))
		answer(t, transport, "first")
		req, _ := http.NewRequestWithContext(failsafe(t), "POST", "http://replica/", io.NopCloser(strings.NewReader("hello")))
		req.ContentLength = 5
		if _, err := transport.RoundTrip(req); err == nil {
			t.Error("no error")
		}
	})
}

// A replica that dies of a request on a kept-alive connection may have seen it,
// so what the caller learns must not say that it had not.
func TestReplicaGoneAtRetryIsNoConnectError(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	transport := replicaOn(t, ln, "http", Options{}, stale(func(*session) { ln.Close() }))
	answer(t, transport, "first")
	_, err = send(failsafe(t), transport, "poison")
	if refused := (*ConnectError)(nil); err == nil || errors.As(err, &refused) {
		t.Errorf("error %v, want one that is not a ConnectError", err)
	}
}
