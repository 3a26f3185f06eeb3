package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/proxy/relay"
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

func TestBlockedClientClosed(t *testing.T) {
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
			f.awaitMetric(`warmroute_disconnected_requests_total{phase="not_reading"} 1`)
			f.awaitIdle()
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

func TestBlockedClientClosedOnError(t *testing.T) {
	f := serve(t, func(o *Options) { o.WriteIdle = 100 * time.Millisecond },
		&replica{script: always(answered("503 Service Unavailable", `{"error":"`+strings.Repeat("x", 60<<10)+`"}`))})
	conn := f.dial()
	// So many answers that no socket's buffers take them all.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range 1000 {
			if _, err := fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole),
				askWhole); err != nil {
				return
			}
		}
	}()
	f.awaitMetric(`warmroute_disconnected_requests_total{phase="not_reading"} 1`)
	conn.Close()
	<-ended
}

// closedBy sends the same request again and again, and reads nothing, until the
// proxy closes the connection.
func (f *fleet) closedBy(request string) {
	conn := f.dial()
	many := strings.Repeat(request, 1000)
	var err error
	for err == nil {
		_, err = io.WriteString(conn, many)
	}
	if isTimeout(err) {
		f.t.Errorf("the connection stays open, and nothing of it is read: %q", request)
	}
}

func TestBlockedClientClosedOnLocalResponse(t *testing.T) {
	f := serve(t, func(o *Options) { o.WriteIdle = 100 * time.Millisecond }, &replica{})
	var asking sync.WaitGroup
	for _, path := range []string{"/nowhere", "/v1/models", "/livez", "/version"} {
		asking.Go(func() { f.closedBy("GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n") })
	}
	asking.Wait()
}

// Which write meets the full buffers is chance: of 8 connections, on some it is the 100.
func TestBlockedClientClosedOnContinue(t *testing.T) {
	f := serve(t, func(o *Options) { o.WriteIdle = 100 * time.Millisecond }, &replica{})
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			f.closedBy("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n[")
		})
	}
	asking.Wait()
}

func TestSlowClientServed(t *testing.T) {
	const writeIdle = 500 * time.Millisecond
	f := serve(t, func(o *Options) {
		o.WriteIdle = writeIdle
	}, &replica{script: always(answered("200 OK", strings.Repeat("x", slowClientBytes)))})
	for end := time.Now().Add(2 * failsafe); ; {
		got, pause, err := f.readSlowly()
		if err == nil && got == slowClientBytes {
			return
		}
		// On a busy machine, the client may itself not have read for so long that it was rightly disconnected.
		if pause < writeIdle/2 || time.Now().After(end) {
			t.Fatalf("%d bytes came, then %v, to a client that paused for %v at most", got, err, pause)
		}
	}
}

const slowClientBytes = 16 << 20

// readSlowly sends a request and reads its response of slowClientBytes at a low rate for 3 s, and then the rest. longestPause is the
// longest time between reads.
func (f *fleet) readSlowly() (got int64, longestPause time.Duration, err error) {
	conn := f.dial()
	defer conn.Close()
	conn.SetReadBuffer(32 << 10)
	read := time.Now()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole), askWhole)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, time.Since(read), err
	}
	// No write of the proxy's may wait for more than it takes to read a part of what the kernel could hold.
	const bytesPerSecond = 600 << 10 // by the clock: on a busy machine, the client reads less often and more at a time
	var n int64
	for began := time.Now(); err == nil && read.Sub(began) < 3*time.Second; {
		time.Sleep(20 * time.Millisecond)
		due := int64(time.Since(began).Seconds() * bytesPerSecond)
		n, err = io.CopyN(io.Discard, resp.Body, max(0, due-got))
		got += n
		longestPause, read = max(longestPause, time.Since(read)), time.Now()
	}
	if err == nil {
		n, err = io.Copy(io.Discard, resp.Body)
		got += n
	}
	return got, longestPause, err
}

// overHTTP2 is a client that speaks HTTP/2 with the proxy.
func (f *fleet) overHTTP2() (*http.Client, string) {
	server := httptest.NewUnstartedServer(f.proxy)
	server.EnableHTTP2 = true
	server.StartTLS()
	f.t.Cleanup(server.Close)
	return server.Client(), server.URL
}

func TestBlockedHTTP2ClientClosed(t *testing.T) {
	for name, c := range map[string]struct {
		ask    string
		script func(*session)
	}{
		"stream":      {askStream, endless},
		"long answer": {askWhole, once(answered("200 OK", strings.Repeat("x", 32<<20)))},
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, func(o *Options) { o.WriteIdle = 400 * time.Millisecond }, &replica{script: c.script})
			client, url := f.overHTTP2()
			resp, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(c.ask))
			if err != nil || resp.ProtoMajor != 2 {
				t.Fatal(resp, err)
			}
			defer resp.Body.Close()
			f.awaitMetric(`warmroute_disconnected_requests_total{phase="not_reading"} 1`)
			f.awaitIdle()
			if _, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Error("the answer seemed to end well")
			}
		})
	}
}

// Over HTTP/2 a deadline would end a stream even while nothing is written.
func TestHTTP2ClientKeptDuringReplicaSilence(t *testing.T) {
	silence := func() { time.Sleep(400 * time.Millisecond) }
	f := serve(t, func(o *Options) {
		o.WriteIdle, o.Keepalive = 100*time.Millisecond, 350*time.Millisecond
	}, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead)
		silence()
		s.say(chunk(role), chunk(hello))
		silence()
		s.say(chunk(stop), chunk(doneLine), lastChunk)
	}})
	client, url := f.overHTTP2()
	resp, err := client.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(askStream))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || strings.ReplaceAll(string(got), relay.KeepAliveComment, "") != role+hello+stop+doneLine {
		t.Errorf("got %q, %v", got, err)
	}
}
