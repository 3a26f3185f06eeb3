package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
)

// What follows a request must not keep the server from noticing that its client
// disconnects: the replica would compute a response that nobody reads.
func TestDisconnectAfterMoreThanTheRequest(t *testing.T) {
	post := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", len(askWhole)) + askWhole
	for name, more := range map[string]string{
		"line end":          "\r\n",
		"pipelined request": "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
		"pipelined, larger": post + post,
		"pipelined beyond a buffer": "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" +
			strings.Repeat(" ", 50_000),
	} {
		for _, reset := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", reset ", reset), func(t *testing.T) {
				received, ended := make(chan struct{}), make(chan struct{})
				f := serve(t, nil, &replica{script: func(s *session) {
					s.request()
					close(received)
					s.closed()
					close(ended)
				}})
				conn := f.dial()
				io.WriteString(conn, post+more)
				<-received
				if reset {
					conn.SetLinger(0)
				}
				conn.Close()
				<-ended
				f.awaitMetric(`warmroute_disconnected_requests_total{phase="before_response"} 1`)
			})
		}
	}
}

// A byte that was read ahead belongs to the next request.
func TestPipelinedRequestsAreServed(t *testing.T) {
	t.Parallel()
	f := serve(t, nil, &replica{script: func(s *session) {
		for range 3 {
			s.request()
			time.Sleep(20 * time.Millisecond) // the server reads ahead meanwhile
			s.say(answered("200 OK", whole))
		}
	}})
	conn := f.dial()
	for range 3 {
		io.WriteString(conn, fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s\r\n", len(askWhole),
			askWhole))
	}
	io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	all, err := io.ReadAll(conn)
	if n := strings.Count(string(all), "HTTP/1.1 200 OK"); err != nil || n != 4 {
		t.Errorf("%d responses (%v), want 4", n, err)
	}
}

// net/http reads a single byte of a header as well, where that is what its buffer of
// 4 KiB has left for a long line.
func TestHeaderLineAtBufferEnd(t *testing.T) {
	t.Parallel()
	f := serve(t, nil, &replica{})
	conn := f.dial()
	start := "GET /livez HTTP/1.1\r\nHost: x\r\n"
	long := "Authorization: Bearer " + strings.Repeat("x", 5000) + "\r\nConnection: close\r\n\r\n"
	for _, part := range []string{start + long[:4095], long[4095:]} {
		io.WriteString(conn, part)
		time.Sleep(50 * time.Millisecond) // so that it is read alone
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("got %v, %v", resp, err)
	}
}

// BenchmarkIdleConnection reports the memory of a client connection that was used
// once and is idle now: heap and stacks, the client's own end included, which takes
// less than 1 KB of it.
func BenchmarkIdleConnection(b *testing.B) {
	f := serve(b, nil, &replica{script: always(answered("200 OK", whole))})
	conns := make([]net.Conn, 0, b.N)
	defer func() {
		for _, conn := range conns {
			conn.Close()
		}
	}()
	memory := func() (bytes uint64) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	response := make([]byte, 4<<10)
	before := memory()
	for b.Loop() {
		conn := f.dial()
		conns = append(conns, conn)
		io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := conn.Read(response); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(memory()-before)/float64(len(conns)), "B/conn")
}

func TestTooManyHeaderLinesStatus431(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	for _, end := range []string{"", "\r\n{}"} {
		conn := f.dial()
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n%s%s", strings.Repeat("A: b\r\n", 7500), end)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge || !resp.Close {
			t.Errorf("got %v, %v", resp, err)
		}
	}
	// A request that comes together with the one before.
	conn := f.dial()
	fmt.Fprintf(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\n%s\r\n", strings.Repeat("a:\n", 1000))
	first := bufio.NewReader(conn)
	for _, want := range []int{http.StatusOK, http.StatusRequestHeaderFieldsTooLarge} {
		resp, err := http.ReadResponse(first, nil)
		if err != nil || resp.StatusCode != want {
			t.Fatalf("got %v, %v, want %d", resp, err, want)
		}
		io.Copy(io.Discard, resp.Body)
	}
	// The next requests on a connection have headers of their own.
	conn = f.dial()
	br := bufio.NewReader(conn)
	for range 3 {
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n%s", len(askWhole),
			strings.Repeat("A: b\r\n", 200), askWhole)
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("got %v, %v", resp, err)
		}
		io.Copy(io.Discard, resp.Body)
	}
}
