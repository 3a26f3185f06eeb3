package transport

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// answered is a case of the suite: what a replica answers, how it ends, and what
// has to come of it.
type answered struct {
	method string // GET when empty; POST sends a body
	answer string
	end    aftermath

	status int // 0: RoundTrip fails
	body   string
	length int64 // -1: not known before
	fails  error // reading the body does, with this; errAny: with any
	kept   bool  // the connection carries the next request
}

// aftermath is what the replica does when it has said its answer.
type aftermath int

const (
	stays  aftermath = iota // waits for the other side to close
	fin                     // closes; under TLS with its farewell
	cut                     // closes the socket; under TLS without a farewell
	reset                   // the same, the hard way
	halved                  // closes its own direction only
)

var errAny = errors.New("any error")

func (s *session) finish(how aftermath) {
	switch how {
	case fin:
		s.Close()
	case cut:
		s.tcp().Close()
	case reset:
		s.tcp().SetLinger(0)
		s.tcp().Close()
	case halved:
		s.Conn.(interface{ CloseWrite() error }).CloseWrite()
	}
}

// TestConformance plays every case over http and https, in one piece, in two and
// byte by byte, and then sends another request: that one has to get its own answer,
// on the same connection exactly when the first answer allows it.
func TestConformance(t *testing.T) {
	for name, f := range conformanceCases() {
		for way, parts := range f.cuts() {
			overBoth(t, name+", "+way, func(t *testing.T, ln net.Listener, scheme string, o Options) { f.play(t, ln, scheme, o, parts) })
		}
	}
}

// overBoth runs a test over http and over https.
func overBoth(t *testing.T, name string, test func(t *testing.T, ln net.Listener, scheme string, o Options)) {
	t.Run(name+"/http", func(t *testing.T) { test(t, listenLocal(t), "http", Options{}) })
	t.Run(name+"/https", func(t *testing.T) {
		ln, trusting := listenTLS(t)
		test(t, ln, "https", Options{TLS: trusting})
	})
}

// cuts are the writes by which the answer is sent.
func (f answered) cuts() map[string][]string {
	ways := map[string][]string{"in one piece": {f.answer}}
	if f.end == reset {
		return ways // it overtakes what has not left the socket
	}
	ways["split in two"] = []string{f.answer[:len(f.answer)/2], f.answer[len(f.answer)/2:]}
	if len(f.answer) < 500 {
		ways["byte at a time"] = strings.Split(f.answer, "")
	}
	return ways
}

func (f answered) play(t *testing.T, ln net.Listener, scheme string, o Options, parts []string) {
	over := make(chan struct{}) // the replica has sent and done all it will
	transport := replicaOn(t, ln, scheme, o, func(s *session) {
		for {
			if _, _, ok := s.request(); !ok {
				return
			}
			if s.n > 1 || len(s.asked) > 1 {
				s.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d", s.n))
				continue
			}
			s.say(parts...)
			s.finish(f.end)
			close(over)
		}
	})
	f.check(t, transport)
	<-over
	_, on := answer(t, transport, "")
	if want := map[bool]string{true: "1", false: "2"}[f.kept]; on != want {
		t.Errorf("the next request went over connection %s, want %s", on, want)
	}
	idleConns(t, transport, 1)
}

func (f answered) check(t *testing.T, transport *Transport) {
	t.Helper()
	var upload io.Reader
	if f.method == http.MethodPost {
		upload = strings.NewReader(strings.Repeat("x", 4*inlineUpTo))
	}
	req, _ := http.NewRequestWithContext(failsafe(t), f.method, "/", upload)
	resp, err := transport.RoundTrip(req)
	if f.status == 0 {
		if err == nil {
			t.Errorf("taken for an answer: %+v", resp)
			resp.Body.Close()
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != f.status || string(body) != f.body || resp.ContentLength != f.length {
		t.Errorf("status %d, body %.100q, length %d", resp.StatusCode, body, resp.ContentLength)
	}
	if f.fails == nil && err != nil || f.fails != nil && err == nil || f.fails != errAny && !errors.Is(err, f.fails) {
		t.Errorf("reading the body: %v, want %v", err, f.fails)
	}
	want := err
	if err == nil {
		want = io.EOF
	}
	if _, again := resp.Body.Read(make([]byte, 1)); again != want {
		t.Errorf("reading once more: %v, want %v", again, want)
	}
	resp.Body.Close()
	resp.Body.Close()
}

func listenLocal(t testing.TB) net.Listener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}
