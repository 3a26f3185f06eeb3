package http1_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/proxy"
)

// leaving is a handler's view of a client that leaves.
type leaving struct {
	*client
	left   <-chan time.Duration // after which time its context ended
	called *bool                // what context.AfterFunc calls
}

// leaves starts a request that is served until its client has left.
func leaves(t *testing.T, request string, begin noting) leaving {
	left, called := make(chan time.Duration, 1), new(bool)
	s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
		begun := time.Now()
		context.AfterFunc(r.Context(), func() { *called = true })
		begin(w, r, nil)
		select {
		case <-r.Context().Done():
			left <- time.Since(begun)
			if err := context.Cause(r.Context()); err != context.Canceled {
				t.Errorf("the cause is %v", err)
			}
		case <-time.After(time.Hour):
			left <- time.Hour
		}
	})
	c := s.dial()
	c.say(request)
	return leaving{c, left, called}
}

func TestClientsThatLeaveAreSeen(t *testing.T) {
	nothing := func(http.ResponseWriter, *http.Request, func(string, ...any)) {}
	all := func(_ http.ResponseWriter, r *http.Request, _ func(string, ...any)) {
		_, _ = io.Copy(io.Discard, r.Body)
	}
	chunk := func(w http.ResponseWriter, _ *http.Request, _ func(string, ...any)) {
		body("hello")(w)
		flush(w)
	}
	for name, f := range map[string]struct {
		request string
		begin   noting
		wait    time.Duration
		atMost  time.Duration
	}{
		"at once":                  {get, nothing, 0, 3 * time.Millisecond},
		"within the calm":          {get, nothing, 2 * time.Millisecond, 3 * time.Millisecond},
		"while it is served":       {get, nothing, time.Second, time.Second},
		"between chunks":           {get, chunk, time.Second, time.Second},
		"in upload":                {post + "Content-Length: 9\r\n\r\nhello", all, time.Second, time.Second},
		"in upload, chunked":       {postChunked + "9\r\nhello", all, time.Second, time.Second},
		"after upload":             {post + "Content-Length: 5\r\n\r\nhello", all, time.Second, time.Second},
		"after upload, chunked":    {postChunked + chunks("hello", 2), all, time.Second, time.Second},
		"before it was asked":      {expecting, all, time.Second, time.Second},
		"after it was asked":       {expecting + "hello", all, time.Second, time.Second},
		"with nobody reading more": {post + "Content-Length: 9\r\n\r\nhello", nothing, time.Second, time.Hour}, // as with net/http
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				c := leaves(t, f.request, f.begin)
				time.Sleep(f.wait)
				c.Close()
				after := <-c.left
				synctest.Wait()
				if after < f.wait || after > f.atMost || !*c.called {
					t.Errorf("seen after %v, AfterFunc called: %v", after, *c.called)
				}
			})
		})
	}
}

// A client that asks for more before it has its answer has not left.
func TestPipelinedBytesAreNotLost(t *testing.T) {
	for _, wait := range []time.Duration{0, time.Millisecond, 3 * time.Millisecond, aMoment} {
		for _, n := range []int{1, 2, len(get)} {
			t.Run(fmt.Sprint(wait, n), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
						time.Sleep(time.Second)
						if err := r.Context().Err(); err != nil {
							t.Error(err)
						}
						hello(w, r)
					})
					c := s.dial()
					c.say(get)
					time.Sleep(wait)
					c.say(get[:n])
					time.Sleep(time.Second)
					c.say(get[n:])
					time.Sleep(time.Second)
					c.has(2, "hello", false)
				})
			})
		}
	}
}

func TestRequestsEndWithTheirHandler(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var contexts []context.Context
		var bodies []io.ReadCloser
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			contexts, bodies = append(contexts, r.Context()), append(bodies, r.Body)
			if addr, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr); addr == nil || addr.String() != "127.0.0.1:80" {
				t.Errorf("the local address is %v", addr)
			}
			if r.RemoteAddr != "127.0.0.1:8080" {
				t.Errorf("the remote address is %v", r.RemoteAddr)
			}
			if r.URL.Path == "/panic" {
				panic(http.ErrAbortHandler)
			}
			hello(w, r)
		})
		c := s.dial()
		c.say(post + "Content-Length: 5\r\n\r\nhello")
		c.say(postChunked + chunks("hello", 1))
		c.say("POST /panic HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello")
		c.has(2, "hello", true)
		for i, ctx := range contexts {
			if ctx.Err() != context.Canceled {
				t.Errorf("request %d: %v", i, ctx.Err())
			}
			if n, err := bodies[i].Read(make([]byte, 1)); n > 0 || err == nil {
				t.Errorf("the body of request %d is read after its end: %d, %v", i, n, err)
			}
		}
		if len(contexts) != 3 {
			t.Errorf("%d requests", len(contexts))
		}
	})
}

func TestFailedWritesEndTheRequest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ended := false
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1)) // so that nobody watches
			time.Sleep(time.Second)
			c := http.NewResponseController(w)
			if err := c.Flush(); err == nil {
				t.Error("it was written to a client that has left")
			}
			ended = r.Context().Err() != nil
		})
		c := s.dial()
		c.say(post + "Content-Length: 5\r\n\r\nhel")
		c.Close()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !ended {
			t.Error("the request goes on")
		}
	})
}

// What a handler asks for a request is not for the next.
func TestDeadlinesEndWithTheirRequest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			c := http.NewResponseController(w)
			if r.URL.Path == "/p" {
				_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
				_, _ = io.Copy(io.Discard, r.Body)
				_ = c.SetWriteDeadline(time.Now().Add(10 * time.Second))
			}
			time.Sleep(5 * time.Second)
			if r.URL.Path != "/p" {
				time.Sleep(20 * time.Second)
			}
			if err := r.Context().Err(); err != nil {
				t.Errorf("%s: %v", r.URL.Path, err)
			}
			hello(w, r)
		})
		c := s.dial()
		for i := range 3 {
			c.say(post + "Content-Length: 5\r\n\r\nhello")
			time.Sleep(5 * time.Second)
			c.has(2*i+1, "hello", false)
			time.Sleep(time.Minute)
			c.say(get)
			time.Sleep(25 * time.Second)
			c.has(2*i+2, "hello", false)
		}
	})
}

// A deadline that was for the body does not outlast it, as with net/http's server.
func TestBodysDeadlineIsNoneForTheAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(10 * time.Second))
			_, _ = io.Copy(io.Discard, r.Body)
			time.Sleep(time.Minute)
			if err := r.Context().Err(); err != nil {
				t.Error(err)
			}
			hello(w, r)
		})
		c := s.dial()
		c.say(post + "Content-Length: 5\r\n\r\nhello")
		time.Sleep(time.Minute)
		c.has(1, "hello", false)
	})
}

func TestDeadlinesOfHandlersAreKept(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			c := http.NewResponseController(w)
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			begun := time.Now()
			_, err := io.Copy(io.Discard, r.Body)
			if took := time.Since(begun); !errors.Is(err, os.ErrDeadlineExceeded) || took != time.Second {
				t.Errorf("got %v after %v", err, took)
			}
			hello(w, r)
		})
		c := s.dial()
		c.say(post + "Content-Length: 5\r\n\r\nhel")
		time.Sleep(longEnough)
		c.has(1, "Connection: close", true)
	})
}

// A handler's deadlines may be set by others, while it reads, writes and waits.
func TestDeadlinesAreSetConcurrently(t *testing.T) {
	s := httptest.NewUnstartedServer(nil)
	ours := ours(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		var others sync.WaitGroup
		for range 2 {
			others.Go(func() {
				for range 50 {
					_ = c.SetReadDeadline(time.Now().Add(time.Minute))
					_ = c.SetWriteDeadline(time.Now().Add(time.Minute))
				}
			})
		}
		_, _ = io.Copy(w, r.Body)
		flush(w)
		others.Wait()
		time.Sleep(3 * time.Millisecond)
	}))
	ended := make(chan error, 1)
	go func() { ended <- ours.Serve(proxy.LazyDeadlines(s.Listener)) }()
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			transport := new(http.Transport)
			defer transport.CloseIdleConnections()
			for range 20 {
				req, _ := http.NewRequest("POST", "http://"+s.Listener.Addr().String(), strings.NewReader(middle))
				resp, err := transport.RoundTrip(req)
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || string(got) != middle {
					t.Errorf("got %d bytes, %v", len(got), err)
				}
			}
		})
	}
	clients.Wait()
	_ = ours.Close()
	<-ended
}
