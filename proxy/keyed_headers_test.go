package proxy

import (
	"testing"

	"warmroute/proxy/apikey"
)

func TestRouteHeadersGoToKeysThatAllowThem(t *testing.T) {
	f := serve(t, withKeys(keyOf("plain", nil), keyOf("trusted", func(k *apikey.Key) { k.RouteHeaders = true })), &replica{script: always(answered("200 OK", whole))})
	for name, want := range map[string]bool{"plain": false, "trusted": true} {
		resp, _ := f.post("/v1/chat/completions", askWhole, bearer(name)...)
		for _, h := range routeHeaders {
			if (resp.Header.Get(h) != "") != want {
				t.Errorf("%s: %s is %q", name, h, resp.Header.Get(h))
			}
		}
		if resp.Header.Get("X-Request-Id") == "" {
			t.Error("no X-Request-Id")
		}
	}
}

func TestAReplicasWordOnWebPagesIsNotOurs(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole, "access-control-allow-origin: *"))})
	resp, _ := f.post("/v1/chat/completions", askWhole, "Origin", "http://page.example")
	if got := resp.Header.Get("Access-Control-Allow-Origin"); got != "" {
		t.Errorf("any page may read the answer: %q", got)
	}
	if resp, _ := f.raw("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://page.example\r\nAccess-Control-Request-Method: POST\r\n\r\n"); resp.StatusCode != 405 {
		t.Errorf("a preflight got %d", resp.StatusCode)
	}
}

// A replica can be another proxy, with rates and routes of its own.
func TestAReplicasRatesAndRoutesAreNotTheKeys(t *testing.T) {
	answer := answered("200 OK", whole, "x-ratelimit-limit-requests: 7", "X-RATELIMIT-LIMIT-TOKENS: 8", "X-Warmroute-Backend: inner", "x-warmroute-held-ms: 9", "X-Other: 1")
	refusal := "HTTP/1.1 400 Bad Request\r\nX-RateLimit-Limit-Requests: 7\r\nX-Warmroute-Reason: inner\r\nContent-Length: 2\r\n\r\n{}"
	for name, said := range map[string]string{"an answer": answer, "a refusal": refusal} {
		keyed := serve(t, withKeys(keyOf("plain", nil), keyOf("slow", func(k *apikey.Key) { k.RequestsPerMinute, k.RouteHeaders = 100, true })), &replica{script: always(said)})
		open := serve(t, nil, &replica{script: always(said)})
		silent := serve(t, func(o *Options) { o.RouteHeaders = false }, &replica{script: always(said)})
		for _, c := range []struct {
			who             string
			f               *fleet
			headers         []string
			requests, where string
		}{
			{"plain", keyed, bearer("plain"), "", ""},
			{"slow", keyed, bearer("slow"), "100", "r0"},
			{"nobody in particular", open, nil, "7", "r0"},
			{"nobody is told", silent, nil, "7", ""},
		} {
			resp, _ := c.f.post("/v1/chat/completions", askWhole, c.headers...)
			h := resp.Header
			if h.Get("X-Ratelimit-Limit-Requests") != c.requests || h.Get("X-Warmroute-Backend") != c.where || h.Get("X-Warmroute-Held-Ms") != "" || h.Get("X-Warmroute-Reason") == "inner" {
				t.Errorf("%s to %s: %v", name, c.who, h)
			}
			if name == "an answer" && h.Get("X-Other") != "1" {
				t.Errorf("%s has lost another header: %v", c.who, h)
			}
		}
	}
}
