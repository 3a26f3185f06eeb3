package transport

import (
	"net/http"
	"strings"
	"testing"
)

func TestAnswerHeader(t *testing.T) {
	transport := replica(t, Options{}, always("HTTP/1.1 201 Made It\r\ncontent-type:text/plain\r\nX-A: 1\r\nx-a:\t2 \r\nX-Empty:\r\n"+
		"X-Utf8: ü\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"))
	resp, _ := answer(t, transport, "hello")
	want := http.Header{"Content-Type": {"text/plain"}, "X-A": {"1", "2"}, "X-Empty": {""}, "X-Utf8": {"ü"}}
	if len(resp.Header) != len(want) {
		t.Errorf("header %q", resp.Header)
	}
	for name, values := range want {
		if got := resp.Header[name]; strings.Join(got, "|") != strings.Join(values, "|") {
			t.Errorf("%s: %q, want %q", name, got, values)
		}
	}
	if resp.Status != "201 Made It" || resp.Proto != "HTTP/1.1" || !resp.ProtoAtLeast(1, 1) ||
		len(resp.TransferEncoding) != 1 || resp.Request == nil {
		t.Errorf("%+v", resp)
	}
}
