package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// hang reads a request, says what there is to say, and nothing more.
func hang(says ...string) func(*session) {
	return func(s *session) {
		if _, ok := s.request(); ok {
			s.say(says...)
			s.closed()
		}
	}
}

// hangs tells the router that a backend answers no checks any more.
func (f *fleet) hangs(slot int) {
	f.backends[slot].SetState(backends.Down)
	f.router.ChecksTimedOut(f.backends[slot])
}

func TestWhatWaitsForAHungReplicaIsAnsweredByAnother(t *testing.T) {
	for _, c := range []struct {
		name   string
		stream bool
		says   []string
	}{
		{"a stream, before its header", true, nil},
		{"a stream, after its header", true, []string{sseHead}},
		{"a stream, after a comment", true, []string{sseHead, chunk(": keep-alive\n\n")}},
		{"a whole answer", false, nil},
		{"a whole answer, in its midst", false, []string{answered("200 OK", whole)[:200]}},
	} {
		t.Run(c.name, func(t *testing.T) {
			body, good, want := askWhole, answered("200 OK", whole), whole
			if c.stream {
				body, good, want = askStream, streamed(goodStream), goodStream
			}
			first := &replica{script: hang(c.says...)}
			f := serve(t, nil, first, &replica{script: always(good)})
			done := f.background(body)
			eventually(t, "it was sent", func() bool { return len(first.requests()) == 1 })
			f.hangs(0)
			if a := <-done; a.body != want || a.header.Get("X-Warmroute-Attempts") != "2" {
				t.Errorf("got %+v", a)
			}
			f.counts(`warmroute_retries_total{reason="stuck"} 1`)
		})
	}
}

func TestWhatMayNotMoveFromAHungReplicaEndsWithA504(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"by the operator's word": func(o *Options) { o.RetryStalled = false },
		"for want of attempts":   func(o *Options) { o.Attempts = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			first, other := &replica{script: hang()}, &replica{script: always(answered("200 OK", whole))}
			f := serve(t, func(o *Options) { o.FirstByte = 50 * time.Millisecond; change(o) }, first, other)
			done := f.background(askWhole) // which has no limit of its own
			eventually(t, "it was sent", func() bool { return len(first.requests()) == 1 })
			f.hangs(0)
			if a := <-done; a.status != http.StatusGatewayTimeout || !strings.Contains(a.body, "first_byte_timeout") {
				t.Errorf("got %+v", a)
			}
			if len(other.requests()) != 0 {
				t.Error("another was asked")
			}
		})
	}
}

func TestACommittedStreamStaysWhereItIs(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	f := serve(t, nil, &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role), chunk(hello))
		close(begun)
		<-goOn
		s.say(chunk(doneLine), "0\r\n\r\n")
	}}, &replica{script: always(streamed(goodStream))})
	done := f.background(askStream)
	<-begun
	eventually(t, "it is committed", func() bool {
		return strings.Contains(f.exposition(), `warmroute_backend_in_flight{backend="r0"} 1`) && f.proxy.bodies.held.Load() == 0
	})
	f.hangs(0)
	close(goOn)
	if a := <-done; a.header.Get("X-Warmroute-Backend") != "r0" || !strings.HasSuffix(a.body, doneLine) {
		t.Errorf("got %+v", a)
	}
}

func TestAFirstEventThatDoesNotComeIsTriedElsewhereIfSetSo(t *testing.T) {
	f := serve(t, func(o *Options) { o.FirstByte, o.RetryTimeouts = 50*time.Millisecond, true },
		&replica{script: hang(sseHead)}, &replica{script: always(streamed(goodStream))})
	if resp, got := f.post("/v1/chat/completions", askStream); got != goodStream {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	f.counts(`warmroute_retries_total{reason="first_byte_timeout"} 1`)
}

// A replica that fails all it is sent is asked last, and is found out when it
// has healed.
func TestAReplicaThatFailsGetsLittleUntilItHeals(t *testing.T) {
	var healed = make(chan struct{})
	failing := &replica{}
	failing.script = func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			select {
			case <-healed:
				s.say(answered("200 OK", whole))
			default:
				s.say(answered("500 Internal Server Error", "x"))
			}
		}
	}
	f := serve(t, nil, failing, &replica{script: always(answered("200 OK", whole))})
	if err := f.router.Configure(router.Options{
		Policy: "prefix", PollInterval: time.Hour, Breaker: router.BreakerSettings{Failures: 3, Open: 100 * time.Millisecond},
	}); err != nil {
		t.Fatal(err)
	}
	one := func(i int) string {
		resp, got := f.post("/v1/chat/completions", asked(fmt.Sprint(i), false))
		if got != whole {
			t.Fatalf("got %d %q", resp.StatusCode, got)
		}
		return resp.Header.Get("X-Warmroute-Backend")
	}
	for i := range 3 {
		one(i)
	}
	f.counts(`warmroute_backend_breaker_state{backend="r0"} 2`)
	f.counts(`warmroute_backend_breaker_opens_total{backend="r0"} 1`)
	close(healed)
	eventually(t, "it gets a request again", func() bool { return one(100) == "r0" })
	f.counts(`warmroute_backend_breaker_state{backend="r0"} 0`)
}
