package transport

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"time"
)

// state is where in the answer's framing the next byte lies.
type state uint8

const (
	untilClose state = iota // body, to the end of the connection
	counted                 // body, left bytes of it
	chunkHead               // a chunk's size line
	chunkData               // body, left bytes of this chunk
	chunkEnd                // the line end after a chunk's data
	trailer                 // a trailer line, or the empty line that ends it all
	ended                   // behind the last byte
)

var (
	errNotYet      = errors.New("nothing to read yet") // never leaves the package
	errChunkLine   = errors.New("malformed chunk")
	errLineTooLong = errors.New("line of the chunk framing too long")
)

// advance steps over framing that is buffered whole. known is true when the next
// byte is body, buffered or not. At the end of the answer state is ended; else the
// framing goes on with bytes still to come. A line is never taken in part, so
// giving up a wait loses nothing, whenever it happens.
func (b *Body) advance() (known bool, err error) {
	for {
		switch b.state {
		case untilClose, counted, chunkData:
			return true, nil
		case ended:
			return false, nil
		}
		line, ok, err := b.line()
		if err != nil || !ok {
			return false, err
		}
		switch b.state {
		case chunkHead:
			if b.left, err = chunkSize(line); err != nil {
				return false, err
			}
			b.state = chunkData
			if b.left == 0 {
				b.state = trailer
			}
		case chunkEnd:
			if len(line) > 0 {
				return false, errChunkLine
			}
			b.state = chunkHead
		case trailer:
			if b.trailers += len(line); b.trailers > b.t.maxHeaderBytes {
				return false, errHeaderTooLong
			}
			if len(line) == 0 {
				b.state = ended
				continue
			}
			name, value, colon := strings.Cut(string(line), ":")
			if !colon || !isToken(name) || !isHeaderValue(value) {
				return false, errHeaderLine
			}
		}
	}
}

// line takes the next line, without its end, if it is buffered whole. It is valid
// until the next read.
func (b *Body) line() (line []byte, ok bool, err error) {
	have, _ := b.br.Peek(b.br.Buffered())
	end := bytes.IndexByte(have, '\n')
	if end < 0 {
		if len(have) == b.br.Size() {
			return nil, false, errLineTooLong
		}
		return nil, false, nil
	}
	b.br.Discard(end + 1)
	line, crlf := bytes.CutSuffix(have[:end], []byte("\r"))
	if !crlf || bytes.IndexByte(line, '\r') >= 0 {
		return nil, false, errLineEnd
	}
	return line, true, nil
}

// chunkSize reads a chunk's size line: hexadecimal digits, then perhaps spaces,
// then perhaps extensions, which mean nothing to us.
func chunkSize(line []byte) (int64, error) {
	line, _, _ = bytes.Cut(line, []byte(";"))
	line = bytes.TrimRight(line, " \t")
	if len(line) == 0 || len(line) > 15 {
		return 0, errChunkLine
	}
	var n int64
	for _, c := range line {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, errChunkLine
		}
		n = n<<4 | int64(c)
	}
	return n, nil
}

// receiveData reads body bytes into p: buffered ones, or else straight from the
// socket, never beyond what is known to be body.
func (b *Body) receiveData(p []byte) (int, error) {
	if b.state == untilClose {
		return b.receive(p, time.Time{})
	}
	n, err := b.receive(p[:min(int64(len(p)), b.left)], time.Time{})
	if b.left -= int64(n); b.left == 0 {
		if b.state == counted {
			b.state = ended
		} else {
			b.state = chunkEnd
		}
	}
	return n, err
}

// receive reads once: into p, or with a nil p one byte more than is buffered into
// the buffer. It fails with errNotYet at until (zero: never), and with
// os.ErrDeadlineExceeded when the idle timeout ends before.
func (b *Body) receive(p []byte, until time.Time) (n int, err error) {
	if p != nil && b.br.Buffered() > 0 {
		return b.br.Read(p)
	}
	limit, late := b.arm(until)
	for {
		if p != nil {
			n, err = b.br.Read(p)
		} else {
			_, err = b.br.Peek(b.br.Buffered() + 1)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if !time.Now().Before(limit) {
			return 0, late
		}
		b.setDeadline(limit) // the one in force was early
	}
	switch {
	case err == nil:
		b.silent = time.Time{}
	case err != io.EOF:
	case b.state == untilClose:
		b.state, err = ended, nil
	default:
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// arm sees to it that the next read times out at limit or up to a quarter of the
// wait before, so that a busy stream seldom pays for setting a deadline. late is
// what it means that limit passed.
func (b *Body) arm(until time.Time) (limit time.Time, late error) {
	if b.idle == 0 && until.IsZero() {
		if !b.armed.IsZero() {
			b.setDeadline(time.Time{})
		}
		return limit, nil
	}
	now := time.Now()
	if b.silent.IsZero() {
		b.silent = now
	}
	limit, late = until, errNotYet
	if idleEnd := b.silent.Add(b.idle); b.idle > 0 && (until.IsZero() || !idleEnd.After(until)) {
		limit, late = idleEnd, os.ErrDeadlineExceeded
	}
	// A deadline that has passed would fail even if bytes lie in the socket.
	if soonest := now.Add(time.Millisecond); limit.Before(soonest) {
		limit = soonest
	}
	if early := limit.Sub(b.armed); !b.armed.After(now) || early < 0 || early > limit.Sub(now)/4 {
		b.setDeadline(limit)
	}
	return limit, late
}

func (b *Body) setDeadline(at time.Time) {
	b.armed = at
	b.c.SetReadDeadline(at) // fails only on a closed socket, as the read will
}
