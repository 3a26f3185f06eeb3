package proxy

import (
	"errors"
	"io"
	"math/bits"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"warmroute/proxy/activity"
)

var errBodyTooLarge = errors.New("body exceeds the limit")

const (
	// minBodyBytesPerSecond is the rate that a body has to have over each timeouts.body_idle.
	minBodyBytesPerSecond = 1 << 10
	// bodyRateSlots is into how many slots bodyRate divides its window.
	bodyRateSlots = 16
)

// bodyRate finds when the bytes of the last window are too few for minBodyBytesPerSecond. The window slides, so a body that
// begins fast may not stall later.
type bodyRate struct {
	window time.Duration
	slots  [bodyRateSlots]int64 // bytes that came in each of the last slots of time, by its number modulo bodyRateSlots
	latest int                  // number of the latest slot
}

// add records n bytes that came at a time since the beginning.
func (r *bodyRate) add(at time.Duration, n int) {
	slot := int(at * bodyRateSlots / r.window)
	for i := max(r.latest+1, slot-bodyRateSlots+1); i <= slot; i++ {
		r.slots[i%bodyRateSlots] = 0
	}
	r.latest = max(r.latest, slot)
	r.slots[r.latest%bodyRateSlots] += int64(n)
}

// deadline returns when the body is too slow if no more comes, since the beginning. It is at most one slot late.
func (r *bodyRate) deadline() time.Duration {
	missing := int64(r.window.Seconds() * minBodyBytesPerSecond)
	for i := r.latest; i >= 0 && i > r.latest-bodyRateSlots; i-- {
		if missing -= r.slots[i%bodyRateSlots]; missing <= 0 {
			return time.Duration(i+1)*r.window/bodyRateSlots + r.window
		}
	}
	return r.window
}

// deadlineReader reads a body and fails with os.ErrDeadlineExceeded when nothing of it arrives for the window of rate, or less
// than minBodyBytesPerSecond: a client that stalls must not keep a buffer.
type deadlineReader struct {
	body      io.Reader
	conn      *http.ResponseController
	rate      bodyRate // window 0: no limit
	startedAt time.Time
	request   *activity.Request // cancelled before a deadline that ends the reading
}

func (p *deadlineReader) Read(b []byte) (int, error) {
	if p.rate.window > 0 {
		until := p.startedAt.Add(p.rate.deadline())
		if idle := time.Now().Add(p.rate.window); idle.Before(until) {
			until = idle
		}
		// An error says that the connection has no deadlines; then there is no limit.
		_ = p.conn.SetReadDeadline(until)
	}
	if p.request.IsCancelled() {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := p.body.Read(b)
	if p.rate.window > 0 {
		p.rate.add(time.Since(p.startedAt), n)
	}
	return n, err
}

// clearReadDeadline ends the limits: from here on the connection is read only to notice a disconnect.
func (p *deadlineReader) clearReadDeadline() {
	if p.rate.window > 0 {
		_ = p.conn.SetReadDeadline(time.Time{})
	}
}

const (
	minBufferBits = 12 // 4 KiB, as a power of two
	maxPooledBits = 20 // 1 MiB: larger buffers are left to the garbage collector
	// maxTrustedLength is the largest buffer that a Content-Length alone makes: a claim costs a client nothing.
	maxTrustedLength = 64 << 10
)

// bodyPool reads request bodies into buffers, which it pools by powers of two. The memory of all of them and of each tenant
// is bounded. Safe for concurrent use.
type bodyPool struct {
	tenants *tenants                     // who has reserved buffers
	pools   [maxPooledBits + 1]sync.Pool // of *[]byte, by the power of two of its capacity
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

// readBody reads r to its end. claimedLength is what the client claims, -1 if nothing. At any time it has reserved at most twice
// of what has arrived and maxTrustedLength. The caller has to release the buffer, whatever the error.
func (b *bodyPool) readBody(r io.Reader, claimedLength int64, owner tenant, limits bodyLimits) (buf []byte, err error) {
	if claimedLength > limits.each {
		return nil, errBodyTooLarge
	}
	size := bufferSize(min(max(claimedLength, 1), maxTrustedLength))
	if err := b.tenants.reserveBodyBytes(owner, size, limits); err != nil {
		return nil, err
	}
	buf = b.newBuffer(size)
	for err == nil {
		if len(buf) == cap(buf) || int64(len(buf)) == limits.each {
			buf, err = b.growUnlessEOF(r, buf, claimedLength, owner, limits)
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

// growUnlessEOF reads one byte more and returns a larger buffer with it and the contents of a full one, which it gives up:
// twice as large, or as the claimed length needs if that is less. At the end of r it returns the full one.
func (b *bodyPool) growUnlessEOF(r io.Reader, full []byte, claimedLength int64, owner tenant, limits bodyLimits) (buf []byte, err error) {
	var next [1]byte
	if n, err := r.Read(next[:]); n == 0 {
		return full, err
	}
	if int64(len(full)) == limits.each {
		return full, errBodyTooLarge
	}
	want := max(2*int64(cap(full)), min(4*int64(cap(full)), maxTrustedLength))
	if claimedLength > int64(cap(full)) {
		want = min(want, claimedLength)
	}
	size := bufferSize(min(want, limits.each))
	if err := b.tenants.reserveBodyBytes(owner, size-int64(cap(full)), limits); err != nil { // both are there for the time of a copy only
		return full, err
	}
	larger := append(append(b.newBuffer(size), full...), next[0])
	b.poolBuffer(full)
	return larger, nil
}

// bufferSize returns the size of a buffer for n bytes: a power of two, or n if that would not be pooled.
func bufferSize(n int64) int64 {
	if n > 1<<maxPooledBits {
		return n
	}
	return 1 << max(minBufferBits, bits.Len64(uint64(n-1)))
}

// newBuffer returns an empty buffer of a size that bufferSize returned.
func (b *bodyPool) newBuffer(size int64) []byte {
	if size <= 1<<maxPooledBits {
		if p, ok := b.pools[bits.Len64(uint64(size-1))].Get().(*[]byte); ok {
			return (*p)[:0]
		}
	}
	return make([]byte, 0, size)
}

func (b *bodyPool) poolBuffer(buf []byte) {
	if cap(buf) <= 1<<maxPooledBits {
		b.pools[bits.Len64(uint64(cap(buf)-1))].Put(&buf)
	}
}

// releaseBuffer ends the reservation of a buffer, which may be nil. Nothing may refer to it any more.
func (b *bodyPool) releaseBuffer(buf []byte, owner tenant) {
	if cap(buf) == 0 {
		return
	}
	b.tenants.releaseBodyBytes(owner, int64(cap(buf)))
	b.poolBuffer(buf)
}
