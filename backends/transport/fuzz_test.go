package transport

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
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
// left on it; and what is taken for a whole answer, net/http takes for the same.
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

// play reads an answer to its end, through waits that give up.
func play(t *testing.T, sent []byte, step, silences int, method string) (got played) {
	w := &wire{bytes: sent, step: step}
	resp, fate, err := answerOver(w, method)
	if err != nil {
		if fate.released > 0 {
			t.Error("the pool got a connection whose answer makes no sense")
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
	if fate.released+fate.discarded != 1 {
		t.Errorf("connection given back %d times, discarded %d times", fate.released, fate.discarded)
	}
	if got.released = fate.released > 0; got.released && got.err != io.EOF {
		t.Error("the pool got a connection whose answer had not ended")
	}
	if got.released && w.deadline {
		t.Error("the pool got a connection that has a deadline")
	}
	if got.err == io.EOF {
		got.err = nil
	}
	return got
}
