package transport

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

// reservedHeaders are those that this package writes itself or omits: if one occurred twice,
// two parsers could see different requests.
var reservedHeaders = [...]string{"Host", "Trailer", "Connection", "Content-Length", "Transfer-Encoding"}

func isReservedHeader(name string) bool {
	for _, reserved := range reservedHeaders {
		if len(name) == len(reserved) && strings.EqualFold(name, reserved) {
			return true
		}
	}
	return false
}

// appendRequestHead appends the request line and header of req to b. It fails on
// characters that would break the framing.
func (t *Transport) appendRequestHead(b []byte, req *http.Request, bodyLength int64) ([]byte, error) {
	method := cmp.Or(req.Method, http.MethodGet)
	uri := req.URL.RequestURI()
	if !httpguts.ValidHeaderFieldName(method) || !isRequestURI(uri) {
		return b, fmt.Errorf("%w: request line", ErrInvalidRequest)
	}
	b = append(b, method...)
	b = append(b, ' ')
	b = append(b, uri...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, t.host...)
	b = append(b, "\r\n"...)
	for name, values := range req.Header {
		if isReservedHeader(name) {
			continue
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return b, fmt.Errorf("%w: header name %q", ErrInvalidRequest, name)
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return b, fmt.Errorf("%w: value of header %s", ErrInvalidRequest, name)
			}
			b = append(b, name...)
			b = append(b, ": "...)
			b = append(b, v...)
			b = append(b, "\r\n"...)
		}
	}
	if bodyLength > 0 || method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, bodyLength, 10)
		b = append(b, "\r\n"...)
	}
	if req.Close {
		b = append(b, "Connection: close\r\n"...)
	}
	return append(b, "\r\n"...), nil
}

// isRequestURI reports whether s begins with a slash and has no spaces or control characters.
func isRequestURI(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] == 0x7f {
			return false
		}
	}
	return s != "" && s[0] == '/'
}

const (
	// Heads and bodies up to maxJoinedBytes together are copied into one buffer and
	// written at once, or as one TLS record.
	maxJoinedBytes = 4 << 10

	// Bodies up to maxInlineBytes fit the socket buffers, so that writing them does not block for
	// long. Larger ones are written by a goroutine, so that an early response (a 413) is seen.
	maxInlineBytes = 64 << 10
)

// upload writes one request to the replica.
type upload struct {
	t    *Transport
	c    *conn         // set by start
	head *[]byte       // request line and header, from t.heads
	body io.ReadCloser // nil: none

	left       int64         // body bytes not written yet
	headSent   bool          // with the first write
	connFailed bool          // err is the connection's, not the body's
	err        error         // valid once it is written
	written    time.Time     // time of the last byte; valid once it is written
	done       chan struct{} // closed when the writing goroutine has ended; nil without one
}

// prepareHead writes the head of req to a pooled buffer. It closes body when it fails.
func (u *upload) prepareHead(t *Transport, req *http.Request, body io.ReadCloser) error {
	head, ok := t.heads.Get().(*[]byte)
	if !ok {
		head = new([]byte)
	}
	u.t, u.head = t, head
	var err error
	if body != nil && body != http.NoBody {
		u.body, u.left = body, req.ContentLength
		if u.left <= 0 {
			err = fmt.Errorf("%w: body of unknown length", ErrInvalidRequest)
		}
	}
	if err == nil {
		*head, err = t.appendRequestHead((*head)[:0], req, u.left)
	}
	if err != nil {
		u.close()
	}
	return err
}

// close closes the body and releases the head.
func (u *upload) close() {
	if u.body != nil {
		u.body.Close()
	}
	u.t.heads.Put(u.head)
	u.head = nil
}

// start writes the request to c: a small one at once, a large one in a goroutine.
func (u *upload) start(c *conn) {
	u.c = c
	if u.left <= maxInlineBytes {
		u.writeRequest()
		return
	}
	u.done = make(chan struct{})
	go func() {
		defer close(u.done)
		u.writeRequest()
	}()
}

// isSent reports, without waiting, whether the complete request was written.
func (u *upload) isSent() bool {
	if u.done != nil {
		select {
		case <-u.done:
		default:
			return false
		}
	}
	return u.err == nil
}

// awaitSentBriefly waits up to 5 ms for the end of the write, and reports whether the
// complete request was written. It is called after a complete response, which can arrive
// before the last write returns, or before the replica has read the whole request.
func (u *upload) awaitSentBriefly() (sent bool) {
	if u.done != nil {
		select {
		case <-u.done:
		case <-time.After(5 * time.Millisecond):
		}
	}
	return u.isSent()
}

// writeRequest writes head and body, closes the body, and sets err and written.
func (u *upload) writeRequest() {
	defer u.close()
	defer func() { u.written = time.Now() }()
	if u.body == nil {
		_, u.err = u.c.Write(*u.head)
		return
	}
	// A body with a WriteTo passes its memory to Write without a copy.
	_, u.err = io.Copy(u, u.body)
	if u.err == nil && u.left > 0 {
		u.err = fmt.Errorf("body is %d bytes shorter than its Content-Length", u.left)
	}
	if u.err != nil && !u.connFailed {
		u.err = fmt.Errorf("%w: %w", ErrInvalidRequest, u.err)
		u.c.closeSocket() // the replica waits for the rest
	}
}

// Write implements io.Writer for the body: it writes p without a copy, the first time with the head.
func (u *upload) Write(p []byte) (int, error) {
	if int64(len(p)) > u.left {
		return 0, fmt.Errorf("body is longer than its Content-Length")
	}
	var err error
	switch {
	case u.headSent:
		_, err = u.c.Write(p)
	case len(*u.head)+len(p) <= maxJoinedBytes:
		*u.head = append(*u.head, p...)
		_, err = u.c.Write(*u.head)
	default:
		err = u.c.writeHeadAndBody(*u.head, p)
	}
	u.headSent = true
	if err != nil {
		u.connFailed = true
		return 0, err
	}
	u.left -= int64(len(p))
	return len(p), nil
}
