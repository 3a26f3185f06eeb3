package proxy

import (
	"bytes"
	"sync"
)

// lines passes a stream of server-sent events on in whole lines, as soon as each
// is whole. The part of a line that a dying replica leaves would be broken JSON
// to the client, and keep it from the error event that follows; no client can
// use half a line sooner. A line that names an event goes on together with the
// next one, so that the event may still be withheld when its data is known. A line
// longer than a chunk goes on as it comes.
type lines struct {
	write  func([]byte) error
	chunks *sync.Pool // of *[]byte
	chunk  *[]byte    // nil: none is borrowed
	kept   int        // bytes of chunk that are not passed on yet
	tail   [3]byte    // the last bytes written
}

// buf is the chunk that is borrowed now.
func (l *lines) buf() []byte {
	if l.chunk == nil {
		l.chunk = l.chunks.Get().(*[]byte)
	}
	return *l.chunk
}

// space is where the next bytes of the stream are to be read to, before advance.
func (l *lines) space() []byte { return l.buf()[l.kept:] }

// rest gives the chunk back, unless it holds something.
func (l *lines) rest() {
	if l.kept == 0 {
		l.end()
	}
}

// end gives the chunk back.
func (l *lines) end() {
	if l.chunk != nil {
		l.chunks.Put(l.chunk)
		l.chunk = nil
	}
}

// advance takes in n bytes that were read to space.
func (l *lines) advance(n int) error {
	defer l.rest()
	buf, have := l.buf(), l.kept+n
	whole := completeLinesLength(buf[:have])
	switch {
	case whole > 0:
	case have == len(buf):
		whole = have
	default:
		l.kept = have
		return nil
	}
	err := l.pass(buf[:whole])
	l.kept = copy(buf, buf[whole:have])
	return err
}

// cut takes in n bytes that were read to space, and passes on what came but for the
// last bytes, so many as left says: they begin with an event that is to be withheld.
// If its beginning was passed on before, the rest of it follows. Nothing is kept.
func (l *lines) cut(n int, left int64) error {
	defer l.rest()
	have := l.kept + n
	l.kept = 0
	if left <= int64(have) {
		have -= int(left)
	}
	if have == 0 {
		return nil
	}
	return l.pass(l.buf()[:have])
}

// completeLinesLength is the length of the lines that b begins with, without a last one that
// names an event.
func completeLinesLength(b []byte) int {
	end := bytes.LastIndexByte(b, '\n') + 1
	if end == 0 {
		return 0
	}
	last := bytes.LastIndexByte(b[:end-1], '\n') + 1
	if bytes.HasPrefix(b[last:], []byte("event:")) {
		return last
	}
	return end
}

// writeHead writes what came before the stream was committed.
func (l *lines) writeHead(head []byte) error {
	defer l.rest()
	buf, whole := l.buf(), completeLinesLength(head)
	if len(head)-whole >= len(buf) {
		whole = len(head)
	}
	l.kept = copy(buf, head[whole:])
	return l.pass(head[:whole])
}

// writeRest writes what is kept. The stream is over.
func (l *lines) writeRest() {
	if l.kept > 0 {
		l.write(l.buf()[:l.kept])
	}
}

func (l *lines) pass(b []byte) error {
	n := min(len(b), len(l.tail))
	copy(l.tail[:], l.tail[n:])
	copy(l.tail[len(l.tail)-n:], b[len(b)-n:])
	return l.write(b)
}

// comment writes a keep-alive comment, unless it would part an event: clients
// take an empty line for its end.
func (l *lines) comment() error {
	if tail := l.tail[:]; bytes.HasSuffix(tail, []byte("\n\n")) || bytes.HasSuffix(tail, []byte("\n\r\n")) {
		return l.write([]byte(keepAlive))
	}
	return nil
}
