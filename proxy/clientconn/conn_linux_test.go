package clientconn

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// failsafe is how long a test waits for what has to happen at once.
const failsafe = time.Minute

// acceptedPair returns both ends of a connection of a client listener.
func acceptedPair(t *testing.T, l net.Listener) (client, server net.Conn) {
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Error(err)
		return nil, nil
	}
	if server, err = l.Accept(); err != nil {
		t.Error(err)
		client.Close()
		return nil, nil
	}
	return client, server
}

// yieldAtRandom lets other goroutines run, up to a few times.
func yieldAtRandom() {
	for range rand.IntN(4) {
		runtime.Gosched()
	}
}

// readInBackground reads one byte as net/http does while a handler runs.
func readInBackground(server net.Conn) (ended <-chan error) {
	result := make(chan error, 1)
	go func() {
		yieldAtRandom()
		n, err := server.Read(make([]byte, 1))
		if n > 0 {
			err = fmt.Errorf("read %d bytes, %v", n, err)
		}
		result <- err
	}()
	return result
}

// onManyConnections calls act on connections of client listeners, on several at a time.
func onManyConnections(t *testing.T, act func(l net.Listener)) {
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Close()
			act(NewListener(l, true))
		})
	}
	all.Wait()
}

// The next request comes before, while or after the background read waits and is ended: the
// read ends each time, and then the request is read.
func TestBackgroundReadEndsAtAnyTime(t *testing.T) {
	t.Parallel()
	onManyConnections(t, func(l net.Listener) {
		client, server := acceptedPair(t, l)
		if server == nil {
			return
		}
		defer client.Close()
		defer server.Close()
		for i := range 1000 {
			SetActive(server, http.StateActive)
			ended := readInBackground(server)
			request := fmt.Sprintf("%04d", i)
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				yieldAtRandom()
				io.WriteString(client, request)
			}()
			yieldAtRandom()
			server.SetReadDeadline(time.Unix(1, 0))
			select {
			case err := <-ended:
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("request %d: the background read ended with %v, want a timeout", i, err)
				}
			case <-time.After(failsafe):
				t.Errorf("request %d: the background read hangs", i)
				return
			}
			SetActive(server, http.StateIdle)
			server.SetReadDeadline(time.Now().Add(failsafe))
			got := make([]byte, len(request))
			if _, err := io.ReadFull(server, got); err != nil || string(got) != request {
				t.Errorf("read %q (%v), want %q", got, err, request)
				return
			}
			server.SetReadDeadline(time.Time{})
			<-sent
		}
	})
}

// The client disconnects before, while or after the background read begins to wait, also with
// bytes that were not read: it ends each time.
func TestBackgroundReadNoticesHangupAtAnyTime(t *testing.T) {
	t.Parallel()
	onManyConnections(t, func(l net.Listener) {
		for i := range 500 {
			client, server := acceptedPair(t, l)
			if server == nil {
				return
			}
			SetActive(server, http.StateActive)
			ended := readInBackground(server)
			yieldAtRandom()
			if i%2 == 0 {
				io.WriteString(client, "more")
				yieldAtRandom()
			}
			if i%3 == 0 {
				client.(*net.TCPConn).SetLinger(0)
			}
			client.Close()
			select {
			case err := <-ended:
				if err != io.EOF && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("connection %d: ended with %v", i, err)
				}
			case <-time.After(failsafe):
				t.Errorf("connection %d: the hang-up was not noticed", i)
				server.Close()
				return
			}
			server.Close()
		}
	})
}
