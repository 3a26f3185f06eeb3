package admit

import (
	"errors"
	"io"
	"math/bits"
	"os"
	"sync"
	"time"

	"warmroute/prompt"
	"warmroute/proxy/activity"
)

// ErrBodyTooLarge is the error for a body beyond BodyLimits.Each.
var ErrBodyTooLarge = errors.New("body exceeds the limit")

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

// BodyReader reads a body and fails with os.ErrDeadlineExceeded when nothing of it arrives for the window of rate, or less
// than minBodyBytesPerSecond: a client that stalls must not keep a buffer.
type BodyReader struct {
	body    io.Reader
	rate    bodyRate          // window 0: no limit
	request *activity.Request // cancelled before a deadline that ends the reading
}

// NewBodyReader returns a reader of the body of a request, with a window for its rate; 0: no limit.
func NewBodyReader(body io.Reader, window time.Duration, r *activity.Request) BodyReader {
	return BodyReader{body, bodyRate{window: window}, r}
}

// Read implements io.Reader.
func (p *BodyReader) Read(b []byte) (int, error) {
	if p.rate.window > 0 {
		until := p.request.Arrived.Add(p.rate.deadline())
		if idle := time.Now().Add(p.rate.window); idle.Before(until) {
			until = idle
		}
		// An error says that the connection has no deadlines; then there is no limit.
		_ = p.request.Conn.SetReadDeadline(until)
	}
	if p.request.IsCancelled() {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := p.body.Read(b)
	if p.rate.window > 0 {
		p.rate.add(time.Since(p.request.Arrived), n)
	}
	return n, err
}

// ClearReadDeadline ends the limits: from here on the connection is read only to notice a disconnect.
func (p *BodyReader) ClearReadDeadline() {
	if p.rate.window > 0 {
		_ = p.request.Conn.SetReadDeadline(time.Time{})
	}
}

const (
	minBufferBits = 12 // 4 KiB, as a power of two
	maxPooledBits = 20 // 1 MiB: larger buffers are left to the garbage collector
	// maxTrustedLength is the largest buffer that a Content-Length alone makes: a claim costs a client nothing.
	maxTrustedLength = 64 << 10
)

// BodyPool reads request bodies into buffers, which it pools by powers of two. The memory of all of them and of each tenant
// is bounded. Safe for concurrent use.
type BodyPool struct {
	tenants *Tenants                     // who has reserved buffers
	pools   [maxPooledBits + 1]sync.Pool // of *[]byte, by the power of two of its capacity
}

// NewBodyPool returns a pool without buffers, whose memory is charged to tenants.
func NewBodyPool(tenants *Tenants) *BodyPool { return &BodyPool{tenants: tenants} }

// ReadBody reads r to its end. claimedLength is what the client claims, -1 if nothing. At any time it has reserved at most twice
// of what has arrived and maxTrustedLength. The caller has to release the buffer, whatever the error.
func (b *BodyPool) ReadBody(r io.Reader, claimedLength int64, owner Tenant, limits BodyLimits) (buf []byte, err error) {
	if claimedLength > limits.Each {
		return nil, ErrBodyTooLarge
	}
	size := bufferSize(min(max(claimedLength, 1), maxTrustedLength))
	if err := b.tenants.reserveBodyBytes(owner, size, limits); err != nil {
		return nil, err
	}
	buf = b.newBuffer(size)
	for err == nil {
		if len(buf) == cap(buf) || int64(len(buf)) == limits.Each {
			buf, err = b.growUnlessEOF(r, buf, claimedLength, owner, limits)
			continue
		}
		var n int
		n, err = r.Read(buf[len(buf):min(int64(cap(buf)), limits.Each)])
		buf = buf[:len(buf)+n]
	}
	if err == io.EOF {
		err = nil
	}
	return buf, err
}

// growUnlessEOF reads one byte more and returns a larger buffer with it and the contents of a full one, which it gives up:
// twice as large, or as the claimed length needs if that is less. At the end of r it returns the full one.
func (b *BodyPool) growUnlessEOF(r io.Reader, full []byte, claimedLength int64, owner Tenant, limits BodyLimits) (buf []byte, err error) {
	var next [1]byte
	if n, err := r.Read(next[:]); n == 0 {
		return full, err
	}
	if int64(len(full)) == limits.Each {
		return full, ErrBodyTooLarge
	}
	want := max(2*int64(cap(full)), min(4*int64(cap(full)), maxTrustedLength))
	if claimedLength > int64(cap(full)) {
		want = min(want, claimedLength)
	}
	size := bufferSize(min(want, limits.Each))
	if err := b.tenants.reserveBodyBytes(owner, size-int64(cap(full)), limits); err != nil { // both are there for the time of a copy only
		return full, err
	}
	larger := append(append(b.newBuffer(size), full...), next[0])
	b.poolBuffer(full)
	return larger, nil
}

// Edit returns a buffer with body edited, and releases body. The edits are as for prompt.AppendEdited. On an error it returns
// body, which is not changed.
func (b *BodyPool) Edit(body []byte, edits []prompt.Edit, owner Tenant, limits BodyLimits) (edited []byte, err error) {
	size := bufferSize(int64(max(prompt.EditedLength(body, edits), 1)))
	if err := b.tenants.reserveBodyBytes(owner, size, limits); err != nil {
		return body, err
	}
	edited = prompt.AppendEdited(b.newBuffer(size), body, edits)
	b.ReleaseBuffer(body, owner)
	return edited, nil
}

// bufferSize returns the size of a buffer for n bytes: a power of two, or n if that would not be pooled.
func bufferSize(n int64) int64 {
	if n > 1<<maxPooledBits {
		return n
	}
	return 1 << max(minBufferBits, bits.Len64(uint64(n-1)))
}

// newBuffer returns an empty buffer of a size that bufferSize returned.
func (b *BodyPool) newBuffer(size int64) []byte {
	if size <= 1<<maxPooledBits {
		if p, ok := b.pools[bits.Len64(uint64(size-1))].Get().(*[]byte); ok {
			return (*p)[:0]
		}
	}
	return make([]byte, 0, size)
}

func (b *BodyPool) poolBuffer(buf []byte) {
	if cap(buf) <= 1<<maxPooledBits {
		b.pools[bits.Len64(uint64(cap(buf)-1))].Put(&buf)
	}
}

// ReleaseBuffer ends the reservation of a buffer, which may be nil. Nothing may refer to it any more.
func (b *BodyPool) ReleaseBuffer(buf []byte, owner Tenant) {
	if cap(buf) == 0 {
		return
	}
	b.tenants.releaseBodyBytes(owner, int64(cap(buf)))
	b.poolBuffer(buf)
}
