package http1_test

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/proxy"
	"warmroute/proxy/http1"
)

// onLoopback serves on a real socket until the returned func is called.
func onLoopback(t testing.TB, h http.HandlerFunc) (s *http1.Server, addr string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s = ours(h)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(proxy.LazyDeadlines(l)) }()
	return s, l.Addr().String(), func() {
		if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != http.ErrServerClosed {
			t.Error(err)
		}
	}
}

// A handler that takes as long as it takes until somebody looks for its client meets
// that watch at every moment. No byte is lost by it, and no client that is there is
// taken for one that has left.
func TestWatchThatBeginsAsTheHandlerEnds(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 30
	}
	_, addr, stop := onLoopback(t, func(w http.ResponseWriter, r *http.Request) {
		sent, err := io.ReadAll(r.Body)
		for begun, takes := time.Now(), 2*time.Millisecond+rand.N(2*time.Millisecond); time.Since(begun) < takes; {
			time.Sleep(50 * time.Microsecond)
		}
		if r.Context().Err() != nil || err != nil {
			t.Errorf("%s: %v, body %v", r.URL, r.Context().Err(), err)
		}
		fmt.Fprintf(w, "%s %s", r.URL.Path, sent)
	})
	defer stop()
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			br := bufio.NewReader(c)
			for i := 0; i < rounds; i++ {
				n := 1 + rand.N(3) // so many at once
				for j := range n {
					body := strings.Repeat("x", rand.N(3))
					fmt.Fprintf(c, "POST /%d.%d HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", i, j, len(body), body)
					if rand.N(2) == 0 {
						time.Sleep(rand.N(3 * time.Millisecond))
					}
				}
				for j := range n {
					resp, err := http.ReadResponse(br, nil)
					if err != nil {
						t.Error(err)
						return
					}
					got, err := io.ReadAll(resp.Body)
					if path, _, _ := strings.Cut(string(got), " "); err != nil || path != fmt.Sprintf("/%d.%d", i, j) {
						t.Errorf("request %d.%d was answered %q, %v", i, j, got, err)
						return
					}
				}
			}
		})
	}
	clients.Wait()
}

// What a request has borrowed it gives back, even if it is broken off; what has grown
// by a long header is not kept for ever.
func TestNothingGrowsWithRequests(t *testing.T) {
	long := strings.Repeat("v", 64<<10)
	_, addr, stop := onLoopback(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Long"] = []string{long}
		if r.URL.Path == "/abort" {
			_, _ = io.WriteString(w, middle)
			panic(http.ErrAbortHandler)
		}
		hello(w, r)
	})
	defer stop()
	ask := func(n int) {
		var c net.Conn
		var br *bufio.Reader
		for i := range n {
			var err error
			if i%10 == 0 {
				if c, err = net.Dial("tcp", addr); err != nil {
					t.Fatal(err)
				}
				br = bufio.NewReader(c)
			}
			if i%10 == 9 {
				_, _ = io.WriteString(c, "GET /abort HTTP/1.1\r\nHost: h\r\n\r\n")
				_, _ = io.Copy(io.Discard, br)
				c.Close()
				continue
			}
			_, _ = io.WriteString(c, get)
			resp, err := http.ReadResponse(br, nil)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
		}
	}
	held := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // the pools' second generation too
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	ask(100)
	before := held()
	ask(2000)
	if after := held(); after > before+2<<20 {
		t.Errorf("%d KiB more than before", (after-before)>>10)
	}
}
