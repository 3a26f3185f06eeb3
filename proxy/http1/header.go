package http1

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

// WriteHeader implements http.ResponseWriter. What becomes of the Header afterwards
// is of no effect.
func (a *answer) WriteHeader(status int) {
	switch {
	case a.status != 0:
		return
	case status < 100 || status > 999:
		panic("no status can be " + strconv.Itoa(status))
	case status < 200: // no answer yet
		return
	}
	a.status = status
	out := a.borrow(&a.buffer)
	version := "HTTP/1.1 "
	if !a.modern {
		version = "HTTP/1.0 "
	}
	b := append(*out, version...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	if text := http.StatusText(status); text != "" {
		b = append(b, text...)
	} else {
		b = append(b, "status code "...)
		b = strconv.AppendInt(b, int64(status), 10)
	}
	b = append(b, "\r\n"...)
	for name, values := range a.header {
		switch name {
		case "Content-Length":
			a.said = length(values)
			continue
		case "Connection":
			a.told = httpguts.HeaderValuesContainsToken(values, "close")
			continue
		case "Transfer-Encoding":
			if len(values) == 1 && values[0] == "identity" {
				a.framing = untilClose
			}
			continue
		case "Content-Type":
			if status == http.StatusNotModified {
				continue
			}
		}
		if !httpguts.ValidHeaderFieldName(name) {
			continue
		}
		for _, v := range values {
			b = append(b, name...)
			b = append(b, ": "...)
			b = appendValue(b, v)
			b = append(b, "\r\n"...)
		}
	}
	if _, dated := a.header["Date"]; !dated {
		b = append(b, "Date: "...)
		b = time.Now().UTC().AppendFormat(b, http.TimeFormat)
		b = append(b, "\r\n"...)
	}
	*out = b
}

func length(values []string) int64 {
	if len(values) != 1 {
		return -1
	}
	n, err := strconv.ParseInt(values[0], 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// appendValue keeps a value on its line.
func appendValue(b []byte, v string) []byte {
	v = strings.Trim(v, " \t\r\n")
	at := len(b)
	b = append(b, v...)
	if strings.ContainsAny(v, "\r\n") {
		for i := at; i < len(b); i++ {
			if b[i] == '\r' || b[i] == '\n' {
				b[i] = ' '
			}
		}
	}
	return b
}

// frame completes the header. whole: there is no more of the body than what is kept.
func (a *answer) frame(whole bool) {
	a.headed = true
	a.last = a.last || a.told || a.body.endsAnswers() || a.c.server.ending.Load()
	none := a.status == http.StatusNoContent || a.status == http.StatusNotModified
	if whole && a.said < 0 && a.framing == unframed && !none && (!a.head || a.written > 0) {
		a.said = a.written
	}
	out := a.borrow(&a.buffer)
	b := *out
	switch {
	case none:
		a.framing = bodiless
	case a.said >= 0:
		a.framing = counted
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, a.said, 10)
		b = append(b, "\r\n"...)
	case a.head:
	case a.framing == unframed && a.modern:
		a.framing = chunked
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	default:
		a.framing, a.last = untilClose, true
	}
	if a.head {
		a.framing = bodiless
	}
	switch {
	case a.last && (a.modern || a.told):
		b = append(b, "Connection: close\r\n"...)
	case !a.last && !a.modern:
		b = append(b, "Connection: keep-alive\r\n"...)
	}
	*out = append(b, "\r\n"...)
}
