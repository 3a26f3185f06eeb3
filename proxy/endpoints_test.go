package proxy

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
)

const (
	pathNotFound = `{"detail":"Not Found"}`
	disabled403  = `{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",` +
		`"type":"PermissionDeniedError","param":null,"code":403}}`
)

func TestMissingEndpointTriesAnother(t *testing.T) {
	for _, c := range []struct{ name, body string }{{"whole", askWhole}, {"stream", askStream}} {
		t.Run(c.name, func(t *testing.T) {
			good := answered("200 OK", whole)
			if c.body == askStream {
				good = streamed(goodStream)
			}
			lacking, disabled, serving := &replica{script: always(answered("404 Not Found", pathNotFound))},
				&replica{script: always(answered("403 Forbidden", disabled403))}, &replica{script: always(good)}
			f := serve(t, func(o *Options) { o.Attempts, o.Retry = 1, RetrySettings{} }, lacking, disabled, serving)
			for range 3 {
				if resp, got := f.post("/v1/chat/completions", c.body); resp.StatusCode != http.StatusOK {
					t.Errorf("got %d %s", resp.StatusCode, got)
				}
			}
			if a, b, c := len(lacking.requests()), len(disabled.requests()), serving.requests(); a != 1 || b != 1 || len(c) != 3 {
				t.Errorf("%d, %d and %d requests", a, b, len(c))
			}
			if sent := serving.requests()[0].body; sent != c.body {
				t.Errorf("the body became %s", sent)
			}
			f.awaitMetric(`warmroute_retries_total{reason="endpoint_missing"} 2`)
			for i, want := range [][]string{{"/v1/chat/completions"}, {"/v1/chat/completions"}, nil} {
				if got := f.proxy.MissingEndpoints(f.backends[i], time.Now()); !slices.Equal(got, want) {
					t.Errorf("backend %d lacks %q", i, got)
				}
			}
			if resp, _ := f.post("/v1/embeddings", bodyFor("/v1/embeddings")); resp.StatusCode != http.StatusOK || len(lacking.requests()) != 2 {
				t.Errorf("another endpoint: %d", resp.StatusCode)
			}
		})
	}
}

func TestMissingEndpointEverywhere(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions": `"code":"endpoint_not_served"`,
		"/v1/messages":         `"type":"not_found_error"`,
	} {
		t.Run(path, func(t *testing.T) {
			a, b := &replica{script: always(answered("404 Not Found", ""))}, &replica{script: always(answered("404 Not Found", pathNotFound))}
			f := serveWithQueue(t, queueForAMinute, nil, a, b)
			if resp, got := f.post(path, bodyFor(path)); resp.StatusCode != http.StatusNotFound || got != pathNotFound {
				t.Errorf("got %d %q, want the response of the last replica", resp.StatusCode, got)
			}
			if resp, got := f.post(path, bodyFor(path)); resp.StatusCode != http.StatusNotFound || got != "" {
				t.Errorf("the first replica's empty response could be about the first request: got %d %q", resp.StatusCode, got)
			}
			resp, got := f.post(path, bodyFor(path))
			if resp.StatusCode != http.StatusNotFound || !strings.Contains(got, want) ||
				!strings.Contains(got, "no replica of the model serves "+path) {
				t.Errorf("got %d %s", resp.StatusCode, got)
			}
			if len(a.requests()) != 2 || len(b.requests()) != 1 {
				t.Errorf("%d and %d requests", len(a.requests()), len(b.requests()))
			}
		})
	}
}

// What replicas, or what is before them, answer to one request with an empty 404 says nothing about others of its endpoint.
// It is tried on each replica once, for a server with ranks too, and its client gets the 404.
func TestEmptyNotFoundIsAboutItsRequest(t *testing.T) {
	refusing := func(refused bool, good string) func(*session) {
		return func(s *session) {
			for r, ok := s.request(); ok; r, ok = s.request() {
				if refused && strings.Contains(r.body, `"odd"`) {
					s.say(answered("404 Not Found", ""))
				} else {
					s.say(good)
				}
			}
		}
	}
	for name, c := range map[string]struct {
		path, body, good string
		ranks            int // of the first replica; 0: it has none
	}{
		"chat":       {"/v1/chat/completions", askWhole, answered("200 OK", whole), 0},
		"stream":     {"/v1/chat/completions", askStream, streamed(goodStream), 0},
		"ranks":      {"/v1/chat/completions", askWhole, answered("200 OK", whole), 3},
		"embeddings": {"/v1/embeddings", bodyFor("/v1/embeddings"), answered("200 OK", `{"data":[]}`), 0},
		"extra path": {"/x", `{"model":"m"}`, answered("200 OK", "{}"), 0},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := &replica{script: refusing(true, c.good)}, &replica{script: refusing(true, c.good)}
			f := serveWithQueue(t, queueForAMinute, withExtraPaths("/x"), a, b)
			if c.ranks > 0 {
				var ranks []*backends.Backend
				server := f.backends[0]
				for i := range c.ranks {
					ranks = append(ranks, backends.NewRank(server, i, i))
				}
				f.replaceByRanks(server, ranks...)
			}
			odd := strings.Replace(c.body, "{", `{"user":"odd",`, 1)
			ask := func(body string, status int) {
				t.Helper()
				if resp, got := f.post(c.path, body); resp.StatusCode != status || status == http.StatusNotFound && got != "" {
					t.Errorf("got %d %q, want %d", resp.StatusCode, got, status)
				}
			}
			ask(odd, http.StatusNotFound)
			if len(a.requests()) != 1 || len(b.requests()) != 1 {
				t.Errorf("%d and %d requests", len(a.requests()), len(b.requests()))
			}
			ask(c.body, http.StatusOK)
			for range 2 {
				ask(odd, http.StatusNotFound)
			}
			ask(c.body, http.StatusOK)
		})
	}
	t.Run("another has it", func(t *testing.T) {
		good := answered("200 OK", whole)
		f := serve(t, nil, &replica{script: refusing(true, good)}, &replica{script: refusing(false, good)})
		for range 3 {
			if resp, got := f.post("/v1/chat/completions", strings.Replace(askWhole, "{", `{"user":"odd",`, 1)); resp.StatusCode != http.StatusOK {
				t.Errorf("got %d %q", resp.StatusCode, got)
			}
		}
	})
}

// A replica that is down may serve the endpoint, so the request waits for it.
func TestMissingEndpointAwaitsUnreadyBackend(t *testing.T) {
	lacking, serving := &replica{script: always(answered("404 Not Found", pathNotFound))}, &replica{script: always(answered("200 OK", whole))}
	f := serveWithQueue(t, queueForAMinute, nil, lacking, serving)
	f.backends[1].SetState(backends.Down)
	done := f.background(askWhole)
	eventually(t, "the request waits", func() bool { return f.router.CountWaiting() == 1 })
	f.backends[1].SetState(backends.Ready)
	f.router.BackendStateChanged(f.backends[1])
	if got := <-done; got.body != whole {
		t.Errorf("got %+v", got)
	}
	if len(lacking.requests()) != 1 {
		t.Errorf("%d requests where the endpoint is missing", len(lacking.requests()))
	}
}

// The client has the header of a stream, because the first backend was silent.
func TestMissingEndpointAfterKeepAlive(t *testing.T) {
	t.Parallel()
	heard := make(chan struct{})
	silent := func(s *session) {
		s.request()
		s.say(sseHead)
		s.commentUntil(heard)
	}
	serving := &replica{script: always(streamed(goodStream))}
	f := serve(t, func(o *Options) {
		o.Keepalive = 20 * time.Millisecond
	}, &replica{script: silent}, &replica{script: always(answered("404 Not Found", pathNotFound))}, serving)
	r := f.open(t, "/v1/chat/completions", askStream)
	r.to(comment)
	close(heard)
	if got := r.rest(); got != goodStream {
		t.Errorf("got %q", got)
	}
}
