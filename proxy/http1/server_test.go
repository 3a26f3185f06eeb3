package http1_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/proxy"
	"warmroute/proxy/http1"
)

// running is a server of ours in a bubble, behind the listener that the program has.
type running struct {
	*http1.Server
	*testing.T
	door  *door
	ended chan error
	mu    sync.Mutex
	state []http.ConnState
}

func (r *running) states() []http.ConnState {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.state)
}

// run serves until the test's end.
func run(t *testing.T, change func(*http1.Server), h http.HandlerFunc) *running {
	time.Sleep(sinceMoment)
	r := &running{Server: ours(h), T: t, door: newDoor(), ended: make(chan error, 1)}
	r.ConnState = func(_ net.Conn, s http.ConnState) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.state = append(r.state, s)
	}
	if change != nil {
		change(r.Server)
	}
	go func() { r.ended <- r.Serve(proxy.LazyDeadlines(r.door)) }()
	synctest.Wait()
	t.Cleanup(func() {
		_ = r.Close()
		synctest.Wait()
		if err := <-r.ended; err != http.ErrServerClosed {
			t.Errorf("Serve has returned %v", err)
		}
		time.Sleep(longEnough)
	})
	return r
}

// client is one, with what it has received.
type client struct {
	*end
	t        *testing.T
	mu       sync.Mutex
	received strings.Builder
	gone     bool
}

func (r *running) dial() *client {
	c := &client{end: r.door.dial(), t: r.T}
	go func() {
		b := make([]byte, 4<<10)
		for {
			n, err := c.Read(b)
			c.mu.Lock()
			c.received.Write(b[:n])
			c.gone = err != nil
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	r.Cleanup(func() { c.Close() })
	return c
}

func (c *client) say(s string) {
	_, _ = io.WriteString(c, s)
	synctest.Wait()
}

// answered are the answers so far, and whether the server has closed.
func (c *client) answered() (answers []string, closed bool) {
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return answersIn([]byte(c.received.String())), c.gone
}

// has fails unless there are n answers, the last of which contains text.
func (c *client) has(n int, text string, closed bool) {
	c.t.Helper()
	answers, gone := c.answered()
	if len(answers) != n || n > 0 && !strings.Contains(answers[n-1], text) || gone != closed {
		c.t.Errorf("got %d answers %v, closed %v; want %d, the last with %q, closed %v", len(answers), answers, gone, n, text, closed)
	}
}

func hello(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }

// held is a handler that waits for its context, or for word to go on.
func held(on <-chan struct{}, why *error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
			*why = context.Cause(r.Context())
		case <-on:
		}
		hello(w, r)
	}
}

func bubble(t *testing.T, f func(t *testing.T)) { t.Helper(); synctest.Test(t, f) }

func TestShutdownClosesIdleConnectionsAndWaitsForBusyOnes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		on, why := make(chan struct{}), error(nil)
		s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/last" {
				hello(w, r)
				return
			}
			held(on, &why)(w, r)
		})
		idle, busy := s.dial(), s.dial()
		idle.say("GET /last HTTP/1.1\r\nHost: h\r\n\r\n")
		idle.has(1, "hello", false)
		busy.say(get)
		ended := make(chan error, 1)
		go func() { ended <- s.Shutdown(context.Background()) }()
		idle.has(1, "hello", true)
		time.Sleep(time.Hour)
		busy.has(0, "", false)
		select {
		case err := <-ended:
			t.Fatalf("Shutdown returned %v before the last answer", err)
		default:
		}
		close(on)
		busy.has(1, "Connection: close", true)
		if err := <-ended; err != nil || why != nil {
			t.Errorf("Shutdown returned %v, the request's end %v", err, why)
		}
	})
}

func TestShutdownGivesUpWithItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		on, why := make(chan struct{}), error(nil)
		s := run(t, nil, held(on, &why))
		c := s.dial()
		c.say(get)
		limit, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.Shutdown(limit); err != context.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
		c.has(0, "", false)
		_ = s.Close()
		c.has(0, "", true)
		if why != context.Canceled {
			t.Errorf("the request ended with %v", why)
		}
	})
}

// What is said within five seconds by a connection that has said nothing yet, or
// only the half of it, is answered.
func TestShutdownGivesNewConnectionsAMoment(t *testing.T) {
	for name, before := range map[string]string{"nothing": "", "half a header": get[:10]} {
		for _, wait := range []time.Duration{4 * time.Second, 6 * time.Second} {
			t.Run(fmt.Sprintf("%s, %v", name, wait), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					s := run(t, nil, hello)
					fresh, later := s.dial(), s.dial()
					fresh.say(before)
					later.say(get + before)
					ended := make(chan error, 1)
					go func() { ended <- s.Shutdown(context.Background()) }()
					synctest.Wait()
					time.Sleep(wait)
					fresh.say(get[len(before):])
					later.say(get[len(before):])
					switch {
					case wait < 5*time.Second && before != "":
						fresh.has(1, "Connection: close", true)
						later.has(2, "Connection: close", true)
					case wait < 5*time.Second:
						fresh.has(1, "Connection: close", true)
						later.has(1, "hello", true)
					case before != "":
						fresh.has(1, "400 Bad Request", true)
						later.has(2, "400 Bad Request", true)
					default:
						fresh.has(0, "", true)
						later.has(1, "hello", true)
					}
					if err := <-ended; err != nil {
						t.Error(err)
					}
				})
			})
		}
	}
}

// The next request may come while one is answered: it is not dropped.
func TestShutdownAnswersWhatHasCome(t *testing.T) {
	for name, wait := range map[string]time.Duration{"in the buffer": 0, "seen by the watch": time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				on, why := make(chan struct{}), error(nil)
				s := run(t, nil, func(w http.ResponseWriter, r *http.Request) {
					w.(interface{ FlushError() error }).FlushError()
					held(on, &why)(w, r)
				})
				c := s.dial()
				if wait == 0 {
					c.say(get + get)
				} else {
					c.say(get)
					time.Sleep(wait)
					c.say(get)
				}
				ended := make(chan error, 1)
				go func() { ended <- s.Shutdown(context.Background()) }()
				synctest.Wait()
				close(on)
				c.has(2, "Connection: close", true)
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestServeAfterTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := run(t, nil, hello)
		c := s.dial()
		c.say(get)
		_ = s.Close()
		c.has(1, "hello", true)
		d := newDoor()
		if err := s.Serve(d); err != http.ErrServerClosed {
			t.Errorf("Serve returned %v", err)
		}
		if _, err := d.Accept(); err != net.ErrClosed {
			t.Errorf("the listener is open: %v", err)
		}
		if err := s.Shutdown(t.Context()); err != nil {
			t.Errorf("Shutdown returned %v", err)
		}
	})
}

func TestContextsEndIsThatOfRequests(t *testing.T) {
	cut := errors.New("cut off")
	for name, before := range map[string]func(*running){
		"while listening": func(*running) {},
		"after the listener": func(r *running) {
			limit, cancel := context.WithCancel(context.Background())
			cancel()
			_ = r.Shutdown(limit)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				requests, end := context.WithCancelCause(t.Context())
				var why error
				s := run(t, func(s *http1.Server) { s.Context = requests }, held(nil, &why))
				c, late := s.dial(), s.dial()
				c.say(get)
				before(s)
				end(cut)
				c.has(1, "hello", name != "while listening")
				if why != cut {
					t.Errorf("the request ended with %v", why)
				}
				why = nil
				late.say(get)
				late.has(1, "hello", name != "while listening")
				if why != cut {
					t.Errorf("the late request ended with %v", why)
				}
			})
		})
	}
}

func TestConnectionsGoThroughStates(t *testing.T) {
	for name, f := range map[string]struct {
		says []string
		want []http.ConnState
	}{
		"nothing":   {nil, []http.ConnState{http.StateNew, http.StateClosed}},
		"garbage":   {[]string{"hello\r\n\r\n"}, []http.ConnState{http.StateNew, http.StateActive, http.StateClosed}},
		"half":      {[]string{get[:9]}, []http.ConnState{http.StateNew, http.StateActive, http.StateClosed}},
		"one":       {[]string{get}, []http.ConnState{http.StateNew, http.StateActive, http.StateIdle, http.StateClosed}},
		"two":       {[]string{get, get}, []http.ConnState{http.StateNew, http.StateActive, http.StateIdle, http.StateActive, http.StateIdle, http.StateClosed}},
		"one, last": {[]string{get, last}, []http.ConnState{http.StateNew, http.StateActive, http.StateIdle, http.StateActive, http.StateClosed}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := run(t, nil, hello)
				c := s.dial()
				for _, say := range f.says {
					c.say(say)
				}
				c.Close()
				synctest.Wait()
				if got := s.states(); !slices.Equal(got, f.want) {
					t.Errorf("got %v, want %v", got, f.want)
				}
			})
		})
	}
}

// shortage is why Accept fails for a while.
type shortage struct{}

func (shortage) Error() string   { return "no descriptors" }
func (shortage) Temporary() bool { return true }
func (shortage) Timeout() bool   { return false }

func TestAcceptIsTriedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := run(t, nil, hello)
		begun := time.Now()
		for range 20 {
			s.door.faults <- shortage{}
		}
		c := s.dial()
		c.say(get)
		c.has(1, "hello", false)
		if took := time.Since(begun); took < 10*time.Second || took > 20*time.Second {
			t.Errorf("20 failures took %v", took)
		}
	})
}

func TestAcceptFailsForGood(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := newDoor()
		s := ours(http.HandlerFunc(hello))
		ended := make(chan error)
		go func() { ended <- s.Serve(d) }()
		broken := errors.New("broken")
		d.faults <- broken
		if err := <-ended; err != broken {
			t.Errorf("got %v", err)
		}
	})
}

// The listener's closing alone ends Serve; what was accepted is served on.
func TestListenerClosedByOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		d := newDoor()
		s := ours(http.HandlerFunc(hello))
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(d) }()
		r := &running{Server: s, T: t, door: d}
		c := r.dial()
		d.Close()
		if err := <-ended; err != net.ErrClosed {
			t.Errorf("got %v", err)
		}
		c.say(get)
		c.has(1, "hello", false)
		c.say(get)
		c.has(2, "hello", false)
		if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		c.has(2, "hello", true)
	})
}

// Connections leave nothing: no goroutine, which TestMain and the bubble see to, and
// no memory.
func TestConnectionsLeaveNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("many connections")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := ours(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { time.Sleep(aMoment / 2); hello(w, r) }))
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(proxy.LazyDeadlines(l)) }()
	before := runtime.NumGoroutine()
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			for i := range 100 {
				c, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					t.Error(err)
					return
				}
				if i%4 > 0 {
					_, _ = io.WriteString(c, get[:len(get)-i%2])
				}
				if i%4 == 2 {
					_, _ = c.Read(make([]byte, 1))
				}
				c.Close()
			}
		})
	}
	all.Wait()
	for runtime.NumGoroutine() > before {
		runtime.Gosched()
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != http.ErrServerClosed {
		t.Error(err)
	}
}
