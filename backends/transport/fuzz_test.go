package transport

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"
)

// wire is a connection on which given bytes arrive, some at a time.
type wire struct {
	net.Conn // never called
	bytes    []byte
	step     int
	silences int // reads left that time out, as WaitReadable's do
	deadline bool
}

func (w *wire) Read(p []byte) (int, error) {
	if w.deadline && w.silences > 0 {
		w.silences--
		return 0, os.ErrDeadlineExceeded
	}
	if len(w.bytes) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), w.step)], w.bytes)
	w.bytes = w.bytes[n:]
	return n, nil
}

func (w *wire) Close() error { return nil }

func (w *wire) SetReadDeadline(at time.Time) error {
	w.deadline = !at.IsZero()
	return nil
}

// Whatever a replica sends, reading it ends, in the same way however it was cut
// into segments; a connection is given back once, to the pool only if nothing is
// left on it; and what is taken for a whole response, net/http takes for the same.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello, world",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n1 \r\n!\r\n0\r\n\r\nHTTP/1.1 200",
		"HTTP/1.0 200 OK\r\n\r\nhello",
		"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
		"HTTP/1.1 304\r\nContent-Length: 9\r\n\r\n",
	} {
		f.Add([]byte(seed), byte(0), false)
		f.Add([]byte(seed), byte(3), true)
	}
	f.Fuzz(func(t *testing.T, sent []byte, step byte, head bool) {
		method := http.MethodGet
		if head {
			method = http.MethodHead
		}
		whole := play(t, sent, 1<<20, 0, method)
		parts := play(t, sent, int(step)+1, 2, method)
		if whole.status != parts.status || !bytes.Equal(whole.body, parts.body) || (whole.err == nil) != (parts.err == nil) {
			t.Errorf("in one piece %+v, in parts %+v", whole, parts)
		}
		if whole.err != nil {
			return
		}
		br := bufio.NewReader(bytes.NewReader(sent))
		resp, err := http.ReadResponse(br, &http.Request{Method: method})
		for err == nil && resp.StatusCode < 200 {
			resp, err = http.ReadResponse(br, &http.Request{Method: method})
		}
		if err != nil {
			t.Fatalf("net/http refuses it: %v", err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != whole.status || !bytes.Equal(body, whole.body) {
			t.Errorf("net/http has %d %q, %v; we have %d %q", resp.StatusCode, body, err, whole.status, whole.body)
		}
		if whole.released && br.Buffered() > 0 {
			t.Errorf("the pool got a connection with %d bytes on it", br.Buffered())
		}
	})
}

type played struct {
	status   int
	body     []byte
	err      error
	released bool
}

// play reads a response to its end, through waits that give up.
func play(t *testing.T, sent []byte, step, silences int, method string) (got played) {
	w := &wire{bytes: sent, step: step}
	resp, use, err := readOver(w, method)
	if err != nil {
		if use.kept > 0 {
			t.Error("the pool got a connection whose response makes no sense")
		}
		return played{err: err}
	}
	body := resp.Body.(*Body)
	w.silences = silences // not before: within a header silence is an error
	got.status = resp.StatusCode
	if silences > 0 {
		body.SetIdleTimeout(time.Minute)
	}
	p := make([]byte, 7)
	for got.err == nil {
		if silences > 0 {
			if _, err := body.WaitReadable(0); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a wait without an idle timeout failed for want of bytes")
			}
		}
		var n int
		n, got.err = body.Read(p)
		got.body = append(got.body, p[:n]...)
	}
	body.Close()
	if use.kept+use.closed != 1 {
		t.Errorf("connection given back %d times, closed %d times", use.kept, use.closed)
	}
	if got.released = use.kept > 0; got.released && got.err != io.EOF {
		t.Error("the pool got a connection whose response had not ended")
	}
	if got.released && w.deadline {
		t.Error("the pool got a connection that has a deadline")
	}
	if got.err == io.EOF {
		got.err = nil
	}
	return got
}

// Whatever the method, the URL and the header of a request are, what goes up is
// refused or is one request, with the lines it should have, as net/http reads it.
func FuzzRequestHead(f *testing.F) {
	f.Add("POST", "/v1/chat/completions", "a=b", "X-A", "b", int64(5), false)
	f.Add("GET", "/", "", "Content-Length", "9", int64(0), true)
	f.Add("GET", "/a\r\nB: c", "d\r\n\r\nGET / HTTP/1.1", "A\r\nB", "c\r\nD: e", int64(1), false)
	f.Add("GET /x HTTP/1.1\r\n", "//x", "%0d%0a", "transfer-encoding", "chunked", int64(7), false)
	f.Add("", "*", "?#", "A:", "\x00", int64(3), false)
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: "replica:8000"}})
	f.Fuzz(func(t *testing.T, method, path, query, name, value string, length int64, end bool) {
		length &= 1<<40 - 1
		req := &http.Request{
			Method: method, URL: &url.URL{Path: path, RawQuery: query}, Close: end,
			Header: http.Header{name: {value}, "X-Other": {"1"}},
		}
		head, err := transport.appendRequestHead(nil, req, length)
		if err != nil {
			return
		}
		text, ended := strings.CutSuffix(string(head), "\r\n\r\n")
		if !ended || strings.Contains(text, "\r\n\r\n") || strings.Count(text, "\n") != strings.Count(text, "\r\n") ||
			strings.Count(text, "\r") != strings.Count(text, "\r\n") {
			t.Fatalf("not one head: %q", head)
		}
		if lines := strings.Count(text, "\r\n"); lines > 5 { // Host, two of the header, length, close
			t.Errorf("%d lines of header: %q", lines, head)
		}
		read, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil {
			return // net/http is stricter about URLs
		}
		if read.Host != "replica:8000" || len(read.TransferEncoding) > 0 || read.ContentLength != length || end != read.Close {
			t.Errorf("%q is read as %+v", head, read)
		}
	})
}
