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
	errBodyTooLarge   = errors.New("body over the limit")
	errBodiesTooLarge = errors.New("all bodies together over the limit")
)

const (
	// slowestBody is how many bytes a second a body has to bring in the long run. No
	// network that answers are read over is slower.
	slowestBody = 1 << 10
	// slack is how many times the longest silence a body may be behind that.
	slack = 4
)

// paced reads a body and fails with os.ErrDeadlineExceeded when nothing of it
// comes for as long as idle, or when it comes so slowly that it might as well
// not: a buffer is not to be held by a client that stalls.
type paced struct {
	body  io.Reader
	conn  *http.ResponseController
	idle  time.Duration // 0: no limit
	began time.Time
	came  int64        // bytes
	cut   *atomic.Bool // set before a deadline that ends the reading
}

func (p *paced) Read(b []byte) (int, error) {
	if p.idle > 0 {
		until := time.Now().Add(p.idle)
		if late := p.began.Add(slack*p.idle + time.Duration(p.came)*time.Second/slowestBody); late.Before(until) {
			until = late
		}
		// An error says that the connection knows no deadlines; then there is none.
		_ = p.conn.SetReadDeadline(until)
	}
	if p.cut.Load() {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := p.body.Read(b)
	p.came += int64(n)
	return n, err
}

// end lifts the limit: from here on the connection is read only to see the
// client leave.
func (p *paced) end() {
	if p.idle > 0 {
		_ = p.conn.SetReadDeadline(time.Time{})
	}
}

const (
	smallestBuffer = 12 // 4 KiB, as a power of two
	// trustedLength is how far a Content-Length is believed before its bytes
	// have come: claiming a length costs nothing, a buffer does.
	trustedLength = 64 << 10
)

// bodies reads requests whole into buffers that are pooled by size, one pool
// for each power of two, and bounds what all of them hold at once.
type bodies struct {
	held  atomic.Int64
	pools [48]sync.Pool // of *[]byte, by the power of two of its capacity
}

// bodyTooLarge is the message of errBodyTooLarge.
func bodyTooLarge(limit int64) string {
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

// bodyBounds are how many bytes one body may have, and the buffers of all.
type bodyBounds struct{ each, total int64 }

// read reads r to its end. length is what the client claims, -1 when it does
// not say. The buffer goes back by release, whatever the error.
func (b *bodies) read(r io.Reader, length int64, most bodyBounds) (buf []byte, err error) {
	if length > most.each {
		return nil, errBodyTooLarge
	}
	buf, err = b.acquire(min(max(length, 1), trustedLength), most.total)
	for err == nil {
		if len(buf) == cap(buf) || int64(len(buf)) == most.each {
			buf, err = b.more(r, buf, length, most)
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

// more is for a full buffer. It sees first whether anything follows, so that a
// body that just fits never asks for a larger one, and then moves it to a buffer
// four times as large, or as large as the claimed length needs if that is less.
func (b *bodies) more(r io.Reader, full []byte, length int64, most bodyBounds) ([]byte, error) {
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

func (b *bodies) acquire(size, total int64) ([]byte, error) {
	class := max(smallestBuffer, bits.Len64(uint64(size-1)))
	if b.held.Add(1<<class) > total {
		b.held.Add(-1 << class)
		return nil, errBodiesTooLarge
	}
	if p, ok := b.pools[class].Get().(*[]byte); ok {
		return (*p)[:0], nil
	}
	return make([]byte, 0, 1<<class), nil
}

// release gives a buffer back; nil is allowed. Nothing may refer to it any more.
func (b *bodies) release(buf []byte) {
	if cap(buf) == 0 {
		return
	}
	class := bits.Len64(uint64(cap(buf) - 1))
	b.held.Add(-1 << class)
	b.pools[class].Put(&buf)
}
