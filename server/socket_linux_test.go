package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"warmroute/config"
)

// A socket that another process keeps open outlives the filter's process.
func TestAcceptConnections(t *testing.T) {
	l, err := listenTCP("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := dropNewConnections(l); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.DialTimeout("tcp", l.Addr().String(), 100*time.Millisecond); err == nil {
		conn.Close()
		t.Error("a connection was opened behind the filter")
	}
	file, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	inherited, err := net.FileListener(file) // as inheritListener
	if err != nil {
		t.Fatal(err)
	}
	defer inherited.Close()
	file.Close()
	stopDroppingConnections(inherited)
	conn, err := net.DialTimeout("tcp", l.Addr().String(), 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// TestListenerCloseResetsNoConnection closes listeners while clients connect without a
// pause: each connection is served or refused.
func TestListenerCloseResetsNoConnection(t *testing.T) {
	for range 3 {
		l, err := listenTCP("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served := atomic.Int64{}
		f := &listeners{failed: make(chan error, 1)}
		d := newListener("public", l, config.ListenerTLS{})
		f.startServing(d, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { served.Add(1) })}, acceptErrors{})
		var clients sync.WaitGroup
		for range 64 {
			clients.Go(func() {
				for {
					conn, err := net.DialTimeout("tcp", l.Addr().String(), time.Minute)
					if errors.Is(err, syscall.ECONNREFUSED) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n\r\n")
					conn.SetReadDeadline(time.Now().Add(time.Minute))
					if got, err := io.ReadAll(conn); err != nil || len(got) == 0 {
						t.Errorf("a connection was opened and the request lost: %d bytes, %v", len(got), err)
					}
					conn.Close()
				}
			})
		}
		for served.Load() < 500 {
			time.Sleep(time.Millisecond)
		}
		d.stopAcceptingWithGrace()
		clients.Wait()
		d.server.Close()
		f.serving.Wait()
	}
}
