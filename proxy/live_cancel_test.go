package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// hookedBody calls a hook once, where the body has come to its end (net/http reads
// on by then, to see the client leave) or where it is closed.
type hookedBody struct {
	io.ReadCloser
	atEnd, atClose func()
}

func (b *hookedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF && b.atEnd != nil {
		b.atEnd()
		b.atEnd = nil
	}
	return n, err
}

func (b *hookedBody) Close() error {
	if b.atClose != nil {
		b.atClose()
		b.atClose = nil
	}
	return b.ReadCloser.Close()
}

// through serves the proxy behind a change of its requests, over a version of HTTP.
func (f *fleet) through(major int, change func(*http.Request) *http.Request) (post func(body string, headers ...string) (*http.Response, string, error)) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.proxy.ServeHTTP(w, change(r))
	}))
	server.Listener = NewClientListener(server.Listener)
	if server.EnableHTTP2 = major == 2; server.EnableHTTP2 {
		server.StartTLS()
	} else {
		server.Start()
	}
	f.t.Cleanup(server.Close)
	there := &fleet{t: f.t, url: server.URL, client: server.Client()}
	return func(body string, headers ...string) (*http.Response, string, error) {
		return there.try("/v1/chat/completions", body, headers...)
	}
}

// cancelAll cancels what is in flight, and leaves whoever reads the connection time
// to see what it will of that.
func (f *fleet) cancelAll() {
	for _, r := range f.proxy.Live().Requests(10, 0).Oldest {
		f.proxy.Live().Cancel(r.Handle)
	}
	time.Sleep(20 * time.Millisecond)
}

// Whoever comes next on the connection of a cancelled request is answered as any other.
func TestCancelSparesWhatComesNextOnTheConnection(t *testing.T) {
	for name, c := range map[string]struct {
		body   string
		atEnd  bool // else when the body was read
		closes bool
	}{
		"as its body ends":        {askWhole, true, true},
		"when its body has ended": {askWhole, false, false},
		"of one to be refused":    {`{"model":"unknown","messages":[]}`, false, false},
	} {
		for major := 1; major <= 2; major++ {
			t.Run(fmt.Sprint(name, ", HTTP/", major), func(t *testing.T) {
				r := &replica{script: always(answered("200 OK", whole))}
				f := serve(t, nil, r)
				post := f.through(major, func(r *http.Request) *http.Request {
					if r.Header.Get("Doomed") != "" {
						body := &hookedBody{ReadCloser: r.Body}
						if c.atEnd {
							body.atEnd = f.cancelAll
						} else {
							body.atClose = f.cancelAll
						}
						r.Body = body
					}
					return r
				})
				for range 3 {
					resp, body, err := post(c.body, "Doomed", "yes")
					if err != nil || resp.StatusCode != http.StatusForbidden || !strings.Contains(body, isCancelled) {
						t.Fatalf("it got %v %s, %v", resp, body, err)
					}
					if major == 1 && resp.Close != c.closes {
						t.Errorf("the connection is closed: %v", resp.Close)
					}
					if resp, body, err := post(askWhole); err != nil || resp.StatusCode != http.StatusOK || body != whole {
						t.Fatalf("the next one got %v %q, %v", resp, body, err)
					}
				}
				if n := len(r.requests()); n != 3 {
					t.Errorf("the replica was asked %d times, want 3", n)
				}
				f.counts(`warmroute_aborts_total{phase="cancelled"} 3`)
				if e := f.exposition(); strings.Contains(e, `code="499"`) || strings.Contains(e, `backend="r0",code="403"`) {
					t.Error("one counts as a client that left, or as sent")
				}
			})
		}
	}
}

// Not as an empty 200, nor as a stream that seems to have ended well.
func TestWhatIsTakenForAClientThatLeftEndsAsNoAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		body   string
		script func(*session)
		phase  Phase
	}{
		"before an answer": {askWhole, hang(), FirstToken},
		"in a stream":      {askStream, hang(sseHead, chunk(role), chunk(hello)), Answering},
	} {
		for major := 1; major <= 2; major++ {
			t.Run(fmt.Sprint(name, ", HTTP/", major), func(t *testing.T) {
				f := serve(t, nil, &replica{script: c.script})
				ctx, leave := context.WithCancel(t.Context())
				post := f.through(major, func(r *http.Request) *http.Request { return r.WithContext(ctx) })
				go func() {
					f.proxyHas(c.phase)
					leave()
				}()
				resp, body, err := post(c.body)
				if err == nil {
					t.Errorf("got %v %q", resp, body)
				}
				f.counts(`warmroute_requests_total{backend="r0",code="499",endpoint="/v1/chat/completions",model="m"} 1`)
			})
		}
	}
}

// proxyHas waits, for a while, for a request in the phase.
func (f *fleet) proxyHas(phase Phase) {
	for end := time.Now().Add(failsafe); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if l := f.proxy.Live().Requests(1, 0); l.All == 1 && l.Oldest[0].Phase == phase {
			return
		}
	}
}

// A client that reads, but slowly, has no more time than one that does not.
func TestCancelDoesNotWaitForAClientThatReadsSlowly(t *testing.T) {
	f := serve(t, func(o *Options) { o.WriteIdle = 4 * time.Second }, &replica{script: func(s *session) {
		once(answered("200 OK", strings.Repeat("x", heldWhole-1)))(s)
		s.closed()
	}})
	conn := f.dial()
	conn.SetReadBuffer(16 << 10)
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole), askWhole)
	f.proxy.Live().Cancel(f.only(Answering).Handle)
	piece := make([]byte, 16<<10)
	var got, n int
	var err error
	for ; err == nil; got += n {
		time.Sleep(50 * time.Millisecond)
		n, err = conn.Read(piece)
	}
	if got >= heldWhole-1 {
		t.Errorf("it got the whole answer: %d bytes, then %v", got, err)
	}
	f.cancelled()
}
