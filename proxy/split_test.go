package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/metrics"
	"warmroute/proxy/activity"
	"warmroute/proxy/relay"
	"warmroute/proxy/stored"
	"warmroute/proxy/upstream"
	"warmroute/router"
)

const (
	transferParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[340,341]],"remote_engine_id":"05001d3b",` +
		`"remote_request_id":"chatcmpl-ab","remote_host":"10.0.0.7","remote_port":5690,"tp_size":1,"remote_num_tokens":12,` +
		`"remote_blocks_expiry_time":null,"remote_prefill_cached_tokens":4}`
	askRemote = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,` +
		`"remote_host":null,"remote_port":null},`
)

// prefilled is the response to a prefill request with other parameters.
func prefilled(params string) string {
	return answered("200 OK", `{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",`+
		`"content":"He"},"finish_reason":"length"}],`+
		`"usage":{"prompt_tokens":12,"total_tokens":13,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}},"kv_transfer_params":`+
		params+`}`)
}

// prefills answers prefill requests, and fails the test's request if it gets another one.
func prefills() func(*session) {
	return func(s *session) {
		for {
			r, ok := s.request()
			if !ok {
				return
			}
			if !strings.Contains(r.body, askRemote) {
				s.say(answered("418 I'm a teapot", `{"error":"no prefill request"}`))
				continue
			}
			s.say(prefilled(transferParams))
		}
	}
}

// completes answers whole requests and decode requests.
func completes(s *session) {
	for {
		r, ok := s.request()
		if !ok {
			return
		}
		if strings.Contains(r.body, `"stream":true`) {
			s.say(streamed(role, hello, world, stop, counted, doneLine))
		} else {
			s.say(answered("200 OK", whole))
		}
	}
}

// decodeBody is the body of the decode request of a request.
func decodeBody(body string) string {
	return strings.Replace(body, "{", `{"kv_transfer_params":`+transferParams+",", 1)
}

// serveSplit starts a Proxy in front of replicas for prefill and for decode. It prefers the first of each.
func serveSplit(t testing.TB, change func(*Options), prefill, decode []*replica) (f *fleet) {
	t.Helper()
	for i, r := range prefill {
		r.name = fmt.Sprint("p", i)
	}
	for i, r := range decode {
		r.name = fmt.Sprint("d", i)
	}
	f = serveWithQueue(t, queueForAMinute, func(o *Options) {
		checked(&f)(o)
		if change != nil {
			change(o)
		}
	}, append(append([]*replica(nil), prefill...), decode...)...)
	for i, b := range f.backends {
		o := *b.Options()
		if o.Role = backends.RoleDecode; i < len(prefill) {
			o.Role = backends.RolePrefill
		}
		b.SetOptions(o)
		b.SetVersion("0.33.0")
		load := *b.Load()
		load.TransfersKV = true
		b.SetLoad(&load)
	}
	return f
}

// lastRequest waits for the end of the n-th request and returns it.
func (f *fleet) lastRequest(n uint64) *activity.FinishedRequest {
	f.t.Helper()
	eventually(f.t, fmt.Sprint(n, " requests have ended"), func() bool {
		return f.proxy.Activity().FindFinished(activity.FinishedFilter{}, 1).Finished == n
	})
	return f.proxy.Activity().FindFinished(activity.FinishedFilter{}, 1).Requests[0]
}

// checkSplitResult checks that one request was counted, with that result.
func (f *fleet) checkSplitResult(result string) {
	f.t.Helper()
	const counter = "warmroute_split_requests_total"
	f.awaitIdle()
	f.awaitMetric(fmt.Sprintf("%s{result=%q} 1", counter, result))
	for line := range strings.SplitSeq(f.exposition(), "\n") {
		if strings.HasPrefix(line, counter) && !strings.Contains(line, strconv.Quote(result)) && !strings.HasSuffix(line, " 0") {
			f.t.Errorf("counted: %s", line)
		}
	}
}

// asks are bodies of both kinds, with what their clients get from completes.
var asks = map[string]struct{ body, want string }{"whole": {askWhole, whole}, "stream": {askStream, goodStream}}

func TestSplitRequest(t *testing.T) {
	for path, body := range map[string]string{
		"/v1/chat/completions": `{"model":"m","max_tokens":50,"messages":[{"role":"user","content":"` + question + `"}]}`,
		"/v1/completions":      `{"model":"m","max_tokens":50,"prompt":"` + question + `"}`,
		"/v1/messages":         `{"model":"m","max_tokens":50,"messages":[{"role":"user","content":"` + question + `"}]}`,
		"/v1/responses":        `{"model":"m","store":true,"max_output_tokens":50,"input":"` + question + `"}`,
	} {
		t.Run(path, func(t *testing.T) {
			p, d := &replica{script: prefills()}, &replica{script: completes}
			f := serveSplit(t, nil, []*replica{p}, []*replica{d})
			resp, got := f.post(path, body, "X-Request-Id", "mine-1")
			if resp.StatusCode != 200 || got != whole {
				t.Fatalf("got %d %s", resp.StatusCode, got)
			}
			if h := resp.Header; h.Get("X-Warmroute-Backend") != "d0" || h.Get("X-Warmroute-Prefill-Backend") != "p0" ||
				h.Get("X-Warmroute-Attempts") != "1" {
				t.Errorf("header %v", h)
			}
			first, second := p.requests()[0], d.requests()[0]
			want := strings.Replace(strings.Replace(body, ":50", ":1", 1), `"store":true`, `"store":false`, 1)
			if first.URL.Path != path || first.body != strings.Replace(want, "{", "{"+askRemote, 1) {
				t.Errorf("the prefill request was %s %s", first.URL.Path, first.body)
			}
			if second.URL.Path != path || second.body != decodeBody(body) {
				t.Errorf("the decode request was %s %s", second.URL.Path, second.body)
			}
			if a, b := first.Header.Get("X-Request-Id"), second.Header.Get("X-Request-Id"); a != b || !strings.HasPrefix(a, "mine-1-wr") {
				t.Errorf("the requests have the ids %q and %q", a, b)
			}
			f.checkSplitResult("split")
		})
	}
}

func TestSplitStream(t *testing.T) {
	p, d := &replica{script: prefills()}, &replica{script: completes}
	f := serveSplit(t, withKeys(keyOf("a", nil)), []*replica{p}, []*replica{d})
	ask := strings.Replace(askStream, "{", `{"stream_options":{"include_usage":true},`, 1)
	resp, got := f.post("/v1/chat/completions", ask, bearer("a")...)
	if resp.StatusCode != 200 || got != goodStream {
		t.Fatalf("got %d %s", resp.StatusCode, got)
	}
	want := strings.NewReplacer(`"stream_options":{"include_usage":true}`, `"stream_options":null`, `"stream":true`,
		`"stream":false`).Replace(ask)
	if got := p.requests()[0].body; got != strings.Replace(want, "{", "{"+askRemote+`"max_tokens":1,`, 1) {
		t.Errorf("the prefill request was %s", got)
	}
	if got := d.requests()[0].body; got != decodeBody(ask) {
		t.Errorf("the decode request was %s", got)
	}
	r := f.lastRequest(1)
	if r.Backend != "d0" || r.PrefillBackend != "p0" || r.Times.Prefill <= 0 || r.Attempts != 1 || len(r.Failures) != 0 {
		t.Errorf("recorded as %+v", r)
	}
	// The cached tokens are those of the prefill request, whatever the replica for the decode says.
	if r.Tokens.Prompt != 12 || r.Tokens.Output != 3 || r.Tokens.Cached != 4 {
		t.Errorf("tokens %+v", r.Tokens)
	}
	if used := f.proxy.usage.OfKey("a"); used.Requests != 1 || used.PromptTokens != 12 || used.OutputTokens != 3 || used.CachedTokens != 4 {
		t.Errorf("the key has used %+v", used)
	}
	f.awaitMetric(`warmroute_kv_transfer_seconds_count 1`)
	f.awaitMetric(`warmroute_prefill_request_seconds_count 1`)
	f.checkSplitResult("split")
	if n := len(f.proxy.Activity().FindFinished(activity.FinishedFilter{Backend: "p0"}, 10).Requests); n != 1 {
		t.Errorf("a search for the replica of the prefill finds %d requests", n)
	}
	if log := f.log.String(); strings.Contains(log, "remote_") {
		t.Errorf("logged: %s", log)
	}
}

// The client sees no more of a prefill request that fails than a slower response.
func TestPrefillRequestFails(t *testing.T) {
	t.Parallel()
	const failed = `{"error":{"message":"m"}}`
	abort := strings.Replace(whole, `"stop"`, `"abort"`, 1)
	for name, script := range map[string]func(*session){
		"500":             always(answered("500 Internal Server Error", failed)),
		"502":             always(answered("502 Bad Gateway", failed)),
		"overloaded":      always(answered("503 Service Unavailable", failed)),
		"504":             always(answered("504 Gateway Timeout", failed)),
		"401":             always(answered("401 Unauthorized", failed)),
		"404":             always(answered("404 Not Found", failed)),
		"no endpoint":     always(answered("404 Not Found", `{"detail":"Not Found"}`)),
		"429":             always(answered("429 Too Many Requests", failed)),
		"redirect":        always(answered("307 Temporary Redirect", "", "location: http://10.0.0.1/")),
		"reset":           func(s *session) { s.request(); s.reset() },
		"closed":          once(),
		"half a header":   once("HTTP/1.1 200"),
		"half a body":     once(prefilled(transferParams)[:300]),
		"without params":  always(answered("200 OK", whole)),
		"params are null": always(prefilled("null")),
		"a string":        always(prefilled(`"do_remote_prefill"`)),
		"other params":    always(prefilled(`{"do_remote_decode":true}`)),
		"invalid params":  always(prefilled(`{"do_remote_prefill":true,"a":[}`)),
		"a stream":        always(streamed(role, hello, stop, doneLine)),
		"encoded":         always(answered("200 OK", whole, "content-encoding: gzip")),
		"aborted":         always(answered("200 OK", strings.Replace(abort, "{", `{"kv_transfer_params":`+transferParams+",", 1))),
		"too long": always(answered("200 OK", `{"kv_transfer_params":`+transferParams+`,"a":"`+
			strings.Repeat("x", 2*relay.MaxBufferedBytes)+`"}`)),
	} {
		for kind, c := range asks {
			t.Run(name+" "+kind, func(t *testing.T) {
				t.Parallel()
				p, d := &replica{script: script}, &replica{script: completes}
				// One attempt, and no retry: the failure is not charged.
				f := serveSplit(t, func(o *Options) { o.Attempts, o.Retry.Share, o.Retry.PerSecond = 1, 0, 0 }, []*replica{p}, []*replica{d})
				resp, got := f.post("/v1/chat/completions", c.body)
				if resp.StatusCode != 200 || got != c.want {
					t.Fatalf("got %d %s", resp.StatusCode, got)
				}
				if h := resp.Header; h.Get("X-Warmroute-Backend") != "d0" || h.Get("X-Warmroute-Prefill-Backend") != "" {
					t.Errorf("header %v", h)
				}
				if n := len(p.requests()); n != 1 {
					t.Errorf("%d prefill requests", n)
				}
				if all := d.requests(); len(all) != 1 || all[0].body != c.body {
					t.Errorf("the replica for decode got %d requests", len(all))
				}
				r := f.lastRequest(1)
				if r.PrefillBackend != "" || len(r.Failures) != 1 || r.Failures[0].Backend != "p0" {
					t.Errorf("recorded as %+v", r)
				}
				f.checkSplitResult("prefill_failed")
			})
		}
	}
}

func TestPrefillReplicaDies(t *testing.T) {
	t.Parallel()
	t.Run("before", func(t *testing.T) {
		p, d := newMortal(dies), &replica{script: completes}
		f := serveSplit(t, nil, []*replica{&p.replica}, []*replica{d})
		p.die()
		if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		f.checkSplitResult("prefill_failed")
	})
	t.Run("while it computes", func(t *testing.T) {
		p, d := newMortal(dies), &replica{script: completes}
		f := serveSplit(t, nil, []*replica{&p.replica}, []*replica{d})
		if resp, got := f.post("/v1/chat/completions", askStream); got != goodStream {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		f.checkSplitResult("prefill_failed")
	})
	t.Run("between prefill and decode", func(t *testing.T) {
		var f *fleet
		p, d := &replica{}, &replica{script: completes}
		p.script = func(s *session) {
			s.request()
			f.backends[0].SetState(backends.Down)
			s.say(prefilled(transferParams))
		}
		f = serveSplit(t, nil, []*replica{p}, []*replica{d})
		if resp, got := f.post("/v1/chat/completions", askStream); got != goodStream {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		if got := d.requests(); len(got) != 1 || got[0].body != askStream {
			t.Errorf("the replica for decode got %+v", got)
		}
		f.checkSplitResult("prefill_failed")
	})
	t.Run("it alone is left", func(t *testing.T) {
		p, d := &replica{}, newMortal(dies)
		p.script = func(s *session) {
			for {
				if r, ok := s.request(); !ok {
					return
				} else if strings.Contains(r.body, askRemote) {
					d.die()
					s.say(prefilled(transferParams))
				} else {
					s.say(answered("200 OK", whole))
				}
			}
		}
		f := serveSplit(t, nil, []*replica{p}, []*replica{&d.replica})
		if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		f.checkSplitResult("decode_failed")
	})
}

func TestPrefillRequestStalls(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]func(*session){"before its response": hang(),
		"within its response": hang(prefilled(transferParams)[:300])} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, d := &replica{script: script}, &replica{script: completes}
			f := serveSplit(t, func(o *Options) { o.Response, o.Idle = 300*time.Millisecond, 300*time.Millisecond }, []*replica{p}, []*replica{d})
			if resp, got := f.post("/v1/chat/completions", askStream); got != goodStream {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			f.checkSplitResult("prefill_failed")
		})
	}
}

// A stall ends the prefill request, also of a request that has only one attempt.
func TestPrefillReplicaStalls(t *testing.T) {
	t.Parallel()
	p, d := &replica{script: hang()}, &replica{script: completes}
	f := serveSplit(t, func(o *Options) { o.Attempts = 1 }, []*replica{p}, []*replica{d})
	done := f.background(askStream)
	eventually(t, "the request is open", func() bool { return len(p.requests()) == 1 })
	f.hangs(0)
	if a := <-done; a.body != goodStream {
		t.Errorf("got %+v", a)
	}
	if r := f.lastRequest(1); len(r.Failures) != 1 || r.Failures[0].Reason != "stalled" {
		t.Errorf("recorded as %+v", r)
	}
	f.checkSplitResult("prefill_failed")
}

// The client gets its own error from the first replica that finds it.
func TestPrefillRequestRefused(t *testing.T) {
	for _, status := range []string{"400 Bad Request", "403 Forbidden", "413 Request Entity Too Large", "422 Unprocessable Entity"} {
		t.Run(status[:3], func(t *testing.T) {
			p, d := &replica{script: always(answered(status, tooLong[6:], "x-a: b"))}, &replica{script: completes}
			f := serveSplit(t, nil, []*replica{p}, []*replica{d})
			for _, c := range asks {
				if resp, got := f.post("/v1/chat/completions", c.body); resp.Status != status || got != tooLong[6:] || resp.Header.Get("X-A") != "b" {
					t.Errorf("got %s %q", resp.Status, got)
				}
			}
			if n := len(d.requests()); n != 0 {
				t.Errorf("the replica for decode got %d requests", n)
			}
			if r := f.lastRequest(2); len(r.Failures) != 0 || r.Backend != "p0" {
				t.Errorf("recorded as %+v", r)
			}
		})
	}
	t.Run("after a keep-alive", func(t *testing.T) {
		heard := make(chan struct{})
		p, d := &replica{}, &replica{script: completes}
		p.script = func(s *session) {
			s.request()
			s.until(heard)
			s.say(answered("400 Bad Request", strings.TrimPrefix(tooLong, "data: ")))
		}
		f := serveSplit(t, func(o *Options) { o.QueueKeepalive = 20 * time.Millisecond }, []*replica{p}, []*replica{d})
		r := f.open(t, "/v1/chat/completions", askStream)
		r.to(comment)
		close(heard)
		if got := r.rest(); r.resp.StatusCode != 200 || !strings.Contains(got, "maximum context length") {
			t.Errorf("got %d %s", r.resp.StatusCode, got)
		}
	})
	// Older replicas refuse the prefill request, and nothing else.
	t.Run("thinking budget", func(t *testing.T) {
		p, d := &replica{script: always(answered("400 Bad Request", `{"error":"`+strings.Repeat("quoted ", 10<<10)+`"}`))},
			&replica{script: completes}
		f := serveSplit(t, nil, []*replica{p}, []*replica{d})
		breakAtOnce(t, f)
		body := `{"model":"m","max_tokens":2000,"thinking":{"type":"enabled","budget_tokens":1024},"messages":[{"role":"user","content":"` +
			question + `"}]}`
		if resp, got := f.post("/v1/messages", body); got != whole {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		f.checkSplitResult("prefill_failed")
		if s := f.router.Status(f.backends[0]); s.Breaker != router.BreakerClosed || s.Opens != 0 {
			t.Errorf("its breaker is %v: the replica has not failed", s.Breaker)
		}
	})
}

func TestDecodeRequestFails(t *testing.T) {
	t.Parallel()
	isDecode := func(r seen) bool { return strings.Contains(r.body, "do_remote_prefill") }
	// failing answers decode requests with a script, and other requests as usual.
	failing := func(fail func(*session)) func(*session) {
		return func(s *session) {
			for {
				r, ok := s.request()
				switch {
				case !ok:
					return
				case isDecode(r):
					fail(s)
				case strings.Contains(r.body, `"stream":true`):
					s.say(streamed(role, hello, world, stop, counted, doneLine))
				default:
					s.say(answered("200 OK", whole))
				}
			}
		}
	}
	say := func(parts ...string) func(*session) { return func(s *session) { s.say(parts...) } }
	reset := func(s *session) { s.reset() }
	for name, c := range map[string]struct {
		body   string
		fail   func(*session)
		change func(*Options)
		where  string // the request is served
	}{
		"transfer failed": {askWhole, say(answered("500 Internal Server Error", `{"error":{"message":"Internal server error"}}`)),
			nil, "d0"},
		"transfer failed, one attempt": {askWhole, say(answered("500 Internal Server Error", `{}`)), func(o *Options) {
			o.Attempts, o.Retry.PerSecond, o.Retry.Share = 1, 0, 0
		}, "d0"},
		"transfer failed in the stream": {askStream, say(streamed(role, dead, doneLine)), nil, "d0"},
		"transfer failed, no role": {askStream, say(streamed(dead, doneLine)), func(o *Options) {
			o.Attempts, o.Retry.PerSecond, o.Retry.Share = 1, 0, 0
		}, "d0"},
		"error much later than the role": {askStream, func(s *session) {
			s.say(sseHead, chunk(role))
			time.Sleep(4 * roleEventDelay)
			s.say(chunk(dead), lastChunk)
		}, nil, "d0"},
		"502":                          {askStream, say(answered("502 Bad Gateway", `{}`)), nil, "d0"},
		"full":                         {askWhole, say(answered("503 Service Unavailable", `{}`)), nil, "d1"},
		"full, in the stream":          {askStream, say(streamed(role, refusals[0].event)), nil, "d1"},
		"reset before the header":      {askStream, reset, nil, "d1"},
		"reset before the first token": {askStream, func(s *session) { s.say(sseHead); s.reset() }, nil, "d1"},
		"reset after the role": {askStream, func(s *session) {
			s.say(sseHead, chunk(role))
			time.Sleep(4 * roleEventDelay)
			s.reset()
		}, nil, "d1"},
		"reset of a response that is whole": {askWhole, func(s *session) { s.say(answered("200 OK", whole)[:200]); s.reset() }, nil, "d1"},
		"aborted":                           {askStream, say(streamed(role, abort, doneLine)), nil, "d1"},
		"no first token in time": {askStream, func(s *session) {
			s.say(sseHead, chunk(role))
			s.closed()
		}, func(o *Options) { o.FirstByte = 200 * time.Millisecond }, "d1"},
		"no endpoint": {askWhole, say(answered("404 Not Found", `{"detail":"Not Found"}`)), nil, "d1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, d, other := &replica{script: prefills()}, &replica{script: failing(c.fail)}, &replica{script: completes}
			f := serveSplit(t, c.change, []*replica{p}, []*replica{d, other})
			want := whole
			if c.body == askStream {
				want = goodStream
			}
			resp, got := f.post("/v1/chat/completions", c.body)
			if resp.StatusCode != 200 || got != want || resp.Header.Get("X-Warmroute-Backend") != c.where {
				t.Errorf("got %d from %s: %s", resp.StatusCode, resp.Header.Get("X-Warmroute-Backend"), got)
			}
			all := append(d.requests(), other.requests()...)
			if len(all) != 2 || all[0].body != decodeBody(c.body) || all[1].body != c.body || len(p.requests()) != 1 {
				t.Errorf("%d prefill requests, and %+v", len(p.requests()), all)
			}
			if r := f.lastRequest(1); r.PrefillBackend != "" || len(r.Failures) != 1 || r.Failures[0].Backend != "d0" {
				t.Errorf("recorded as %+v", r)
			}
			f.checkSplitResult("decode_failed")
		})
	}
	t.Run("after the first token", func(t *testing.T) {
		t.Parallel()
		p, d := &replica{script: prefills()}, &replica{script: func(s *session) { s.request(); s.say(sseHead, chunk(role+hello)); s.reset() }}
		f := serveSplit(t, nil, []*replica{p}, []*replica{d})
		if _, got := f.post("/v1/chat/completions", askStream); !strings.HasPrefix(got, role+hello) || !strings.Contains(got, `"error"`) {
			t.Errorf("got %s", got)
		}
		f.checkSplitResult("split")
	})
	t.Run("refused by the replica", func(t *testing.T) {
		t.Parallel()
		p, d := &replica{script: prefills()}, &replica{script: always(answered("400 Bad Request", tooLong[6:]))}
		f := serveSplit(t, nil, []*replica{p}, []*replica{d})
		if resp, got := f.post("/v1/chat/completions", askStream); resp.StatusCode != 400 || got != tooLong[6:] {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
	})
}

// An error that quotes the body of the decode request does not reach the client: the request gets its error without it.
func TestDecodeRequestQuoted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status string
		quote  func(body string) string // the whole response
		change func(*Options)
	}{
		"invalid":       {"400 Bad Request", nil, nil},
		"unprocessable": {"422 Unprocessable Entity", nil, nil},
		"server error":  {"500 Internal Server Error", nil, nil},
		"very long":     {"400 Bad Request", nil, func(o *Options) { o.BodyBytes = 4 << 20 }},
		"in a stream": {"", func(body string) string {
			return streamed(role, `data: {"error":{"message":`+strconv.Quote(body)+`,"code":400}}`+"\n\n", doneLine)
		}, nil},
		"after a keep-alive": {"400 Bad Request", nil, func(o *Options) { o.QueueKeepalive = 10 * time.Millisecond }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			heard := make(chan struct{}) // by the client: a keep-alive, if there is one
			quotes := func(s *session) {
				for {
					r, ok := s.request()
					if !ok {
						return
					}
					s.until(heard)
					switch quoted := strings.ReplaceAll(r.body, `"`, "'"); {
					case strings.Contains(r.body, askRemote):
						s.say(prefilled(transferParams))
					case c.quote != nil:
						s.say(c.quote(quoted))
					default:
						s.say(answered(c.status, `{"error":{"message":`+strconv.Quote(quoted)+`}}`))
					}
				}
			}
			p, d := &replica{script: quotes}, &replica{script: quotes}
			body := askStream
			if name == "very long" {
				body = strings.Replace(askWhole, "What", strings.Repeat("long ", 300<<10), 1)
			}
			f := serveSplit(t, c.change, []*replica{p}, []*replica{d})
			keepsAlive := name == "after a keep-alive"
			if !keepsAlive {
				close(heard)
			}
			r := f.open(t, "/v1/chat/completions", body)
			if keepsAlive {
				r.to(comment)
				close(heard)
			}
			got := r.rest()
			if strings.Contains(got, "kv_transfer_params") || strings.Contains(got, "10.0.0.7") || !strings.Contains(got, "'messages'") &&
				name != "very long" {
				t.Errorf("got %d %.3000s", r.resp.StatusCode, got)
			}
			if all := d.requests(); len(all) < 2 || all[0].body != decodeBody(body) || all[1].body != body {
				t.Errorf("the replica for decode got %d requests", len(all))
			}
		})
	}
}

// No host, port or engine id of a KV transfer reaches the client.
func TestKVTransferAddressWithheld(t *testing.T) {
	t.Parallel()
	errorEvent := func(message string) string {
		return `data: {"error":{"message":` + strconv.Quote(message) + `,"type":"InternalServerError","code":500}}` + "\n\n"
	}
	failed := "transfer of chatcmpl-ab from 10.0.0.7:5690 (05001d3b) failed"
	object := `{"remote_host":"10.0.0.7","remote_port":5690,"remote_engine_id":"05001d3b"}`
	prefillRefused := func(s *session) {
		for {
			r, ok := s.request()
			switch {
			case !ok:
				return
			case strings.Contains(r.body, askRemote):
				s.say(answered("400 Bad Request", `{"error":{"message":"invalid: {'remote_host': '10.0.0.7', 'remote_port': 5690}"}}`))
			default:
				s.say(answered("400 Bad Request", tooLong[6:]))
			}
		}
	}
	oneAttempt := func(o *Options) { o.Attempts, o.Retry.Share, o.Retry.PerSecond = 1, 0, 0 }
	check := func(t *testing.T, got, want string) {
		t.Helper()
		if strings.Contains(got, "10.0.0.7") || strings.Contains(got, " 5690") || strings.Contains(got, ":5690") ||
			strings.Contains(got, "05001d3b") || !strings.Contains(got, want) {
			t.Errorf("got %.2000s", got)
		}
	}
	for name, c := range map[string]struct {
		body            string
		prefill, decode func(*session)
		want            string // in what the client gets
	}{
		"event after content in one packet": {askStream, prefills(), func(s *session) {
			if s.n > 1 {
				completes(s)
				return
			}
			s.request()
			s.say(sseHead, chunk(hello+errorEvent(failed)+doneLine), lastChunk)
		}, "world"},
		"400 of the prefill request": {askWhole, prefillRefused, always(answered("400 Bad Request", tooLong[6:])), "maximum context length"},
		"one level deeper": {askWhole, prefills(),
			always(answered("200 OK", strings.Replace(whole, `"delta"`, "", 1)[:len(whole)-1]+`,"metrics":{"kv_transfer_params":`+object+`}}`)),
			"Hello"},
		"deeper in an error": {askWhole, prefills(),
			always(answered("503 Service Unavailable", `{"error":{"message":"m","kv_transfer_params":`+object+`}}`)), `"error"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serveSplit(t, oneAttempt, []*replica{{script: c.prefill}}, []*replica{{script: c.decode}})
			_, got := f.post("/v1/chat/completions", c.body)
			check(t, got, c.want)
		})
	}
	for name, c := range map[string]struct {
		rest []string // after content that the client has
		want string
	}{
		"event after content":            {[]string{errorEvent(failed), doneLine}, "error is withheld"},
		"event after content, in pieces": {append(strings.Split(errorEvent(failed), ""), doneLine), "error is withheld"},
		"port alone":                     {[]string{errorEvent("connection to port 5690 refused")}, "error is withheld"},
		"engine id alone":                {[]string{errorEvent("engine '05001d3b' is gone")}, "error is withheld"},
		"long event after content": {strings.SplitAfter(errorEvent(strings.Repeat("x ", 3*relay.ChunkBytes)+failed), " "),
			"replica failed"},
		"another error after content": {[]string{errorEvent("15690 tokens, block 340"), doneLine}, "15690 tokens, block 340"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			received := make(chan struct{})
			f := serveSplit(t, oneAttempt, []*replica{{script: prefills()}}, []*replica{{script: func(s *session) {
				s.request()
				s.say(sseHead, chunk(role+hello))
				s.until(received)
				s.sayEach(c.rest)
			}}})
			r := f.open(t, "/v1/chat/completions", askStream)
			r.to(strings.TrimSpace(hello))
			close(received)
			check(t, r.rest(), c.want)
		})
	}
}

// Parameters that no replica can have seen are used again, and no others.
func TestDecodeRequestRefusedConnection(t *testing.T) {
	t.Parallel()
	for kind, c := range asks {
		t.Run(kind, func(t *testing.T) {
			d, other := newMortal(dies), &replica{script: completes}
			p := &replica{script: func(s *session) { s.request(); d.die(); s.say(prefilled(transferParams)) }}
			f := serveSplit(t, func(o *Options) {
				o.Attempts, o.Retry.Share, o.Retry.PerSecond = 1, 0, 0
			}, []*replica{p}, []*replica{&d.replica, other})
			resp, got := f.post("/v1/chat/completions", c.body)
			if got != c.want || resp.Header.Get("X-Warmroute-Backend") != "d1" || resp.Header.Get("X-Warmroute-Prefill-Backend") != "p0" {
				t.Errorf("got %v %s", resp.Header, got)
			}
			if all := other.requests(); len(all) != 1 || all[0].body != decodeBody(c.body) {
				t.Errorf("the other replica got %+v", all)
			}
			f.checkSplitResult("split")
		})
	}
	t.Run("and then failed", func(t *testing.T) {
		d, third := newMortal(dies), &replica{script: completes}
		other := &replica{script: func(s *session) { s.request(); s.reset() }}
		p := &replica{script: func(s *session) { s.request(); d.die(); s.say(prefilled(transferParams)) }}
		f := serveSplit(t, nil, []*replica{p}, []*replica{&d.replica, other, third})
		if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		if all := third.requests(); len(all) != 1 || all[0].body != askWhole {
			t.Errorf("the third replica got %+v", all)
		}
		f.checkSplitResult("decode_failed")
	})
	t.Run("no other one", func(t *testing.T) {
		d := newMortal(dies)
		p := &replica{script: func(s *session) {
			for {
				if r, ok := s.request(); !ok {
					return
				} else if strings.Contains(r.body, askRemote) {
					d.die()
					s.say(prefilled(transferParams))
				} else {
					s.say(answered("200 OK", whole))
				}
			}
		}}
		f := serveSplit(t, nil, []*replica{p}, []*replica{&d.replica})
		if resp, got := f.post("/v1/chat/completions", askWhole); got != whole || resp.Header.Get("X-Warmroute-Backend") != "p0" {
			t.Errorf("got %v %s", resp.Header, got)
		}
		f.checkSplitResult("decode_failed")
	})
}

func TestLateDecodeRequest(t *testing.T) {
	t.Parallel()
	t.Run("not sent", func(t *testing.T) {
		p, d := &replica{script: prefills()}, &replica{script: completes}
		f := serveSplit(t, func(o *Options) { o.KVLease = time.Nanosecond }, []*replica{p}, []*replica{d})
		if resp, got := f.post("/v1/chat/completions", askStream); got != goodStream {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		if all := d.requests(); len(all) != 1 || all[0].body != askStream {
			t.Errorf("the replica for decode got %+v", all)
		}
		f.checkSplitResult("late")
	})
	// A replica that reads slowly does not get the end of the body.
	t.Run("in its body", func(t *testing.T) {
		body := strings.Replace(askWhole, "What", strings.Repeat("long ", 4<<20), 1)
		read := make(chan int, 1)
		p, d := &replica{script: prefills()}, &replica{}
		d.script = func(s *session) {
			if s.n > 1 {
				completes(s)
				return
			}
			time.Sleep(time.Second) // from the end of the prefill at the earliest: the lease is over
			n, _ := io.Copy(io.Discard, s.br)
			read <- int(n)
		}
		f := serveSplit(t, func(o *Options) { o.KVLease, o.BodyBytes = time.Second, 64<<20 }, []*replica{p}, []*replica{d})
		if resp, got := f.post("/v1/chat/completions", body); got != whole {
			t.Errorf("got %d %s", resp.StatusCode, got)
		}
		if n := <-read; n >= len(body) {
			t.Errorf("the replica for decode got %d bytes of the late request", n)
		}
		f.checkSplitResult("late")
	})
}

func TestSplitClientDisconnect(t *testing.T) {
	t.Parallel()
	for name, scripts := range map[string]struct{ prefill, decode func(*session) }{
		"in the prefill request": {hang(), completes},
		"in the decode request":  {prefills(), hang()},
		"after the role":         {prefills(), hang(sseHead, chunk(role))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			closed := make(chan struct{}, 2)
			watched := func(script func(*session)) func(*session) {
				return func(s *session) { script(s); s.closed(); closed <- struct{}{} }
			}
			p, d := &replica{script: watched(scripts.prefill)}, &replica{script: watched(scripts.decode)}
			f := serveSplit(t, withKeys(keyOf("a", nil)), []*replica{p}, []*replica{d})
			ctx, disconnect := context.WithCancel(t.Context())
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(askStream))
			req.Header.Set("Authorization", bearer("a")[1])
			done := make(chan error, 1)
			go func() {
				_, err := f.client.Do(req)
				done <- err
			}()
			last := d
			if name == "in the prefill request" {
				last = p
			}
			eventually(t, "the request is open", func() bool { return len(last.requests()) == 1 })
			disconnect()
			<-done
			f.awaitIdle()
			if name == "in the prefill request" {
				<-closed
				if n := len(d.requests()); n != 0 {
					t.Errorf("the replica for decode got %d requests", n)
				}
			}
			if r := f.lastRequest(1); r.Code != metrics.StatusClientClosed || r.Disconnected != "before_response" || r.Tokens.Prompt == 0 {
				t.Errorf("recorded as %+v", r)
			}
			if used := f.proxy.usage.OfKey("a"); used.PromptTokens == 0 {
				t.Errorf("the key has used %+v", used)
			}
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		p, d := &replica{script: hang()}, &replica{script: completes}
		f := serveSplit(t, nil, []*replica{p}, []*replica{d})
		done := f.background(askStream)
		eventually(t, "the request is open", func() bool { return len(p.requests()) == 1 })
		f.proxy.Activity().Cancel(f.only(activity.FirstToken).Handle)
		if a := <-done; a.status != http.StatusForbidden {
			t.Errorf("got %+v", a)
		}
	})
}

// The first event of a decode request, which has only the role, comes before the outcome of the transfer. Comments do not wait.
func TestRoleOfDecodeRequestWithheld(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	p := &replica{script: prefills()}
	d := &replica{script: func(s *session) {
		s.request()
		s.say(sseHead, chunk(role))
		<-next
		s.say(chunk(hello))
		<-next
		s.say(chunk(world+stop+doneLine), lastChunk)
	}}
	f := serveSplit(t, func(o *Options) { o.Keepalive = 20 * time.Millisecond }, []*replica{p}, []*replica{d})
	req, _ := http.NewRequest(http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(askStream))
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	buf := make([]byte, 3*len(relay.KeepAliveComment))
	if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != strings.Repeat(relay.KeepAliveComment, 3) {
		t.Errorf("before the first token: %q, %v", buf, err)
	}
	next <- struct{}{}
	got := ""
	for !strings.Contains(got, hello) && err == nil {
		var n int
		n, err = resp.Body.Read(buf)
		got += string(buf[:n])
	}
	if rest := strings.ReplaceAll(got, relay.KeepAliveComment, ""); !strings.HasPrefix(rest, role+hello) {
		t.Errorf("then: %q", got)
	}
	next <- struct{}{}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Error(err)
	}
}

func TestUnsplitRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body   string
		change func(*fleet)
		result string
	}{
		"two choices":       {strings.Replace(askWhole, "{", `{"n":2,`, 1), nil, "unsplittable"},
		"params are null":   {strings.Replace(askWhole, "{", `{"kv_transfer_params":null,`, 1), nil, "unsplittable"},
		"no prefill":        {askWhole, func(f *fleet) { f.backends[0].SetState(backends.Down) }, "no_prefill"},
		"no decode":         {askWhole, func(f *fleet) { f.backends[1].SetState(backends.Down) }, "no_decode"},
		"another version":   {askWhole, func(f *fleet) { f.backends[0].SetVersion("0.32.0") }, "no_prefill"},
		"without connector": {askWhole, func(f *fleet) { f.backends[1].SetLoad(&backends.Load{PolledAt: time.Now()}) }, "no_prefill"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, d := &replica{script: completes}, &replica{script: completes}
			f := serveSplit(t, nil, []*replica{p}, []*replica{d})
			if c.change != nil {
				c.change(f)
			}
			if resp, got := f.post("/v1/chat/completions", c.body); got != whole || resp.Header.Get("X-Warmroute-Prefill-Backend") != "" {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			all := append(p.requests(), d.requests()...)
			if len(all) != 1 || all[0].body != c.body {
				t.Errorf("the replicas got %+v", all)
			}
			f.checkSplitResult(c.result)
		})
	}
}

// With keys, the ids that clients choose have a scope, in both requests.
func TestSplitOfChosenID(t *testing.T) {
	p, d := &replica{script: prefills()}, &replica{script: completes}
	f := serveSplit(t, withKeys(keyOf("alice", nil)), []*replica{p}, []*replica{d})
	body := `{"model":"m","stream":false,"request_id":"mine","input":"` + question + `"}`
	if resp, got := f.post("/v1/responses", body, bearer("alice")...); got != whole {
		t.Fatalf("got %d %s", resp.StatusCode, got)
	}
	scoped := strings.Replace(body, `"mine`, `"`+stored.ScopeOf("alice")+"mine", 1)
	if got := p.requests()[0].body; got != strings.Replace(scoped, "{", "{"+askRemote+`"max_output_tokens":1,"store":false,`, 1) {
		t.Errorf("the prefill request was %s", got)
	}
	if got := d.requests()[0].body; got != decodeBody(scoped) {
		t.Errorf("the decode request was %s", got)
	}
}

func TestTransferMember(t *testing.T) {
	for _, c := range []struct{ params, host, want string }{
		{transferParams, "p.internal", transferParams},
		{`{"do_remote_prefill":true,"remote_host":"localhost"}`, "p.internal", `{"do_remote_prefill":true,"remote_host":"p.internal"}`},
		{`{ "remote_host" : "127.0.0.1" , "do_remote_prefill":true}`, "10.0.0.1", `{ "remote_host" : "10.0.0.1" , "do_remote_prefill":true}`},
		{`{"do_remote_prefill":true,"remote_host":"0.0.0.0"}`, "fd00::1", `{"do_remote_prefill":true,"remote_host":"fd00::1"}`},
		{`{"do_remote_prefill":true,"remote_host":"::1"}`, "p", `{"do_remote_prefill":true,"remote_host":"p"}`},
		{`{"do_remote_prefill":true,"remote_host":"localhost"}`, "127.0.0.1", `{"do_remote_prefill":true,"remote_host":"localhost"}`},
		{`{"do_remote_prefill":true,"a":{"remote_host":"localhost"}}`, "p", `{"do_remote_prefill":true,"a":{"remote_host":"localhost"}}`},
		{`{"do_remote_prefill":true,"remote_host":null}`, "p", `{"do_remote_prefill":true,"remote_host":null}`},
	} {
		member, ok := upstream.KVTransferMember([]byte(`{"a":{"kv_transfer_params":{}},"kv_transfer_params":`+c.params+`}`), c.host)
		if want := `"kv_transfer_params":` + c.want + ","; !ok || member != want {
			t.Errorf("of %s: %q, %v", c.host, member, ok)
		}
	}
}

// A list without blocks ends the process of the replica that reads it.
func TestTransferParamsWithoutBlocks(t *testing.T) {
	for _, ids := range []string{"null", "[]", "[[]]", "[[],[]]"} {
		if member, ok := upstream.KVTransferMember([]byte(`{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":`+ids+`}}`),
			"p"); ok {
			t.Errorf("%s: %s", ids, member)
		}
	}
	for _, ids := range []string{"[3]", "[[],[0]]"} {
		if _, ok := upstream.KVTransferMember([]byte(`{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":`+ids+`}}`), "p"); !ok {
			t.Errorf("%s has no blocks", ids)
		}
	}
}

// FuzzTransferMember checks that the member of any response can be inserted into a body.
func FuzzTransferMember(f *testing.F) {
	f.Add([]byte(`{"kv_transfer_params":`+transferParams+`}`), "p")
	f.Add([]byte(`{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"localh\u006fst"}}`), "a\"b")
	f.Add([]byte(`{"kv_transfer_params":{"do_remote_prefill":true,"a":[}}`), "")
	f.Fuzz(func(t *testing.T, response []byte, host string) {
		member, ok := upstream.KVTransferMember(response, host)
		if !ok {
			return
		}
		var body struct {
			Params map[string]any `json:"kv_transfer_params"`
			Model  string         `json:"model"`
		}
		if err := json.Unmarshal([]byte("{"+member+`"model":"m"}`), &body); err != nil || body.Model != "m" || body.Params == nil {
			t.Fatalf("%q: %v", member, err)
		}
	})
}

// Requests that wait for a replica for decode do not count one for prefill as another that could serve them.
func TestDecodeReplicaFailsWhereRequestsWait(t *testing.T) {
	t.Parallel()
	serve := func(t *testing.T, d *mortal) *fleet {
		f := serveSplit(t, func(o *Options) { o.QueueForRoles = true }, []*replica{{script: prefills()}}, []*replica{&d.replica})
		disaggregation := router.DisaggregationSettings{Queue: true, Lease: 30 * time.Second, MinUncachedTokens: 1}
		if err := configureRouter(f.router, router.Settings{Policy: "prefix", PollInterval: time.Hour, Queue: queueForAMinute,
			Disaggregation: disaggregation}); err != nil {
			t.Fatal(err)
		}
		return f
	}
	t.Run("and is back", func(t *testing.T) {
		t.Parallel()
		d := newMortal(dies)
		f := serve(t, d)
		done := f.background(askWhole)
		eventually(t, "it is down", func() bool { return f.backends[1].State() == backends.Down })
		time.Sleep(50 * time.Millisecond)
		f.revive(t, 1, always(answered("200 OK", whole)))
		select {
		case a := <-done:
			if a.body != whole {
				t.Errorf("got %+v", a)
			}
		case <-time.After(failsafe):
			t.Error("the request still waits")
		}
	})
	t.Run("and stays", func(t *testing.T) {
		t.Parallel()
		f := serve(t, newMortal(func(_ *mortal, s *session) { s.request(); s.reset() }))
		select {
		case a := <-f.background(askWhole):
			if a.status != http.StatusBadGateway {
				t.Errorf("got %+v", a)
			}
		case <-time.After(failsafe):
			t.Error("the request still waits")
		}
	})
}

// After three transfers between two replicas have failed in a row, requests are not split between them for a while.
func TestFailingTransfersAreAvoided(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ body, prefill, whole, want string }{
		"whole": {askWhole, answered("500 Internal Server Error", `{"error":{"message":"Internal server error"}}`), answered("200 OK", whole),
			whole},
		"stream": {askStream, streamed(role, dead, doneLine), streamed(role, hello, world, stop, counted, doneLine), goodStream},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, d := &replica{script: prefills()}, &replica{script: func(s *session) {
				for {
					r, ok := s.request()
					if !ok {
						return
					}
					if strings.Contains(r.body, "do_remote_prefill") {
						s.say(c.prefill)
					} else {
						s.say(c.whole)
					}
				}
			}}
			f := serveSplit(t, nil, []*replica{p}, []*replica{d})
			for i := range 5 {
				if resp, got := f.post("/v1/chat/completions", c.body); resp.StatusCode != 200 || got != c.want {
					t.Errorf("request %d: got %d %s", i, resp.StatusCode, got)
				}
			}
			if n := len(p.requests()); n != 3 {
				t.Errorf("%d prefill requests, want 3", n)
			}
		})
	}
}
