package proxy

import (
	"net/http"
	"strings"
	"testing"

	"warmroute/backends"
	"warmroute/proxy/upstream"
)

func asInstance(id string) func(*Options) { return func(o *Options) { o.Instance = id } }

func TestInstanceHeader(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, asInstance("me"), r)
	f.post("/v1/chat/completions", askWhole)
	f.post("/v1/chat/completions", askWhole, backends.InstanceHeader, "one, two")
	resp, _ := f.post("/v1/chat/completions", askWhole, "Connection", backends.InstanceHeader, backends.InstanceHeader, "one")
	for i, want := range []string{"me", "one, two, me", "me"} {
		if got := r.requests()[i].Header.Values(backends.InstanceHeader); len(got) != 1 || got[0] != want {
			t.Errorf("request %d came to the replica with %q, want %q", i, got, want)
		}
	}
	if got := resp.Header.Get(backends.InstanceHeader); got != "" {
		t.Errorf("a client that did not ask was told %q", got)
	}
	if resp, _ := f.get("/health"); resp.Header.Get(backends.InstanceHeader) != "" {
		t.Error("a health check that did not ask was told the id")
	}
}

func TestLoopRejected(t *testing.T) {
	for name, passed := range map[string]string{
		"passed here":      "one,me , two",
		"too many proxies": strings.Repeat("other, ", upstream.MaxInstanceBytes/7+1),
	} {
		t.Run(name, func(t *testing.T) {
			r := &replica{script: always(answered("200 OK", whole))}
			f := serve(t, asInstance("me"), r)
			resp, body := f.post("/v1/chat/completions", askWhole, backends.InstanceHeader, passed)
			if resp.StatusCode != http.StatusLoopDetected || !strings.Contains(body, `"code":"loop_detected"`) || len(r.requests()) != 0 {
				t.Errorf("got %d %s, and the replica saw %d requests", resp.StatusCode, body, len(r.requests()))
			}
			f.awaitMetric(`warmroute_requests_total{backend="",code="508",endpoint="/v1/chat/completions",model=""} 1`)
		})
	}
}

// A client can claim that its request has passed a backend: that must not count
// against the backend.
func TestRetryAfterLoopResponse(t *testing.T) {
	loop := &replica{script: always(answered("508 Loop Detected", `{"error":{"code":"loop_detected"}}`))}
	f := serve(t, asInstance("me"), loop, &replica{script: always(answered("200 OK", whole))})
	breakAtOnce(t, f)
	if resp, answer := f.post("/v1/chat/completions", askWhole); answer != whole || resp.Header.Get("X-Warmroute-Attempts") != "2" {
		t.Errorf("got %d %s after %s attempts", resp.StatusCode, answer, resp.Header.Get("X-Warmroute-Attempts"))
	}
	f.awaitMetric(`warmroute_retries_total{reason="loop"} 1`)
	if opens := f.router.Status(f.backends[0]).Opens; opens != 0 {
		t.Error("the breaker opened")
	}
}
