package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
)

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
			closed := make(chan struct{})
			first := &replica{script: func(s *session) {
				if _, ok := s.request(); ok {
					s.say(c.says...)
					s.closed()
					close(closed)
				}
			}}
			other := &replica{script: always(answered("200 OK", whole))}
			f := serve(t, func(o *Options) { o.Response = 100 * time.Millisecond }, first, other)
			resp, got := f.post(c.path, c.body)
			if anthropic := strings.HasPrefix(c.path, "/v1/messages"); resp.StatusCode != http.StatusGatewayTimeout ||
				!strings.Contains(got, "timeouts.response") || !anthropic && *refused(t, got).Error.Code != "response_timeout" {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			<-closed
			if len(other.requests()) != 0 {
				t.Error("another backend was asked")
			}
		})
	}
	t.Run("elsewhere with retry.timeouts", func(t *testing.T) {
		f := serve(t, func(o *Options) { o.Response, o.RetryTimeouts = 100*time.Millisecond, true },
			&replica{script: hang()}, &replica{script: always(answered("200 OK", whole))})
		if resp, got := f.post("/v1/chat/completions", askWhole); got != whole {
			t.Errorf("got %d %q", resp.StatusCode, got)
		}
		f.counts(`warmroute_retries_total{reason="response_timeout"} 1`)
	})
	t.Run("of a replica that worked before", func(t *testing.T) {
		never := make(chan struct{})
		defer close(never)
		f := serve(t, func(o *Options) { o.Response = 100 * time.Millisecond },
			&replica{script: hangOn("stop here", answered("200 OK", whole), never)})
		if resp, _ := f.post("/v1/chat/completions", askWhole); resp.StatusCode != http.StatusOK {
			t.Errorf("got %d", resp.StatusCode)
		}
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
				f.router.ObserveLoad(f.backends[0], &backends.Load{ScrapedAt: time.Now(), TokensKnown: true, GenerationTokens: float64(i), QueuesKnown: true, Running: 1})
			})
		},
		"KV usage": func(t *testing.T, f *fleet) {
			during(func(i int) {
				f.router.ObserveLoad(f.backends[0], &backends.Load{ScrapedAt: time.Now(), KVCacheUsage: float64(i%10) / 10})
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
