package proxy

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/proxy/apikey"
	"warmroute/router"
)

// routed is one kind of answer, and what its header is to say of the route.
type routed struct {
	name     string
	replicas func() []*replica
	change   func(*Options)
	hold     router.QueueSettings
	before   func(*fleet)
	path     string // "" is chat
	body     string
	status   int
	backend  string // that the header names; "": it names none
	reason   string
	attempts int // 0: not told
	waited   bool
}

func one(script func(*session)) func() []*replica {
	return func() []*replica { return []*replica{{script: script}} }
}

func two(first, second func(*session)) func() []*replica {
	return func() []*replica { return []*replica{{script: first}, {script: second}} }
}

// silent takes requests and answers none.
func silent(s *session) {
	s.request()
	s.until(s.replica.over)
}

// sayingLittle begins a stream and then says nothing until its client is gone.
func sayingLittle(s *session) {
	s.request()
	s.say(sseHead)
	s.closed()
}

func allRouted() []routed {
	refusing := answered("503 Service Unavailable", `{"error":{"message":"busy"}}`)
	long := answered("200 OK", `{"usage":null,"text":"`+strings.Repeat("long ", 300_000)+`"}`)
	down := func(f *fleet) { f.backends[0].SetState(backends.Down) }
	briefly := router.QueueSettings{Requests: 10, NoneReadyTimeout: 30 * time.Millisecond, BusyTimeout: 30 * time.Millisecond}
	return []routed{
		{name: "whole", replicas: one(always(answered("200 OK", whole))), body: askWhole, status: 200, backend: "r0", reason: "only",
			attempts: 1},
		{name: "whole and long", replicas: one(always(long)), body: askWhole, status: 200, backend: "r0", reason: "only", attempts: 1},
		{name: "stream", replicas: one(always(streamed(goodStream))), body: askStream, status: 200, backend: "r0", reason: "only", attempts: 1},
		{name: "no match", replicas: two(always(streamed(goodStream)), always(streamed(goodStream))), body: askStream, status: 200, backend: "r0",
			reason: "no_match", attempts: 1},
		{name: "no prefix", replicas: two(always(answered("200 OK", `{}`)), always(answered("200 OK", `{}`))), path: "/v1/embeddings",
			body: `{"model":"m","input":"x"}`, status: 200, backend: "r0", reason: "load", attempts: 1},
		{name: "retried, whole", replicas: two(once(refusing), always(answered("200 OK", whole))), body: askWhole, status: 200, backend: "r1",
			reason: "only", attempts: 2},
		{name: "retried, stream", replicas: two((*session).reset, always(streamed(goodStream))), body: askStream, status: 200, backend: "r1",
			reason: "only", attempts: 2},
		{name: "a replica's 400", replicas: one(always(answered("400 Bad Request", `{}`))), body: askWhole, status: 400, backend: "r0",
			reason: "only", attempts: 1},
		{name: "a replica's last words", replicas: one(always(answered("500 Internal Server Error", `{}`))), body: askWhole, status: 500,
			backend: "r0", reason: "only", attempts: 1},
		{name: "a stream opened by a comment", replicas: one(sayingLittle), change: func(o *Options) { o.Keepalive = 10 * time.Millisecond },
			body: askStream, status: 200, backend: "r0", reason: "only", attempts: 1},

		{name: "no such model", replicas: one(silent), body: `{"model":"none","messages":[]}`, status: 404, reason: "refused"},
		{name: "no JSON", replicas: one(silent), body: "{", status: 400, reason: "refused"},
		{name: "too large", replicas: one(silent), change: func(o *Options) { o.BodyBytes = 10 }, body: askWhole, status: 413, reason: "refused"},
		{name: "none ready", replicas: one(silent), before: down, body: askWhole, status: 503, reason: "refused"},
		{name: "none ready for too long", replicas: one(silent), before: down, hold: briefly, body: askWhole, status: 503, reason: "queued",
			waited: true},
		{name: "nobody answers", replicas: one((*session).reset), body: askWhole, status: 502, reason: "failed", attempts: 1},
		{name: "no first event in time", replicas: one(silent), change: func(o *Options) {
			o.FirstByte = 20 * time.Millisecond
		}, body: askStream, status: 504, reason: "failed", attempts: 1},
	}
}

// TestRouteHeaders looks at each kind of answer as everybody
// gets it who may know, and as those do who may not.
func TestRouteHeaders(t *testing.T) {
	t.Parallel()
	for _, c := range allRouted() {
		for _, who := range []struct {
			name    string
			told    bool
			change  func(*Options)
			headers []string
		}{
			{"anybody", true, func(*Options) {}, nil},
			{"a key that may know", true, withKeys(keyOf("trusted", func(k *apikey.Key) { k.RouteHeaders = true })), bearer("trusted")},
			{"a key that may not", false, withKeys(keyOf("plain", nil)), bearer("plain")},
			{"anybody, headers off", false, func(o *Options) { o.RouteHeaders = false }, nil},
		} {
			t.Run(c.name+" to "+who.name, func(t *testing.T) {
				t.Parallel()
				f := serveWithQueue(t, c.hold, func(o *Options) {
					if c.change != nil {
						c.change(o)
					}
					who.change(o)
				}, c.replicas()...)
				if c.before != nil {
					c.before(f)
				}
				resp := f.open(t, cmp.Or(c.path, "/v1/chat/completions"), c.body, who.headers...).resp
				if resp.StatusCode != c.status {
					t.Fatalf("got %d %v", resp.StatusCode, resp.Header)
				}
				if who.told {
					c.told(t, resp.Header)
				} else if names := routeNames(resp.Header); len(names) > 0 {
					t.Errorf("it tells %v", names)
				}
			})
		}
	}
}

// told checks what the header says of the route.
func (c *routed) told(t *testing.T, h http.Header) {
	t.Helper()
	attempts := ""
	if c.attempts > 0 {
		attempts = strconv.Itoa(c.attempts)
	}
	for name, want := range map[string]string{"X-Warmroute-Backend": c.backend, "X-Warmroute-Reason": c.reason,
		"X-Warmroute-Attempts": attempts} {
		if got := strings.Join(h[name], ","); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	var of, prompt int
	_, err := fmt.Sscanf(h.Get("X-Warmroute-Predicted-Tokens"), "%d/%d", &of, &prompt)
	if matched := err == nil; matched != (c.backend != "") || of > prompt {
		t.Errorf("the match is %q", h.Get("X-Warmroute-Predicted-Tokens"))
	}
	if waited := h.Get("X-Warmroute-Queue-Ms") != ""; waited != c.waited {
		t.Errorf("it waited %q ms", h.Get("X-Warmroute-Queue-Ms"))
	}
}

// routeNames are the headers that tell of a route.
func routeNames(h http.Header) []string {
	return slices.DeleteFunc(slices.Collect(maps.Keys(h)), func(name string) bool { return !strings.HasPrefix(name, "X-Warmroute-") })
}

// TestNoRouteHeadersWithoutKey is for answers to those whom nobody knows.
func TestNoRouteHeadersWithoutKey(t *testing.T) {
	trusted := keyOf("trusted", func(k *apikey.Key) { k.RouteHeaders = true })
	f := serve(t, withKeys(trusted), &replica{script: always(answered("200 OK", whole))})
	for name, headers := range map[string][]string{"no key": nil, "a wrong one": bearer("nobody")} {
		if resp, _ := f.post("/v1/chat/completions", askWhole, headers...); resp.StatusCode != 401 || len(routeNames(resp.Header)) > 0 {
			t.Errorf("%s: %d, %v", name, resp.StatusCode, resp.Header)
		}
	}
	full := serve(t, func(o *Options) { withKeys(trusted)(o); o.InFlight = 0 }, &replica{script: always(answered("200 OK", whole))})
	if resp, _ := full.post("/v1/chat/completions", askWhole, bearer("trusted")...); resp.StatusCode != 503 ||
		resp.Header.Get("X-Warmroute-Reason") != reasonRefused {
		t.Errorf("without a place: %d, %v", resp.StatusCode, resp.Header)
	}
	if resp, _ := full.post("/v1/chat/completions", askWhole, bearer("nobody")...); resp.StatusCode != 401 ||
		len(routeNames(resp.Header)) > 0 {
		t.Errorf("without a place and a key: %d, %v", resp.StatusCode, resp.Header)
	}
	open := serve(t, func(o *Options) { o.InFlight = 0 }, &replica{script: always(answered("200 OK", whole))})
	if resp, _ := open.post("/v1/chat/completions", askWhole); resp.Header.Get("X-Warmroute-Reason") != reasonRefused {
		t.Errorf("where there are no keys: %d, %v", resp.StatusCode, resp.Header)
	}
}
