package transport

import (
	"errors"
	"io"
	"net/http"
	"os"
	"testing"
	"time"
)

func TestReadReturnsWhatHasCome(t *testing.T) {
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

func TestCloseBeforeTheEndClosesSocket(t *testing.T) {
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
