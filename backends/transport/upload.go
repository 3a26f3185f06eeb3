package transport

import (
	"fmt"
	"io"
	"net/http"
	"time"
)

const (
	// joinBelow: a head and a body that are together no longer than this are
	// copied into one buffer and cost one plain write (or one TLS record).
	joinBelow = 4 << 10

	// inlineUpTo: a body of this size fits the socket buffers of both ends even if
	// the replica never reads it, so writing it cannot block for long. A larger one
	// is written by a goroutine, so that an answer that comes early (a 413) is seen.
	inlineUpTo = 64 << 10
)

// upload is one request on its way to the replica.
type upload struct {
	t    *Transport
	c    *conn         // set by start
	head *[]byte       // request line and header, from t.heads
	body io.ReadCloser // nil: none

	left     int64         // bytes of body still to be written
	headSent bool          // the first write carries the head
	refused  bool          // the socket failed, so err is not the body's fault
	err      error         // to be read after wait
	written  time.Time     // when the last byte was; likewise
	done     chan struct{} // closed when the goroutine that writes has ended; nil without one
}

// begin writes the head of req to a buffer. It closes body when it fails.
func (u *upload) begin(t *Transport, req *http.Request, body io.ReadCloser) error {
	head, ok := t.heads.Get().(*[]byte)
	if !ok {
		head = new([]byte)
	}
	u.t, u.head = t, head
	var err error
	if body != nil && body != http.NoBody {
		u.body, u.left = body, req.ContentLength
		if u.left <= 0 {
			err = fmt.Errorf("%w: a body of unknown length", ErrInvalidRequest)
		}
	}
	if err == nil {
		*head, err = t.appendHead((*head)[:0], req, u.left)
	}
	if err != nil {
		u.end()
	}
	return err
}

// end gives back what the upload holds.
func (u *upload) end() {
	if u.body != nil {
		u.body.Close()
	}
	u.t.heads.Put(u.head)
	u.head = nil
}

// start writes the request to c: a small one before it returns, a large one in a
// goroutine that wait waits for.
func (u *upload) start(c *conn) {
	u.c = c
	if u.left <= inlineUpTo {
		u.run()
		return
	}
	u.done = make(chan struct{})
	go func() {
		defer close(u.done)
		u.run()
	}()
}

// wait returns when nothing touches the request's body any more. Close the
// socket first: that ends a write that is under way.
func (u *upload) wait() {
	if u.done != nil {
		<-u.done
	}
}

// sent reports, without waiting, whether the whole request was written.
func (u *upload) sent() bool {
	if u.done != nil {
		select {
		case <-u.done:
		default:
			return false
		}
	}
	return u.err == nil
}

// sentSoon is sent for an answer that has come whole. It waits a moment, since that
// can overtake the return of the last write; a replica that does not take the rest of
// a request must not keep its answer from the client for longer.
func (u *upload) sentSoon() bool {
	if !u.sent() && u.done != nil {
		select {
		case <-u.done:
		case <-time.After(5 * time.Millisecond):
		}
	}
	return u.sent()
}

func (u *upload) run() {
	defer u.end()
	defer func() { u.written = time.Now() }()
	if u.body == nil {
		_, u.err = u.c.Write(*u.head)
		return
	}
	// A body that has a WriteTo passes its memory to Write whole.
	_, u.err = io.Copy((*uploadWriter)(u), u.body)
	if u.err == nil && u.left > 0 {
		u.err = fmt.Errorf("body ends %d bytes short of its Content-Length", u.left)
	}
	if u.err != nil && !u.refused {
		u.err = fmt.Errorf("%w: %w", ErrInvalidRequest, u.err)
		u.c.abort() // the replica would wait for the rest
	}
}

// uploadWriter is what a request's body copies itself to.
type uploadWriter upload

// Write sends p from where it lies, and with the first p the head.
func (u *uploadWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > u.left {
		return 0, fmt.Errorf("body is longer than its Content-Length")
	}
	var err error
	switch {
	case u.headSent:
		_, err = u.c.Write(p)
	case len(*u.head)+len(p) <= joinBelow:
		*u.head = append(*u.head, p...)
		_, err = u.c.Write(*u.head)
	default:
		err = u.c.writeBoth(*u.head, p)
	}
	u.headSent = true
	if err != nil {
		u.refused = true
		return 0, err
	}
	u.left -= int64(len(p))
	return len(p), nil
}
