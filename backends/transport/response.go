package transport

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

// Errors of a response header. Anything ambiguous is an error: a wrong guess about
// the end of a response would corrupt the next one on the connection.
const (
	errHeaderTooLong = invalidResponse("too long")
	errLineEnd       = invalidResponse("line does not end in CR LF")
	errStatusLine    = invalidResponse("not an HTTP/1 status line")
	errHeaderLine    = invalidResponse("malformed line")
	errFraming       = invalidResponse("ambiguous length: Content-Length or Transfer-Encoding repeated, both present, or invalid")
	errSwitching     = invalidResponse("unrequested 101")
)

// readResponse reads the response header, skipping interim responses (100, 103), and
// prepares b for reading the body.
func (b *Body) readResponse(req *http.Request) (*http.Response, error) {
	budget := b.t.options.MaxHeaderBytes
	for {
		if err := b.awaitResponseHead(); err != nil {
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
		if err := b.setFraming(resp, req.Method); err != nil {
			return nil, err
		}
		resp.Close = req.Close || b.state == untilClose || !canKeepAlive(resp)
		b.keepAlive = !resp.Close
		resp.Request, resp.Body = req, b
		return resp, nil
	}
}

// awaitResponseHead waits for the first byte of a header, without a time limit, because
// the replica is working. It then sets the deadline for the rest of the header.
func (b *Body) awaitResponseHead() error {
	if b.br.Buffered() == 0 && !b.deadline.IsZero() {
		b.setReadDeadline(time.Time{}) // it was for an interim response
	}
	if _, err := b.br.Peek(1); err == io.EOF {
		return io.ErrUnexpectedEOF
	} else if err != nil {
		return err
	}
	// Nearly always the complete header is buffered and needs no deadline.
	if have, _ := b.br.Peek(b.br.Buffered()); !bytes.Contains(have, []byte("\r\n\r\n")) {
		b.setReadDeadline(time.Now().Add(b.t.options.HeaderTimeout))
	}
	return nil
}

// readHead reads up to and including the empty line. It reads at most budget bytes and
// subtracts what it read. For a header of usual size it allocates only the string.
func readHead(br *bufio.Reader, budget *int) (string, error) {
	var usual [1 << 10]byte
	head, line := usual[:0], 0 // line: start of the current one
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

// parseHead parses the result of readHead into resp, with canonical header names.
func parseHead(resp *http.Response, head string) error {
	line, rest, _ := strings.Cut(head, "\r\n")
	*resp = http.Response{ProtoMajor: 1}
	var status string
	var ok bool
	if resp.Proto, status, ok = strings.Cut(line, " "); !ok || !httpguts.ValidHeaderFieldValue(line) {
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
	values := make([]string, 0, lines) // one allocation for all
	for rest != "\r\n" {
		line, rest, _ = strings.Cut(rest, "\r\n")
		name, value, ok := strings.Cut(line, ":")
		if !ok || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) { // a folded line fails too
			return errHeaderLine
		}
		name = canonicalHeaderName(name)
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

// canonicalHeaderName is textproto.CanonicalMIMEHeaderKey, which looks a name up for several hundred instructions, with a shorter
// way for the names in nearly every response, as uvicorn writes them.
func canonicalHeaderName(name string) string {
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

// setFraming determines how the body ends (RFC 9112, 6.3), for b and resp.
func (b *Body) setFraming(resp *http.Response, method string) error {
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
			return errFraming // without its text, which may be part of a response
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

// canKeepAlive reports whether the replica accepts another request on the connection.
func canKeepAlive(resp *http.Response) bool {
	options := resp.Header["Connection"]
	return !httpguts.HeaderValuesContainsToken(options, "close") &&
		(resp.ProtoMinor == 1 || httpguts.HeaderValuesContainsToken(options, "keep-alive"))
}
