package admin

import (
	"strings"
	"testing"
	"time"

	"warmroute/usage"
)

func TestUsage(t *testing.T) {
	a := askable(t)
	a.handler.Usage.Record("a", "m", "", time.Date(2026, 11, 27, 12, 30, 0, 0, time.UTC),
		&usage.Counts{Requests: 2, PromptTokens: 10, CachedTokens: 4})
	for _, c := range []struct {
		path, accept string
		status       int
		says         string
	}{
		{"/api/usage", "", 200, `"rows":[{"key":"a","model":"m","requests":2,"errors":0,"prompt_tokens":10,"cached_tokens":4,`},
		{"/api/usage", "", 200, `"in_flight":{"":0},"since_start":true`},
		{"/api/usage?by=model", "", 200, `"rows":[{"model":"m","requests":2,`},
		{"/api/usage?from=2026-11-28", "", 200, `"rows":[]`},
		{"/api/usage?format=csv", "", 200, "key,model,requests,"},
		{"/api/usage?by=key", "text/csv", 200, "\na,,2,0,10,4,"},
		{"/api/usage?by=user", "", 400, "is not key, model, model_name or several"},
		{"/api/usage?until=2026-11-28", "", 400, "the query parameters are from, to, by, format"},
		{"/api/usage?by=key&by=model", "", 400, "each at most once"},
		{"/api/usage?format=xml", "", 400, "format is neither json nor csv"},
	} {
		status, body := a.send("GET", c.path, "", "Accept", c.accept)
		if status != c.status || !strings.Contains(body, c.says) {
			t.Errorf("%s: got %d %s, want %d and %q", c.path, status, body, c.status, c.says)
		}
	}
}
