package proxy

import (
	"testing"

	"warmroute/proxy/keys"
)

// A replica can be another proxy, with rates and routes of its own.
func TestAReplicasRatesAndRoutesAreNotTheKeys(t *testing.T) {
	answer := answered("200 OK", whole, "x-ratelimit-limit-requests: 7", "X-RATELIMIT-LIMIT-TOKENS: 8", "X-Warmroute-Backend: inner", "x-warmroute-held-ms: 9", "X-Other: 1")
	refusal := "HTTP/1.1 400 Bad Request\r\nX-RateLimit-Limit-Requests: 7\r\nX-Warmroute-Reason: inner\r\nContent-Length: 2\r\n\r\n{}"
	for name, said := range map[string]string{"an answer": answer, "a refusal": refusal} {
		keyed := serve(t, withKeys(keyOf("plain", nil), keyOf("slow", func(k *keys.Key) { k.RequestsPerMinute, k.RouteHeaders = 100, true })), &replica{script: always(said)})
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
