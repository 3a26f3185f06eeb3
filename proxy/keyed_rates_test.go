package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"warmroute/proxy/apikey"
)

func TestRatesOfAKey(t *testing.T) {
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
		if e := refused(t, answer); resp.StatusCode != 429 || *e.Error.Code != "rate_limit_exceeded" || !strings.Contains(answer, says) || resp.Header.Get("Retry-After") == "" {
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
	over(resp, answer, "2 requests a minute")
	header(resp, "Remaining-Requests", "0")

	if resp, answer = f.post("/v1/chat/completions", askWhole, bearer("small")...); resp.StatusCode != 200 {
		t.Fatalf("got %d %s", resp.StatusCode, answer)
	}
	header(resp, "Limit-Tokens", "1000")
	f.counts(`warmroute_key_completion_tokens_total{key="small"} 30000`)
	f.counts(`warmroute_key_prompt_tokens_total{key="small"} 12`)
	resp, answer = f.post("/v1/chat/completions", askWhole, bearer("small")...)
	over(resp, answer, "1000 tokens a minute")
	if resp.Header.Get("Retry-After") < "17" { // 30 minutes of debt
		t.Errorf("Retry-After %s", resp.Header.Get("Retry-After"))
	}
	f.counts(`warmroute_key_refusals_total{key="slow",reason="requests"} 1`)
	f.counts(`warmroute_key_refusals_total{key="small",reason="tokens"} 1`)
}

func TestRequestsOfAKeyAtOnce(t *testing.T) {
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
	if resp, answer := f.post("/v1/chat/completions", askWhole, bearer("one")...); resp.StatusCode != 429 || !strings.Contains(answer, "1 requests at once") {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	f.counts(`warmroute_key_in_flight{key="one"} 1`)
	close(end)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	f.counts(`warmroute_key_in_flight{key="one"} 0`)
	// No usage was told: one token an event, and the prompt as predicted.
	f.counts(`warmroute_key_completion_tokens_total{key="one"} 4`)
	f.counts(fmt.Sprintf(`warmroute_key_prompt_tokens_total{key="one"} %d`, f.promptTokens(askStream, bearer("one")...)))
}

// promptTokens is what the router takes the prompt of a body for.
func (f *fleet) promptTokens(body string, headers ...string) int {
	r, fault := f.understood("/v1/chat/completions", body, headers...)
	if fault != nil {
		f.t.Fatal(fault.message)
	}
	return r.Bytes / bytesPerToken
}

func TestWhatNoEngineWorkedOnIsNotCharged(t *testing.T) {
	f := serve(t, withKeys(keyOf("a", func(k *apikey.Key) { k.TokensPerMinute = 1000 })), &replica{script: always(answered("400 Bad Request", `{"error":{"message":"no"}}`))})
	for range 20 { // 260 tokens each
		if resp, answer := f.post("/v1/chat/completions", askWhole, bearer("a")...); resp.StatusCode != 400 {
			t.Fatalf("got %d %s", resp.StatusCode, answer)
		}
	}
	f.counts(`warmroute_key_prompt_tokens_total{key="a"} 0`)
}
