package http1

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
)

// fault is why a request is not served. status 0: there is nobody to be told.
type fault struct {
	status int
	text   string
	wait   bool // for the client, which may still be sending
}

// read reads a request's header. Its body, if it has one, is to be read from c.br.
func (c *conn) read() (*http.Request, *fault) {
	r, err := http.ReadRequest(c.br)
	var socket *net.OpError
	switch {
	case err == nil:
	case c.in.left == 0:
		return nil, &fault{status: http.StatusRequestHeaderFieldsTooLarge, wait: true}
	case err == io.EOF, errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &socket):
		return nil, &fault{}
	case strings.HasPrefix(err.Error(), "unsupported transfer encoding"), // the error's type has no name
		strings.HasPrefix(err.Error(), "too many transfer encodings"):
		return nil, &fault{status: http.StatusNotImplemented, text: "Unsupported transfer encoding"}
	default: // the error is not repeated: it quotes what was sent
		return nil, &fault{status: http.StatusBadRequest}
	}
	c.in.left = -1
	c.posted = r.Method == http.MethodPost
	return r, check(r)
}

// check sees to what net/http's server does beyond ReadRequest.
func check(r *http.Request) *fault {
	if r.ProtoMajor != 1 {
		return &fault{status: http.StatusHTTPVersionNotSupported, text: "unsupported protocol version"}
	}
	if r.ProtoMinor > 0 && r.Host == "" && r.Method != http.MethodConnect {
		return &fault{status: http.StatusBadRequest, text: "missing required Host header"}
	}
	if !httpguts.ValidHostHeader(r.Host) {
		return &fault{status: http.StatusBadRequest, text: "malformed Host header"}
	}
	for name, values := range r.Header {
		if !httpguts.ValidHeaderFieldName(name) {
			return &fault{status: http.StatusBadRequest, text: "invalid header name"}
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return &fault{status: http.StatusBadRequest, text: "invalid header value"}
			}
		}
	}
	if r.Header.Get("Expect") != "" && !expectsContinue(r) {
		return &fault{status: http.StatusExpectationFailed, wait: true}
	}
	return nil
}

// expectsContinue reports whether the client waits for word before it sends the
// body. HTTP/1.0 knows no such word.
func expectsContinue(r *http.Request) bool {
	expect := r.Header["Expect"]
	return len(expect) > 0 && httpguts.HeaderValuesContainsToken(expect[:1], "100-continue")
}

// refuse tells the client what is wrong. It is the last answer.
func (c *conn) refuse(f *fault) {
	if f.status == 0 {
		return
	}
	text := fmt.Sprintf("%d %s", f.status, http.StatusText(f.status))
	if f.text != "" {
		text += ": " + f.text
	}
	c.SetWriteDeadline(time.Now().Add(farewell))
	fmt.Fprintf(c, "HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s",
		f.status, http.StatusText(f.status), len(text), text)
	if f.wait {
		c.sayFarewell()
	}
}

var errUnasked = errors.New("the client was answered before it was asked for the body")

// body is a request's. Afterwards the client is watched.
type body struct {
	c        *conn
	from     io.ReadCloser // net/http's, which knows where it ends
	length   int64         // as said; negative: not said
	came     int64         // of it
	expected bool          // the client waits for word before it sends it
	over     bool          // it was read to its end
	broken   bool          // it cannot be
	closed   atomic.Bool
}

// endsAnswers reports whether it is known that no other request can follow: whether
// a body comes that was not asked for, and where one ends that makes no sense, is
// not known, and one that is too long is not read.
func (b *body) endsAnswers() bool {
	return !b.over && (b.expected || b.broken || b.length-b.came >= mostUnread)
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	if b.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	if b.expected && b.c.out.status != 0 {
		return 0, errUnasked
	}
	if b.expected {
		b.expected = false
		if _, err := io.WriteString(b.c, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return 0, err
		}
	}
	n, err := b.from.Read(p)
	b.came += int64(n)
	if err == io.EOF && !b.over {
		b.over = true
		b.c.watch.soon()
	}
	b.broken = err != nil && err != io.EOF
	return n, err
}

// Close implements io.Closer. What is left of the body is dealt with at the
// request's end.
func (b *body) Close() error {
	b.closed.Store(true)
	return nil
}

// rest sees to what the handler has left of the body, and reports whether that was
// read, so that another request may follow. A client that sends too much, or waits
// for word to begin, has time to read the answer.
func (b *body) rest() bool {
	if b.over {
		return true
	}
	if !b.expected && b.length-b.came < mostUnread {
		hurried := b.c.out.hurried.Load()
		if !hurried {
			b.c.setReadTimeout(unreadTime)
		}
		_, err := io.CopyN(io.Discard, b.from, mostUnread+1)
		if err != nil && (hurried || !errors.Is(err, os.ErrDeadlineExceeded)) {
			return err == io.EOF
		}
	}
	b.c.sayFarewell()
	return false
}
