package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

const testKeepalive = 20 * time.Millisecond

func setQueueKeepalive(o *Options) { o.QueueKeepalive = testKeepalive }

// openStream sends a streaming request and returns the response when its header is there.
func (f *fleet) openStream(ctx context.Context, path, body string) (*http.Response, *bufio.Reader) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { resp.Body.Close() })
	return resp, bufio.NewReader(resp.Body)
}

// readKeepAlives reads n keep-alive events.
func readKeepAlives(t *testing.T, r io.Reader, event string, n int) {
	t.Helper()
	got := make([]byte, n*len(event))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != strings.Repeat(event, n) {
		t.Fatalf("%d keep-alive events: got %q, %v", n, got, err)
	}
}

// readWithoutKeepAlives reads the rest of a stream and removes its keep-alive events.
func readWithoutKeepAlives(t *testing.T, r io.Reader, event string) string {
	t.Helper()
	rest, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(rest), event, "")
}

var queuedStreams = []struct {
	path, body, keepAlive, errorEvent string
	response                          string
}{
	{"/v1/chat/completions", askStream, ": keep-alive\n", `data: {"error":{"message":"`, goodStream},
	{"/v1/completions", `{"model":"m","stream":true,"prompt":"` + question + `"}`, ": keep-alive\n", `data: {"error":{"message":"`,
		`data: {"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"Hello","finish_reason":"stop"}]}` + "\n\n" +
			doneLine},
	{"/v1/messages", `{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"` + question + `"}]}`,
		"event: ping\ndata: {\"type\": \"ping\"}\n\n", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\"",
		messagesBegin(`{"input_tokens":12,"output_tokens":0}`) +
			"event: content_block_delta\n" + `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}` + "\n\n" +
			messagesEnd(`"end_turn"`, `{"input_tokens":12,"output_tokens":3}`)},
	{"/v1/responses", `{"model":"m","stream":true,"input":"` + question + `"}`, ": keep-alive\n", "event: error\ndata: {\"code\":\"busy\"",
		"event: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","delta":"Hello"}` + "\n\n" +
			"event: response.completed\n" + `data: {"type":"response.completed","response":{"id":"r","status":"completed"}}` + "\n\n"},
}

func TestQueueKeepalive(t *testing.T) {
	t.Parallel()
	for _, c := range queuedStreams {
		t.Run(c.path, func(t *testing.T) {
			t.Parallel()
			next, slow := make(chan struct{}), new(replica)
			slow.script = func(s *session) {
				for {
					if _, ok := s.request(); !ok {
						return
					}
					select {
					case <-next:
						s.say(streamed(c.response))
					case <-slow.over:
						return
					}
				}
			}
			f := serveOneAtATime(t, queueOf(10), setQueueKeepalive, slow)
			first := f.background(asked("first", true))
			eventually(t, "the first is sent", func() bool { return len(slow.requests()) == 1 })
			resp, r := f.openStream(t.Context(), c.path, c.body)
			if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" ||
				resp.Header.Get("X-Request-Id") == "" || resp.Header.Get("X-Warmroute-Reason") != "queued" {
				t.Errorf("status %d, header %v", resp.StatusCode, resp.Header)
			}
			f.awaitQueued(1)
			readKeepAlives(t, r, c.keepAlive, 3)
			next <- struct{}{}
			<-first
			readKeepAlives(t, r, c.keepAlive, 1)
			next <- struct{}{}
			if got := readWithoutKeepAlives(t, r, c.keepAlive); got != c.response {
				t.Errorf("got %q, want %q", got, c.response)
			}
			f.awaitIdle()
		})
	}
}

func TestErrorsAfterQueueKeepalive(t *testing.T) {
	t.Parallel()
	queue := queueOf(10)
	queue.NoneReadyTimeout, queue.BusyTimeout = 10*testKeepalive, 10*testKeepalive
	for _, c := range queuedStreams {
		t.Run("queue timeout "+c.path, func(t *testing.T) {
			t.Parallel()
			g := newGated()
			f := serveOneAtATime(t, queue, setQueueKeepalive, &g.replica)
			first := f.background(asked("first", true))
			eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
			_, r := f.openStream(t.Context(), c.path, c.body)
			readKeepAlives(t, r, c.keepAlive, 1)
			if got := readWithoutKeepAlives(t, r, c.keepAlive); !strings.HasPrefix(got, c.errorEvent) || !strings.Contains(got, "try again in ") {
				t.Errorf("got %q, want it to begin with %q", got, c.errorEvent)
			}
			f.awaitMetric(fmt.Sprintf(`warmroute_requests_total{backend="",code="429",endpoint=%q,model="m"} 1`, c.path))
			g.next <- struct{}{}
			<-first
			f.awaitIdle()
		})
	}
	// A replica that sends no header for a while, then responds with...
	for name, c := range map[string]struct{ first, second, want string }{
		"an error that another replica does not have": {answered("500 Internal Server Error", "{}"), streamed(goodStream), goodStream},
		"an error on every replica": {answered("500 Internal Server Error", "{}"), answered("500 Internal Server Error", "{}"),
			`data: {"error":{"message":"`},
		"an error of the client's": {answered("400 Bad Request", `{"error":{"message":"too long","type":"BadRequestError","code":400}}`), "",
			`data: {"error":{"message":"too long"`},
		"a response, not a stream": {answered("200 OK", whole), "", `data: {"error":{"message":"the replica did not respond with a stream"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next := make(chan struct{})
			slow := &replica{script: func(s *session) {
				s.request()
				<-next
				s.say(c.first)
			}}
			f := serve(t, setQueueKeepalive, slow, &replica{script: always(c.second)})
			_, r := f.openStream(t.Context(), "/v1/chat/completions", askStream)
			readKeepAlives(t, r, ": keep-alive\n", 2)
			close(next)
			if got := readWithoutKeepAlives(t, r, ": keep-alive\n"); !strings.HasPrefix(got, c.want) {
				t.Errorf("got %q, want it to begin with %q", got, c.want)
			}
			f.awaitIdle()
		})
	}
}

// TestEndDuringQueueKeepalive ends queued requests that have the header of a stream.
func TestEndDuringQueueKeepalive(t *testing.T) {
	t.Parallel()
	open := func(t *testing.T) (f *fleet, r *bufio.Reader, disconnect func()) {
		g := newGated()
		f = serveOneAtATime(t, queueOf(10), setQueueKeepalive, &g.replica)
		first := f.background(asked("first", true))
		eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
		t.Cleanup(func() {
			g.next <- struct{}{}
			<-first
			f.awaitIdle()
		})
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		_, r = f.openStream(ctx, "/v1/chat/completions", askStream)
		readKeepAlives(t, r, ": keep-alive\n", 1)
		return f, r, cancel
	}
	t.Run("by the client", func(t *testing.T) {
		f, _, disconnect := open(t)
		disconnect()
		f.awaitQueued(0)
		f.awaitMetric(`warmroute_disconnected_requests_total{phase="queued"} 1`)
	})
	t.Run("by an operator", func(t *testing.T) {
		f, r, _ := open(t)
		eventually(t, "one request is queued", func() bool { return len(f.proxy.Activity().OldestRequests(10, 10).Queued) == 1 })
		f.proxy.Activity().Cancel(f.proxy.Activity().OldestRequests(10, 10).Queued[0].Handle)
		if got := readWithoutKeepAlives(t, r, ": keep-alive\n"); !strings.Contains(got, "an operator has cancelled the request") {
			t.Errorf("got %q", got)
		}
	})
}

// TestQueueKeepaliveOfOtherRequests checks that responses that are no streams are not begun early.
func TestQueueKeepaliveOfOtherRequests(t *testing.T) {
	t.Parallel()
	queue := queueOf(10)
	queue.NoneReadyTimeout, queue.BusyTimeout = 5*testKeepalive, 5*testKeepalive
	g := newGated()
	f := serveOneAtATime(t, queue, setQueueKeepalive, &g.replica)
	first := f.background(asked("first", true))
	eventually(t, "the first is sent", func() bool { return len(g.requests()) == 1 })
	resp, body := f.post("/v1/chat/completions", asked("second", false))
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" || !strings.HasPrefix(body, `{"error":`) {
		t.Errorf("got %d, %v, %q", resp.StatusCode, resp.Header, body)
	}
	g.next <- struct{}{}
	<-first
	f.awaitIdle()
}
