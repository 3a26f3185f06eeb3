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
	errBodyTooLarge = errors.New("body over the limit")
	errBodyMemory   = errors.New("all bodies together over the limit")
)

const (
	// minBodyBytesPerSecond is how many bytes a second a body has to bring in the long run. No
	// network that answers are read over is slower.
	minBodyBytesPerSecond = 1 << 10
	// slowBodyTolerance is how many times the longest silence a body may be behind that.
	slowBodyTolerance = 4
)

// throttledReader reads a body and fails with os.ErrDeadlineExceeded when nothing of it
// comes for as long as idle, or when it comes so slowly that it might as well
// not: a buffer is not to be held by a client that stalls.
type throttledReader struct {
	body        io.Reader
	conn        *http.ResponseController
	idleTimeout time.Duration // 0: no limit
	startedAt   time.Time
	bytesRead   int64        // bytes
	cancelled   *atomic.Bool // set before a deadline that ends the reading
}

func (p *throttledReader) Read(b []byte) (int, error) {
	if p.idleTimeout > 0 {
		until := time.Now().Add(p.idleTimeout)
		if late := p.startedAt.Add(slowBodyTolerance*p.idleTimeout + time.Duration(p.bytesRead)*time.Second/minBodyBytesPerSecond); late.Before(until) {
			until = late
		}
		// An error says that the connection knows no deadlines; then there is none.
		_ = p.conn.SetReadDeadline(until)
	}
	if p.cancelled.Load() {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := p.body.Read(b)
	p.bytesRead += int64(n)
	return n, err
}

// clearDeadline lifts the limit: from here on the connection is read only to see the
// client leave.
func (p *throttledReader) clearDeadline() {
	if p.idleTimeout > 0 {
		_ = p.conn.SetReadDeadline(time.Time{})
	}
}

const (
	minBufferBits = 12 // 4 KiB, as a power of two
	// maxTrustedLength is how far a Content-Length is believed before its bytes
	// have come: claiming a length costs nothing, a buffer does.
	maxTrustedLength = 64 << 10
)

// bodyPool reads requests whole into buffers that are pooled by size, one pool
// for each power of two, and bounds what all of them hold at once.
type bodyPool struct {
	inUse atomic.Int64
	pools [48]sync.Pool // of *[]byte, by the power of two of its capacity
}

// bodyTooLargeMessage is the message of errBodyTooLarge.
func bodyTooLargeMessage(limit int64) string {
	return "the request body exceeds the limit of " + formatBytes(limit) + " (limits.body_bytes)"
}

// formatBytes writes n in the largest binary unit that divides it.
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

// bodyLimits are how many bytes one body may have, and the buffers of all.
type bodyLimits struct{ each, total int64 }

// read reads r to its end. length is what the client claims, -1 when it does
// not say. The buffer goes back by release, whatever the error.
func (b *bodyPool) read(r io.Reader, length int64, most bodyLimits) (buf []byte, err error) {
	if length > most.each {
		return nil, errBodyTooLarge
	}
	buf, err = b.acquire(min(max(length, 1), maxTrustedLength), most.total)
	for err == nil {
		if len(buf) == cap(buf) || int64(len(buf)) == most.each {
			buf, err = b.grow(r, buf, length, most)
			continue
		}
		var n int
		n, err = r.Read(buf[len(buf):min(int64(cap(buf)), most.each)])
		buf = buf[:len(buf)+n]
	}
	if err == io.EOF {
		err = nil
	}
	return buf, err
}

// grow is for a full buffer. It sees first whether anything follows, so that a
// body that just fits never asks for a larger one, and then moves it to a buffer
// four times as large, or as large as the claimed length needs if that is less.
func (b *bodyPool) grow(r io.Reader, full []byte, length int64, most bodyLimits) ([]byte, error) {
	var next [1]byte
	if n, err := r.Read(next[:]); n == 0 {
		return full, err
	}
	if int64(len(full)) == most.each {
		return full, errBodyTooLarge
	}
	want := 4 * int64(cap(full))
	if length > int64(cap(full)) {
		want = min(want, length)
	}
	larger, err := b.acquire(min(want, most.each), most.total)
	if err != nil {
		return full, err
	}
	larger = append(append(larger, full...), next[0])
	b.release(full)
	return larger, nil
}

func (b *bodyPool) acquire(size, total int64) ([]byte, error) {
	class := max(minBufferBits, bits.Len64(uint64(size-1)))
	if b.inUse.Add(1<<class) > total {
		b.inUse.Add(-1 << class)
		return nil, errBodyMemory
	}
	if p, ok := b.pools[class].Get().(*[]byte); ok {
		return (*p)[:0], nil
	}
	return make([]byte, 0, 1<<class), nil
}

// release gives a buffer back; nil is allowed. Nothing may refer to it any more.
func (b *bodyPool) release(buf []byte) {
	if cap(buf) == 0 {
		return
	}
	class := bits.Len64(uint64(cap(buf) - 1))
	b.inUse.Add(-1 << class)
	b.pools[class].Put(&buf)
}
