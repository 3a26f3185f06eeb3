package http1

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"warmroute/backends/ending"
)

const (
	// firstWord is how long a connection on which nothing has come has for that
	// once the server ends.
	firstWord = 5 * time.Second
	// mostLineEnds is how many of their characters are skipped before a request.
	mostLineEnds = 4
	// mostUnread is how much of a body that its handler left is read, so that the
	// connection can go on.
	mostUnread = 256 << 10
	// unreadTime is how long that may take.
	unreadTime = 2 * time.Second
	// farewell is how long the client has to read an answer before the rest of what
	// it sends makes the kernel reset the connection, answer and all.
	farewell = 500 * time.Millisecond
)

// conn is one client's connection. One goroutine serves it; others may call cut,
// finish and close.
type conn struct {
	net.Conn
	server   *Server
	remote   string
	accepted time.Time
	closed   sync.Once

	in     input
	br     *bufio.Reader
	out    answer
	watch  watch
	posted bool // the request before was a POST

	mu      sync.Mutex // guards what follows
	state   state
	request *ending.Context // of the one that is served; nil: none is
}

// state is what a connection is used for.
type state int

const (
	fresh   state = iota // nothing has come on it
	heading              // a header comes
	busy                 // a request is served
	idle                 // the next request may come
)

func newConn(s *Server, socket net.Conn) *conn {
	c := &conn{Conn: socket, server: s, remote: socket.RemoteAddr().String(), accepted: time.Now()}
	c.in.c, c.out.c, c.watch.c = c, c, c
	c.watch.over.L = &c.watch.mu
	return c
}

func (c *conn) close() { c.closed.Do(func() { c.Conn.Close() }) }

// finish ends the connection as soon as it carries no request.
func (c *conn) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case idle:
		c.close()
	case fresh:
		c.SetReadDeadline(c.accepted.Add(firstWord))
	case heading:
		c.SetReadDeadline(time.Now().Add(firstWord))
	}
}

// cut ends the request that is served.
func (c *conn) cut(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.request != nil {
		c.request.End(cause)
	}
}

func (c *conn) become(s state, request *ending.Context) {
	c.mu.Lock()
	c.state, c.request = s, request
	c.mu.Unlock()
}

func (c *conn) serve() {
	var ok bool
	if c.br, ok = c.server.readers.Get().(*bufio.Reader); !ok {
		c.br = bufio.NewReaderSize(nil, 4<<10)
	}
	c.br.Reset(&c.in)
	defer func() {
		if fault := recover(); fault != nil && fault != http.ErrAbortHandler {
			c.server.Log.Error("a handler has panicked", "fault", fault, "stack", string(debug.Stack()))
		}
		c.cut(context.Canceled)
		c.out.abandon()
		if c.out.body != nil {
			c.out.body.closed.Store(true) // what reads on would read from another connection
		}
		c.watch.stop()
		c.close()
		c.server.tell(c, http.StateClosed)
		c.server.leave(c)
		c.out.free()
		if c.out.body == nil || c.out.body.over { // else who still has the body could read what is another's
			c.br.Reset(nil)
			c.server.readers.Put(c.br)
		}
	}()
	for first := true; c.await(first) && c.serveOne(); first = false {
	}
}

// await waits for the next request's first byte.
func (c *conn) await(first bool) bool {
	wait := c.server.IdleTimeout
	if first {
		wait = c.server.ReadHeaderTimeout
	} else if c.server.ending.Load() && c.br.Buffered() == 0 && !c.in.held {
		return false
	}
	c.setHeaderTimeout(wait)
	c.in.left = int64(c.server.MaxHeaderBytes) + int64(c.br.Size()) // it may read some of the body too
	if !c.skipLineEnds() {
		return false
	}
	c.become(heading, nil)
	if !first {
		c.setHeaderTimeout(c.server.ReadHeaderTimeout)
	}
	return true
}

// skipLineEnds waits for a byte and leaves it unread. Old clients send a line's end
// or two after a body, which are no beginning of a request.
func (c *conn) skipLineEnds() bool {
	for skipped := 0; ; skipped++ {
		next, err := c.br.Peek(1)
		if err != nil {
			return false
		}
		if !c.posted || skipped == mostLineEnds || next[0] != '\r' && next[0] != '\n' {
			return true
		}
		c.br.Discard(1)
	}
}

// setHeaderTimeout is setReadTimeout while the connection carries no request: it
// does not put off what finish has set.
func (c *conn) setHeaderTimeout(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server.ending.Load() && (d <= 0 || d > firstWord) {
		d = firstWord
	}
	c.setReadTimeout(d)
}

// setReadTimeout has what is read fail after d; 0: never.
func (c *conn) setReadTimeout(d time.Duration) {
	at := time.Time{}
	if d > 0 {
		at = time.Now().Add(d)
	}
	c.SetReadDeadline(at)
}

// serveOne serves the request whose first byte is there, and reports whether the
// connection goes on.
func (c *conn) serveOne() bool {
	ctx := &requestContext{local: c.LocalAddr()}
	ctx.Begin(c.server.Context)
	r, fault := c.read()
	c.server.tell(c, http.StateActive)
	if fault != nil {
		c.refuse(fault)
		return false
	}
	c.become(busy, &ctx.Context)
	if c.server.Context.Err() != nil {
		c.cut(context.Cause(c.server.Context))
	}
	c.SetReadDeadline(time.Time{})
	from := &body{c: c, from: r.Body, expected: expectsContinue(r) && r.ProtoAtLeast(1, 1) && r.ContentLength != 0, length: r.ContentLength}
	if r.Body == http.NoBody {
		from.over = true
		c.watch.soon()
	} else {
		r.Body = from
	}
	*r = *r.WithContext(ctx) // not another: the one of ReadRequest gets the body's trailer
	r.RemoteAddr = c.remote
	w := &c.out
	w.begin(r, from)
	c.server.Handler.ServeHTTP(w, r)
	ctx.End(context.Canceled)
	from.closed.Store(true)
	whole := w.finish()
	c.watch.stop()
	if r.MultipartForm != nil {
		_ = r.MultipartForm.RemoveAll()
	}
	c.SetWriteDeadline(time.Time{})
	if !whole || !from.rest() || w.last {
		return false
	}
	w.body = nil // with which the request would be kept
	c.become(idle, nil)
	c.server.tell(c, http.StateIdle)
	return true
}

// sayFarewell ends the answers, and gives the client time to read the last one.
func (c *conn) sayFarewell() {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
	time.Sleep(farewell)
}

// requestContext is a request's.
type requestContext struct {
	ending.Context
	local net.Addr
}

// Value knows what net/http's server tells of a request by its context.
func (c *requestContext) Value(key any) any {
	if key == http.LocalAddrContextKey {
		return c.local
	}
	return c.Context.Value(key)
}

// input is what the client sends. It bounds headers, and gives out first what the
// watch has read.
type input struct {
	c     *conn
	left  int64 // bytes that may be read; negative: any number
	first [1]byte
	held  bool // first is to be given out
}

var errHeaderTooLong = errors.New("the header is too long")

// Read implements io.Reader.
func (in *input) Read(p []byte) (n int, err error) {
	switch {
	case in.left == 0:
		return 0, errHeaderTooLong
	case len(p) == 0:
		return 0, nil
	case in.left > 0:
		p = p[:min(int64(len(p)), in.left)]
	}
	if in.held {
		p[0], in.held, n = in.first[0], false, 1
	} else if n, err = in.c.Read(p); err != nil {
		in.c.cut(context.Canceled)
	}
	if in.left > 0 {
		in.left -= int64(n)
	}
	return n, err
}
