package sim

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"warmroute/kvevents/zmtp"
)

// startZMTPServer runs a server. stop ends it and waits for that.
func startZMTPServer(t *testing.T, socketType zmtp.SocketType, handle func(*zmtp.Conn)) (s *zmtpServer, endpoint string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s = newZMTPServer(socketType, handle)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.serve(ctx, l)
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return s, "tcp://" + l.Addr().String(), stop
}

// dialZMTP connects to a server until the test ends.
func dialZMTP(t *testing.T, endpoint string, own zmtp.SocketType) *zmtp.Conn {
	t.Helper()
	c, release, err := zmtp.Dial(t.Context(), endpoint, own, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return c
}

func TestResetAll(t *testing.T) {
	reading := make(chan bool, 1)
	s, endpoint, _ := startZMTPServer(t, zmtp.Pub, func(c *zmtp.Conn) {
		reading <- true
		_, _ = c.ReadMessage()
	})
	for range 2 { // the server goes on
		conn := dialZMTP(t, endpoint, zmtp.Sub)
		<-reading
		s.resetAll()
		if _, err := io.Copy(io.Discard, conn); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error %v, want a reset", err)
		}
	}
}

// TestZMTPServerEnd ends a server with a peer that has not greeted it, one that is idle, and one
// that does not read.
func TestZMTPServerEnd(t *testing.T) {
	accepted := make(chan bool, 2)
	_, endpoint, stop := startZMTPServer(t, zmtp.Router, func(c *zmtp.Conn) {
		accepted <- true
		if frames, _ := c.ReadMessage(); len(frames) > 0 {
			for c.WriteMessage(make([]byte, 1<<20)) == nil {
			}
		}
	})
	silent, err := net.Dial("tcp", endpoint[len("tcp://"):])
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	dialZMTP(t, endpoint, zmtp.Dealer)
	if err := dialZMTP(t, endpoint, zmtp.Dealer).WriteMessage([]byte("a")); err != nil {
		t.Fatal(err)
	}
	<-accepted
	<-accepted
	stop()
}

func TestZMTPPeerLimit(t *testing.T) {
	s := newZMTPServer(zmtp.Pub, func(*zmtp.Conn) {})
	var last net.Conn
	for range maxPeers {
		conn, peer := net.Pipe()
		defer peer.Close()
		if !s.add(conn) {
			t.Fatal("a connection within the limit was refused")
		}
		last = conn
	}
	further, peer := net.Pipe()
	defer peer.Close()
	if s.add(further) {
		t.Error("a connection above the limit was accepted")
	}
	s.remove(last)
	if !s.add(further) {
		t.Error("a connection was refused after another one had ended")
	}
	s.resetAll()
}
