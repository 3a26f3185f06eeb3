package proxy

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/router"
)

// only waits for the one request in flight to be in a phase, and returns it.
func (f *fleet) only(phase Phase) (r InFlight) {
	f.t.Helper()
	eventually(f.t, "one request is in the phase "+phase.String(), func() bool {
		listed := f.proxy.Live().Requests(10, 10)
		if listed.All != 1 || listed.Oldest[0].Phase != phase {
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
	f.counts(`warmroute_aborts_total{phase="cancelled"} 1`)
	f.settled()
	eventually(f.t, "it is in flight no more", func() bool { return f.proxy.inFlight.Load() == 0 })
	if got := f.proxy.Live().Requests(10, 10); got.All != 0 || len(got.Oldest)+len(got.Held) != 0 {
		f.t.Errorf("still listed: %+v", got)
	}
	if strings.Contains(f.exposition(), `code="499"`) {
		f.t.Error("it is counted as a client that left, too")
	}
}

const isCancelled = `"code":"cancelled","src":"warmroute"`

func TestCancelBeforeAnythingIsCommittedIsAnError(t *testing.T) {
	for _, c := range []struct {
		name   string
		body   string
		hold   router.QueueSettings
		change func(*Options)
		script func(*session)
		phase  Phase
		asked  int // requests that replicas see
	}{
		{"held", asked("second", false), oneAtATime(10), nil, hang(), Held, 1},
		{"while it waits to be tried again", askWhole, holdsForAMinute,
			func(o *Options) { o.RetryShare, o.RetryPerSecond = 0.001, 0 }, once(), Held, 1},
		{"while it waits for a place", askWhole, holdsForAMinute, nil, always(answered("503 Service Unavailable", "full")), Held, 1},
		{"before the header", askStream, router.QueueSettings{}, nil, hang(), FirstToken, 1},
		{"between header and first event", askStream, router.QueueSettings{}, nil, hang(sseHead), FirstToken, 1},
		{"in a held answer", askWhole, router.QueueSettings{}, nil, hang(answered("200 OK", whole)[:200]), FirstToken, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			gone := make(chan struct{}, 10)
			r := &replica{script: func(s *session) { c.script(s); gone <- struct{}{} }}
			f := serveHolding(t, c.hold, c.change, r)
			var first <-chan answer
			if c.name == "held" { // by another, which fills the replica
				first = f.background(asked("first", true))
				f.only(FirstToken)
			}
			done := f.background(c.body)
			eventually(t, "the replica was asked", func() bool { return len(r.requests()) == c.asked })
			var listed InFlight
			eventually(t, "it is in its phase", func() bool {
				all := f.proxy.Live().Requests(10, 10)
				if all.All == 0 {
					return false
				}
				listed = all.Oldest[len(all.Oldest)-1]
				return listed.Phase == c.phase && (c.phase != Held || f.router.WaitingRequests() == 1)
			})
			if c.phase == Held && (listed.Backend != "" || listed.MatchedTokens != 0) {
				t.Errorf("it is shown on a backend: %+v", listed)
			}
			if !f.proxy.Live().Cancel(listed.Handle) {
				t.Fatal("not found")
			}
			a := <-done
			if a.err != nil || a.status != http.StatusForbidden || !strings.Contains(a.body, isCancelled) {
				t.Errorf("got %+v", a)
			}
			if first != nil {
				f.proxy.Live().Cancel(f.only(FirstToken).Handle)
				<-first
				<-gone
				f.settled()
				f.counts(`warmroute_aborts_total{phase="cancelled"} 2`)
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

func TestCancelInAnUploadIsAnError(t *testing.T) {
	f := serve(t, func(o *Options) { o.BodyIdle = time.Minute }, &replica{script: once()})
	conn := f.dial()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
	if !f.proxy.Live().Cancel(f.only(Uploading).Handle) {
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

func TestCancelOfAStreamIsAnErrorEvent(t *testing.T) {
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
			phase := FirstToken
			if len(says) > 1 {
				phase = Answering
			}
			f.proxy.Live().Cancel(f.only(phase).Handle)
			rest, err := io.ReadAll(br)
			if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(rest), isCancelled) || !strings.HasSuffix(string(rest), doneLine) {
				t.Errorf("got %d %s, %v", resp.StatusCode, rest, err)
			}
			<-gone
			f.cancelled()
		})
	}
}

func TestCancelOfALongAnswerCutsIt(t *testing.T) {
	long := strings.Repeat("x", 2<<20)
	f := serve(t, nil, &replica{script: hang(answered("200 OK", long)[:3<<19])})
	done := f.background(askWhole)
	f.proxy.Live().Cancel(f.only(Answering).Handle)
	if a := <-done; a.err == nil {
		t.Errorf("a part was taken for the whole answer: %d bytes", len(a.body))
	}
	f.cancelled()
}

// Not before the minute that it may take otherwise.
func TestCancelDoesNotWaitForAClientThatDoesNotRead(t *testing.T) {
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
			f.proxy.Live().Cancel(f.only(Answering).Handle)
			f.cancelled()
		})
	}
}

func TestCancelOfWhatIsNotThere(t *testing.T) {
	f := serve(t, nil, &replica{script: hang()})
	done := f.background(askWhole, "X-Request-Id", "mine")
	r := f.only(FirstToken)
	for _, handle := range []string{"", "mine", "0", strings.ToUpper(r.Handle) + "A", "+" + r.Handle, "0" + r.Handle, strings.Repeat("z", 100)} {
		if f.proxy.Live().Cancel(handle) {
			t.Errorf("%q was found", handle)
		}
	}
	if !f.proxy.Live().Cancel(r.Handle) || (<-done).status != http.StatusForbidden {
		t.Error("the request itself was not")
	}
	f.cancelled()
	if f.proxy.Live().Cancel(r.Handle) {
		t.Error("it was cancelled after its end")
	}
}

func TestWhatIsListedOfARequest(t *testing.T) {
	f := serve(t, nil, &replica{script: hang(sseHead, chunk(role), chunk(hello))})
	before := time.Now()
	for n := range 2 { // the same twice: each is listed, under a handle of its own
		f.askFrom(askStream)
		eventually(t, "it is answered", func() bool {
			l := f.proxy.Live().Requests(10, 10)
			return l.All == n+1 && l.Oldest[n].Phase == Answering
		})
	}
	listed := f.proxy.Live().Requests(1, 1)
	if listed.All != 2 || len(listed.Oldest) != 1 || len(listed.Held) != 0 {
		t.Fatalf("got %+v", listed)
	}
	both := f.proxy.Live().Requests(2, 0).Oldest
	if both[0].Handle == both[1].Handle || both[0].Arrived.After(both[1].Arrived) {
		t.Errorf("got %+v", both)
	}
	r := both[0]
	if r.Endpoint != "/v1/chat/completions" || r.Model != "m" || r.Backend != "r0" || r.Attempts != 1 || r.PromptTokens < 200 || r.Arrived.Before(before) || r.Key != "" {
		t.Errorf("got %+v", r)
	}
	decisions := f.proxy.Live().Decisions()
	if len(decisions) != 2 || decisions[0].Number != 2 || decisions[1].Handle != r.Handle || decisions[0].Backend != "r0" ||
		decisions[0].MatchedTokens == 0 || decisions[1].MatchedTokens != 0 || decisions[0].Sentence() == "" {
		t.Errorf("got %+v", decisions)
	}
	for _, r := range both {
		f.proxy.Live().Cancel(r.Handle)
	}
}

func TestTheLastDecisionsAreKept(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	for i := range keptDecisions + 3 {
		f.post("/v1/chat/completions", asked(fmt.Sprint(i), false), "X-Request-Id", fmt.Sprint("id-", i))
	}
	got := f.proxy.Live().Decisions()
	if len(got) != keptDecisions || got[0].RequestID != fmt.Sprint("id-", keptDecisions+2) || got[keptDecisions-1].RequestID != "id-3" {
		t.Errorf("got %d, from %s to %s", len(got), got[0].RequestID, got[len(got)-1].RequestID)
	}
}

func TestThePulseOfAnsweredRequests(t *testing.T) {
	f := serve(t, nil, &replica{script: always(streamed(goodStream))})
	for range 4 {
		f.post("/v1/chat/completions", askStream)
	}
	f.settled()
	eventually(t, "all have ended", func() bool { return f.proxy.Live().Pulse().PerSecond > 0 && f.proxy.inFlight.Load() == 0 })
	pulse := f.proxy.Live().Pulse()
	// The replica tells of 8 cached tokens of 12.
	if got := pulse.Recent.HitRatio; got < 0.66 || got > 0.67 {
		t.Errorf("hit ratio %v", got)
	}
	if got := pulse.Recent.TTFT; !(got > 0 && got < failsafe.Seconds()) {
		t.Errorf("TTFT %v", got)
	}
	if of := pulse.Backends[f.backends[0]]; of.PerSecond <= 0 || of.HitRatio < 0.66 {
		t.Errorf("of the backend: %+v", of)
	}
	if n := len(pulse.TTFT); n != pulsePoints || len(pulse.HitRatio) != n {
		t.Errorf("%d points", n)
	}
}

// A stream without usage says nothing of cached tokens, which is not that there are none.
func TestStreamsWithoutUsageCountAsPredicted(t *testing.T) {
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
	f.settled()
	pulse := f.proxy.Live().Pulse()
	if got := pulse.Recent.HitRatio; got < 0.5 {
		t.Errorf("hit ratio %v", got)
	}
}

func TestThePulseCountsWhatWasNeverSent(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	f.post("/v1/chat/completions", askWhole)
	eventually(t, "it has ended", func() bool { return f.proxy.inFlight.Load() == 0 && f.proxy.Live().Pulse().PerSecond > 0 })
	if pulse := f.proxy.Live().Pulse(); pulse.Failed != 0 {
		t.Errorf("nothing has failed: %+v", pulse.Recent)
	}
	for range 3 {
		f.post("/v1/chat/completions", `{"model":"unknown","messages":[]}`)
	}
	eventually(t, "all four count", func() bool { return f.proxy.Live().Pulse().Failed == 0.75 })
	if of := f.proxy.Live().Pulse().Backends[f.backends[0]]; of.Failed != 0 || of.PerSecond == 0 {
		t.Errorf("of the backend: %+v", of)
	}
}

func TestThePulseForgetsWhatIsLongAgo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLive()
		b := &backends.Backend{Name: "b"}
		ended := func(ttft time.Duration, cached int) {
			l.pulse.ended(b, time.Now(), &metrics.Request{Code: http.StatusOK, TTFT: ttft, PromptTokens: 100, PredictedTokens: cached}, false)
		}
		time.Sleep(time.Minute)
		for _, ttft := range []time.Duration{10, 20, 30, 9000} {
			ended(ttft*time.Millisecond, 75)
		}
		time.Sleep(PulseStep)
		now := l.Pulse()
		if now.Recent.HitRatio != 0.75 || math.Abs(now.Recent.TTFT-0.020) > 0.003 || math.Abs(now.PerSecond-4./30) > 0.03 || now.Backends[b].HitRatio != 0.75 {
			t.Errorf("got %+v, %+v", now.Recent, now.Backends[b])
		}
		if last := len(now.TTFT) - 1; math.IsNaN(now.TTFT[last-1]) || !math.IsNaN(now.TTFT[last]) || now.HitRatio[last-1] != 0.75 {
			t.Errorf("got %v", now.TTFT)
		}
		time.Sleep(time.Minute)
		later := l.Pulse()
		if later.PerSecond != 0 || !math.IsNaN(later.Recent.HitRatio) || later.Backends[b].PerSecond != 0 || math.IsNaN(later.TTFT[pulsePoints-14]) {
			t.Errorf("a minute later: %+v, %+v, %v", later.Recent, later.Backends[b], later.TTFT)
		}
		time.Sleep(5 * time.Minute) // its places are others' by now
		ended(time.Millisecond, 50)
		if last := l.Pulse(); last.Recent.HitRatio != 0.5 || slices.ContainsFunc(last.HitRatio[:pulsePoints-1], func(r float64) bool { return !math.IsNaN(r) }) {
			t.Errorf("six minutes later: %+v", last)
		}
	})
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
	f.proxy.Live().Cancel(f.only(Uploading).Handle)
	if got := <-uploading; !strings.HasPrefix(got, "2 403 ") || !strings.Contains(got, isCancelled) {
		t.Errorf("in an upload: %s", got)
	}
	f.cancelled()
	streaming := send(strings.NewReader(askStream))
	f.proxy.Live().Cancel(f.only(Answering).Handle)
	if got := <-streaming; !strings.HasPrefix(got, "2 200 ") || !strings.Contains(got, isCancelled) || !strings.HasSuffix(got, doneLine+"<nil>") {
		t.Errorf("in a stream: %s", got)
	}
	f.counts(`warmroute_aborts_total{phase="cancelled"} 2`)
}
