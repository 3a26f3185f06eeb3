package upstream

import (
	"io"
	"net"
	"time"

	"warmroute/prompt"
)

const (
	// maxCopiedSpan is how long a span of a body is that is copied, to be written together with what is beside it.
	maxCopiedSpan = 4 << 10
	// maxLastWrite is how much of a body is written after the last look at the time: as much as the socket's buffers
	// take, so that the write does not wait for the replica.
	maxLastWrite = 64 << 10
)

// editedBody is a body in memory with edits. It is read once, by Read or by WriteTo.
type editedBody struct {
	parts    net.Buffers
	length   int64
	notAfter time.Time // WriteTo fails instead of writing the last bytes later than this; zero: never
}

// newEditedBody returns body, whose long spans are not copied, with edits. These are in the order of the body and do
// not overlap.
func newEditedBody(body []byte, edits []prompt.Edit) *editedBody {
	b := new(editedBody)
	var short []byte // texts and short spans that are not in parts yet
	flush := func() {
		if len(short) > 0 {
			b.parts, short = append(b.parts, short), nil
		}
	}
	addSpan := func(span []byte) {
		b.length += int64(len(span))
		if len(span) <= maxCopiedSpan {
			short = append(short, span...)
			return
		}
		flush()
		b.parts = append(b.parts, span)
	}
	written := 0
	for _, e := range edits {
		addSpan(body[written:e.Start])
		short = append(short, e.Text...)
		b.length += int64(len(e.Text))
		written = e.End
	}
	addSpan(body[written:])
	flush()
	return b
}

// Read implements io.Reader. It does not regard notAfter.
func (b *editedBody) Read(p []byte) (int, error) { return b.parts.Read(p) }

// WriteTo implements io.WriterTo.
func (b *editedBody) WriteTo(w io.Writer) (n int64, err error) {
	write := func(part []byte) {
		if err == nil && len(part) > 0 {
			var written int
			written, err = w.Write(part)
			n += int64(written)
		}
	}
	for i, part := range b.parts {
		if i == len(b.parts)-1 && !b.notAfter.IsZero() {
			before := max(len(part)-maxLastWrite, 0)
			write(part[:before])
			part = part[before:]
			if err == nil && time.Now().After(b.notAfter) {
				return n, ErrLateTransfer
			}
		}
		write(part)
	}
	return n, err
}

// Close implements io.Closer.
func (b *editedBody) Close() error { return nil }
