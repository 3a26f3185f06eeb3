package proxy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// event is one server-sent event as an SDK takes it.
type event struct{ name, data string }

// parse reads a stream as the SDKs do: data lines of one event are joined, an
// empty line ends it, and what is cut off is dropped.
func parse(t *testing.T, stream string) (out []event) {
	t.Helper()
	var e event
	var data []string
	lines := bufio.NewScanner(strings.NewReader(stream))
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case lines.Text() == "":
			if data != nil {
				e.data = strings.Join(data, "\n")
				out = append(out, e)
			}
			e, data = event{}, nil
		case field == "data":
			data = append(data, value)
		case field == "event":
			e.name = value
		}
	}
	for _, e := range out {
		if e.data != "[DONE]" && !json.Valid([]byte(e.data)) {
			t.Errorf("an event is no JSON: %q", e.data)
		}
	}
	return out
}

func TestReplicaThatDiesInMidStreamEndsItWithAnErrorEvent(t *testing.T) {
	half := world[:60] // of a line
	cases := []struct {
		name   string
		script func(*session)
		events int // good ones before the error
	}{
		{"closed between chunks", once(sseHead, chunk(role), chunk(hello)), 2},
		{"closed in a chunk", once(sseHead, chunk(role), chunk(hello), "ff\r\n"), 2},
		{"closed in mid-line", once(sseHead, chunk(role), chunk(hello), chunk(half)), 2},
		{"closed in mid-line in the first packet", once(sseHead, chunk(role+hello+half)), 2},
		{"closed between an event's line and the empty one", once(sseHead, chunk(role+strings.TrimSuffix(hello, "\n"))), 2},
		{"closed before an event's line end", once(sseHead, chunk(role+hello+strings.TrimSuffix(world, "\n\n"))), 2},
		{"malformed chunk", once(sseHead, chunk(role), chunk(hello), "zz\r\n"), 2},
		{"closed before the last chunk", once(sseHead, chunk(role), chunk(hello), chunk(stop)), 3},
		{"stream to the connection's end without [DONE]", once(sseToEnd, role, hello), 2},
		{"stream to the connection's end, in mid-line", once(sseToEnd, role, hello, half), 2},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { breaksOff(t, c.script, func() {}, c.events) })
	}
}

func TestReplicaThatResetsInMidStreamEndsItWithAnErrorEvent(t *testing.T) {
	read := make(chan struct{}) // a reset discards what was not read yet
	breaksOff(t, func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		<-read
		s.reset()
	}, func() { close(read) }, 2)
}

// breaksOff checks that a client sees so many events, an error, and [DONE].
func breaksOff(t *testing.T, script func(*session), begun func(), events int) {
	other := &replica{script: always(streamed(goodStream))}
	suspected := make(chan string, 1)
	f := serve(t, func(o *Options) { o.Suspect = suspects(suspected) }, &replica{script: script}, other)
	resp, br := f.stream(askStream)
	start := role[:20]
	f.expect(br, start)
	begun()
	rest, err := io.ReadAll(br)
	if err != nil {
		t.Fatalf("the stream has no proper end: %v", err)
	}
	got := parse(t, start+string(rest))
	if resp.StatusCode != http.StatusOK || len(got) != events+2 {
		t.Fatalf("status %d, events %q, want %d, an error and [DONE]", resp.StatusCode, got, events)
	}
	var failed struct {
		Error struct{ Message, Type, Src string }
	}
	json.Unmarshal([]byte(got[events].data), &failed)
	if failed.Error.Src != "warmroute" || failed.Error.Message == "" || failed.Error.Type == "" || got[events+1].data != "[DONE]" {
		t.Errorf("ended with %q", got[events:])
	}
	if len(other.requests()) != 0 {
		t.Error("a committed request was sent to another backend")
	}
	if <-suspected != "r0" {
		t.Error("the backend was not suspected")
	}
	f.counts(`warmroute_requests_total{backend="r0",code="502",endpoint="/v1/chat/completions",model="m"} 1`)
}

func TestErrorEventHasTheFormatOfItsStream(t *testing.T) {
	cases := []struct{ path, begins, name, want string }{
		{"/v1/completions", `data: {"choices":[{"text":"Hi"}]}` + "\n\n", "", `"error":{"message":"the replica's answer broke off"`},
		{"/v1/responses", "event: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","delta":"Hi"}` + "\n\n", "error", `"type":"error"`},
		{"/v1/messages", "event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"text":"Hi"}}` + "\n\n", "error", `"error":{"type":"api_error","message":"the replica's answer broke off","src":"warmroute"}`},
	}
	for _, c := range cases {
		t.Run(c.path, func(t *testing.T) {
			f := serve(t, nil, &replica{script: once(sseHead, chunk(c.begins))})
			_, answer := f.post(c.path, `{"model":"m","stream":true,"prompt":"x","input":"x","messages":[]}`)
			got := parse(t, answer)
			if len(got) < 2 || got[1].name != c.name || !strings.Contains(got[1].data, c.want) {
				t.Fatalf("events %q", got)
			}
			if done := got[len(got)-1].data == "[DONE]"; done != (c.path == "/v1/completions") {
				t.Errorf("ends with %q", got[len(got)-1])
			}
		})
	}
}

func TestReplicasOwnErrorInMidStreamPassesAndCounts(t *testing.T) {
	suspected := make(chan string, 1)
	f := serve(t, func(o *Options) { o.Suspect = suspects(suspected) }, &replica{script: always(streamed(role, hello, dead, doneLine))})
	if _, got := f.post("/v1/chat/completions", askStream); got != role+hello+dead+doneLine {
		t.Errorf("got %q", got)
	}
	if <-suspected != "r0" {
		t.Error("the backend was not suspected")
	}
}

func TestReplicaThatDiesInALongBodyNeverYieldsAWholeOne(t *testing.T) {
	long := bytes.Repeat([]byte("0123456789abcdef"), 100_000) // 1.6 MB
	for name, says := range map[string]string{
		"length":  strings.TrimSuffix(answered("200 OK", string(long)), "f"),
		"chunked": "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(string(long)),
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, nil, &replica{script: once(says)})
			resp, got, err := f.try("/v1/chat/completions", askWhole)
			if err == nil {
				t.Errorf("status %d and %d bytes that look whole", resp.StatusCode, len(got))
			}
			f.counts(`warmroute_requests_total{backend="r0",code="502",endpoint="/v1/chat/completions",model="m"} 1`)
		})
	}
}

// Where the replica marks no end, none may be made up for the client.
func TestLongAnswerWithoutFramingStaysWithoutIt(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 100_000)
	f := serve(t, nil, &replica{script: once("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + long)})
	resp, got, err := f.try("/v1/chat/completions", askWhole)
	if err != nil || got != long {
		t.Fatalf("%d bytes of %d, %v", len(got), len(long), err)
	}
	if resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0 || !resp.Close {
		t.Errorf("length %d, encoding %v, close %v", resp.ContentLength, resp.TransferEncoding, resp.Close)
	}
}

func TestCutAnswerWithoutFramingGoesElsewhereOnEveryEndpoint(t *testing.T) {
	cut := "HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{\"data\":[{\"emb"
	f := serve(t, nil, &replica{script: once(cut)}, &replica{script: always(answered("200 OK", `{"data":[]}`, "content-type: application/json"))})
	for _, path := range []string{"/v1/embeddings", "/tokenize", "/v1/rerank"} {
		if resp, got := f.post(path, `{"model":"m","input":"x"}`); resp.StatusCode != http.StatusOK || got != `{"data":[]}` {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
}

func TestFirstByteTimeoutIsA504(t *testing.T) {
	for name, says := range map[string][]string{
		"no header":          nil,
		"half a status line": {"HTTP/1.1 2"},
		"half a header":      {sseHead[:80]},
		"an interim answer":  {"HTTP/1.1 103 Early Hints\r\n\r\n"},
		"header alone":       {sseHead},
		"comments":           {sseHead, chunk(": keep-alive\n\n")},
		"half an event":      {sseHead, chunk(role[:30])},
		"part of a body":     {"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"},
	} {
		t.Run(name, func(t *testing.T) {
			gone := make(chan struct{})
			other := &replica{script: always(streamed(goodStream))}
			f := serve(t, func(o *Options) { o.FirstByte = 50 * time.Millisecond }, &replica{script: func(s *session) {
				s.request()
				s.say(says...)
				s.closed()
				close(gone)
			}}, other)
			resp, got := f.post("/v1/chat/completions", askStream)
			if resp.StatusCode != http.StatusGatewayTimeout || !strings.Contains(got, "first_byte_timeout") {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			<-gone
			if len(other.requests()) != 0 {
				t.Error("another backend was asked")
			}
		})
	}
}

func TestFirstByteTimeoutLeavesAnswersThatComeWholeAlone(t *testing.T) {
	f := serve(t, func(o *Options) { o.FirstByte = time.Nanosecond }, &replica{script: always(answered("200 OK", whole))})
	if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
		t.Errorf("got %q", got)
	}
}

func TestSilenceInMidStreamEndsItWithAnErrorEvent(t *testing.T) {
	gone := make(chan struct{})
	f := serve(t, func(o *Options) { o.Idle = 50 * time.Millisecond }, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead + chunk(role+hello)) // at once: a pause would be a silence
		s.closed()
		close(gone)
	}})
	_, answer := f.post("/v1/chat/completions", askStream)
	if got := parse(t, answer); len(got) != 4 || !strings.Contains(got[2].data, "idle_timeout") || got[3].data != "[DONE]" {
		t.Errorf("events %q", got)
	}
	<-gone
	f.counts(`warmroute_requests_total{backend="r0",code="504",endpoint="/v1/chat/completions",model="m"} 1`)
}

func TestSilenceInMidAnswerGoesElsewhere(t *testing.T) {
	other := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, func(o *Options) { o.Idle = 50 * time.Millisecond }, &replica{script: func(s *session) {
		s.request()
		s.say(answered("200 OK", whole)[:200])
		s.closed()
	}}, other)
	if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
		t.Errorf("got %q", got)
	}
}
