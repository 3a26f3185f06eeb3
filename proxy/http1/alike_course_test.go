package http1_test

import (
	"io"
	"net/http"
	"testing"
	"time"
)

// pieces is what a client says in pieces of n bytes, with or without waiting between.
func pieces(s string, n int, wait time.Duration) (steps []step) {
	for len(s) > 0 {
		m := min(n, len(s))
		steps = append(steps, step{send: s[:m], wait: wait})
		s = s[m:]
	}
	return steps
}

// However requests are cut into segments, the same comes of them.
func TestRequestsInPiecesAreTakenAsByNetHTTP(t *testing.T) {
	c := comparing(t)
	stream := post + "Content-Length: 5\r\n\r\nhello\r\n" + get + postChunked + chunks("hello, world", 5) + "HEAD / HTTP/1.1\r\nHost: h\r\n\r\n" + last
	for _, wait := range []time.Duration{0, aMoment} {
		for at := range stream {
			c.compare("cut in two", echo, []step{{send: stream[:at], wait: wait}, {send: stream[at:]}})
		}
		for _, n := range []int{1, 2, 3, 7, 50} {
			for how, h := range readers() {
				c.compare("in pieces, "+how, h, pieces(stream, n, wait))
			}
		}
	}
}

// watching is a handler that tells when its context has ended.
func watching(d time.Duration, next noting) noting {
	return func(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
		begun := time.Now()
		select {
		case <-r.Context().Done():
			note("%s: %v after %v", r.URL.Path, r.Context().Err(), time.Since(begun).Truncate(5*time.Millisecond)) // ours looks after 3
		case <-time.After(d):
		}
		next(w, r, note)
	}
}

// What a client does while it is served has the same consequences.
func TestClientsAreWatchedAsByNetHTTP(t *testing.T) {
	c := comparing(t)
	upload := post + "Content-Length: 5\r\n\r\n"
	for _, wait := range []time.Duration{0, 100 * time.Microsecond, aMoment, time.Second} {
		name := " after " + wait.String()
		for how, h := range map[string]noting{
			"at once": echo, "slow": watching(500*time.Millisecond, echo), "read, then slow": func(w http.ResponseWriter, r *http.Request, note func(string, ...any)) {
				sent, _ := io.ReadAll(r.Body)
				note("%d bytes", len(sent))
				watching(500*time.Millisecond, answers(body("hello")))(w, r, note)
			},
		} {
			c.compare("next request"+name+", "+how, h, []step{{send: get, wait: wait}, {send: get, wait: aMoment}, {send: last}})
			c.compare("fin"+name+", "+how, h, []step{{send: get, wait: wait}, {fin: true}})
			c.compare("pipelined and fin"+name+", "+how, h, []step{{send: get, wait: wait}, {send: get, fin: true}})
			c.compare("half a request and fin"+name+", "+how, h, []step{{send: get, wait: wait}, {send: "GET / HT", fin: true}})
			c.compare("a byte"+name+", "+how, h, []step{{send: get, wait: wait}, {send: get[:1], wait: time.Second}, {send: get[1:]}})
			c.compare("upload cut"+name+", "+how, h, []step{{send: upload + "hel", wait: wait}, {fin: true}})
			c.compare("upload, slow"+name+", "+how, h, []step{{send: upload + "hel", wait: wait}, {send: "lo" + get, wait: wait}, {fin: true}})
			c.compare("chunks cut"+name+", "+how, h, []step{{send: postChunked + "5\r\nhello\r\n", wait: wait}, {send: "3", fin: true}})
			c.compare("no header"+name+", "+how, h, []step{{send: "GET / HTTP/1.1\r\nHost:", wait: wait}, {fin: true}})
			c.compare("expecting"+name+", "+how, h, []step{{send: expecting, wait: wait}, {send: "hello" + get, wait: wait}, {send: last}})
			c.compare("expecting, cut"+name+", "+how, h, []step{{send: expecting, wait: wait}, {send: "he", fin: true}})
		}
		c.compare("expecting, unread"+name, answers(body("hello")), []step{{send: expecting, wait: wait}, {send: "hello" + get, wait: wait}})
		c.compare("expecting, unread, flushed"+name, answers(func(w http.ResponseWriter) { flush(w); body("hello")(w) }), []step{{send: expecting, wait: wait}, {send: "hello" + get, wait: wait}})
	}
	c.noneLeft("upload cut", "upload cut")
}

// Those who say nothing, or not enough, are waited for as long.
func TestClientsAreWaitedForAsByNetHTTP(t *testing.T) {
	c := comparing(t)
	for _, wait := range []time.Duration{headerTime - time.Second, headerTime + time.Second, idleTime - time.Second, idleTime + time.Second} {
		name := " for " + wait.String()
		c.compare("nothing"+name, echo, []step{{wait: wait}, {send: get, wait: aMoment}, {send: last}})
		c.compare("half a header"+name, echo, []step{{send: get[:20], wait: wait}, {send: get[20:], wait: aMoment}, {send: last}})
		c.compare("between requests"+name, echo, []step{{send: get, wait: wait}, {send: get, wait: aMoment}, {send: last}})
		c.compare("half a later header"+name, echo, []step{{send: get, wait: aMoment}, {send: get[:20], wait: wait}, {send: get[20:], wait: aMoment}, {send: last}})
		c.compare("in a body"+name, echo, []step{{send: post + "Content-Length: 5\r\n\r\nhel", wait: wait}, {send: "lo" + get, wait: aMoment}, {send: last}})
		c.compare("lines after a body"+name, echo, []step{{send: post + "Content-Length: 5\r\n\r\nhello\r\n", wait: wait}, {send: get, wait: aMoment}, {send: last}})
	}
	c.compare("dripping", echo, pieces(get, 1, 4*time.Second))
}
