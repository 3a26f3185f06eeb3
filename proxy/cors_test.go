package proxy

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"warmroute/proxy/apikey"
)

const pageOrigin = "https://chat.example"

// sendFromPage sends a request of a page of an origin.
func (f *fleet) sendFromPage(t *testing.T, method, path, origin, body string, headers ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequest(method, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Origin", origin)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp
}

// Every response to a page of a listed origin can be read by it: of a replica, streamed or not, and of the
// proxy's own.
func TestCORS(t *testing.T) {
	const secret = "the-key-of-a-page"
	replicaCORS := []string{"Access-Control-Allow-Origin: *", "Access-Control-Allow-Credentials: true",
		"Access-Control-Expose-Headers: X-Other", "Vary: Origin, Accept-Encoding"}
	r := &replica{script: func(s *session) {
		for {
			seen, ok := s.request()
			switch {
			case !ok:
				return
			case strings.Contains(string(seen.body), `"stream":true`):
				s.say(strings.Replace(sseHead, "\r\n\r\n", "\r\n"+strings.Join(replicaCORS, "\r\n")+"\r\n\r\n", 1), chunk(role), chunk(hello),
					chunk(stop), chunk(doneLine), lastChunk)
			default:
				s.say(answered("200 OK", whole, replicaCORS...))
			}
		}
	}}
	withKeys := func(o *Options) {
		o.CORSOrigins = []string{pageOrigin}
		o.Keys = apikey.New([]apikey.Key{{Name: "page", Hashes: []apikey.Hash{apikey.HashOf(secret)}, RequestsPerMinute: 4, RouteHeaders: true}})
		o.RouteHeaders = true
	}
	f := serve(t, withKeys, r)
	for _, c := range []struct {
		name, method, path, key, body string
		status                        int
	}{
		{"response", "POST", "/v1/chat/completions", secret, asked("a", false), 200},
		{"stream", "POST", "/v1/chat/completions", secret, asked("b", true), 200},
		{"no key", "POST", "/v1/chat/completions", "", asked("c", false), 401},
		{"invalid body", "POST", "/v1/chat/completions", secret, "{", 400},
		{"unknown model", "POST", "/v1/chat/completions", secret, `{"model":"other","messages":[]}`, 404},
		{"rate limit", "POST", "/v1/chat/completions", secret, asked("d", false), 429},
		{"unknown path", "GET", "/v1/other", "", "", 404},
		{"unknown method", "DELETE", "/v1/chat/completions", "", "", 405},
		{"models", "GET", "/v1/models", secret, "", 200},
		{"liveness", "GET", "/livez", "", "", 200},
	} {
		for origin, allowed := range map[string]bool{pageOrigin: true, "https://other.example": false} {
			if !allowed && c.status < 400 && c.method == "POST" || !allowed && c.key != "" && c.method == "POST" {
				continue // for the rate limit
			}
			resp := f.sendFromPage(t, c.method, c.path, origin, c.body, "Authorization", "Bearer "+c.key)
			h := resp.Header
			if resp.StatusCode != c.status {
				t.Errorf("%s: status %d, want %d", c.name, resp.StatusCode, c.status)
			}
			want := ""
			if allowed {
				want = origin
				for _, name := range []string{"X-Request-Id", "Retry-After", "X-Ratelimit-Remaining-Requests", "X-Warmroute-Backend"} {
					if !strings.Contains(h.Get("Access-Control-Expose-Headers"), name) {
						t.Errorf("%s: %s is not exposed", c.name, name)
					}
				}
			}
			if got := h["Access-Control-Allow-Origin"]; strings.Join(got, " ") != want {
				t.Errorf("%s: %s may read it: %q", c.name, origin, got)
			}
			if h["Access-Control-Allow-Credentials"] != nil || strings.Contains(h.Get("Access-Control-Expose-Headers"), "X-Other") {
				t.Errorf("%s: the replica's headers: %v", c.name, h)
			}
			if n := strings.Count(strings.Join(h["Vary"], ","), "Origin"); n != 1 {
				t.Errorf("%s: Vary %q", c.name, h["Vary"])
			}
			if allowed && c.status == 200 && c.method == "POST" && !slices.Contains(h["Vary"], "Accept-Encoding") {
				t.Errorf("%s: the replica's Vary is lost: %q", c.name, h["Vary"])
			}
		}
	}
	for _, seen := range r.requests() {
		if seen.Header.Get("Origin") != "" {
			t.Error("the replica got the page's origin")
		}
	}
}

func TestCORSPreflight(t *testing.T) {
	withKeys := func(o *Options) {
		o.CORSOrigins = []string{pageOrigin}
		o.Keys = apikey.New([]apikey.Key{{Name: "page", Hashes: []apikey.Hash{{1}}}})
	}
	f := serve(t, withKeys, &replica{script: always(answered("200 OK", whole))})
	ask := func(origin string) *http.Response {
		return f.sendFromPage(t, "OPTIONS", "/v1/chat/completions", origin, "",
			"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization,content-type,x-stainless-os")
	}
	resp := ask(pageOrigin)
	if h := resp.Header; resp.StatusCode != 204 || h.Get("Access-Control-Allow-Origin") != pageOrigin ||
		h.Get("Access-Control-Allow-Methods") != "POST" ||
		h.Get("Access-Control-Allow-Headers") != "authorization,content-type,x-stainless-os" || h.Get("Access-Control-Max-Age") != "7200" ||
		h["Access-Control-Allow-Credentials"] != nil || !strings.Contains(h.Get("Vary"), "Origin") {
		t.Errorf("listed origin: status %d, %v", resp.StatusCode, h)
	}
	if resp := ask("https://other.example"); resp.Header["Access-Control-Allow-Origin"] != nil {
		t.Errorf("other origin: %v", resp.Header)
	}
	f.proxy.Configure(Settings{CORSOrigins: []string{"*"}})
	if resp := ask("https://other.example"); resp.StatusCode != 204 || resp.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("all origins: status %d, %v", resp.StatusCode, resp.Header)
	}
	f.proxy.Configure(Settings{})
	if resp := ask(pageOrigin); resp.StatusCode != 405 || resp.Header["Access-Control-Allow-Origin"] != nil {
		t.Errorf("no origin: status %d, %v", resp.StatusCode, resp.Header)
	}
}
