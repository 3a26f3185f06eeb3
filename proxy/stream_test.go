package proxy

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/proxy/api"
	"warmroute/proxy/relay"
	"warmroute/router"
	"warmroute/router/responseindex"
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

func TestReplicaCloseMidStreamSendsErrorEvent(t *testing.T) {
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

func TestReplicaResetMidStreamSendsErrorEvent(t *testing.T) {
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
	f := serve(t, func(o *Options) { o.RecheckHealth = suspects(suspected) }, &replica{script: script}, other)
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
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="502",endpoint="/v1/chat/completions",model="m"} 1`)
}

// TestStreamOfRemovedBackend expects that a replica is not blamed for a stream that its removal has ended.
func TestStreamOfRemovedBackend(t *testing.T) {
	var log lockedBuffer
	f := serve(t, func(o *Options) {
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
		o.RecheckHealth = func(*backends.Backend) { t.Error("the backend is suspected") }
	}, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.closed()
	}})
	resp, err := http.Post("http://"+f.addr+"/v1/chat/completions", "application/json", strings.NewReader(askStream))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	begun := make([]byte, len(role+hello))
	if _, err := io.ReadFull(resp.Body, begun); err != nil {
		t.Fatal(err)
	}
	f.backends[0].Options().Transport.(*transport.Transport).Close()
	if rest, err := io.ReadAll(resp.Body); err != nil ||
		!strings.Contains(string(rest), "the replica was removed before the response was complete") {
		t.Errorf("got %q, %v", rest, err)
	}
	f.awaitIdle()
	if text := log.String(); !strings.Contains(text, "response ended, backend removed") || strings.Contains(text, "upstream") {
		t.Errorf("the log says\n%s", text)
	}
}

func TestErrorEventFormat(t *testing.T) {
	cases := []struct{ path, begins, name, want string }{
		{"/v1/completions", `data: {"choices":[{"text":"Hi"}]}` + "\n\n", "", `"error":{"message":"the replica closed the response early"`},
		{"/v1/responses", "event: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","delta":"Hi"}` + "\n\n", "error",
			`"code":"replica_failed","error":{"message":"the replica closed the response early"`},
		{"/v1/messages", "event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"text":"Hi"}}` + "\n\n", "error",
			`"error":{"type":"api_error","message":"the replica closed the response early","src":"warmroute"}`},
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

func TestReplicaErrorEventMidStreamRelayed(t *testing.T) {
	suspected := make(chan string, 1)
	f := serve(t, func(o *Options) { o.RecheckHealth = suspects(suspected) }, &replica{script: always(streamed(role, hello, dead, doneLine))})
	if _, got := f.post("/v1/chat/completions", askStream); got != role+hello+dead+doneLine {
		t.Errorf("got %q", got)
	}
	if <-suspected != "r0" {
		t.Error("the backend was not suspected")
	}
}

func TestLongResponseTruncated(t *testing.T) {
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
			f.awaitMetric(`warmroute_requests_total{backend="r0",code="502",endpoint="/v1/chat/completions",model="m"} 1`)
		})
	}
}

// Where the replica marks no end, none may be made up for the client.
func TestLongResponseWithoutFraming(t *testing.T) {
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

func TestRetryAfterTruncatedUnframedResponse(t *testing.T) {
	cut := "HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{\"data\":[{\"emb"
	f := serve(t, nil, &replica{script: once(cut)},
		&replica{script: always(answered("200 OK", `{"data":[]}`, "content-type: application/json"))})
	for _, path := range []string{"/v1/embeddings", "/tokenize", "/v1/rerank"} {
		if resp, got := f.post(path, `{"model":"m","input":"x"}`); resp.StatusCode != http.StatusOK || got != `{"data":[]}` {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
}

func TestFirstByteTimeoutStatus504(t *testing.T) {
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
			t.Parallel()
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

func TestFirstByteTimeoutSparesBufferedResponses(t *testing.T) {
	f := serve(t, func(o *Options) { o.FirstByte = time.Nanosecond }, &replica{script: always(answered("200 OK", whole))})
	if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
		t.Errorf("got %q", got)
	}
}

func TestIdleTimeoutMidStreamSendsErrorEvent(t *testing.T) {
	t.Parallel()
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
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="504",endpoint="/v1/chat/completions",model="m"} 1`)
}

func TestRetryAfterIdleTimeoutInBufferedResponse(t *testing.T) {
	t.Parallel()
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

// golden is the body of an answer recorded from vLLM 0.32.
func golden(t *testing.T, name string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("../lab/sim/testdata/vllm-0.32", name+".http"))
	if err != nil {
		t.Fatal(err)
	}
	_, answer, _ := bytes.Cut(raw, []byte("\n=== response ===\n"))
	_, body, ok := bytes.Cut(answer, []byte("\r\n\r\n"))
	if !ok {
		t.Fatalf("no answer in %s", name)
	}
	return string(body)
}

// apis are the endpoints whose answers say how they ended.
var apis = []struct{ name, path, ask string }{
	{"chat", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hi"}]`},
	{"completions", "/v1/completions", `{"model":"m","prompt":"Hi"`},
	{"responses", "/v1/responses", `{"model":"m","input":"Hi"`},
	{"messages", "/v1/messages", `{"model":"m","max_tokens":100,"messages":[{"role":"user","content":"Hi"}]`},
}

// streamOf sends body to an endpoint and returns the stream that comes back.
func (f *fleet) streamOf(path, body string, headers ...string) *bufio.Reader {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodPost, f.url+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { resp.Body.Close() })
	return bufio.NewReader(resp.Body)
}

// sayEach says each part in a chunk of its own, and ends the body.
func (s *session) sayEach(parts []string) {
	for _, p := range parts {
		if p != "" {
			s.say(chunk(p))
		}
	}
	s.say(lastChunk)
}

// cancelled makes of an aborted response what vLLM makes of one of gpt-oss. That of
// any other model says that it is completed.
func cancelled(body string) string {
	return strings.Replace(body, `"status":"completed","text"`, `"status":"cancelled","text"`, 1)
}

// abortedStream is a recorded stream that was aborted after content, with three of
// its pieces of content left.
func abortedStream(t *testing.T, api string) (events []string) {
	t.Helper()
	pieces := 0
	for _, e := range strings.SplitAfter(golden(t, "abort-"+api+"-stream"), "\n\n") {
		if isContent(e) {
			if pieces++; pieces > 3 {
				continue
			}
		}
		if e != "" {
			events = append(events, cancelled(e))
		}
	}
	return events
}

func TestRetryAfterAbortedResponse(t *testing.T) {
	type answer struct {
		name   string
		stream bool
		says   string
	}
	for _, api := range apis {
		stream, whole := golden(t, api.name+"-stream"), golden(t, api.name)
		early := golden(t, "abort-early-"+api.name+"-stream")
		answers := []answer{
			{"stream, before its first token", true, streamed(early)},
			{"stream, event by event", true, streamed(strings.SplitAfter(early, "\n\n")...)},
			{"whole, before its first token", false, answered("200 OK", golden(t, "abort-early-"+api.name))},
			{"whole", false, answered("200 OK", cancelled(golden(t, "abort-"+api.name)))},
		}
		switch api.name {
		case "chat", "completions":
			usage := strings.SplitAfter(early, "\n\n")
			answers = append(answers, answer{"stream without usage, before its first token", true,
				streamed(append(usage[:len(usage)-3], doneLine)...)})
			fallthrough
		case "messages": // a response's end alone is more than is read at once
			answers = append(answers, answer{"stream, in one packet with its content", true, streamed(strings.Join(abortedStream(t, api.name), ""))})
		}
		for _, c := range answers {
			t.Run(api.name+", "+c.name, func(t *testing.T) {
				t.Parallel()
				ask, want, good := api.ask+"}", whole, answered("200 OK", whole)
				if c.stream {
					ask, want, good = api.ask+`,"stream":true}`, stream, streamed(stream)
				}
				var f *fleet
				f = serve(t, downAtCheck(&f), &replica{script: always(c.says)}, &replica{script: always(good)})
				resp, answer := f.post(api.path, ask)
				if resp.StatusCode != http.StatusOK || answer != want || resp.Header.Get("X-Warmroute-Backend") != "r1" {
					t.Errorf("got %d from %q: %q, want the second replica's %q", resp.StatusCode, resp.Header.Get("X-Warmroute-Backend"), answer, want)
				}
				f.awaitMetric(`warmroute_retries_total{reason="aborted"} 1`)
				f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r0"} 1`)
				f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r1"} 0`)
			})
		}
	}
}

func TestAbortAfterContentSendsErrorEvent(t *testing.T) {
	for _, api := range apis {
		events := abortedStream(t, api.name)
		// What follows is not passed on: the abort itself, which no SDK takes for an
		// error, or the event that would end the stream well.
		last := map[string]string{"chat": `"finish_reason":"abort"`, "completions": `"finish_reason":"abort"`,
			"responses": "event: response.completed", "messages": "event: message_stop"}[api.name]
		n := slices.IndexFunc(events, func(e string) bool { return strings.Contains(e, last) })
		all, passed := strings.Join(events, ""), strings.Join(events[:n], "")
		head := strings.Join(events[:slices.IndexFunc(events, isContent)+1], "")
		for name, send := range map[string]func(*session, string){
			"in one packet":  func(s *session, rest string) { s.say(chunk(rest), lastChunk) },
			"event by event": func(s *session, rest string) { s.sayEach(strings.SplitAfter(rest, "\n\n")) },
			"line by line":   func(s *session, rest string) { s.sayEach(strings.SplitAfter(rest, "\n")) },
			"broken off":     func(s *session, rest string) { s.say(chunk(rest)) },
		} {
			t.Run(api.name+", "+name, func(t *testing.T) {
				t.Parallel()
				relayed, suspected := make(chan struct{}), make(chan string, 10)
				other := &replica{script: always(streamed(golden(t, api.name+"-stream")))}
				var f *fleet
				f = serve(t, func(o *Options) {
					downAtCheck(&f)(o)
					check := o.RecheckHealth
					o.RecheckHealth = func(b *backends.Backend) { check(b); suspected <- b.Name }
				}, &replica{script: func(s *session) {
					s.request()
					s.say(sseHead, chunk(head))
					<-relayed
					send(s, all[len(head):])
				}}, other)
				br := f.streamOf(api.path, api.ask+`,"stream":true}`, "X-Request-Id", "mine")
				f.expect(br, head)
				close(relayed)
				f.expect(br, passed[len(head):])
				rest, err := io.ReadAll(br)
				if err != nil {
					t.Fatalf("the stream has no proper end: %v", err)
				}
				endsWithError(t, api.name, string(rest), "replica_aborted")
				if len(other.requests()) != 0 {
					t.Error("a committed request was sent to another backend")
				}
				if <-suspected != "r0" {
					t.Error("the backend was not suspected")
				}
				f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r0"} 1`)
				f.awaitMetric(`warmroute_requests_total{backend="r0",code="502",endpoint="` + api.path + `",model="m"} 1`)
				f.awaitIdle()
				if logged := f.log.String(); strings.Count(logged, "aborted the request") != 1 || !strings.Contains(logged, "backend=r0") ||
					!strings.Contains(logged, "request_id=mine") {
					t.Errorf("logged:\n%s", logged)
				}
			})
		}
	}
}

// downAtCheck makes the health check of the first backend find it down.
func downAtCheck(f **fleet) func(*Options) {
	return func(o *Options) {
		o.RecheckHealth = func(b *backends.Backend) {
			if b == (*f).backends[0] {
				b.SetState(backends.Down)
			}
		}
	}
}

// A response that ends without a reason, as one by a repetition on /v1/messages, is relayed as sent while its replica passes its checks.
func TestUnexplainedEndRelayed(t *testing.T) {
	t.Parallel()
	begin := messagesBegin(`{"input_tokens":4,"output_tokens":0}`)
	message := `{"id":"c","type":"message","role":"assistant","content":[{"type":"text","text":"no no no no"}],"model":"m",` +
		`"stop_reason":null,"usage":{"input_tokens":4,"output_tokens":4}}`
	noToken := `{"id":"c","type":"message","role":"assistant","content":[],"model":"m","stop_reason":null,"usage":{"input_tokens":4,` +
		`"output_tokens":0}}`
	stream := begin + messagesContent + messagesEnd("null", `{"output_tokens":4}`)
	responses := cancelled(golden(t, "abort-responses"))
	responseStream := strings.Join(abortedStream(t, "responses"), "")
	for name, c := range map[string]struct {
		path, body, says, want string
		down                   bool
	}{
		"message": {"/v1/messages", `{"model":"m","messages":[]}`, answered("200 OK", message), message, false},
		"stream":  {"/v1/messages", `{"model":"m","messages":[],"stream":true}`, streamed(stream), stream, false},
		"stream, by event": {"/v1/messages", `{"model":"m","messages":[],"stream":true}`, streamed(strings.SplitAfter(stream, "\n\n")...),
			stream, false},
		"stream, no end": {"/v1/messages", `{"model":"m","messages":[],"stream":true}`, streamed(strings.TrimSuffix(stream, "\n\n")),
			strings.TrimSuffix(stream, "\n\n"), false},
		"response":        {"/v1/responses", `{"model":"m","input":"x"}`, answered("200 OK", responses), responses, false},
		"response stream": {"/v1/responses", `{"model":"m","input":"x","stream":true}`, streamed(responseStream), responseStream, false},
		"message, down":   {"/v1/messages", `{"model":"m","messages":[]}`, answered("200 OK", message), "second", true},
		"no token":        {"/v1/messages", `{"model":"m","messages":[]}`, answered("200 OK", noToken), "second", false},
		"no token in stream": {"/v1/messages", `{"model":"m","messages":[],"stream":true}`,
			streamed(begin + messagesEnd("null", `{"output_tokens":0}`)), "second", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var f *fleet
			change := func(*Options) {}
			if c.down {
				change = downAtCheck(&f)
			}
			f = serve(t, change, &replica{script: always(c.says)}, &replica{script: always(answered("200 OK", "second"))})
			if _, got := f.post(c.path, c.body); got != c.want {
				t.Errorf("got %.1000q, want %.1000q", got, c.want)
			}
			if c.want != "second" {
				f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r0"} 0`)
			}
		})
	}
}

func isContent(event string) bool {
	for _, name := range []string{"event: content_block_delta", "event: response.output_text.delta"} {
		if strings.HasPrefix(event, name) {
			return true
		}
	}
	return strings.Contains(event, `"finish_reason":null`) && !strings.Contains(event, `"role"`)
}

// endsWithError checks that what is left of a stream is the API's error event.
func endsWithError(t *testing.T, api, rest, code string) {
	t.Helper()
	got := parse(t, rest)
	want := 1
	if api == "chat" || api == "completions" {
		want = 2
		if len(got) == 2 && got[1].data != "[DONE]" {
			t.Errorf("ends with %q", got[1])
		}
	}
	if len(got) != want {
		t.Fatalf("ends with %q, want an error event", got)
	}
	e := got[0]
	switch api {
	case "messages":
		if e.name != "error" || !strings.HasPrefix(e.data, `{"type":"error","error":{`) {
			t.Errorf("ends with %q", e)
		}
		return // Anthropic's errors have no code
	case "responses":
		if e.name != "error" || !strings.Contains(e.data, `"type":"error"`) {
			t.Errorf("ends with %q", e)
		}
	default:
		if e.name != "" || !strings.HasPrefix(e.data, `{"error":{`) {
			t.Errorf("ends with %q", e)
		}
	}
	if !strings.Contains(e.data, `"code":"`+code+`"`) {
		t.Errorf("ends with %q, want code %s", e, code)
	}
}

// A response that is longer than what is read at once has been passed on when its
// status comes, which stands at its end.
func TestLongCancelledResponseSendsErrorEvent(t *testing.T) {
	for _, size := range []int{2 * relay.ChunkBytes, 2 * relay.MaxLineBytes} {
		events := abortedStream(t, "responses")
		n := len(events) - 1
		events[n] = strings.Replace(events[n], `"text":"`, `"text":"`+strings.Repeat("x", size), 1)
		var f *fleet
		f = serve(t, downAtCheck(&f), &replica{script: always(streamed(events...))})
		_, answer := f.post("/v1/responses", apis[2].ask+`,"stream":true}`)
		all := strings.Join(events, "")
		rest, ok := strings.CutPrefix(answer, all)
		if !ok {
			t.Fatalf("got %.200q", answer)
		}
		endsWithError(t, "responses", rest, "replica_aborted")
		f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r0"} 1`)
	}
}

// The engine's account of an aborted answer is charged, though it is not passed on.
func TestAbortedStreamChargesKey(t *testing.T) {
	for _, api := range apis {
		events := abortedStream(t, api.name)
		relayed := make(chan struct{})
		f := serve(t, withKeys(keyOf("a", nil)), &replica{script: func(s *session) {
			s.request()
			n := slices.IndexFunc(events, isContent) + 1
			s.say(sseHead, chunk(strings.Join(events[:n], "")))
			<-relayed
			s.sayEach(events[n:])
		}})
		br := f.streamOf(api.path, api.ask+`,"stream":true}`, bearer("a")...)
		f.expect(br, events[0])
		close(relayed)
		io.Copy(io.Discard, br)
		usage := golden(t, "abort-"+api.name+"-stream")
		usage = usage[strings.LastIndex(usage, `"usage":`)+len(`"usage":`):]
		var u struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Input      int `json:"input_tokens"`
			Output     int `json:"output_tokens"`
			Read       int `json:"cache_read_input_tokens"`
			Created    int `json:"cache_creation_input_tokens"`
		}
		if err := json.NewDecoder(strings.NewReader(usage)).Decode(&u); err != nil {
			t.Fatal(err)
		}
		f.awaitMetric(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key="a"} %d`, u.Prompt+u.Input+u.Read+u.Created))
		f.awaitMetric(fmt.Sprintf(`warmroute_key_output_tokens_total{key="a"} %d`, u.Completion+u.Output))
	}
}

// That the word stands in what was said, or in an event's other members, is no abort.
func TestQuotedAbortIgnored(t *testing.T) {
	for path, stream := range map[string]string{
		"/v1/chat/completions": role + hello + strings.Replace(world, `"content":" world"`, `"content":"abort","refusal":"abort"`, 1) + stop +
			doneLine,
		"/v1/messages": messagesBegin(`{"input_tokens":4,"output_tokens":0}`) + messagesContent + messagesEnd(`"end_turn"`,
			`{"output_tokens":4}`),
	} {
		f := serve(t, nil, &replica{script: always(streamed(stream))})
		if _, got := f.post(path, `{"model":"m","stream":true,"messages":[]}`); got != stream {
			t.Errorf("%s: got %q", path, got)
		}
		f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r0"} 0`)
	}
}

// An answer that is empty because the model ended its turn at once is an answer.
func TestEmptyResponseIsNotAborted(t *testing.T) {
	empty := messagesBegin(`{"input_tokens":4,"output_tokens":0}`)
	_, end, _ := strings.Cut(messagesEnd(`"end_turn"`, `{"input_tokens":4,"output_tokens":1}`), "\n\n")
	empty += end
	early := golden(t, "abort-early-responses-stream")
	response := strings.Replace(early, `"output_tokens":0`, `"output_tokens":1`, 1)
	for _, c := range []struct{ path, says, want string }{
		{"/v1/messages", streamed(empty), empty},
		{"/v1/responses", streamed(response), response},
		{"/v1/chat/completions", streamed(role, stop, doneLine), role + stop + doneLine},
	} {
		f := serve(t, nil, &replica{script: always(c.says)})
		if _, got := f.post(c.path, `{"model":"m","stream":true,"input":"x","messages":[]}`); got != c.want {
			t.Errorf("%s: got %q", c.path, got)
		}
		f.awaitMetric(`warmroute_backend_aborted_responses_total{backend="r0"} 0`)
	}
}

func TestStreamTruncatedByConnectionClose(t *testing.T) {
	t.Parallel()
	for _, api := range apis {
		whole := golden(t, api.name+"-stream")
		events := strings.SplitAfter(strings.TrimSuffix(whole, "\n\n"), "\n\n")
		content := slices.IndexFunc(events, isContent) + 1
		long := strings.Replace(whole, `"text":"`, `"text":"`+strings.Repeat("x", 2*relay.MaxLineBytes), -1)
		dead := map[string]string{
			"messages":  "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"dead\"}}\n\n",
			"responses": "event: error\ndata: {\"code\":\"x\",\"message\":\"dead\",\"sequence_number\":9,\"type\":\"error\"}\n\n",
		}[api.name]
		cases := []struct {
			name, says string
			passed     string // of what is said; all of it: no error event follows
		}{
			{"after its last event", whole, whole},
			{"after its last event, which is long", long, long},
			{"before its last event", strings.Join(events[:len(events)-1], ""), strings.Join(events[:len(events)-1], "")},
			{"after content", strings.Join(events[:content], ""), strings.Join(events[:content], "")},
			{"in an event", strings.Join(events[:content], "") + events[content][:30], strings.Join(events[:content], "")},
		}
		for _, c := range cases {
			t.Run(api.name+", "+c.name, func(t *testing.T) {
				f := serve(t, nil, &replica{script: once(sseToEnd, c.says)})
				_, answer := f.post(api.path, api.ask+`,"stream":true}`)
				rest, ok := strings.CutPrefix(answer, c.passed)
				switch {
				case !ok:
					t.Errorf("got %.300q, want %.300q", answer, c.passed)
				case c.passed == whole || c.passed == long:
					if rest != "" {
						t.Errorf("followed by %q", rest)
					}
				default:
					endsWithError(t, api.name, rest, "replica_failed")
				}
			})
		}
		if dead != "" {
			t.Run(api.name+", after an error event", func(t *testing.T) {
				says := strings.Join(events[:content], "") + dead
				f := serve(t, nil, &replica{script: once(sseToEnd, says)})
				if _, answer := f.post(api.path, api.ask+`,"stream":true}`); answer != says {
					t.Errorf("got %q", answer)
				}
				f.awaitMetric(`warmroute_requests_total{backend="r0",code="500",endpoint="` + api.path + `",model="m"} 1`)
			})
		}
		t.Run(api.name+", before content", func(t *testing.T) {
			first := strings.Join(events[:content-1], "")
			f := serve(t, nil, &replica{script: once(sseToEnd, first)}, &replica{script: always(streamed(whole))})
			if _, answer := f.post(api.path, api.ask+`,"stream":true}`); answer != whole {
				t.Errorf("got %q, want the second replica's", answer)
			}
		})
	}
}

// withLength is a stream whose length is known.
func withLength(stream string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s", len(stream), stream)
}

// endMarks are, for each endpoint with streams, some content and what may mark the end after it.
var endMarks = []struct {
	path, content string
	marks         []string
}{
	{"/v1/chat/completions", role + hello, []string{
		stop, doneLine, strings.TrimSuffix(doneLine, "\n\n"), dead,
		strings.Replace(stop, `"finish_reason":"stop"`, `"finish_reason": "length"`, 1),
		strings.Replace(stop, `"content":""`, `"content":"`+strings.Repeat("x", 2*relay.MaxLineBytes)+`"`, 1),
	}},
	{"/v1/completions", `data: {"choices":[{"index":0,"text":"Hi","finish_reason":null}]}` + "\n\n", []string{
		`data: {"choices":[{"index":0,"text":"\"","finish_reason":"length"}]}` + "\n\n", doneLine,
	}},
	{"/inference/v1/generate", `data: {"choices":[{"index":0,"token_ids":[1],"finish_reason":null}]}` + "\n\n", []string{
		`data: {"choices":[{"index":1,"token_ids":[],"finish_reason":"stop"}]}` + "\n\n", doneLine,
	}},
	{"/v1/responses", strings.Join(streamedResponse("resp_1", "")[:2], ""), []string{
		streamedResponse("resp_1", "")[2],
		`data: {"type":"response.incomplete","response":{"status":"incomplete"}}` + "\n\n",
		`data: {"type":"response.failed","response":{"status":"failed"}}` + "\n\n",
	}},
	{"/v1/responses/resp_1?stream=true", strings.Join(streamedResponse("resp_1", "")[:2], ""), []string{
		streamedResponse("resp_1", "")[2],
		strings.Replace(streamedResponse("resp_1", "")[2], `"text":"`, `"text":"`+strings.Repeat("x", 2*relay.MaxLineBytes), 1),
	}},
	{"/v1/messages", messagesBegin(`{"input_tokens":4,"output_tokens":0}`) + messagesContent, []string{
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
	}},
	{"/v1/audio/transcriptions", `data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}` + "\n\n", []string{
		doneLine,
		`data: {"object":"transcription.chunk","choices":[{"delta":{"content":""},"finish_reason":"stop"}]}` + "\n\n",
		`data: {"type":"transcript.text.done","text":"hi","usage":{"type":"duration","seconds":1}}` + "\n\n",
	}},
}

// askStreamAt asks an endpoint of endMarks for a stream.
func (f *fleet) askStreamAt(path string) string {
	f.t.Helper()
	var answer string
	switch {
	case path == "/v1/audio/transcriptions":
		kind, body := upload(f.t, "model", "m", "stream", "true")
		_, answer, _ = f.upload(path, kind, body)
	case strings.Contains(path, "?"):
		f.proxy.responses.Index.Add("resp_1", responseindex.Entry{Backend: backends.NormalizeURL(f.backends[0].URL)})
		_, answer = f.get(path)
	default:
		body := bodyFor(path)
		_, answer = f.post(path, body[:len(body)-1]+`,"stream":true}`)
	}
	return answer
}

func withResponseIndex(o *Options) {
	o.Responses = responseindex.New(responseindex.Settings{MaxEntries: 1, TTL: time.Hour}, time.Now, nil)
}

// A replica or an intermediary whose worker dies may end the body as if it were complete.
func TestStreamEndWithoutMarkSendsErrorEvent(t *testing.T) {
	for _, c := range endMarks {
		for name, frame := range map[string]func(string) string{"chunked": func(s string) string {
			return streamed(s)
		}, "with a length": withLength} {
			t.Run(c.path+", "+name, func(t *testing.T) {
				t.Parallel()
				suspected := make(chan string, 1)
				f := serve(t, func(o *Options) {
					o.RecheckHealth = suspects(suspected)
					withResponseIndex(o)
				}, &replica{script: always(frame(c.content + "data: {\"half"))})
				breakAtOnce(t, f)
				got := f.askStreamAt(c.path)
				rest, ok := strings.CutPrefix(got, c.content)
				if !ok {
					t.Fatalf("got %q", got)
				}
				api := map[string]string{"/v1/messages": "messages", "/v1/responses": "responses",
					"/v1/responses/resp_1?stream=true": "responses"}[c.path]
				endsWithError(t, cmp.Or(api, "chat"), rest, "replica_failed")
				if <-suspected != "r0" {
					t.Error("the backend's health was not checked")
				}
				f.awaitIdle()
				retrieval := strings.Contains(c.path, "?") // is sent past the breaker
				if opens := f.router.Status(f.backends[0]).Opens; opens != 1 && !retrieval {
					t.Error("the failure does not count for the circuit breaker")
				}
				if log := f.log.String(); !strings.Contains(log, "response ended early") {
					t.Errorf("logged:\n%s", log)
				}
			})
		}
	}
}

func TestOneEndMarkCompletesStream(t *testing.T) {
	for _, c := range endMarks {
		for i, mark := range c.marks {
			t.Run(fmt.Sprint(c.path, ", ", i), func(t *testing.T) {
				t.Parallel()
				f := serve(t, withResponseIndex, &replica{script: always(streamed(c.content, mark))})
				if got := f.askStreamAt(c.path); got != c.content+mark {
					t.Errorf("got %.1000q, want %.1000q", got, c.content+mark)
				}
			})
		}
	}
}

// TestLineEnds relays streams with each of the line ends that an event stream may have, and without one at its end.
func TestLineEnds(t *testing.T) {
	t.Parallel()
	for _, c := range endMarks {
		stream := c.content + c.marks[0]
		last := strings.TrimRight(stream, "\n")
		for name, says := range map[string]string{
			"CRLF": strings.ReplaceAll(stream, "\n", "\r\n"), "CR": strings.ReplaceAll(stream, "\n", "\r"), "no end": last,
			"CR, no end": strings.ReplaceAll(last, "\n", "\r"), "one CR at the end": strings.ReplaceAll(last, "\n", "\r") + "\r",
		} {
			for frame, answer := range map[string]string{"whole": streamed(says), "bytes": streamed(strings.Split(says, "")...),
				"unframed": sseToEnd + says} {
				if frame == "unframed" && !strings.Contains(last[strings.LastIndex(last, "\n"):], "DONE") && c.path != "/v1/messages" &&
					!strings.Contains(c.path, "responses") {
					continue // there only the last event counts
				}
				t.Run(strings.Join([]string{c.path, name, frame}, " "), func(t *testing.T) {
					t.Parallel()
					f := serve(t, withResponseIndex, &replica{script: once(answer)})
					if got := f.askStreamAt(c.path); got != says {
						t.Errorf("got %.1000q, want %.1000q", got, says)
					}
				})
			}
		}
	}
}

// A client gets the lines of a stream whose lines end in CR when they are complete, and an error event after them.
func TestLinesWithCRNotWithheld(t *testing.T) {
	t.Parallel()
	relayed := make(chan struct{})
	beginning := strings.ReplaceAll(role+hello, "\n", "\r")
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(beginning))
		<-relayed
		s.say(chunk(strings.TrimSuffix(strings.ReplaceAll(world, "\n", "\r"), "\r")), lastChunk)
	}})
	_, br := f.stream(askStream)
	f.expect(br, beginning)
	close(relayed)
	rest, err := io.ReadAll(br)
	if err != nil {
		t.Fatal(err)
	}
	if got := parse(t, strings.ReplaceAll(string(rest), "\r", "\n")); len(got) != 3 || !strings.Contains(got[0].data, "world") ||
		!strings.Contains(got[1].data, "replica_failed") {
		t.Errorf("got %q", rest)
	}
}

// TestSequenceNumberOfErrorEvent expects the number after that of the last event that the client has.
func TestSequenceNumberOfErrorEvent(t *testing.T) {
	t.Parallel()
	events := streamedResponse("resp_1", "")
	item := "event: response.output_item.added\n" + `data: {"type":"response.output_item.added","sequence_number":41,` +
		`"item":{"sequence_number":7}}` + "\n\n"
	long := "event: response.output_text.done\n" + `data: {"text":"` + strings.Repeat("x", 2*relay.MaxLineBytes) +
		`","sequence_number":9,"type":"response.output_text.done"}` + "\n\n"
	for name, c := range map[string]struct {
		says []string
		want int
	}{
		"after two events": {events[:2], 2},
		"high":             {[]string{events[1], item}, 42},
		"within an event":  {[]string{events[1], item[:len(item)-20]}, 2},
		"long event":       {[]string{events[1], long}, 10},
		"without numbers":  {[]string{"data: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n"}, 0},
	} {
		for _, path := range []string{"/v1/responses", "/v1/responses/resp_1?stream=true"} {
			t.Run(name+" "+path, func(t *testing.T) {
				t.Parallel()
				f := serve(t, withResponseIndex, &replica{script: once(sseHead, chunk(strings.Join(c.says, "")))})
				got := f.askStreamAt(path)
				_, last, found := strings.Cut(got, "event: error\ndata: ")
				var e struct {
					SequenceNumber *int `json:"sequence_number"`
				}
				if err := json.Unmarshal([]byte(last), &e); !found || err != nil || e.SequenceNumber == nil || *e.SequenceNumber != c.want {
					t.Errorf("ends with %.300q, want the number %d", last, c.want)
				}
			})
		}
	}
	t.Run("no event", func(t *testing.T) {
		t.Parallel()
		heard := make(chan struct{})
		f := serve(t, func(o *Options) { o.QueueKeepalive = 10 * time.Millisecond }, &replica{script: func(s *session) {
			s.request()
			s.until(heard)
			s.say(answered("400 Bad Request", `{"error":{"message":"m"}}`))
		}})
		r := f.open(t, "/v1/responses", `{"model":"m","stream":true,"input":"x"}`)
		r.to(comment)
		close(heard)
		if got := r.rest(); !strings.Contains(got, `"sequence_number":0`) {
			t.Errorf("got %q", got)
		}
	})
}

// A response that failed before its first output is a failed attempt, unless the error is the request's.
func TestFailedResponseBeforeOutput(t *testing.T) {
	t.Parallel()
	failed := func(code string) string {
		return streamedResponse("resp_1", "")[0] + "event: response.failed\n" +
			`data: {"response":{"id":"resp_1","status":"failed","error":{"code":"` + code +
			`","message":"in its words"},"output":[]},"sequence_number":1,"type":"response.failed"}` + "\n\n"
	}
	good := strings.Join(streamedResponse("resp_2", ""), "")
	for code, retried := range map[string]bool{"server_error": true, "503": true, "invalid_prompt": false, "rate_limit_exceeded": false,
		"400": false} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			f := serve(t, nil, &replica{script: always(streamed(failed(code)))}, &replica{script: always(streamed(good))})
			want := failed(code)
			if retried {
				want = good
			}
			if got := f.askStreamAt("/v1/responses"); got != want {
				t.Errorf("got %q", got)
			}
		})
	}
	t.Run("no other replica", func(t *testing.T) {
		t.Parallel()
		f := serve(t, nil, &replica{script: always(streamed(failed("server_error")))})
		resp, got := f.post("/v1/responses", `{"model":"m","input":"x","stream":true}`)
		if resp.StatusCode != http.StatusInternalServerError || !strings.Contains(got, `"error":{"message":"in its words"`) {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
	})
}

// A complete response without choices and usage is no response, as is one that failed.
func TestRetryAfterEmptyResponse(t *testing.T) {
	t.Parallel()
	failed := func(code string) string {
		return `{"id":"resp_1","status":"failed","error":{"code":"` + code + `","message":"m"},"output":[],"usage":null}`
	}
	for name, c := range map[string]struct {
		path, says string
		retried    bool
	}{
		"chat":               {"/v1/chat/completions", `{"id":"c","object":"chat.completion","choices":[],"usage":null}`, true},
		"completion":         {"/v1/completions", `{"id":"c","choices" : [ ]}`, true},
		"tokens":             {"/inference/v1/generate", `{"choices":[]}`, true},
		"failed response":    {"/v1/responses", failed("server_error"), true},
		"refused response":   {"/v1/responses", failed("invalid_prompt"), false},
		"with usage":         {"/v1/chat/completions", `{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":0}}`, false},
		"error: null":        {"/v1/chat/completions", strings.Replace(whole, "{", `{"error":null,`, 1), false},
		"response, no error": {"/v1/responses", strings.Replace(responseObject("resp_1", "completed"), "{", `{"error":null,`, 1), false},
		"embeddings":         {"/v1/embeddings", `{"choices":[]}`, false},
		"choices in a text":  {"/v1/chat/completions", strings.Replace(whole, `"Hello"`, `"\"choices\":[]"`, 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, nil, &replica{script: always(answered("200 OK", c.says))}, &replica{script: always(answered("200 OK", whole))})
			want := c.says
			if c.retried {
				want = whole
			}
			if _, got := f.post(c.path, bodyFor(c.path)); got != want {
				t.Errorf("got %s", got)
			}
		})
	}
	t.Run("no other replica", func(t *testing.T) {
		t.Parallel()
		f := serve(t, nil, &replica{script: always(answered("200 OK", `{"choices":[]}`))})
		if resp, got := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusBadGateway ||
			!strings.Contains(got, "no choices") {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
	})
}

func TestRetryAfterStreamEndWithoutMark(t *testing.T) {
	begin := messagesBegin(`{"input_tokens":4,"output_tokens":0}`)
	for path, says := range map[string]struct{ first, second string }{
		"/v1/chat/completions": {role, goodStream},
		"/v1/completions":      {": ping\n\n", endMarks[1].content + doneLine},
		"/v1/responses":        {streamedResponse("resp_1", "")[0], strings.Join(streamedResponse("resp_2", ""), "")},
		"/v1/messages":         {begin, begin + messagesContent + messagesEnd(`"end_turn"`, `{"output_tokens":2}`)},
	} {
		f := serve(t, nil, &replica{script: always(streamed(says.first))}, &replica{script: always(streamed(says.second))})
		if got := f.askStreamAt(path); got != says.second {
			t.Errorf("%s: got %q, want the second replica's", path, got)
		}
		f.awaitMetric(`warmroute_retries_total{reason="truncated"} 1`)
	}
}

// beginningsWithoutText are beginnings of streams up to an event that shows output of the engine, but
// no text.
func beginningsWithoutText() map[string]struct{ path, first, output, end string } {
	delta := func(d string) string {
		return `data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":` + d +
			`,"logprobs":null,"finish_reason":null}]}` + "\n\n"
	}
	typed := func(kind, rest string) string {
		return "event: " + kind + "\ndata: " + `{"type":"` + kind + `"` + rest + "}\n\n"
	}
	begin := messagesBegin(`{"input_tokens":4,"output_tokens":0}`)
	return map[string]struct{ path, first, output, end string }{
		"role in every event": {"/v1/chat/completions", role, role, goodStream},
		"empty content":       {"/v1/chat/completions", role, delta(`{"content":""}`), goodStream},
		"empty reasoning":     {"/v1/chat/completions", role, delta(`{"reasoning":""}`), goodStream},
		"no tool call yet":    {"/v1/chat/completions", role, delta(`{"role":null,"tool_calls":[]}`), goodStream},
		"empty delta":         {"/v1/chat/completions", role, delta(`{}`), goodStream},
		"empty text": {"/v1/completions", "", `data: {"choices":[{"index":0,"text":"","finish_reason":null}]}` + "\n\n",
			endMarks[1].marks[0]},
		"no token ids": {"/inference/v1/generate", "", `data: {"choices":[{"index":0,"token_ids":[],"finish_reason":null}]}` + "\n\n",
			endMarks[2].marks[0]},
		"a response's item": {"/v1/responses", "", typed("response.output_item.added", `,"item":{"type":"function_call"}`),
			typed("response.completed", `,"response":{"status":"completed"}`)},
		"empty reasoning text": {"/v1/responses", "", typed("response.reasoning_text.delta", `,"delta":""`),
			typed("response.completed", `,"response":{"status":"completed"}`)},
		"a message's block": {"/v1/messages", begin, typed("content_block_start", `,"index":0,"content_block":{"type":"tool_use"}`),
			messagesEnd(`"tool_use"`, `{"output_tokens":2}`)},
		"empty text in a block": {"/v1/messages", begin, typed("content_block_delta", `,"index":0,"delta":{"text":""}`),
			messagesEnd(`"end_turn"`, `{"output_tokens":2}`)},
	}
}

// slowBody sends an event each fifth of roleEventDelay.
type slowBody struct {
	relay.Body
	events []string
}

func (b *slowBody) WaitReadable(d time.Duration) (bool, error) { return d >= roleEventDelay/5, nil }

func (b *slowBody) Read(p []byte) (n int, err error) {
	time.Sleep(roleEventDelay / 5)
	n = copy(p, b.events[0])
	b.events = b.events[1:]
	return n, nil
}

// bufferBeginning returns what is buffered of a stream of path before it is relayed.
func bufferBeginning(t *testing.T, path string, events ...string) string {
	var buffered bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		found, _ := api.NewTable(nil).Find(http.MethodPost, path)
		e := found.Endpoint
		s := &streamRelay{attempt: &attempt{req: &request{proxy: new(Proxy), settings: new(Settings)}}, events: relay.Scanner{Format: e.Format}}
		s.body = &slowBody{events: events}
		if _, err := s.readUntilFirstEvent(&buffered, make([]byte, relay.ChunkBytes)); err != nil {
			t.Error(err)
		}
	})
	return buffered.String()
}

func TestEventsWithoutTextBufferedAtMostRoleEventDelay(t *testing.T) {
	for name, c := range beginningsWithoutText() {
		t.Run(name, func(t *testing.T) {
			events := slices.Repeat([]string{c.output}, 100)
			if c.first != "" {
				events = append([]string{c.first}, events...)
			}
			got, want := bufferBeginning(t, c.path, events...), strings.Join(events[:6], "") // the first one, and those of the delay
			if !strings.HasPrefix(want, got) {
				t.Errorf("buffered %q, want at most %q", got, want)
			}
		})
	}
}

// The client has an event without text before the replica may send one with text.
func TestFirstEventWithoutTextRelayed(t *testing.T) {
	for name, c := range beginningsWithoutText() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			relayed := make(chan struct{})
			f := serve(t, nil, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead, chunk(c.first+c.output))
				s.until(relayed)
				s.say(chunk(c.end), lastChunk)
			}})
			body := bodyFor(c.path)
			br := f.streamOf(c.path, body[:len(body)-1]+`,"stream":true}`)
			f.expect(br, c.first+c.output)
			close(relayed)
			f.expect(br, c.end)
		})
	}
}

// keepingAlive is a fleet whose proxy soon finds a stream silent.
func keepingAlive(t *testing.T, replicas ...*replica) *fleet {
	return serve(t, func(o *Options) { o.Keepalive = 20 * time.Millisecond }, replicas...)
}

// until waits for the client, or the end of the test.
func (s *session) until(ch <-chan struct{}) {
	select {
	case <-ch:
	case <-s.replica.over:
	}
}

// commentUntil sends comments at short intervals until ch is closed, or the end of the test.
func (s *session) commentUntil(ch <-chan struct{}) {
	for {
		select {
		case <-ch:
			return
		case <-s.replica.over:
			return
		case <-time.After(10 * time.Millisecond):
			s.say(chunk(": ping\n\n"))
		}
	}
}

// reader is a client that reads a stream line by line.
type reader struct {
	t    *testing.T
	resp *http.Response
	br   *bufio.Reader
	got  strings.Builder
}

func (f *fleet) open(t *testing.T, path, body string, headers ...string) *reader {
	t.Helper()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, strings.NewReader(body))
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return &reader{t: t, resp: resp, br: bufio.NewReader(resp.Body)}
}

// to reads up to a line.
func (r *reader) to(want string) {
	r.t.Helper()
	for {
		line, err := r.br.ReadString('\n')
		r.got.WriteString(line)
		if strings.TrimSpace(line) == want {
			return
		}
		if err != nil {
			r.t.Fatalf("%q never came, but %v after %q", want, err, r.got.String())
		}
	}
}

// rest reads to the end, and returns all that came, comments left out.
func (r *reader) rest() string {
	for {
		line, err := r.br.ReadString('\n')
		r.got.WriteString(line)
		if err != nil {
			return strings.ReplaceAll(r.got.String(), relay.KeepAliveComment, "")
		}
	}
}

const comment = ": keep-alive"

func TestKeepAliveDuringPrefill(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]string{
		"nothing":                 "",
		"comments of the replica": chunk(": ping\n\n"),
		"half a chunk":            "20\r\n: pi",
	} {
		t.Run(name, func(t *testing.T) {
			heard := make(chan struct{})
			f := keepingAlive(t, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead, before)
				s.until(heard)
				if name == "half a chunk" {
					s.say("ng" + strings.Repeat(".", 24) + "\n\n\r\n")
				}
				s.say(chunk(role), chunk(hello), chunk(stop), chunk(doneLine), lastChunk)
			}})
			r := f.open(t, "/v1/chat/completions", askStream)
			r.to(comment)
			r.to(comment)
			if e := f.exposition(); strings.Contains(e, "warmroute_ttft_seconds_count") {
				t.Error("a comment was counted as content")
			}
			if got := f.backends[0].InFlight.Load(); got != 1 {
				t.Errorf("%d in flight", got)
			}
			close(heard)
			if got := r.rest(); !strings.HasSuffix(got, role+hello+stop+doneLine) {
				t.Errorf("got %q", got)
			}
			f.awaitMetric(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
		})
	}
}

func TestRetryAfterKeepAlive(t *testing.T) {
	heard := make(chan struct{})
	f := keepingAlive(t, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead)
		s.until(heard)
	}}, &replica{script: once(streamed(goodStream))})
	r := f.open(t, "/v1/chat/completions", askStream)
	r.to(comment)
	close(heard)
	if got := r.rest(); got != goodStream {
		t.Errorf("got %q", got)
	}
	if got := r.resp.Header.Get("X-Warmroute-Backend"); got != "r0" {
		t.Errorf("the header names %q, and not the first attempt", got)
	}
	f.awaitMetric(`warmroute_retries_total{reason="truncated"} 1`)
	f.awaitMetric(`warmroute_requests_total{backend="r1",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
}

func TestErrorAfterKeepAliveIsEvent(t *testing.T) {
	t.Parallel()
	chat := func(message string) []string { return []string{"data: {", message, "data: [DONE]\n\n"} }
	for name, c := range map[string]struct {
		path   string
		second string // what the second replica says; nothing: it dies as well
		code   string
		says   []string
	}{
		"chat":        {"/v1/chat/completions", "", "502", chat("no replica could serve the request")},
		"completions": {"/v1/completions", "", "502", chat("no replica could serve the request")},
		"responses": {"/v1/responses", "", "502", []string{"event: error\ndata: {", `"type":"error"`,
			"no replica could serve the request"}},
		"messages": {"/v1/messages", "", "502", []string{"event: error\ndata: {", `"type":"api_error"`,
			"no replica could serve the request"}},
		"a refusal": {"/v1/chat/completions",
			answered("400 Bad Request", `{"error":{"message":"too long","type":"BadRequestError","code":400}}`), "400", chat(`"too long"`)},
		"a refusal of its kind": {"/v1/chat/completions", answered("503 Service Unavailable", `{"message":"queue\nfull"}`), "503",
			chat(`queue\nfull`)},
		"a refusal in responses": {"/v1/responses", answered("400 Bad Request", `{"error":{"message":"too long"}}`), "400",
			[]string{"event: error\ndata: {", `"too long"`}},
		"a refusal in messages": {"/v1/messages", answered("400 Bad Request", `{"error":{"message":"too long"}}`), "400",
			[]string{"event: error\ndata: {", `"too long"`}},
		"an answer, no stream": {"/v1/chat/completions", answered("200 OK", whole), "502", chat("not respond with a stream")},
		"no JSON at all":       {"/v1/chat/completions", answered("422 X", `gone`), "422", chat("Unprocessable")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			heard := make(chan struct{})
			f := keepingAlive(t, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead)
				s.until(heard)
			}}, &replica{script: once(c.second)})
			body := bodyFor(c.path)
			r := f.open(t, c.path, body[:len(body)-1]+`,"stream":true}`)
			if c.path == "/v1/messages" {
				r.to(`data: {"type": "ping"}`)
			} else {
				r.to(comment)
			}
			close(heard)
			got := strings.ReplaceAll(r.rest(), relay.MessagesPing, "")
			for _, want := range c.says {
				if !strings.Contains(got, want) {
					t.Errorf("%q is not in %q", want, got)
				}
			}
			if ours := c.code == "502" || c.code == "422"; strings.Contains(got, `"src":"warmroute"`) != ours {
				t.Errorf("the proxy's own words: %v, but %q", ours, got)
			}
			if strings.Count(got, "data: {") != 1 || !strings.HasSuffix(got, "\n\n") {
				t.Errorf("not one event: %q", got)
			}
			f.awaitMetric(`warmroute_requests_total{backend="r1",code="` + c.code + `",endpoint="` + c.path + `",model="m"} 1`)
		})
	}
}

func TestFirstByteTimeoutAfterKeepAlive(t *testing.T) {
	t.Parallel()
	f := serve(t, func(o *Options) {
		o.Keepalive, o.FirstByte = 20*time.Millisecond, 300*time.Millisecond
	}, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead)
		s.closed()
	}})
	resp, got := f.post("/v1/chat/completions", askStream)
	if resp.StatusCode != http.StatusOK || !strings.Contains(got, relay.KeepAliveComment) || !strings.Contains(got, "first_byte_timeout") {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="504",endpoint="/v1/chat/completions",model="m"} 1`)
}

// Before a replica took a request there may be an error yet, and its status.
func TestNoKeepAliveBeforeResponseHeader(t *testing.T) {
	t.Parallel()
	silence := func(s *session) {
		s.request()
		time.Sleep(200 * time.Millisecond)
		s.say(answered("400 Bad Request", `{"error":{"message":"no"}}`))
	}
	f := keepingAlive(t, &replica{script: silence})
	if resp, got := f.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	held := serveWithQueue(t, router.QueueSettings{Requests: 10, Bytes: 1 << 20, NoneReadyTimeout: 200 * time.Millisecond,
		BusyTimeout: 200 * time.Millisecond},
		func(o *Options) { o.Keepalive = 20 * time.Millisecond }, &replica{})
	held.backends[0].SetState(backends.Down)
	if resp, got := held.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
}

func TestKeepAliveMidStream(t *testing.T) {
	t.Parallel()
	heard, over := make(chan struct{}), make(chan struct{})
	f := keepingAlive(t, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.until(heard)
		s.say(chunk("event: x\n"), "9\r\ndata")
		time.Sleep(200 * time.Millisecond)
		s.say(": {}\n\r\n", chunk("\n"))
		s.until(over)
		s.say(chunk(stop), chunk(doneLine), lastChunk)
	}})
	r := f.open(t, "/v1/chat/completions", askStream)
	r.to(comment)
	close(heard)
	r.to("data: {}")
	if got := r.got.String(); !strings.Contains(got, "event: x\ndata: {}\n") {
		t.Errorf("an event was parted: %q", got)
	}
	r.to(comment)
	close(over)
	if got := r.rest(); got != role+hello+"event: x\ndata: {}\n\n"+stop+doneLine {
		t.Errorf("got %q", got)
	}
}

// withoutEmptyEvents is a stream without the empty lines that end no event.
func withoutEmptyEvents(stream string) string {
	var out strings.Builder
	inEvent := false
	for line := range strings.Lines(stream) {
		switch {
		case line == "\n" || line == "\r\n":
			if !inEvent {
				continue
			}
			inEvent = false
		case line[0] != ':':
			inEvent = true
		}
		out.WriteString(line)
	}
	return out.String()
}

// OpenAI's SDK for Go before 3.43 takes an empty line without data before it for an event, and
// fails; that for Python does once an event had an id.
func TestNoEmptyEvents(t *testing.T) {
	t.Parallel()
	const ping = ": ping - 2026-11-26 14:00:00+00:00\r\n\r\n" // as sse-starlette sends it
	for name, says := range map[string][]string{
		"comments": {chunk(ping), chunk(role), chunk(ping + hello), chunk(ping), chunk(stop), chunk(ping), chunk(doneLine), lastChunk},
		"split comments": {chunk(role), chunk(hello + ping[:1]), chunk(ping[1:4]), chunk(ping[4 : len(ping)-2]),
			chunk("\r\n" + stop + doneLine), lastChunk},
		"empty lines":        {chunk("\n\r\n\n" + role), chunk("\n" + hello + "\n"), chunk(stop + doneLine + "\n\n"), lastChunk},
		"no mark of the end": {chunk(role), chunk(hello), lastChunk},
		"a comment, cut":     {chunk(role), chunk(hello + ping[:10])},
		"an event, cut":      {chunk(role), chunk(hello + world[:len(world)-1])},
	} {
		t.Run(name, func(t *testing.T) {
			relayed := make(chan struct{})
			f := keepingAlive(t, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead, says[0])
				s.until(relayed)
				s.say(says[1:]...)
			}})
			r := f.open(t, "/v1/chat/completions", askStream)
			r.to(comment)
			close(relayed)
			r.rest()
			if got := r.got.String(); got != withoutEmptyEvents(got) || !strings.HasSuffix(got, doneLine) {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestDisconnectBetweenKeepAlives(t *testing.T) {
	gone := make(chan struct{})
	f := keepingAlive(t, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead)
		s.closed()
		close(gone)
	}})
	r := f.open(t, "/v1/chat/completions", askStream)
	r.to(comment)
	r.resp.Body.Close()
	<-gone
	f.awaitMetric(`warmroute_disconnected_requests_total{phase="before_response"} 1`)
}

// A gap lies between two chunks with events: neither the first one, nor a comment,
// nor the mark of the end makes one.
func TestChunkIntervals(t *testing.T) {
	t.Parallel()
	const pause = 30 * time.Millisecond
	next := make(chan struct{})
	f := keepingAlive(t, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role+hello))
		for range 2 {
			s.until(next)
			time.Sleep(pause)
			s.say(chunk(world))
		}
		s.until(next)
		s.say(chunk(": a comment\n\n"))
		s.until(next)
		s.say(chunk(doneLine), lastChunk)
	}})
	r := f.open(t, "/v1/chat/completions", askStream)
	for _, line := range []string{strings.TrimSpace(hello), strings.TrimSpace(world), strings.TrimSpace(world), comment} {
		r.to(line)
		next <- struct{}{}
	}
	if _, err := io.Copy(io.Discard, r.br); err != nil {
		t.Fatal(err)
	}
	f.awaitMetric(`warmroute_itl_seconds_count{backend="r0",model="m"} 2`)
	_, rest, _ := strings.Cut(f.exposition(), "\n"+`warmroute_itl_seconds_sum{backend="r0",model="m"} `)
	line, _, _ := strings.Cut(rest, "\n")
	if sum, err := strconv.ParseFloat(line, 64); err != nil || sum < 2*pause.Seconds() {
		t.Errorf("the gaps have %q seconds together, two pauses have %v", line, 2*pause)
	}
}

func TestBufferedResponseHasNoChunkIntervals(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}]}`)
	f.awaitMetric(`warmroute_itl_seconds_count{backend="r0",model="m"} 0`)
}
