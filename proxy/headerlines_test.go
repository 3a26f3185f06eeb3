package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestHeaderLineCounter(t *testing.T) {
	const request = "POST / HTTP/1.1\r\n"
	lines := func(n int) string { return request + strings.Repeat("a: b\r\n", n) }
	for name, c := range map[string]struct {
		read string
		ok   bool
	}{
		"few":                          {lines(3) + "\r\n", true},
		"as many as allowed":           {lines(maxHeaderLines) + "\r\n", true},
		"too many":                     {lines(maxHeaderLines+1) + "\r\n", false},
		"too many, without an end":     {lines(maxHeaderLines + 2), false},
		"lines of the body":            {lines(3) + "\r\n" + strings.Repeat("\n", 1000), true},
		"empty lines before a request": {"\r\n\r\n" + lines(3) + "\r\n" + strings.Repeat("\n", 1000), true},
		"too many after empty lines":   {"\r\n\r\n" + lines(maxHeaderLines+1), false},
		"only empty lines":             {strings.Repeat("\n", 1000), true}, // net/http refuses them
		"line feeds alone":             {strings.ReplaceAll(lines(maxHeaderLines+1)+"\r\n", "\r", ""), false},
	} {
		for _, size := range []int{1, 7, 4096} {
			var h headerLineCounter
			ok := true
			for rest := []byte(c.read); ok && len(rest) > 0; {
				n := min(size, len(rest))
				ok = h.add(rest[:n])
				rest = rest[n:]
			}
			if ok != c.ok {
				t.Errorf("%s, in pieces of %d: %v", name, size, ok)
			}
		}
	}
}

func TestTooManyHeaderLinesStatus431(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	for _, end := range []string{"", "\r\n{}"} {
		conn := f.dial()
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n%s%s", strings.Repeat("A: b\r\n", 7500), end)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge || !resp.Close {
			t.Errorf("got %v, %v", resp, err)
		}
	}
	// The next requests on a connection have headers of their own.
	conn := f.dial()
	br := bufio.NewReader(conn)
	for range 3 {
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n%s", len(askWhole), strings.Repeat("A: b\r\n", 200), askWhole)
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("got %v, %v", resp, err)
		}
		io.Copy(io.Discard, resp.Body)
	}
}

func TestCheckHeaderLines(t *testing.T) {
	h := http.Header{"A": make([]string, maxHeaderLines)}
	if err := checkHeaderLines(h); err != nil {
		t.Error(err.message)
	}
	h["B"] = []string{""}
	if err := checkHeaderLines(h); err == nil || err.status != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("got %v", err)
	}
}
