package proxy

import (
	"bytes"
	"sync"
)

// lines passes a stream of server-sent events on in whole lines, as soon as each
// is whole. The part of a line that a dying replica leaves would be broken JSON
// to the client, and keep it from the error event that follows; no client can
// use half a line sooner. A line longer than a chunk goes on as it comes.
type lines struct {
	write  func([]byte) error
	chunks *sync.Pool // of *[]byte
	chunk  *[]byte    // nil: none is borrowed
	kept   int        // bytes of chunk that begin a line whose end has not come
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
	whole := l.kept + bytes.LastIndexByte(buf[l.kept:have], '\n') + 1
	switch {
	case whole > l.kept:
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

// writeHead writes what came before the stream was committed.
func (l *lines) writeHead(head []byte) error {
	defer l.rest()
	buf, whole := l.buf(), bytes.LastIndexByte(head, '\n')+1
	if len(head)-whole >= len(buf) {
		whole = len(head)
	}
	l.kept = copy(buf, head[whole:])
	return l.pass(head[:whole])
}

// writeRest writes a last line without an end. The stream is over.
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
