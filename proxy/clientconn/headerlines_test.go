package clientconn

import (
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
		"as many as allowed":           {lines(MaxHeaderLines) + "\r\n", true},
		"too many":                     {lines(MaxHeaderLines+1) + "\r\n", false},
		"too many, without an end":     {lines(MaxHeaderLines + 2), false},
		"lines of the body":            {lines(3) + "\r\n" + strings.Repeat("\n", 1000), true},
		"empty lines before a request": {"\r\n\r\n" + lines(3) + "\r\n" + strings.Repeat("\n", 1000), true},
		"too many after empty lines":   {"\r\n\r\n" + lines(MaxHeaderLines+1), false},
		"only empty lines":             {strings.Repeat("\n", 1000), true}, // net/http refuses them
		"line feeds alone":             {strings.ReplaceAll(lines(MaxHeaderLines+1)+"\r\n", "\r", ""), false},
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

func TestHasTooManyLines(t *testing.T) {
	h := http.Header{"A": make([]string, MaxHeaderLines)}
	if HasTooManyLines(h) {
		t.Error("as many as allowed are too many")
	}
	h["B"] = []string{""}
	if !HasTooManyLines(h) {
		t.Error("one more is allowed")
	}
}
