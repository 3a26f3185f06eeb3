package proxy

import "bytes"

// lines passes a stream of server-sent events on in whole lines, as soon as each
// is whole. The part of a line that a dying replica leaves would be broken JSON
// to the client, and keep it from the error event that follows; no client can
// use half a line sooner. A line longer than buf goes on as it comes.
type lines struct {
	write func([]byte) error
	buf   []byte
	kept  int     // bytes of buf that begin a line whose end has not come
	tail  [3]byte // the last bytes written
}

// space is where the next bytes of the stream are to be read to.
func (l *lines) space() []byte { return l.buf[l.kept:] }

// advance takes in n bytes that were read to space.
func (l *lines) advance(n int) error {
	have := l.kept + n
	whole := l.kept + bytes.LastIndexByte(l.buf[l.kept:have], '\n') + 1
	switch {
	case whole > l.kept:
	case have == len(l.buf):
		whole = have
	default:
		l.kept = have
		return nil
	}
	err := l.pass(l.buf[:whole])
	l.kept = copy(l.buf, l.buf[whole:have])
	return err
}

// writeHead writes what came before the stream was committed.
func (l *lines) writeHead(head []byte) error {
	whole := bytes.LastIndexByte(head, '\n') + 1
	if len(head)-whole >= len(l.buf) {
		whole = len(head)
	}
	l.kept = copy(l.buf, head[whole:])
	return l.pass(head[:whole])
}

// writeRest writes a last line without an end. The stream is over.
func (l *lines) writeRest() {
	if l.kept > 0 {
		l.write(l.buf[:l.kept])
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
