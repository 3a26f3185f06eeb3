package transport

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// Body is the body of an answer, read from the connection as it comes. One
// goroutine reads; any may Close. Its connection goes back to the pool when the
// body was read to its end and nothing else is left on it, else it is closed.
type Body struct {
	ctx  context.Context // the request's
	t    *Transport
	c    *conn
	br   *bufio.Reader
	stop func() bool // ends the watch on ctx; false: ctx closed the socket

	// Parts of one allocation, as they live as long as the Body does.
	up   upload
	resp http.Response

	ours sync.Mutex // guards gone: a Close from elsewhere must not hit a connection given back
	gone bool       // c is in the pool or closed

	mu        sync.Mutex // guards what follows, and br; held while reading
	state     state
	left      int64 // bytes to come: of the body when counted, of the chunk in chunkData
	trailers  int   // bytes of trailer lines seen
	keepAlive bool
	err       error // why there is no more; io.EOF at the end. nil: c and br are ours

	quiet  time.Duration // after which Read returns ErrNotYet; 0: never
	idle   time.Duration // longest silence; 0: any
	silent time.Time     // when the wait for the next byte began; zero after a byte
	armed  time.Time     // the socket's read deadline; zero: none
}

// Read returns what has come, as soon as anything has, up to several chunks at a
// time, and waits only when nothing has. It returns io.EOF with the last bytes, if
// it knows by then that they are the last, and io.ErrUnexpectedEOF when the
// replica closed before the end. ErrNotYet ends nothing: see SetQuietTimeout.
func (b *Body) Read(p []byte) (n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.err == nil {
		known, err := b.advance()
		switch {
		case err != nil:
		case b.state == ended:
			err = io.EOF
		case n == len(p), n > 0 && (!known || b.br.Buffered() == 0):
			return n, nil
		case !known:
			_, err = b.receive(nil, time.Time{})
		default:
			var m int
			m, err = b.receiveData(p[n:])
			n += m
		}
		if err == ErrNotYet {
			return n, err
		}
		if err != nil {
			b.end(err)
		}
	}
	if n > 0 && b.err != io.EOF {
		return n, nil // the error comes with the next call
	}
	return n, b.err
}

// WaitReadable waits at most d for the next byte of the body, and reports whether
// it is there: then Read does not wait. At the end it is true, and Read gives
// io.EOF. It consumes nothing, so there may be any number of calls before a Read;
// the idle timeout counts through them.
func (b *Body) WaitReadable(d time.Duration) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var until time.Time
	for b.err == nil {
		known, err := b.advance()
		if err == nil {
			if b.state == ended || known && b.br.Buffered() > 0 {
				return true, nil
			}
			if until.IsZero() {
				until = time.Now().Add(d)
			}
			_, err = b.receive(nil, until)
		}
		if err == ErrNotYet {
			return false, nil
		}
		if err != nil {
			b.end(err)
		}
	}
	if b.err == io.EOF {
		return true, nil
	}
	return false, b.err
}

// SetQuietTimeout makes Read return ErrNotYet whenever it has waited for d without
// a byte. Nothing is lost by it, and the idle timeout counts on. 0, as at first:
// Read waits on.
func (b *Body) SetQuietTimeout(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.quiet = d
}

// SetIdleTimeout makes Read and WaitReadable fail with os.ErrDeadlineExceeded
// after a wait of d without a byte. The wait begins with the call that finds
// nothing, so a slow reader is not taken for a silent replica. 0, as at first:
// no limit.
func (b *Body) SetIdleTimeout(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.idle = d
}

// Close gives the connection up: to the pool when the body was read to its end,
// else the socket is closed at once. It interrupts a Read, and returns when
// nothing touches the request's body any more. Further calls do nothing.
func (b *Body) Close() error {
	if !b.mu.TryLock() {
		b.ours.Lock()
		if !b.gone {
			b.c.abort()
		}
		b.ours.Unlock()
		b.mu.Lock()
	}
	defer b.mu.Unlock()
	if b.err == nil || b.err == io.EOF {
		b.end(http.ErrBodyReadAfterClose)
	}
	return nil
}

// Uploaded reports whether the whole request was written, so that its body is not
// touched any more while this one is read.
func (b *Body) Uploaded() bool { return b.up.sent() }

// end makes err the answer to every further call, and lets the connection go.
// mu is held.
func (b *Body) end(err error) {
	if err != io.EOF && err != http.ErrBodyReadAfterClose {
		if why := context.Cause(b.ctx); why != nil {
			err = why
		} else if err != io.ErrUnexpectedEOF { // bare, as readers compare it
			err = fmt.Errorf("answer of %s: %w", b.t.addr, err)
		}
	}
	if b.err == nil {
		b.letGo()
	}
	b.err = err
}

// letGo returns the connection to the pool if it is fit for another request, and
// closes it if not. To be called once.
func (b *Body) letGo() {
	fit := b.stop() && b.keepAlive && b.state == ended && b.br.Buffered() == 0 && b.up.sentSoon()
	if fit && !b.armed.IsZero() {
		fit = b.c.SetReadDeadline(time.Time{}) == nil
	}
	b.ours.Lock()
	b.gone = true
	b.ours.Unlock()
	b.t.pool.ReleaseReader(b.br)
	b.br = nil
	if fit {
		b.c.release()
		return
	}
	b.c.discard()
	b.up.wait()
}
