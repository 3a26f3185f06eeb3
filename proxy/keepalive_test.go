package proxy

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

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

// reader is a client that reads a stream line by line.
type reader struct {
	t    *testing.T
	resp *http.Response
	br   *bufio.Reader
	got  strings.Builder
}

func (f *fleet) open(t *testing.T, path, body string) *reader {
	t.Helper()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, strings.NewReader(body))
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
			return strings.ReplaceAll(r.got.String(), keepAlive, "")
		}
	}
}

const comment = ": keep-alive"

func TestSilentPrefillIsBridgedByComments(t *testing.T) {
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
			f.counts(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
		})
	}
}

func TestFailureAfterCommentsIsRetried(t *testing.T) {
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
	f.counts(`warmroute_retries_total{reason="broken"} 1`)
	f.counts(`warmroute_requests_total{backend="r1",code="200",endpoint="/v1/chat/completions",model="m"} 1`)
}

func TestWhatEndsAStreamOfCommentsIsAnErrorEvent(t *testing.T) {
	chat := func(message string) []string { return []string{"data: {", message, "data: [DONE]\n\n"} }
	for name, c := range map[string]struct {
		path   string
		second string // what the second replica says; nothing: it dies as well
		code   string
		says   []string
	}{
		"chat":                   {"/v1/chat/completions", "", "502", chat("no replica could answer")},
		"completions":            {"/v1/completions", "", "502", chat("no replica could answer")},
		"responses":              {"/v1/responses", "", "502", []string{"event: error\ndata: {", `"type":"error"`, "no replica could answer"}},
		"messages":               {"/v1/messages", "", "502", []string{"event: error\ndata: {", `"type":"api_error"`, "no replica could answer"}},
		"a refusal":              {"/v1/chat/completions", answered("400 Bad Request", `{"error":{"message":"too long","type":"BadRequestError","code":400}}`), "400", chat(`"too long"`)},
		"a refusal of its kind":  {"/v1/chat/completions", answered("503 Service Unavailable", `{"message":"queue\nfull"}`), "503", chat(`queue\nfull`)},
		"a refusal in responses": {"/v1/responses", answered("400 Bad Request", `{"error":{"message":"too long"}}`), "400", []string{"event: error\ndata: {", `"too long"`}},
		"a refusal in messages":  {"/v1/messages", answered("400 Bad Request", `{"error":{"message":"too long"}}`), "400", []string{"event: error\ndata: {", `"too long"`}},
		"an answer, no stream":   {"/v1/chat/completions", answered("200 OK", whole), "502", chat("not the stream")},
		"no JSON at all":         {"/v1/chat/completions", answered("422 X", `gone`), "422", chat("Unprocessable")},
	} {
		t.Run(name, func(t *testing.T) {
			heard := make(chan struct{})
			f := keepingAlive(t, &replica{script: func(s *session) {
				s.request()
				s.say(sseHead)
				s.until(heard)
			}}, &replica{script: once(c.second)})
			body := bodyFor(c.path)
			r := f.open(t, c.path, body[:len(body)-1]+`,"stream":true}`)
			r.to(comment)
			close(heard)
			got := r.rest()
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
			f.counts(`warmroute_requests_total{backend="r1",code="` + c.code + `",endpoint="` + c.path + `",model="m"} 1`)
		})
	}
}

func TestFirstByteTimeoutAfterCommentsIsAnErrorEvent(t *testing.T) {
	f := serve(t, func(o *Options) { o.Keepalive, o.FirstByte = 20*time.Millisecond, 300*time.Millisecond }, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead)
		s.closed()
	}})
	resp, got := f.post("/v1/chat/completions", askStream)
	if resp.StatusCode != http.StatusOK || !strings.Contains(got, keepAlive) || !strings.Contains(got, "first_byte_timeout") {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	f.counts(`warmroute_requests_total{backend="r0",code="504",endpoint="/v1/chat/completions",model="m"} 1`)
}

// Before a replica took a request there may be an error yet, and its status.
func TestNoCommentBeforeAReplicaHasTakenTheRequest(t *testing.T) {
	silence := func(s *session) {
		s.request()
		time.Sleep(200 * time.Millisecond)
		s.say(answered("400 Bad Request", `{"error":{"message":"no"}}`))
	}
	f := keepingAlive(t, &replica{script: silence})
	if resp, got := f.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	held := serveHolding(t, router.QueueSettings{Requests: 10, Bytes: 1 << 20, Timeout: 200 * time.Millisecond},
		func(o *Options) { o.Keepalive = 20 * time.Millisecond }, &replica{})
	held.backends[0].SetState(backends.Down)
	if resp, got := held.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
}

func TestSilenceInMidStreamIsBridgedBetweenEvents(t *testing.T) {
	heard, over := make(chan struct{}), make(chan struct{})
	f := keepingAlive(t, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		s.until(heard)
		// Within an event a comment's empty line would end it.
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

func TestClientThatLeavesBetweenCommentsFreesTheReplica(t *testing.T) {
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
	f.counts(`warmroute_aborts_total{phase="before_answer"} 1`)
}
