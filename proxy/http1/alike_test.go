package http1_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"warmroute/proxy"
	"warmroute/proxy/http1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	headerTime  = time.Minute
	idleTime    = 2 * time.Minute
	mostHeader  = 1 << 10
	longEnough  = 20 * time.Second // for whatever a server does of itself, but for those
	aMoment     = 10 * time.Millisecond
	sinceMoment = 2 * 365 * 24 * time.Hour
)

// server is what http.Server and ours have in common.
type server interface {
	Serve(net.Listener) error
	Shutdown(context.Context) error
	Close() error
}

func ours(h http.Handler) *http1.Server {
	return &http1.Server{
		Handler: h, Context: context.Background(), Log: slog.New(slog.DiscardHandler),
		ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: mostHeader,
	}
}

// theirs is net/http's, set up as the program sets it up.
func theirs(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, DisableGeneralOptionsHandler: true, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: mostHeader,
	}
}

// step is what a client does; first what it has to say, then how long it waits.
type step struct {
	send string
	wait time.Duration
	fin  bool // it will send no more
}

// noting is a handler that tells what it has seen.
type noting func(w http.ResponseWriter, r *http.Request, note func(format string, args ...any))

// seen is what became of a connection.
type seen struct {
	answers []string
	notes   []string
	open    bool
}

func (s seen) String() string {
	var b strings.Builder
	for _, a := range s.answers {
		fmt.Fprintln(&b, a)
	}
	for _, n := range s.notes {
		fmt.Fprintln(&b, "note:", n)
	}
	if s.open {
		b.WriteString("open\n")
	} else {
		b.WriteString("closed\n")
	}
	return b.String()
}

// play lets a client talk to a server. It runs in a bubble.
func play(t *testing.T, serve func(http.Handler) server, h noting, steps []step) (got seen) {
	t.Helper()
	time.Sleep(sinceMoment) // the listener takes deadlines before 2001, where bubbles begin, for such as end at once
	d := newDoor()
	s := serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Saw"] = []string{r.Method} // so that the answer to HEAD is known
		h(w, r, func(format string, args ...any) { got.notes = append(got.notes, fmt.Sprintf(format, args...)) })
	}))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Serve(proxy.LazyDeadlines(d))
	}()
	client := d.dial()
	var received bytes.Buffer
	left := make(chan struct{})
	go func() {
		defer close(left)
		_, _ = io.Copy(&received, client)
	}()
	for _, st := range steps {
		_, _ = io.WriteString(client, st.send)
		if st.fin {
			_ = client.CloseWrite()
		}
		if st.wait > 0 {
			time.Sleep(st.wait)
		}
	}
	time.Sleep(longEnough)
	synctest.Wait()
	select {
	case <-left:
	default:
		got.open = true
	}
	notes := slices.Clone(got.notes) // without what comes of the test's end
	client.Close()
	_ = s.Close()
	<-left
	<-ended
	time.Sleep(longEnough) // whoever says farewell
	synctest.Wait()
	got.notes = notes
	got.answers = answersIn(received.Bytes())
	return got
}

// answersIn tells the answers apart, and makes those comparable that differ in the
// order of their headers, or in how a body was cut into chunks.
func answersIn(b []byte) (answers []string) {
	for len(b) > 0 {
		head, rest, whole := bytes.Cut(b, []byte("\r\n\r\n"))
		if !whole {
			return append(answers, fmt.Sprintf("broken off: %q", head))
		}
		lines := strings.Split(string(head), "\r\n")
		status, header := lines[0], slices.DeleteFunc(lines[1:], func(l string) bool { return strings.HasPrefix(l, "Date: ") })
		slices.Sort(header)
		var body []byte
		body, b = bodyOf(status, header, rest)
		answers = append(answers, fmt.Sprintf("%s [%s] %s", status, strings.Join(header, "; "), brief(body)))
	}
	return answers
}

func bodyOf(status string, header []string, rest []byte) (body, after []byte) {
	_, code, _ := strings.Cut(status, " ")
	if strings.HasPrefix(code, "1") || strings.HasPrefix(code, "204") || strings.HasPrefix(code, "304") || slices.Contains(header, "Saw: HEAD") {
		return nil, rest
	}
	if slices.Contains(header, "Transfer-Encoding: chunked") {
		br := bufio.NewReader(bytes.NewReader(rest))
		body, err := io.ReadAll(httputil.NewChunkedReader(br))
		if err != nil {
			return append(body, "...broken off"...), nil
		}
		after, _ := io.ReadAll(br)
		return body, bytes.TrimPrefix(after, []byte("\r\n"))
	}
	for _, l := range header {
		if said, is := strings.CutPrefix(l, "Content-Length: "); is {
			if n, err := strconv.Atoi(said); err == nil && n >= 0 && n <= len(rest) {
				return rest[:n], rest[n:]
			}
			return append(slices.Clone(rest), "...broken off"...), nil
		}
	}
	return rest, nil
}

func brief(b []byte) string {
	if len(b) > 200 {
		return fmt.Sprintf("%q and so on, %d bytes, %x", b[:20], len(b), sum(b))
	}
	return fmt.Sprintf("%q", b)
}

func sum(b []byte) (s uint32) {
	for _, c := range b {
		s = s*31 + uint32(c)
	}
	return s
}

// asked makes a refusal of net/http's what ours is: it says its length, has words
// for every fault, and has the reason in the body alone.
func asked(answer string) string {
	status, rest, _ := strings.Cut(answer, " [")
	if strings.HasSuffix(answer, `417 Expectation Failed [Connection: close; Content-Length: 0] ""`) {
		return `HTTP/1.1 417 Expectation Failed [Connection: close; Content-Length: 22; Content-Type: text/plain; charset=utf-8] "417 Expectation Failed"`
	}
	if !strings.HasPrefix(rest, "Connection: close; Content-Type: text/plain; charset=utf-8] ") {
		return answer
	}
	_, quoted, _ := strings.Cut(rest, "] ")
	body, err := strconv.Unquote(quoted)
	if err != nil {
		return answer
	}
	status, _, _ = strings.Cut(status, ": ")
	if body == "Unsupported transfer encoding" {
		body = "501 Not Implemented: " + body
	}
	return fmt.Sprintf("%s [Connection: close; Content-Length: %d; Content-Type: text/plain; charset=utf-8] %q", status, len(body), body)
}

// alike plays to both servers, and reports what differs, as ours has it and as net/http.
func alike(t *testing.T, h noting, steps []step) (our, their seen) {
	t.Helper()
	bubble := func(serve func(http.Handler) server) (got seen) {
		synctest.Test(t, func(t *testing.T) { got = play(t, serve, h, steps) })
		return got
	}
	our = bubble(func(h http.Handler) server { return ours(h) })
	their = bubble(func(h http.Handler) server { return theirs(h) })
	for i, a := range their.answers {
		their.answers[i] = asked(a)
	}
	return our, their
}
