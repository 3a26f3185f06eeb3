package server

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"warmroute/config"
	"warmroute/metrics"
)

// failingListener fails so many times before it accepts.
type failingListener struct {
	net.Listener
	errs []error
}

func (l *failingListener) Accept() (net.Conn, error) {
	if len(l.errs) == 0 {
		return l.Listener.Accept()
	}
	err := l.errs[0]
	l.errs = l.errs[1:]
	return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
}

func TestServeContinuesAfterAcceptError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	var log syncBuffer
	resources := newResourceLog(slog.New(slog.NewTextHandler(&log, nil)))
	failing := &failingListener{l, []error{syscall.EMFILE, syscall.ENFILE, syscall.EPROTO, syscall.ENOBUFS, syscall.EPERM}}
	server := &http.Server{Handler: http.NotFoundHandler(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	ended := make(chan error, 1)
	freed := 0
	onError := acceptErrors{resources.logAcceptError, func() bool { freed++; return freed == 1 }}
	go func() { ended <- server.Serve(temporaryErrorListener{failing, onError}) }()
	client := &http.Client{Transport: &http.Transport{}}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	client.CloseIdleConnections()
	server.Close()
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("the server ended with %v", err)
	}
	if freed != 2 { // EMFILE, ENFILE
		t.Errorf("asked for a descriptor %d times, want 2", freed)
	}
	text := log.String()
	if strings.Count(text, "level=ERROR msg=\"out of file descriptors\"") != 1 ||
		strings.Count(text, "level=ERROR msg=\"accept failed\"") != 1 {
		t.Errorf("the log:\n%s", text)
	}
}

// A port may be taken by a connection, which no list of listeners shows.
func TestListenOnPortOfConnection(t *testing.T) {
	remote, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer remote.Close()
	conn, err := net.Dial("tcp", remote.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	address := conn.LocalAddr().String()
	_, port, _ := net.SplitHostPort(address)
	_, err = listenTCP(address)
	want := address + " is in use: stop the listener or the connection that has the port (ss -tanp 'sport = :" + port +
		"' lists it), or set another address with --listen"
	if got := ListenError("--listen", address, err).Error(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestHandlerPanicLogged(t *testing.T) {
	for _, c := range []struct {
		name  string
		value any
		want  string // in the log; empty: nothing is logged
	}{
		{"panic", "index out of range", "level=ERROR msg=\"panic recovered\" where=handler panic=\"index out of range\" stack="},
		{"aborted response", http.ErrAbortHandler, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log bytes.Buffer
			s := &Server{log: slog.New(slog.NewTextHandler(&log, nil)), metrics: metrics.New(nil, nil, "test")}
			server := httptest.NewServer(s.reportPanics(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(c.value) })))
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
	t.Parallel()
	f := startFronted(t, nil, standIn{}.start(t))
	f.ready(1)
	second := "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat)
	for name, c := range map[string]struct {
		request string
		close   bool
	}{
		"HTTP/1.0 with both": {"POST %s HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding: " +
			"chunked\r\nContent-Length: 0\r\n\r\n", true},
		"HTTP/1.0": {fmt.Sprintf("POST %%s HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%s",
			len(plainChat), plainChat), true},
		"HTTP/1.1 with both": {"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked,
			true},
		"HTTP/1.1 with Transfer-Encoding": {"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked, true},
		"HTTP/1.1 with Content-Length": {fmt.Sprintf("POST %%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(plainChat),
			plainChat), false},
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
func TestRequestBeforeFirstCheckIsServed(t *testing.T) {
	t.Parallel()
	sent := make(chan struct{})
	p := startFronted(t, nil, standIn{health: func(http.ResponseWriter, *http.Request) { <-sent }}.start(t))
	trace := &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { close(sent) }}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodPost, p.url+"/v1/chat/completions",
		strings.NewReader(plainChat))
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

// witness is a replica that keeps what it was sent.
type witness struct {
	mu   sync.Mutex
	seen []string // "METHOD URI body"
}

func (w *witness) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.mu.Lock()
	w.seen = append(w.seen, r.Method+" "+r.RequestURI+" "+string(body))
	w.mu.Unlock()
	to.Header().Set("Content-Type", "application/json")
	io.WriteString(to, wholeResponse)
}

// take returns what has come since it was last asked.
func (w *witness) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen
	w.seen = nil
	return seen
}

// withWitness is a proxy in front of a replica that keeps what it was sent.
func withWitness(t *testing.T, change func(*config.Config)) (*fronted, *witness) {
	w := &witness{}
	mux := standIn{}.handler().(*http.ServeMux)
	all := http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			mux.ServeHTTP(to, r)
			return
		}
		w.ServeHTTP(to, r)
	})
	server := httptest.NewServer(all)
	t.Cleanup(server.Close)
	f := startFronted(t, change, server.URL)
	f.ready(1)
	return f, w
}

// tell sends bytes as they are, and reads the status of each response up to the end
// of the connection.
func (f *fronted) tell(sent string) (codes []int) {
	f.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		f.t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Minute))
	written := make(chan struct{})
	go func() {
		defer close(written)
		io.WriteString(conn, sent) // the proxy may close before it has read all
	}()
	br := bufio.NewReader(conn)
	for {
		resp, err := http.ReadResponse(br, nil)
		if timeout, ok := err.(net.Error); ok && timeout.Timeout() {
			f.t.Errorf("the connection was kept, after %v", codes)
		}
		if err != nil {
			break
		}
		io.Copy(io.Discard, resp.Body)
		codes = append(codes, resp.StatusCode)
	}
	conn.Close()
	<-written
	return codes
}

func TestRequestSmuggling(t *testing.T) {
	t.Parallel()
	f, replica := withWitness(t, nil)
	const (
		chat   = `{"model":"m","messages":[]}` // 27 bytes, 1b
		start  = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
		hidden = "POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
		passed = "POST /v1/chat/completions " + chat
	)
	inChunks := "1b\r\n" + chat + "\r\n0\r\n\r\n"
	form := "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\nContent-Disposition: form-data; name=\"file\"; " +
		"filename=\"f\"\r\n\r\n" +
		hidden + "\r\n--b--\r\n"
	for _, c := range []struct {
		name, sent string
		codes      []int
		seen       []string // by the replica
	}{
		// What RFC 9112 gives one meaning passes with that.
		{"plain", start + "Content-Length: 27\r\n\r\n" + chat, []int{200}, []string{passed}},
		{"chunked", start + "Transfer-Encoding: chunked\r\n\r\n" + inChunks, []int{200}, []string{passed}},
		{"both, the length ends sooner", start + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + inChunks, []int{200},
			[]string{passed}},
		{"both, the length ends later", start + "Content-Length: 200\r\nTransfer-Encoding: chunked\r\n\r\n" + inChunks + hidden, []int{200},
			[]string{passed}},
		{"both, chunks end at once", start + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 5+len(hidden)) +
			hidden, []int{400}, nil},
		{"the same length twice", start + "Content-Length: 27\r\nContent-Length: 27\r\n\r\n" + chat, []int{200}, []string{passed}},
		{"folded coding", start + "Transfer-Encoding:\r\n chunked\r\n\r\n" + inChunks, []int{200}, []string{passed}},
		{"folded header", start + "X-Note: a\r\n Content-Length: 3\r\nContent-Length: 27\r\n\r\n" + chat, []int{200}, []string{passed}},
		{"bare LF", strings.ReplaceAll(start, "\r", "") + "Content-Length: 27\n\n" + chat, []int{200}, []string{passed}},
		{"chunk extension", start + "Transfer-Encoding: chunked\r\n\r\n1b;a=\"b\"\r\n" + chat + "\r\n0;c\r\n\r\n", []int{200}, []string{passed}},
		{"length named hop-by-hop", start + "Connection: Content-Length, Host, X-Request-Id\r\nContent-Length: 27\r\n\r\n" + chat, []int{200},
			[]string{passed}},
		{"hidden in a form", "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n" +
			fmt.Sprintf("Content-Length: %d\r\n\r\n", len(form)) + form, []int{200}, []string{"POST /v1/audio/transcriptions " + form}},
		{"pipelined", start + "Content-Length: 27\r\n\r\n" + chat + start + "Content-Length: 27\r\n\r\n" + chat, []int{200, 200},
			[]string{passed, passed}},
		{"pipelined to nowhere", start + "Content-Length: 27\r\n\r\n" + chat + hidden, []int{200, 404}, []string{passed}},

		// The rest is refused, and nothing behind it is read.
		{"two lengths", start + "Content-Length: 27\r\nContent-Length: 5\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"two lengths in one", start + "Content-Length: 27, 5\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"length with a sign", start + "Content-Length: +27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"negative length", start + "Content-Length: -1\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"hexadecimal length", start + "Content-Length: 0x1b\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"length beyond 64 bits", start + "Content-Length: 99999999999999999999\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"length with a space before the colon", start + "Content-Length : 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"coding with a space before the colon", start + "Content-Length: 5\r\nTransfer-Encoding : chunked\r\n\r\n" + inChunks + hidden,
			[]int{400}, nil},
		{"header that begins folded", start[:len(start)-9] + " Content-Length: 27\r\nHost: x\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"chunked twice", start + "Transfer-Encoding: chunked, chunked\r\n\r\n" + inChunks + hidden, []int{501}, nil},
		{"chunked in two headers", start + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + inChunks + hidden, []int{501},
			nil},
		{"identity", start + "Transfer-Encoding: identity\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{501}, nil},
		{"chunked, then identity", start + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + inChunks + hidden, []int{501},
			nil},
		{"gzip, chunked", start + "Transfer-Encoding: gzip, chunked\r\n\r\n" + inChunks + hidden, []int{501}, nil},
		{"unknown coding", start + "Transfer-Encoding: xchunked\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{501}, nil},
		{"coding with a vertical tab", start + "Transfer-Encoding: \vchunked\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"trailer with a length", start + "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n1b\r\n" + chat +
			"\r\n0\r\nContent-Length: 3\r\n\r\n", []int{400}, nil},
		{"NUL in a header", start + "X-Note: a\x00b\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"CR in a header", start + "X-Note: a\rContent-Length: 5\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"no name", start + ": a\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"two hosts", start + "Host: y\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"no host", "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"chunk of no size", start + "Transfer-Encoding: chunked\r\n\r\n\r\n" + chat + "\r\n0\r\n\r\n" + hidden, []int{400}, nil},
		{"chunk of a signed size", start + "Transfer-Encoding: chunked\r\n\r\n+1b\r\n" + chat + "\r\n0\r\n\r\n" + hidden, []int{400}, nil},
		{"chunk of a prefixed size", start + "Transfer-Encoding: chunked\r\n\r\n0x1b\r\n" + chat + "\r\n0\r\n\r\n" + hidden, []int{400}, nil},
		{"chunk beyond 64 bits", start + "Transfer-Encoding: chunked\r\n\r\n1000000000000001b\r\n" + chat + "\r\n0\r\n\r\n" + hidden, []int{400},
			nil},
		{"chunk longer than said", start + "Transfer-Encoding: chunked\r\n\r\n1a\r\n" + chat + "\r\n0\r\n\r\n" + hidden, []int{400}, nil},
		{"chunk that ends in LF", start + "Transfer-Encoding: chunked\r\n\r\n1b\n" + chat + "\n0\n\n" + hidden, []int{400}, nil},
		{"endless chunk extension", start + "Transfer-Encoding: chunked\r\n\r\n1b;" + strings.Repeat("x", 1<<20) + "\r\n" + chat +
			"\r\n0\r\n\r\n" + hidden, []int{400}, nil},
		{"tiny chunks with long extensions", start + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1;"+strings.Repeat("x", 2000)+
			"\r\n \r\n", 1000) + hidden, []int{400}, nil},
		{"HTTP/2 without asking", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + hidden, []int{404}, nil},
		{"HTTP/3.0", "POST /v1/chat/completions HTTP/3.0\r\nHost: x\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{505}, nil},
		{"no version", "POST /v1/chat/completions\r\nHost: x\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400}, nil},
		{"query with a space", "POST /v1/chat/completions?a b HTTP/1.1\r\nHost: x\r\nContent-Length: 27\r\n\r\n" + chat + hidden, []int{400},
			nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := f.tell(c.sent + "GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			closes := strings.Contains(c.sent, "Transfer-Encoding:") // after its response
			if !closes && (c.seen != nil || len(c.codes) > 1) {
				c.codes = append(c.codes, 200)
			}
			if !slices.Equal(got, c.codes) {
				t.Errorf("got statuses %v, want %v", got, c.codes)
			}
			if seen := replica.take(); !slices.Equal(seen, c.seen) {
				t.Errorf("the replica saw %q, want %q", seen, c.seen)
			}
		})
	}
}

func TestPipelinedRequests(t *testing.T) {
	t.Parallel()
	f, replica := withWitness(t, nil)
	const asked = 300
	one := "GET /livez HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 27\r\n\r\n" +
		`{"model":"m","messages":[]}`
	got := f.tell(strings.Repeat(one, asked) + "GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if len(got) != 2*asked+1 || slices.ContainsFunc(got, func(code int) bool { return code != http.StatusOK }) {
		t.Errorf("%d responses: %v", len(got), got)
	}
	if seen := replica.take(); len(seen) != asked {
		t.Errorf("the replica saw %d requests", len(seen))
	}
}

func TestHeaderLimits(t *testing.T) {
	t.Parallel()
	f, replica := withWitness(t, nil)
	const start = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
	for name, sent := range map[string]string{
		"many":           start + strings.Repeat("A: b\r\n", 200_000) + "\r\n",
		"many names":     start + manyHeaders(50_000) + "\r\n",
		"one of 4 MiB":   start + "X: " + strings.Repeat("x", 4<<20) + "\r\n\r\n",
		"without an end": start + "X: " + strings.Repeat("x", 4<<20),
		"long name":      start + strings.Repeat("x", 1<<20) + ": a\r\n\r\n",
		"long folds":     start + "X: a\r\n" + strings.Repeat(" b\r\n", 100_000) + "\r\n",
		"long URL":       "POST /v1/chat/completions?" + strings.Repeat("x", 4<<20) + " HTTP/1.1\r\nHost: x\r\n\r\n",
		"long method":    strings.Repeat("P", 4<<20) + " / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		if got := f.tell(sent); !slices.Equal(got, []int{http.StatusRequestHeaderFieldsTooLarge}) {
			t.Errorf("%s: served %v", name, got)
		}
	}
	if seen := replica.take(); len(seen) > 0 {
		t.Errorf("the replica was asked %d times", len(seen))
	}
}

func manyHeaders(n int) string {
	var b bytes.Buffer
	for i := range n {
		fmt.Fprintf(&b, "X-%d: y\r\n", i)
	}
	return b.String()
}

func TestSlowHeaders(t *testing.T) {
	t.Parallel()
	const slow = 1000
	f, _ := withWitness(t, func(c *config.Config) { c.Timeouts.ReadHeader = 3 * time.Second })
	var closed sync.WaitGroup
	for i := range slow {
		conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetReadDeadline(time.Now().Add(time.Minute))
		io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		closed.Go(func() {
			if i%2 == 0 { // half of them drip
				for {
					if _, err := io.WriteString(conn, "x"); err != nil {
						return
					}
					time.Sleep(500 * time.Millisecond)
				}
			}
			if _, err := io.ReadAll(conn); err != nil && strings.Contains(err.Error(), "timeout") {
				t.Errorf("connection %d was not closed", i)
			}
		})
	}
	for range 100 {
		if resp, text, err := f.chat(plainChat); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("meanwhile: %v, %v, %s", resp, err, text)
		}
	}
	closed.Wait()
}

func TestNoCORSOnAdminListener(t *testing.T) {
	t.Parallel()
	f := startFronted(t, func(c *config.Config) { c.CORS.Origins = []string{"*"} }, standIn{}.start(t))
	for url, want := range map[string]string{f.url + "/livez": "*", f.admin + "/metrics": ""} {
		for _, method := range []string{http.MethodGet, http.MethodOptions} {
			req, err := http.NewRequest(method, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Origin", "https://page.example")
			req.Header.Set("Access-Control-Request-Method", http.MethodGet)
			resp, err := f.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got := resp.Header.Get("Access-Control-Allow-Origin"); got != want {
				t.Errorf("%s %s: %q, want %q", method, url, got, want)
			}
		}
	}
}

// TestDescriptorReserveIsRefilled holds that operators get their descriptors back while their
// connections stay open: those that were released for them may have been taken by others.
func TestDescriptorReserveIsRefilled(t *testing.T) {
	t.Parallel()
	f := startFronted(t, nil, standIn{}.start(t))
	reserve := &f.server.listeners.reserve
	for reserve.release() {
	}
	resp, err := f.client.Get(f.admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	reserve.mu.Lock()
	defer reserve.mu.Unlock()
	if len(reserve.files) != maxReservedDescriptors {
		t.Errorf("%d descriptors are reserved, want %d", len(reserve.files), maxReservedDescriptors)
	}
}
