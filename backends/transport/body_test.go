package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestReadReturnsAvailableBytes(t *testing.T) {
	more := make(chan string)
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for part := range more {
			s.say(part)
		}
		s.closed()
	})
	resp, err := send(failsafe(t), transport, "hello")
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 8<<10)
	for _, f := range []struct {
		send, want string
		err        error
	}{
		{"1\r\na\r\n", "a", nil},                         // one chunk, without waiting for the next
		{"1\r\nb\r\n2\r\ncd\r\n1\r\ne\r\n", "bcde", nil}, // several at once
		{"5\r\nhel", "hel", nil},                         // part of one
		{"lo", "lo", nil},                                // its end, without the line's
		{"\r\n1", "", nil},                               // framing only: nothing to return
		{"\r\nf\r", "f", nil},                            // a size that came in two parts
		{"\n1\r\ng\r\n0\r\n\r\n", "g", io.EOF},           // the last one says so
	} {
		more <- f.send
		if f.want == "" {
			continue
		}
		if n, err := resp.Body.Read(p); string(p[:n]) != f.want || err != f.err {
			t.Errorf("after %q: %q, %v; want %q, %v", f.send, p[:n], err, f.want, f.err)
		}
	}
	close(more)
	idleConns(t, transport, 1)
}

func TestCloseBeforeEnd(t *testing.T) {
	for name, head := range map[string]string{
		"counted": "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
		"chunked": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			closed := make(chan struct{})
			transport := replica(t, Options{}, func(s *session) {
				s.request()
				s.say(head)
				s.closed()
				close(closed)
			})
			resp, err := send(failsafe(t), transport, "hello")
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Read(make([]byte, 5))
			resp.Body.Close()
			<-closed
			resp.Body.Close()
			if _, err := resp.Body.Read(make([]byte, 5)); err != http.ErrBodyReadAfterClose {
				t.Errorf("Read after Close: %v", err)
			}
			idleConns(t, transport, 0)
		})
	}
}

func TestCloseInterruptsRead(t *testing.T) {
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
		s.closed()
	})
	resp, err := send(failsafe(t), transport, "hello")
	if err != nil {
		t.Fatal(err)
	}
	reading, read := make(chan struct{}), make(chan error)
	go func() {
		resp.Body.Read(make([]byte, 5))
		close(reading)
		_, err := resp.Body.Read(make([]byte, 5))
		read <- err
	}()
	<-reading
	resp.Body.Close()
	if err := <-read; err == nil || err == io.EOF {
		t.Errorf("Read: %v", err)
	}
	idleConns(t, transport, 0)
}

func TestWaitReadable(t *testing.T) {
	const soon, long = time.Millisecond, time.Minute
	more := make(chan string)
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for part := range more {
			s.say(part)
		}
		s.closed()
	})
	resp, err := send(failsafe(t), transport, "hello")
	if err != nil {
		t.Fatal(err)
	}
	body := resp.Body.(*Body)
	p := make([]byte, 100)
	for _, f := range []struct {
		send string
		wait time.Duration
		want bool
		read string
		err  error
	}{
		{"", soon, false, "", nil},              // nothing yet
		{"5", soon, false, "", nil},             // part of a size is no byte of the body
		{"\r", soon, false, "", nil},            //
		{"\n", soon, false, "", nil},            // nor is all of it
		{"h", long, true, "h", nil},             //
		{"ello", long, true, "ello", nil},       // a wait that gave up took nothing away
		{"\r", soon, false, "", nil},            // nor is a chunk's end
		{"\n2\r\nab\r\n", long, true, "a", nil}, //
		{"", 0, true, "b", nil},                 // buffered
		{"", 0, false, "", nil},                 //
		{"0\r\nA: b\r\n", soon, false, "", nil}, //
		{"\r\n", long, true, "", io.EOF},        // the end is news too
		{"", 0, true, "", io.EOF},               //
	} {
		if f.send != "" {
			more <- f.send
		}
		if got, err := body.WaitReadable(f.wait); got != f.want || err != nil {
			t.Fatalf("after %q: %v, %v; want %v", f.send, got, err, f.want)
		}
		if !f.want {
			continue
		}
		if n, err := body.Read(p[:max(1, len(f.read))]); string(p[:n]) != f.read || err != f.err {
			t.Fatalf("after %q: read %q, %v; want %q, %v", f.send, p[:n], err, f.read, f.err)
		}
	}
	close(more)
	body.Close()
	if _, err := body.WaitReadable(long); err != http.ErrBodyReadAfterClose {
		t.Errorf("after Close: %v", err)
	}
	idleConns(t, transport, 1)
}

func TestIdleTimeout(t *testing.T) {
	transport := replica(t, Options{}, func(s *session) {
		s.request()
		s.say("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
		s.closed()
	})
	resp, err := send(failsafe(t), transport, "hello")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.(*Body).SetIdleTimeout(10 * time.Millisecond)
	body, err := io.ReadAll(resp.Body)
	if string(body) != "hello" || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("body %q, error %v", body, err)
	}
	idleConns(t, transport, 0)
}

// counting counts the deadlines that are set.
type counting struct {
	net.Conn
	set int
}

func (c *counting) SetReadDeadline(at time.Time) error {
	c.set++
	return c.Conn.SetReadDeadline(at)
}

// connUse tells what happened to a connection.
type connUse struct {
	net.Conn
	kept   int // how often it was returned to the pool
	closed int // how often
}

func (u *connUse) Close() error {
	u.closed++
	return u.Conn.Close()
}

// readOver reads the header of a response from c, as if it had been asked for.
func readOver(c net.Conn, method string) (*http.Response, *connUse, error) {
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: "replica"}, IdleTimeout: 24 * time.Hour})
	use := &connUse{Conn: c}
	b := &Body{
		ctx: context.Background(),
		t:   transport,
		c: &conn{
			Conn: c, raw: use, of: &transport.requests, closeSocket: func() { c.Close() }, stopClosing: func() bool { return true },
			makeIdle: func() { use.kept++ }, remove: func() { use.Close() },
		},
		stop: func() bool { return true },
	}
	b.br = transport.acquireReader(b.c)
	resp, err := b.readResponse(&http.Request{Method: method})
	return resp, use, err
}

// stream is an endless response over a pipe, in virtual time.
func stream(t *testing.T) (replica net.Conn, wire *counting, body *Body) {
	replica, ours := net.Pipe()
	wire = &counting{Conn: ours}
	go io.WriteString(replica, "HTTP/1.1 200 OK\r\n\r\n")
	resp, _, err := readOver(wire, "GET")
	if err != nil {
		t.Fatal(err)
	}
	return replica, wire, resp.Body.(*Body)
}

func TestIdleTimeoutBoundsSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, _, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		go func() {
			for range 10 {
				time.Sleep(119 * time.Second)
				replica.Write([]byte("x"))
			}
		}()
		began := time.Now()
		got, err := io.ReadAll(body)
		if len(got) != 10 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d bytes, error %v", len(got), err)
		}
		if took := time.Since(began); took != (10*119+120)*time.Second {
			t.Errorf("failed after %v: not 2 minutes after the last byte", took)
		}
	})
}

func TestIdleTimeoutAcrossWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		began := time.Now()
		waits := 0
		for {
			there, err := body.WaitReadable(15 * time.Second)
			if there {
				t.Fatal("something readable")
			}
			if err != nil {
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Error(err)
				}
				break
			}
			if waits++; time.Since(began) != time.Duration(waits)*15*time.Second {
				t.Errorf("wait %d ended after %v", waits, time.Since(began))
			}
		}
		if took := time.Since(began); took != 2*time.Minute {
			t.Errorf("failed after %v", took)
		}
	})
}

func TestQuietTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, wire, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		body.SetQuietTimeout(15 * time.Second)
		began, p := time.Now(), make([]byte, 8)
		for i := range 7 {
			if n, err := body.Read(p); n != 0 || err != ErrQuietTimeout || time.Since(began) != time.Duration(i+1)*15*time.Second {
				t.Fatalf("read %d: %d bytes, %v, after %v", i, n, err, time.Since(began))
			}
		}
		go func() {
			replica.Write([]byte("x"))
			for range 3000 {
				time.Sleep(20 * time.Millisecond)
				replica.Write([]byte("x"))
			}
		}()
		wire.set = 0
		for i := range 3001 {
			if n, err := body.Read(p); n != 1 || err != nil {
				t.Fatalf("byte %d: %d, %v", i, n, err)
			}
		}
		if wire.set > 20 { // a minute, four times the timeout
			t.Errorf("%d deadlines set", wire.set)
		}
		for range 7 {
			body.Read(p)
		}
		began = time.Now()
		if _, err := body.Read(p); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != 15*time.Second {
			t.Errorf("after 2 minutes of silence: %v, %v late", err, time.Since(began)-15*time.Second)
		}
	})
}

// While the reader is busy elsewhere the replica cannot be blamed.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, _, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		p := make([]byte, 1)
		for range 5 {
			if there, err := body.WaitReadable(time.Second); there || err != nil {
				t.Fatal(there, err)
			}
			go replica.Write([]byte("x"))
			time.Sleep(10 * time.Minute)
			if n, err := body.Read(p); n != 1 || err != nil {
				t.Fatalf("%d bytes, error %v", n, err)
			}
		}
	})
}

func TestBusyStreamSetsFewDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, wire, body := stream(t)
		defer body.Close()
		body.SetIdleTimeout(2 * time.Minute)
		go func() {
			for range 3000 {
				time.Sleep(20 * time.Millisecond)
				replica.Write([]byte("x"))
			}
			replica.Close()
		}()
		if got, err := io.ReadAll(body); len(got) != 3000 || err != nil {
			t.Errorf("%d bytes, error %v", len(got), err)
		}
		if wire.set > 5 { // a minute, half of the timeout
			t.Errorf("%d deadlines set", wire.set)
		}
	})
}

// A deadline from a wait must not end a later Read that has none.
func TestDeadlineIsCleared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, _, body := stream(t)
		defer body.Close()
		if there, err := body.WaitReadable(time.Second); there || err != nil {
			t.Fatal(there, err)
		}
		go func() {
			time.Sleep(time.Hour)
			replica.Write([]byte("x"))
		}()
		if n, err := body.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Errorf("%d bytes, error %v", n, err)
		}
	})
}

// A header that has begun is written already. The wait for it to begin, and for
// another after an interim one, has no limit.
func TestHeaderTimeout(t *testing.T) {
	drip := func(replica net.Conn) {
		for {
			time.Sleep(time.Second)
			if _, err := replica.Write([]byte("x")); err != nil {
				return
			}
		}
	}
	for name, f := range map[string]struct {
		script func(net.Conn)
		after  time.Duration
	}{
		"half a status line":      {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 2") }, 10 * time.Second},
		"a byte a second":         {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: "); drip(c) }, 10 * time.Second},
		"all but the last line":   {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n") }, 10 * time.Second},
		"begun late":              {func(c net.Conn) { time.Sleep(time.Hour); io.WriteString(c, "HTTP") }, time.Hour + 10*time.Second},
		"begun after an interim":  {func(c net.Conn) { io.WriteString(c, "HTTP/1.1 103 Hi\r\n\r\nHTTP/1.1 2") }, 10 * time.Second},
		"late after half another": {func(c net.Conn) { lateAfterInterim(c); io.WriteString(c, "HTTP/1.1 2") }, time.Hour + 15*time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				replica, ours := net.Pipe()
				var script sync.WaitGroup
				script.Go(func() { f.script(replica) })
				began := time.Now()
				if _, _, err := readOver(ours, "GET"); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("error %v", err)
				}
				if took := time.Since(began); took != f.after {
					t.Errorf("given up after %v, want %v", took, f.after)
				}
				ours.Close()
				script.Wait()
			})
		})
	}
}

// lateAfterInterim writes an interim response in two halves, and an hour later.
func lateAfterInterim(c net.Conn) {
	io.WriteString(c, "HTTP/1.1 103 Hi\r\n")
	time.Sleep(5 * time.Second)
	io.WriteString(c, "\r\n")
	time.Sleep(time.Hour)
}

// What was a limit for the header is none for the body.
func TestHeaderTimeoutExcludesBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		replica, ours := net.Pipe()
		go func() {
			io.WriteString(replica, "HTTP/1.1 200 OK\r\nContent-")
			time.Sleep(time.Second)
			io.WriteString(replica, "Length: 2\r\n\r\n")
			time.Sleep(time.Hour)
			io.WriteString(replica, "ok")
		}()
		resp, use, err := readOver(ours, "GET")
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); string(body) != "ok" || err != nil || use.kept != 1 {
			t.Errorf("body %q, error %v, returned to the pool %d times", body, err, use.kept)
		}
		ours.Close()
	})
}
