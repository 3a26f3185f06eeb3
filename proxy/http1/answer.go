package http1

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	// fewBytes is how long a body may be whose length is said though its handler
	// did not: so much is kept until the handler has returned.
	fewBytes = 2 << 10
	// sendAt is how much is gathered before it is written unasked.
	sendAt = 8 << 10
	// mostKept is how large a buffer may have grown, by a long header, that is used again.
	mostKept = 32 << 10
)

// answer is the http.ResponseWriter of a connection's requests, one after another.
// Like any other it is its handler's alone, but for the deadlines.
type answer struct {
	c      *conn
	body   *body
	header http.Header
	// Of the request, whose fields are its handler's to change.
	head, modern bool

	buffer *[]byte // what is not yet written, borrowed as long as there is some; nil: nothing
	few    *[]byte // body that is kept until its framing is known, likewise

	status  int   // 0: no header yet
	said    int64 // length of the body; negative: not said
	written int64 // of the body
	framing framing
	headed  bool        // the header is complete
	told    bool        // by the handler that it is the last
	last    bool        // no other answer follows on the connection
	err     error       // of writing
	hurried atomic.Bool // a read deadline was set
}

// framing is how the end of an answer's body is told.
type framing int

const (
	unframed framing = iota // it is not decided
	counted
	chunked
	untilClose
	bodiless
)

func (a *answer) begin(r *http.Request, b *body) {
	if a.header == nil {
		a.header = make(http.Header, 16)
	}
	a.body, a.head, a.modern = b, r.Method == http.MethodHead, r.ProtoAtLeast(1, 1)
	a.status, a.said, a.written, a.framing, a.headed, a.told, a.last = 0, -1, 0, unframed, false, false, r.Close
	a.hurried.Store(false)
}

// free gives back what an answer that was broken off has borrowed.
func (a *answer) free() {
	a.give(&a.buffer)
	a.give(&a.few)
}

func (a *answer) give(b **[]byte) {
	if *b != nil {
		if **b = (**b)[:0]; cap(**b) <= mostKept {
			a.c.server.buffers.Put(*b)
		}
		*b = nil
	}
}

// borrow returns where to append to.
func (a *answer) borrow(b **[]byte) *[]byte {
	if *b == nil {
		var ok bool
		if *b, ok = a.c.server.buffers.Get().(*[]byte); !ok {
			fresh := make([]byte, 0, sendAt+4<<10)
			*b = &fresh
		}
	}
	return *b
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// Write implements http.ResponseWriter.
func (a *answer) Write(p []byte) (int, error) {
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	switch {
	case len(p) == 0 || a.err != nil:
		return 0, a.err
	case a.status == http.StatusNoContent || a.status == http.StatusNotModified:
		return 0, http.ErrBodyNotAllowed
	}
	a.written += int64(len(p))
	if a.said >= 0 && a.written > a.said {
		return 0, http.ErrContentLength
	}
	if !a.headed && a.framing == unframed && a.said < 0 && a.written <= fewBytes {
		few := a.borrow(&a.few)
		*few = append(*few, p...)
		return len(p), nil
	}
	a.settle(false)
	a.put(p)
	return len(p), a.err
}

// settle ends the header, if that was not done, and puts behind it what was kept.
func (a *answer) settle(whole bool) {
	if !a.headed {
		a.frame(whole)
	}
	if a.few != nil {
		a.put(*a.few)
		a.give(&a.few)
	}
}

// put adds to the body, and writes when there is much.
func (a *answer) put(p []byte) {
	if a.framing == bodiless {
		return
	}
	out := a.borrow(&a.buffer)
	if a.framing == chunked {
		*out = strconv.AppendInt(*out, int64(len(p)), 16)
		*out = append(*out, "\r\n"...)
	}
	if len(*out)+len(p) > sendAt {
		a.send()
	}
	if len(p) > sendAt {
		a.write(p)
	} else {
		a.gather(p)
	}
	if a.framing == chunked {
		a.gather([]byte("\r\n"))
	}
}

// gather adds to what is not yet written.
func (a *answer) gather(p []byte) {
	out := a.borrow(&a.buffer)
	*out = append(*out, p...)
}

// send writes what was gathered.
func (a *answer) send() {
	if a.buffer != nil {
		a.write(*a.buffer)
		a.give(&a.buffer)
	}
}

func (a *answer) write(p []byte) {
	if a.err == nil && len(p) > 0 {
		if _, a.err = a.c.Write(p); a.err != nil {
			a.c.cut(context.Canceled)
		}
	}
}

// FlushError is what http.ResponseController looks for.
func (a *answer) FlushError() error {
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	a.settle(false)
	a.send()
	return a.err
}

// SetReadDeadline is what http.ResponseController looks for.
func (a *answer) SetReadDeadline(at time.Time) error {
	a.hurried.Store(!at.IsZero())
	return a.c.SetReadDeadline(at)
}

// SetWriteDeadline is what http.ResponseController looks for.
func (a *answer) SetWriteDeadline(at time.Time) error { return a.c.SetWriteDeadline(at) }

// abandon sends what its handler has brought under way before it panicked.
func (a *answer) abandon() {
	if a.headed && a.few == nil {
		a.send()
	}
}

var errLength = errors.New("the handler has not written as much as it said")

// finish writes the rest, and reports whether the answer is whole.
func (a *answer) finish() bool {
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	a.settle(true)
	if a.framing == chunked {
		a.gather([]byte("0\r\n\r\n"))
	}
	a.send()
	if a.err == nil && a.framing == counted && a.written != a.said {
		a.err = errLength
	}
	a.free()
	clear(a.header) // an idle connection is not to keep what a replica said
	return a.err == nil
}
