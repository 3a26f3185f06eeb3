package admin

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// twoSides is one server that is reached over loopback and, as it seems, from another machine.
type twoSides struct {
	t         *testing.T
	near, far string // addresses
}

func serveBothSides(t *testing.T, h *Handler) *twoSides {
	t.Helper()
	var listeners []net.Listener
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listeners = append(listeners, l)
	}
	server := &http.Server{Handler: h, ConnState: h.ConnState, ConnContext: h.ConnContext}
	go server.Serve(listeners[0])
	go server.Serve(far{listeners[1]})
	t.Cleanup(func() { server.Close() })
	return &twoSides{t, listeners[0].Addr().String(), listeners[1].Addr().String()}
}

// client is a connection with what came over it.
type client struct {
	net.Conn
	*bufio.Reader
}

func (s *twoSides) dial(address string) *client {
	s.t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		s.t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(failsafe))
	s.t.Cleanup(func() { conn.Close() })
	return &client{conn, bufio.NewReader(conn)}
}

// get sends a request and returns the status, or 0 if the connection was closed.
func (c *client) get(path, token string) int {
	request := "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n"
	if token != "" {
		request += "Authorization: Bearer " + token + "\r\n"
	}
	if _, err := io.WriteString(c.Conn, request+"\r\n"); err != nil {
		return 0
	}
	resp, err := http.ReadResponse(c.Reader, nil)
	if err != nil {
		return 0
	}
	if resp.Header.Get("Content-Type") != "text/event-stream" {
		io.Copy(io.Discard, resp.Body)
	}
	return resp.StatusCode
}

// stall sends a request whose body does not come, and returns once that is waited for.
func (c *client) stall() {
	io.WriteString(c.Conn, "POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n")
}

// isOpen reports whether the server keeps the connection, of which nothing is expected.
func (c *client) isOpen() bool {
	c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	_, err := c.ReadByte()
	c.SetReadDeadline(time.Now().Add(failsafe))
	return err == nil || errors.Is(err, os.ErrDeadlineExceeded)
}

func (c *client) awaitClosed(t *testing.T) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c.Reader); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("it is not closed")
	}
}

// count returns how many connections are open, and how many of these are strangers'.
func (c *connections) count() (all, strangers int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.open {
		if k.rank == stranger {
			strangers++
		}
	}
	return len(c.open), strangers
}

// isActive reports whether a connection has a request.
func (c *connections) isActive() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.open {
		if k.active {
			return true
		}
	}
	return false
}

func TestStrangersDoNotEvictOperators(t *testing.T) {
	h := askable(t).handler
	h.SetToken(token)
	s := serveBothSides(t, h)
	operator := s.dial(s.far)
	if status := operator.get("/api/events", token); status != 200 {
		t.Fatalf("the operator's stream: %d", status)
	}
	idle := s.dial(s.far)
	if status := idle.get("/api/state", token); status != 200 {
		t.Fatalf("the operator's request: %d", status)
	}
	localIdle, localBusy := s.dial(s.near), s.dial(s.near)
	if status := localIdle.get("/metrics", ""); status != 200 {
		t.Fatalf("a local scrape: %d", status)
	}
	localBusy.stall()
	var strangers []*client
	for i := range 4 * maxConnections {
		c := s.dial(s.far)
		if i%2 == 0 {
			c.get("/metrics", "")
		}
		strangers = append(strangers, c)
	}
	strangers[0].awaitClosed(t)
	if _, n := h.connections.count(); n > maxStrangers {
		t.Errorf("strangers have %d connections", n)
	}
	if status := strangers[len(strangers)-1].get("/metrics", ""); status != 200 {
		t.Errorf("the last stranger's scrape: %d", status)
	}
	events := strings.Builder{}
	for range 6 { // two events of three lines, one a second
		line, err := operator.ReadString('\n')
		if err != nil {
			t.Fatalf("the operator's stream was closed: %v", err)
		}
		events.WriteString(line)
	}
	if !strings.Contains(events.String(), "event: state") {
		t.Errorf("the operator's stream has %q", events.String())
	}
	if status := idle.get("/api/state", token); status != 200 {
		t.Errorf("the operator's idle connection: %d", status)
	}
	if status := localIdle.get("/metrics", ""); status != 200 {
		t.Errorf("the local idle connection: %d", status)
	}
	if !localBusy.isOpen() {
		t.Error("a local connection with a request was closed")
	}
	for _, address := range []string{s.near, s.far} {
		if status := s.dial(address).get("/api/state", token); status != 200 {
			t.Errorf("another operator: %d", status)
		}
	}
}

func TestOperatorConnectsBesideManyTrusted(t *testing.T) {
	h := askable(t).handler
	h.SetToken(token)
	s := serveBothSides(t, h)
	first := s.dial(s.far)
	first.get("/api/state", token)
	locals := []*client{}
	for range 2 * maxConnections {
		c := s.dial(s.near)
		c.get("/metrics", "")
		locals = append(locals, c)
	}
	locals[0].awaitClosed(t)
	if status := first.get("/api/state", token); status != 200 {
		t.Errorf("the first operator: %d", status)
	}
	for range 2 * maxConnections { // whose connections stay open
		if status := s.dial(s.far).get("/api/state", token); status != 200 {
			t.Fatalf("another operator: %d", status)
		}
	}
	if all, strangers := h.connections.count(); all-strangers > maxTrusted || all > maxConnections {
		t.Errorf("%d connections are open, %d of strangers", all, strangers)
	}
}

func TestSetTokenResetsRanks(t *testing.T) {
	h := askable(t).handler
	h.SetToken(token)
	s := serveBothSides(t, h)
	old := s.dial(s.far)
	old.get("/api/state", token)
	for h.connections.isActive() { // else it may become idle after all others
		time.Sleep(time.Millisecond)
	}
	h.SetToken("another")
	for range 2 * maxStrangers {
		s.dial(s.far).get("/metrics", "")
	}
	old.awaitClosed(t)
}
