package proxy

import (
	"errors"
	"io"
	"math/bits"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

var (
	errBodyTooLarge = errors.New("body exceeds the limit")
	errBodyMemory   = errors.New("all bodies together exceed the limit")
)

const (
	// minBodyBytesPerSecond is the rate that a body has to reach in the long run. Usable networks
	// are faster.
	minBodyBytesPerSecond = 1 << 10
	// slowBodyTolerance is how far a body may be behind that, in idle timeouts.
	slowBodyTolerance = 4
)

// deadlineReader reads a body and fails with os.ErrDeadlineExceeded when nothing of it arrives
// for idleTimeout, or when it is below minBodyBytesPerSecond: a client that stalls must not
// keep a buffer.
type deadlineReader struct {
	body        io.Reader
	conn        *http.ResponseController
	idleTimeout time.Duration // 0: no limit
	startedAt   time.Time
	bytesRead   int64
	cancelled   *atomic.Bool // set before a deadline that ends the reading
}

func (p *deadlineReader) Read(b []byte) (int, error) {
	if p.idleTimeout > 0 {
		until := time.Now().Add(p.idleTimeout)
		if late := p.startedAt.Add(slowBodyTolerance*p.idleTimeout + time.Duration(p.bytesRead)*time.Second/minBodyBytesPerSecond); late.Before(until) {
			until = late
		}
		// An error says that the connection has no deadlines; then there is no limit.
		_ = p.conn.SetReadDeadline(until)
	}
	if p.cancelled.Load() {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := p.body.Read(b)
	p.bytesRead += int64(n)
	return n, err
}

// clearReadDeadline ends the limits: from here on the connection is read only to notice that the
// client disconnects.
func (p *deadlineReader) clearReadDeadline() {
	if p.idleTimeout > 0 {
		_ = p.conn.SetReadDeadline(time.Time{})
	}
}

const (
	minBufferBits = 12 // 4 KiB, as a power of two
	// maxTrustedLength is the largest buffer that a Content-Length alone makes: claiming a
	// length costs a client nothing.
	maxTrustedLength = 64 << 10
)

// bodyPool reads request bodies into buffers that are pooled by size, one pool for each power of
// two, and bounds the memory of all of them.
type bodyPool struct {
	inUse atomic.Int64
	pools [48]sync.Pool // of *[]byte, by the power of two of its capacity
}

// bodyTooLargeMessage returns the message for clients of errBodyTooLarge.
func bodyTooLargeMessage(limit int64) string {
	return "the request body exceeds the limit of " + formatBytes(limit) + " (limits.body_bytes)"
}

// formatBytes formats n in the largest binary unit that divides it.
func formatBytes(n int64) string {
	switch {
	case n%(1<<30) == 0:
		return strconv.FormatInt(n>>30, 10) + " GiB"
	case n%(1<<20) == 0:
		return strconv.FormatInt(n>>20, 10) + " MiB"
	case n%(1<<10) == 0:
		return strconv.FormatInt(n>>10, 10) + " KiB"
	}
	return strconv.FormatInt(n, 10) + " bytes"
}

// bodyLimits bound one body and the buffers of all, in bytes.
type bodyLimits struct{ each, total int64 }

// readBody reads r to its end. claimedLength is what the client claims, -1 if nothing. The caller
// has to release the buffer, whatever the error.
func (b *bodyPool) readBody(r io.Reader, claimedLength int64, limits bodyLimits) (buf []byte, err error) {
	if claimedLength > limits.each {
		return nil, errBodyTooLarge
	}
	buf, err = b.acquireBuffer(min(max(claimedLength, 1), maxTrustedLength), limits.total)
	for err == nil {
		if len(buf) == cap(buf) || int64(len(buf)) == limits.each {
			buf, err = b.growUnlessEOF(r, buf, claimedLength, limits)
			continue
		}
		var n int
		n, err = r.Read(buf[len(buf):min(int64(cap(buf)), limits.each)])
		buf = buf[:len(buf)+n]
	}
	if err == io.EOF {
		err = nil
	}
	return buf, err
}

// growUnlessEOF reads one byte more and returns a larger buffer with it and the contents of a full
// one, which it releases: four times as large, or as large as the claimed length needs if that is
// less. At the end of r it returns the full one.
func (b *bodyPool) growUnlessEOF(r io.Reader, full []byte, claimedLength int64, limits bodyLimits) (buf []byte, err error) {
	var next [1]byte
	if n, err := r.Read(next[:]); n == 0 {
		return full, err
	}
	if int64(len(full)) == limits.each {
		return full, errBodyTooLarge
	}
	want := 4 * int64(cap(full))
	if claimedLength > int64(cap(full)) {
		want = min(want, claimedLength)
	}
	larger, err := b.acquireBuffer(min(want, limits.each), limits.total)
	if err != nil {
		return full, err
	}
	larger = append(append(larger, full...), next[0])
	b.releaseBuffer(full)
	return larger, nil
}

// acquireBuffer returns an empty buffer from its pool or a new one. It fails with errBodyMemory
// when all buffers together would exceed maxInUse bytes.
func (b *bodyPool) acquireBuffer(minCapacity, maxInUse int64) ([]byte, error) {
	class := max(minBufferBits, bits.Len64(uint64(minCapacity-1)))
	if b.inUse.Add(1<<class) > maxInUse {
		b.inUse.Add(-1 << class)
		return nil, errBodyMemory
	}
	if p, ok := b.pools[class].Get().(*[]byte); ok {
		return (*p)[:0], nil
	}
	return make([]byte, 0, 1<<class), nil
}

// releaseBuffer returns a buffer to its pool; nil is allowed. Nothing may refer to it any more.
func (b *bodyPool) releaseBuffer(buf []byte) {
	if cap(buf) == 0 {
		return
	}
	class := bits.Len64(uint64(cap(buf) - 1))
	b.inUse.Add(-1 << class)
	b.pools[class].Put(&buf)
}
