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

	"warmroute/proxy/apikey"
)

// ends reads an answer, and then the end of the connection.
func ends(t *testing.T, conn net.Conn) (*http.Response, string) {
	t.Helper()
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(br); len(rest) > 0 || isTimeout(err) {
		t.Errorf("behind the answer %q, %v", rest, err)
	}
	return resp, string(body)
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}

func TestRequestsBeyondTheLimitAreRefusedUnread(t *testing.T) {
	over := make(chan struct{})
	r := &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.until(over)
		s.say(chunk(stop), chunk(doneLine), lastChunk)
	}}
	f := serve(t, func(o *Options) { o.InFlight = 2 }, r)
	var streams []*reader
	for range 2 {
		streams = append(streams, f.open(t, "/v1/chat/completions", askStream))
	}
	conn := f.dial()
	io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
	resp, answer := ends(t, conn)
	if e := refused(t, answer); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || e.Error.Type != "overloaded" {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, _ := f.get("/livez"); resp.StatusCode != http.StatusOK {
		t.Errorf("/livez is %d", resp.StatusCode)
	}
	close(over)
	for _, s := range streams {
		s.rest()
	}
	f.settled()
	if resp, _ := f.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusOK {
		t.Errorf("with room again: %d", resp.StatusCode)
	}
	if got := len(r.requests()); got != 3 {
		t.Errorf("the replica got %d requests", got)
	}
}

func TestQueryIsBoundedAndPassesAsItIs(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) { o.QueryBytes = 100 }, r)
	long := "a=%20%2f;&&b" + strings.Repeat("x", 88)
	if resp, answer := f.post("/v1/chat/completions?"+long, askWhole); resp.StatusCode != http.StatusOK {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	resp, answer := f.post("/v1/chat/completions?"+long+"x", askWhole)
	if refused(t, answer); resp.StatusCode != http.StatusRequestURITooLong {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if got := r.requests(); len(got) != 1 || got[0].URL.RawQuery != long {
		t.Errorf("the replica saw %d requests", len(got))
	}
}

// net/http reads what a handler left of a body, for as long as it takes.
func TestBodyThatNeverComesHoldsNoConnection(t *testing.T) {
	for line, c := range map[string]struct {
		status int
		change func(*Options)
	}{
		"POST /nowhere":                {404, nil},
		"GET /livez":                   {200, nil},
		"GET /v1/models":               {200, nil},
		"PUT /v1/chat/completions":     {405, nil},
		"POST /v1/chat/completions":    {408, func(o *Options) { o.BodyIdle = 50 * time.Millisecond }},
		"POST /v1/chat/completions?xx": {414, func(o *Options) { o.QueryBytes = 1 }},
		"POST /v1/embeddings":          {413, func(o *Options) { o.BodyBytes = 50 }},
	} {
		for _, framing := range []string{"Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n40\r\n{"} {
			if c.status == 413 && framing[0] == 'T' {
				continue // not known to be too long
			}
			t.Run(line+" "+framing[:7], func(t *testing.T) {
				f := serve(t, c.change, &replica{})
				conn := f.dial()
				fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\n%s", line, framing)
				if resp, body := ends(t, conn); resp.StatusCode != c.status {
					t.Errorf("status %d %s", resp.StatusCode, body)
				}
			})
		}
	}
}

// Whoever is not let in must not take the place of others meanwhile.
func TestARefusedRequestWhoseBodyIsAwaitedIsNotInFlight(t *testing.T) {
	f := serve(t, func(o *Options) {
		withKeys(keyOf("a", func(k *apikey.Key) { k.Concurrency = 1 }))(o)
		o.InFlight, o.QueryBytes = 1, 10
	}, &replica{script: always(answered("200 OK", whole))})
	const path = "POST /v1/chat/completions"
	valid := "Authorization: " + bearer("a")[1] + "\r\n"
	for name, request := range map[string]string{
		"no key":                   path + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"no key, to close":         path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{",
		"a long query":             path + "?a=1234567890 HTTP/1.1\r\nHost: x\r\n" + valid + "Content-Length: 100\r\n\r\n{",
		"a large body, to close":   path + " HTTP/1.1\r\nHost: x\r\n" + valid + "Connection: close\r\nContent-Length: 2000000\r\n\r\n{",
		"no key, a body in chunks": path + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{",
	} {
		t.Run(name, func(t *testing.T) {
			conn := f.dial()
			io.WriteString(conn, request)
			eventually(t, "it lingers", func() bool { return f.proxy.lingering.Load() == 1 })
			if resp, answer := f.post("/v1/chat/completions", askWhole, bearer("a")...); resp.StatusCode != http.StatusOK {
				t.Errorf("another request got %d %s", resp.StatusCode, answer)
			}
			conn.Close()
			eventually(t, "it lingers no more", func() bool { return f.proxy.lingering.Load() == 0 })
		})
	}
}

func TestBeyondTheMostThatLingerConnectionsAreClosedAtOnce(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", nil)), &replica{})
	f.proxy.lingering.Add(mostLingering - 1)
	const request = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: 100\r\n\r\n{"
	for _, connection := range []string{"", "Connection: close\r\n"} {
		last, beyond := f.dial(), f.dial()
		fmt.Fprintf(last, request, connection)
		eventually(t, "the last one lingers", func() bool { return f.proxy.lingering.Load() == mostLingering })
		fmt.Fprintf(beyond, request, connection)
		if resp, answer := ends(t, beyond); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("got %d %s", resp.StatusCode, answer)
		}
		if f.proxy.lingering.Load() != mostLingering {
			t.Error("it took as long as for the one before")
		}
		last.Close()
		eventually(t, "none lingers", func() bool { return f.proxy.lingering.Load() == mostLingering-1 })
	}
}

func TestBodyThatDripsIsA408(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyIdle = 100 * time.Millisecond }, &replica{})
	conn := f.dial()
	io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
	dripping := make(chan struct{})
	go func() {
		defer close(dripping)
		for {
			if _, err := io.WriteString(conn, "["); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || resp.StatusCode != http.StatusRequestTimeout {
		t.Errorf("got %v, %v", resp, err)
	}
	f.settled()
	<-dripping
}

// carryNone is how many connections carry no request.
func (c *connections) carryNone() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := c.idle.next; k != nil && k != &c.idle; k = k.next {
		n++
	}
	return n
}

func TestNewConnectionsCloseTheLongestIdle(t *testing.T) {
	over := make(chan struct{})
	f := serve(t, func(o *Options) { o.Connections = 4 }, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.until(over)
		s.say(chunk(stop), chunk(doneLine), lastChunk)
	}})
	stream := f.open(t, "/v1/chat/completions", askStream)
	var conns []net.Conn
	ask := func(conn net.Conn) bool {
		io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		return err == nil && resp.StatusCode == http.StatusOK
	}
	for i := range 6 {
		conn := f.dial()
		conns = append(conns, conn)
		if i%2 == 0 { // half of them stop in the middle of a header
			io.WriteString(conn, "POST / HTTP/1.1\r\nHo")
		} else if !ask(conn) {
			t.Fatal("no answer on a new connection")
		}
		// A client has its answer before the server has noted that.
		eventually(t, "the connection is noted as idle", func() bool { return f.proxy.connections.carryNone() == min(i+1, 3) })
	}
	for i, conn := range conns[:3] {
		if _, err := conn.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("connection %d is still open: %v", i, err)
		}
	}
	if !ask(conns[3]) || !ask(conns[5]) {
		t.Error("one of the latest connections was closed")
	}
	close(over)
	if got := stream.rest(); !strings.HasSuffix(got, doneLine) {
		t.Errorf("the stream ended in %q", got)
	}
	f.counts("warmroute_connections_closed_total 3")
}
