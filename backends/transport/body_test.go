package transport

import (
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// An answer that breaks off, or whose framing makes no sense, must not look whole.
func TestRefusesBody(t *testing.T) {
	const counted = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
	const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	for name, f := range map[string]struct {
		answer, body string
		want         error // nil: any
	}{
		"counted, short":               {counted + "hello", "hello", io.ErrUnexpectedEOF},
		"counted, nothing":             {counted, "", io.ErrUnexpectedEOF},
		"no last chunk":                {chunked + "5\r\nhello\r\n", "hello", io.ErrUnexpectedEOF},
		"the end in a chunk":           {chunked + "9\r\nhello", "hello", io.ErrUnexpectedEOF},
		"the end in a size":            {chunked + "5\r\nhello\r\n1", "hello", io.ErrUnexpectedEOF},
		"the end before the last line": {chunked + "5\r\nhello\r\n0\r\n", "hello", io.ErrUnexpectedEOF},
		"the end in a trailer":         {chunked + "5\r\nhello\r\n0\r\nA: b", "hello", io.ErrUnexpectedEOF},
		"a size that is none":          {chunked + "x\r\nhello\r\n", "", errChunkLine},
		"an empty size":                {chunked + "\r\nhello\r\n", "", errChunkLine},
		"a negative size":              {chunked + "-5\r\nhello\r\n", "", errChunkLine},
		"a size with a prefix":         {chunked + "0x5\r\nhello\r\n", "", errChunkLine},
		"a size beyond any":            {chunked + "fffffffffffffffff\r\nhello\r\n", "", errChunkLine},
		"a size beyond any, once more": {chunked + "ffffffffffffffff\r\nhello\r\n", "", errChunkLine},
		"a chunk longer than it said":  {chunked + "5\r\nhello!\r\n0\r\n\r\n", "hello", errChunkLine},
		"a bare LF after a size":       {chunked + "5\nhello\r\n0\r\n\r\n", "", errLineEnd},
		"a bare LF after a chunk":      {chunked + "5\r\nhello\n0\r\n\r\n", "hello", errLineEnd},
		"a bare CR in an extension":    {chunked + "5;a\rb\r\nhello\r\n0\r\n\r\n", "", errLineEnd},
		"an extension without end":     {chunked + "5;" + strings.Repeat("a", 8<<10), "", errLineTooLong},
		"trailers without end":         {chunked + "0\r\n" + strings.Repeat("A: "+strings.Repeat("b", 1000)+"\r\n", 200), "", errHeaderTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, Options{}, once(f.answer))
			resp, err := send(failsafe(t), transport, "hello")
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if string(body) != f.body || !errors.Is(err, f.want) {
				t.Errorf("body %q, error %v; want %q, %v", body, err, f.body, f.want)
			}
			if _, again := resp.Body.Read(make([]byte, 1)); again != err {
				t.Errorf("next Read: %v", again)
			}
			idleConns(t, transport, 0)
		})
	}
}

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
