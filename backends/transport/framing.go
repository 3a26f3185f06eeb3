package transport

import (
	"bytes"
	"errors"
	"strings"
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

// chunkSize reads a chunk's size line: hexadecimal digits, then perhaps extensions,
// which mean nothing to us, or spaces, but no spaces before extensions: parsers differ
// on those.
func chunkSize(line []byte) (int64, error) {
	line = bytes.TrimRight(line, " \t")
	line, _, _ = bytes.Cut(line, []byte(";"))
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
