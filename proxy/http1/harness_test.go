package http1_test

import (
	"context"
	"io"
	"net"
	"net/http"
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
