package transport

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
)

// Body is the body of a response, read from the connection as it arrives. One
// goroutine may read, any may Close. After a complete read the connection returns to
// the pool, if nothing else is left on it and ForbidReuse was not called; otherwise it is
// closed. One allocation serves the whole request.
type Body struct {
	ctx  context.Context // the request's
	t    *Transport
	c    *conn
	br   *bufio.Reader
	stop func() bool // stops watching ctx; false: ctx closed the socket

	upload upload
	resp   http.Response

	connMu   sync.Mutex // guards released: Close must not close a connection that was returned
	released bool       // c was returned to the pool or closed

	mu             sync.Mutex // guards what follows, and br; held while reading
	reuseForbidden bool       // c does not return to the pool: see ForbidReuse
	state          state
	left           int64 // bytes left: of the body in counted, of the chunk in chunkData
	trailers       int   // bytes of trailer lines seen
	keepAlive      bool
	err            error // final error, io.EOF at the end; nil while there is more to read

	quietTimeout time.Duration // 0: none
	idleTimeout  time.Duration // 0: none
	waitingSince time.Time     // of the wait for the next byte; zero after a byte
	deadline     time.Time     // the socket's read deadline; zero: none
}

// Read returns what has arrived, up to several chunks, and waits only for the first
// byte. It returns io.EOF with the last bytes if they are known to be the last, and
// io.ErrUnexpectedEOF when the replica closed before the end. Reading can continue
// after ErrQuietTimeout: see SetQuietTimeout.
func (b *Body) Read(p []byte) (n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.err == nil {
		known, err := b.skipFraming()
		switch {
		case err != nil:
		case b.state == ended:
			err = io.EOF
		case n == len(p), n > 0 && (!known || b.br.Buffered() == 0):
			return n, nil
		case !known:
			_, err = b.readOrFill(nil, time.Time{})
		default:
			var m int
			m, err = b.readData(p[n:])
			n += m
		}
		if err == ErrQuietTimeout {
			return n, err
		}
		if err != nil {
			b.endWithError(err)
		}
	}
	if n > 0 && b.err != io.EOF {
		return n, nil // the error comes with the next call
	}
	return n, b.err
}

// WaitReadable waits at most d for the next byte of the body or its end, and reports whether Read
// would return without waiting. It consumes nothing; the idle timeout runs across calls.
func (b *Body) WaitReadable(d time.Duration) (readable bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var until time.Time
	for b.err == nil {
		known, err := b.skipFraming()
		if err == nil {
			if b.state == ended || known && b.br.Buffered() > 0 {
				return true, nil
			}
			if until.IsZero() {
				until = time.Now().Add(d)
			}
			_, err = b.readOrFill(nil, until)
		}
		if err == ErrQuietTimeout {
			return false, nil
		}
		if err != nil {
			b.endWithError(err)
		}
	}
	if b.err == io.EOF {
		return true, nil
	}
	return false, b.err
}

// SetQuietTimeout makes Read return ErrQuietTimeout after each wait of d without a
// byte. Nothing is lost, and the idle timeout keeps running. 0, the default: never.
func (b *Body) SetQuietTimeout(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.quietTimeout = d
}

// SetIdleTimeout makes Read and WaitReadable fail with os.ErrDeadlineExceeded after a
// wait of d without a byte. The wait begins with the first call that finds nothing,
// so that a slow reader does not count. 0, the default: never.
func (b *Body) SetIdleTimeout(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.idleTimeout = d
}

// ForbidReuse keeps the connection out of the pool, also after a complete read, until
// AllowReuse: Close closes it before. Call it before the first Read. It is for a caller
// that has to see the body before it knows that it is the response to its request. Where
// it is not, every later response on the connection would be another request's too.
func (b *Body) ForbidReuse() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reuseForbidden = true
}

// AllowReuse ends ForbidReuse: the connection returns to the pool after a complete read,
// or now, after one.
func (b *Body) AllowReuse() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reuseForbidden = false; b.err == io.EOF {
		b.releaseOrCloseConn()
	}
}

// Close returns the connection to the pool if the body was read to its end, else it
// closes the socket. It interrupts a Read, and returns when the request's body is not
// used any more. Further calls have no effect.
func (b *Body) Close() error {
	if !b.mu.TryLock() {
		b.connMu.Lock()
		if !b.released {
			b.c.closeSocket()
		}
		b.connMu.Unlock()
		b.mu.Lock()
	}
	defer b.mu.Unlock()
	if b.err == nil || b.err == io.EOF {
		b.endWithError(http.ErrBodyReadAfterClose)
	}
	return nil
}

// Uploaded reports whether the complete request was written: its body is not used any more.
func (b *Body) Uploaded() bool { return b.upload.isSent() }

// endWithError makes err the result of every further call, and releases or closes the
// connection the first time, unless its reuse is forbidden at the end of the body. The caller holds mu.
func (b *Body) endWithError(err error) {
	if err != io.EOF && err != http.ErrBodyReadAfterClose {
		if cause := context.Cause(b.ctx); cause != nil {
			err = cause
		} else if err != io.ErrUnexpectedEOF { // not wrapped, since readers compare it
			err = fmt.Errorf("response of %s: %w", b.t.addr, err)
		}
	}
	if !b.reuseForbidden || err != io.EOF {
		b.releaseOrCloseConn()
	}
	b.err = err
}

// releaseOrCloseConn returns the connection to the pool if it is reusable. Otherwise it
// closes the connection and waits until the request's body is not used any more. Further
// calls have no effect. The caller holds mu, or is the only one that has b.
func (b *Body) releaseOrCloseConn() {
	if b.br == nil {
		return
	}
	reusable := b.stop() && !b.reuseForbidden && b.keepAlive && b.state == ended && b.br.Buffered() == 0 && b.upload.awaitSentBriefly()
	if reusable && !b.deadline.IsZero() {
		reusable = b.c.SetReadDeadline(time.Time{}) == nil
	}
	b.connMu.Lock()
	b.released = true
	b.connMu.Unlock()
	b.t.readers.Put(b.br)
	b.br = nil
	if reusable {
		b.c.release()
		return
	}
	b.c.discard() // which ends a blocked write
	if b.upload.done != nil {
		<-b.upload.done
	}
}

// ErrQuietTimeout is returned by Body.Read after the quiet timeout; reading can go on.
var ErrQuietTimeout = errors.New("no data within the quiet timeout")

// readData reads bytes of the body into p, from the buffer or else from the socket, but
// not beyond the end of the body or chunk.
func (b *Body) readData(p []byte) (n int, err error) {
	if b.state == untilClose {
		return b.readOrFill(p, time.Time{})
	}
	n, err = b.readOrFill(p[:min(int64(len(p)), b.left)], time.Time{})
	if b.left -= int64(n); b.left == 0 {
		if b.state == counted {
			b.state = ended
		} else {
			b.state = chunkEnd
		}
	}
	return n, err
}

// readOrFill reads once: into p, or at least one more byte into the buffer if p is nil.
// It waits until the time until (zero: the quiet timeout) and then fails with
// ErrQuietTimeout, or with os.ErrDeadlineExceeded when the idle timeout ends before.
func (b *Body) readOrFill(p []byte, until time.Time) (n int, err error) {
	if p != nil && b.br.Buffered() > 0 {
		return b.br.Read(p)
	}
	limit, timeoutErr := b.armReadDeadline(until)
	for {
		if p != nil {
			n, err = b.br.Read(p)
		} else {
			_, err = b.br.Peek(b.br.Buffered() + 1)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if !time.Now().Before(limit) {
			return 0, timeoutErr
		}
		b.setReadDeadline(limit) // the deadline was early
	}
	switch {
	case err == nil:
		b.waitingSince = time.Time{}
	case err != io.EOF:
	case b.state == untilClose:
		b.state, err = ended, nil
	default:
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// armReadDeadline makes the next read time out at limit, or earlier by up to a quarter
// of the wait, so that busy streams seldom set a deadline. limit is until, or the end of
// the quiet timeout if until is zero, or the end of the idle timeout if that is sooner.
// timeoutErr is the error when limit has passed.
func (b *Body) armReadDeadline(until time.Time) (limit time.Time, timeoutErr error) {
	if b.idleTimeout == 0 && b.quietTimeout == 0 && until.IsZero() {
		if !b.deadline.IsZero() {
			b.setReadDeadline(time.Time{})
		}
		return limit, nil
	}
	now := time.Now()
	if b.waitingSince.IsZero() {
		b.waitingSince = now
	}
	if until.IsZero() && b.quietTimeout > 0 {
		until = now.Add(b.quietTimeout)
	}
	limit, timeoutErr = until, ErrQuietTimeout
	if idleEnd := b.waitingSince.Add(b.idleTimeout); b.idleTimeout > 0 && (until.IsZero() || !idleEnd.After(until)) {
		limit, timeoutErr = idleEnd, os.ErrDeadlineExceeded
	}
	// A deadline in the past would fail even if the socket is readable.
	if soonest := now.Add(time.Millisecond); limit.Before(soonest) {
		limit = soonest
	}
	if early := limit.Sub(b.deadline); !b.deadline.After(now) || early < 0 || early > limit.Sub(now)/4 {
		b.setReadDeadline(limit)
	}
	return limit, timeoutErr
}

func (b *Body) setReadDeadline(at time.Time) {
	b.deadline = at
	b.c.SetReadDeadline(at) // fails only on a closed socket, as the read then does
}

// state is the position of the next byte in the response's framing.
type state uint8

const (
	untilClose state = iota // body, to the end of the connection
	counted                 // body, left bytes of it
	chunkHead               // a chunk's size line
	chunkData               // body, left bytes of this chunk
	chunkEnd                // the line end after a chunk's data
	trailer                 // a trailer line, or the empty line that ends it all
	ended                   // after the last byte
)

const (
	errChunkLine   = invalidResponse("malformed chunk")
	errLineTooLong = invalidResponse("chunk framing line too long")
)

// skipFraming skips framing lines that are completely buffered. atData is true when the next byte
// is body, buffered or not. If it is false, the response has ended (state is ended) or more framing
// must be received. Lines are never consumed in part, so that a wait can be abandoned at any time.
func (b *Body) skipFraming() (atData bool, err error) {
	for {
		switch b.state {
		case untilClose, counted, chunkData:
			return true, nil
		case ended:
			return false, nil
		}
		line, ok, err := b.nextBufferedLine()
		if err != nil || !ok {
			return false, err
		}
		switch b.state {
		case chunkHead:
			if b.left, err = parseChunkSize(line); err != nil {
				return false, err
			}
			b.state = chunkData
			if b.left == 0 {
				b.state = trailer
			}
		case chunkEnd:
			if len(line) > 0 {
				return false, errChunkLine
			}
			b.state = chunkHead
		case trailer:
			if b.trailers += len(line); b.trailers > b.t.options.MaxHeaderBytes {
				return false, errHeaderTooLong
			}
			if len(line) == 0 {
				b.state = ended
				continue
			}
			name, value, colon := strings.Cut(string(line), ":")
			if !colon || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
				return false, errHeaderLine
			}
		}
	}
}

// nextBufferedLine consumes the next line, if it is completely buffered, and returns it
// without its CR LF. ok is false if it is not. The line is valid until the next read.
func (b *Body) nextBufferedLine() (line []byte, ok bool, err error) {
	have, _ := b.br.Peek(b.br.Buffered())
	end := bytes.IndexByte(have, '\n')
	if end < 0 {
		if len(have) == b.br.Size() {
			return nil, false, errLineTooLong
		}
		return nil, false, nil
	}
	b.br.Discard(end + 1)
	line, crlf := bytes.CutSuffix(have[:end], []byte("\r"))
	if !crlf || bytes.IndexByte(line, '\r') >= 0 {
		return nil, false, errLineEnd
	}
	return line, true, nil
}

// parseChunkSize parses a chunk's size line: hexadecimal digits, then spaces or extensions, which
// are ignored. Spaces before extensions are an error, because parsers differ on them.
func parseChunkSize(line []byte) (n int64, err error) {
	line, _, _ = bytes.Cut(bytes.TrimRight(line, " \t"), []byte(";"))
	size, err := strconv.ParseUint(string(line), 16, 63)
	if err != nil || len(line) > 15 {
		return 0, errChunkLine
	}
	return int64(size), nil
}
