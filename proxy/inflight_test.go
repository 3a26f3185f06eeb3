package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/activity"
	"warmroute/proxy/clientconn"
	"warmroute/proxy/relay"
	"warmroute/router"
)

// only waits for the one request in flight to be in a phase, and returns it.
func (f *fleet) only(phase activity.Phase) (r activity.InFlightRequest) {
	f.t.Helper()
	eventually(f.t, "one request is in the phase "+phase.String(), func() bool {
		listed := f.proxy.Activity().OldestRequests(10, 10)
		if listed.Total != 1 || listed.Oldest[0].Phase != phase {
			return false
		}
		r = listed.Oldest[0]
		return true
	})
	return r
}

// cancelled is what is left of a request that was cancelled.
func (f *fleet) cancelled() {
	f.t.Helper()
	f.awaitMetric(`warmroute_cancelled_requests_total 1`)
	f.awaitIdle()
	eventually(f.t, "it is in flight no more", func() bool { return f.proxy.inFlight.Load() == 0 })
	if got := f.proxy.Activity().OldestRequests(10, 10); got.Total != 0 || len(got.Oldest)+len(got.Queued) != 0 {
		f.t.Errorf("still listed: %+v", got)
	}
	if strings.Contains(f.exposition(), `code="499"`) {
		f.t.Error("it is counted as a client that left, too")
	}
}

const isCancelled = `"code":"cancelled","src":"warmroute"`

func TestCancelBeforeResponse(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		body   string
		hold   router.QueueSettings
		change func(*Options)
		script func(*session)
		phase  activity.Phase
		asked  int // requests that replicas see
	}{
		{"held", asked("second", false), queueOf(10), nil, hang(), activity.Queued, 1},
		{"while it waits to be tried again", askWhole, queueForAMinute,
			func(o *Options) { o.Retry.Share, o.Retry.PerSecond = 0.001, 0 }, once(), activity.Queued, 1},
		{"while it waits for a place", askWhole, queueForAMinute, nil, always(answered("503 Service Unavailable", "full")), activity.Queued, 1},
		{"before the header", askStream, router.QueueSettings{}, nil, hang(), activity.FirstToken, 1},
		{"between header and first event", askStream, router.QueueSettings{}, nil, hang(sseHead), activity.FirstToken, 1},
		{"in a buffered response", askWhole, router.QueueSettings{}, nil, hang(answered("200 OK", whole)[:200]), activity.FirstToken, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			gone := make(chan struct{}, 10)
			r := &replica{script: func(s *session) { c.script(s); gone <- struct{}{} }}
			f := serveOneAtATime(t, c.hold, c.change, r)
			var first <-chan answer
			if c.name == "held" { // by another, which fills the replica
				first = f.background(asked("first", true))
				f.only(activity.FirstToken)
			}
			done := f.background(c.body)
			eventually(t, "the replica was asked", func() bool { return len(r.requests()) == c.asked })
			var listed activity.InFlightRequest
			eventually(t, "it is in its phase", func() bool {
				all := f.proxy.Activity().OldestRequests(10, 10)
				if all.Total == 0 {
					return false
				}
				listed = all.Oldest[len(all.Oldest)-1]
				return listed.Phase == c.phase && (c.phase != activity.Queued || f.router.CountWaiting() == 1)
			})
			if c.phase == activity.Queued && (listed.Backend != "" || listed.MatchedTokens != 0) {
				t.Errorf("it is shown on a backend: %+v", listed)
			}
			got := f.proxy.Activity().OldestRequests(10, 10).Queued
			if c.phase == activity.Queued && (len(got) != 1 || got[0].Model != "m") || c.phase != activity.Queued && len(got) != 0 {
				t.Errorf("queued by model: %v", got)
			}
			if !f.proxy.Activity().Cancel(listed.Handle) {
				t.Fatal("not found")
			}
			a := <-done
			if a.err != nil || a.status != http.StatusForbidden || !strings.Contains(a.body, isCancelled) {
				t.Errorf("got %+v", a)
			}
			if first != nil {
				f.proxy.Activity().Cancel(f.only(activity.FirstToken).Handle)
				<-first
				<-gone
				f.awaitIdle()
				f.awaitMetric(`warmroute_cancelled_requests_total 2`)
				return
			}
			<-gone
			f.cancelled()
			if n := len(r.requests()); n != c.asked {
				t.Errorf("the replica was asked %d times, want %d", n, c.asked)
			}
		})
	}
}

func TestCancelDuringUpload(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyIdle = time.Minute }, &replica{script: once()})
	conn := f.dial()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
	if !f.proxy.Activity().Cancel(f.only(activity.Uploading).Handle) {
		t.Fatal("not found")
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusForbidden || !strings.Contains(string(body), isCancelled) {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	conn.Close()
	f.cancelled()
}

func TestCancelStream(t *testing.T) {
	for name, says := range map[string][]string{
		"in mid-stream":             {sseHead, chunk(role), chunk(hello)},
		"after keep-alive comments": {sseHead},
	} {
		t.Run(name, func(t *testing.T) {
			gone := make(chan struct{})
			f := serve(t, func(o *Options) { o.Keepalive = time.Millisecond }, &replica{script: func(s *session) {
				hang(says...)(s)
				close(gone)
			}})
			resp, br := f.stream(askStream)
			phase := activity.FirstToken
			if len(says) > 1 {
				phase = activity.Responding
			}
			f.proxy.Activity().Cancel(f.only(phase).Handle)
			rest, err := io.ReadAll(br)
			if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(rest), isCancelled) ||
				!strings.HasSuffix(string(rest), doneLine) {
				t.Errorf("got %d %s, %v", resp.StatusCode, rest, err)
			}
			<-gone
			f.cancelled()
		})
	}
}

func TestCancelLongResponse(t *testing.T) {
	long := strings.Repeat("x", 2<<20)
	f := serve(t, nil, &replica{script: hang(answered("200 OK", long)[:3<<19])})
	done := f.background(askWhole)
	f.proxy.Activity().Cancel(f.only(activity.Responding).Handle)
	if a := <-done; a.err == nil {
		t.Errorf("a part was taken for the whole answer: %d bytes", len(a.body))
	}
	f.cancelled()
}

// Not before the minute that it may take otherwise.
func TestCancelWithBlockedClient(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ask    string
		script func(*session)
	}{
		"stream":       {askStream, endless},
		"whole answer": {askWhole, once(answered("200 OK", strings.Repeat("x", 32<<20)))},
	} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, func(o *Options) { o.WriteIdle = time.Minute }, &replica{script: func(s *session) { c.script(s); s.closed() }})
			f.askFrom(c.ask)
			f.proxy.Activity().Cancel(f.only(activity.Responding).Handle)
			f.cancelled()
		})
	}
}

func TestCancelUnknownHandle(t *testing.T) {
	f := serve(t, nil, &replica{script: hang()})
	done := f.background(askWhole, "X-Request-Id", "mine")
	r := f.only(activity.FirstToken)
	for _, handle := range []string{"", "mine", "0", strings.ToUpper(r.Handle) + "A", "+" + r.Handle, "0" + r.Handle,
		strings.Repeat("z", 100)} {
		if f.proxy.Activity().Cancel(handle) {
			t.Errorf("%q was found", handle)
		}
	}
	if !f.proxy.Activity().Cancel(r.Handle) || (<-done).status != http.StatusForbidden {
		t.Error("the request itself was not")
	}
	f.cancelled()
	if f.proxy.Activity().Cancel(r.Handle) {
		t.Error("it was cancelled after its end")
	}
}

func TestRequestListing(t *testing.T) {
	f := serve(t, nil, &replica{script: hang(sseHead, chunk(role), chunk(hello))})
	before := time.Now()
	for n := range 2 { // the same twice: each is listed, under a handle of its own
		f.askFrom(askStream)
		eventually(t, "it is answered", func() bool {
			l := f.proxy.Activity().OldestRequests(10, 10)
			return l.Total == n+1 && l.Oldest[n].Phase == activity.Responding
		})
	}
	listed := f.proxy.Activity().OldestRequests(1, 1)
	if listed.Total != 2 || len(listed.Oldest) != 1 || len(listed.Queued) != 0 {
		t.Fatalf("got %+v", listed)
	}
	both := f.proxy.Activity().OldestRequests(2, 0).Oldest
	if both[0].Handle == both[1].Handle || both[0].Arrived.After(both[1].Arrived) {
		t.Errorf("got %+v", both)
	}
	r := both[0]
	if r.Endpoint != "/v1/chat/completions" || r.Model != "m" || r.Backend != "r0" || r.Attempts != 1 || r.PromptTokens < 200 ||
		r.Arrived.Before(before) || r.Key != "" {
		t.Errorf("got %+v", r)
	}
	decisions := f.proxy.Activity().Decisions()
	if len(decisions) != 2 || decisions[0].Number != 2 || decisions[1].RequestID != r.RequestID || decisions[0].Backend != "r0" ||
		decisions[0].MatchedTokens == 0 || decisions[1].MatchedTokens != 0 || decisions[0].Explanation() == "" {
		t.Errorf("got %+v", decisions)
	}
	for _, r := range both {
		f.proxy.Activity().Cancel(r.Handle)
	}
}

func TestDecisionRecords(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	for i := range 3 {
		f.post("/v1/chat/completions", asked(fmt.Sprint(i), false), "X-Request-Id", fmt.Sprint("id-", i))
	}
	got := f.proxy.Activity().Decisions()
	if len(got) != 3 || got[0].RequestID != "id-2" || got[2].RequestID != "id-0" || got[0].Model != "m" || got[0].Attempt != 1 ||
		got[0].Backend == "" {
		t.Errorf("got %+v", got)
	}
}

func TestStatsOfServedRequests(t *testing.T) {
	f := serve(t, nil, &replica{script: always(streamed(goodStream))})
	for range 4 {
		f.post("/v1/chat/completions", askStream)
	}
	f.awaitIdle()
	eventually(t, "all have ended", func() bool { return f.proxy.Activity().Stats().PerSecond > 0 && f.proxy.inFlight.Load() == 0 })
	pulse := f.proxy.Activity().Stats()
	// The replica tells of 8 cached tokens of 12.
	if got := pulse.Recent.HitRatio; got < 0.66 || got > 0.67 {
		t.Errorf("hit ratio %v", got)
	}
	if got := pulse.Recent.TTFT50; !(got > 0 && got < failsafe.Seconds()) {
		t.Errorf("TTFT %v", got)
	}
	if of := pulse.Backends[f.backends[0]]; of.PerSecond <= 0 || of.HitRatio < 0.66 {
		t.Errorf("of the backend: %+v", of)
	}
	if of := pulse.Models["m"]; of != pulse.Recent {
		t.Errorf("of the model: %+v", of)
	}
}

// A stream without usage says nothing of cached tokens, which is not that there are none.
func TestStatsOfStreamsWithoutUsage(t *testing.T) {
	f := serve(t, nil, &replica{script: func(s *session) {
		for answer := streamed(goodStream); ; answer = streamed(role, hello, world, stop, doneLine) {
			if _, ok := s.request(); !ok {
				return
			}
			s.say(answer)
		}
	}})
	for range 8 { // the first answer tells of 8 cached tokens of 12
		f.post("/v1/chat/completions", askStream)
	}
	f.awaitIdle()
	pulse := f.proxy.Activity().Stats()
	if got := pulse.Recent.HitRatio; got < 0.5 {
		t.Errorf("hit ratio %v", got)
	}
}

func TestStatsOfRejectedRequests(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole)
	eventually(t, "it has ended", func() bool { return f.proxy.inFlight.Load() == 0 && f.proxy.Activity().Stats().PerSecond > 0 })
	if pulse := f.proxy.Activity().Stats(); pulse.Failed != 0 {
		t.Errorf("nothing has failed: %+v", pulse.Recent)
	}
	for range 3 {
		f.post("/v1/chat/completions", `{"model":"unknown","messages":[]}`)
	}
	eventually(t, "all four count", func() bool { return f.proxy.Activity().Stats().Failed == 0.75 })
	if of := f.proxy.Activity().Stats().Backends[f.backends[0]]; of.Failed != 0 || of.PerSecond == 0 {
		t.Errorf("of the backend: %+v", of)
	}
}

func TestCancelOverHTTP2(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyIdle = time.Minute }, &replica{script: hang(sseHead, chunk(role), chunk(hello))})
	client, url := f.overHTTP2()
	send := func(body io.Reader) <-chan string {
		got := make(chan string, 1)
		go func() {
			resp, err := client.Post(url+"/v1/chat/completions", "application/json", body)
			if err != nil {
				got <- err.Error()
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			got <- fmt.Sprint(resp.ProtoMajor, " ", resp.StatusCode, " ", string(text), err)
		}()
		return got
	}
	body, upload := io.Pipe()
	defer upload.Close()
	uploading := send(body)
	io.WriteString(upload, "{")
	f.proxy.Activity().Cancel(f.only(activity.Uploading).Handle)
	if got := <-uploading; !strings.HasPrefix(got, "2 403 ") || !strings.Contains(got, isCancelled) {
		t.Errorf("in an upload: %s", got)
	}
	f.cancelled()
	streaming := send(strings.NewReader(askStream))
	f.proxy.Activity().Cancel(f.only(activity.Responding).Handle)
	if got := <-streaming; !strings.HasPrefix(got, "2 200 ") || !strings.Contains(got, isCancelled) ||
		!strings.HasSuffix(got, doneLine+"<nil>") {
		t.Errorf("in a stream: %s", got)
	}
	f.awaitMetric(`warmroute_cancelled_requests_total 2`)
}

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
func (f *fleet) through(major int, change func(*http.Request) *http.Request) (post func(body string, headers ...string) (*http.Response,
	string, error)) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.proxy.ServeHTTP(w, change(r))
	}))
	server.Listener = clientconn.NewListener(server.Listener, false)
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
	for _, r := range f.proxy.Activity().OldestRequests(10, 0).Oldest {
		f.proxy.Activity().Cancel(r.Handle)
	}
	time.Sleep(20 * time.Millisecond)
}

// Whoever comes next on the connection of a cancelled request is answered as any other.
func TestCancelKeepsConnection(t *testing.T) {
	t.Parallel()
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
				f.awaitMetric(`warmroute_cancelled_requests_total 3`)
				if e := f.exposition(); strings.Contains(e, `code="499"`) || strings.Contains(e, `backend="r0",code="403"`) {
					t.Error("one counts as a client that left, or as sent")
				}
			})
		}
	}
}

// Not as an empty 200, nor as a stream that seems to have ended well.
func TestApparentDisconnectEndsResponse(t *testing.T) {
	for name, c := range map[string]struct {
		body   string
		script func(*session)
		phase  activity.Phase
	}{
		"before an answer": {askWhole, hang(), activity.FirstToken},
		"in a stream":      {askStream, hang(sseHead, chunk(role), chunk(hello)), activity.Responding},
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
				f.awaitMetric(`warmroute_requests_total{backend="r0",code="499",endpoint="/v1/chat/completions",model="m"} 1`)
			})
		}
	}
}

// proxyHas waits, for a while, for a request in the phase.
func (f *fleet) proxyHas(phase activity.Phase) {
	for end := time.Now().Add(failsafe); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if l := f.proxy.Activity().OldestRequests(1, 0); l.Total == 1 && l.Oldest[0].Phase == phase {
			return
		}
	}
}

// A client that reads, but slowly, has no more time than one that does not.
func TestCancelWithSlowClient(t *testing.T) {
	t.Parallel()
	f := serve(t, func(o *Options) { o.WriteIdle = 4 * time.Second }, &replica{script: func(s *session) {
		once(answered("200 OK", strings.Repeat("x", relay.MaxBufferedBytes-1)))(s)
		s.closed()
	}})
	conn := f.dial()
	conn.SetReadBuffer(16 << 10)
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askWhole), askWhole)
	f.proxy.Activity().Cancel(f.only(activity.Responding).Handle)
	piece := make([]byte, 16<<10)
	var got, n int
	var err error
	for ; err == nil; got += n {
		time.Sleep(50 * time.Millisecond)
		n, err = conn.Read(piece)
	}
	if got >= relay.MaxBufferedBytes-1 {
		t.Errorf("it got the whole answer: %d bytes, then %v", got, err)
	}
	f.cancelled()
}

func TestFinishedRequestIsRecorded(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole, "X-Request-Id", "mine")
	f.post("/v1/chat/completions", `{"model":"unknown","messages":[]}`, "X-Request-Id", "theirs")
	f.awaitIdle()
	eventually(t, "both are kept", func() bool { return f.proxy.Activity().FindFinished(activity.FinishedFilter{}, 0).Finished == 2 })
	got := f.proxy.Activity().FindFinished(activity.FinishedFilter{ID: "mine"}, 10)
	if got.Found != 1 || got.Finished != 2 {
		t.Fatalf("got %+v", got)
	}
	r := got.Requests[0]
	if r.Code != 200 || r.Backend != f.backends[0].Name || r.Model == "" || r.Reason == "" || r.Attempts != 1 ||
		r.Endpoint != "/v1/chat/completions" ||
		r.Tokens.Prompt != 12 || r.Tokens.Cached != 8 || r.Tokens.Output == 0 || r.Times.Total <= 0 || r.Times.Overhead <= 0 {
		t.Errorf("got %+v", r)
	}
	refused := f.proxy.Activity().FindFinished(activity.FinishedFilter{MinStatus: 404, MaxStatus: 404}, 10)
	if refused.Found != 1 || refused.Requests[0].ID != "theirs" || refused.Requests[0].Backend != "" {
		t.Errorf("got %+v", refused)
	}
}
