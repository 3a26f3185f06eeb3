package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/router"
)

// queueForAMinute is an admission queue that nobody is turned away from.
var queueForAMinute = router.QueueSettings{Requests: 1000, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}

// mortal is a replica that ends, listener and all, when it is told to.
type mortal struct{ replica }

func newMortal(script func(m *mortal, s *session)) *mortal {
	m := &mortal{}
	m.script = func(s *session) { script(m, s) }
	return m
}

// die is kill -9.
func (m *mortal) die() {
	m.listener.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
}

// replyAndDie is what a process does whose end follows its reply. The listener is closed first, or a check that the reply
// causes could still connect. Other than by die, the connection is closed in good order, after the reply, as the script ends.
func (m *mortal) replyAndDie(s *session, reply string) {
	m.listener.Close()
	s.say(reply)
}

// checked makes Suspect a check that finds dead replicas.
func checked(f **fleet) func(*Options) {
	return func(o *Options) {
		o.RecheckHealth = func(b *backends.Backend) {
			c, err := net.Dial("tcp", b.URL.Host)
			if err != nil {
				b.SetState(backends.Down)
			} else {
				c.Close()
			}
			(*f).router.BackendStateChanged(b)
		}
	}
}

func serveChecked(t *testing.T, replicas ...*replica) (f *fleet) {
	f = serveWithQueue(t, queueForAMinute, checked(&f), replicas...)
	return f
}

func dies(m *mortal, s *session) {
	if _, ok := s.request(); ok {
		m.die()
	}
}

// engineDies is what vLLM does when its engine is killed: it says so, and exits.
func engineDies(m *mortal, s *session) {
	if r, ok := s.request(); ok {
		if strings.Contains(r.body, `"stream":true`) {
			m.replyAndDie(s, streamed(dead, doneLine))
		} else {
			m.replyAndDie(s, answered("500 Internal Server Error", `{"error":{"message":"EngineCore encountered an issue","code":500}}`))
		}
	}
}

func TestPoisonRequestStopsAfterTwoCrashes(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]func(*mortal, *session){"reset": dies, "engine": engineDies} {
		for _, body := range []string{askWhole, askStream} {
			t.Run(fmt.Sprint(name, " ", body == askStream), func(t *testing.T) {
				t.Parallel()
				a, b := newMortal(script), newMortal(script)
				c := &replica{script: always(answered("200 OK", whole))}
				f := serveChecked(t, &a.replica, &b.replica, c)
				resp, _ := f.post("/v1/chat/completions", body, "X-Request-Id", "killer-7")
				if resp.StatusCode < 500 || len(c.requests()) != 0 {
					t.Errorf("got %d, and the third replica saw %d requests", resp.StatusCode, len(c.requests()))
				}
				if len(a.requests()) != 1 || len(b.requests()) != 1 {
					t.Errorf("the others saw %d and %d", len(a.requests()), len(b.requests()))
				}
				if log := f.log.String(); !strings.Contains(log, "level=WARN msg=\"request was on two replicas that crashed; not retrying") ||
					!strings.Contains(log, "request_id=killer-7") {
					t.Errorf("the log does not say so: %s", log)
				}
			})
		}
	}
}

// What looks like a killer and is none: the request is answered.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	good := always(answered("200 OK", whole))
	t.Run("two fail and stay alive", func(t *testing.T) {
		f := serveChecked(t, &replica{script: once()}, &replica{script: once()}, &replica{script: good})
		if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %q", got)
		}
	})
	t.Run("the second one alone dies", func(t *testing.T) {
		b := newMortal(dies)
		f := serveChecked(t, &replica{script: once()}, &b.replica, &replica{script: good})
		if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %q", got)
		}
	})
	t.Run("in good order", func(t *testing.T) {
		stops := func(m *mortal, s *session) {
			if _, ok := s.request(); ok {
				m.replyAndDie(s, answered("500 Internal Server Error",
					`{"error":{"message":"cannot schedule new futures after shutdown"}}`))
			}
		}
		a, b := newMortal(stops), newMortal(stops)
		f := serveChecked(t, &a.replica, &b.replica, &replica{script: good})
		if _, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %q", got)
		}
	})
	t.Run("all at once", func(t *testing.T) {
		a, b := newMortal(dies), newMortal(dies)
		c := newMortal(func(m *mortal, s *session) {})
		f := serveChecked(t, &a.replica, &b.replica, &c.replica)
		c.die()
		done := f.background(askWhole)
		f.awaitVerdict() // or one of them looks as well as it would be if the request had killed the others
		f.revive(t, 2, good)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("as many as there are attempts", func(t *testing.T) {
		a, b := newMortal(dies), newMortal(dies)
		var f *fleet
		f = serveWithQueue(t, queueForAMinute, func(o *Options) { checked(&f)(o); o.Attempts = 2 }, &a.replica, &b.replica)
		done := f.background(askWhole)
		f.awaitVerdict()
		f.revive(t, 1, good)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("the only one", func(t *testing.T) {
		a := newMortal(dies)
		f := serveChecked(t, &a.replica)
		done := f.background(askWhole)
		f.awaitQueued(1)
		f.revive(t, 0, good)
		if got := <-done; got.body != whole {
			t.Errorf("got %+v", got)
		}
	})
}

// awaitVerdict waits until a request has waited for the health checks, and is in the admission queue.
func (f *fleet) awaitVerdict() {
	f.t.Helper()
	eventually(f.t, "the request is in the admission queue", func() bool { return f.router.AwaitsModel("m") })
}

// revive starts a replica where a dead one was.
func (f *fleet) revive(t *testing.T, slot int, script func(*session)) {
	back := &replica{script: script}
	back.startAt(t, f.backends[slot].URL.Host)
	t.Cleanup(back.stop)
	f.backends[slot].SetState(backends.Ready)
	f.router.BackendStateChanged(f.backends[slot])
}

func TestRetryBudgetWithFailingFleet(t *testing.T) {
	t.Parallel()
	for status, hold := range map[string]router.QueueSettings{
		"500 Internal Server Error": queueForAMinute,
		"503 Service Unavailable":   {}, // else they wait until a replica has room
	} {
		t.Run(status[:3], func(t *testing.T) {
			answer := answered(status, `{"error":{"message":"no"}}`)
			const requests = 300
			replicas := []*replica{{script: always(answer)}, {script: always(answer)}, {script: always(answer)}}
			f := serveWithQueue(t, hold, nil, replicas...)
			f.client.Transport.(*http.Transport).MaxIdleConnsPerHost = requests
			begun := time.Now()
			var all sync.WaitGroup
			for i := range requests {
				all.Go(func() {
					if resp, _, err := f.try("/v1/chat/completions", asked(fmt.Sprint(i), false)); err != nil || resp.StatusCode < 500 {
						t.Errorf("request %d: %v, %v", i, resp, err)
					}
				})
			}
			all.Wait()
			saw := 0
			for _, r := range replicas {
				saw += len(r.requests())
			}
			// 10 a second, and those of the second that is not over.
			most := requests + requests/5 + 10*(2+int(time.Since(begun)/time.Second))
			if saw < requests || saw > most {
				t.Errorf("the replicas saw %d requests, want %d to %d", saw, requests, most)
			}
			f.awaitIdle()
			if hold.Requests > 0 && strings.Contains(f.exposition(), `warmroute_retry_waits_total{result="given_up"} 0`) {
				t.Error("nobody waited for the budget in vain")
			}
		})
	}
}

func TestZeroRetryBudget(t *testing.T) {
	for name, c := range map[string]struct {
		hold   router.QueueSettings
		script func(*session)
		status int
	}{
		"no queue":         {router.QueueSettings{}, once(), http.StatusBadGateway},
		"held":             {queueForAMinute, once(), http.StatusBadGateway},
		"held, with a 503": {queueForAMinute, always(answered("503 Service Unavailable", "full")), http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			other := &replica{script: always(answered("200 OK", whole))}
			f := serveWithQueue(t, c.hold, func(o *Options) { o.Retry.Share, o.Retry.PerSecond = 0, 0 }, &replica{script: c.script}, other)
			begun := time.Now()
			if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != c.status || len(other.requests()) != 0 {
				t.Errorf("got %d, and the other replica saw %d requests", resp.StatusCode, len(other.requests()))
			}
			if waited := time.Since(begun); waited > failsafe {
				t.Errorf("answered after %v", waited)
			}
			f.awaitMetric(`warmroute_retry_waits_total{result="given_up"} 0`)
		})
	}
}

func TestConnectionRefusedKeepsBudget(t *testing.T) {
	gone := &replica{}
	f := serve(t, func(o *Options) { o.Retry.Share, o.Retry.PerSecond = 0, 0 }, gone, &replica{script: always(answered("200 OK", whole))})
	gone.listener.Close()
	if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
}

// An engine that is dead or stops shows by its checks. What it said then was not
// about the request.
func TestQueueAfter503OfDownBackend(t *testing.T) {
	t.Parallel()
	r := newMortal(func(_ *mortal, s *session) { always(answered("503 Service Unavailable", "dead"))(s) })
	var once sync.Once
	f := serveWithQueue(t, queueForAMinute, func(o *Options) {
		o.RecheckHealth = func(b *backends.Backend) { once.Do(func() { b.SetState(backends.Down) }) }
	}, &r.replica)
	done := f.background(askWhole)
	eventually(t, "it was refused", func() bool { return len(r.requests()) == 1 })
	f.awaitQueued(1)
	r.die()
	f.revive(t, 0, always(answered("200 OK", whole)))
	if a := <-done; a.body != whole {
		t.Errorf("got %+v", a)
	}
}

// firstFails are the ways in which an attempt fails before it is committed.
var firstFails = []struct {
	name   string
	stream bool // what the client asks for
	script func(*session)
	reason string // as counted
}{
	{"reset before the header", true, func(s *session) { s.request(); s.reset() }, "truncated"},
	{"closed before the header", false, once(), "truncated"},
	{"closed in the header", false, once("HTTP/1.1 200 OK\r\ncontent-ty"), "truncated"},
	{"closed after the header", true, once(sseHead), "truncated"},
	{"reset after the header", true, func(s *session) { s.request(); s.say(sseHead); s.reset() }, "truncated"},
	{"comments, then closed", true, once(sseHead, chunk(": keep-alive\n\n"), chunk(": keep-alive\n\n")), "truncated"},
	{"comments, then a proper end", true, always(streamed(": keep-alive\n\n")), "truncated"},
	{"stream to the connection's end, closed after a comment", true, once(sseToEnd, ": keep-alive\n\n"), "truncated"},
	{"closed in the first event", true, once(sseHead, chunk(role[:40])), "truncated"},
	{"500", false, always(answered("500 Internal Server Error", `{"error":{"message":"cannot schedule new futures after shutdown"}}`)),
		"status_500"},
	{"500 without a body", true, always(answered("500 Internal Server Error", "")), "status_500"},
	{"502", false, always(answered("502 Bad Gateway", "x")), "status_502"},
	{"503", true, always(answered("503 Service Unavailable", "x")), "status_503"},
	{"504", false, always(answered("504 Gateway Timeout", "x")), "status_504"},
	{"503 cut short", true, once(strings.TrimSuffix(answered("503 Service Unavailable", "xyz"), "z")), "truncated"},
	{"error event first", true, always(streamed(dead, doneLine)), "error_event"},
	{"error event after the role", true, always(streamed(role, dead, doneLine)), "error_event"},
	{"abort after the role", true, always(streamed(role, abort, doneLine)), "aborted"},
	{"abort in one packet with the role", true, always(streamed(role + abort + counted + doneLine)), "aborted"},
	{"an end after the role, with no word of why", true, always(streamed(role, counted+doneLine)), "aborted"},
	{"abort alone", true, always(streamed(abort, doneLine)), "aborted"},
	{"whole answer with an abort", false, always(answered("200 OK", wholeAbort)), "aborted"},
	{"whole answer cut short", false, once(strings.TrimSuffix(answered("200 OK", whole), "}}}")), "truncated"},
	{"chunked whole answer cut short", false, once("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
		chunk(whole)), "truncated"},
	{"a redirect", false, always(answered("307 Temporary Redirect", "", "location: http://127.0.0.1:1/v1/chat/completions")), "redirect"},
	{"a redirect to say goodbye", true, always(answered("301 Moved Permanently", "gone", "location: /")), "redirect"},
	{"a stream compressed unasked", true,
		always(strings.Replace(streamed(goodStream), "text/event-stream", "text/event-stream\r\ncontent-encoding: gzip", 1)), "encoded"},
	{"a header beyond all bounds", false, always(answered("200 OK", whole, "x-bomb: "+strings.Repeat("b", 200<<10))), "invalid_response"},
	{"a header of many lines", false, always(answered("200 OK", whole, strings.Repeat("x-bomb: b\r\n", 20_000)+"x-last: b")),
		"invalid_response"},
	{"a header split by a bare CR", false, always(answered("200 OK", whole, "x-a: b\rset-cookie: c")), "invalid_response"},
	{"a header split by a bare LF", false, always(answered("200 OK", whole, "x-a: b\nset-cookie: c")), "invalid_response"},
	{"two lengths", false, always(answered("200 OK", whole, "content-length: 1")), "invalid_response"},
	{"length and chunks", false, always(answered("200 OK", whole, "transfer-encoding: chunked")), "invalid_response"},
	{"a length of 10 GB, and nothing of it", false,
		once("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10000000000\r\n\r\n{"), "truncated"},
	{"nothing like HTTP", true, always("+PONG\r\n"), "truncated"},
	{"interim answers on and on", true, always(strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 10_000)), "invalid_response"},
	{"unframed whole answer cut short", false, once("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n",
		whole[:50]), "truncated"},
}

func TestRetryOnAnotherBackend(t *testing.T) {
	t.Parallel()
	for _, c := range firstFails {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			body, good, want := askWhole, answered("200 OK", whole), whole
			if c.stream {
				body, good, want = askStream, streamed(goodStream), goodStream
			}
			first, second := &replica{script: c.script}, &replica{script: always(good)}
			f := serve(t, nil, first, second)
			resp, answer := f.post("/v1/chat/completions", body)
			if resp.StatusCode != http.StatusOK || answer != want {
				t.Errorf("got %d %q, want the second replica's %q", resp.StatusCode, answer, want)
			}
			if got := resp.Header.Get("X-Warmroute-Attempts"); got != "2" {
				t.Errorf("attempts %q, want 2", got)
			}
			if got := resp.Header.Get("X-Warmroute-Backend"); got != "r1" {
				t.Errorf("answered by %q", got)
			}
			for i, r := range []*replica{first, second} {
				if seen := r.requests(); len(seen) != 1 || seen[0].body != body {
					t.Errorf("replica %d saw %d requests, want the client's body once", i, len(seen))
				}
			}
			f.awaitIdle()
			if got := f.blocks(); got[0] != 0 || got[1] != questionBlocks {
				t.Errorf("index holds %v blocks, want none of the first attempt and %d", got, questionBlocks)
			}
			f.awaitMetric(`warmroute_retries_total{reason="` + c.reason + `"} 1`)
		})
	}
}

func TestConnectionRefusedNotCharged(t *testing.T) {
	good := &replica{script: always(answered("200 OK", whole))}
	gone := []*replica{{}, {}, {}, {}}
	f := serve(t, nil, append(gone, good)...)
	for _, r := range gone {
		r.listener.Close()
	}
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if answer != whole || resp.Header.Get("X-Warmroute-Attempts") != "5" {
		t.Errorf("got %q after %s attempts", answer, resp.Header.Get("X-Warmroute-Attempts"))
	}
	f.awaitIdle()
	if got := f.blocks(); got[0] != 0 || got[4] != questionBlocks {
		t.Errorf("index holds %v blocks", got)
	}
}

func TestMaxAttempts(t *testing.T) {
	t.Parallel()
	var replicas []*replica
	for range 5 {
		replicas = append(replicas, &replica{script: once()})
	}
	f := serve(t, nil, replicas...)
	resp, _ := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusBadGateway {
		t.Errorf("status %d", resp.StatusCode)
	}
	for i, r := range replicas {
		if got, want := len(r.requests()), min(1, max(0, 3-i)); got != want {
			t.Errorf("replica %d saw %d requests, want %d", i, got, want)
		}
	}
}

func TestAllBackendsFail(t *testing.T) {
	t.Parallel()
	full := answered("503 Service Unavailable", `{"error":{"message":"queue full","type":"x","param":null,"code":503}}`, "x-why: full")
	cases := []struct {
		name       string
		scripts    []func(*session)
		status     int
		retryAfter string
		answer     string // part of it
		ours       bool
	}{
		{"503 gets a Retry-After", []func(*session){once(), always(full)}, 503, "1", "queue full", false},
		{"503 keeps its Retry-After", []func(*session){always(answered("503 Service Unavailable", "x", "retry-after: 7"))}, 503, "7", "x", false},
		{"500 in its own words", []func(*session){always(full), always(answered("500 Internal Server Error", "dead"))}, 500, "", "dead", false},
		{"words outlast a reset", []func(*session){always(full), once()}, 503, "1", "queue full", false},
		{"words of any length are whole", []func(*session){always(answered("503 Service Unavailable", strings.Repeat("w", 60_000)+"!"))}, 503,
			"1", "w!", false},
		{"words without end are none", []func(*session){always(answered("500 Internal Server Error", strings.Repeat("w", 64<<10+1)))}, 502, "1",
			"replica_failed", true},
		{"resets", []func(*session){once(), once()}, 502, "1", "replica_failed", true},
		{"error event", []func(*session){always(streamed(dead, doneLine))}, 500, "", "EngineCore encountered", false},
		{"abort", []func(*session){always(streamed(role, abort, doneLine))}, 503, "1", "shutting down", true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var replicas []*replica
			for _, s := range c.scripts {
				replicas = append(replicas, &replica{script: s})
			}
			f := serve(t, nil, replicas...)
			resp, answer := f.post("/v1/chat/completions", askStream)
			if resp.StatusCode != c.status || resp.Header.Get("Retry-After") != c.retryAfter || !strings.Contains(answer, c.answer) {
				t.Errorf("got %d, Retry-After %q, %s", resp.StatusCode, resp.Header.Get("Retry-After"), answer)
			}
			if ours := strings.Contains(answer, `"src":"warmroute"`); ours != c.ours {
				t.Errorf("marked as ours: %v, want %v", ours, c.ours)
			}
			f.awaitIdle()
			for i, n := range f.blocks() {
				if n != 0 {
					t.Errorf("index still holds %d blocks of backend %d", n, i)
				}
			}
		})
	}
}

func TestAllConnectionsRefusedStatus502(t *testing.T) {
	r := &replica{}
	f := serve(t, nil, r)
	r.listener.Close()
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusBadGateway || !strings.Contains(answer, `"src":"warmroute"`) {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
}

func TestNoneReadyStatus503(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, r)
	f.backends[0].SetState(0)
	resp, answer := f.post("/v1/chat/completions", askWhole)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" ||
		!strings.Contains(answer, `"src":"warmroute"`) {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if len(r.requests()) != 0 {
		t.Error("a backend that is down was asked")
	}
}

func TestClientErrorsNotRetried(t *testing.T) {
	for _, answer := range []string{
		answered("400 Bad Request", `{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}`),
		answered("401 Unauthorized", `{"error":"Unauthorized"}`),
		answered("404 Not Found", `{"error":{"message":"The model `+"`x`"+
			` does not exist.","type":"NotFoundError","param":"model","code":404}}`),
		answered("403 Forbidden", `{"error":{"message":"not allowed","type":"PermissionDeniedError","param":null,"code":403}}`),
		answered("413 Content Too Large", ``),
		answered("422 Unprocessable Entity", `{"detail":[{"loc":["body"]}]}`),
		answered("429 Too Many Requests", `slow down`, "retry-after: 3"),
		answered("501 Not Implemented", `{"error":{"code":501}}`),
	} {
		line, rest, _ := strings.Cut(answer, "\r\n")
		t.Run(line, func(t *testing.T) {
			first, second := &replica{script: always(answer)}, &replica{script: always(answered("200 OK", whole))}
			f := serve(t, nil, first, second)
			resp, got := f.post("/v1/chat/completions", askStream)
			_, want, _ := strings.Cut(rest, "\r\n\r\n")
			if !strings.Contains(line, resp.Status[:3]) || got != want {
				t.Errorf("got %s %q, want %q", resp.Status, got, want)
			}
			if strings.Contains(answer, "retry-after") && resp.Header.Get("Retry-After") != "3" {
				t.Error("Retry-After was lost")
			}
			if len(first.requests()) != 1 || len(second.requests()) != 0 {
				t.Error("was not asked once")
			}
			f.awaitIdle()
			if got := f.blocks(); got[0] != 0 {
				t.Errorf("index holds %d blocks of a prompt that the engine never saw", got[0])
			}
		})
	}
}

func TestClientErrorEventRelayed(t *testing.T) {
	first, second := &replica{script: always(streamed(tooLong, doneLine))}, &replica{script: always(streamed(goodStream))}
	f := serve(t, nil, first, second)
	resp, got := f.post("/v1/chat/completions", askStream)
	if resp.StatusCode != http.StatusOK || got != tooLong+doneLine {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
	if len(second.requests()) != 0 {
		t.Error("another backend was asked")
	}
	f.awaitIdle()
	if got := f.blocks(); got[0] != 0 {
		t.Errorf("index holds %d blocks of a prompt that the engine never saw", got[0])
	}
}

// leaving sends a request whose client leaves when it is told to.
func (f *fleet) leaving(body string) (leave func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := f.client.Do(req); err == nil {
			resp.Body.Close()
			f.t.Errorf("was answered: %d", resp.StatusCode)
		}
	}()
	return func() {
		cancel()
		<-gone
	}
}

func TestDisconnectDuringRetryWait(t *testing.T) {
	full := always(answered("503 Service Unavailable", "full"))
	fails := always(answered("500 Internal Server Error", `{"error":{"message":"it hurts"}}`))
	for name, c := range map[string]struct {
		script func(*session)
		change func(*Options)
		seen   int // requests on each of both replicas
	}{
		"for the budget":      {once(), func(o *Options) { o.Retry.Share, o.Retry.PerSecond = 0.001, 0 }, 0},
		"for a place":         {full, nil, 1},
		"for what checks say": {fails, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &replica{script: c.script}
			f := serveWithQueue(t, queueForAMinute, c.change, &replica{script: c.script}, b)
			leave := f.leaving(askWhole)
			eventually(t, "it waits", func() bool { return f.router.CountWaiting() == 1 && len(b.requests()) == c.seen })
			leave()
			f.awaitMetric(`warmroute_disconnected_requests_total{phase="queued"} 1`)
			f.awaitIdle()
			if e := f.exposition(); strings.Contains(e, `code="5`) || !strings.Contains(e, `code="499"`) {
				t.Error("a client that left is counted as the replica's error")
			}
			if len(b.requests()) != c.seen {
				t.Errorf("the second replica saw %d requests, want %d", len(b.requests()), c.seen)
			}
		})
	}
}

// Requests that wait for a retry count as queued.
func TestRetryWaitsCountInQueue(t *testing.T) {
	for name, hold := range map[string]router.QueueSettings{
		"number": {Requests: 2, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute},
		"bytes":  {Requests: 100, Bytes: 3 * int64(len(askWhole)+len(question)), NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			const requests = 8
			f := serveWithQueue(t, hold, func(o *Options) { o.Retry.Share, o.Retry.PerSecond = 0.001, 0 },
				&replica{script: once()}, &replica{script: once()})
			all := make(chan int, requests)
			var leave []func()
			for i := range requests {
				ctx, cancel := context.WithCancel(t.Context())
				leave = append(leave, cancel)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(asked(fmt.Sprint(i), false)))
				go func() {
					resp, err := f.client.Do(req)
					if err != nil {
						all <- 499
						return
					}
					resp.Body.Close()
					all <- resp.StatusCode
				}()
			}
			eventually(t, "those that may not wait are answered", func() bool {
				return len(all)+f.router.CountWaiting() == requests && len(all) > 0
			})
			held := f.router.CountWaiting()
			if held == 0 || held > 4 {
				t.Errorf("%d wait", held)
			}
			f.awaitMetric(fmt.Sprint("warmroute_queue_requests{class=\"normal\"} ", held))
			for range requests - held {
				if code := <-all; code != http.StatusTooManyRequests {
					t.Errorf("got %d, want a 429", code)
				}
			}
			for _, cancel := range leave {
				cancel()
			}
			for range held {
				<-all
			}
			f.awaitQueued(0)
		})
	}
}

func TestAttemptWarningsRateLimited(t *testing.T) {
	var w failureLog
	a, b := &backends.Backend{Name: "a"}, &backends.Backend{Name: "b", Slot: 1}
	now := time.Now()
	for _, c := range []struct {
		of    *backends.Backend
		after time.Duration
		due   bool
		left  int
	}{
		{a, 0, true, 0}, {a, time.Millisecond, false, 0}, {a, time.Millisecond, false, 0}, {b, 0, true, 0},
		{a, minWarningInterval, true, 2}, {a, minWarningInterval, true, 0},
		{&backends.Backend{Name: "next in the slot of a"}, 0, true, 0},
	} {
		now = now.Add(c.after)
		if due, left := w.allowWarning(c.of, now); due != c.due || left != c.left {
			t.Errorf("%s after %v: %v, %d left out; want %v, %d", c.of.Name, c.after, due, left, c.due, c.left)
		}
	}
}

// After the last allowed attempt the checks are asked only whether every backend is down.
func TestLastAttemptAwaitsAllDownVerdict(t *testing.T) {
	t.Parallel()
	dies := func(s *session) { s.request(); s.reset() }
	suspected := make(chan string, 100)
	f := serveWithQueue(t, queueForAMinute, func(o *Options) {
		o.Attempts = 2
		o.RecheckHealth = suspects(suspected)
	}, &replica{script: dies}, &replica{script: dies}, &replica{script: dies})
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusBadGateway {
		t.Errorf("got %d", resp.StatusCode)
	}
	if n := len(suspected); n != 2+2*3 {
		t.Errorf("%d suspicions, want one for each attempt and two reconnects to each backend", n)
	}
}

// scalingError is the response of a replica whose number of engines is changing.
const scalingError = `{"error":"The model is currently scaling. Please try again later."}`

// An only replica that is stopped in good order, and comes back: in between its
// requests wait.
func TestGracefulRestartOfOnlyReplica(t *testing.T) {
	t.Parallel()
	good := always(answered("200 OK", whole))
	for name, says := range map[string]string{
		"abort":   answered("200 OK", wholeAbort),
		"drains":  answered("500 Internal Server Error", `{"error":{"message":"cannot schedule new futures after shutdown","code":500}}`),
		"scales":  answered("503 Service Unavailable", scalingError),
		"dies":    answered("500 Internal Server Error", `{"error":{"message":"EngineCore encountered an issue","code":500}}`),
		"refuses": answered("503 Service Unavailable", `{"error":{"message":"shutting down","code":503}}`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newMortal(func(_ *mortal, s *session) { always(says)(s) })
			f := serveChecked(t, &a.replica)
			var all []<-chan answer
			for i := range 5 {
				all = append(all, f.background(asked(fmt.Sprint(i), false)))
			}
			f.awaitQueued(len(all)) // none is answered while its checks pass
			a.die()
			eventually(t, "it is down", func() bool {
				f.proxy.recheckHealth(f.backends[0])
				return f.backends[0].State() == backends.Down
			})
			time.Sleep(upstreamErrorRetryTimeout) // longer than words are kept back for
			f.awaitQueued(len(all))
			f.revive(t, 0, good)
			for i, done := range all {
				if got := <-done; got.body != whole {
					t.Errorf("request %d got %+v", i, got)
				}
			}
			if name == "scales" {
				if status := f.router.Status(f.backends[0]); status.Opens > 0 {
					t.Error("a replica that scales opened its breaker")
				}
				f.awaitMetric(`warmroute_retries_total{reason="status_503"} 0`)
			}
			if (name == "drains" || name == "scales") && len(a.requests()) > len(all)+int(failsafe/time.Second) {
				t.Errorf("a replica that drains was asked %d times", len(a.requests()))
			}
		})
	}
}

// A replica that says the like and stays is no replica that stops.
func TestAbortByHealthyReplica(t *testing.T) {
	t.Parallel()
	f := serveChecked(t, &replica{script: always(answered("200 OK", wholeAbort))})
	begun := time.Now()
	if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %d", resp.StatusCode)
	}
	if waited := time.Since(begun); waited > failsafe {
		t.Errorf("answered after %v", waited)
	}
}

func TestQueueUntilBackendReady(t *testing.T) {
	good := &replica{script: always(answered("200 OK", whole))}
	f := serveWithQueue(t, router.QueueSettings{Requests: 10, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}, nil, good, &replica{})
	for _, b := range f.backends {
		b.SetState(backends.Down)
	}
	var all []<-chan answer
	for i := range 5 {
		all = append(all, f.background(asked(fmt.Sprint(i), false)))
	}
	f.awaitQueued(5)
	f.backends[0].SetState(backends.Ready)
	f.router.BackendStateChanged(f.backends[0])
	for _, done := range all {
		if a := <-done; a.status != http.StatusOK || a.header.Get("X-Warmroute-Backend") != "r0" {
			t.Errorf("got %+v", a)
		}
	}
}

// Before the checks have found out, a dead fleet looks ready.
func TestQueueAfterAllConnectionsRefused(t *testing.T) {
	t.Parallel()
	r := &replica{}
	f := serveWithQueue(t, router.QueueSettings{Requests: 10, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}, nil, r)
	address := r.listener.Addr().String()
	r.listener.Close()
	done := f.background(askWhole)
	f.awaitMetric(`warmroute_backend_in_flight{backend="r0"} 0`)
	eventually(t, "it was tried", func() bool { return strings.Contains(f.log.String(), "reason=connect") })
	f.backends[0].SetState(backends.Down)
	f.awaitQueued(1)
	back := &replica{script: always(answered("200 OK", whole))}
	back.startAt(t, address)
	t.Cleanup(back.stop)
	f.backends[0].SetState(backends.Ready)
	f.router.BackendStateChanged(f.backends[0])
	if a := <-done; a.body != whole {
		t.Errorf("got %+v", a)
	}
}

// What a replica had to say is worth more than a minute of silence.
func TestReplicaErrorNotDelayedByDownBackend(t *testing.T) {
	t.Parallel()
	failing := &replica{script: always(answered("500 Internal Server Error", `{"error":{"message":"it hurts"}}`))}
	good := &replica{script: always(answered("200 OK", whole))}
	f := serveWithQueue(t, router.QueueSettings{Requests: 10, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute}, nil, failing, good)
	f.backends[1].SetState(backends.Down)
	begun := time.Now()
	if a := <-f.background(askWhole); a.status != http.StatusInternalServerError || !strings.Contains(a.body, "it hurts") {
		t.Errorf("the other one stays down: got %+v", a)
	}
	if waited := time.Since(begun); waited < upstreamErrorRetryTimeout || waited > 30*time.Second {
		t.Errorf("answered after %v, want some %v", waited, upstreamErrorRetryTimeout)
	}
	done := f.background(askWhole)
	f.awaitQueued(1)
	f.backends[1].SetState(backends.Ready)
	f.router.BackendStateChanged(f.backends[1])
	if a := <-done; a.body != whole {
		t.Errorf("the other one is back in time: got %+v", a)
	}
}

// Refused, queued, refused again: all of it is one wait.
func TestQueueTimeSpentOnce(t *testing.T) {
	now := time.Now()
	h := &history{receivedAt: now, queueTimeouts: router.QueueTimeouts{Total: time.Minute}}
	if h.reconnectExpired(nil, now) {
		t.Error("the time of the upload counts as queued")
	}
	h.waited.Busy = 50 * time.Second
	if a := waitForRetryBudget(h, fleetView{{backend: &backends.Backend{}, candidate: true}}, now); a.deadline != now.Add(10*time.Second) {
		t.Errorf("after 50 s it may wait for %v more, want 10 s", a.deadline.Sub(now))
	}
	if !h.reconnectExpired(nil, now.Add(time.Minute)) {
		t.Error("reconnects for ever")
	}
}

func TestBurstAboveCapacity(t *testing.T) {
	t.Parallel()
	f := simulated(t, 2, router.QueueSettings{Requests: 1000, Bytes: 64 << 20, NoneReadyTimeout: time.Minute, BusyTimeout: time.Minute})
	for _, b := range f.backends {
		limited := *b.Options()
		limited.MaxInFlight = 16
		b.SetOptions(limited)
	}
	long := strings.Repeat(question, 20) // some 5,000 tokens each
	const requests = 120
	var wrong sync.Map
	var all sync.WaitGroup
	for i := range requests {
		body := fmt.Sprintf(`{"model":"m","max_tokens":20,"stream":%v,"messages":[{"role":"user","content":"%d %s"}]}`, i%2 == 0, i, long)
		all.Go(func() {
			if resp, text, err := f.try("/v1/chat/completions", body); err != nil || resp.StatusCode != http.StatusOK {
				wrong.Store(i, fmt.Sprint(err, text))
			}
		})
	}
	all.Wait()
	wrong.Range(func(i, what any) bool {
		t.Errorf("request %v: %v", i, what)
		return false
	})
	f.awaitIdle()
	if strings.Contains(f.exposition(), `warmroute_queue_ends_total{result="sent"} 0`) {
		t.Error("none was queued")
	}
}

// errorJSON is an error of vLLM's.
func errorJSON(message string) string {
	text, _ := json.Marshal(message)
	return fmt.Sprintf(`{"error":{"message":%s,"type":"InternalServerError","param":null,"code":500}}`, text)
}

// An error that quotes its prompt must not look like the message of a replica that
// shuts down: the prompt could kill one replica after another.
func TestPoisonGuardIgnoresQuotedShutdownMessages(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"word":             errorJSON("no template for 'what does shutdown do'"),
		"message":          errorJSON("no template for 'cannot schedule new futures after shutdown'"),
		"another field":    `{"error":{"message":"failed","param":"cannot schedule new futures after shutdown","code":500}}`,
		"embedded object":  `failed: {"error":{"message":"cannot schedule new futures after shutdown"}}`,
		"not an error":     `{"message":"cannot schedule new futures after shutdown"}`,
		"not a string":     `{"error":{"message":["cannot schedule new futures after shutdown"]}}`,
		"truncated object": `{"error":{"message":"cannot schedule new futures after shutdown"`,
	} {
		for _, stream := range []bool{false, true} {
			if stream && !strings.HasPrefix(body, `{"error":`) {
				continue // not an error event
			}
			t.Run(fmt.Sprint(name, " stream=", stream), func(t *testing.T) {
				t.Parallel()
				ask, reply := askWhole, answered("500 Internal Server Error", body)
				if stream {
					ask, reply = askStream, streamed("data: "+body+"\n\n", doneLine)
				}
				script := func(m *mortal, s *session) {
					if _, ok := s.request(); ok {
						m.replyAndDie(s, reply)
					}
				}
				a, b := newMortal(script), newMortal(script)
				c := &replica{script: always(answered("200 OK", whole))}
				f := serveChecked(t, &a.replica, &b.replica, c)
				resp, _ := f.post("/v1/chat/completions", ask)
				if resp.StatusCode != 500 || len(c.requests()) != 0 {
					t.Errorf("got %d, and the third replica saw %d requests", resp.StatusCode, len(c.requests()))
				}
			})
		}
	}
}
