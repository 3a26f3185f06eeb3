package http1_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// chunks is a body in chunks of n bytes.
func chunks(body string, n int) string {
	var b strings.Builder
	for len(body) > 0 {
		piece := body[:min(n, len(body))]
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(piece), piece)
		body = body[len(piece):]
	}
	return b.String() + "0\r\n\r\n"
}

const (
	post        = "POST /p HTTP/1.1\r\nHost: h\r\n"
	postChunked = post + "Transfer-Encoding: chunked\r\n\r\n"
	expecting   = post + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
	keep10      = "GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
)

// heads are requests that differ in what stands before the body; each is followed by
// another request.
func heads() map[string]string {
	requests := map[string]string{
		"plain": get, "absolute": "GET http://a/b?c HTTP/1.1\r\nHost: h\r\n\r\n", "absolute 1.0": "GET http://a/b?c HTTP/1.0\r\n\r\n",
		"absolute without host": "GET http://a/b?c HTTP/1.1\r\n\r\n", "absolute, host malformed": "GET http://a/ HTTP/1.1\r\nHost: a{b\r\n\r\n",
		"options": "OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", "connect": "CONNECT a:443 HTTP/1.1\r\nHost: h\r\n\r\n",
		"connect without host": "CONNECT a:443 HTTP/1.1\r\n\r\n", "connect a path": "CONNECT /a HTTP/1.1\r\nHost: h\r\n\r\n",
		"star": "GET * HTTP/1.1\r\nHost: h\r\n\r\n", "own method": "M-SEARCH /a HTTP/1.1\r\nHost: h\r\n\r\n", "no method": " / HTTP/1.1\r\nHost: h\r\n\r\n",
		"no target": "GET  HTTP/1.1\r\nHost: h\r\n\r\n", "not a path": "GET a HTTP/1.1\r\nHost: h\r\n\r\n", "bad escape": "GET /%zz HTTP/1.1\r\nHost: h\r\n\r\n",
		"space in the target": "GET /a b HTTP/1.1\r\nHost: h\r\n\r\n", "two spaces": "GET  /a HTTP/1.1\r\nHost: h\r\n\r\n", "tabs": "GET\t/a\tHTTP/1.1\r\nHost: h\r\n\r\n",
		"bad method": "G(T / HTTP/1.1\r\nHost: h\r\n\r\n", "lower case": "get / http/1.1\r\nHost: h\r\n\r\n",
		"preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "2.0": "GET / HTTP/2.0\r\nHost: h\r\n\r\n", "0.9": "GET / HTTP/0.9\r\nHost: h\r\n\r\n", "no version": "GET /\r\n\r\n",
		"1.2": "GET / HTTP/1.2\r\nHost: h\r\n\r\n", "1.10": "GET / HTTP/1.10\r\nHost: h\r\n\r\n", "3": "GET / HTTP/3\r\nHost: h\r\n\r\n", "version with a space": "GET / HTTP/1.1 \r\nHost: h\r\n\r\n",
		"no host": "GET / HTTP/1.1\r\n\r\n", "empty host": "GET / HTTP/1.1\r\nHost:\r\n\r\n", "two hosts": "GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
		"host with a path": "GET / HTTP/1.1\r\nHost: h/a\r\n\r\n", "host with a space": "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", "host with a brace": "GET / HTTP/1.1\r\nHost: a{b\r\n\r\n",
		"1.0 with malformed host": "GET / HTTP/1.0\r\nHost: a b\r\n\r\n", "1.0, empty host": "GET / HTTP/1.0\r\nHost:\r\n\r\n",
		"bare LF": "GET / HTTP/1.1\nHost: h\n\n", "LF and CRLF": "GET / HTTP/1.1\r\nHost: h\nA: b\r\n\r\n", "bare CR": "GET / HTTP/1.1\rHost: h\r\r", "CR in a value": "GET / HTTP/1.1\r\nHost: h\r\nA: b\rc\r\n\r\n",
		"folded": "GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n c\r\n\r\n", "folded first": "GET / HTTP/1.1\r\n Host: h\r\n\r\n", "space before the colon": "GET / HTTP/1.1\r\nHost : h\r\n\r\n",
		"space before another colon": "GET / HTTP/1.1\r\nHost: h\r\nA : b\r\n\r\n", "no colon": "GET / HTTP/1.1\r\nHost: h\r\nA\r\n\r\n", "no name": "GET / HTTP/1.1\r\nHost: h\r\n: b\r\n\r\n",
		"NUL in a value": "GET / HTTP/1.1\r\nHost: h\r\nA: b\x00c\r\n\r\n", "NUL in a name": "GET / HTTP/1.1\r\nHost: h\r\nA\x00: b\r\n\r\n", "NUL in the target": "GET /\x00 HTTP/1.1\r\nHost: h\r\n\r\n",
		"control in a value": "GET / HTTP/1.1\r\nHost: h\r\nA: b\x01\r\n\r\n", "DEL in a value": "GET / HTTP/1.1\r\nHost: h\r\nA: b\x7f\r\n\r\n", "tab in a value": "GET / HTTP/1.1\r\nHost: h\r\nA: b\tc\r\n\r\n",
		"UTF-8 in a value": "GET / HTTP/1.1\r\nHost: h\r\nA: ä\r\n\r\n", "UTF-8 in a name": "GET / HTTP/1.1\r\nHost: h\r\nÄ: b\r\n\r\n", "UTF-8 in the target": "GET /ä HTTP/1.1\r\nHost: h\r\n\r\n", "UTF-8 in the host": "GET / HTTP/1.1\r\nHost: ä\r\n\r\n",
		"spaces around a value": "GET / HTTP/1.1\r\nHost:   h  \r\nA:\t b \t\r\n\r\n", "one name twice": "GET / HTTP/1.1\r\nHost: h\r\na: 1\r\nA: 2\r\n\r\n", "pragma": "GET / HTTP/1.1\r\nHost: h\r\nPragma: no-cache\r\n\r\n",
		"header too long":          "GET / HTTP/1.1\r\nHost: h\r\nA: " + large[:6000] + "\r\n\r\n",
		"header as long as may be": "GET / HTTP/1.1\r\nHost: h\r\nA: " + large[:4000] + "\r\n\r\n",
		"target too long":          "GET /" + large[:6000] + " HTTP/1.1\r\nHost: h\r\n\r\n",
		"many headers":             "GET / HTTP/1.1\r\nHost: h\r\n" + strings.Repeat("A: b\r\n", 2000) + "\r\n",
		"garbage":                  "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "garbage lines": "hello\r\n\r\n", "line first": "\r\n" + get, "lines first": "\r\n\r\n" + get, "nothing but lines": "\r\n\r\n\r\n\r\n",
		"1.0": "GET /a HTTP/1.0\r\n\r\n", "1.0, keep": keep10, "1.0, keep and close": "GET /a HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n", "close, x": "GET /a HTTP/1.1\r\nHost: h\r\nConnection: close, x\r\n\r\n",
		"close in the second line": "GET /a HTTP/1.1\r\nHost: h\r\nConnection: x\r\nConnection: close\r\n\r\n", "upgrade": "GET /a HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
		"expect": "GET / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n", "expect else": "GET / HTTP/1.1\r\nHost: h\r\nExpect: tea\r\n\r\n", "expect nothing": "GET / HTTP/1.1\r\nHost: h\r\nExpect:\r\n\r\n",
		"expect 1.0": "POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc", "expect else 1.0": "POST / HTTP/1.0\r\nExpect: tea\r\nContent-Length: 3\r\n\r\nabc",
	}
	for name, said := range map[string]string{
		"length and coding": "Content-Length: 5\r\nTransfer-Encoding: chunked", "length twice": "Content-Length: 5\r\nContent-Length: 5", "two lengths": "Content-Length: 5\r\nContent-Length: 6",
		"a list of lengths": "Content-Length: 5, 5", "length with a plus": "Content-Length: +5", "negative length": "Content-Length: -5", "empty length": "Content-Length:", "length no number": "Content-Length: 0x5",
		"huge length": "Content-Length: 99999999999999999999", "largest length": "Content-Length: 9223372036854775807", "gzip": "Transfer-Encoding: gzip", "gzip, chunked": "Transfer-Encoding: gzip, chunked",
		"coding twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "two codings": "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", "identity": "Transfer-Encoding: identity", "Chunked": "Transfer-Encoding: Chunked",
		"coding with spaces": "Transfer-Encoding:  chunked ", "coding unnamed": "Transfer-Encoding:", "coding with VT": "Transfer-Encoding: \vchunked", "no length": "A: b",
		"trailer forbidden": "Transfer-Encoding: chunked\r\nTrailer: Content-Length",
	} {
		requests[name] = post + said + "\r\n\r\n" + chunks("hello", 5)
		requests[name+" 1.0"] = "POST /p HTTP/1.0\r\n" + said + "\r\n\r\n" + chunks("hello", 5)
	}
	return requests
}

// framed are requests with bodies.
func framed() map[string]string {
	return map[string]string{
		"length": post + "Content-Length: 5\r\n\r\nhello", "length 0": post + "Content-Length: 0\r\n\r\n", "GET with a body": "GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
		"lines after": post + "Content-Length: 5\r\n\r\nhello\r\n", "many lines after": post + "Content-Length: 5\r\n\r\nhello\r\n\r\n", "too many lines after": post + "Content-Length: 5\r\n\r\nhello\r\n\r\n\r\n",
		"LFs after": post + "Content-Length: 5\r\n\r\nhello\n\n\n", "lines after GET": get + "\r\n", "lines after PUT": "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello\r\n",
		"chunked": postChunked + chunks("hello, world", 5), "chunked, nothing": postChunked + chunks("", 1), "chunked, bytes": postChunked + chunks(middle, 1), "chunked, large": postChunked + chunks(large[:100_000], 7000),
		"extensions": postChunked + "5;a=b\r\nhello\r\n5 ; c=\"d\"\r\nworld\r\n0;e\r\n\r\n", "trailer": postChunked + "5\r\nhello\r\n0\r\nA: b\r\nC: d\r\n\r\n",
		"trailer announced": post + "Transfer-Encoding: chunked\r\nTrailer: A\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n", "long trailer": postChunked + "0\r\nA: " + large[:8000] + "\r\n\r\n",
		"bad trailer": postChunked + "5\r\nhello\r\n0\r\nno colon\r\n\r\n", "bad size": postChunked + "x\r\nhello\r\n0\r\n\r\n", "negative size": postChunked + "-5\r\nhello\r\n0\r\n\r\n", "huge size": postChunked + "ffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
		"chunk too long": postChunked + "3\r\nhello\r\n0\r\n\r\n", "chunk too short": postChunked + "9\r\nhello\r\n0\r\n\r\n", "chunks with LF": postChunked + "5\nhello\n0\n\n", "size with zeros": postChunked + "0005\r\nhello\r\n0\r\n\r\n",
		"long extension": postChunked + "5;" + large[:5000] + "\r\nhello\r\n0\r\n\r\n", "much overhead": postChunked + strings.Repeat("1;"+large[:100]+"\r\na\r\n", 500) + "0\r\n\r\n",
		"small": post + "Content-Length: 3000\r\n\r\n" + middle, "as much as is read": post + "Content-Length: 262143\r\n\r\n" + large[:262143], "one byte more": post + "Content-Length: 262144\r\n\r\n" + large[:262144],
		"more than is read": post + "Content-Length: 262146\r\n\r\n" + large[:262146], "large": post + "Content-Length: 1048576\r\n\r\n" + large,
		"expected": expecting + "hello", "1.0": "POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello", "1.0 without a length": "POST / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
	}
}

// readers are handlers that do something with a body.
func readers() map[string]noting {
	return map[string]noting{
		"echoed": echo,
		"unread": answers(body("hello")),
		"unread, flushed": answers(func(w http.ResponseWriter) {
			flush(w)
			body("hello")(w)
		}),
		"unread, large answer": answers(body(large[:100_000])),
		"closed": func(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
			_ = r.Body.Close()
			_, err := r.Body.Read(make([]byte, 1))
			note("%v", class(err) == "whole")
			answers(body("hello"))(w, r, note)
		},
		"half read": func(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
			n, err := io.ReadFull(r.Body, make([]byte, 3))
			note("%d %s", n, class(err))
			answers(body("hello"))(w, r, note)
		},
		"read to the byte": func(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
			n, err := io.ReadFull(r.Body, make([]byte, max(r.ContentLength, 5)))
			note("%d %s", n, class(err))
			answers(body("hello"))(w, r, note)
		},
		"read and waited": func(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
			echo(w, r, note)
			time.Sleep(time.Second)
		},
		"unread, close": answers(header("Connection", "close")),
		"aborted":       answers(func(http.ResponseWriter) { panic(http.ErrAbortHandler) }),
	}
}
