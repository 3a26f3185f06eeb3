package transport

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"
)

// What a replica can get wrong in a header. Anything doubtful is an error: a
// guess about where an answer ends would poison the connection's next answer.
var (
	errHeaderTooLong = errors.New("too long")
	errLineEnd       = errors.New("a line does not end in CR LF")
	errStatusLine    = errors.New("not an HTTP/1 status line")
	errHeaderLine    = errors.New("malformed line")
	errFraming       = errors.New("unclear length: Content-Length and Transfer-Encoding repeated, both given, or not understood")
	errSwitching     = errors.New("101 that nobody asked for")
)

// response reads the header of the answer, past interim ones (100, 103), and
// readies b to read its body. A body without bytes is finished at once.
func (b *Body) response(req *http.Request) (*http.Response, error) {
	budget := b.t.maxHeaderBytes
	for {
		if err := b.awaitHead(); err != nil {
			return nil, err
		}
		head, err := readHead(b.br, &budget)
		if err != nil {
			return nil, err
		}
		resp := &b.resp
		if err := parseHead(resp, head); err != nil {
			return nil, err
		}
		if resp.StatusCode == http.StatusSwitchingProtocols {
			return nil, errSwitching
		}
		if resp.StatusCode < 200 {
			continue
		}
		if err := b.frame(resp, req.Method); err != nil {
			return nil, err
		}
		resp.Close = req.Close || b.state == untilClose || !keepsAlive(resp)
		b.keepAlive = !resp.Close
		resp.Request, resp.Body = req, b
		if b.state == ended {
			b.end(io.EOF)
		}
		return resp, nil
	}
}

// awaitHead waits for the first byte of a header, however long that takes: the
// replica is at work. One that has begun is written already, so a rest that does
// not come means that the replica hangs.
func (b *Body) awaitHead() error {
	if b.br.Buffered() == 0 && !b.armed.IsZero() {
		b.setDeadline(time.Time{}) // it was for an interim answer
	}
	if _, err := b.br.Peek(1); err == io.EOF {
		return io.ErrUnexpectedEOF
	} else if err != nil {
		return err
	}
	// Nearly always all of it is there, and a deadline is not to be paid for.
	if have, _ := b.br.Peek(b.br.Buffered()); !bytes.Contains(have, []byte("\r\n\r\n")) {
		b.setDeadline(time.Now().Add(b.t.headerTimeout))
	}
	return nil
}

// readHead reads up to and with the empty line. budget is what it may read, and
// what is left of it afterwards. The string is the only thing it allocates for a
// header of usual size; bufio's small buffer bounds a line no further.
func readHead(br *bufio.Reader, budget *int) (string, error) {
	var usual [1 << 10]byte
	head, line := usual[:0], 0 // line: where the current one began
	for {
		part, err := br.ReadSlice('\n')
		if *budget -= len(part); *budget < 0 {
			return "", errHeaderTooLong
		}
		head = append(head, part...)
		switch {
		case err == bufio.ErrBufferFull:
			continue
		case err == io.EOF:
			return "", io.ErrUnexpectedEOF
		case err != nil:
			return "", err
		}
		n := len(head) - line
		if n < 2 || head[len(head)-2] != '\r' {
			return "", errLineEnd
		}
		if n == 2 {
			return string(head), nil
		}
		line = len(head)
	}
}

// parseHead makes resp of what readHead read. Names become canonical.
func parseHead(resp *http.Response, head string) error {
	line, rest, _ := strings.Cut(head, "\r\n")
	*resp = http.Response{ProtoMajor: 1}
	var status string
	var ok bool
	if resp.Proto, status, ok = strings.Cut(line, " "); !ok || !isHeaderValue(line) {
		return errStatusLine
	}
	switch resp.Proto {
	case "HTTP/1.1":
		resp.ProtoMinor = 1
	case "HTTP/1.0":
	default:
		return errStatusLine
	}
	code, _, _ := strings.Cut(status, " ")
	n, err := strconv.ParseUint(code, 10, 16)
	if err != nil || len(code) != 3 || n < 100 {
		return errStatusLine
	}
	resp.Status, resp.StatusCode = status, int(n)

	lines := strings.Count(rest, "\n") - 1 // without the empty one
	resp.Header = make(http.Header, lines)
	values := make([]string, 0, lines) // one allocation for all of them
	for rest != "\r\n" {
		line, rest, _ = strings.Cut(rest, "\r\n")
		name, value, ok := strings.Cut(line, ":")
		if !ok || !isToken(name) || !isHeaderValue(value) { // a folded line has no name
			return errHeaderLine
		}
		name = canonical(name)
		value = strings.Trim(value, " \t")
		if before := resp.Header[name]; before != nil {
			resp.Header[name] = append(before, value)
			continue
		}
		values = append(values, value)
		resp.Header[name] = values[len(values)-1 : len(values) : len(values)]
	}
	return nil
}

// canonical is textproto.CanonicalMIMEHeaderKey. The names that are in nearly every
// answer, as uvicorn writes them, need not be rewritten letter by letter.
func canonical(name string) string {
	switch name {
	case "date":
		return "Date"
	case "server":
		return "Server"
	case "content-type":
		return "Content-Type"
	case "content-length":
		return "Content-Length"
	case "transfer-encoding":
		return "Transfer-Encoding"
	}
	return textproto.CanonicalMIMEHeaderKey(name)
}

// frame decides how the body's end is known (RFC 9112, 6.3) and says so in resp.
func (b *Body) frame(resp *http.Response, method string) error {
	length, chunked := resp.Header["Content-Length"], resp.Header["Transfer-Encoding"]
	resp.ContentLength, b.state = -1, untilClose
	switch {
	case len(length)+len(chunked) > 1:
		return errFraming
	case len(chunked) == 1:
		if !strings.EqualFold(chunked[0], "chunked") || resp.ProtoMinor == 0 {
			return errFraming
		}
		resp.TransferEncoding = []string{"chunked"}
		delete(resp.Header, "Transfer-Encoding")
		b.state = chunkHead
	case len(length) == 1:
		n, err := strconv.ParseUint(length[0], 10, 63)
		if err != nil {
			return errFraming // without its words: in the wrong place they may be an answer's
		}
		resp.ContentLength, b.left, b.state = int64(n), int64(n), counted
		if n == 0 {
			b.state = ended
		}
	}
	switch {
	case method == http.MethodHead:
		b.state = ended
	case resp.StatusCode == http.StatusNoContent, resp.StatusCode == http.StatusNotModified:
		resp.ContentLength, b.state = 0, ended
	}
	return nil
}

// keepsAlive reports whether the replica will take another request.
func keepsAlive(resp *http.Response) bool {
	keep := resp.ProtoMinor == 1
	for _, v := range resp.Header["Connection"] {
		for option := range strings.SplitSeq(v, ",") {
			switch option = strings.Trim(option, " \t"); {
			case strings.EqualFold(option, "close"):
				return false
			case strings.EqualFold(option, "keep-alive"):
				keep = true
			}
		}
	}
	return keep
}
