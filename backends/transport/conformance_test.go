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

// conformanceCase is a case of the suite: what a replica sends, how it ends, and what
// has to come of it.
type conformanceCase struct {
	method   string // GET when empty; POST sends a body
	response string
	end      aftermath

	status int // 0: RoundTrip fails
	body   string
	length int64 // -1: not known before
	fails  error // reading the body does, with this; errAny: with any
	kept   bool  // the connection carries the next request
}

// aftermath is what the replica does when it has said its response.
type aftermath int

const (
	stays  aftermath = iota // waits for the other side to close
	fin                     // closes; under TLS with close_notify
	cut                     // closes the socket; under TLS without close_notify
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
// byte by byte, and then sends another request: that one has to get its own response,
// on the same connection exactly when the first response allows it.
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

// cuts are the writes by which the response is sent.
func (f conformanceCase) cuts() map[string][]string {
	ways := map[string][]string{"in one piece": {f.response}}
	if f.end == reset {
		return ways // it overtakes what has not left the socket
	}
	ways["split in two"] = []string{f.response[:len(f.response)/2], f.response[len(f.response)/2:]}
	if len(f.response) < 500 {
		ways["byte at a time"] = strings.Split(f.response, "")
	}
	return ways
}

func (f conformanceCase) play(t *testing.T, ln net.Listener, scheme string, o Options, parts []string) {
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
	_, on := sendBody(t, transport, "")
	if want := map[bool]string{true: "1", false: "2"}[f.kept]; on != want {
		t.Errorf("the next request went over connection %s, want %s", on, want)
	}
	idleConns(t, transport, 1)
}

func (f conformanceCase) check(t *testing.T, transport *Transport) {
	t.Helper()
	var upload io.Reader
	if f.method == http.MethodPost {
		upload = strings.NewReader(strings.Repeat("x", 4*maxInlineBytes))
	}
	req, _ := http.NewRequestWithContext(failsafe(t), f.method, "/", upload)
	resp, err := transport.RoundTrip(req)
	if f.status == 0 {
		if err == nil {
			t.Errorf("taken for a response: %+v", resp)
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

const (
	head    = "HTTP/1.1 200 OK\r\n"
	five    = head + "Content-Length: 5\r\n\r\n"
	chunked = head + "Transfer-Encoding: chunked\r\n\r\n"
	hello   = "5\r\nhello\r\n"
)

// conformanceCases are by name. A doubtful header is an error; a doubtful body
// fails where the doubt begins; and what comes after the end of a response makes the
// connection of no use, whenever it comes.
func conformanceCases() map[string]conformanceCase {
	all := map[string]conformanceCase{}
	for _, part := range []map[string]conformanceCase{wholeResponses(), endings(), brokenBodies(), brokenHeads()} {
		for name, f := range part {
			if f.method == "" {
				f.method = "GET"
			}
			all[name] = f
		}
	}
	return all
}

func wholeResponses() map[string]conformanceCase {
	long := strings.Repeat("v", 60<<10)
	return map[string]conformanceCase{
		"counted":        {response: five + "hello", status: 200, body: "hello", length: 5, kept: true},
		"counted, empty": {response: head + "Content-Length: 0\r\n\r\n", status: 200, kept: true},
		"chunked":        {response: chunked + hello + "6\r\n world\r\n0\r\n\r\n", status: 200, body: "hello world", length: -1, kept: true},
		"chunked, empty": {response: chunked + "0\r\n\r\n", status: 200, length: -1, kept: true},
		"extensions": {response: head + "Transfer-Encoding: Chunked\r\n\r\n005;a=\"b\" \r\nhello\r\n0;c\r\n\r\n", status: 200,
			body: "hello", length: -1, kept: true},
		"trailers": {response: chunked + hello + "0\r\nA: b\r\nContent-Length: 9\r\n\r\n", status: 200, body: "hello", length: -1,
			kept: true},
		"HEAD":              {method: "HEAD", response: five, status: 200, length: 5, kept: true},
		"HEAD, chunked":     {method: "HEAD", response: chunked, status: 200, length: -1, kept: true},
		"204":               {response: "HTTP/1.1 204 No Content\r\n\r\n", status: 204, kept: true},
		"204 with a length": {response: "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", status: 204, kept: true},
		"304 with a length": {response: "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", status: 304, kept: true},
		"100 and 103 before": {response: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + five + "hello",
			status: 200, body: "hello", length: 5, kept: true},
		"100 after an upload": {method: "POST", response: "HTTP/1.1 100 Continue\r\n\r\n" + five + "hello", status: 200, body: "hello", length: 5,
			kept: true},
		"no reason":       {response: "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", status: 200, body: "ok", length: 2, kept: true},
		"an empty reason": {response: "HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok", status: 200, body: "ok", length: 2, kept: true},
		"a 60 KB value": {response: head + "X-Long: " + long + "\r\nContent-Length: 2\r\n\r\nok", status: 200, body: "ok", length: 2,
			kept: true},
		"5,000 header lines": {response: head + strings.Repeat("X-Small: v\r\n", 5000) + "Content-Length: 2\r\n\r\nok", status: 200, body: "ok",
			length: 2, kept: true},
		"a redirect": {response: "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
			status: 307, kept: true},
		"after an upload": {method: "POST", response: five + "hello", status: 200, body: "hello", length: 5, kept: true},
		"HTTP/1.0, kept": {response: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok", status: 200, body: "ok",
			length: 2, kept: true},
		"an unknown status": {response: "HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n", status: 999, kept: true},
		"a body of 200 KB": {response: head + "Content-Length: 204800\r\n\r\n" + strings.Repeat("y", 200<<10), status: 200,
			body: strings.Repeat("y", 200<<10), length: 200 << 10, kept: true},
		"chunks of 1 and 9 K": {response: chunked + "1\r\nz\r\n2400\r\n" + strings.Repeat("y", 9<<10) + "\r\n0\r\n\r\n", status: 200,
			body: "z" + strings.Repeat("y", 9<<10), length: -1, kept: true},
	}
}

// endings are responses that are good, on connections that are not.
func endings() map[string]conformanceCase {
	return map[string]conformanceCase{
		"Connection: close": {response: head + "Content-Length: 2\r\nConnection: close\r\n\r\nok", end: fin, status: 200,
			body: "ok", length: 2},
		"close, in a list, in capitals": {response: head + "Content-Length: 2\r\nConnection: x, CLOSE\r\n\r\nok", status: 200,
			body: "ok", length: 2},
		"close, in a second field": {response: head + "Content-Length: 2\r\nConnection: keep-alive\r\nConnection: close\r\n\r\nok",
			status: 200, body: "ok", length: 2},
		"HTTP/1.0": {response: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", status: 200, body: "ok",
			length: 2},
		"to the end": {response: head + "\r\nhello", end: fin, status: 200, body: "hello", length: -1},
		"to the end, despite keep-alive": {response: head + "Connection: keep-alive\r\n\r\nhello", end: fin, status: 200, body: "hello",
			length: -1},
		"to the end, of its direction":           {response: head + "\r\nhello", end: halved, status: 200, body: "hello", length: -1},
		"to the end, without TLS's close_notify": {response: head + "\r\nhello", end: cut, status: 200, body: "hello", length: -1},
		"whole, then closed":                     {response: five + "hello", end: fin, status: 200, body: "hello", length: 5},
		"whole, then cut":                        {response: five + "hello", end: cut, status: 200, body: "hello", length: 5},
		"whole, then reset":                      {response: head + "Content-Length: 0\r\n\r\n", end: reset, status: 200},
		"whole, then half closed":                {response: chunked + hello + "0\r\n\r\n", end: halved, status: 200, body: "hello", length: -1},
		"counted, and more":                      {response: five + "hello, world", status: 200, body: "hello", length: 5},
		"chunked, and more":                      {response: chunked + hello + "0\r\n\r\nmore", status: 200, body: "hello", length: -1},
		"two responses":                          {response: five + "hello" + five + "other", status: 200, body: "hello", length: 5},
		"204 with a body":                        {response: "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello", status: 204},
		"HEAD with a body":                       {method: "HEAD", response: five + "hello", status: 200, length: 5},
		"an empty line too many":                 {response: five + "hello\r\n", status: 200, body: "hello", length: 5},
		"unsolicited 408": {response: five + "helloHTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n", end: fin,
			status: 200, body: "hello", length: 5},
	}
}

func brokenBodies() map[string]conformanceCase {
	breaks := func(response, body string, fails error) conformanceCase {
		return conformanceCase{response: response, end: fin, status: 200, body: body, length: -1, fails: fails}
	}
	short := conformanceCase{response: head + "Content-Length: 10\r\n\r\nhello", end: fin, status: 200, body: "hello", length: 10,
		fails: io.ErrUnexpectedEOF}
	cutShort, resetShort := short, short
	cutShort.end = cut
	resetShort.end, resetShort.fails = reset, errAny
	resetShort.response, resetShort.body = head+"Content-Length: 10\r\n\r\n", "" // a reset can overtake what was sent before
	return map[string]conformanceCase{
		"counted, short":                  short,
		"counted, cut short":              cutShort,
		"no last chunk":                   breaks(chunked+hello, "hello", io.ErrUnexpectedEOF),
		"the end in a chunk":              breaks(chunked+"9\r\nhello", "hello", io.ErrUnexpectedEOF),
		"the end in a size":               breaks(chunked+hello+"1", "hello", io.ErrUnexpectedEOF),
		"the end before the last line":    breaks(chunked+hello+"0\r\n", "hello", io.ErrUnexpectedEOF),
		"the end in a trailer":            breaks(chunked+hello+"0\r\nA: b", "hello", io.ErrUnexpectedEOF),
		"a size that is none":             breaks(chunked+"x\r\nhello\r\n", "", errChunkLine),
		"an empty size":                   breaks(chunked+"\r\nhello\r\n", "", errChunkLine),
		"a negative size":                 breaks(chunked+"-5\r\nhello\r\n", "", errChunkLine),
		"a size with a prefix":            breaks(chunked+"0x5\r\nhello\r\n", "", errChunkLine),
		"a space before an extension":     breaks(chunked+"5 ;a\r\nhello\r\n0\r\n\r\n", "", errChunkLine),
		"a size beyond any":               breaks(chunked+"fffffffffffffffff\r\nhello\r\n", "", errChunkLine),
		"a size beyond any, of 16 digits": breaks(chunked+"ffffffffffffffff\r\nhello\r\n", "", errChunkLine),
		"a chunk longer than it said":     breaks(chunked+"5\r\nhello!\r\n0\r\n\r\n", "hello", errChunkLine),
		"a bare LF after a size":          breaks(chunked+"5\nhello\r\n0\r\n\r\n", "", errLineEnd),
		"a bare LF after a chunk":         breaks(chunked+"5\r\nhello\n0\r\n\r\n", "hello", errLineEnd),
		"a bare CR in an extension":       breaks(chunked+"5;a\rb\r\nhello\r\n0\r\n\r\n", "", errLineEnd),
		"an extension without end":        breaks(chunked+"5;"+strings.Repeat("a", 4<<20), "", errLineTooLong),
		"trailers without end": breaks(chunked+"0\r\n"+strings.Repeat("A: "+strings.Repeat("b", 1000)+"\r\n", 4000), "",
			errHeaderTooLong),
		"a trailer that is none":              breaks(chunked+"0\r\nA b\r\n\r\n", "", errHeaderLine),
		"a trailer that folds":                breaks(chunked+"0\r\nA: b\r\n c\r\n\r\n", "", errHeaderLine),
		"another response instead of a chunk": breaks(chunked+hello+five+"hello", "hello", errChunkLine),
		"nothing of a body, reset":            resetShort,
	}
}

func brokenHeads() map[string]conformanceCase {
	all := map[string]conformanceCase{}
	for name, response := range map[string]string{
		"nothing HTTP":                "SSH-2.0-OpenSSH\r\n\r\n",
		"binary":                      "\x00\x01\x02\xff\xfe\r\n\r\n",
		"HTTP/2":                      "HTTP/2.0 200 OK\r\n\r\n",
		"an HTTP/2 preface":           "\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n\r\n",
		"an empty line first":         "\r\n" + five + "hello",
		"no status":                   "HTTP/1.1\r\n\r\n",
		"a short status":              "HTTP/1.1 20 OK\r\n\r\n",
		"a signed status":             "HTTP/1.1 +20 OK\r\n\r\n",
		"a status below 100":          "HTTP/1.1 099 OK\r\n\r\n",
		"a control in the reason":     "HTTP/1.1 200 O\x00K\r\n\r\n",
		"101":                         "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
		"two lengths":                 head + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
		"two lengths alike":           head + "Content-Length: 2\r\nContent-Length: 2\r\n\r\nok",
		"a list of lengths":           head + "Content-Length: 2, 2\r\n\r\nok",
		"a signed length":             head + "Content-Length: +2\r\n\r\nok",
		"a negative length":           head + "Content-Length: -2\r\n\r\nok",
		"an empty length":             head + "Content-Length:\r\n\r\nok",
		"a length in hexadecimal":     head + "Content-Length: 0x2\r\n\r\nok",
		"a length beyond any":         head + "Content-Length: 99999999999999999999\r\n\r\nok",
		"length and chunks":           head + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"chunks and length":           head + "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
		"two encodings":               head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"an encoding we don't know":   head + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		"an encoding of nothing":      head + "Transfer-Encoding: identity\r\n\r\nok",
		"chunks in HTTP/1.0":          "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"a folded line":               head + "A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
		"a folded first line":         head + " A: b\r\nContent-Length: 0\r\n\r\n",
		"a bare LF":                   head + "A: b\nContent-Length: 0\r\n\r\n",
		"a bare LF at the end":        head + "Content-Length: 0\r\n\n",
		"a bare CR":                   head + "A: b\rc\r\nContent-Length: 0\r\n\r\n",
		"a space before the colon":    head + "Content-Length : 0\r\n\r\n",
		"a line without a colon":      head + "Content-Length\r\n\r\n",
		"a line without a name":       head + ": 0\r\n\r\n",
		"a NUL":                       head + "A: \x00\r\nContent-Length: 0\r\n\r\n",
		"a header beyond the bound":   head + strings.Repeat("A: "+strings.Repeat("b", 1000)+"\r\n", 140) + "\r\n",
		"a line beyond the bound":     head + "A: " + strings.Repeat("b", 4<<20),
		"a status line without end":   "HTTP/1.1 200 " + strings.Repeat("O", 4<<20),
		"interim responses on and on": strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 10_000),
		"only an interim response":    "HTTP/1.1 103 Early Hints\r\n\r\n",
		"the end inside the header":   head + "Content-Le",
		"the end in the first word":   "HT",
	} {
		all[name] = conformanceCase{response: response, end: fin}
		all[name+", after an upload"] = conformanceCase{method: "POST", response: response, end: cut}
	}
	all["the end instead of a header"] = conformanceCase{end: fin}
	all["a reset instead of a header"] = conformanceCase{end: reset}
	return all
}
