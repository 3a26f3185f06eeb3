package http1_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sort"
	"strings"
	"time"
)

// says is a client that sends all of it at once and waits.
func says(parts ...string) (steps []step) {
	for _, p := range parts {
		steps = append(steps, step{send: p, wait: aMoment})
	}
	return steps
}

const (
	get  = "GET /a?b HTTP/1.1\r\nHost: h\r\n\r\n"
	last = "GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
)

// echo answers with what it was asked.
func echo(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
	body, err := io.ReadAll(r.Body)
	note("%s %s %s host %q length %d coding %q close %v body %s, %s", r.Method, r.RequestURI, r.Proto, r.Host, r.ContentLength,
		r.TransferEncoding, r.Close, brief(body), class(err))
	note("header %s trailer %s url %s", inOrder(r.Header), inOrder(r.Trailer), r.URL)
	w.Header()["Content-Type"] = []string{"text/plain"}
	fmt.Fprintf(w, "%s %d bytes, %s", r.RequestURI, len(body), class(err))
}

func inOrder(h http.Header) string {
	var lines []string
	for name, values := range h {
		lines = append(lines, fmt.Sprintf("%s=%q", name, values))
	}
	sort.Strings(lines)
	return strings.Join(lines, " ")
}

func class(err error) string {
	switch {
	case err == nil:
		return "whole"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "cut"
	case errors.Is(err, http.ErrBodyReadAfterClose):
		return "closed"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "late"
	default:
		return "bad"
	}
}

// answers is a handler that reads nothing.
func answers(f func(w http.ResponseWriter)) noting {
	return func(w http.ResponseWriter, _ *http.Request, _ func(string, ...any)) {
		w.Header()["Content-Type"] = []string{"text/plain"}
		f(w)
	}
}

func body(s string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { _, _ = io.WriteString(w, s) }
}

func flush(w http.ResponseWriter) { _ = http.NewResponseController(w).Flush() }

func length(n string, s string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header()["Content-Length"] = []string{n}
		_, _ = io.WriteString(w, s)
	}
}

func header(name string, values ...string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header()[name] = values
		_, _ = io.WriteString(w, "hello")
	}
}

func status(code int, s string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, s)
	}
}

var (
	large  = strings.Repeat("0123456789abcdef", 1<<16)
	middle = large[:3000]
)

// bodiesOfAnswers are handlers, each of which meets all kinds of requests.
func bodiesOfAnswers() map[string]func(http.ResponseWriter) {
	return map[string]func(http.ResponseWriter){
		"nothing":               func(http.ResponseWriter) {},
		"short":                 body("hello"),
		"as much as is kept":    body(large[:2048]),
		"more than is kept":     body(large[:2049]),
		"middle":                body(middle),
		"large":                 body(large),
		"length said":           length("5", "hello"),
		"length said, large":    length("1048576", large),
		"length said, short":    length("9", "hello"),
		"length said, none":     length("9", ""),
		"length said, long":     length("3", "hello"),
		"length said, nonsense": length("x", "hello"),
		"length said, negative": length("-1", "hello"),
		"length 0":              length("0", ""),
		"length in parts, one too many": func(w http.ResponseWriter) {
			w.Header()["Content-Length"] = []string{"5"}
			_, _ = io.WriteString(w, "hello")
			_, _ = io.WriteString(w, "!")
		},
		"flushed": func(w http.ResponseWriter) {
			body("hello")(w)
			flush(w)
			body(", world")(w)
		},
		"flushed before": func(w http.ResponseWriter) {
			flush(w)
			body("hello")(w)
		},
		"flushed, nothing": func(w http.ResponseWriter) { flush(w) },
		"flushed, length said": func(w http.ResponseWriter) {
			w.Header()["Content-Length"] = []string{"5"}
			flush(w)
			body("hello")(w)
		},
		"many small": func(w http.ResponseWriter) {
			for i := range 1000 {
				fmt.Fprintf(w, "%d,", i)
			}
		},
		"many flushed": func(w http.ResponseWriter) {
			for i := range 30 {
				fmt.Fprintf(w, "%d,", i)
				flush(w)
			}
		},
		"small, large, small": func(w http.ResponseWriter) {
			body("hello")(w)
			body(large)(w)
			body("bye")(w)
		},
		"identity": header("Transfer-Encoding", "identity"),
		"identity and a length": func(w http.ResponseWriter) {
			w.Header()["Transfer-Encoding"] = []string{"identity"}
			length("5", "hello")(w)
		},
		"close":               header("Connection", "close"),
		"close, flushed":      func(w http.ResponseWriter) { w.Header()["Connection"] = []string{"close"}; flush(w); body("hello")(w) },
		"204":                 status(204, ""),
		"204 with a body":     status(204, "hello"),
		"304":                 status(304, ""),
		"304 with a length":   func(w http.ResponseWriter) { w.Header()["Content-Length"] = []string{"5"}; status(304, "")(w) },
		"204, flushed":        func(w http.ResponseWriter) { w.WriteHeader(204); flush(w) },
		"404":                 status(404, "none"),
		"599":                 status(599, "?"),
		"999":                 status(999, "?"),
		"103":                 status(103, "hello"),
		"no status":           status(0, "hello"),
		"1000":                status(1000, "hello"),
		"status of no digits": status(-1, "hello"),
		"twice":               func(w http.ResponseWriter) { w.WriteHeader(201); status(500, "hello")(w) },
		"header afterwards": func(w http.ResponseWriter) {
			w.WriteHeader(200)
			w.Header()["Too-Late"] = []string{"x"}
			body("hello")(w)
		},
		"header in the body": func(w http.ResponseWriter) {
			body("hello")(w)
			w.Header()["Too-Late"] = []string{"x"}
			w.Header()["Connection"] = []string{"close"}
		},
		"lines in a value":   header("X-A", "a\r\nb: c", "\n x \r", "\td\t"),
		"names that are not": header("X A", "a"),
		"names with lines":   header("X\r\nA", "a"),
		"an empty name":      header("", "a"),
		"no date":            header("Date"),
		"values":             header("X-A", "a", "", "b"),
		"own spelling":       header("x-a", "a"),
		"panic":              func(http.ResponseWriter) { panic("at the disco") },
		"abort":              func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
		"panic after header": func(w http.ResponseWriter) { w.WriteHeader(200); panic("x") },
		"panic after little": func(w http.ResponseWriter) { body("hello")(w); panic("x") },
		"abort after middle": func(w http.ResponseWriter) { body(middle)(w); panic(http.ErrAbortHandler) },
		"abort after length": func(w http.ResponseWriter) { length("9000", middle)(w); panic(http.ErrAbortHandler) },
		"abort after flush":  func(w http.ResponseWriter) { body("hello")(w); flush(w); panic(http.ErrAbortHandler) },
		"abort after flush and more": func(w http.ResponseWriter) {
			body("hello")(w)
			flush(w)
			body("more")(w)
			panic(http.ErrAbortHandler)
		},
		"slow": func(w http.ResponseWriter) { time.Sleep(time.Second); body("hello")(w) },
		"slow after flush": func(w http.ResponseWriter) {
			flush(w)
			time.Sleep(time.Second)
			body("hello")(w)
		},
	}
}

// asking are the kinds of requests that handlers meet.
func asking() map[string]string {
	asks := map[string]string{}
	for _, method := range []string{"GET", "HEAD"} {
		for name, head := range map[string]string{
			"1.1": "HTTP/1.1\r\nHost: h", "1.1, close": "HTTP/1.1\r\nHost: h\r\nConnection: close",
			"1.1, close among others": "HTTP/1.1\r\nHost: h\r\nConnection: x, Close", "1.1, keep": "HTTP/1.1\r\nHost: h\r\nConnection: keep-alive",
			"1.0": "HTTP/1.0", "1.0, keep": "HTTP/1.0\r\nConnection: keep-alive",
		} {
			asks[method+" "+name] = method + " /a " + head + "\r\n\r\n"
		}
	}
	asks["POST, unread"] = "POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
	return asks
}
