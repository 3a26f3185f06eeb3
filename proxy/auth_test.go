package proxy

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/proxy/apikey"
	"warmroute/proxy/upstream"
)

// secretOf is the key of that name, as long as keys are.
func secretOf(name string) string { return "the-secret-of-" + name + "-0123456789" }

func keyOf(name string, change func(*apikey.Key)) apikey.Key {
	k := apikey.Key{Name: name, Hashes: []apikey.Hash{apikey.HashOf(secretOf(name))}}
	if change != nil {
		change(&k)
	}
	return k
}

// withKeys is an option of serve.
func withKeys(list ...apikey.Key) func(*Options) {
	return func(o *Options) { o.Keys = apikey.New(list) }
}

func bearer(name string) []string { return []string{"Authorization", "Bearer " + secretOf(name)} }

func TestInvalidKeyRejected(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("a", nil), keyOf("late", func(k *apikey.Key) { k.Expires = time.Now().Add(-time.Hour) })), r)
	for _, c := range []struct {
		name   string
		path   string
		header []string
		status int
		says   string
	}{
		{"none", "/v1/chat/completions", nil, 401, "Authorization: Bearer KEY"},
		{"unknown", "/v1/chat/completions", bearer("b"), 401, "invalid API key"},
		{"expired", "/v1/chat/completions", bearer("late"), 401, "expired"},
		{"its hash", "/v1/chat/completions", []string{"Authorization", fmt.Sprintf("Bearer %x", apikey.HashOf(secretOf("a")))}, 401,
			"invalid API key"},
		{"a password", "/v1/chat/completions", []string{"Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte(":"+secretOf("a")))},
			401, "Bearer"},
		{"Anthropic's header elsewhere", "/v1/chat/completions", []string{"X-Api-Key", secretOf("a")}, 401, "Bearer"},
		{"valid", "/v1/chat/completions", bearer("a"), 200, "Hello"},
		{"Anthropic's header", "/v1/messages", []string{"X-Api-Key", secretOf("a")}, 200, "Hello"},
		{"a token for Anthropic's path", "/v1/messages", bearer("a"), 200, "Hello"},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, answer := f.post(c.path, askWhole, c.header...)
			if resp.StatusCode != c.status || !strings.Contains(answer, c.says) {
				t.Fatalf("got %d %s", resp.StatusCode, answer)
			}
			if c.status == 200 {
				return
			}
			if e := refused(t, answer); *e.Error.Code != "invalid_api_key" || resp.Header.Get("Www-Authenticate") != "Bearer" ||
				strings.Contains(answer, "the-secret") {
				t.Errorf("got %v %s", resp.Header, answer)
			}
		})
	}
	if n := len(r.requests()); n != 3 {
		t.Errorf("the replica saw %d requests, want 3", n)
	}
	for path, status := range map[string]int{
		"/livez": 200, "/readyz": 200, "/health": 200, "/v1/models": 401, "/v1/models/m": 401, "/version": 401, "/none": 404,
	} {
		if resp, _ := f.get(path); resp.StatusCode != status {
			t.Errorf("%s: got %d, want %d", path, resp.StatusCode, status)
		}
	}
	f.awaitMetric(`warmroute_unauthorized_total{reason="expired"} 1`)
	f.awaitMetric(`warmroute_unauthorized_total{reason="unknown"} 2`)
	f.awaitMetric(`warmroute_key_requests_total{key="a"} 3`)
}

// Whatever else a client presents, a valid key counts. Of two, that in Authorization does.
func TestKeyBesideAnotherSecret(t *testing.T) {
	r := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("a", nil), keyOf("b", nil), keyOf("late", func(k *apikey.Key) { k.Expires = time.Now().Add(-time.Hour) })), r)
	const token = "sk-ant-oat01-a-token-of-the-client-itself"
	for i, c := range []struct {
		name   string
		path   string
		key    string // that counts; empty: none
		header []string
	}{
		{"a token that is not a key", "/v1/messages", "a", []string{"Authorization", "Bearer " + token, "X-Api-Key", secretOf("a")}},
		{"of another endpoint", "/v1/messages/count_tokens", "a", []string{"Authorization", "Bearer " + token, "X-Api-Key", secretOf("a")}},
		{"a password", "/v1/messages", "a", []string{"Authorization", "Basic aTph", "X-Api-Key", secretOf("a")}},
		{"two tokens", "/v1/messages", "a", []string{"Authorization", "Bearer " + token, "Authorization", "Bearer " + secretOf("b"), "X-Api-Key",
			secretOf("a")}},
		{"a key that has expired", "/v1/messages", "a", []string{"Authorization", bearer("late")[1], "X-Api-Key", secretOf("a")}},
		{"two keys", "/v1/messages", "b", []string{"Authorization", bearer("b")[1], "X-Api-Key", secretOf("a")}},
		{"a key in Authorization", "/v1/messages", "b", []string{"Authorization", bearer("b")[1], "X-Api-Key", token}},
		{"none is a key", "/v1/messages", "", []string{"Authorization", "Bearer " + token, "X-Api-Key", token}},
		{"not Anthropic's endpoint", "/v1/chat/completions", "", []string{"Authorization", "Bearer " + token, "X-Api-Key", secretOf("a")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			req, err := http.NewRequest(http.MethodPost, f.url+c.path+"?api_key="+token+"&x=1", strings.NewReader(askWhole))
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(c.header); i += 2 {
				req.Header.Add(c.header[i], c.header[i+1])
			}
			presented := []string{strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer "), req.Header.Get("X-Api-Key")}
			req.Header.Set("X-Copy", presented[0])
			req.Header.Set("X-Request-Id", presented[1])
			resp, err := f.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if want := map[bool]int{true: 200, false: 401}[c.key != ""]; resp.StatusCode != want {
				t.Fatalf("status %d, want %d", resp.StatusCode, want)
			}
			if c.key == "" {
				return
			}
			f.awaitMetric(fmt.Sprintf(`warmroute_key_in_flight{key=%q} 0`, c.key))
			seen := r.requests()
			if len(seen) != i+1 {
				t.Fatalf("the replica saw %d requests", len(seen))
			}
			var all strings.Builder
			seen[i].Header.Write(&all)
			all.WriteString(seen[i].RequestURI)
			if h := seen[i].Header; h["Authorization"] != nil || h["X-Api-Key"] != nil || strings.Contains(all.String(), presented[1]) ||
				h["X-Copy"] != nil && apikey.Bearer(req.Header) != "" {
				t.Errorf("the replica saw\n%s", all.String())
			}
		})
	}
	for name, want := range map[string]int{"a": 5, "b": 2} {
		f.awaitMetric(fmt.Sprintf(`warmroute_key_requests_total{key=%q} %d`, name, want))
	}
	if strings.Contains(f.log.String(), secretOf("a")) {
		t.Error("a key is in the log")
	}
}

func TestInvalidKeyRejectedBeforeBody(t *testing.T) {
	t.Parallel()
	f := serve(t, withKeys(keyOf("a", nil)), &replica{})
	resp, _ := f.raw("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 100000\r\n\r\n")
	if resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("got %d", resp.StatusCode)
	}
}

func TestNoKeysConfigured(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole))})
	for _, header := range [][]string{nil, bearer("a"), {"Authorization", "nonsense"}} {
		if resp, answer := f.post("/v1/chat/completions", askWhole, header...); resp.StatusCode != 200 ||
			resp.Header.Get("X-Warmroute-Backend") == "" {
			t.Errorf("%q: got %d %s", header, resp.StatusCode, answer)
		}
	}
	if strings.Contains(f.exposition(), "warmroute_key_") {
		t.Error("metrics of keys without any")
	}
}

func TestRouteHeadersPerKey(t *testing.T) {
	f := serve(t, withKeys(keyOf("plain", nil), keyOf("trusted", func(k *apikey.Key) {
		k.RouteHeaders = true
	})), &replica{script: always(answered("200 OK", whole))})
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

func TestReplicaCORSHeaderDropped(t *testing.T) {
	f := serve(t, nil, &replica{script: always(answered("200 OK", whole, "access-control-allow-origin: *"))})
	resp, _ := f.post("/v1/chat/completions", askWhole, "Origin", "http://page.example")
	if got := resp.Header.Get("Access-Control-Allow-Origin"); got != "" {
		t.Errorf("any page may read the answer: %q", got)
	}
	if resp, _ := f.raw("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://page.example\r\nAccess-Control-Request-Method: " +
		"POST\r\n\r\n"); resp.StatusCode != 405 {
		t.Errorf("a preflight got %d", resp.StatusCode)
	}
}

// A replica can be another proxy, with rates and routes of its own.
func TestReplicaRateHeadersDropped(t *testing.T) {
	answer := answered("200 OK", whole, "x-ratelimit-limit-requests: 7", "X-RATELIMIT-LIMIT-TOKENS: 8", "X-Warmroute-Backend: inner",
		"x-warmroute-held-ms: 9", "X-Other: 1")
	refusal := "HTTP/1.1 400 Bad Request\r\nX-RateLimit-Limit-Requests: 7\r\nX-Warmroute-Reason: inner\r\nContent-Length: 2\r\n\r\n{}"
	for name, said := range map[string]string{"an answer": answer, "a refusal": refusal} {
		keyed := serve(t, withKeys(keyOf("plain", nil), keyOf("slow", func(k *apikey.Key) {
			k.RequestsPerMinute, k.RouteHeaders = 100, true
		})), &replica{script: always(said)})
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
			if h.Get("X-Ratelimit-Limit-Requests") != c.requests || h.Get("X-Warmroute-Backend") != c.where || h.Get("X-Warmroute-Queue-Ms") != "" ||
				h.Get("X-Warmroute-Reason") == "inner" {
				t.Errorf("%s to %s: %v", name, c.who, h)
			}
			if name == "an answer" && h.Get("X-Other") != "1" {
				t.Errorf("%s has lost another header: %v", c.who, h)
			}
		}
	}
}

func TestKeyModels(t *testing.T) {
	a := &replica{models: []string{"m", "lora<m"}, script: always(answered("200 OK", whole))}
	b := &replica{models: []string{"n", "hidden<n"}, script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(
		keyOf("all", nil),
		keyOf("some", func(k *apikey.Key) { k.Models = []string{"lora", "n", "nowhere"} }),
		keyOf("adapter", func(k *apikey.Key) { k.Models = []string{"lora"} }),
		keyOf("none", func(k *apikey.Key) { k.Models = []string{"nowhere"} }),
	), a, b)
	get := func(name, path string) (int, string) {
		t.Helper()
		req, _ := http.NewRequest(http.MethodGet, f.url+path, nil)
		req.Header.Set("Authorization", bearer(name)[1])
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var answer strings.Builder
		resp.Write(&answer)
		return resp.StatusCode, answer.String()
	}
	for name, want := range map[string][4]bool{"all": {true, true, true, true}, "some": {false, true, true, false},
		"adapter": {false, true, false, false}, "none": {}} {
		_, list := get(name, "/v1/models")
		for i, id := range []string{"m", "lora", "n", "hidden"} {
			if strings.Contains(list, `"id": "`+id+`"`) != want[i] {
				t.Errorf("%s sees %s: %v", name, id, !want[i])
			}
			status, _ := get(name, "/v1/models/"+id)
			resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"m"`, `"`+id+`"`, 1), bearer(name)...)
			_, unknown := f.post("/v1/chat/completions", strings.Replace(askWhole, `"m"`, `"unknown"`, 1), bearer(name)...)
			if want[i] != (status == 200) || want[i] != (resp.StatusCode == 200) {
				t.Errorf("%s asks for %s: %d and %d %s", name, id, status, resp.StatusCode, answer)
			}
			if !want[i] && strings.ReplaceAll(answer, "`"+id+"`", "`unknown`") != unknown {
				t.Errorf("%s can tell %s from an unknown model:\n%s\n%s", name, id, answer, unknown)
			}
		}
	}
	// What a request means that names none.
	for name, want := range map[string]int{"all": 400, "some": 200, "adapter": 400, "none": 404} {
		before := len(b.requests())
		resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"model":"m",`, ``, 1), bearer(name)...)
		if resp.StatusCode != want || want == 200 && len(b.requests()) == before {
			t.Errorf("%s names no model: got %d %s", name, resp.StatusCode, answer)
		}
	}
}

func TestAmbiguousFormWithModelList(t *testing.T) {
	r := &replica{models: []string{"m", "lora<m"}, script: always(answered("200 OK", whole))}
	f := serve(t, withKeys(keyOf("all", nil), keyOf("some", func(k *apikey.Key) { k.Models = []string{"m"} })), r)
	part := "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n"
	for body, want := range map[string]int{
		part + "m\r\n--x--":               200,
		part + "lora\r\n--x--":            404,
		part + "m\r\n":                    400,
		"--x\r\nbroken\r\n" + part + "m":  400,
		part + "m\r\n" + part + "lora":    400,
		"--y\r\nthe wrong boundary--y--":  400,
		part + "m\r\n--x--\r\n" + "after": 200, // behind the end
	} {
		resp, answer, err := f.try("/v1/audio/transcriptions", body, append(bearer("some"), "Content-Type", "multipart/form-data; boundary=x")...)
		if err != nil || resp.StatusCode != want {
			t.Errorf("%q: got %d %s, want %d", body, resp.StatusCode, answer, want)
		}
	}
	resp, _, err := f.try("/v1/audio/transcriptions", "no form", append(bearer("all"), "Content-Type", "text/plain")...)
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("for all models: got %v, %v", resp, err)
	}
}

func TestKeyModelAliases(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) {
		k.Models = []string{"alias"}
	})), &replica{script: always(answered("200 OK", whole))})
	f.backends[0].SetModels([]backends.Model{{ID: "m", Root: "r", Card: []byte(`{"id":"m"}`)},
		{ID: "alias", Root: "r", Card: []byte(`{"id":"alias"}`)}})
	if resp, answer := f.post("/v1/chat/completions", strings.Replace(askWhole, `"model":"m",`, ``, 1),
		bearer("a")...); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	f.awaitMetric(`warmroute_requests_total{backend="r0",code="200",endpoint="/v1/chat/completions",model="alias"} 1`)
}

func TestKeyRateLimits(t *testing.T) {
	f := serve(t, withKeys(
		keyOf("slow", func(k *apikey.Key) { k.RequestsPerMinute = 2 }),
		keyOf("small", func(k *apikey.Key) { k.TokensPerMinute = 1000 }),
		keyOf("one", func(k *apikey.Key) { k.Concurrency = 1 }),
	), &replica{script: always(answered("200 OK", strings.Replace(whole, `"completion_tokens":3`, `"completion_tokens":30000`, 1)))})
	header := func(resp *http.Response, name, want string) {
		t.Helper()
		if got := resp.Header.Get("X-Ratelimit-" + name); got != want && (want != "*" || got == "") {
			t.Errorf("X-Ratelimit-%s is %q, want %q", name, got, want)
		}
	}
	over := func(resp *http.Response, answer, says string) {
		t.Helper()
		if e := refused(t, answer); resp.StatusCode != 429 || *e.Error.Code != "rate_limit_exceeded" || !strings.Contains(answer, says) ||
			resp.Header.Get("Retry-After") == "" {
			t.Errorf("got %d %v %s", resp.StatusCode, resp.Header, answer)
		}
	}
	for i := range 2 {
		resp, _ := f.post("/v1/chat/completions", askWhole, bearer("slow")...)
		header(resp, "Limit-Requests", "2")
		header(resp, "Remaining-Requests", fmt.Sprint(1-i))
		header(resp, "Reset-Requests", "*")
		header(resp, "Limit-Tokens", "")
	}
	resp, answer := f.post("/v1/chat/completions", askWhole, bearer("slow")...)
	over(resp, answer, "2 requests per minute")
	header(resp, "Remaining-Requests", "0")

	if resp, answer = f.post("/v1/chat/completions", askWhole, bearer("small")...); resp.StatusCode != 200 {
		t.Fatalf("got %d %s", resp.StatusCode, answer)
	}
	header(resp, "Limit-Tokens", "1000")
	f.awaitMetric(`warmroute_key_output_tokens_total{key="small"} 30000`)
	f.awaitMetric(`warmroute_key_prompt_tokens_total{key="small"} 12`)
	resp, answer = f.post("/v1/chat/completions", askWhole, bearer("small")...)
	over(resp, answer, "1000 tokens per minute")
	if resp.Header.Get("Retry-After") < "17" { // 30 minutes of debt
		t.Errorf("Retry-After %s", resp.Header.Get("Retry-After"))
	}
	f.awaitMetric(`warmroute_key_refusals_total{key="slow",reason="requests"} 1`)
	f.awaitMetric(`warmroute_key_refusals_total{key="small",reason="tokens"} 1`)
}

func TestKeyConcurrencyLimit(t *testing.T) {
	begun, end := make(chan struct{}), make(chan struct{})
	f := serve(t, withKeys(keyOf("one", func(k *apikey.Key) { k.Concurrency = 1 }), keyOf("other", nil)), &replica{script: func(s *session) {
		if _, ok := s.request(); ok {
			begun <- struct{}{}
			<-end
			s.say(streamed(role, hello, world, stop, doneLine))
		}
	}})
	first := make(chan error, 1)
	go func() {
		resp, _, err := f.try("/v1/chat/completions", askStream, bearer("one")...)
		if err == nil && resp.StatusCode != 200 {
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		first <- err
	}()
	<-begun
	if resp, answer := f.post("/v1/chat/completions", askWhole, bearer("one")...); resp.StatusCode != 429 ||
		!strings.Contains(answer, "1 concurrent requests") {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	f.awaitMetric(`warmroute_key_in_flight{key="one"} 1`)
	close(end)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	f.awaitMetric(`warmroute_key_in_flight{key="one"} 0`)
	// No usage was told: one token an event, and the prompt as predicted.
	f.awaitMetric(`warmroute_key_output_tokens_total{key="one"} 4`)
	f.awaitMetric(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key="one"} %d`, f.promptTokens(askStream, bearer("one")...)))
}

// promptTokens is what the router takes the prompt of a body for.
func (f *fleet) promptTokens(body string, headers ...string) int {
	r, fault := f.understood("/v1/chat/completions", body, headers...)
	if fault != nil {
		f.t.Fatal(fault.Message)
	}
	return r.Bytes / bytesPerToken
}

func TestFailedRequestsNotCharged(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) {
		k.TokensPerMinute = 1000
	})), &replica{script: always(answered("400 Bad Request", `{"error":{"message":"no"}}`))})
	for range 20 { // 260 tokens each
		if resp, answer := f.post("/v1/chat/completions", askWhole, bearer("a")...); resp.StatusCode != 400 {
			t.Fatalf("got %d %s", resp.StatusCode, answer)
		}
	}
	f.awaitMetric(`warmroute_key_prompt_tokens_total{key="a"} 0`)
}

func TestKeyPriorityIsMinimum(t *testing.T) {
	f := serve(t, nil, &replica{})
	priority := func(class int, header ...string) int {
		t.Helper()
		f.proxy.keys.Replace([]apikey.Key{keyOf("a", func(k *apikey.Key) { k.Priority = class })})
		r, fault := f.understood("/v1/chat/completions", askWhole, append(bearer("a"), header...)...)
		if fault != nil {
			t.Fatal(fault.Message)
		}
		return r.Priority
	}
	for _, c := range []struct {
		class  int
		header []string
		want   int
	}{
		{0, nil, 0}, {50, nil, 50}, {-10, nil, -10}, {50, []string{upstream.PriorityHeader, "0"}, 50},
		{50, []string{upstream.PriorityHeader, "60"}, 60}, {-10, []string{upstream.PriorityHeader, "0"}, 0},
	} {
		if got := priority(c.class, c.header...); got != c.want {
			t.Errorf("class %d, header %q: %d, want %d", c.class, c.header, got, c.want)
		}
	}
}

func TestTenantFromKeyName(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) {
		k.Hashes = append(k.Hashes, apikey.HashOf(secretOf("a's next")))
	}), keyOf("b", nil)), &replica{})
	tenant := func(name string) uint64 {
		t.Helper()
		r, fault := f.understood("/v1/chat/completions", askWhole, bearer(name)...)
		if fault != nil {
			t.Fatal(fault.Message)
		}
		return r.Tenant
	}
	if a := tenant("a"); a == 0 || a != tenant("a's next") || a == tenant("b") {
		t.Error("keys do not tell tenants apart, or the two secrets of one do")
	}
}

// Users divide the share of the key, or of the address, that they come with.
func TestUserHeaders(t *testing.T) {
	users := func(o *Options) { o.UserHeaders = []string{"X-User", "X-User-Id"} }
	withKey := serve(t, func(o *Options) { withKeys(keyOf("a", nil), keyOf("b", nil))(o); users(o) }, &replica{})
	open := serve(t, users, &replica{})
	tenant := func(f *fleet, headers ...string) (share, part uint64) {
		t.Helper()
		r, fault := f.understood("/v1/chat/completions", askWhole, headers...)
		if fault != nil {
			t.Fatal(fault.Message)
		}
		const partBit = 64 - 6
		return r.Tenant % (1 << partBit), r.Tenant >> partBit
	}
	for _, c := range []struct {
		name      string
		one, two  []string
		sameShare bool
		samePart  bool
	}{
		{"user and none", append(bearer("a"), "X-User", "u"), bearer("a"), true, false},
		{"two users", append(bearer("a"), "X-User", "u"), append(bearer("a"), "X-User", "v"), true, false},
		{"one user", append(bearer("a"), "X-User", "u"), append(bearer("a"), "X-User", "u"), true, true},
		{"first header", append(bearer("a"), "X-User", "u", "X-User-Id", "v"), append(bearer("a"), "X-User-Id", "u"), true, true},
		{"user of two keys", append(bearer("a"), "X-User", "u"), append(bearer("b"), "X-User", "u"), false, true},
	} {
		oneShare, onePart := tenant(withKey, c.one...)
		twoShare, twoPart := tenant(withKey, c.two...)
		if oneShare == twoShare != c.sameShare || onePart == twoPart != c.samePart {
			t.Errorf("%s: share %x, part %d and share %x, part %d", c.name, oneShare, onePart, twoShare, twoPart)
		}
	}
	openShare, openPart := tenant(open)
	if share, part := tenant(open, "X-User", "u"); share != openShare || part == openPart {
		t.Error("without keys a user has no part of the share of its address")
	}
}

func TestIsolateTenants(t *testing.T) {
	for _, isolate := range []bool{false, true} {
		f := serve(t, func(o *Options) {
			withKeys(keyOf("a", func(k *apikey.Key) { k.RouteHeaders = true }), keyOf("b", func(k *apikey.Key) { k.RouteHeaders = true }))(o)
			o.IsolateTenants = isolate
		}, &replica{script: always(streamed(role, hello, world, stop, doneLine))})
		matched := func(name string) bool {
			t.Helper()
			resp, _ := f.post("/v1/chat/completions", askStream, bearer(name)...)
			return !strings.HasPrefix(resp.Header.Get("X-Warmroute-Predicted-Tokens"), "0/")
		}
		if matched("a") || !matched("a") {
			t.Error("a tenant's own prompts do not match")
		}
		if matched("b") == isolate {
			t.Errorf("isolated: %v, and another's prompt matches: %v", isolate, !isolate)
		}
		if blocks, want := f.blocks()[0], map[bool]int{false: questionBlocks, true: 2 * questionBlocks}[isolate]; blocks != want {
			t.Errorf("%d blocks, want %d", blocks, want)
		}
	}
}

// Counting tokens has a limit of its own, in bytes, and uses none of the tokens.
func TestTokenizeBytesLimit(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("x", 30_000)
	for path, body := range map[string]string{
		"/tokenize":                 `{"model":"m","prompt":"` + text + `"}`,
		"/detokenize":               `{"model":"m","tokens":[1` + strings.Repeat(",100", len(text)/4) + `]}`,
		"/v1/messages/count_tokens": `{"model":"m","messages":[{"role":"user","content":"` + text + `"}]}`,
	} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			f := serve(t, withKeys(
				keyOf("own", func(k *apikey.Key) { k.TokensPerMinute, k.TokenizeBytesPerMinute = 1000, 70_000 }),
				keyOf("derived", func(k *apikey.Key) { k.TokensPerMinute = 1000 }),
				keyOf("free", nil),
			), &replica{script: always(answered("200 OK", `{"count":1,"input_tokens":1}`))})
			for key, accepted := range map[string]int{"own": 2, "derived": 1, "free": 9} {
				for i := range min(accepted+1, 9) {
					resp, answer := f.post(path, body, bearer(key)...)
					if want := i < accepted; (resp.StatusCode == http.StatusOK) != want {
						t.Fatalf("%s: request %d: status %d, %s", key, i, resp.StatusCode, answer)
					} else if !want && (resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" ||
						!strings.Contains(answer, "bytes per minute")) {
						t.Errorf("%s: status %d, Retry-After %q, %s", key, resp.StatusCode, resp.Header.Get("Retry-After"), answer)
					}
				}
				f.awaitMetric(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key="%s"} 0`, key))
				if key == "free" {
					continue
				}
				f.awaitMetric(fmt.Sprintf(`warmroute_key_refusals_total{key="%s",reason="tokenize_bytes"} 1`, key))
				if _, tokens := f.proxy.keys.FindName(key).Rates(); tokens.Remaining != 1000 {
					t.Errorf("%s: %d tokens remain", key, tokens.Remaining)
				}
			}
			// One above the bytes of a minute needs a full bucket, or it could never be sent.
			g := serve(t, withKeys(keyOf("small", func(k *apikey.Key) {
				k.TokenizeBytesPerMinute = 1000
			})), &replica{script: always(answered("200 OK", `{}`))})
			for i, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
				if resp, _ := g.post(path, body, bearer("small")...); resp.StatusCode != want {
					t.Errorf("request %d above the limit: status %d", i, resp.StatusCode)
				}
			}
		})
	}
}
