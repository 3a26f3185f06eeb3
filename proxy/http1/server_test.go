package http1_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/proxy"
	"warmroute/proxy/http1"
)

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

func TestAcceptIsTriedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := run(t, nil, hello)
		begun := time.Now()
		for range 20 {
			s.door.faults <- &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
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
