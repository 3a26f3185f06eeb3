package server

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"
)

func TestHandlerPanicLogged(t *testing.T) {
	for _, c := range []struct {
		name  string
		value any
		want  string // in the log; empty: nothing is logged
	}{
		{"panic", "index out of range", "level=ERROR msg=\"handler panicked\" panic=\"index out of range\" stack="},
		{"aborted response", http.ErrAbortHandler, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			s := &Server{log: slog.New(slog.NewTextHandler(&log, nil))}
			server := httptest.NewServer(s.logPanics(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(c.value) })))
			resp, err := http.Get(server.URL)
			if err == nil {
				resp.Body.Close()
				t.Errorf("the response has status %d, want a closed connection", resp.StatusCode)
			}
			server.Close() // the handler has ended, and nothing writes to log
			if got := log.String(); !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
				t.Errorf("log %q, want %q", got, c.want)
			}
		})
	}
}

// A proxy in front of this one may see another end of such a request than net/http
// does: what it takes for the body must not be served as a request of its own.
func TestConnectionClosesAfterAmbiguousFraming(t *testing.T) {
	f := startFronted(t, nil, standIn{}.start(t))
	f.ready(1)
	second := "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat)
	for name, c := range map[string]struct {
		request string
		close   bool
	}{
		"HTTP/1.0 with both":              {"POST %s HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", true},
		"HTTP/1.0":                        {fmt.Sprintf("POST %%s HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%s", len(plainChat), plainChat), true},
		"HTTP/1.1 with both":              {"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked, true},
		"HTTP/1.1 with Transfer-Encoding": {"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked, true},
		"HTTP/1.1 with Content-Length":    {fmt.Sprintf("POST %%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(plainChat), plainChat), false},
	} {
		for listener, url := range map[string]string{"public": f.url, "admin": f.admin} {
			if listener == "admin" && !c.close {
				continue // it closes for its own reasons: it refuses the body unread
			}
			t.Run(name+", "+listener, func(t *testing.T) {
				conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(20 * time.Second))
				path := map[string]string{"public": "/v1/chat/completions", "admin": "/api/explain"}[listener]
				io.WriteString(conn, fmt.Sprintf(c.request, path)+second)
				in := bufio.NewReader(conn)
				responses := 0
				for {
					resp, err := http.ReadResponse(in, nil)
					if err != nil {
						break
					}
					if _, err := io.Copy(io.Discard, resp.Body); err != nil {
						t.Fatal(err)
					}
					if responses++; resp.Close != c.close {
						t.Errorf("response %d (%s) closes the connection: %v, want %v", responses, resp.Status, resp.Close, c.close)
					}
					if responses == 2 {
						break
					}
				}
				if want := map[bool]int{true: 1, false: 2}[c.close]; responses != want {
					t.Errorf("%d responses, want %d", responses, want)
				}
			})
		}
	}
}

// A balancer that does not ask for readiness sends requests as soon as the port is open.
func TestRequestBeforeFirstCheckIsAnswered(t *testing.T) {
	sent := make(chan struct{})
	p := startFronted(t, nil, standIn{health: func(http.ResponseWriter, *http.Request) { <-sent }}.start(t))
	trace := &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { close(sent) }}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(plainChat))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("status %d", resp.StatusCode)
	}
}
