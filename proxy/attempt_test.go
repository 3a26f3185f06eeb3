package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/router"
)

// staleOnce closes the first connection on its second request, as a server does
// whose idle timer runs out at that moment, and answers everything else.
func staleOnce(s *session) {
	for n := 1; ; n++ {
		if _, ok := s.request(); !ok || n == 2 && s.n == 1 {
			return
		}
		s.say(answered("200 OK", whole))
	}
}

// staleTimeout has the backends reached by transports with that StaleTimeout: a busy
// machine may take longer than the default to notice the end of a connection, or the
// write of a request. Idle connections are kept for longer than that machine needs for the next request.
func (f *fleet) staleTimeout(d time.Duration) {
	for _, b := range f.backends {
		tr := transport.New(transport.Options{URL: b.URL, IdleTimeout: failsafe / 2, StaleTimeout: d})
		f.t.Cleanup(tr.CloseIdleConnections)
		b.SetOptions(backends.Options{Transport: tr})
	}
}

// warm leaves an idle connection to each replica.
func (f *fleet) warm() {
	f.t.Helper()
	for _, b := range f.backends {
		for _, other := range f.backends {
			other.SetState(backends.Down)
		}
		b.SetState(backends.Ready)
		if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusOK {
			f.t.Fatalf("%s: status %d", b.Name, resp.StatusCode)
		}
	}
	for _, b := range f.backends {
		b.SetState(backends.Ready)
	}
	f.awaitIdle()
}

// configureRouter changes the settings of a router.
func configureRouter(r *router.Router, s router.Settings) error {
	apply, err := r.PrepareSettings(s)
	if err == nil {
		apply()
	}
	return err
}

// breakAtOnce has one failure open a backend's breaker.
func breakAtOnce(t *testing.T, f *fleet) {
	t.Helper()
	breaker := router.BreakerSettings{Failures: 1, OpenTime: time.Hour}
	disaggregation := router.DisaggregationSettings{Lease: 30 * time.Second, MinUncachedTokens: 1}
	if err := configureRouter(f.router, router.Settings{Policy: "prefix", PollInterval: time.Hour, Breaker: breaker,
		Disaggregation: disaggregation}); err != nil {
		t.Fatal(err)
	}
}

func TestRetryAfterStaleConnection(t *testing.T) {
	stale := &replica{script: staleOnce}
	other := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, stale, other)
	f.staleTimeout(failsafe)
	breakAtOnce(t, f)
	f.post("/v1/chat/completions", askWhole)
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if answer != whole || resp.Header.Get("X-Warmroute-Attempts") != "2" || resp.Header.Get("X-Warmroute-Backend") != "r0" {
		t.Errorf("got %q from %s after %s attempts", answer, resp.Header.Get("X-Warmroute-Backend"), resp.Header.Get("X-Warmroute-Attempts"))
	}
	if len(other.requests()) != 0 {
		t.Error("another backend was asked")
	}
	f.awaitMetric(`warmroute_retries_total{reason="stale_connection"} 1`)
	if s := f.router.Status(f.backends[0]); s.Breaker != router.BreakerClosed || s.Opens != 0 {
		t.Errorf("the breaker is %v after %d opens", s.Breaker, s.Opens)
	}
	if log := f.log.String(); strings.Contains(log, "level=WARN") {
		t.Errorf("logged as a warning: %s", log)
	}
}

// What a replica has worked on for a while is not sent to it again.
func TestResetDuringWorkIsFailure(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*session){
		"reset":  (*session).reset,
		"closed": func(s *session) { s.Conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			var replicas []*replica
			for range 4 {
				replicas = append(replicas, &replica{script: func(s *session) {
					for {
						if _, ok := s.request(); !ok {
							return
						}
						if len(s.replica.requests()) > 1 {
							end(s)
							return
						}
						s.say(answered("200 OK", whole))
					}
				}})
			}
			f := serve(t, nil, replicas...)
			f.staleTimeout(time.Nanosecond) // any work takes longer
			f.warm()
			resp, _ := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != http.StatusBadGateway || resp.Header.Get("X-Warmroute-Attempts") != "3" {
				t.Errorf("got %d after %s attempts", resp.StatusCode, resp.Header.Get("X-Warmroute-Attempts"))
			}
			for i, r := range replicas {
				if got, want := len(r.requests())-1, min(1, max(0, 3-i)); got != want {
					t.Errorf("replica %d was sent the request %d times, want %d", i, got, want)
				}
			}
			f.awaitMetric(`warmroute_retries_total{reason="truncated"} 2`)
			f.awaitMetric(`warmroute_retries_total{reason="stale_connection"} 0`)
		})
	}
}

func TestStaleConnectionIsNotRetriedWithoutBudget(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no budget":   func(o *Options) { o.Retry.Share, o.Retry.PerSecond = 0, 0 },
		"one attempt": func(o *Options) { o.Attempts = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			stale, other := &replica{script: staleOnce}, &replica{script: always(answered("200 OK", whole))}
			f := serve(t, change, stale, other)
			f.staleTimeout(failsafe)
			f.post("/v1/chat/completions", askWhole)
			resp, answer := f.post("/v1/chat/completions", askWhole)
			if resp.StatusCode != http.StatusBadGateway || resp.Header.Get("X-Warmroute-Attempts") != "1" {
				t.Errorf("got %d %s after %s attempts", resp.StatusCode, answer, resp.Header.Get("X-Warmroute-Attempts"))
			}
			if len(stale.requests()) != 2 || len(other.requests()) != 0 {
				t.Errorf("sent %d times, and to the other backend %d times", len(stale.requests())-1, len(other.requests()))
			}
		})
	}
}

// A replica that closes all its idle connections at once, when requests are on
// their way on each: none is lost, and none is sent more than twice.
func TestManyStaleConnections(t *testing.T) {
	t.Parallel()
	const requests = 20
	first := make(chan struct{})
	var warm sync.WaitGroup
	warm.Add(requests)
	r := &replica{script: func(s *session) {
		for n := 1; ; n++ {
			if _, ok := s.request(); !ok || n == 2 && s.n <= requests {
				return
			}
			if s.n <= requests {
				warm.Done()
				<-first
			}
			s.say(answered("200 OK", whole))
		}
	}}
	f := serveWithQueue(t, queueForAMinute, nil, r)
	f.staleTimeout(failsafe)
	f.client.Transport.(*http.Transport).MaxIdleConnsPerHost = requests
	var all []<-chan answer
	for i := range requests {
		all = append(all, f.background(asked(fmt.Sprint(i), false)))
	}
	warm.Wait()
	close(first)
	for _, done := range all {
		<-done
	}
	f.awaitIdle()
	all = all[:0]
	for i := range requests {
		all = append(all, f.background(asked(fmt.Sprint(i), false)))
	}
	for i, done := range all {
		if a := <-done; a.body != whole {
			t.Errorf("request %d got %+v", i, a)
		}
	}
	if n := len(r.requests()); n > 3*requests {
		t.Errorf("the replica saw %d requests, want %d at most", n, 3*requests)
	}
}

// A replica that dies of a request at once cannot be told from one that closed an
// idle connection, until it refuses the next one.
func TestPoisonRequestOnReusedConnections(t *testing.T) {
	t.Parallel()
	script := func(m *mortal, s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			if len(m.requests()) > 1 {
				m.die()
				return
			}
			s.say(answered("200 OK", whole))
		}
	}
	a, b := newMortal(script), newMortal(script)
	c := &replica{script: always(answered("200 OK", whole))}
	f := serveChecked(t, &a.replica, &b.replica, c)
	f.staleTimeout(failsafe)
	f.warm()
	resp, _ := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode < 500 || len(c.requests()) != 1 {
		t.Errorf("got %d, and the third replica saw the request %d times", resp.StatusCode, len(c.requests())-1)
	}
	if log := f.log.String(); !strings.Contains(log, "request was on two replicas that crashed; not retrying") {
		t.Errorf("the log does not say so: %s", log)
	}
}

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

func TestRetryAfterHungReplica(t *testing.T) {
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
			f.awaitMetric(`warmroute_retries_total{reason="stalled"} 1`)
		})
	}
}

func TestHungReplicaStatus504(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Options){
		"by the operator's word": func(o *Options) { o.Retry.Stalled = false },
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

func TestCommittedStreamNotRetried(t *testing.T) {
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
		return strings.Contains(f.exposition(), `warmroute_backend_in_flight{backend="r0"} 1`) && f.proxy.tenants.BodyBytesInUse() == 0
	})
	f.hangs(0)
	close(goOn)
	if a := <-done; a.header.Get("X-Warmroute-Backend") != "r0" || !strings.HasSuffix(a.body, doneLine) {
		t.Errorf("got %+v", a)
	}
}

func TestRetryTimeouts(t *testing.T) {
	t.Parallel()
	f := serve(t, func(o *Options) { o.FirstByte, o.Retry.AfterTimeout = 500*time.Millisecond, true },
		&replica{script: hang(sseHead)}, &replica{script: always(streamed(goodStream))})
	if resp, got := f.post("/v1/chat/completions", askStream); got != goodStream {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	f.awaitMetric(`warmroute_retries_total{reason="first_byte_timeout"} 1`)
}

// A replica that fails all it is sent is asked last, and is found out when it
// has healed.
func TestBreakerLimitsFailingBackend(t *testing.T) {
	t.Parallel()
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
	if err := configureRouter(f.router, router.Settings{
		Policy: "prefix", PollInterval: time.Hour, Breaker: router.BreakerSettings{Failures: 3, OpenTime: time.Second},
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
	requests := 0
	eventually(t, "three requests to the failing one open its breaker", func() bool {
		requests++
		one(requests)
		return f.router.Status(f.backends[0]).Breaker == router.BreakerOpen
	})
	f.awaitMetric(`warmroute_backend_breaker_state{backend="r0"} 2`)
	f.awaitMetric(`warmroute_backend_breaker_opens_total{backend="r0"} 1`)
	close(healed)
	eventually(t, "it gets a request again", func() bool { return one(100) == "r0" })
	f.awaitMetric(`warmroute_backend_breaker_state{backend="r0"} 0`)
}

// hangOn answers requests, and hangs on those whose body has the word until free is
// closed.
func hangOn(word, answer string, free <-chan struct{}) func(*session) {
	return func(s *session) {
		for {
			r, ok := s.request()
			if !ok {
				return
			}
			if strings.Contains(r.body, word) {
				s.until(free)
			}
			s.say(answer)
		}
	}
}

// A replica without token counters that hangs does not show it, and a request that
// is not streaming has no first event.
func TestResponseTimeout(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		path, body string
		says       []string
	}{
		"a chat":         {"/v1/chat/completions", askWhole, nil},
		"embeddings":     {"/v1/embeddings", askWhole, nil},
		"a count":        {"/v1/messages/count_tokens", askWhole, nil},
		"half a header":  {"/v1/chat/completions", askWhole, []string{"HTTP/1.1 200 OK\r\ncontent-ty"}},
		"part of a body": {"/v1/chat/completions", askWhole, []string{answered("200 OK", whole)[:200]}},
	} {
		t.Run(name, func(t *testing.T) {
			first := &replica{script: hang(c.says...)}
			other := &replica{script: always(answered("200 OK", whole))}
			f := serve(t, func(o *Options) { o.Response = 100 * time.Millisecond }, first, other)
			resp, got := f.post(c.path, c.body)
			if anthropic := strings.HasPrefix(c.path, "/v1/messages"); resp.StatusCode != http.StatusGatewayTimeout ||
				!strings.Contains(got, "timeouts.response") || !anthropic && *refused(t, got).Error.Code != "response_timeout" {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			eventually(t, "the connection is closed", func() bool {
				return f.backends[0].Options().Transport.(*transport.Transport).OpenConns() == 0
			})
			if len(other.requests()) != 0 {
				t.Error("another backend was asked")
			}
		})
	}
	t.Run("elsewhere with retry.after_timeout", func(t *testing.T) {
		f := serve(t, func(o *Options) { o.Response, o.Retry.AfterTimeout = 100*time.Millisecond, true },
			&replica{script: hang()}, &replica{script: always(answered("200 OK", whole))})
		// On a busy machine, the second may take longer than the first is given: it has made progress that late.
		f.router.ObserveLoad(f.backends[1], &backends.Load{PolledAt: time.Now().Add(failsafe), TokensKnown: true, GenerationTokens: 1,
			QueuesKnown: true, Running: 100})
		if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %d %q", resp.StatusCode, got)
		}
		f.awaitMetric(`warmroute_retries_total{reason="response_timeout"} 1`)
	})
	t.Run("of a replica that worked before", func(t *testing.T) {
		never := make(chan struct{})
		defer close(never)
		f := serve(t, nil, &replica{script: hangOn("stop here", answered("200 OK", whole), never)})
		if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusOK {
			t.Errorf("got %d", resp.StatusCode)
		}
		limited := *f.proxy.settings.Load()
		limited.Response = 100 * time.Millisecond
		f.proxy.Configure(limited)
		if resp, _ := f.post("/v1/chat/completions", asked("stop here", false)); resp.StatusCode != http.StatusGatewayTimeout {
			t.Errorf("got %d", resp.StatusCode)
		}
	})
	t.Run("not of streams", func(t *testing.T) {
		free := make(chan struct{})
		f := serve(t, func(o *Options) { o.Response = 50 * time.Millisecond }, &replica{script: hangOn("", streamed(goodStream), free)})
		done := f.background(askStream)
		time.Sleep(300 * time.Millisecond)
		close(free)
		if got := <-done; got.body != goodStream {
			t.Errorf("got %+v", got)
		}
	})
}

// As long as the replica makes progress, an answer may take any time.
func TestResponseTimeoutSparesProgress(t *testing.T) {
	t.Parallel()
	const limit = 2 * time.Second
	long := func(f *fleet) <-chan answer { return f.background(asked("take long", false)) }
	// during does something at short intervals, until a request has waited for much
	// longer than it may without progress.
	during := func(step func(i int)) {
		for i, end := 0, time.Now().Add(2*limit+limit/2); time.Now().Before(end); i++ {
			step(i)
			time.Sleep(20 * time.Millisecond)
		}
	}
	for name, progress := range map[string]func(t *testing.T, f *fleet){
		"other answers": func(t *testing.T, f *fleet) {
			during(func(int) {
				if resp, got := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusOK {
					t.Errorf("got %d %s", resp.StatusCode, got)
				}
			})
		},
		"token counters": func(t *testing.T, f *fleet) {
			during(func(i int) {
				f.router.ObserveLoad(f.backends[0], &backends.Load{PolledAt: time.Now(), TokensKnown: true, GenerationTokens: float64(i),
					QueuesKnown: true, Running: 1})
			})
		},
		"KV usage": func(t *testing.T, f *fleet) {
			during(func(i int) {
				f.router.ObserveLoad(f.backends[0], &backends.Load{PolledAt: time.Now(), KVCacheUsage: float64(i%10) / 10})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			free := make(chan struct{})
			r := &replica{script: hangOn("take long", answered("200 OK", whole), free)}
			f := serve(t, func(o *Options) { o.Response = limit }, r)
			done := long(f)
			eventually(t, "it was sent", func() bool { return len(r.requests()) == 1 })
			progress(t, f)
			close(free)
			if got := <-done; got.body != whole {
				t.Errorf("got %+v", got)
			}
		})
	}
	t.Run("a stream", func(t *testing.T) {
		t.Parallel()
		free := make(chan struct{})
		r := &replica{script: func(s *session) {
			got, ok := s.request()
			switch {
			case !ok:
			case strings.Contains(got.body, "take long"):
				s.until(free)
				s.say(answered("200 OK", whole))
			default:
				s.say(sseHead, chunk(role))
				during(func(int) { s.say(chunk(hello)) })
				s.say(chunk(stop), chunk(doneLine), lastChunk)
			}
		}}
		f := serve(t, func(o *Options) { o.Response = limit }, r)
		done := long(f)
		eventually(t, "it was sent", func() bool { return len(r.requests()) == 1 })
		if resp, _ := f.post("/v1/chat/completions", askStream); resp.StatusCode != http.StatusOK {
			t.Errorf("got %d", resp.StatusCode)
		}
		close(free)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
	// Refusals and counts of tokens are made without the engine.
	t.Run("not for answers without the engine", func(t *testing.T) {
		t.Parallel()
		free := make(chan struct{})
		r := &replica{script: func(s *session) {
			for {
				got, ok := s.request()
				switch {
				case !ok:
					return
				case strings.Contains(got.body, "take long"):
					s.until(free)
				case got.URL.Path == "/tokenize":
					s.say(answered("200 OK", `{"count":1}`))
				default:
					s.say(answered("400 Bad Request", `{"error":{"message":"no"}}`))
				}
			}
		}}
		f := serve(t, func(o *Options) { o.Response = 200 * time.Millisecond }, r)
		done := long(f)
		for i := 0; ; i++ {
			select {
			case got := <-done:
				if got.status != http.StatusGatewayTimeout {
					t.Errorf("got %+v", got)
				}
				close(free)
				return
			case <-time.After(20 * time.Millisecond):
				if i > int(failsafe/(20*time.Millisecond)) {
					t.Fatal("it still waits")
				}
				f.post([]string{"/tokenize", "/v1/chat/completions"}[i%2], fmt.Sprintf(`{"model":"m","prompt":"x","messages":[%q]}`, "x"))
			}
		}
	})
}
