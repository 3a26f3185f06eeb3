package relay

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"
)

const (
	// MaxBufferedBytes is how much of a response is buffered before the first byte goes to the
	// client: another backend is asked if the replica fails until then.
	MaxBufferedBytes = 1 << 20
	// FreeBufferBytes is what each response may take of that, MaxBufferedTotalBytes what all of them may
	// beyond it. When it is used up, a response is relayed as it comes, like one that is too long.
	FreeBufferBytes       = 64 << 10
	MaxBufferedTotalBytes = 256 << 20
	maxPooledBufferBytes  = 64 << 10 // more than most responses need
	MaxErrorBodyBytes     = 64 << 10 // of an error that is kept while another backend is asked; counts in MaxBufferedTotalBytes
	// MaxTailBytes is how much of the end of a long response is kept: vLLM writes usage behind the choices.
	MaxTailBytes = 2 << 10
)

// Buffers holds what is buffered of responses, and bounds it. Pool.New must be set. Safe for concurrent use.
type Buffers struct {
	Pool     sync.Pool    // of *bytes.Buffer
	Reserved atomic.Int64 // bytes, of MaxBufferedTotalBytes
}

// Get returns an empty buffer. Put must follow.
func (b *Buffers) Get() *bytes.Buffer { return b.Pool.Get().(*bytes.Buffer) }

// Put returns a buffer to the pool, unless it has grown too large.
func (b *Buffers) Put(buf *bytes.Buffer) {
	if buf.Cap() <= maxPooledBufferBytes {
		buf.Reset()
		b.Pool.Put(buf)
	}
}

// Reserve takes n bytes of MaxBufferedTotalBytes, and reports whether there are as many.
func (b *Buffers) Reserve(n int64) (ok bool) {
	if b.Reserved.Add(n) > MaxBufferedTotalBytes {
		b.Reserved.Add(-n)
		return false
	}
	return true
}

// Release returns n bytes that were reserved.
func (b *Buffers) Release(n int64) { b.Reserved.Add(-n) }

// MakeRoom reserves what buf takes with n more bytes, in steps that double, and adds it to
// reserved. ok is false if the total is used up, or if buf would exceed MaxBufferedBytes.
func (b *Buffers) MakeRoom(buf *bytes.Buffer, n int, reserved *int64) (ok bool) {
	for {
		step := FreeBufferBytes + *reserved
		switch {
		case int64(buf.Len()+n) <= step:
			return true
		case step >= MaxBufferedBytes || !b.Reserve(step):
			return false
		}
		*reserved += step
		buf.Grow(int(2*step) - buf.Len())
	}
}

// Read reads a response into buf, as far as it may be buffered, or only its first piece, and returns what it has
// reserved for that and whether buf has all of the response.
func (b *Buffers) Read(buf *bytes.Buffer, body io.Reader, firstPiece bool) (reserved int64, complete bool, err error) {
	for b.MakeRoom(buf, 1, &reserved) {
		buf.Grow(bytes.MinRead)
		free := buf.AvailableBuffer()
		n, err := body.Read(free[:min(cap(free), FreeBufferBytes+int(reserved)-buf.Len())])
		buf.Write(free[:n]) // where it lies
		switch err {
		case nil:
			if firstPiece && n > 0 {
				return reserved, false, nil
			}
		case io.EOF:
			return reserved, true, nil
		default:
			return reserved, false, err
		}
	}
	return reserved, false, nil
}

// TailReader reads a long response. It keeps why reading ended, which io.Copy does not tell from why
// writing did, and the end of what was read.
type TailReader struct {
	io.Reader
	Err       error
	BytesRead int
	Tail      []byte // at most MaxTailBytes
}

// Read implements io.Reader.
func (r *TailReader) Read(p []byte) (n int, err error) {
	n, r.Err = r.Reader.Read(p)
	r.BytesRead += n
	if n >= MaxTailBytes {
		r.Tail = append(r.Tail[:0], p[n-MaxTailBytes:n]...)
	} else if r.Tail = append(r.Tail, p[:n]...); len(r.Tail) > MaxTailBytes {
		r.Tail = r.Tail[:copy(r.Tail, r.Tail[len(r.Tail)-MaxTailBytes:])]
	}
	return n, r.Err
}
