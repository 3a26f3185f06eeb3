package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// askFrom sends a request on a connection of its own, and reads nothing.
func (f *fleet) askFrom(body string) *net.TCPConn {
	conn := f.dial()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	return conn
}

// endless streams events until the connection is closed.
func endless(s *session) {
	s.request()
	s.say(sseHead, chunk(role))
	event := chunk(`data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 8<<10) + `"}}]}` + "\n\n")
	for {
		if _, err := io.WriteString(s.Conn, event); err != nil {
			return
		}
	}
}

func TestClientThatDoesNotReadIsCutOff(t *testing.T) {
	long := strings.Repeat("x", 32<<20)
	for name, c := range map[string]struct {
		ask    string
		script func(*session)
	}{
		"stream":        {askStream, endless},
		"long answer":   {askWhole, once(answered("200 OK", long))},
		"to the end":    {askWhole, once("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + long)},
		"one long line": {askStream, once(sseHead, chunk(role), chunk("data: "+long))},
	} {
		t.Run(name, func(t *testing.T) {
			gone := make(chan struct{})
			f := serve(t, func(o *Options) { o.WriteIdle = 100 * time.Millisecond }, &replica{script: func(s *session) {
				defer close(gone)
				c.script(s)
				s.closed()
			}})
			conn := f.askFrom(c.ask)
			f.counts(`warmroute_aborts_total{phase="not_reading"} 1`)
			f.settled()
			<-gone
			// What was on its way still comes, and no end of the answer.
			br := bufio.NewReader(conn)
			resp, err := http.ReadResponse(br, nil)
			if err != nil {
				t.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, resp.Body); err == nil && n >= int64(len(long)) {
				t.Errorf("the whole answer came: %d bytes", n)
			}
		})
	}
}

func TestRefusalIsNotWaitedForEither(t *testing.T) {
	f := serve(t, func(o *Options) { o.WriteIdle = 100 * time.Millisecond },
		&replica{script: always(answered("503 Service Unavailable", `{"error":"`+strings.Repeat("x", 900<<10)+`"}`))})
	conn := f.dial()
	// So many answers that no socket's buffers take them all.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range 100 {
			if _, err := fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole), askWhole); err != nil {
				return
			}
		}
	}()
	f.counts(`warmroute_aborts_total{phase="not_reading"} 1`)
	conn.Close()
	<-ended
}

func TestClientThatReadsSlowlyGetsAll(t *testing.T) {
	const size = 4 << 20
	f := serve(t, func(o *Options) { o.WriteIdle = 5 * time.Second }, &replica{script: always(answered("200 OK", strings.Repeat("x", size)))})
	conn := f.dial()
	conn.SetReadBuffer(32 << 10)
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole), askWhole)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	var got int64
	for err == nil {
		time.Sleep(10 * time.Millisecond)
		var n int64
		n, err = io.CopyN(io.Discard, resp.Body, size/200)
		got += n
	}
	if err != io.EOF || got != size {
		t.Errorf("%d bytes came, then %v", got, err)
	}
}
