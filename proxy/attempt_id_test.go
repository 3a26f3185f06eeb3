package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"warmroute/proxy/upstream"
	"warmroute/router/responseindex"
)

// outOfStep answers the first request twice, and from then on each one of its connection with the
// response to the one before, until the proxy closes that connection.
func outOfStep(respond func(r seen) string) func(*session) {
	var begun atomic.Bool
	return func(s *session) {
		previous, ok := s.request()
		if !ok { // a slow machine gave up connecting
			return
		}
		inStep := begun.Swap(true)
		s.say(respond(previous))
		for {
			next, ok := s.request()
			if !ok {
				return
			}
			if inStep {
				previous = next
			}
			s.say(respond(previous))
			previous = next
		}
	}
}

// No client gets another's response, also when a replica sends one too many.
func TestResponseToAnotherRequest(t *testing.T) {
	t.Parallel()
	const ask = `{"model":"m","prompt":"x","input":"x","max_tokens":1,"token_ids":[1],"messages":[{"role":"user","content":"x"}]`
	event := func(text string) string { return streamed("data: " + text + "\n\n") }
	for name, c := range map[string]struct {
		path, body string
		respond    func(id string) string
	}{
		"chat": {"/v1/chat/completions", ask + `}`, func(id string) string {
			return answered("200 OK", `{"id":"chatcmpl-`+id+`","choices":[{}]}`)
		}},
		"chat, too long to buffer": {"/v1/chat/completions", ask + `}`, func(id string) string {
			return answered("200 OK", `{"id":"chatcmpl-`+id+`","choices":[{}],"padding":"`+strings.Repeat("x", 2<<20)+`"}`)
		}},
		"chat stream": {"/v1/chat/completions", ask + `,"stream":true}`, func(id string) string {
			return event(`{"id":"chatcmpl-` + id + `","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}`)
		}},
		"chat stream, behind comments": {"/v1/chat/completions", ask + `,"stream":true}`, func(id string) string {
			return streamed(": x\n\n", `data: {"id":"chatcmpl-`+id+`","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}`+
				"\n\n")
		}},
		"chat with an id that all ids contain": {"/v1/chat/completions", ask + `,"request_id":"c"}`, func(id string) string {
			return answered("200 OK", `{"id":"chatcmpl-`+id+`","choices":[{}]}`)
		}},
		"chat stream with an id that all ids contain": {"/v1/chat/completions", ask + `,"stream":true,"request_id":"-wr"}`,
			func(id string) string {
				return event(`{"id":"chatcmpl-` + id + `","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}`)
			}},
		"response with an id that all ids contain": {"/v1/responses", ask + `,"request_id":"c"}`, func(id string) string {
			return answered("200 OK", `{"id":"chatcmpl-`+id+`","output":[]}`)
		}},
		"embedding with an id that all ids contain": {"/v1/embeddings", ask + `,"request_id":"client-"}`, func(id string) string {
			return answered("200 OK", `{"id":"embd-`+id+`","data":[]}`)
		}},
		"completion": {"/v1/completions", ask + `}`, func(id string) string {
			return answered("200 OK", `{"id":"cmpl-`+id+`","choices":[{}]}`)
		}},
		"message": {"/v1/messages", ask + `}`, func(id string) string {
			return answered("200 OK", `{"id":"chatcmpl-`+id+`","type":"message","stop_reason":"end_turn"}`)
		}},
		"message stream": {"/v1/messages", ask + `,"stream":true}`, func(id string) string {
			return event(`{"type":"message_start","message":{"id":"chatcmpl-` + id + `"}}` + "\n\n" +
				`data: {"type":"content_block_delta","delta":{"text":"x"}}` + "\n\n" + `data: {"type":"message_stop"}`)
		}},
		"tokens": {"/inference/v1/generate", ask + `}`, func(id string) string {
			return answered("200 OK", `{"request_id":"generate-tokens-`+id+`","choices":[{}]}`)
		}},
		"tokens stream": {"/inference/v1/generate", ask + `,"stream":true}`, func(id string) string {
			return event(`{"request_id":"generate-tokens-` + id + `","choices":[{"index":0,"token_ids":[1],"finish_reason":"stop"}]}`)
		}},
		"embedding": {"/v1/embeddings", ask + `}`, func(id string) string {
			return answered("200 OK", `{"id":"embd-`+id+`","data":[]}`)
		}},
		"response, named by a header": {"/v1/responses", ask + `}`, func(id string) string {
			return answered("200 OK", `{"id":"resp_1","output":[]}`, "x-request-id: "+id)
		}},
		"response stream, named by a header": {"/v1/responses", ask + `,"stream":true}`, func(id string) string {
			return strings.Replace(event(`{"type":"response.completed","response":{"id":"resp_1"}}`), "\r\n", "\r\nx-request-id: "+id+"\r\n", 1)
		}},
		"response without a body, named by a header": {"/tokenize", ask + `}`, func(id string) string {
			return answered("200 OK", "", "x-request-id: "+id)
		}},
		"error, named by a header": {"/v1/chat/completions", ask + `}`, func(id string) string {
			return answered("400 Bad Request", `{"error":{"message":"`+id+`"}}`, "x-request-id: "+id)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, nil, &replica{script: outOfStep(func(r seen) string {
				// The client's id is in a header that reaches it too.
				whole := c.respond(r.Header.Get("X-Request-Id"))
				return strings.Replace(whole, "\r\n", "\r\nx-for: "+r.Header.Get("X-Client")+"\r\n", 1)
			})})
			breakAtOnce(t, f)
			for i := range 4 {
				id := fmt.Sprint("client-", i)
				resp, body := f.post(c.path, c.body, "X-Request-Id", id, "X-Client", id)
				if got := resp.Header.Get("X-For"); got != id {
					t.Errorf("%s got the response to %q: status %d, %.200s", id, got, resp.StatusCode, body)
				}
				f.awaitIdle()
			}
			f.awaitMetric(`warmroute_backend_wrong_responses_total{backend="r0"} 1`)
			f.awaitMetric(`warmroute_retries_total{reason="wrong_response"} 1`)
			f.awaitMetric(`warmroute_backend_breaker_opens_total{backend="r0"} 0`)
			if !strings.Contains(f.log.String(), "reason=wrong_response") {
				t.Error("it was not logged")
			}
		})
	}
}

// A client that names an earlier response gets it only where replicas name responses by what it sends.
func TestResponseToAnotherRequestNamedByClient(t *testing.T) {
	t.Parallel()
	const ask = `{"model":"m","input":"x","max_tokens":1,"messages":[{"role":"user","content":"x"}]`
	for name, c := range map[string]struct {
		path          string
		names, partly bool // request_id is the id of the other response, or all but its last digit
	}{
		"message":                          {"/v1/messages", true, false},
		"extra path":                       {"/extra", true, false},
		"token count":                      {"/tokenize", true, false},
		"chat, part of the token":          {"/v1/chat/completions", false, true},
		"response, part of the token":      {"/v1/responses", false, true},
		"stored response of another id":    {"/v1/responses/resp_1/cancel", false, false},
		"message, and a part of the token": {"/v1/messages", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, func(o *Options) {
				o.ExtraPaths, o.Responses = []string{"/extra"}, responseindex.New(responseindex.Settings{MaxEntries: 10, TTL: time.Hour}, time.Now, nil)
			}, &replica{script: outOfStep(func(r seen) string {
				return answered("200 OK", `{"id":"chatcmpl-`+r.Header.Get("X-Request-Id")+`","choices":[{}],"type":"message","stop_reason":"end_turn"}`,
					"x-for: "+r.Header.Get("X-Client"))
			})})
			f.proxy.responses.Index.Add("resp_1", responseindex.Entry{Backend: f.backends[0].Address()})
			_, first := f.post("/v1/chat/completions", askWhole, "X-Client", "first")
			f.awaitIdle()
			body, id := ask, gjson.Get(first, "id").Str
			switch {
			case c.names:
				body += `,"request_id":"` + id + `"`
			case c.partly:
				body += `,"request_id":"` + id[:len(id)-1] + `"`
			}
			if resp, answer := f.post(c.path, body+"}", "X-Client", "second"); resp.Header.Get("X-For") != "second" {
				t.Errorf("got the response to %q: status %d, %.200s", resp.Header.Get("X-For"), resp.StatusCode, answer)
			}
			f.awaitMetric(`warmroute_backend_wrong_responses_total{backend="r0"} 1`)
		})
	}
}

// A client cannot make the response to its own request seem to be another's.
func TestClientRepeatsEarlierResponseID(t *testing.T) {
	echo := func(s *session) {
		for {
			r, ok := s.request()
			if !ok {
				return
			}
			id := gjson.Get(r.body, "request_id").Str
			if id == "" {
				id = r.Header.Get("X-Request-Id")
			}
			if r.URL.Path != "/v1/responses" {
				id = "chatcmpl-" + id
			}
			s.say(answered("200 OK", `{"id":"`+id+`","object":"response","status":"completed","output":[],"choices":[{}]}`))
		}
	}
	f := serve(t, nil, &replica{script: echo})
	_, first := f.post("/v1/chat/completions", askWhole)
	earlier := gjson.Get(first, "id").Str
	if !strings.Contains(earlier, upstream.TokenMark) {
		t.Fatalf("id %q has no token", earlier)
	}
	if resp, _ := f.post("/v1/chat/completions", askWhole, "X-Request-Id", earlier); resp.StatusCode != http.StatusOK ||
		resp.Header.Get("X-Warmroute-Attempts") != "1" {
		t.Errorf("as the request's id: status %d", resp.StatusCode)
	}
	if resp, _ := f.post("/v1/chat/completions", withMember(askWhole, `"request_id":"`+earlier+`"`)); resp.StatusCode != http.StatusOK ||
		resp.Header.Get("X-Warmroute-Attempts") != "1" {
		t.Errorf("in the body: status %d", resp.StatusCode)
	}
	if resp, _ := f.post("/v1/responses", `{"model":"m","input":"x","request_id":"`+earlier+`"}`); resp.StatusCode != http.StatusOK ||
		resp.Header.Get("X-Warmroute-Attempts") != "1" {
		t.Errorf("as the response's id: status %d", resp.StatusCode)
	}
	f.awaitMetric(`warmroute_backend_wrong_responses_total{backend="r0"} 0`)
}

// Each attempt has an id of its own, which begins with the request's.
func TestAttemptsHaveDistinctIDs(t *testing.T) {
	failing := &replica{script: always(answered("503 Service Unavailable", `{}`))}
	good := &replica{script: always(answered("200 OK", whole))}
	f := serve(t, nil, failing, good)
	long := strings.Repeat("x", upstream.MaxRequestIDBytes)
	for _, id := range []string{"mine", long} {
		f.post("/v1/chat/completions", askWhole, "X-Request-Id", id)
	}
	seenIDs := map[string]bool{}
	for i, r := range append(failing.requests(), good.requests()...) {
		id := r.Header.Get("X-Request-Id")
		before, token, found := strings.Cut(id, upstream.TokenMark)
		if seenIDs[id] || !found || !f.proxy.tokens.IsOwn(token) || !upstream.IsPlainID(id) {
			t.Errorf("attempt %d: id %q", i, id)
		}
		if before != "mine" && !strings.HasSuffix(long, before) {
			t.Errorf("attempt %d: id %q does not begin with the request's", i, id)
		}
		seenIDs[id] = true
	}
}

func newToken(t upstream.AttemptTokens) string { return t.SetRequestID(http.Header{}, "id") }

func TestIDNamesAnotherAttempt(t *testing.T) {
	ours, others := upstream.NewAttemptTokens(), upstream.NewAttemptTokens()
	this, another, foreign := newToken(ours), newToken(ours), newToken(others)
	changed := strings.Map(func(c rune) rune {
		if c == '0' {
			return '1'
		}
		return '0'
	}, another)
	for _, c := range []struct {
		id   string
		want bool
	}{
		{"", false},
		{"chatcmpl-0123456789abcdef", false},
		{"chatcmpl-x-wr" + this, false},
		{"chatcmpl-x-wr" + another, true},
		{"chatcmpl-x-wr" + another + "-0", true},
		{"chatcmpl-x-wr" + foreign, false},
		{"chatcmpl-x-wr" + foreign + "-wr" + another, true},
		{"chatcmpl-x-wr" + another + "-wr" + foreign, true},
		{"chatcmpl-x-wr" + another + "-wr" + this, false},
		{"chatcmpl-x-wr" + this + "-wr" + another, false},
		{"chatcmpl-x-wr-wr" + another, true},
		{"chatcmpl-x-wr" + another[:upstream.TokenChars-1], false},
		{"chatcmpl-x-wr" + strings.ToUpper(another), strings.ToUpper(another) == another},
		{"chatcmpl-x-wr" + changed, false},
		{strings.Repeat("x", upstream.MaxResponseIDBytes) + "-wr" + another, false},
	} {
		if got := ours.FindOtherAttempts(c.id, this) != nil; got != c.want {
			t.Errorf("%q: %v, want %v", c.id, got, c.want)
		}
	}
}

func FuzzIDNamesAnotherAttempt(f *testing.F) {
	tokens := upstream.NewAttemptTokens()
	this, another := newToken(tokens), newToken(tokens)
	f.Add("chatcmpl-", "-0")
	f.Add("-wr-wr", "-wr0123456789abcdef01234567")
	f.Fuzz(func(t *testing.T, before, after string) {
		if tokens.FindOtherAttempts(before+after, this) != nil {
			t.Errorf("%q names an attempt", before+after)
		}
		if id := before + upstream.TokenMark + this + after; tokens.FindOtherAttempts(id, this) != nil && len(id) <= upstream.MaxResponseIDBytes {
			t.Errorf("%q names another attempt", id)
		}
		if id := before + upstream.TokenMark + another + after; tokens.FindOtherAttempts(id, this) == nil &&
			len(id) <= upstream.MaxResponseIDBytes {
			t.Errorf("%q names no other attempt", id)
		}
	})
}
