package transport

import (
	"bufio"
	"bytes"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// Whatever the method, the URL and the header of a request are, what goes up is
// refused or is one request, with the lines it should have, as net/http reads it.
func FuzzRequestHead(f *testing.F) {
	f.Add("POST", "/v1/chat/completions", "a=b", "X-A", "b", int64(5), false)
	f.Add("GET", "/", "", "Content-Length", "9", int64(0), true)
	f.Add("GET", "/a\r\nB: c", "d\r\n\r\nGET / HTTP/1.1", "A\r\nB", "c\r\nD: e", int64(1), false)
	f.Add("GET /x HTTP/1.1\r\n", "//x", "%0d%0a", "transfer-encoding", "chunked", int64(7), false)
	f.Add("", "*", "?#", "A:", "\x00", int64(3), false)
	transport := New(Options{URL: &url.URL{Scheme: "http", Host: "replica:8000"}})
	f.Fuzz(func(t *testing.T, method, path, query, name, value string, length int64, end bool) {
		length &= 1<<40 - 1
		req := &http.Request{
			Method: method, URL: &url.URL{Path: path, RawQuery: query}, Close: end,
			Header: http.Header{name: {value}, "X-Other": {"1"}},
		}
		head, err := transport.appendHead(nil, req, length)
		if err != nil {
			return
		}
		text, ended := strings.CutSuffix(string(head), "\r\n\r\n")
		if !ended || strings.Contains(text, "\r\n\r\n") || strings.Count(text, "\n") != strings.Count(text, "\r\n") || strings.Count(text, "\r") != strings.Count(text, "\r\n") {
			t.Fatalf("not one head: %q", head)
		}
		if lines := strings.Count(text, "\r\n"); lines > 5 { // Host, two of the header, length, close
			t.Errorf("%d lines of header: %q", lines, head)
		}
		read, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil {
			return // net/http is stricter about URLs
		}
		if read.Host != "replica:8000" || len(read.TransferEncoding) > 0 || read.ContentLength != length || end != read.Close {
			t.Errorf("%q is read as %+v", head, read)
		}
	})
}
