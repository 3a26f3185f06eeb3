package clientconn

import (
	"bytes"
	"io"
	"net/http"
	"time"
)

// MaxHeaderLines bounds the lines of a request's header. net/http bounds the bytes alone, and takes ten times as much memory for
// many short lines, before a key is checked.
const MaxHeaderLines = 256

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
		if h.lines++; h.lines > MaxHeaderLines+1 {
			return false
		}
	}
	return true
}

// TooManyHeaderLines is the message of the error for a header of more than MaxHeaderLines.
const TooManyHeaderLines = "the request's header has more than 256 lines"

const (
	// LingerTimeout and MaxLingerBytes bound the reading of what a client sends after its request was refused,
	// which lets it read the error.
	LingerTimeout  = 2 * time.Second
	MaxLingerBytes = 64 << 20
)

// refuseHeader responds to a request whose header has too many lines. Then the connection is to be closed.
func (c *clientConn) refuseHeader() {
	_ = c.Conn.SetDeadline(time.Now().Add(LingerTimeout))
	_, _ = io.WriteString(c.Conn, "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"+
		"Connection: close\r\n\r\n"+TooManyHeaderLines)
	_ = c.CloseWrite()
	// Unread bytes would reset the connection, and the client might not see the response.
	_, _ = io.CopyN(io.Discard, c.Conn, MaxLingerBytes)
}

// HasTooManyLines reports whether a header has more than MaxHeaderLines. Over TLS they are not counted as they come.
func HasTooManyLines(h http.Header) bool {
	lines := 0
	for _, values := range h {
		lines += len(values)
	}
	return lines > MaxHeaderLines
}
