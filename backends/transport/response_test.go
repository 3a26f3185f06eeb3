package transport

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestAnswers(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\n"
	long := strings.Repeat("v", 60<<10)
	for name, f := range map[string]struct {
		method, answer string
		status         int
		body           string
		length         int64
		kept           bool // the connection is
	}{
		"counted":              {"GET", head + "Content-Length: 5\r\n\r\nhello", 200, "hello", 5, true},
		"counted, empty":       {"GET", head + "Content-Length: 0\r\n\r\n", 200, "", 0, true},
		"counted, and more":    {"GET", head + "Content-Length: 5\r\n\r\nhello, world", 200, "hello", 5, false},
		"chunked":              {"GET", head + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", 200, "hello world", -1, true},
		"chunked, and more":    {"GET", head + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nmore", 200, "hello", -1, false},
		"extensions":           {"GET", head + "Transfer-Encoding: Chunked\r\n\r\n005 ;a=\"b\"\r\nhello\r\n0;c\r\n\r\n", 200, "hello", -1, true},
		"trailers":             {"GET", head + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\nC: d\r\n\r\n", 200, "hello", -1, true},
		"to the end":           {"GET", head + "\r\nhello", 200, "hello", -1, false},
		"HEAD":                 {"HEAD", head + "Content-Length: 5\r\n\r\n", 200, "", 5, true},
		"HEAD, chunked":        {"HEAD", head + "Transfer-Encoding: chunked\r\n\r\n", 200, "", -1, true},
		"204":                  {"GET", "HTTP/1.1 204 No Content\r\n\r\n", 204, "", 0, true},
		"304 with a length":    {"GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, "", 0, true},
		"100 and 103 before":   {"GET", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + head + "Content-Length: 2\r\n\r\nok", 200, "ok", 2, true},
		"no reason":            {"GET", "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, "ok", 2, true},
		"an empty reason":      {"GET", "HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok", 200, "ok", 2, true},
		"a 60 KB value":        {"GET", head + "X-Long: " + long + "\r\nContent-Length: 2\r\n\r\nok", 200, "ok", 2, true},
		"60 KB of small lines": {"GET", head + strings.Repeat("X-Small: v\r\n", 5000) + "Content-Length: 2\r\n\r\nok", 200, "ok", 2, true},
	} {
		ways := map[string][]string{
			"in one piece":   {f.answer},
			"split in two":   {f.answer[:len(f.answer)/2], f.answer[len(f.answer)/2:]},
			"byte at a time": strings.Split(f.answer, ""),
		}
		if len(f.answer) > 4<<10 {
			delete(ways, "byte at a time")
		}
		for way, parts := range ways {
			t.Run(name+", "+way, func(t *testing.T) {
				transport := replica(t, Options{}, func(s *session) {
					if _, _, more := s.request(); more {
						s.say(parts...)
					}
					if name != "to the end" {
						s.closed()
					}
				})
				req, _ := http.NewRequestWithContext(failsafe(t), f.method, "/", nil)
				resp, err := transport.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				resp.Body.Close()
				if resp.StatusCode != f.status || string(body) != f.body || resp.ContentLength != f.length || err != nil {
					t.Errorf("status %d, body %q, length %d, error %v", resp.StatusCode, body, resp.ContentLength, err)
				}
				if way != "in one piece" && strings.HasSuffix(name, "and more") {
					return // the rest may come later: the next request finds it
				}
				want := 0
				if f.kept {
					want = 1
				}
				idleConns(t, transport, want)
			})
		}
	}
}

func TestAnswerHeader(t *testing.T) {
	transport := replica(t, Options{}, always("HTTP/1.1 201 Made It\r\ncontent-type:text/plain\r\nX-A: 1\r\nx-a:\t2 \r\nX-Empty:\r\n"+
		"X-Utf8: ü\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"))
	resp, _ := answer(t, transport, "hello")
	want := http.Header{"Content-Type": {"text/plain"}, "X-A": {"1", "2"}, "X-Empty": {""}, "X-Utf8": {"ü"}}
	if len(resp.Header) != len(want) {
		t.Errorf("header %q", resp.Header)
	}
	for name, values := range want {
		if got := resp.Header[name]; strings.Join(got, "|") != strings.Join(values, "|") {
			t.Errorf("%s: %q, want %q", name, got, values)
		}
	}
	if resp.Status != "201 Made It" || resp.Proto != "HTTP/1.1" || !resp.ProtoAtLeast(1, 1) ||
		len(resp.TransferEncoding) != 1 || resp.Request == nil {
		t.Errorf("%+v", resp)
	}
}

func TestRefusesAnswer(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\n"
	for name, answer := range map[string]string{
		"nothing HTTP":               "SSH-2.0-OpenSSH\r\n\r\n",
		"HTTP/2":                     "HTTP/2.0 200 OK\r\n\r\n",
		"no status":                  "HTTP/1.1\r\n\r\n",
		"a short status":             "HTTP/1.1 20 OK\r\n\r\n",
		"a signed status":            "HTTP/1.1 +20 OK\r\n\r\n",
		"a status below 100":         "HTTP/1.1 099 OK\r\n\r\n",
		"a control in the reason":    "HTTP/1.1 200 O\x00K\r\n\r\n",
		"101":                        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
		"two lengths":                head + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
		"two lengths alike":          head + "Content-Length: 2\r\nContent-Length: 2\r\n\r\nok",
		"a list of lengths":          head + "Content-Length: 2, 2\r\n\r\nok",
		"a signed length":            head + "Content-Length: +2\r\n\r\nok",
		"a negative length":          head + "Content-Length: -2\r\n\r\nok",
		"an empty length":            head + "Content-Length:\r\n\r\nok",
		"a length beyond any":        head + "Content-Length: 99999999999999999999\r\n\r\nok",
		"length and chunks":          head + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"two encodings":              head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"an encoding we don't know":  head + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		"chunks in HTTP/1.0":         "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"a folded line":              head + "A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
		"a bare LF":                  head + "A: b\nContent-Length: 0\r\n\r\n",
		"a bare LF at the end":       head + "Content-Length: 0\r\n\n",
		"a bare CR":                  head + "A: b\rc\r\nContent-Length: 0\r\n\r\n",
		"a space before the colon":   head + "Content-Length : 0\r\n\r\n",
		"a line without a colon":     head + "Content-Length\r\n\r\n",
		"a NUL":                      head + "A: \x00\r\nContent-Length: 0\r\n\r\n",
		"a header beyond the bound":  head + strings.Repeat("A: "+strings.Repeat("b", 1000)+"\r\n", 140) + "\r\n",
		"a line beyond the bound":    head + "A: " + strings.Repeat("b", 140<<10),
		"interim answers on and on":  strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 10_000),
		"the end inside the header":  head + "Content-Le",
		"the end instead of headers": "",
	} {
		t.Run(name, func(t *testing.T) {
			transport := replica(t, Options{}, once(answer))
			if resp, err := send(failsafe(t), transport, "hello"); err == nil {
				t.Errorf("%+v", resp)
			}
			idleConns(t, transport, 0)
		})
	}
}
