package proxy

import (
	"bytes"
	"io"
	"net/http"
	"time"
)

// maxHeaderLines bounds the lines of a request's header. net/http bounds the bytes alone, and takes ten times as much memory for
// many short lines, before a key is checked.
const maxHeaderLines = 256

// headerLineCounter counts the lines of a request's header as they are read from a connection.
type headerLineCounter struct {
	lines     int  // complete ones, the request line included
	lineBegun bool // the incomplete line has a character
	ended     bool // the empty line has come
}

// add counts the lines in b. It returns false if there are too many.
func (h *headerLineCounter) add(b []byte) (ok bool) {
	for !h.ended && len(b) > 0 {
		end := bytes.IndexByte(b, '\n')
		line := b
		if end >= 0 {
			line, b = b[:end], b[end+1:]
		}
		h.lineBegun = h.lineBegun || len(line) > 0 && string(line) != "\r"
		if end < 0 {
			return true
		}
		if !h.lineBegun { // net/http ignores some empty lines before a request
			h.ended = h.lines > 0
			continue
		}
		h.lineBegun = false
		if h.lines++; h.lines > maxHeaderLines+1 {
			return false
		}
	}
	return true
}

const tooManyHeaderLines = "the request's header has more than 256 lines"

// refuseHeader responds to a request whose header has too many lines. Then the connection is to be closed.
func (c *clientConn) refuseHeader() {
	_ = c.Conn.SetDeadline(time.Now().Add(lingerTimeout))
	_, _ = io.WriteString(c.Conn, "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"+
		"Connection: close\r\n\r\n"+tooManyHeaderLines)
	_ = c.CloseWrite()
	// Unread bytes would reset the connection, and the client might not see the response.
	_, _ = io.CopyN(io.Discard, c.Conn, maxLingerBytes)
}

// checkHeaderLines returns an error for more than maxHeaderLines, where bytes are not counted: over TLS.
func checkHeaderLines(h http.Header) *apiError {
	lines := 0
	for _, values := range h {
		lines += len(values)
	}
	if lines > maxHeaderLines {
		return newError(http.StatusRequestHeaderFieldsTooLarge, codeTooManyHeaders, tooManyHeaderLines)
	}
	return nil
}
