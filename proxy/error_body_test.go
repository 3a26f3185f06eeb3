package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

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
	for _, status := range []string{"500 Internal Server Error", "503 Service Unavailable"} {
		t.Run(status, func(t *testing.T) {
			t.Parallel()
			f := serve(t, nil, &replica{script: dripError(status)}, &replica{script: always(answered("200 OK", whole))})
			select {
			case got := <-f.background(askWhole):
				if got.body != whole {
					t.Errorf("got %+v", got)
				}
			case <-time.After(failsafe):
				t.Fatal("the request waits for the rest of an error")
			}
		})
	}
	t.Run("in a stream that has begun", func(t *testing.T) {
		t.Parallel()
		quiet := func(s *session) {
			s.request()
			s.say(sseHead)
			for range 20 {
				s.say(chunk(": keep-alive\n\n"))
				time.Sleep(10 * time.Millisecond)
			}
		}
		f := serve(t, func(o *Options) { o.Keepalive = 20 * time.Millisecond }, &replica{script: quiet}, &replica{script: dripError("400 Bad Request")})
		select {
		case got := <-f.background(askStream):
			if !strings.Contains(got.body, "replica_failed") {
				t.Errorf("got %+v", got)
			}
		case <-time.After(failsafe):
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
				if n := f.proxy.heldWhole.Load(); n < size || n > 2*size {
					t.Errorf("%d bytes are charged", n)
				}
				close(goOn)
				if fails {
					if got := <-done; got.status != http.StatusInternalServerError || len(got.body) < size {
						t.Errorf("got %d with %d bytes", got.status, len(got.body))
					}
				}
				eventually(t, "nothing is charged", func() bool { return f.proxy.heldWhole.Load() == 0 })
			})
		}
	}
}

func TestErrorBodyWithoutMemory(t *testing.T) {
	for name, c := range map[string]struct{ ask, says string }{
		"response": {askWhole, answered("503 Service Unavailable", errorJSON("no"))},
		"event":    {askStream, streamed(strings.Replace(dead, "500", "503", 1), doneLine)},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := &replica{script: always(c.says)}, &replica{script: always(c.says)}
			f := serve(t, nil, first, second)
			f.proxy.heldWhole.Add(heldWholeTotal)
			resp, got := f.post("/v1/chat/completions", c.ask)
			if resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(got, "the replica answered Service Unavailable") {
				t.Errorf("got %d, %q", resp.StatusCode, got)
			}
			if len(second.requests()) != 1 {
				t.Error("no other backend was asked")
			}
			if n := f.proxy.heldWhole.Add(-heldWholeTotal); n != 0 {
				t.Errorf("%d bytes are still charged", n)
			}
		})
	}
}
