package transport

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// ownHeader names the headers that this package writes itself or leaves out: two
// of a kind would let two parsers see two requests. In any case of letters, and by
// length first, as this is asked of each header of each request.
func ownHeader(name string) bool {
	own := ""
	switch len(name) {
	case len("Host"):
		own = "Host"
	case len("Trailer"):
		own = "Trailer"
	case len("Connection"):
		own = "Connection"
	case len("Content-Length"):
		own = "Content-Length"
	case len("Transfer-Encoding"):
		own = "Transfer-Encoding"
	}
	return own != "" && strings.EqualFold(name, own)
}

// appendHead appends the request line and header of req to b. length is the
// body's; 0: none. What could end a line early is refused, not repaired.
func (t *Transport) appendHead(b []byte, req *http.Request, length int64) ([]byte, error) {
	method := req.Method
	if method == "" {
		method = http.MethodGet
	}
	uri := req.URL.RequestURI()
	if !isToken(method) || !isURI(uri) {
		return b, fmt.Errorf("%w: request line", ErrInvalidRequest)
	}
	b = append(b, method...)
	b = append(b, ' ')
	b = append(b, uri...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, t.host...)
	b = append(b, "\r\n"...)
	for name, values := range req.Header {
		if ownHeader(name) {
			continue
		}
		if !isToken(name) {
			return b, fmt.Errorf("%w: header name %q", ErrInvalidRequest, name)
		}
		for _, v := range values {
			if !isHeaderValue(v) {
				return b, fmt.Errorf("%w: value of header %s", ErrInvalidRequest, name)
			}
			b = append(b, name...)
			b = append(b, ": "...)
			b = append(b, v...)
			b = append(b, "\r\n"...)
		}
	}
	if length > 0 || method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, length, 10)
		b = append(b, "\r\n"...)
	}
	if req.Close {
		b = append(b, "Connection: close\r\n"...)
	}
	return append(b, "\r\n"...), nil
}

// isToken reports whether s is a token of RFC 9110, 5.6.2: a method or a header's name.
func isToken(s string) bool {
	for i := range len(s) {
		if c := s[i]; c >= 0x80 || tokenChars[c>>6]>>(c&63)&1 == 0 {
			return false
		}
	}
	return s != ""
}

// tokenChars are the characters of a token, a bit each: letters, digits and
// !#$%&'*+-.^_`|~. Never written.
var tokenChars = [2]uint64{0x03ff6cfa00000000, 0x57ffffffc7fffffe}

// isURI reports whether s can stand in a request line: an absolute path without
// spaces or controls.
func isURI(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] == 0x7f {
			return false
		}
	}
	return s != "" && s[0] == '/'
}

// isHeaderValue reports whether s has no control characters but tabs.
func isHeaderValue(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' && s[i] != '\t' || s[i] == 0x7f {
			return false
		}
	}
	return true
}
